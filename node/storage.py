"""What a node must not forget, on disk: votes, history, means not yet in a checkpoint, the learner and its place in the data.

    vote, vote-GROUP    what was promised and voted for at the open height of each group that this node has been in; written before the vote leaves
    history.msgpack     certified commits, appended one by one; of 1024 only the newest half is kept, which is all that is ever loaded
    means/PLAN          encoded means of a round (`mean_files`): of undecided ones, of the last eight committed, and of all since the last checkpoint
    chunks/             outer state of a late join that is not complete yet
    learner-a, -b       the replica and the residuals of error feedback (safetensors), and their place: which height they are at, which
                        samples the replica's progress has used
    current             which of the two counts

`kill -9` at any moment leaves a state from which the node goes on: the learner's checkpoint, plus the means of the rounds after it.
"""

import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct
from torch import Tensor

from farflung.compression.codec import Payload
from farflung.node.durable import UNFINISHED, Journal, Slots, sync_folder, write_atomically, writing
from farflung.node.learner import Learner, Saves
from farflung.node.mean_files import MeanFiles
from farflung.protocol.chain import Certified, Commit, check_certificate
from farflung.protocol.errors import BadSignature, DiskFull, LocalError, Refused
from farflung.protocol.keys import short
from farflung.protocol.limits import MAX_CONTROL_BYTES
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import HISTORY
from farflung.protocol.types import Intervals
from farflung.training.checkpoint import read_state, write_state

T = TypeVar("T")

TakeChunk = Callable[[int, int, bytes], None]
"""Of outer state: its number, its version, and what it is."""

VOTE = "vote"
MEANS = "means"
HISTORY_FILE = "history.msgpack"
PLACE = "place.msgpack"
CURRENT = "current"

MAX_VOTE_BYTES = MAX_CONTROL_BYTES
"""What is voted for came in a message."""

LOST_VOTE = (
    "this node does not know any more what it promised at the open height. Remove this file, and no other, once the other members have "
    "gone a commit further (a lone node need not wait), and join again"
)
LOST_STATE = (
    "remove `learner-a`, `learner-b` and `current` of that folder, and nothing else in it: what this node has voted for must not be forgotten. "
    "Then join again: other members bring the state. Where there are none nobody can, so keep a copy"
)
LOST_HISTORY = (
    "remove `history.msgpack`, `learner-a`, `learner-b` and `current` of that folder, and nothing else in it: what this node has voted for must "
    "not be forgotten. Then join again: other members bring history and state. Where there are none nobody can: remove the history only, and "
    "`farflung export` still gives the model"
)
"""What to do where that is damaged."""

RESIDUALS = "residuals"
"""Folder in that of a learner."""

MOST_LINKS = 2 * HISTORY
"""Entries of the history file at which it is written anew: the protocol remembers HISTORY, and one file in so many commits costs little."""

_VOTE = re.compile(rf"{VOTE}(-[0-9a-f]+)?")
_CHUNK = re.compile(rf"([0-9]+)-([0-9]+)(?:{re.escape(UNFINISHED)})?")


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
    missed: int = 0
    """Of the steps, those in the place of which laps have ended without them (`Progress`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a learner has in memory already, and what has been saved with it: nothing needs to be read."""

    place: Place
    residuals: dict[str, Tensor]


class Link(Struct, frozen=True, array_like=True):
    """One entry of the saved history; the first one carries its parent."""

    anchor: Commit | None
    certified: Certified


