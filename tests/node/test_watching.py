"""What watches the files of processes sees what they open, in Python and below it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.watching import HOOK, read_hook, watched

SCRIPT = """
import pathlib, sys
import numpy as np
from safetensors.numpy import load_file, save_file
folder = pathlib.Path(sys.argv[1])
(folder / "written").write_text("x")
save_file({"a": np.zeros(3)}, folder / "state")
(folder / "new").mkdir()
load_file(folder / "old" / "weights")
open(folder / "old" / "read").close()
"""


@pytest.mark.slow
def test_opens_are_seen_whoever_makes_them(tmp_path: Path) -> None:
    folder, hooks = tmp_path / "folder", tmp_path / "hooks"
    (folder / "old").mkdir(parents=True)
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK.format(log=str(tmp_path / "opened")))
    (folder / "old" / "read").write_text("x")
    state = bytes.fromhex("0800000000000000") + b"{}      "  # without tensors
    (folder / "old" / "weights").write_bytes(state)
    with watched(folder) as kernel:
        environment = os.environ | {"PYTHONPATH": str(hooks)}
        subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], env=environment, check=True)
    by_hook = {(one.path.name, one.writes) for one in read_hook(tmp_path / "opened") if one.path.is_relative_to(folder)}
    assert by_hook == {("written", True), ("read", False)}  # what safetensors opens in Rust it does not see
    assert {"written", "weights", "read"} <= {path.name for _, path in kernel.opened}
