"""What a machine finds of earlier lives of a stage on its disk."""

from pathlib import Path

from tests.node.test_storage import certified, save

from farflung.node.remains import remains
from farflung.node.storage import FileStorage
from farflung.protocol.lives import Counters


def disk(folder: Path, *, saved: int | None = None, commits: int = 0) -> FileStorage:
    """With a history, and a checkpoint at one of its heights."""
    storage = FileStorage(folder)
    for height in range(commits):
        storage.append_commit(None, certified(height))
    if saved is not None:
        save(storage, saved)
    return storage


def test_the_newest_life_that_was_saved(tmp_path: Path) -> None:
    downloading, newer, older = (
        disk(tmp_path / "2", commits=3),
        disk(tmp_path / "1", saved=4, commits=6),
        disk(tmp_path / "0", saved=9, commits=10),
    )
    found = remains([downloading, newer, older])
    assert found is not None and found.storage is newer
    assert found.place == newer.load_place() and found.place.version == 4


def test_it_says_how_far_that_had_trained(tmp_path: Path) -> None:
    """By the steps of its commit, which are 0 in these, and one that no round has counted."""
    found = remains([disk(tmp_path, saved=2, commits=3)])
    assert found is not None and found.step == 1


def test_the_ledger_of_stage_0_goes_on_without_what_was_trained(tmp_path: Path) -> None:
    found = remains([disk(tmp_path, saved=2, commits=3)])
    assert found is not None
    head = found.head
    assert head.height == 2
    known = found.ledger(Counters(head.version, 0, 0, head.ledger.cursor + 50))
    assert known is not None and known.cursor == head.ledger.cursor and not known.held
    assert found.ledger(Counters(head.version + 1, 0, 0, 1000)) is None  # others have heard of a later round


def test_there_may_be_none(tmp_path: Path) -> None:
    assert remains([]) is None
    assert remains([disk(tmp_path / "a"), disk(tmp_path / "b", commits=2)]) is None
    torn = disk(tmp_path / "c", saved=7, commits=2)  # of which no commit says how old it is
    assert remains([torn]) is None and torn.load_place() is not None
