"""Members on a bus: virtual seconds, no IO, and every message can be lost, doubled, held back or changed on its way.

`Node` does for one `Member` what `node/peer.py` does with its effects, with toy bytes: a contribution is nothing but its arrival, a mean is
the digest of (plan, part, contributors). `Bus` orders everything by (time, number), so that a run repeats itself exactly.
"""

import copy
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from itertools import count
from typing import Any

from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, RoundResult, Rules, Vote
from farflung.protocol.effects import (
    Apply,
    Contribute,
    Effect,
    FetchMean,
    Forget,
    Note,
    Reduce,
    RoundOver,
    SaveVote,
    Send,
)
from farflung.protocol.errors import RemoteError
from farflung.protocol.history import History
from farflung.protocol.keys import SIGNATURE_BYTES, Ed25519Signer, PeerId
from farflung.protocol.lap import Laps
from farflung.protocol.member import Member
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Forward, Heartbeat, Message, Plan, Ready, decode, encode
from farflung.protocol.proposer import Phase
from farflung.protocol.quorum import proposer
from farflung.protocol.saved_vote import SavedVote
from farflung.protocol.settings import Settings

SWARM = sha256(b"the swarm of the tests").digest()
LATENCY_S = 0.05
TICK_S = 0.25
WINDOW = 24
SAMPLES = 8
LAP = 8
TOKENS_PER_SAMPLE = 100
RULES = Rules(
    ahead=WINDOW // LAP,
    lease=3,
    max_group=16,
    cuts=(0, 1000),
    laps=Laps.fixed(LAP),
    total_steps=1 << 40,
    tokens_per_sample=TOKENS_PER_SAMPLE,
)


def signers(num: int) -> list[Ed25519Signer]:
    """Identities, sorted by public key, so that member 0 is the first of every view."""
    made = [Ed25519Signer(sha256(f"member {i}".encode()).digest()) for i in range(num)]
    return sorted(made, key=lambda s: s.peer_id)


def rules(founder: PeerId, **changes: Any) -> Settings:
    values: dict[str, Any] = dict(
        swarm=SWARM,
        founder=founder,
        rules=dataclasses.replace(
            RULES, **{key: changes.pop(key) for key in ("cuts", "laps", "total_steps") if key in changes}
        ),
        step_tokens=1,
        align=16,
        uplink="int8(block=16)",
        downlink="int8(block=16)",
        bytes_per_element=1.1,
        min_contributors=1,
        min_round_s=2.0,
        max_round_s=8.0,
        removal_s=5.0,
        heartbeat_s=1.0,
        admits=lambda peer, token: token != b"uninvited",
    )
    return Settings(**{**values, **changes})


def certify(commit: Commit, voters: Sequence[Ed25519Signer], ballot: int = 0) -> Certified:
    signed = chain.vote_bytes(SWARM, commit.height, ballot, chain.commit_hash(SWARM, commit))
    return Certified(commit, ballot, tuple(Vote(s.peer_id, s.sign(signed)) for s in voters))


def follow(
    parent: Commit,
    view: Sequence[PeerId],
    *,
    left: Sequence[PeerId] = (),
    result: RoundResult | None = None,
    rules: Rules = RULES,
) -> Commit:
    """The commit after `parent`, by the rules."""
    return chain.successor(SWARM, parent, rules, view=tuple(view), left=tuple(left), result=result)


def history_of(who: Sequence[Ed25519Signer], rules: Rules = RULES) -> list[Certified]:
    """Genesis by the first, then the commit that admits all the others."""
    first = certify(chain.genesis(who[0].peer_id, rules), who[:1])
    if len(who) == 1:
        return [first]
    second = follow(first.commit, [s.peer_id for s in who], rules=rules)
    return [first, certify(second, who[:1])]


def ready(samples: int = SAMPLES, **changes: Any) -> Ready:
    values: dict[str, Any] = dict(
        tokens=TOKENS_PER_SAMPLE * samples, samples=samples, up_bytes_per_s=1e6, down_bytes_per_s=0.0, ready_ms=1000
    )
    return Ready(**{**values, **changes})


def beat(**changes: Any) -> Heartbeat:
    values: dict[str, Any] = dict(
        height=0, ballot=0, version=0, digest=b"", state="training", step=0, tokens_per_s=1.0,
        up_bytes_per_s=0.0, down_bytes_per_s=0.0, loss=1.0, device="toy", admission=b"", addresses=(), every_s=1.0,
    )  # fmt: skip
    return Heartbeat(**{**values, **changes})


