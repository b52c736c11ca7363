"""What a node has written is what it finds on its disk, and what is torn or damaged there is said or passed over."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors
import safetensors.torch
import torch
from tests.node.storing import (
    PLANS,
    VOTES,
    ToyLearner,
    certified,
    chunks,
    commit,
    filled,
    load,
    place,
    save,
)
from tests.protocol.alone import PAST
from tests.protocol.bus import SWARM

from farflung.compression.digest import digest_of
from farflung.node import storage as storage_module
from farflung.node.mean_files import PLAN_BYTES
from farflung.node.storage import FileStorage, Link, check_ours, newest_history
from farflung.protocol.chain import RoundResult
from farflung.protocol.errors import DiskFull, LocalError
from farflung.protocol.messages import Accepted
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import HISTORY
from farflung.training.checkpoint import write_state

# ---- the good case --------------------------------------------------------------------------------------------


def test_a_fresh_folder_holds_nothing(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "swarm")
    assert storage.load_votes() == [] and storage.load_history() == [] and chunks(storage) == []
    assert load(storage) is None and storage.saved_learner() is None
    assert storage.load_mean(PLANS[0], 0, digest_of(b"mean")) is None


def test_everything_comes_back(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    vote = SavedVote(7, 2, Accepted(1, commit(7)))
    elsewhere = SavedVote(9, 1, None, group=b"g" * 32)
    for saved_vote in (SavedVote(6, 0, None), elsewhere, vote):
        storage.save_vote(saved_vote)
    storage.append_commit(None, certified(0))
    storage.append_commit(None, certified(1))
    save(storage, 1)
    storage.save_mean(PLANS[1], 3, b"mean")
    storage.save_chunk(4, 9, b"chunk")
    again = FileStorage(tmp_path)
    assert again.load_votes() == [vote, elsewhere], "the newest of each group"
    assert again.load_history() == [Link(None, certified(0)), Link(None, certified(1))]
    assert load(again) == (1, place(1))
    mean = digest_of(b"mean")
    assert again.load_mean(PLANS[1], 3, mean) == b"mean" and again.load_mean(PLANS[1], 2, mean) is None
    assert chunks(again) == [(4, 9, b"chunk")]
    saved = again.saved_learner()
    assert saved is not None and saved[1] == place(1) and (saved[0] / "outer").exists()


def test_what_is_cleared_is_as_new_but_for_its_votes(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint").clear()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    again = FileStorage(tmp_path / "checkpoint")
    again.sweep()
    assert again.load_votes() == VOTES
    assert again.load_history() == [] and chunks(again) == [] and load(again) is None


def test_the_means_of_what_was_voted_for_outlive_a_clear(tmp_path: Path) -> None:
    """If it is decided later, on the word of this disk, there have to be bytes."""
    storage = FileStorage(tmp_path / "checkpoint")
    result = RoundResult(PLANS[0], (), (), 0)
    storage.save_vote(SavedVote(2, 0, Accepted(0, msgspec.structs.replace(commit(2), round=result))))
    for plan in PLANS[:2]:
        storage.save_mean(plan, 0, b"mean")
    storage.clear()
    again = FileStorage(tmp_path / "checkpoint")
    assert [again.load_mean(plan, 0, digest_of(b"mean")) for plan in PLANS[:2]] == [b"mean", None]
    assert again.plans_with_means() == {PLANS[0][:PLAN_BYTES]}


def test_a_checkpoint_drops_what_it_makes_unnecessary(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for plan in PLANS:
        storage.save_mean(plan, 0, b"m")
    storage.save_chunk(0, 1, b"c")
    assert storage.plans_with_means() == {plan[:PLAN_BYTES] for plan in PLANS}
    save(storage, 1, PLANS[0], PLANS[1])
    assert [storage.load_mean(plan, 0, digest_of(b"m")) is not None for plan in PLANS] == [False, False, True, True]
    assert chunks(storage) == []
    save(storage, 2, *PLANS)
    assert not any((tmp_path / "means").iterdir())


def test_checkpoints_alternate_and_the_newest_counts(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for state in range(1, 6):
        storage.append_commit(None, certified(state))
        save(storage, state)
        assert load(FileStorage(tmp_path)) == (state, place(state))
    assert {p.name for p in tmp_path.glob("learner-*")} == {"learner-a", "learner-b"}


# ---- torn files -----------------------------------------------------------------------------------------------


def test_every_torn_end_of_the_history_is_cut(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.append_commit(None, certified(0))
    whole = (tmp_path / "history.msgpack").stat().st_size
    storage.append_commit(None, certified(1))
    data = (tmp_path / "history.msgpack").read_bytes()
    for size in range(whole, len(data)):
        (tmp_path / "history.msgpack").write_bytes(data[:size])
        again = FileStorage(tmp_path)
        assert again.load_history() == [Link(None, certified(0))]
        again.append_commit(None, certified(1))
        again.append_commit(None, certified(2))
        heights = [link.certified.commit.height for link in FileStorage(tmp_path).load_history()]
        assert heights == [0, 1, 2], f"cut at {size} of {len(data)}"


def test_a_history_torn_in_its_first_entry(tmp_path: Path) -> None:
    FileStorage(tmp_path).append_commit(None, certified(0))
    data = (tmp_path / "history.msgpack").read_bytes()
    for size in range(len(data)):
        (tmp_path / "history.msgpack").write_bytes(data[:size])
        assert FileStorage(tmp_path).load_history() == []


@pytest.fixture
def short_history(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(HISTORY, MOST_LINKS), so small that a test writes them in a moment."""
    monkeypatch.setattr(storage_module, "HISTORY", 8)
    monkeypatch.setattr(storage_module, "MOST_LINKS", 16)
    return 8, 16


