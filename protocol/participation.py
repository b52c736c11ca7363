"""One member's part in one round: contributor, owner, receiver.

An owner that holds everybody's contribution to a part does not wait for the cut: it reduces at once, and sends the mean as an *early* one, which
holds if the cut leaves nobody out. If it does, early means are void for everybody, and owners reduce again. So early means are not
reported before the cut is known. With two parts for each owner, one after the other (`partition`), the means of the first
fill the links while the last contributions to the second are still on their way.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from farflung.protocol.chain import Commit, check_successor
from farflung.protocol.effects import Confirm, Contribute, Effect, FetchMean, Note, Reduce, Secure, Send
from farflung.protocol.errors import Refused
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import count
from farflung.protocol.limits import MAX_WAVES
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Collected, Fetch, Held, Plan, Promise, Ready
from farflung.protocol.settings import RESEND_S, VOTE_S, Settings

NEVER = -1e9
"""Longer ago than anything."""


def check_ready(ready: Ready, head: Commit, settings: Settings, sender: PeerId) -> None:
    """Refuse a contribution that claims samples its peer does not hold, or tokens that are not its samples."""
    held = count(head.ledger.window(sender))
    if not 0 < ready.samples <= held:
        raise Refused(f"ready with {ready.samples} samples, holding {held}", peer=sender)
    if ready.tokens != ready.samples * settings.rules.tokens_per_sample:
        raise Refused(f"ready with {ready.tokens} tokens of {ready.samples} samples", peer=sender)


def check_promise(promise: Promise, head: Commit, settings: Settings, sender: PeerId) -> None:
    """Refuse a promise from outside the view, and one that reports a vote which cannot have been. Raises Refused naming `sender`."""
    if sender not in head.view:
        raise Refused("a promise from outside the view", peer=sender)
    if promise.ready is not None:
        check_ready(promise.ready, head, settings, sender)
    if promise.accepted is not None:
        if promise.accepted.ballot > promise.ballot:
            raise Refused("a vote above its own promise", peer=sender)
        check_successor(settings.swarm, head, promise.accepted.commit, settings.rules, peer=sender)


def check_plan(plan: Plan, head: Commit, settings: Settings, me: PeerId, ready: Ready | None, sender: PeerId) -> None:
    """Refuse a plan that breaks the rules. Raises Refused naming `sender`."""

    def demand(holds: bool, what: str) -> None:
        if not holds:
            raise Refused(f"a plan for round {plan.height} {what}", peer=sender)

    contributors = [c.peer for c in plan.contributors]
    demand(list(plan.members) == sorted(set(plan.members)), "with unsorted or repeated members")
    demand(contributors == sorted(set(contributors)), "with unsorted or repeated contributors")
    demand(set(contributors) <= set(head.view) & set(plan.members), "with contributors from outside the view")
    demand(bool(contributors) and me in plan.members, "without contributors, or sent to an outsider")
    demand(len(plan.members) <= settings.rules.max_group, f"with {len(plan.members)} members")
    demand(
        (plan.uplink, plan.downlink) == settings.codecs(head),
        "with codecs that the manifest does not name for it",
    )
    limit = settings.max_round_s
    demand(0 < plan.scatter_s <= limit and 0 < plan.gather_s <= limit, f"with deadlines above {limit} s")
    position, end = settings.rules.span(head)
    for part in plan.parts:
        demand(part.owner in contributors, "with a part owned by somebody who does not contribute")
        demand(part.start == position and part.stop > part.start, "whose parts leave gaps or overlap")
        demand(
            part.start % settings.align == 0,
            f"with a part that does not begin at a multiple of {settings.align}",
        )
        position = part.stop
    demand(position == end, f"that ends at element {position}, not at {end}")
    most = max(Counter(part.owner for part in plan.parts).values())
    demand(most <= MAX_WAVES, f"with {most} parts of one owner")
    for contributor in plan.contributors:
        held = count(head.ledger.window(contributor.peer))
        samples, tokens = contributor.ready.samples, contributor.ready.tokens
        demand(0 < samples <= held, "with a contributor that does not hold its samples")
        demand(tokens == samples * settings.rules.tokens_per_sample, "with tokens that are not its samples")
        if contributor.peer == me and ready is not None:
            demand(contributor.ready == ready, "that misstates our contribution")


@dataclass(slots=True)
class Participation:
    """What this node does, holds and still owes in a round."""

    plan_id: bytes
    plan: Plan
    began_at: float
    contributing: bool
    digests: list[bytes] = field(default_factory=list)
    """Of the mean that we hold of each part; empty where we hold none."""
    cut: tuple[PeerId, ...] | None = None
    _early: set[int] = field(default_factory=set)
    """Parts of which the mean that we hold is an early one."""
    _reduced: set[int] = field(default_factory=set)
    """Parts of ours that were reduced early."""
    _collected: dict[int, set[PeerId]] = field(default_factory=dict)
    _reported_at: float = NEVER
    _shown_at: float = field(init=False)
    _secured: tuple[bytes, ...] = field(init=False)
    """`digests` when the means were last written to the disk itself."""
    _told: bool = False
    """That everything is here."""

    def __post_init__(self) -> None:
        self.digests = [b""] * len(self.plan.parts)
        self._secured = tuple(self.digests)
        self._shown_at = self.began_at  # nobody asks for less than everything so soon

    @property
    def expires_at(self) -> float:
        """When to give the proposer up: both phases, the vote, and the repetitions between."""
        return self.began_at + self.plan.scatter_s + self.plan.gather_s + VOTE_S + 4 * RESEND_S

    @property
    def complete(self) -> bool:
        return all(self.digests)

    def begin(self, me: PeerId) -> list[Effect]:
        self._collected = {k: set() for k, part in enumerate(self.plan.parts) if part.owner == me}
        self.contributing = self.contributing and any(c.peer == me for c in self.plan.contributors)
        return [Contribute(self.plan_id, self.plan)] if self.contributing else []

    def arrived(self, part: int, peer: PeerId) -> list[Effect]:
        """A contribution to a part of ours is here."""
        planned = {c.peer for c in self.plan.contributors}
        if part not in self._collected or peer not in planned:
            return []
        self._collected[part].add(peer)
        self._reported_at = NEVER  # what was reported is out of date, and a cut by it would throw this away
        if self.cut is not None or part in self._reduced or self._collected[part] != planned:
            return []
        self._reduced.add(part)
        return [self._reduce(part, planned, early=True)]

    def report(self, membership: Membership, proposer: PeerId, now: float) -> list[Effect]:
        """Tell the proposer whose contributions we hold, once nobody else's can be expected.

        Whom we have not heard yet, the proposer has: its contribution may come before its first message does. Between whom nothing passes, it will not come.
        """
        if self.cut is not None or not self._collected or now < self._reported_at + RESEND_S:
            return []
        have = set.intersection(*self._collected.values())
        missing = {c.peer for c in self.plan.contributors} - have
        vouched_for = now < self.began_at + membership.verdict_s
        hoped_for = [
            p
            for p in missing
            if not membership.apart(p) and (membership.alive(p) or (vouched_for and not membership.gone(p)))
        ]
        if hoped_for and now < self.began_at + self.plan.scatter_s:
            return []
        self._reported_at = now
        return [Send(proposer, Collected(self.plan_id, tuple(sorted(have))))]

    def lacked(self) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Whose contributions all of our parts have, and whose not; nobody's where we own none."""
        if not self._collected:
            return frozenset(), frozenset()
        have = frozenset.intersection(*(frozenset(peers) for peers in self._collected.values()))
        return have, frozenset(c.peer for c in self.plan.contributors) - have

    def on_cut(self, sender: PeerId, contributors: tuple[PeerId, ...]) -> list[Effect]:
        if self.cut is not None:
            return []
        planned = {c.peer for c in self.plan.contributors}
        if not contributors or list(contributors) != sorted(planned & set(contributors)):
            raise Refused(f"a cut of round {self.plan.height} with contributors that were not planned", peer=sender)
        self.cut = contributors
        effects: list[Effect] = [
            Note("round.cut", {"round": self.plan.height, "contributors": [p.hex() for p in contributors]})
        ]
        if self._is_void:
            for part in self._early:
                self.digests[part] = b""
            self._early.clear()
            self._reduced.clear()
        for part, have in self._collected.items():
            if have >= set(contributors) and part not in self._reduced:
                effects.append(self._reduce(part, contributors, early=False))
        return effects if self._is_void else [*effects, Confirm(self.plan_id)]

    def _reduce(self, part: int, contributors: Collection[PeerId], *, early: bool) -> Reduce:
        tokens = {c.peer: c.ready.tokens for c in self.plan.contributors if c.peer in contributors}
        total = sum(tokens.values())
        return Reduce(self.plan_id, self.plan, part, tuple((p, tokens[p] / total) for p in sorted(tokens)), early)

    def on_fetch(self, message: Fetch) -> list[Effect]:
        if message.part >= len(self.digests) or self.digests[message.part] == message.digest:
            return []
        return [FetchMean(self.plan_id, message.part, message.digest, message.holders)]

    def hold(self, part: int, digest: bytes, *, early: bool = False) -> None:
        """The mean of a part is here. An early one never takes the place of one that was made after the cut."""
        if not 0 <= part < len(self.digests):
            return
        if early and (self._is_void or (self.digests[part] and part not in self._early)):
            return
        self.digests[part] = digest
        if early:
            self._early.add(part)
        else:
            self._early.discard(part)

    @property
    def _is_void(self) -> bool:
        """Whether early means are."""
        return self.cut is not None and len(self.cut) < len(self.plan.contributors)

    def show(self, proposer: PeerId, now: float) -> list[Effect]:
        """Tell the proposer what we hold: at once when it is everything, else now and then."""
        if self.cut is None and self._early:
            return []
        if not self.complete and now < self._shown_at + RESEND_S:
            return []
        self._shown_at = now
        digests = tuple(self.digests)
        effects: list[Effect] = []
        # A commit may say that we hold these, be it one without the parts that nobody holds; and it outlives our power.
        if digests != self._secured:
            self._secured = digests
            effects.append(Secure(self.plan_id))
        effects.append(Send(proposer, Held(self.plan_id, digests)))
        if self.complete and not self._told:
            self._told = True
            effects.append(Note("round.held", {"round": self.plan.height}))
        return effects

    def tick(self, membership: Membership, proposer: PeerId, now: float) -> list[Effect]:
        effects = self.report(membership, proposer, now)
        if self.cut is not None and now >= self._shown_at + RESEND_S:
            effects += self.show(proposer, now)
        return effects

    def check_result(self, commit: Commit, sender: PeerId) -> None:
        """Refuse a commit that misreports the plan we took part in. Raises Refused."""
        result = commit.round
        if result is None or result.plan != self.plan_id:
            return
        planned = {c.peer: c.ready for c in self.plan.contributors}
        if any(
            c.peer not in planned or (c.tokens, c.samples) != (planned[c.peer].tokens, planned[c.peer].samples)
            for c in result.contributors
        ):
            raise Refused(f"commit {commit.height} counts contributions that were not planned", peer=sender)
        if self.cut is not None and self.cut != tuple(c.peer for c in result.contributors):
            raise Refused(f"commit {commit.height} counts others than its cut", peer=sender)
        ranges = [(p.owner, p.start, p.stop) for p in self.plan.parts]
        if [(p.owner, p.start, p.stop) for p in result.parts] != ranges:
            raise Refused(f"commit {commit.height} has other parts than its plan", peer=sender)
