"""What a machine still has on its disk of earlier lives of a stage (`protocol/lives.py`): the founder of the next one begins with it, if it is the best there is.

Its checkpoint is the outer state, the moments, and what it had trained since its last round. Plans are those of the old chain and mean nothing in the new
one, nor do ledgers but that of stage 0, which hands out samples: so that progress is counted by no round of its own. It stays in the local parameters,
and goes out with the first one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from farflung.node.storage import Place, Storage, newest_history
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import Ledger, inherited
from farflung.protocol.lives import Counters, Life


@dataclass(frozen=True, slots=True)
class Remains:
    """See the module."""

    storage: Storage
    place: Place
    step: int
    """Of the pipeline, up to which it has trained."""
    head: Commit
    """The newest that is known here."""

    def ledger(self, since: Counters) -> Ledger | None:
        """What a life of stage 0 that begins with this goes on with: who was lost had samples in hand, and trains them no more. None where the chain was
        heard to have counted more (`since`) than is known here: which samples, nobody can tell."""
        return None if since.version > self.head.version else inherited(self.head.ledger, self.place.trained)


def remains(lives: Iterable[Storage]) -> Remains | None:
    """Of the first of these disks that has any; None when none has. Blocks."""
    for storage in lives:
        place = storage.load_place()
        if place is None:
            continue
        _, history = newest_history(storage.load_history())
        counted = [one.commit.steps for one in history if one.commit.height == place.height]
        if counted:
            return Remains(storage, place, counted[0] + place.steps, history[-1].commit)
    return None


def spent(life: Life, storage: Storage) -> bool:
    """Whether a life of which this is its founder's disk was begun here, and its state is gone with the process that had it. Blocks.

    It can be neither served nor made again: others may have the state, and that would be other bits of the same version. The first life of a stage
    begins with what the manifest says, so whoever began that has it always.
    """
    return life.number > 0 and bool(storage.load_history()) and storage.load_place() is None


def is_called(life: Life, me: PeerId, storage: Storage | None) -> bool:
    """Whether it is us who are to begin a life anew, and it has not been begun; `storage`: of that life, None where there is none. Blocks."""
    return life.number > 0 and life.founder == me and (storage is None or not storage.load_history())
