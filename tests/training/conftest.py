"""One tiny model, one way to make a replica of it, and batches made of integers, the same on all machines; kernels in C, and none."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from farflung.compression import kernels
from farflung.training.inner import InnerConfig
from farflung.training.model import ModelConfig
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

MakeReplica = Callable[..., Replica]
MakeBatch = Callable[[int], npt.NDArray[np.int64]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["python", "native"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With C, and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        if request.param == "native":
            if kernels.find_compiler() is None:
                pytest.skip("no C compiler")
            folder: Path = tmp_path_factory.mktemp("kernels")
            assert kernels.prepare(folder).native
        yield


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(vocab_size=48, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, seq_len=24)


@pytest.fixture
def make_replica(config: ModelConfig) -> MakeReplica:
    def make(*, outer: Nesterov | None = None, chunk_bytes: int = 4096, **runtime: Any) -> Replica:
        schedule = Schedule(peak=6e-3, warmup_steps=5, total_steps=100)
        outer = outer or Nesterov(lr=0.7, momentum=0.5)
        chosen = Runtime(**{"microbatch": 4, **runtime})
        inner = InnerConfig(schedule=schedule)
        return Replica(config, inner, outer, seed=7, runtime=chosen, chunk_bytes=chunk_bytes)

    return make


@pytest.fixture
def batch(config: ModelConfig) -> MakeBatch:
    """Batch number k: 4 sequences, each counting in steps of its own with a bump now and then."""

    def make(number: int) -> npt.NDArray[np.int64]:
        rows = number * 4 + np.arange(4)[:, None]
        places = np.arange(config.seq_len + 1)[None, :]
        tokens = rows * 5 + places * (1 + rows % 3) + (places * places * rows) % 7 // 6
        return (tokens % config.vocab_size).astype(np.int64)

    return make