class Storage(Protocol):
    """All methods block; the node calls them through its door or before it serves. On disk, they raise LocalError with what to do: where a file is
    damaged, or the disk does not take what is written.
    """

    def clear(self) -> None:
        """Forget everything but votes, for good: nothing else is asked of this storage."""

    def save_vote(self, vote: SavedVote) -> None:
        """In the place of the last one of its group."""

    def load_votes(self) -> list[SavedVote]:
        """The newest of each group."""

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        """`anchor` is the parent when `certified` does not follow what was appended last."""

    def load_history(self) -> list[Link]: ...

    def save_mean(self, plan: bytes, part: int, payload: Payload) -> None: ...

    def load_mean(self, plan: bytes, part: int, digest: bytes) -> bytes | None:
        """The mean that was saved with this digest."""

    def sync_means(self, plan: bytes) -> None:
        """All means of the plan that are here survive a power failure from now on."""

    def drop_means(self, plan: bytes) -> None: ...

    def save_chunk(self, index: int, version: int, data: bytes) -> None:
        """One verified chunk of a state transfer that is not complete yet, in the place of that of another version."""

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
        self._votes: dict[bytes, Slots] = {}
        """By group."""
        self._history = Journal(folder / HISTORY_FILE, LOST_HISTORY)
        self._means = MeanFiles(folder / MEANS)
        self._chunks: dict[int, Path] | None = None
        """By number, those of a download; None: not looked at yet."""
        (folder / "chunks").mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        self.sweep()
        with writing(self.folder):
            self.folder.rename(self._given_up)  # at once: a state without its history is damage
            sync_folder(self.folder.parent)
        self.sweep()

    def sweep(self) -> None:
        """Finish a `clear` that was cut short: take the votes along, and remove the rest."""
        with writing(self._given_up):
            if not self._given_up.exists():
                return
            self.folder.mkdir(exist_ok=True)
            for path in _vote_files(self._given_up):
                path.rename(self.folder / path.name)
            for plan in filter(None, (vote.plan for vote in self.load_votes())):
                self._means.take(plan, self._given_up / MEANS)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
            shutil.rmtree(self._given_up)

    @property
    def _given_up(self) -> Path:
        return self.folder.with_name(self.folder.name + ".given-up")

    def save_vote(self, vote: SavedVote) -> None:
        slots = self._votes.get(vote.group)
        if slots is None:
            name = f"{VOTE}-{vote.group.hex()}" if vote.group else VOTE
            slots = self._votes[vote.group] = _slots(self.folder / name)
        slots.save(msgspec.msgpack.encode(vote))

    def load_votes(self) -> list[SavedVote]:
        found = ((path, _slots(path).load()) for path in _vote_files(self.folder))
        return [_decode(path, data, SavedVote, LOST_VOTE) for path, data in found if data is not None]

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        if self._history.count() >= MOST_LINKS:
            self._compact_history()
        self._history.append(msgspec.msgpack.encode(Link(anchor, certified)))

    def _compact_history(self) -> None:
        """Keep what a start would take up (`newest_history`)."""
        anchor, kept = newest_history(self.load_history())
        links = [Link(anchor if i == 0 else None, certified) for i, certified in enumerate(kept)]
        self._history.replace([msgspec.msgpack.encode(link) for link in links])

    def load_history(self) -> list[Link]:
        path = self.folder / HISTORY_FILE
        return [_decode(path, entry, Link, LOST_HISTORY) for entry in self._history.load()]

    def save_mean(self, plan: bytes, part: int, payload: Payload) -> None:
        self._means.append(plan, part, payload)

    def load_mean(self, plan: bytes, part: int, digest: bytes) -> bytes | None:
        return self._means.load(plan, part, digest)

    def sync_means(self, plan: bytes) -> None:
        self._means.sync(plan)

    def drop_means(self, plan: bytes) -> None:
        self._means.drop(plan)

    def save_chunk(self, index: int, version: int, data: bytes) -> None:
        if self._chunks is None:
            self._chunks = {known: path for known, _, path in self._saved_chunks() if path.suffix != UNFINISHED}
        path = self.folder / "chunks" / f"{index}-{version}"
        write_atomically(path, data)
        before = self._chunks.get(index)
        if before not in (None, path):  # of a pass that had to be made again
            before.unlink(missing_ok=True)
        self._chunks[index] = path

    def load_chunks(self, take: TakeChunk) -> None:
        for index, version, path in self._saved_chunks():
            if path.suffix != UNFINISHED:
                take(index, version, path.read_bytes())

    def plans_with_means(self) -> set[bytes]:
        return self._means.plans()

    def save_learner(
        self, learner: Saves, residuals: Mapping[str, Tensor], place: Place, drop: Collection[bytes]
    ) -> None:
        # Two folders in turn, and one small file that says which counts: the switch is one atomic rename.
        slot = "a" if self._current() != "a" else "b"
        folder = self.folder / f"learner-{slot}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with writing(folder):
                learner.save(folder)
                if residuals:
                    write_state(folder / RESIDUALS, residuals, {})
            write_atomically(folder / PLACE, msgspec.msgpack.encode(place))
        except DiskFull:
            shutil.rmtree(folder, ignore_errors=True)  # votes, commits and means have its room
            raise
        write_atomically(self.folder / CURRENT, slot.encode())
        for plan in drop:
            self._means.drop(plan)
        for *_, path in self._saved_chunks():
            path.unlink(missing_ok=True)
        self._chunks = {}

    def load_learner(self, learner: Learner) -> Place | None:
        saved = self.saved_learner()
        if saved is None:
            return None
        folder, place = saved
        self._check_known(place)
        learner.load(folder)
        return place

    def _check_known(self, place: Place) -> None:
        """A checkpoint is never written before the commit that it is of."""
        links = self.load_history()
        newest = links[-1].certified.commit.height if links else -1
        if place.height > newest:
            raise LocalError(
                f"{self.folder / HISTORY_FILE} has lost its end: it goes up to height {newest}, the checkpoint beside it is of height "
                f"{place.height}; {LOST_HISTORY}"
            )

    def load_place(self) -> Place | None:
        saved = self.saved_learner()
        return None if saved is None else saved[1]

    def load_residuals(self) -> dict[str, Tensor]:
        slot = self._current()
        folder = self.folder / f"learner-{slot}" / RESIDUALS
        return read_state(folder)[0] if slot is not None and folder.exists() else {}

    def saved_learner(self) -> tuple[Path, Place] | None:
        """Folder and place of the checkpoint that counts; None when there is none. Raises LocalError where they are damaged."""
        slot = self._current()
        if slot is None:
            return None
        folder = self.folder / f"learner-{slot}"
        path = folder / PLACE
        if not path.exists():
            raise LocalError(f"{path} is missing; {LOST_STATE}")
        return folder, _decode(path, path.read_bytes(), Place, LOST_STATE)

    def _current(self) -> str | None:
        path = self.folder / CURRENT
        if not path.exists():
            return None
        slot = path.read_bytes()
        if slot not in (b"a", b"b"):
            raise LocalError(f"{path} is damaged; {LOST_STATE}")
        return slot.decode()

    def _saved_chunks(self) -> list[tuple[int, int, Path]]:
        """Number and version of each, and its file. Other files are not ours to touch."""
        found = [(_CHUNK.fullmatch(path.name), path) for path in sorted((self.folder / "chunks").iterdir())]
        return [(int(name[1]), int(name[2]), path) for name, path in found if name is not None]


def _vote_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _VOTE.fullmatch(path.name))


def _slots(path: Path) -> Slots:
    return Slots(path, MAX_VOTE_BYTES, LOST_VOTE)


def _decode(path: Path, data: bytes, kind: type[T], remedy: str) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise LocalError(f"{path} is damaged ({error}); {remedy}") from error


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


def check_ours(history: Sequence[Certified], swarm: bytes, folder: Path) -> None:
    """Raises LocalError where the newest commit is none that this swarm has voted for: somebody has mixed up folders, and would train on from another model."""
    if not history:
        return
    newest = history[-1]
    try:
        check_certificate(swarm, newest, tuple(vote.voter for vote in newest.votes), peer=swarm)
    except (BadSignature, Refused) as error:
        raise LocalError(
            f"{folder} has the history of another swarm than {short(swarm)}: move it away, put back what was there, or join again without it: other members "
            "bring history and state"
        ) from error
