"""A node's applier with what it works on, and histories whose means follow from their versions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tests.node.lab import CODEC, NUMEL, OUTER, Lab, Node, peer
from tests.protocol.bus import beat

from farflung.compression.digest import digest_of
from farflung.compression.policy import uniform
from farflung.node.apply import Applier
from farflung.node.catchup import Catchup
from farflung.node.donor import Donor
from farflung.node.evaluator import Extent
from farflung.node.events import EventLog
from farflung.node.replica_trainer import ReplicaTrainer
from farflung.node.statesync import StateSync
from farflung.node.terms import Terms
from farflung.node.trainer import Host, Pace, Progress
from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Contribution, PartResult, RoundResult, Rules
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.lap import Laps
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.membership import Membership
from farflung.sims.toy import ToyLearner
from farflung.training.errors import NotEnoughMemory

SWARM = b"w" * 32
RULES = Rules(ahead=12, lease=3, max_group=8, cuts=(0, NUMEL), laps=Laps.fixed(2), total_steps=198, tokens_per_sample=1)
PARTS = ((0, 304), (304, NUMEL))
PACE = Pace(laps=Laps.fixed(2), samples_per_step=2, tokens_per_sample=1, total_steps=198)


@dataclass
class Settings:
    founder: PeerId
    rules: Rules = RULES


@dataclass
class Member:
    """What an applier asks of its member."""

    me: PeerId
    settings: Settings
    membership: Membership
    history: History = field(default_factory=History)
    group: bytes = b""
    attendance: Any = field(default_factory=lambda: SimpleNamespace(part=None))
    tempo: Any = field(default_factory=lambda: SimpleNamespace(moved=lambda result: 1.0))

    @property
    def head(self) -> Certified:
        return self.history.head


class Applying:
    """A node's applier and what it said; the node is also a donor."""

    def __init__(self, lab: Lab, node: Node, *, checkpoint_s: float = 1e9) -> None:
        self.node = node
        self.events: list[dict[str, Any]] = []
        self.said: list[tuple[int, int, bytes]] = []
        self.lost: list[int] = []
        """Versions from which a download began."""
        self.sample_s = 0.0
        """What an evaluation takes for each sample."""
        self.lacks_room = False
        """Whether evaluations have no room on the device."""
        self.extents: list[tuple[int, Extent]] = []
        """Evaluations: of which version, and how much of the held-out samples."""
        self.member = Member(node.id, Settings(peer(0)), Membership(node.id, 1.0))
        log = EventLog(None, swarm="test", peer=str(node.number), clock=lambda: 0.0)
        log.subscribe(self.events.append)
        host = Host(may_train=lambda: False, awaits_means=lambda: False, is_due=lambda step_s: False, moves=lambda: (0, 1), others_train=lambda: False, set_ready=lambda ready: None, withdraw=lambda: None, give_up=lambda reason: None, up_bytes_per_s=lambda: 0.0, down_bytes_per_s=lambda: 0.0)  # fmt: skip
        self.trainer = ReplicaTrainer(node.id, node.learner, node.doors.learner, log, PACE, host)
        member: Any = self.member
        flat, settings = uniform(CODEC, NUMEL), member.settings
        terms = Terms(settings=settings, pace=PACE, uplink=flat, downlink=flat, feedback=FeedbackSpec(), outer=OUTER)
        catchup = Catchup(
            sync=StateSync(node.network, node.learner, node.refused), member=member, exchange=node.exchange,
            learner=node.learner, doors=node.doors, storage=node.disk, log=log, terms=terms,
        )  # fmt: skip
        self.applier = Applier(
            terms=terms, member=member, exchange=node.exchange, means=node.means, residuals=node.residuals, catchup=catchup, trainer=self.trainer,
            learner=node.learner, doors=node.doors, storage=node.disk, log=log, checkpoint_s=checkpoint_s, evaluate=self._evaluate, evaluates_few=True,
            all_evaluate_last=False, initial_is_genesis=True,
            applied=lambda *where: self.said.append(where),
            lost_state=lambda: self.lost.append(self.applier.version),
        )  # fmt: skip
        self.applier.donor = Donor(node.network, node.learner, lambda: self.applier.version, self.applier.steady)
        self.applier.donor.serve(node.refused, lambda peer: True, within_s=600.0)
        self.task = lab.group.create_task(self.applier.run())

    async def _evaluate(self, extent: Extent) -> float:
        """As long as the test says that each sample takes."""
        self.extents.append((self.applier.version, extent))
        await asyncio.sleep(self.sample_s * extent.value)
        if self.lacks_room:
            raise NotEnoughMemory("cuda has no room for an evaluation")
        return self.node.learner.evaluate()

    async def start(self, history: Sequence[Certified]) -> None:
        await self.applier.restore(list(history), None)
        self.member.history.replace(None, history)
        await self.applier.resume(list(history))
        await self.idle()

    async def take(self, *commits: Certified) -> None:
        for certified in commits:
            self.member.history.append(certified)
            self.applier.push(certified)
        await self.idle()

    async def idle(self) -> None:
        async with asyncio.timeout(300.0):
            while not self.applier.idle:
                await asyncio.sleep(0.05)

    def hears(self, other: "Applying") -> None:
        """The other's heartbeat."""
        height, version, digest = other.said[-1]
        heartbeat = beat(height=height, version=version, digest=digest)
        self.member.membership.heard(other.node.id, asyncio.get_running_loop().time(), heartbeat)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def digest(self) -> bytes:
        return self.node.learner.outer.digest()


