"""What a node must not forget, on disk: votes, history, means not yet in a checkpoint, the learner and its place in the data.

    vote                what was promised and voted for at the open height; written before the vote leaves
    history.msgpack     certified commits, appended one by one; of 1024 only the newest half is kept, which is all that is ever loaded
    means/PLAN-PART     encoded means of rounds committed since the last checkpoint
    chunks/             outer state of a late join that is not complete yet
    learner-a, -b       the replica and the residuals of error feedback (safetensors), and their place: which height they are at, which
                        samples the replica's progress has used
    current             which of the two counts

`kill -9` at any moment leaves a state from which the node goes on: the learner's checkpoint, plus the means of the rounds after it.
"""

import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from torch import Tensor

from farflung.compression.codec import Payload
from farflung.node.durable import UNFINISHED, Slots, sync_folder, write_atomically
from farflung.node.learner import Learner
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.errors import LocalError
from farflung.protocol.limits import MAX_CONTROL_BYTES
from farflung.protocol.messages import Accepted
from farflung.protocol.settings import HISTORY
from farflung.protocol.types import Intervals
from farflung.training.checkpoint import read_state, write_state

T = TypeVar("T")

TakeChunk = Callable[[int, int, bytes], None]
"""Of outer state: its number, its version, and what it is."""

VOTE = "vote"

MAX_VOTE_BYTES = MAX_CONTROL_BYTES
"""What is voted for came in a message."""

LENGTH_BYTES = 4
"""Prefix of each entry of the history."""

RESIDUALS = "residuals"
"""Folder in that of a learner."""

MOST_LINKS = 2 * HISTORY
"""Entries of the history file at which it is written anew: the protocol remembers HISTORY, and one file in so many commits costs little."""

PLAN_BYTES = 16
"""Of a plan's hash that are in file names: 128 bits."""


class SavedVote(Struct, frozen=True, array_like=True):
    height: int
    ballot: int
    accepted: Accepted | None


class Place(Struct, frozen=True, array_like=True):
    """Where a saved learner stands."""

    height: int
    """Its outer state is that of this commit."""
    version: int
    trained: Intervals
    """Samples that its local progress has used, not yet counted by any round."""
    steps: int
    """Inner steps of that progress."""
    in_flight: bytes
    """Plan to which its last pseudo-gradient went; empty when none is in flight."""


class Link(Struct, frozen=True, array_like=True):
    """One entry of the saved history; the first one carries its parent."""

    anchor: Commit | None
    certified: Certified


class Storage(Protocol):
    """All methods block; the node calls them through its door or before it serves."""

    def save_vote(self, vote: SavedVote) -> None: ...

    def load_vote(self) -> SavedVote | None: ...

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        """`anchor` is the parent when `certified` does not follow what was appended last."""

    def load_history(self) -> list[Link]: ...

    def save_mean(self, plan: bytes, part: int, payload: Payload) -> None: ...

    def load_mean(self, plan: bytes, part: int) -> bytes | None: ...

    def sync_means(self, plan: bytes) -> None:
        """The plan is committed: its means must survive a power failure from now on."""

    def drop_means(self, plan: bytes) -> None: ...

    def save_chunk(self, index: int, version: int, data: bytes) -> None:
        """One verified chunk of a state transfer that is not complete yet."""

    def load_chunks(self, take: TakeChunk) -> None:
        """Hand over the chunks of a transfer that was broken off, one at a time: together they are as large as what is downloaded."""

    def plans_with_means(self) -> set[bytes]:
        """The first PLAN_BYTES of each plan of which a mean is here."""

    def save_learner(
        self, learner: Learner, residuals: Mapping[str, Tensor], place: Place, drop: Collection[bytes]
    ) -> None:
        """Checkpoint, all of it or nothing; chunks of a download, and means of the plans `drop`, of those that were here, are dropped.

        Saving takes long, and meanwhile means of other plans arrive: what is dropped has to be known before.
        """

    def load_place(self) -> Place | None:
        """Where the saved learner stands; None when there is no checkpoint."""

    def load_learner(self, learner: Learner) -> Place | None:
        """Restore into `learner`; None when there is no checkpoint."""

    def load_residuals(self) -> dict[str, Tensor]:
        """Those of the checkpoint; empty when it has none."""


