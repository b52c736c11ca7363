"""A few nodes' exchanges, donors and learners over an in-memory network under a virtual clock."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from farflung.compression.int8 import Int8
from farflung.compression.policy import FlatCodec, uniform
from farflung.node import framing
from farflung.node.door import Doors
from farflung.node.exchange import Exchange
from farflung.node.means import MeanStore
from farflung.node.meetings import Meetings
from farflung.node.network import PeerId
from farflung.node.residuals import Residuals
from farflung.node.rounds import Round
from farflung.protocol.errors import NetworkError, RemoteError
from farflung.protocol.headers import BulkHeader
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.messages import Contributor, Part, Plan, Ready, encode
from farflung.protocol.neighbours import Neighbours
from farflung.protocol.settings import FAST_BYTES_PER_S
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.toy import MemoryStorage, ToyLearner, VirtualDoor
from farflung.training.rules import Nesterov, halfway

T = TypeVar("T")

NUMEL = 600
CODEC = Int8(block=16)
OUTER = Nesterov(lr=0.7, momentum=0.5)
PLAN_ID = b"P" * 32
TOKEN = b"t" * 64


def peer(number: int) -> PeerId:
    return bytes([number + 1]) * 32


def payload_of(numel: int, seed: int) -> bytes:
    """An encoded vector."""
    return bytes(CODEC.encode(torch.sin(torch.arange(1, numel + 1) * (0.01 * (seed + 1)))))


def doors() -> Doors:
    return Doors(**{name: VirtualDoor(lambda _: 0.001) for name in ("learner", "side", "journal", "digest")})


class Node:
    """One process: what the exchange told it, in order."""

    def __init__(self, lab: "Lab", number: int) -> None:
        self.number = number
        self.id = peer(number)
        self.network = MemoryNetwork(lab.hub, self.id)
        self.disk = MemoryStorage()
        self.learner = ToyLearner(NUMEL, OUTER, chunk_bytes=800)
        self.doors = doors()
        self.means = MeanStore(self.disk, self.doors.side)
        flat = uniform(CODEC, NUMEL)
        self.residuals = Residuals(
            self.id, uplink=flat, downlink=flat, spec=FeedbackSpec(), version=lambda: 0, fragments=1
        )
        self.neighbours = Neighbours()
        self.turn = 8
        """Of fragments' rounds."""
        self.version = 7
        """Of the outer state, as meetings see it; -1: there is none."""
        self.met: list[tuple[bytes, Part, PeerId, torch.Tensor]] = []
        self.unmet: list[tuple[Part, PeerId, str]] = []
        self.steady = asyncio.Event()
        self.steady.set()
        self.meetings = Meetings(
            self.network,
            self.doors,
            self.learner,
            self.neighbours,
            every=4,
            turn=lambda: self.turn,
            weight=lambda: halfway(OUTER),
            admission=TOKEN,
            admits=lambda _, token: token == TOKEN,
            version=lambda: self.version,
            steady=lambda: self.steady,
            met=lambda plan_id, plan, part, whom, term: self.met.append((plan_id, part, whom, term)),
            unmet=lambda plan, part, whom, reason: self.unmet.append((part, whom, reason)),
            refused=self.refused,
        )
        self.exchange = Exchange(
            self.network,
            self.doors,
            self.learner,
            self.means,
            uplink=flat,
            downlink=flat,
            fast_bytes_per_s=FAST_BYTES_PER_S,
            residuals=self.residuals,
            meetings=self.meetings,
            news=self,
        )
        self.arrived: list[tuple[bytes, int, PeerId]] = []
        self.held: dict[tuple[bytes, int], bytes] = {}
        self.errors: list[RemoteError] = []
        self.lost: list[PeerId] = []
        self.uplinks: dict[PeerId, float] = {}
        self.unheard: set[PeerId] = set()
        """As others say."""
        self.spent: list[tuple[str, int]] = []
        self.news = asyncio.Event()
        self.exchange.serve()

    def encode_with(self, uplink: FlatCodec, downlink: FlatCodec, spec: FeedbackSpec) -> None:
        """From now on."""
        self.residuals = Residuals(self.id, uplink=uplink, downlink=downlink, spec=spec, version=lambda: 0, fragments=1)
        self.exchange._uplink, self.exchange._downlink = uplink, downlink
        self.exchange._residuals = self.residuals

    def contribution_arrived(self, plan_id: bytes, part: int, peer: PeerId) -> None:
        self.arrived.append((plan_id, part, peer))
        self.news.set()

    def mean_held(self, plan_id: bytes, part: int, digest: bytes, *, early: bool = False) -> None:
        self.held[plan_id, part] = digest
        self.news.set()

    def uplink_of(self, peer: PeerId) -> float:
        return self.uplinks.get(peer, 0.0)

    def hears(self, peer: PeerId) -> bool:
        return peer not in self.unheard

    def unreachable(self, peer: PeerId, reason: str) -> None:
        self.lost.append(peer)

    def refused(self, error: RemoteError) -> None:
        self.errors.append(error)
        self.news.set()

    @contextmanager
    def span(self, what: str, round_: int) -> Iterator[None]:
        self.spent.append((what, round_))
        yield

    async def until(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for news until something holds. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not holds():
                await self.news.wait()
                self.news.clear()


class Lab:
    """Nodes 0..num-1 and the task group they work in."""

    def __init__(self, num: int, group: asyncio.TaskGroup, **link: Any) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        self.group = group
        self.hub = MemoryHub(loop, random.Random(1), LinkModel(jitter_s=0.0, **link))
        self.nodes = [Node(self, n) for n in range(num)]

    def plan(self, *, owners: list[int] | None = None, contributors: list[int] | None = None) -> Plan:
        ids = [n.id for n in self.nodes]
        owners = list(range(len(ids))) if owners is None else owners
        givers = list(range(len(ids))) if contributors is None else contributors
        size = NUMEL // len(owners) // CODEC.block * CODEC.block
        edges = [k * size for k in range(len(owners))] + [NUMEL]
        ready = Ready(tokens=8, samples=1, up_bytes_per_s=0.0, down_bytes_per_s=0.0, ready_ms=1)
        return Plan(
            height=1, ballot=0, attempt=1, parent=b"h" * 32, members=tuple(ids),
            contributors=tuple(Contributor(ids[g], ready) for g in givers),
            parts=tuple(Part(ids[o], edges[k], edges[k + 1]) for k, o in enumerate(owners)),
            uplink=CODEC.spec, downlink=CODEC.spec, scatter_s=10.0, gather_s=10.0, reason="a test",
        )  # fmt: skip


class _Over(Exception):
    """Ends the task group of a lab; carries the result."""


def in_lab(num: int, main: Callable[[Lab], Awaitable[T]], **link: Any) -> T:
    """Run a test with a lab of so many nodes; what still runs in its group is cancelled at the end."""

    async def body() -> T:
        async with asyncio.TaskGroup() as group:
            result = await main(Lab(num, group, **link))
            raise _Over(result)

    async def until_over() -> T:
        try:
            await body()
        except* _Over as over:
            result: T = over.exceptions[0].args[0]
        return result

    torch.set_num_threads(1)
    return clock.run(until_over())


async def say(
    network: MemoryNetwork, to: PeerId, kind: str, header: BulkHeader | bytes, payload: bytes = b"", *, answer: int = 1
) -> bytes | None:
    """Open a stream, write a header and bytes, and read the answer; None when the other side hung up."""
    stream = await network.open_stream(to, kind)
    body = header if isinstance(header, bytes) else encode(header)
    try:
        await stream.write(len(body).to_bytes(framing.HEADER_LENGTH_BYTES, "big") + body)
        if payload:
            await stream.write(payload)
        return await framing.read_exactly(stream, answer)
    except NetworkError:
        return None
    finally:
        await stream.close()


# ---- of the exchange ------------------------------------------------------------------------------------------


def accept(lab: Lab, plan: Plan | None = None) -> Plan:
    """Everybody has the plan."""
    plan = plan or lab.plan()
    for node in lab.nodes:
        node.exchange.expect(PLAN_ID, plan)
    return plan


def numel(plan: Plan, part: int) -> int:
    return plan.parts[part].stop - plan.parts[part].start


def round_of(node: Node) -> Round:
    """Of the plan that all these tests have."""
    found = node.exchange._rounds.get(PLAN_ID)
    assert found is not None
    return found


def stored(lab: Lab, number: int) -> Any:
    """What a node keeps of contributions and means."""
    node = lab.nodes[number]
    rounds = {
        k: {p: sorted(c) for p, c in r.contributions.items() if c} for k, r in node.exchange._rounds._under_way.items()
    }
    return rounds, dict(node.disk.means), dict(node.held), list(node.arrived)
