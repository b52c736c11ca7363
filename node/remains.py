"""What a machine still has on its disk of earlier lives of a stage (`protocol/lives.py`): the founder of the next one begins with it, if it is the best there is.

Its checkpoint is the outer state, the moments, and what it had trained since its last round. Ledgers and plans are those of the old chain and mean
nothing in the new one, so that progress is counted by no round of its own: it stays in the local parameters, and goes out with the first one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from farflung.node.storage import Place, Storage, newest_history
from farflung.protocol.lives import Life


@dataclass(frozen=True, slots=True)
class Remains:
    """See the module."""

    storage: Storage
    place: Place
    step: int
    """Of the pipeline, up to which it has trained."""


def remains(lives: Iterable[Storage]) -> Remains | None:
    """Of the first of these disks that has any; None when none has. Blocks."""
    for storage in lives:
        place = storage.load_place()
        if place is None:
            continue
        _, history = newest_history(storage.load_history())
        counted = [one.commit.steps for one in history if one.commit.height == place.height]
        if counted:
            return Remains(storage, place, counted[0] + place.steps)
    return None


def spent(life: Life, storage: Storage) -> bool:
    """Whether a life of which this is its founder's disk was begun here, and its state is gone with the process that had it. Blocks.

    It can be neither served nor made again: others may have the state, and that would be other bits of the same version. The first life of a stage
    begins with what the manifest says, so whoever began that has it always.
    """
    return life.number > 0 and bool(storage.load_history()) and storage.load_place() is None