def new_member(signer: Ed25519Signer, settings: Settings) -> Member:
    return Member(settings, signer, Membership(signer.peer_id, settings.heartbeat_s), lambda: beat())


def state_digest(version: int) -> bytes:
    return sha256(f"state {version}".encode()).digest()


SURROUNDINGS = ("settings", "signer", "vitals", "membership")
"""What a machine only refers to. Who was heard when is no state of it: that a peer lives is true, whatever it says."""


def snapshot(thing: Any) -> Any:
    """A deep copy of a machine's state as plain values, to compare before and after."""
    if isinstance(thing, History):
        return [thing.anchor, list(thing)]
    if is_dataclass(thing) and not isinstance(thing, type):
        return {f.name: snapshot(getattr(thing, f.name)) for f in fields(thing) if f.name not in SURROUNDINGS}
    if isinstance(thing, dict):
        return {k: snapshot(v) for k, v in thing.items()}
    if isinstance(thing, (set, frozenset)):
        return frozenset(thing)
    if hasattr(thing, "__iter__") and not isinstance(thing, (bytes, str)):
        return [snapshot(v) for v in thing]
    return copy.copy(thing)


@dataclass
class Disk:
    """What survives a kill."""

    history: list[Certified]
    vote: SavedVote | None = None


@dataclass
class Letter:
    """One message on its way; a policy returns the delays of the copies that arrive."""

    number: int
    at: float
    sender: int
    receiver: int
    message: Message
    carrier: int
    """Who hands it over: another than the sender, where that asked for it."""


