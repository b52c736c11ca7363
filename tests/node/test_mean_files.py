"""Means of a plan in one file: what was appended is found by its digest, and what a kill breaks off is not there."""

import errno
import os
from io import BufferedWriter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.compression.digest import digest_of
from farflung.node.mean_files import PLAN_BYTES, MeanFiles
from farflung.protocol.errors import DiskFull, LocalError

PLAN, OTHER = b"p" * 32, b"o" * 32

APPENDED = st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=20)), max_size=6)


def has(files: MeanFiles, part: int, payload: bytes, plan: bytes = PLAN) -> bool:
    """Whether that can be loaded."""
    found = files.load(plan, part, digest_of(payload))
    assert found in (None, payload)
    return found is not None


@given(appended=APPENDED, restarts=st.sets(st.integers(0, 5)))
def test_what_was_appended_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, appended: list[tuple[int, bytes]], restarts: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("means")
    files = MeanFiles(folder)
    for k, (part, payload) in enumerate(appended):
        if k in restarts:
            files = MeanFiles(folder)
        files.append(PLAN, part, payload)
    payloads = {payload for _, payload in appended}
    assert all(has(files, part, payload) == ((part, payload) in appended) for part in range(4) for payload in payloads)
    assert not any(has(files, 0, payload, OTHER) for payload in payloads) and files.plans() == (
        {PLAN[:PLAN_BYTES]} if appended else set()
    )


def test_an_entry_that_a_kill_has_broken_off_is_not_there_and_the_next_takes_its_place(tmp_path: Path) -> None:
    files = MeanFiles(tmp_path)
    files.append(PLAN, 0, b"first")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    files.append(PLAN, 1, b"second")
    longer = path.read_bytes()
    for length in range(len(whole), len(longer)):
        path.write_bytes(longer[:length])
        again = MeanFiles(tmp_path)
        assert has(again, 0, b"first") and not has(again, 1, b"second")
        again.append(PLAN, 2, b"third")
        again.append(PLAN, 1, b"again")
        assert has(again, 0, b"first") and has(again, 1, b"again") and has(again, 2, b"third")


@pytest.mark.parametrize("lost", ["payload", "all of it"])
def test_what_a_power_failure_takes_of_a_copy_is_not_taken_of_what_was_secured(tmp_path: Path, lost: str) -> None:
    """The system may have written how long the file is, and not what is in it."""
    files = MeanFiles(tmp_path)
    files.append(PLAN, 0, b"mean")
    files.sync(PLAN)
    (path,) = tmp_path.iterdir()
    secured = path.stat().st_size
    files.append(PLAN, 0, b"mean")
    whole = path.read_bytes()
    intact = secured + (len(whole) - secured - len(b"mean") if lost == "payload" else 0)
    path.write_bytes(whole[:intact] + bytes(len(whole) - intact))
    assert has(MeanFiles(tmp_path), 0, b"mean")


@pytest.mark.parametrize("at", range(16))
def test_a_damaged_header_hides_what_follows(tmp_path: Path, at: int) -> None:
    files = MeanFiles(tmp_path)
    for part in range(3):
        files.append(PLAN, part, b"mean")
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 3 + at] ^= 1
    path.write_bytes(data)
    again = MeanFiles(tmp_path)
    assert [has(again, part, b"mean") for part in range(3)] == [True, False, False]


def test_what_the_disk_did_not_take_is_said_and_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MeanFiles(tmp_path)
    files.append(PLAN, 0, b"first")
    taken = 0

    class Full:
        """A file of a disk with room for some bytes only."""

        def __init__(self, file: BufferedWriter) -> None:
            self._file = file

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *args: object) -> None:
            self._file.close()

        def tell(self) -> int:
            return self._file.tell()

        def write(self, data: bytes) -> None:
            nonlocal taken
            taken += self._file.write(data[:10])
            if len(data) > 10:
                raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode: Full(real(path, mode)) if mode == "ab" else real(path, mode))
        with pytest.raises(LocalError, match=rf"{PLAN[:PLAN_BYTES].hex()} cannot be written .*No space left"):
            files.append(PLAN, 1, b"second")
    assert taken == 10 and not has(files, 1, b"second")
    files.append(PLAN, 1, b"second")
    assert has(files, 0, b"first") and has(files, 1, b"second")


def test_dropped_means_are_gone_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "strange").write_bytes(b"?")
    files = MeanFiles(tmp_path)
    for plan in (PLAN, OTHER):
        files.append(plan, 0, b"mean")
    files.sync(PLAN)
    files.drop(PLAN[:PLAN_BYTES])
    files.drop(PLAN)
    files.sync(PLAN)
    assert not has(files, 0, b"mean") and has(files, 0, b"mean", OTHER)
    assert files.plans() == {OTHER[:PLAN_BYTES]} and (tmp_path / "strange").exists()
    files.append(PLAN, 1, b"new")
    assert not has(files, 0, b"mean") and has(files, 1, b"new")


def test_a_mean_that_is_dropped_while_somebody_looks_for_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that writes a checkpoint, between any two looks at the file by the one that serves who is behind."""
    files, real = MeanFiles(tmp_path), Path.open
    files.append(PLAN, 0, b"mean")

    def drop_first(path: Path, *mode: str) -> object:
        files.drop(PLAN)
        return real(path, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", drop_first)
        assert not has(files, 0, b"mean")
        files.sync(PLAN)


def test_the_disk_is_asked_once_for_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member secures the means of a round before it says that it holds them, and whoever has fetched some before it says where it is: mostly these are the same."""
    asked: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (asked.append(descriptor), fsync(descriptor))[1])

    def asks(files: MeanFiles, plan: bytes = PLAN) -> bool:
        before = len(asked)
        files.sync(plan)
        return len(asked) > before

    files = MeanFiles(tmp_path)
    files.append(PLAN, 0, b"first")
    assert asks(files) and not asks(files)
    files.append(OTHER, 0, b"of another plan")
    assert not asks(files) and asks(files, OTHER)
    files.append(PLAN, 1, b"second")
    assert asks(files) and not asks(files)
    files.drop(PLAN)
    files.append(PLAN, 0, b"first")
    assert asks(files), "it is another file of the same length"
    assert asks(MeanFiles(tmp_path)), "another process does not know what the last one has asked"


def test_what_a_sync_was_refused_is_written_again_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of what it could not write once, and forgets it: a second sync alone says that all is well."""
    files = MeanFiles(tmp_path)
    for part, payload in enumerate((b"first", b"second")):
        files.append(PLAN, part, payload)
    (path,) = tmp_path.iterdir()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def writes() -> bool:
        os.utime(path, (0, 0))
        files.sync(PLAN)
        return path.stat().st_mtime > 0

    assert not writes()
    files.append(PLAN, 0, b"third")
    for _ in range(2):
        with monkeypatch.context() as patched, pytest.raises(DiskFull):
            patched.setattr(os, "fsync", full)
            files.sync(PLAN)
    assert writes() and not writes()
    assert has(MeanFiles(tmp_path), 0, b"third") and has(MeanFiles(tmp_path), 1, b"second")
