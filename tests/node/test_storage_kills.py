"""A kill between any two steps on the disk loses nothing that somebody may rest on."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.node.storing import (
    PLANS,
    VOTES,
    certified,
    chunks,
    commit,
    filled,
    load,
    place,
    save,
)

from farflung.compression.digest import digest_of
from farflung.node import mean_files
from farflung.node.storage import FileStorage
from farflung.protocol.messages import Accepted
from farflung.protocol.saved_vote import SavedVote


class Killed(BaseException):
    """The process ends here."""


STEPS: list[tuple[Any, str]] = [
    (Path, "open"), (Path, "write_bytes"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"),
    (os, "fsync"), (os, "fdatasync"), (os, "truncate"), (shutil, "rmtree"), (mean_files, "_header"),
]  # fmt: skip


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Callable[[], int]]]:
    """`kill_at(n)`: the n-th step on the disk does not happen. Returns how to ask for the number of steps so far."""

    def arm(fatal: int) -> Callable[[], int]:
        steps = 0

        def wrap(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def step(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps > fatal:
                    raise Killed
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, step)

        for owner, name in STEPS:
            wrap(owner, name)
        return lambda: steps

    yield arm


def a_day(storage: FileStorage) -> None:
    """Everything a node writes between two checkpoints, and the second checkpoint."""
    storage.save_vote(SavedVote(2, 1, Accepted(1, commit(2))))
    storage.save_mean(PLANS[2], 0, b"new")
    storage.append_commit(None, certified(2))
    storage.save_chunk(0, 2, b"newer")
    save(storage, 2, PLANS[1])


@pytest.mark.parametrize("fatal", range(60))
def test_a_kill_at_any_step(
    tmp_path: Path, kill_at: Callable[[int], Callable[[], int]], monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    storage = FileStorage(tmp_path)
    storage.save_vote(SavedVote(1, 0, None))
    for height in (0, 1):
        storage.append_commit(None, certified(height))
    save(storage, 1)
    storage.save_mean(PLANS[1], 0, b"old")
    storage.save_chunk(0, 1, b"older")

    steps = kill_at(fatal)
    finished = False
    try:
        a_day(FileStorage(tmp_path))
        finished = True
    except Killed:
        pass
    num_steps = steps()
    monkeypatch.undo()

    again = FileStorage(tmp_path)
    [vote], found = again.load_votes(), load(again)
    assert vote in (SavedVote(1, 0, None), SavedVote(2, 1, Accepted(1, commit(2))))
    heights = [link.certified.commit.height for link in again.load_history()]
    assert heights in ([0, 1], [0, 1, 2])
    assert not (2 in heights and vote == SavedVote(1, 0, None)), "in the order in which they were asked for"
    assert found in ((1, place(1)), (2, place(2)))
    if found == (1, place(1)):
        assert again.load_mean(PLANS[1], 0, digest_of(b"old")) == b"old", "means are kept until the checkpoint counts"
        assert all(data in (b"older", b"newer") for *_, data in chunks(again))
    assert again.load_mean(PLANS[2], 0, digest_of(b"new")) in (None, b"new")
    if found == (2, place(2)):
        assert again.load_mean(PLANS[2], 0, digest_of(b"new")) == b"new"
    a_day(again)  # and life goes on
    assert load(FileStorage(tmp_path)) == (2, place(2))
    if fatal == 59:
        assert finished, f"{num_steps} steps: look at more of them"


@pytest.mark.parametrize("fatal", range(12))
def test_a_kill_while_it_is_cleared_loses_no_vote(
    tmp_path: Path, kill_at: Callable[[int], Callable[[], int]], monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    storage = filled(tmp_path / "checkpoint")
    steps = kill_at(fatal)
    killed = False
    try:
        storage.clear()
    except Killed:
        killed = True
    num_steps = steps()
    monkeypatch.undo()
    again = FileStorage(tmp_path / "checkpoint")
    again.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert again.load_votes() == VOTES
    history = again.load_history()
    assert bool(history) == (load(again) is not None), "all of it or nothing"
    if fatal == 11:
        assert not killed, f"{num_steps} steps: look at more of them"
