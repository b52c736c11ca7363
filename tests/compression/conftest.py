"""The C kernels, built once for all tests of codecs."""

import shutil
from ctypes import CDLL

import pytest

from farflung.compression import kernels


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL | None:
    """The kernels, or None without a compiler: then what stands in for them is compared with itself."""
    if not any(map(shutil.which, kernels.COMPILERS)):
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        prepared = kernels.prepare(tmp_path_factory.mktemp("cache"))
        assert prepared.native, prepared.reason
        return kernels._library