def test_a_long_history_is_compacted_to_what_a_start_takes_up(tmp_path: Path, short_history: tuple[int, int]) -> None:
    kept, most = short_history
    storage = FileStorage(tmp_path)
    for height in range(most):
        storage.append_commit(None, certified(height))
    assert len(storage.load_history()) == most
    for height in range(most, most + 2):
        storage.append_commit(None, certified(height))
    links = FileStorage(tmp_path).load_history()
    assert [link.certified.commit.height for link in links] == list(range(most - kept, most + 2))
    assert [link.anchor for link in links[:2]] == [commit(most - kept - 1), None]
    anchor, run = newest_history(links)
    assert anchor == commit(most + 1 - kept) and run[-1] == certified(most + 1)
    again = FileStorage(tmp_path)  # a restarted process counts what is there
    for height in range(most + 2, 2 * most):
        again.append_commit(None, certified(height))
    assert len(again.load_history()) == most


def test_a_kill_while_compacting_leaves_the_whole_history(
    tmp_path: Path, short_history: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, most = short_history
    storage = FileStorage(tmp_path)
    for height in range(most):
        storage.append_commit(None, certified(height))

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        storage.append_commit(None, certified(most))
    again = FileStorage(tmp_path)
    again.append_commit(None, certified(most))
    assert newest_history(again.load_history())[1][-1] == certified(most)
    assert len(again.load_history()) == kept + 1


def flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def test_a_vote_that_is_damaged_is_said(tmp_path: Path) -> None:
    FileStorage(tmp_path).save_vote(SavedVote(1, 0, None))
    flipped(tmp_path / "vote", 4)
    with pytest.raises(LocalError, match=r"vote is damaged; .*Remove this file, and no other"):
        FileStorage(tmp_path).load_votes()


def test_a_history_that_is_damaged_is_neither_read_nor_cut(tmp_path: Path) -> None:
    """An appended commit would hide what is lost."""
    storage = FileStorage(tmp_path)
    for height in range(3):
        storage.append_commit(None, certified(height))
    path = tmp_path / "history.msgpack"
    flipped(path, path.stat().st_size // 3)  # the length of the second entry: it would end behind the file
    damaged = path.read_bytes()
    with pytest.raises(LocalError, match=r"history.msgpack is damaged .*; remove `history.msgpack`, `learner-a`"):
        FileStorage(tmp_path).load_history()
    with pytest.raises(LocalError, match=r"history.msgpack is damaged"):
        FileStorage(tmp_path).append_commit(None, certified(3))
    assert path.read_bytes() == damaged


def test_a_checkpoint_of_a_commit_that_the_history_has_lost_is_refused(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for height in range(3):
        storage.append_commit(None, certified(height))
    save(storage, 2)
    path = tmp_path / "history.msgpack"
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(LocalError, match="goes up to height 1, the checkpoint beside it is of height 2"):
        load(FileStorage(tmp_path))
    path.unlink()
    with pytest.raises(LocalError, match="goes up to height -1"):
        load(FileStorage(tmp_path))


@pytest.mark.parametrize("content", [b"", b"c", b"/etc", b"\xff\xfe"])
def test_a_checkpoint_that_nothing_points_to_is_said(tmp_path: Path, content: bytes) -> None:
    storage = FileStorage(tmp_path)
    save(storage, 0)
    (tmp_path / "current").write_bytes(content)
    for read in (storage.saved_learner, storage.load_place, storage.load_residuals, lambda: save(storage, 1)):
        with pytest.raises(LocalError, match="current is damaged; remove `learner-a`, `learner-b` and `current`"):
            read()


@pytest.mark.parametrize("content", [None, b"", b"\xc1"])
def test_a_checkpoint_without_its_place_is_said(tmp_path: Path, content: bytes | None) -> None:
    storage = FileStorage(tmp_path)
    save(storage, 0)
    path = tmp_path / "learner-a" / "place.msgpack"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(LocalError, match=r"place.msgpack is .*; remove `learner-a`, `learner-b` and `current`"):
        storage.load_place()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    strange = [tmp_path / folder / name for folder in ("means", "chunks") for name in (".DS_Store", "x-1", "1-x", "a")]
    for path in strange:
        path.write_bytes(b"?")
    (tmp_path / "chunks" / "lost+found").mkdir()
    storage.save_chunk(1, 2, b"ours")
    storage.save_mean(PLANS[0], 0, b"ours")
    assert chunks(storage) == [(1, 2, b"ours")] and storage.plans_with_means() == {PLANS[0][:PLAN_BYTES]}
    save(storage, 1, PLANS[0])
    assert chunks(storage) == [] and storage.plans_with_means() == set()
    assert all(path.exists() for path in strange)


def test_half_written_files_are_not_read(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.save_chunk(1, 2, b"whole")
    (tmp_path / "chunks" / "3-4.new").write_bytes(b"ha")
    (tmp_path / "vote.new").write_bytes(b"\x93")
    again = FileStorage(tmp_path)
    assert chunks(again) == [(1, 2, b"whole")]
    assert again.load_votes() == []


def test_chunks_are_read_one_at_a_time(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for index in (0, 1):
        storage.save_chunk(index, 2, b"as it was")
    found: list[bytes] = []

    def take(index: int, version: int, data: bytes) -> None:
        found.append(data)
        storage.save_chunk(1, 2, b"changed since")

    storage.load_chunks(take)
    assert found == [b"as it was", b"changed since"]


# ---- a full disk ----------------------------------------------------------------------------------------------


class Tensors(ToyLearner):
    def save(self, folder: Path) -> None:
        write_state(folder, {"outer": torch.zeros(4)}, {})


WRITES: list[tuple[str, Callable[[FileStorage], None]]] = [
    ("vote", lambda storage: storage.save_vote(SavedVote(2, 0, None))),
    ("history.msgpack", lambda storage: storage.append_commit(None, certified(1))),
    ("chunks/1-2", lambda storage: storage.save_chunk(1, 2, b"chunk")),
    ("learner-b", lambda storage: storage.save_learner(Tensors(), {}, place(1), ())),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "write"), WRITES)
def test_a_full_disk_is_said_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[FileStorage], None]
) -> None:
    storage = FileStorage(tmp_path)
    storage.save_vote(SavedVote(1, 0, None))
    storage.append_commit(None, certified(0))
    save(storage, 0)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_to_rust(*args: Any) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", lambda *args, **more: full_to_rust())
        for owner, step in ((os, "fsync"), (os, "fdatasync"), (Path, "write_bytes")):
            patched.setattr(owner, step, full)
        with pytest.raises(
            DiskFull, match=rf"/{name} cannot be written .*No space left .* make room on its disk"
        ) as raised:
            write(storage)
        assert raised.value.remedy.endswith(f": free space in {(tmp_path / name).parent}")
    assert not (tmp_path / "learner-b").exists(), "votes, commits and means have its room"
    assert load(FileStorage(tmp_path)) == (0, place(0))


# ---- the newest unbroken history ------------------------------------------------------------------------------


def links(*heights: int, anchors: tuple[int, ...] = ()) -> list[Link]:
    return [Link(commit(h - 1) if h in anchors else None, certified(h)) for h in heights]


def test_newest_history() -> None:
    assert newest_history([]) == (None, [])
    assert newest_history(links(0, 1, 2)) == (None, [certified(h) for h in (0, 1, 2)])
    assert newest_history(links(7, 8, anchors=(7,))) == (commit(6), [certified(7), certified(8)])
    jumped = links(0, 1, 9, 10, anchors=(9,))
    assert newest_history(jumped) == (commit(8), [certified(9), certified(10)])
    twice = links(0, 1, 9, 20, 21, anchors=(9, 20))
    assert newest_history(twice) == (commit(19), [certified(20), certified(21)])


def test_a_long_history_is_cut_and_anchored() -> None:
    anchor, run = newest_history(links(*range(HISTORY + 5)))
    assert len(run) == HISTORY and run[-1] == certified(HISTORY + 4)
    assert anchor == commit(4) and run[0] == certified(5)
    anchor, run = newest_history(links(*range(HISTORY)))
    assert anchor is None and len(run) == HISTORY


def test_links_are_as_they_were_written() -> None:
    """The format of the file, which an older version of this software wrote."""
    assert msgspec.msgpack.encode(Link(None, certified(0)))[:2] == b"\x92\xc0"


def test_the_history_of_another_swarm_is_none_to_go_on_from(tmp_path: Path) -> None:
    """As when somebody mixes up two folders: without this it would train on from another model, and disagree with everybody."""
    check_ours([], SWARM, tmp_path)
    check_ours([PAST[-1]], SWARM, tmp_path)
    for history in ([PAST[-1]], [certified(3)]):
        with pytest.raises(LocalError, match=r"has the history of another swarm than 6f74686572.*move it away"):
            check_ours(history, b"other".ljust(32, b"-"), tmp_path)
