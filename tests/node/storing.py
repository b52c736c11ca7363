"""A small disk of a node, written and read: for tests of what it keeps."""

from pathlib import Path

import torch
from torch import Tensor

from farflung.node.durable import write_atomically
from farflung.node.mean_files import PLAN_BYTES
from farflung.node.storage import FileStorage, Place
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.ledger import Ledger
from farflung.protocol.messages import Accepted
from farflung.protocol.saved_vote import SavedVote

A = b"a" * 32
PLANS = [bytes([i]) * 32 for i in range(4)]


def commit(height: int) -> Commit:
    return Commit(
        height=height,
        parent=b"p" * 32,
        version=height,
        tokens=0,
        steps=0,
        lap=1,
        width=1,
        view=(A,),
        left=(),
        ledger=Ledger(),
    )


def certified(height: int) -> Certified:
    return Certified(commit(height), 0, ())


class ToyLearner:
    """Two files, as a replica has: state is a number, and both must be of one save."""

    def __init__(self, state: int = 0) -> None:
        self.state = state

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "outer", str(self.state).encode())
        write_atomically(folder / "facts", str(self.state).encode())

    def load(self, folder: Path) -> None:
        assert (folder / "outer").read_text() == (folder / "facts").read_text(), "a mixture of two saves"
        self.state = int((folder / "outer").read_text())


def place(height: int) -> Place:
    return Place(height, height, ((0, height),), 1, b"")


def owed(state: int) -> dict[str, Tensor]:
    return {"up.memory": torch.full((3,), float(state))}


def save(storage: FileStorage, state: int, *drop: bytes) -> None:
    dropped = [plan[:PLAN_BYTES] for plan in drop]
    storage.save_learner(ToyLearner(state), owed(state), place(state), dropped)  # type: ignore[arg-type]


def load(storage: FileStorage) -> tuple[int, Place] | None:
    learner = ToyLearner()
    found = storage.load_learner(learner)  # type: ignore[arg-type]
    residuals = storage.load_residuals()
    if found is None:
        assert residuals == {}
        return None
    assert residuals.keys() == {"up.memory"}
    assert torch.equal(residuals["up.memory"], owed(learner.state)["up.memory"]), "a mixture of two saves"
    return learner.state, found


def chunks(storage: FileStorage) -> list[tuple[int, int, bytes]]:
    """Number, version and bytes of each."""
    found: list[tuple[int, int, bytes]] = []
    storage.load_chunks(lambda *chunk: found.append(chunk))
    return found


VOTES = [SavedVote(7, 2, Accepted(1, commit(7))), SavedVote(2, 1, None, group=b"g" * 32)]


def filled(folder: Path) -> FileStorage:
    storage = FileStorage(folder)
    for vote in VOTES:
        storage.save_vote(vote)
    for height in (0, 1):
        storage.append_commit(None, certified(height))
    save(storage, 1)
    storage.save_chunk(4, 9, b"chunk")
    return storage
