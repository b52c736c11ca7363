"""Whatever bytes arrive, C does nothing undefined with them: the kernels, built with a sanitizer that ends the process which does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.compression import kernels

SANITIZED = (*kernels.FLAGS, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")

LOADED = """
import ctypes, random, struct, sys
from pathlib import Path
import torch
from farflung.compression import kernels
from farflung.compression.codec import CodecError
from farflung.compression.registry import parse_codec
from farflung.compression.wire import HEADER_NBYTES

kernels.FLAGS = tuple(sys.argv[2:])
prepared = kernels.prepare(Path(sys.argv[1]))
assert prepared.native, prepared.reason
"""

ANYTHING = """
SPECS = ["int8(block=16)", "int4(block=16)", *(f"{name}(bits={bits})" for name in ("deadzone", "trellis") for bits in (0.05, 1.0, 4.0))]
draw, generator = random.Random(0), torch.Generator().manual_seed(0)

def vectors(numel):
    x = torch.randn(numel + 1, generator=generator)[1:]
    yield x
    yield x ** 9
    yield torch.zeros(numel)
    yield torch.randint(-2**31, 2**31 - 1, (numel,), generator=generator, dtype=torch.int32).view(torch.float32)

def damaged(payload):
    yield payload
    for _ in range(8):
        bad = bytearray(payload)
        at = min(HEADER_NBYTES + draw.choice([draw.randrange(16), draw.randrange(len(bad))]), len(bad))
        some = draw.choice([b"", bytes([draw.randrange(32)]), b"\\xff" * 4, bytes(64), draw.randbytes(64), draw.randbytes(len(bad))])
        bad[at : at + draw.choice([0, len(some)])] = some
        bad = bad[: draw.choice([len(payload), len(bad)])]
        struct.pack_into("<Q", bad, 24, len(bad) - HEADER_NBYTES)
        yield bytes(bad)

decoded = refused = 0
for spec in SPECS:
    codec = parse_codec(spec)
    for numel in (0, 1, 7, 17, 65, 4095, 4097, 9001):
        for x in vectors(numel):
            try:
                payload = bytes(codec.encode(x))
            except CodecError:
                continue
            for bad in damaged(payload):
                moved = memoryview(b"-" * draw.randrange(8) + bad)[-len(bad) :]
                try:
                    codec.decode(moved, numel)
                    codec.decode_add_(moved, torch.ones(numel), 0.3)
                except CodecError:
                    refused += 1
                else:
                    decoded += 1
print(decoded, refused)
"""

PLANTED = """
memory, scales = torch.zeros(20), torch.zeros(1, dtype=torch.bfloat16)
where = memory.data_ptr() + 1  # no address of a float
encode = kernels.find("int8_encode", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
encode(where, 16, 16, scales.data_ptr(), memory.data_ptr())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sanitized kernels lie."""
    if not any(map(shutil.which, kernels.COMPILERS)):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_library", None)
        patch.setattr(kernels, "FLAGS", SANITIZED)
        prepared = kernels.prepare(folder)
    if not prepared.native:
        pytest.skip(f"the compiler has no sanitizer of undefined behaviour: {prepared.reason}")
    return folder


def run(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", LOADED + program, str(folder), *SANITIZED]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_no_bytes_and_no_floats_are_undefined(folder: Path) -> None:
    done = run(ANYTHING, folder)
    assert done.returncode == 0, done.stderr
    decoded, refused = map(int, done.stdout.split())
    assert decoded > 500 and refused > 500


def test_what_is_undefined_would_be_noticed(folder: Path) -> None:
    done = run(PLANTED, folder)
    assert done.returncode != 0 and "misaligned address" in done.stderr
