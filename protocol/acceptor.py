"""What a member has promised and voted for about the next commit: the acceptor's side of consensus (Paxos).

Its ballot is a promise: at a lower one it votes for nothing any more. A vote is for one commit at one ballot, and comes after
the promise of that ballot. Both are on disk (`SaveVote`) before anybody hears of them, so that a member that is killed and
started again never says two things. With the next commit everything begins anew, at ballot 0 and without a vote.
"""

from dataclasses import dataclass

from farflung.protocol import chain
from farflung.protocol.effects import Effect, Note, SaveVote, Send
from farflung.protocol.errors import Refused
from farflung.protocol.keys import PeerId, Signer
from farflung.protocol.messages import Accepted, Propose, Voted
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import MAX_BALLOT_STEP


@dataclass(slots=True)
class Acceptor:
    """See the module. Whoever calls decides whether to promise or to vote; this keeps the two consistent."""

    height: int = 0
    """Of the commit that is open."""
    group: bytes = b""
    """Whose it is."""
    ballot: int = 0
    accepted: Accepted | None = None
    """The last vote."""
    voted_at: float | None = None
    """When it voted at this ballot, by the monotonic clock of this process."""

    def check_near(self, ballot: int, sender: PeerId) -> None:
        """Raises Refused: nobody may drive ballots up without limit."""
        if ballot > self.ballot + MAX_BALLOT_STEP:
            raise Refused(f"ballot {ballot}, far above our {self.ballot}", peer=sender)

    def check_alone(self, message: Propose, sender: PeerId) -> None:
        """Raises Refused when another commit was voted for at this ballot."""
        voted = self.accepted
        if voted is not None and voted.ballot == message.ballot and voted.commit != message.commit:
            raise Refused(f"two proposals at ballot {message.ballot}", peer=sender)

    @property
    def saved(self) -> SavedVote:
        """All that binds us here."""
        return SavedVote(self.height, self.ballot, self.accepted, self.group)

    def promise(self, ballot: int, reason: str) -> list[Effect]:
        """Go to a higher ballot."""
        self.ballot, self.voted_at = ballot, None
        note = Note("ballot", {"round": self.height, "ballot": ballot, "reason": reason})
        return [note, SaveVote(self.saved)]

    def vote(self, message: Propose, sender: PeerId, *, swarm: bytes, signer: Signer, now: float) -> list[Effect]:
        """Vote for a proposal at our ballot, which has been checked."""
        commit = message.commit
        self.accepted, self.voted_at = Accepted(message.ballot, commit), now
        digest = chain.commit_hash(swarm, commit)
        signature = signer.sign(chain.vote_bytes(swarm, commit.height, message.ballot, digest))
        return [
            SaveVote(self.saved),
            Send(sender, Voted(commit.height, message.ballot, digest, signature)),
        ]
