"""The judge of a simulated swarm: every invariant of the design (§5), checked while it runs, by means of its own.

Of attackers (`attacks`) it asks nothing; of the others everything, whatever those do. It sees the events of all nodes, every message, every pseudo-gradient, and, every two seconds, what each node holds. Nothing that it checks is checked with the code
that is judged: it counts votes, follows the samples, and computes means and outer steps itself.

    1  same version, same bits           digests that nodes announce, and those of the state they really hold
    2  no commit, no outer step          the state held is the one of the version named; local progress is the sum of its samples, and given up
                                         where the samples are lost only; each fragment has its turn
    3  the dead cost only their own      a cut leaves nobody out whom all owners hold that it keeps (`cuts`); in calm, no part of a round is left out
    4  divide by contributors            the step of a round is the mean that its contributors' pseudo-gradients and tokens give, and tokens are those
                                         of the samples
    5  one history                       one commit per height, each by a majority of valid signatures of the view before; nobody takes back what
                                         it promised or voted for, killed and started again or not, so that is on disk before it is sent (`votes`)
    6  each sample once                  the intervals of done, held, free and suspended tile [0, cursor); who contributes, contributes what is counted; what the
                                         vanished had is kept for them as long as their lease, and handed out again before anything new
    7  exactly-once accumulation         as 4: a contribution that counts twice makes another mean; and nobody sends one twice under one plan, as whoever
                                         takes up a plan again that is under way or over
    8  bad messages are typed errors     honest nodes refuse nothing but what is late or repeated, and no node crashes
    9  a missed round has a reason       whoever sent a contribution that was not counted has said why (`debts`)
    0  the swarm lives                   in calm, rounds go on and nobody is left behind
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from farflung.node.events import Event
from farflung.protocol import chain, ledger, messages
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.envelope import Envelope
from farflung.protocol.errors import BadSignature, RemoteError
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, verify
from farflung.protocol.messages import Collected, Cut, Forward, Part, Plan, Promise, Voted
from farflung.protocol.proposer import Phase, plan_id
from farflung.sims.audit import HONEST_REFUSALS
from farflung.sims.chronicle import Chronicle
from farflung.sims.cuts import Cuts
from farflung.sims.debts import Debts
from farflung.sims.intervals import numbers
from farflung.sims.outer_audit import bits
from farflung.sims.steps import ROUNDING, Steps
from farflung.sims.swarm import Swarm
from farflung.sims.votes import Votes
from farflung.training.outer import OuterState

MOST_LOOKED_AT = 32
"""Peers whose outer states are compared in one look."""

OUTSIDE_S = 20.0
"""How long a member may be outside in the end where messages are lost: two or three rounds of a small swarm."""

_FORWARD = Forward.__struct_config__.tag
_LOOKED_AT = frozenset(kind.__struct_config__.tag for kind in (Promise, Voted, Plan, Collected, Cut))
_envelopes = msgspec.msgpack.Decoder(Envelope)


@dataclass(slots=True)
class Judge:
    """See the module."""

    broken: Callable[[int, str], None]
    """Told the number of an invariant and what was seen; once for each."""
    known_means: bool = True
    """Whether means can be told from what contributors sent (`outer_audit.known_means`), and are compared."""
    swarm: Swarm = field(init=False)
    groups: dict[bytes, Chronicle] = field(default_factory=lambda: {b"": Chronicle()})
    """What is known of each group's history, by its name."""
    calm: bool = False
    """Whether nothing has gone wrong for long enough that everything must be well."""
    _verdicts: set[tuple[int, str]] = field(default_factory=set)
    _homes: dict[int, bytes] = field(default_factory=dict)
    """By peer, of which group it is, or was when it ended."""
    _seen: dict[int, dict[int, Certified]] = field(default_factory=dict)
    """By peer and height, what has been compared with what is known."""
    _votes: Votes = field(init=False)
    _heard: bytes = b""
    """The last message; a broadcast is heard once."""
    _counted_once: list[tuple[int, int]] = field(default_factory=list)
    """Samples that commits of all groups have counted."""
    _steps: Steps = field(init=False)
    _diverged: set[int] = field(default_factory=set)
    """Peers that may give up what they have trained since, for a step of theirs came to no number."""
    _plans: dict[int, tuple[int, set[str]]] = field(default_factory=dict)
    """By peer, the height of the round that it last sent a contribution for, and the plans under which it did, since it was started."""
    _cuts: Cuts = field(default_factory=Cuts)
    _well_at: dict[int, float] = field(default_factory=dict)
    """By peer, when it was last found well, seconds of the simulation's clock."""
    _looked_at: int = -1
    """Whose state was looked at last, where they are many."""
    _debts: defaultdict[int, Debts] = field(default_factory=lambda: defaultdict(Debts))
    """By peer."""

    def __post_init__(self) -> None:
        self._votes = Votes(lambda detail: self.violate(5, detail))
        self._steps = Steps(self.violate, known_means=self.known_means)

    def violate(self, which: int, detail: str) -> None:
        if (which, detail) not in self._verdicts:
            self._verdicts.add((which, detail))
            self.broken(which, detail)

    # ---- as it happens -----------------------------------------------------------------------------------------

    def on_gradient(self, index: int, samples: tuple[int, ...], gradient: Tensor) -> None:
        self._look_at_history(index)  # of the round before it nobody may have said anything so far
        for height in self._debts[index].sent_samples(samples, self._group_of(index).rounds()):
            self.violate(9, f"peer {index} does not say what became of what it sent to round {height}")
        self._steps.contributes(index, samples, gradient)

    def on_meeting(self, index: int, plan: bytes, part: Part, term: Tensor) -> None:
        self._steps.meets(self.swarm, index, self._group_of(index), self.groups.values(), plan, part, term)

    def on_message(self, sender: PeerId, data: bytes) -> None:
        if data is self._heard:
            return
        self._heard = data
        if sender in self.swarm.attackers:
            self._note_attackers_report(sender, data)
            return
        envelope = _envelopes.decode(data[:-SIGNATURE_BYTES])
        if envelope.sender != sender:
            return  # it passes on what its author was looked at for
        if envelope.kind == _FORWARD:
            forward = messages.decode(envelope.body, peer=sender)
            assert isinstance(forward, Forward)
            data = forward.sealed
            envelope = _envelopes.decode(data[:-SIGNATURE_BYTES])
        if envelope.kind not in _LOOKED_AT:
            return
        message = messages.decode(envelope.body, peer=sender)
        match message:
            case Promise() | Voted():
                index = self.swarm.numbers[sender]
                settings = self.swarm.outfit.terms.settings
                peer = self.swarm.peers.get(index)
                group = peer.member.group if peer is not None else b""
                self._votes.on_word(index, message, settings.swarm, self.swarm.saved_votes(index), group)
            case Plan():
                self._cuts.plan(plan_id(self.swarm.outfit.terms.settings.swarm, message), message)
            case Collected():
                self._cuts.report(sender, data, message)
            case Cut():
                self._on_cut(sender, message)

    def _note_attackers_report(self, sender: PeerId, data: bytes) -> None:
        """What an attacking owner says that it holds: for that an honest proposer may leave others out. Whatever else it sends may be anything, and is not looked at."""
        try:
            envelope = _envelopes.decode(data[:-SIGNATURE_BYTES])
            message = messages.decode(envelope.body, peer=sender)
            if isinstance(message, Forward):
                data = message.sealed
                message = messages.decode(_envelopes.decode(data[:-SIGNATURE_BYTES]).body, peer=sender)
        except (msgspec.MsgspecError, RemoteError):
            return
        if isinstance(message, Collected):
            self._cuts.report(sender, data, message)

    def on_delivery(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        """A message has come to its receiver, who has not looked at it yet."""
        self._cuts.arrives(sender, receiver, data, self._has_cut, self.swarm.attackers)

    def _has_cut(self, sender: PeerId, plan: bytes) -> bool:
        peer = self.swarm.peers.get(self.swarm.numbers[sender])
        proposer = None if peer is None else peer.member.consensus.proposer
        return proposer is not None and proposer.plan_id == plan and proposer.phase is not Phase.SCATTER

    def _on_cut(self, sender: PeerId, message: Cut) -> None:
        peer = self.swarm.peers.get(self.swarm.numbers[sender])
        proposer = None if peer is None else peer.member.consensus.proposer
        if proposer is None or proposer.plan is None or proposer.plan_id != message.plan:
            return  # it is of a life that is over
        for left_out in self._cuts.thrown_away(message, sender, proposer.collected.get(sender)):
            whose = f"the contribution of peer {self.swarm.numbers[left_out]}"
            self.violate(3, f"round {proposer.plan.height} throws {whose} away, which all owners hold that it keeps")

    def on_event(self, index: int, event: Event) -> None:
        if self.swarm.ids[index] in self.swarm.attackers:  # it may say anything
            if event["event"] == "round.commit":
                self._steps.came_to(self.swarm.learners[index].outer.params, index)
            return
        match event["event"]:
            case "node.start":
                self._debts.pop(index, None)
                self._plans.pop(index, None)
                self._steps.came_to(self.swarm.learners[index].outer.params, index)
            case "round.scatter":
                self._debts[index].sent(int(event["round"]))
                self._on_scatter(index, int(event["round"]), str(event["plan"]))
            case "round.plan" if self.calm:
                self._group_of(index).planned_in_calm.add(int(event["round"]))
            case "round.missed":
                self._debts[index].excused(self._group_of(index).rounds())
                if not event["reason"]:
                    self.violate(9, f"peer {index} missed a round without a reason")
            case "round.commit":
                self._on_commit(index, event)
            case "refused" if event["error"] not in HONEST_REFUSALS:
                if bytes.fromhex(event["of"]) in self.swarm.attackers:
                    return
                self.violate(8, f"peer {index} refused an honest message: {event['error']}: {event['reason']}")
            case "step.diverged":
                self._diverged.add(index)
            case "step" | "step.passed":
                self._diverged.discard(index)
            case "progress.dropped" if event["steps"] and index not in self._diverged:
                self._check_dropped(index)
            case "invariant.broken":
                self.violate(int(event["which"]), f"peer {index} says: {event['detail']}")

    def _check_dropped(self, index: int) -> None:
        """Whoever gives up what it has trained must have lost the samples: by a commit that it has come to since, they are not the first ones any more that it holds, or
        that are kept for it. The learner still has them: it is told after the log."""
        peer = self.swarm.peers[index]
        self._look_at_history(index)
        group = self._group_of(index)
        trained, me = self.swarm.learners[index].trained, self.swarm.ids[index]
        for height in range(peer.applier.height, peer.member.head.commit.height + 1):
            commit = group.commit(height)
            if commit is None:
                return  # of an earlier life
            entries = commit.ledger
            own = entries.window(me) or next((s.intervals for s in entries.suspended if s.peer == me), ())
            if numbers(ledger.split(own, len(trained))[0]) != trained:
                return
        self.violate(2, f"peer {index} gave up {len(trained)} samples that it had trained and nobody else has")

    def _on_scatter(self, index: int, height: int, plan: str) -> None:
        at, plans = self._plans.get(index, (height, set()))
        if at != height:
            plans = set()
        if plan in plans:
            self.violate(7, f"peer {index} sent its contribution to round {height} twice under plan {plan[:8]}")
        self._plans[index] = (height, plans | {plan})

    def _on_commit(self, index: int, event: Event) -> None:
        group = self._group_of(index)
        version, digest = int(event["version"]), str(event["digest"])
        if group.of(version).digests.setdefault(version, digest) != digest:
            self.violate(1, f"peer {index} holds other bytes at version {version}")
        if int(event["round"]) in group.planned_in_calm and event["parts_left_out"]:
            self.violate(3, f"round {event['round']} left parts out, and nobody was gone")
        self._look_at_history(index)
        self._check_debts(group, index, int(event["round"]))
        outer, chronicle = self.swarm.learners[index].outer, group.at(int(event["round"]))
        self._steps.check(self.swarm, chronicle, outer, version, int(event["round"]))
        if len(self.groups) > 1:
            self._steps.came_to(outer.params, index, chronicle.recently())

    def _check_debts(self, group: Chronicle, index: int, height: int) -> None:
        """What a peer had sent until the round that it has applied: by the history, for it may have the outer state after a round from others, and say nothing of the round."""
        for sent, by in self._debts[index].committed(height, group.rounds()):
            commit = group.commit(by)
            assert commit is not None and commit.round is not None
            if self.swarm.ids[index] not in {one.peer for one in commit.round.contributors}:
                self.violate(9, f"peer {index} does not say why round {by} missed what it sent to round {sent}")

    # ---- every two seconds -------------------------------------------------------------------------------------

    def look(self, *, everybody: bool = False) -> None:
        """`everybody`: at all states, however many there are."""
        self.look_at_histories()
        self.look_at_learners(sorted(self.swarm.peers) if everybody else self._some_peers())

    def look_at_histories(self) -> None:
        """One history (invariant 5), and what its commits say of the samples (6)."""
        for index in sorted(self.swarm.peers):
            self._read_history(index)
        self._follow_all()

    def _look_at_history(self, index: int) -> None:
        self._read_history(index)
        self._follow_all()

    def _read_history(self, index: int) -> None:
        peer = self.swarm.peers.get(index)
        if peer is None or not peer.member.started:
            return
        head = peer.member.head
        self._homes[index] = head.commit.group
        seen = self._seen.setdefault(index, {})
        if seen.get(head.commit.height) is head:
            return
        news: list[Certified] = []
        for certified in reversed(peer.member.history):
            if seen.get(certified.commit.height) is certified:
                break  # frozen, and compared when it was new, as those before it were
            news.append(certified)
        for certified in reversed(news):
            height = certified.commit.height
            seen[height] = certified
            group = self._entered(certified.commit)
            known = group.history.setdefault(height, certified.commit)
            if known is not certified.commit and known != certified.commit:
                self.violate(5, f"peer {index} has another commit {height}")
            self._check_votes(group, certified)

    def _follow_all(self) -> None:
        """What the commits that are known by now say of the samples."""
        for group in list(self.groups.values()):
            while (following := group.follows) is not None:
                self._follow(group, following)

    def _entered(self, commit: Commit) -> Chronicle:
        """The group whose commit this is; it may be the first that we hear of it."""
        if commit.group not in self.groups:
            assert commit.half is not None, "a group begins where another becomes two"
            before = self.groups[commit.half.group]
            self.groups[commit.group] = Chronicle(before=before, since=commit, followed=commit.height - 1)
        return self.groups[commit.group]

    def _group_of(self, index: int) -> Chronicle:
        """To which a peer belongs."""
        member = self.swarm.peers[index].member
        name = member.head.commit.group if member.started else b""
        if name not in self.groups:
            self.look_at_histories()
        return self.groups[name]

    def _check_votes(self, group: Chronicle, certified: Certified) -> None:
        commit = certified.commit
        checked = group.certificates.setdefault(commit.height, [])
        if certified in checked:
            return
        checked.append(certified)
        swarm, founder = self.swarm.outfit.terms.settings.swarm, self.swarm.outfit.terms.settings.founder
        parent = group.commit(commit.height - 1)
        if commit.height > 0 and parent is None:
            return  # from before the judge's time
        voters = (founder,) if parent is None else parent.view
        signed = chain.vote_bytes(swarm, commit.height, certified.ballot, chain.commit_hash(swarm, commit))
        valid = {v.voter for v in certified.votes if v.voter in voters and _signed(v.voter, v.signature, signed)}
        if not _majority(voters, valid):
            self.violate(5, f"commit {commit.height} was decided by {len(valid)} of {len(voters)} votes")

    def _follow(self, group: Chronicle, commit: Commit) -> None:
        """Each sample is counted once, and none is lost (invariant 6), by what the ledgers of all commits say."""
        for which, detail in group.follow(commit, self.swarm.outfit.terms.settings.rules):
            self.violate(which, detail)
        self._count_once(commit, group.taken(commit))

    def _count_once(self, commit: Commit, taken: Iterable[tuple[int, int]]) -> None:
        """No sample is counted by two groups, nor twice by one."""
        position = 0
        for start, stop in sorted([*self._counted_once, *taken]):
            if start < position:
                self.violate(6, f"commit {commit.height} counts sample {start} for the second time")
            position = max(position, stop)
        self._counted_once = list(ledger.join(sorted([*self._counted_once, *taken])))

    def look_at_learners(self, peers: Iterable[int]) -> None:
        """No commit, no outer step (2), and what a learner trained is what its place says (6)."""
        for index in peers:
            peer, learner = self.swarm.peers[index], self.swarm.learners[index]
            trainer, applier = peer.trainer, peer.applier
            if self.swarm.ids[index] in self.swarm.attackers:
                continue
            if not applier.idle or not applier.steady.is_set() or applier.version < 0:
                continue
            if not self._is_state(self._group_of(index).of(applier.version), learner.outer, applier.version):
                self.violate(2, f"peer {index}: the outer state is not that of version {applier.version}")
            if trainer.busy.locked():
                continue  # a step is under way: trained, and accounted for when it is over
            if learner.trained != numbers(trainer.progress.trained):
                self.violate(6, f"peer {index} trained other samples than it accounts for")
            if learner.strayed() > ROUNDING:
                self.violate(2, f"peer {index}: local progress was lost, or made twice")

    def _some_peers(self) -> list[int]:
        """Who is looked at now: all, or some where there are many, the next ones each time."""
        everybody = sorted(self.swarm.peers)
        if len(everybody) <= MOST_LOOKED_AT:
            return everybody
        first = bisect_right(everybody, self._looked_at) % len(everybody)
        some = [*everybody[first:], *everybody[:first]][:MOST_LOOKED_AT]
        self._looked_at = some[-1]
        return some

    def _is_state(self, group: Chronicle, outer: OuterState, version: int) -> bool:
        """Whether this is the outer state of `version`: by its digest, or bit by bit like one whose digest was right, which takes a tenth of the time."""
        if group.state is not None and group.state[0] == version:
            if group.state[1:] == (bits(outer.params), bits(outer.momentum)):
                return True
        digest = outer.digest().hex()
        if group.digests.setdefault(version, digest) != digest:
            return False
        if group.state is None or version > group.state[0]:
            group.state = (version, bits(outer.params), bits(outer.momentum))
        return True

    # ---- at the end --------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """After a calm stretch everybody who runs and is honest is a member at about the same height (0), but whom the group has no place for. Where
        messages are lost, that may have been some seconds ago: a member whose word that it holds a round is lost is let in again after the next.
        """
        peers = {n: peer for n, peer in self.swarm.peers.items() if self.swarm.ids[n] not in self.swarm.attackers}
        unknowing = sorted(n for n, peer in peers.items() if not peer.member.started)
        if unknowing:
            self.violate(0, f"peers {unknowing} never learned the history")
        newest, now = self._newest_heights(), self.swarm.hub.now()
        for index, peer in sorted(peers.items()):
            recently = not self.calm and now - self._well_at.get(index, -math.inf) <= OUTSIDE_S
            if index not in unknowing and not recently and not self._is_well(index, newest):
                head = peer.member.head.commit
                what = f"height {head.height} of {newest[head.group]}"
                self.violate(0, f"peer {index} is left behind: {what}, {peer.state_reason}")

    def look_who_is_well(self) -> None:
        """For `check_end`, now and then."""
        newest, now = self._newest_heights(), self.swarm.hub.now()
        self._well_at |= {index: now for index in self.swarm.peers if self._is_well(index, newest)}

    def _newest_heights(self) -> dict[bytes, int]:
        """By group, that somebody who runs knows."""
        found: dict[bytes, int] = {}
        for peer in self.swarm.peers.values():
            if peer.member.started:
                head = peer.member.head.commit
                found[head.group] = max(head.height, found.get(head.group, 0))
        return found

    def _is_well(self, index: int, newest: Mapping[bytes, int]) -> bool:
        """Whether a peer is about as far as the others, and a member where there is a place."""
        member = self.swarm.peers[index].member
        if not member.started or member.head.commit.height < newest[member.head.commit.group] - 1:
            return False
        return member.in_view or not self._has_place(member.head.commit)

    def _has_place(self, commit: Commit) -> bool:
        """Whether whoever waits to become a member gets a place: not where the group is full, and must not become two (`planning`, `ledger.shared`)."""
        settings = self.swarm.outfit.terms.settings
        rules, half = settings.rules, settings.rules.max_group // 2
        large = half >= max(1, settings.min_contributors) and not rules.finished(commit)
        return len(commit.view) < rules.max_group or (large and rules.may_divide(commit))

    @property
    def history(self) -> dict[int, Commit]:
        """Of the first group; a stage of a pipeline has no other."""
        return self.groups[b""].history

    @property
    def newest(self) -> Commit | None:
        """Of the group that is furthest."""
        known = [newest for one in self.groups.values() if (newest := one.newest) is not None]
        return max(known, key=lambda commit: (commit.version, commit.height), default=None)

    def newest_of(self, index: int) -> Commit | None:
        """Of the group of a peer, that runs or has run; of the one that is furthest where it never came to any."""
        group = self.groups.get(self._homes[index]) if index in self._homes else None
        return self.newest if group is None else group.newest

    @property
    def tokens(self) -> int:
        """That the swarm has contributed: what groups have in common counts once."""
        newest = sum(one.newest.tokens for one in self.groups.values() if one.newest is not None)
        return newest - sum(one.since.tokens for one in self.groups.values() if one.since is not None)

    @property
    def members(self) -> int:
        """Peers that run, or should, in the newest views of their groups. In a group of which nobody runs any more nobody is a member, whatever its last view says."""
        newest = [(index, self.newest_of(index)) for index in self.swarm.expected]
        return sum(commit is not None and self.swarm.ids[index] in commit.view for index, commit in newest)

    @property
    def rounds(self) -> int:
        """Newest version of the outer state."""
        return 0 if self.newest is None else self.newest.version

    def versions(self) -> dict[bytes, int]:
        """Newest version of each group that somebody who runs belongs to, and that nobody knows to have finished."""
        rules = self.swarm.outfit.terms.settings.rules
        heads = [peer.member.head.commit for peer in self.swarm.peers.values() if peer.member.started]
        finished = {head.group for head in heads if rules.finished(head)}
        found: dict[bytes, int] = {}
        for head in heads:
            if head.group not in finished:
                found[head.group] = max(head.version, found.get(head.group, 0))
        return found


def _majority(voters: tuple[PeerId, ...], valid: set[PeerId]) -> bool:
    twice = 2 * len(valid)
    return twice > len(voters) or (twice == len(voters) and min(voters) in valid)


def _signed(voter: PeerId, signature: bytes, message: bytes) -> bool:
    try:
        verify(voter, signature, message)
    except BadSignature:
        return False
    return True