def genesis() -> Certified:
    return Certified(chain.genesis(peer(0), RULES), 0, ())


def change(parent: Commit, *who: int) -> Certified:
    """A change of view."""
    view = tuple(peer(n) for n in who)
    return Certified(chain.successor(SWARM, parent, RULES, view=view, left=(), result=None), 0, ())


async def founded(*members: Applying) -> list[Certified]:
    """A swarm of these, who all hold the fresh state: its history so far."""
    history = [genesis(), change(genesis().commit, *(one.node.number for one in members))]
    for one in members:
        one.member.settings.founder = one.node.id
        await one.start(history)
    return history


def mean_of(version: int, part: int) -> bytes:
    start, stop = PARTS[part]
    return bytes(CODEC.encode(torch.sin(torch.arange(start, stop) * 0.1 * (version + 1)) * 0.01))


def plan_of(version: int) -> bytes:
    return bytes([version]) * 32


def round_after(parent: Commit, *, samples: int = 4, kept: Sequence[int] = (0, 1)) -> Certified:
    """A round to which the whole view contributed, with means that follow from its version."""
    version = parent.version + 1
    parts = tuple(
        PartResult(parent.view[0], a, b, digest_of(mean_of(version, k)) if k in kept else b"")
        for k, (a, b) in enumerate(PARTS)
    )
    contributors = tuple(Contribution(p, samples, samples, 1000) for p in parent.view)
    result = RoundResult(plan=plan_of(version), contributors=contributors, parts=parts, seconds_ms=10)
    return Certified(chain.successor(SWARM, parent, RULES, view=parent.view, left=(), result=result), 0, ())


async def hold(node: Node, version: int, parts: Sequence[int] = (0, 1)) -> None:
    for k in parts:
        await node.means.put(plan_of(version), k, mean_of(version, k))


def expected(versions: int, kept: Sequence[int] = (0, 1)) -> bytes:
    """The digest of the outer state after so many rounds, computed by itself."""
    toy = ToyLearner(NUMEL, OUTER, chunk_bytes=800)
    for version in range(1, versions + 1):
        for k in kept:
            start, stop = PARTS[k]
            toy.outer.step_(start, stop, CODEC.decode(mean_of(version, k), stop - start), OUTER.lr, OUTER.momentum)
    return toy.outer.digest()


def train(one: Applying, *numbers: int) -> None:
    """Local progress on these samples, which must be consecutive."""
    for first in range(0, len(numbers), PACE.samples_per_step):
        one.node.learner.train(numbers[first : first + PACE.samples_per_step], 0)
    one.trainer.progress = Progress(((numbers[0], numbers[-1] + 1),), len(numbers) // PACE.samples_per_step, 0.0)