class Node:
    """One process: a Member, and what happens to its effects."""

    def __init__(self, bus: "Bus", index: int) -> None:
        self.bus = bus
        self.index = index
        self.signer = bus.signers[index]
        self.member = new_member(self.signer, bus.settings)
        self.member.vitals = self.member.tempo.vitals = lambda: beat(**self.says)
        self.member.membership.state = "training"
        self.effects: list[tuple[float, Effect]] = []
        self.means: dict[tuple[bytes, int], bytes] = {}
        self.plans: dict[bytes, Plan] = {}
        self.missed: list[str] = []
        self.contributed = 0
        self.trains_s = 1.0
        self.reduces = True
        self.contributes = True
        self.laps = 0
        """Trained, and not counted yet, where it keeps them."""
        self.keeps = False
        self.says: dict[str, Any] = {}
        """Of heartbeats and offers, where it differs."""

    @property
    def me(self) -> PeerId:
        return self.signer.peer_id

    @property
    def height(self) -> int:
        return self.member.head.commit.height if self.member.started else -1

    def begin(self, now: float) -> None:
        disk = self.bus.disks[self.index]
        if disk.history:
            self.member.recall([] if disk.vote is None else [disk.vote])
            self.do(self.member.begin(None, list(disk.history), now))
            self.train()
            self._announce(now)
        for other in self.bus.signers:
            self.do(self.member.discovered([other.peer_id], now))
        self.tick()

    def tick(self) -> None:
        self.do(self.member.tick(self.bus.now))
        self.bus.later(TICK_S, self, self.tick)

    def train(self) -> None:
        self.bus.later(self.trains_s, self, self._trained)

    def _trained(self) -> None:
        member = self.member
        held = sum(b - a for a, b in member.head.commit.ledger.window(self.me))
        if member.attendance.ready is None and member.in_view and self.contributes and held >= SAMPLES:
            self.laps = min(self.laps + 1, held // SAMPLES) if self.keeps else 1
            offered = {key: value for key, value in self.says.items() if key != "tokens_per_s"}
            self.do(member.set_ready(ready(SAMPLES * self.laps, **offered), self.bus.now))
        elif member.attendance.ready is None:
            self.train()

    def receive(self, sender: int, data: bytes, carrier: int) -> None:
        peer = self.bus.signers[sender].peer_id
        via = None if carrier == sender else self.bus.signers[carrier].peer_id
        try:
            message = decode(data, peer=peer)
            effects = self.member.receive(peer, message, self.bus.now, via=via)
        except RemoteError as error:
            self.bus.refused.append((self.index, sender, error))
        else:
            if isinstance(message, Forward) and self.member.passes_on(message):
                said = decode(message.sealed[:-SIGNATURE_BYTES], peer=peer)
                self.bus.post(sender, message.to, said, carrier=self.index)
            self.do(effects)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.effects.append((self.bus.now, effect))
            match effect:
                case Send(to, message, None):
                    self.bus.post(self.index, to, message)
                case Send(to, message, via) if via is not None:
                    self.bus.post(self.index, via, Forward(to, encode(message) + bytes(SIGNATURE_BYTES)))
                case SaveVote(vote):
                    self.bus.disks[self.index].vote = vote
                case Contribute(plan_id, plan):
                    self.plans[plan_id] = plan
                    for k, part in enumerate(plan.parts):
                        self.bus.transfer(self, part.owner, _contribution(plan_id, k, self.me))
                case Reduce(plan_id, plan, k, weights, early) if self.reduces:
                    payload = mean_of(plan_id, k, weights)
                    self.hold(plan_id, k, payload, early=early)
                    for peer in plan.members:
                        if peer != self.me:
                            self.bus.transfer(self, peer, _mean(plan_id, k, payload, early))
                case FetchMean(plan_id, k, digest, holders):
                    for peer in holders:
                        other = self.bus.nodes.get(self.bus.index(peer))
                        if other is not None and other.means.get((plan_id, k)) == digest:
                            self.bus.later(
                                self.bus.transfer_s, self, lambda p=plan_id, k=k, d=digest: self.hold(p, k, d)
                            )
                            break
                case Apply(certified):
                    self.bus.decided(self.index, certified)
                    self._announce(self.bus.now)
                case RoundOver(_, contributed, reason):
                    self.contributed += contributed
                    self.laps = 0 if contributed else self.laps
                    if not contributed:
                        self.missed.append(reason)
                    self.train()
                case Forget() | Note() | _:
                    pass

    def hold(self, plan_id: bytes, part: int, digest: bytes, *, early: bool = False) -> None:
        if early:
            digest = self.means.setdefault((plan_id, part), digest)
        self.means[plan_id, part] = digest
        self.do(self.member.mean_held(plan_id, part, digest, self.bus.now, early=early))

    def _announce(self, now: float) -> None:
        head = self.member.head.commit
        self.do(self.member.applied(head.height, head.version, state_digest(head.version), now))

    def notes(self, event: str) -> list[Note]:
        return [e for _, e in self.effects if isinstance(e, Note) and e.event == event]


def mean_of(plan_id: bytes, part: int, weights: Sequence[tuple[PeerId, float]]) -> bytes:
    """What stands for the bytes of a mean, and for their digest."""
    return sha256(repr((plan_id, part, tuple(weights))).encode()).digest()


def _contribution(plan_id: bytes, part: int, peer: PeerId) -> Callable[[Node], None]:
    return lambda node: node.do(node.member.contribution_arrived(plan_id, part, peer, node.bus.now))


def _mean(plan_id: bytes, part: int, digest: bytes, early: bool) -> Callable[[Node], None]:
    return lambda node: node.hold(plan_id, part, digest, early=early)


class Bus:
    """Members 0..num-1, all in the view, at the same height. `policy` decides the fate of every message."""

    def __init__(self, num: int, *, outsiders: int = 0, start: bool = True, **changes: Any) -> None:
        self.signers = signers(num + outsiders)
        self.ids = [s.peer_id for s in self.signers]
        self.settings = rules(self.ids[0], **changes)
        first = history_of(self.signers[:num], self.settings.rules)
        self.disks = [Disk(list(first) if i < num else []) for i in range(num + outsiders)]
        self.now = 0.0
        self.nodes: dict[int, Node] = {}
        self.transfer_s = 2 * LATENCY_S
        self.policy: Callable[[Letter], Sequence[float]] = lambda letter: (LATENCY_S,)
        self.on_decided: Callable[[int, Certified], None] = lambda index, certified: None
        self.refused: list[tuple[int, int, RemoteError]] = []
        self.commits: dict[int, Commit] = {c.commit.height: c.commit for c in first}
        self.letters: list[Letter] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        if start:
            for i in range(num + outsiders):
                self.start(i)

    def index(self, peer: PeerId) -> int:
        return self.ids.index(peer)

    def start(self, index: int) -> Node:
        node = self.nodes[index] = Node(self, index)
        node.begin(self.now)
        return node

    def kill(self, index: int) -> None:
        del self.nodes[index]

    def turn(self, ballot: int, height: int | None = None) -> int:
        """Whose turn it is at a ballot of the next height (or of another one, in the newest view)."""
        top = max(self.commits)
        view = self.commits[top].view
        return self.index(proposer(SWARM, view, top + 1 if height is None else height, ballot))

    # ---- time ----

    def later(self, seconds: float, node: Node, action: Callable[[], None]) -> None:
        def run() -> None:
            if self.nodes.get(node.index) is node:
                action()

        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), run))

    def post(self, sender: int, to: PeerId, message: Message, *, carrier: int | None = None) -> None:
        receiver = self.index(to)
        letter = Letter(
            next(self._numbers), self.now, sender, receiver, message, sender if carrier is None else carrier
        )
        self.letters.append(letter)
        data = encode(message)
        for delay in self.policy(letter):
            heapq.heappush(self._queue, (self.now + delay, next(self._numbers), lambda: self._arrive(letter, data)))

    def _arrive(self, letter: Letter, data: bytes) -> None:
        node = self.nodes.get(letter.receiver)
        if node is not None:
            node.receive(letter.sender, data, letter.carrier)

    def transfer(self, source: Node, to: PeerId, deliver: Callable[[Node], None]) -> None:
        receiver = self.index(to)

        def arrive() -> None:
            node = self.nodes.get(receiver)
            if node is not None:
                deliver(node)

        if receiver == source.index:
            self.later(0.01, source, arrive)
        else:
            heapq.heappush(self._queue, (self.now + self.transfer_s, next(self._numbers), arrive))

    def run(self, seconds: float = 60.0, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass until something holds; True when it did. Without `until`, for that many seconds."""
        end = self.now + seconds
        while not (until is not None and until()):
            if not self._queue or self._queue[0][0] > end:
                self.now = end
                return until is None
            at, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            action()
        return True

    def reach(self, height: int, *, who: Sequence[int] | None = None, seconds: float = 60.0) -> bool:
        """Run until everybody (of `who`) knows a commit of this height."""
        return self.run(
            seconds, lambda: all(n.height >= height for i, n in self.nodes.items() if who is None or i in who)
        )

    # ---- the judge ----

    def decided(self, index: int, certified: Certified) -> None:
        commit = certified.commit
        assert self.commits.setdefault(commit.height, commit) == commit, f"two commits of height {commit.height}"
        parent = self.commits[commit.height - 1]
        peer = self.ids[index]
        chain.check_successor(SWARM, parent, commit, self.settings.rules, peer=peer)
        chain.check_certificate(SWARM, certified, parent.view, peer=peer)
        if commit.round is not None:
            total = sum(c.tokens for c in commit.round.contributors)
            weights = tuple((c.peer, c.tokens / total) for c in commit.round.contributors)
            for k, part in enumerate(commit.round.parts):
                assert part.digest in (b"", mean_of(commit.round.plan, k, weights)), "a mean of others than who counts"
        saved = self.disks[index].history
        if not saved or saved[-1].commit.height < commit.height:
            saved.append(certified)
        self.on_decided(index, certified)


# ---- what tests ask of a bus ------------------------------------------------------------------------------------


def sent(bus: Bus, kind: type[Message]) -> list[Letter]:  # type: ignore[valid-type]
    return [letter for letter in bus.letters if isinstance(letter.message, kind)]


def rounds(bus: Bus) -> list[Commit]:
    return [c for _, c in sorted(bus.commits.items()) if c.round is not None]


def settled(bus: Bus) -> Bus:
    """After the first round, with everybody at the same height and training."""
    top = max(bus.commits)
    assert bus.reach(top + 1)
    assert bus.run(2.0, lambda: all(n.member.attendance.part is None for n in bus.nodes.values()))
    return bus


def until_phase(bus: Bus, phase: Phase) -> int:
    """Run until somebody leads in this phase; returns who."""

    def leader() -> list[int]:
        return [
            i
            for i, n in bus.nodes.items()
            if (made := n.member.consensus.proposer) and made.phase is phase and (n.member.attendance.part or phase is Phase.GATHER)
        ]  # fmt: skip

    assert bus.run(30.0, lambda: bool(leader()))
    return leader()[0]