class FileStorage:
    """A folder of one swarm on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._votes = Slots(folder / VOTE, MAX_VOTE_BYTES)
        self._num_links: int | None = None
        """Entries of the history file; None before the first append has looked at it."""
        for name in ("means", "chunks"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def save_vote(self, vote: SavedVote) -> None:
        self._votes.save(msgspec.msgpack.encode(vote))

    def load_vote(self) -> SavedVote | None:
        data = self._votes.load()
        return None if data is None else _decode_bytes(self.folder / VOTE, data, SavedVote)

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        data = msgspec.msgpack.encode(Link(anchor, certified))
        path = self.folder / "history.msgpack"
        if self._num_links is None:  # a kill while writing can tear only the last entry, once a start
            self._num_links = _cut_torn_end(path)
        if self._num_links >= MOST_LINKS:
            self._compact_history(path)
        self._num_links += 1
        with path.open("ab") as file:
            file.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            file.flush()
            os.fsync(file.fileno())

    def _compact_history(self, path: Path) -> None:
        """Keep what a start would take up (`newest_history`). A crash leaves the old file or the new one."""
        anchor, kept = newest_history(self.load_history())
        links = [Link(anchor if i == 0 else None, certified) for i, certified in enumerate(kept)]
        entries = [msgspec.msgpack.encode(link) for link in links]
        write_atomically(path, b"".join(len(data).to_bytes(LENGTH_BYTES, "big") + data for data in entries))
        self._num_links = len(entries)

    def load_history(self) -> list[Link]:
        path = self.folder / "history.msgpack"
        if not path.exists():
            return []
        return [_decode_bytes(path, entry, Link) for entry in _entries(path.read_bytes())]

    def save_mean(self, plan: bytes, part: int, payload: Payload) -> None:
        # No fsync: a killed process loses nothing that the system has taken, and a power failure everywhere at
        # once is not what this protects from. It would cost a disk's latency in every part of every round.
        path = self._mean(plan, part)
        temporary = path.with_name(path.name + UNFINISHED)
        temporary.write_bytes(payload)
        temporary.replace(path)

    def load_mean(self, plan: bytes, part: int) -> bytes | None:
        path = self._mean(plan, part)
        return path.read_bytes() if path.exists() else None

    def sync_means(self, plan: bytes) -> None:
        for path in self._means_of(plan):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if sys.platform == "linux":  # read again only after a restart: it need not fill the system's cache
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        sync_folder(self.folder / "means")

    def drop_means(self, plan: bytes) -> None:
        for path in self._means_of(plan):
            path.unlink()

    def save_chunk(self, index: int, version: int, data: bytes) -> None:
        write_atomically(self.folder / "chunks" / f"{index}-{version}", data)

    def load_chunks(self, take: TakeChunk) -> None:
        for path in sorted((self.folder / "chunks").iterdir()):
            index, _, version = path.name.partition("-")
            if version.isdecimal():  # not a half-written file
                take(int(index), int(version), path.read_bytes())

    def plans_with_means(self) -> set[bytes]:
        return {_plan_of(path) for path in (self.folder / "means").iterdir()}

    def save_learner(
        self, learner: Learner, residuals: Mapping[str, Tensor], place: Place, drop: Collection[bytes]
    ) -> None:
        # Two folders in turn, and one small file that says which counts: the switch is one atomic rename.
        slot = "a" if self._current() != "a" else "b"
        shutil.rmtree(self.folder / f"learner-{slot}", ignore_errors=True)
        learner.save(self.folder / f"learner-{slot}")
        if residuals:
            write_state(self.folder / f"learner-{slot}" / RESIDUALS, residuals, {})
        write_atomically(self.folder / f"learner-{slot}" / "place.msgpack", msgspec.msgpack.encode(place))
        write_atomically(self.folder / "current", slot.encode())
        for path in (self.folder / "means").iterdir():
            if _plan_of(path) in drop:
                path.unlink()
        for path in (self.folder / "chunks").iterdir():
            path.unlink()

    def load_learner(self, learner: Learner) -> Place | None:
        slot = self._current()
        if slot is None:
            return None
        place = _decode(self.folder / f"learner-{slot}" / "place.msgpack", Place)
        learner.load(self.folder / f"learner-{slot}")
        return place

    def load_place(self) -> Place | None:
        saved = self.saved_learner()
        return None if saved is None else saved[1]

    def load_residuals(self) -> dict[str, Tensor]:
        slot = self._current()
        folder = self.folder / f"learner-{slot}" / RESIDUALS
        return read_state(folder)[0] if slot is not None and folder.exists() else {}

    def saved_learner(self) -> tuple[Path, Place] | None:
        """Folder and place of the checkpoint that counts; None when there is none."""
        slot = self._current()
        if slot is None:
            return None
        folder = self.folder / f"learner-{slot}"
        return folder, _decode(folder / "place.msgpack", Place)

    def _means_of(self, plan: bytes) -> list[Path]:
        """Whole ones: another one may be on its way, in another thread."""
        found = (self.folder / "means").glob(f"{plan[:PLAN_BYTES].hex()}-*")
        return sorted(path for path in found if path.suffix != UNFINISHED)

    def _mean(self, plan: bytes, part: int) -> Path:
        return self.folder / "means" / f"{plan[:PLAN_BYTES].hex()}-{part}"

    def _current(self) -> str | None:
        path = self.folder / "current"
        return path.read_text() if path.exists() else None


def _plan_of(path: Path) -> bytes:
    """The beginning of its hash, by the name of a mean's file."""
    return bytes.fromhex(path.name.partition("-")[0])


def _decode(path: Path, kind: type[T]) -> T:
    return _decode_bytes(path, path.read_bytes(), kind)


def _decode_bytes(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise LocalError(f"{path} is damaged ({error}); remove the swarm's folder and join again") from error


def _entries(data: bytes) -> list[bytes]:
    """Whole entries; a torn one at the end, left by a kill while writing, is dropped."""
    entries: list[bytes] = []
    position = 0
    while position + LENGTH_BYTES <= len(data):
        length = int.from_bytes(data[position : position + LENGTH_BYTES], "big")
        end = position + LENGTH_BYTES + length
        if end > len(data):
            break
        entries.append(data[position + LENGTH_BYTES : end])
        position = end
    return entries


def _cut_torn_end(path: Path) -> int:
    """Returns how many whole entries there are."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    entries = _entries(data)
    whole = sum(LENGTH_BYTES + len(entry) for entry in entries)
    if whole < len(data):
        os.truncate(path, whole)
    return len(entries)


def newest_history(links: Sequence[Link]) -> tuple[Commit | None, list[Certified]]:
    """The last unbroken run of saved commits, and the parent of its first."""
    start = 0
    for i, link in enumerate(links):
        if link.anchor is not None or link.certified.commit.height == 0:
            start = i
    run = links[start:][-HISTORY:]
    if not run:
        return None, []
    first = len(links) - len(run)
    anchor = run[0].anchor if first == start else links[first - 1].certified.commit
    return anchor, [link.certified for link in run]
