"""Keeping up with the history: asking for commits, answering who asks, and when to leave one's own history for a newer one."""

from dataclasses import dataclass, field

from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.errors import Refused
from farflung.protocol.history import History, check_chain
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Commits, GetCommits
from farflung.protocol.quorum import is_quorum, proposer
from farflung.protocol.settings import RESEND_S, Settings

MOST_DONORS = 3
"""Peers asked at a time."""


@dataclass(slots=True)
class Follower:
    """The part of the chain that one member knows, and what it asks others for."""

    settings: Settings
    me: PeerId
    history: History = field(default_factory=History)
    elsewhere: set[PeerId] = field(default_factory=set)
    """Members of our view that have come, by histories that we do not have, to another group: they have gone on without us."""
    _asked_at: float = -1e9
    _asked: frozenset[PeerId] = frozenset()
    _named: tuple[Certified | None, bytes] = (None, b"")
    """The head whose hash was asked for last, and the hash."""

    @property
    def started(self) -> bool:
        """Whether any history is known."""
        return self.history.newest is not None

    @property
    def height(self) -> int:
        """Of the head; -1 before there is one."""
        return self.history.head.commit.height if self.started else -1

    @property
    def in_view(self) -> bool:
        """Whether the head has us as a member."""
        newest = self.history.newest
        return newest is not None and self.me in newest.commit.view

    def turn(self, ballot: int) -> PeerId:
        """Who proposes the next commit at a ballot."""
        head = self.history.head.commit
        return proposer(self.settings.swarm, head.view, head.height + 1, ballot)

    def head_hash(self) -> bytes:
        """Of the head, 32 bytes: the parent of the next commit."""
        head = self.history.head
        if self._named[0] is not head:
            self._named = head, chain.commit_hash(self.settings.swarm, head.commit)
        return self._named[1]

    def leads_to(self, height: int, parent: bytes) -> bool:
        """Whether a commit of this height and parent is the next."""
        return height == self.height + 1 and parent == self.head_hash()

    def ask(self, donors: list[PeerId], now: float) -> list[Effect]:
        """Ask for what follows, not too often."""
        if now < self._asked_at + RESEND_S / 3 or not donors:
            return []
        self._asked_at = now
        self._asked = frozenset(donors[:MOST_DONORS])
        return [Send(p, GetCommits(self.height)) for p in donors[:MOST_DONORS]]

    def answer(self, sender: PeerId, after: int) -> list[Effect]:
        """What a peer lacks that knows the chain up to `after`."""
        answer = self.history.answer(after)
        return [Send(sender, answer)] if answer is not None else []

    def help_along(self, sender: PeerId, height: int, now: float) -> list[Effect]:
        """A message about another height than the next: catch up, or let the sender know that it is behind."""
        if height > self.height + 1:
            return self.ask([sender], now)
        if height <= self.height:
            return self.answer(sender, max(height - 1, 0))
        return []

    def jump(self, sender: PeerId, message: Commits, membership: Membership, now: float) -> Note | None:
        """Whether to leave our history, if any, for one that does not follow it; the caller does. None: not now.

        Raises Refused or BadSignature when nobody asked for it, or it does not hold together.
        """
        if sender not in self._asked:
            raise Refused("a history that we did not ask for", peer=sender)
        if self.started and not (
            self._descends(message.chain[0].commit)
            and self._left_behind(message.chain[0].commit.height, membership, now)
        ):
            return None
        check_chain(self.settings, message, sender)
        behind = f"from height {self.height} " if self.started else ""
        reason = f"{behind}to {message.chain[-1].commit.height}"
        return Note("history.jump", {"reason": reason, "of": sender.hex()})

    def check_next(self, sender: PeerId, certified: Certified) -> None:
        """Refuse a commit that does not follow from our head, or that no quorum decided. Raises Refused or BadSignature."""
        parent, rules = self.history.head.commit, self.settings
        chain.check_successor(rules.swarm, parent, certified.commit, rules.rules, peer=sender)
        chain.check_certificate(rules.swarm, certified, parent.view, peer=sender)

    def _descends(self, commit: Commit) -> bool:
        """Whether a commit is of our group, or of one that has come of it: its samples are a part of ours. Of another group versions are other bytes, and members of ours that
        have gone there are not where ours has gone."""
        ours = self.history.head.commit.ledger.shares
        return commit.ledger.shares[: len(ours)] == ours

    def _left_behind(self, height: int, membership: Membership, now: float) -> bool:
        """Whether the swarm has gone on without us for longer than anybody remembers: a quorum of the view we know says so, or all that is left of it, when the others have
        been silent for so long that they would have been removed. One peer's word is not enough to leave our own history for another, neither when we have just
        been started and heard nobody else yet, nor where none but ourselves could have gone on."""
        view = self.history.head.commit.view
        others = [p for p in view if p != self.me]
        beats = {p: membership.heartbeat(p) for p in others}
        ahead = {p for p, beat in beats.items() if beat is not None and beat.height >= height}
        ahead |= self.elsewhere & set(others)
        silent = {p for p in others if membership.dead_for(p, now) > self.settings.removal_s}
        return is_quorum(view, ahead) or (bool(others) and ahead | silent == set(others))
