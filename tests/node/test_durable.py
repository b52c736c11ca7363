"""A value in two slots, and entries of a journal: what was saved whole is found, whatever a crash left of what came after it."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.node.durable import Journal, Slots, writing
from farflung.protocol.errors import DiskFull, LocalError

MAX_BYTES = 100


def slots(folder: Path) -> Slots:
    return Slots(folder / "value", MAX_BYTES, "so do this")


def test_nothing_was_saved(tmp_path: Path) -> None:
    assert slots(tmp_path).load() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_value_is_found(tmp_path: Path, restarts: bool) -> None:
    kept = slots(tmp_path)
    for value in (b"", b"one", b"x" * MAX_BYTES, b"short", b""):
        if restarts:
            kept = slots(tmp_path)
        kept.save(value)
        assert kept.load() == slots(tmp_path).load() == value
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) == 1 and sizes["value"] < 3 * MAX_BYTES, "written in place"


def test_a_value_that_is_too_long_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    kept = slots(tmp_path)
    kept.save(b"one")
    with pytest.raises(ValueError, match="101 bytes for a slot of 100"):
        kept.save(b"x" * (MAX_BYTES + 1))
    assert kept.load() == b"one"


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("torn", [0, 1, 9, 27, 28, 30])
def test_a_write_that_was_torn_leaves_the_value_before_it(tmp_path: Path, saved: int, torn: int) -> None:
    """Only the first bytes of the next one came to the disk; all of them is one more."""
    path = tmp_path / "value"
    for number in range(saved):
        slots(tmp_path).save(b"value %d" % number)
    before = path.read_bytes()
    slots(tmp_path).save(b"another")
    after = path.read_bytes()
    begins = next(k for k, (old, new) in enumerate(zip(before, after, strict=True)) if old != new) // 128 * 128
    path.write_bytes(after[: begins + torn] + before[begins + torn :])
    assert slots(tmp_path).load() == b"value %d" % (saved - 1)
    again = slots(tmp_path)
    again.save(b"and on")
    assert slots(tmp_path).load() == b"and on"


@given(position=st.integers(0, 2 * 128 - 1), value=st.binary(max_size=MAX_BYTES))
def test_a_damaged_slot_is_never_taken_for_a_value(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes
) -> None:
    folder = tmp_path_factory.mktemp("slots")
    slots(folder).save(b"old")
    slots(folder).save(value)
    data = bytearray((folder / "value").read_bytes())
    data[position] ^= 0x40
    (folder / "value").write_bytes(data)
    assert slots(folder).load() in (b"old", value)


@pytest.mark.parametrize("content", [b"", b"\0" * 256, b"\xff" * 256])
def test_a_file_without_a_whole_slot_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "value").write_bytes(content)
    with pytest.raises(LocalError, match="value is damaged; so do this"):
        slots(tmp_path).load()
    with pytest.raises(LocalError, match="value is damaged"):
        slots(tmp_path).save(b"new")
    assert (tmp_path / "value").read_bytes() == content


# ---- a journal ------------------------------------------------------------------------------------------------

ENTRIES = [b"one", b"", b"three"]


def journal(folder: Path) -> Journal:
    return Journal(folder / "entries", "so do this")


def written(folder: Path) -> bytes:
    """A journal of ENTRIES."""
    kept = journal(folder)
    for entry in ENTRIES:
        kept.append(entry)
    return (folder / "entries").read_bytes()


def test_entries_are_found_in_order(tmp_path: Path) -> None:
    assert journal(tmp_path).load() == [] and journal(tmp_path).count() == 0
    written(tmp_path)
    assert journal(tmp_path).load() == ENTRIES and journal(tmp_path).count() == 3
    kept = journal(tmp_path)
    kept.replace([b"new"])
    kept.append(b"newer")
    assert kept.count() == 2 and journal(tmp_path).load() == [b"new", b"newer"]


@pytest.mark.parametrize("zeros", [0, 1, 100])
def test_an_entry_that_was_broken_off_was_never_there(tmp_path: Path, zeros: int) -> None:
    """Cut off, or with zeros where the power went before its bytes were written."""
    data = written(tmp_path)
    for size in range(len(data) - len(ENTRIES[-1]) - 12, len(data)):
        (tmp_path / "entries").write_bytes(data[:size] + bytes(zeros))
        assert journal(tmp_path).load() == ENTRIES[:2]
        journal(tmp_path).append(b"on")
        assert journal(tmp_path).load() == [*ENTRIES[:2], b"on"]


def test_what_a_full_disk_took_of_an_entry_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = journal(tmp_path)
    kept.append(b"one")

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(LocalError, match="entries cannot be written"):
        patched.setattr(os, "fsync", full)
        kept.append(b"two")
    kept.append(b"three")
    assert kept.load() == journal(tmp_path).load() == [b"one", b"three"]


def test_what_is_no_lack_of_room_is_none(tmp_path: Path) -> None:
    """A quota is one; else somebody would wait for room on a disk that is broken, or may not be written."""
    for number, kind in {"ENOSPC": DiskFull, "EDQUOT": DiskFull, "EIO": LocalError, "EACCES": LocalError}.items():
        with pytest.raises(LocalError) as caught, writing(tmp_path / "entries"):
            raise OSError(getattr(errno, number), "no")
        assert type(caught.value) is kind


def test_a_flipped_bit_is_never_taken_for_an_entry_that_was_broken_off(tmp_path: Path) -> None:
    data = written(tmp_path)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            (tmp_path / "entries").write_bytes(flipped)
            with pytest.raises(LocalError, match=r"entries is damaged at byte .*; so do this"):
                journal(tmp_path).load()
