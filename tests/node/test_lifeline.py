"""The lifeline ends its command when the pipe closes, and passes its status on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from farflung.node import lifeline


def start(folder: Path, code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-IS", lifeline.__file__, str(folder), sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_closing_the_pipe_ends_the_command(tmp_path: Path, ignores_sigterm: bool) -> None:
    (tmp_path / "used").mkdir()
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignores_sigterm else ""
    with start(tmp_path / "used", f"import os,signal;{ignore}print(os.getpid(), flush=True);signal.pause()") as process:
        assert process.stdin is not None and process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        begun = time.monotonic()
        process.stdin.close()
        expected = signal.SIGKILL if ignores_sigterm else signal.SIGTERM
        assert process.wait(lifeline.GRACE_S + 5) == 128 + expected
        assert not child.is_running()
        assert not (tmp_path / "used").exists() and tmp_path.exists()
        assert (time.monotonic() - begun >= lifeline.GRACE_S) == ignores_sigterm


def test_status_is_passed_on(tmp_path: Path) -> None:
    with start(tmp_path / "used", "raise SystemExit(7)") as process:
        assert process.wait(10) == 7


def test_sigterm_ends_both(tmp_path: Path) -> None:
    with start(tmp_path / "used", "import os,signal;print(os.getpid(), flush=True);signal.pause()") as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
        assert not child.is_running()
