"""Memory that was freed stays with the process."""

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource, sys
import numpy as np
from farflung.node.heap import KEPT_BLOCK_BYTES, keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
held = [np.ones(1, dtype=np.uint8) for _ in range(100)]
def round_():
    blocks = [np.ones(KEPT_BLOCK_BYTES // 4, dtype=np.uint8) for _ in range(8)]
round_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    round_()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_second_round_asks_the_system_for_nothing() -> None:
    faults = {}
    for how in ("kept", "as it is"):
        run = subprocess.run(
            [sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, check=True, timeout=60
        )
        faults[how] = int(run.stdout)
    assert faults["kept"] < 100 < faults["as it is"]
