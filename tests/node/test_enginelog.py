"""Where the engine's own words go."""

import errno
import logging
import logging.handlers
from pathlib import Path
from typing import Any

import pytest

from farflung.node.enginelog import engine_log


def test_a_full_disk_leaves_out_lines_and_the_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = logging.getLogger("farflung.of_a_test")
    with engine_log(tmp_path / "engine.log"):
        log.info("before")
        with monkeypatch.context() as patched:
            patched.setattr(logging.handlers.RotatingFileHandler, "shouldRollover", full)
            log.info("meanwhile")
        log.info("after")
    assert not capsys.readouterr().err
    assert [line.split()[-1] for line in (tmp_path / "engine.log").read_text().splitlines()] == ["before", "after"]
