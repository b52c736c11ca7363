"""What each member of the consensus has said of the height that it last spoke of, and whether it keeps to that (invariant 5).

Paxos rests on two things: a promise bars lower ballots, and every later promise tells of the last vote. A process that is killed must not forget either, so whatever is
said is on disk before it is sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from farflung.protocol.chain import commit_hash
from farflung.protocol.messages import Promise, Voted
from farflung.protocol.saved_vote import SavedVote


@dataclass(slots=True)
class Word:
    """What a member is bound by, at one height of a group."""

    height: int
    promised: int = 0
    """Ballot below which it votes for nothing."""
    voted: tuple[int, bytes] | None = None
    """Ballot of its last vote, and what for."""


@dataclass(slots=True)
class Votes:
    """See the module. Peers are numbers."""

    broken: Callable[[str], None]
    """Told what was seen."""
    _words: dict[tuple[int, bytes], Word] = field(default_factory=dict)
    """By peer and group, wherever it has been since."""

    def on_word(
        self, index: int, message: Promise | Voted, swarm: bytes, saved: Mapping[bytes, SavedVote], group: bytes
    ) -> None:
        """A peer that is of a group by now sends this; `saved` is what its disk says at that moment, by group."""
        where = f"height {message.height}"
        if not _is_on_disk(message, swarm, saved.get(group)):  # perhaps it was said before its group became two
            group = next((of for of, vote in saved.items() if vote.height == message.height), group)
        if not _is_on_disk(message, swarm, saved.get(group)):
            said = "promises" if isinstance(message, Promise) else "votes"
            self.broken(f"peer {index} {said} at ballot {message.ballot} of {where}, which is not on its disk")
        word = self._words.get((index, group))
        if word is None or word.height < message.height:
            word = self._words[index, group] = Word(message.height)
        if message.height != word.height:
            return
        if message.ballot < word.promised:
            self.broken(f"peer {index} was at ballot {word.promised} of {where} and speaks at {message.ballot}")
        word.promised = max(word.promised, message.ballot)
        if isinstance(message, Voted):
            if word.voted is not None and word.voted[0] == message.ballot and word.voted[1] != message.digest:
                self.broken(f"peer {index} voted for two commits at ballot {message.ballot} of {where}")
            word.voted = (message.ballot, message.digest)
        elif word.voted is not None and (message.accepted is None or message.accepted.ballot < word.voted[0]):
            self.broken(f"peer {index} promises as if it had not voted at ballot {word.voted[0]} of {where}")


def _is_on_disk(message: Promise | Voted, swarm: bytes, saved: SavedVote | None) -> bool:
    """Whether a node that is killed now, and started again, will know that it said this. Ballot 0 needs no promise: nothing is below it."""
    if saved is not None and saved.height > message.height:
        return True
    if saved is None or saved.height < message.height:
        return isinstance(message, Promise) and message.ballot == 0
    if isinstance(message, Promise) or saved.ballot > message.ballot:
        return saved.ballot >= message.ballot
    voted = saved.accepted
    return (
        saved.ballot == message.ballot
        and voted is not None
        and voted.ballot == message.ballot
        and commit_hash(swarm, voted.commit) == message.digest
    )
