"""Stage servers and a data node in one loop under virtual time, and what a single process would compute."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.node.pipeline_driver import Driver, Outcome
from farflung.node.pipeline_step import Step
from farflung.node.sealed_mail import PipelineMail
from farflung.node.stage_server import StageServer
from farflung.node.stage_step import Service
from farflung.protocol import pipeline_messages
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import RemoteError
from farflung.protocol.flight import Patience
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.route import live_hops
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.stage_peer import listen
from farflung.sims.toy import VirtualDoor
from farflung.training.errors import NoRoom
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import Hop, Lane, Op, Plan, Policy
from farflung.training.pipeline_stages import split
from farflung.training.pipeline_worker import HEAD, Accumulated, Batch, Worker, mean_gradients
from farflung.training.recovery_trial import LossTrial

T = TypeVar("T")

SWARM = b"s" * 32
WINDOW = b"w" * 32
CONFIG = ModelConfig(
    vocab_size=32,
    dim=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=2,
    ffn_dim=24,
    seq_len=8,
    tie_embeddings=False,
)
LAYERS = (1, 1, 1, 1)
PATIENCE = Patience(leg_s=20.0, answer_s=5.0, hard_s=300.0)
SECONDS = {"_forward": 1.0, "_backward": 2.0, "_loss": 0.3}
"""What computing takes; the rest a millisecond."""

NOTHING = Droppable()


def costs(peers: int) -> Costs:
    """The same, for plans."""
    rows = ((0.0,) * peers,) * peers
    forward_s = SECONDS["_forward"]
    return Costs(
        forward_s=((forward_s,) * peers,) * len(LAYERS),
        latency_s=rows,
        transmit_s=rows,
        backward=SECONDS["_backward"] / forward_s,
        loss=SECONDS["_loss"] / forward_s,
    )


Happens = Callable[["StageLab", int, Op | None, str], None]
"""Sees (the lab, a peer, what it computes, `started` or `finished`), and (the lab, a peer, None, `told`) when a data node has told it that its work counts."""


def signer(number: int) -> Ed25519Signer:
    return Ed25519Signer(bytes([number + 1]) * 32)


def names(count: int) -> list[str]:
    return [signer(number).peer_id.hex() for number in range(count)]


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 32, (count, 2, 9), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def step_of(plan: Plan, droppable: Droppable, patience: Patience = PATIENCE) -> Step:
    return Step(number=7, window=WINDOW, plan=plan, most_tokens=16, patience=patience, droppable=droppable)


class _Crossed(torch.autograd.Function):
    """What the next stage gets of an activation, and the one before of its gradient: decoded from what was encoded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return _crossed(x, boundary)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _crossed(gradient, ctx.boundary), None


def _crossed(x: Tensor, boundary: Boundary) -> Tensor:
    batch, length, _ = x.shape
    return boundary.decode(boundary.encode(x), batch, length, device=torch.device("cpu"))


def expected(
    model: Decoder,
    layers: Sequence[int],
    data: Sequence[Batch],
    ways: Mapping[int, Sequence[int]],
    visits: Iterable[tuple[int, int]],
    boundary: Boundary | None = None,
) -> dict[str, Tensor]:
    """Mean gradients in one process: `ways` are the stages of each microbatch, `visits` the (microbatch, stage or HEAD) that count.
    `boundary`: by which codec everything goes that crosses one, in the one process as well."""
    stages, head = split(model, layers)
    wanted = defaultdict(list)
    for microbatch, part in visits:
        wanted[part].append(microbatch)
    found: dict[int, dict[str, Tensor]] = {}
    for microbatch, way in ways.items():
        model.zero_grad(set_to_none=True)
        x, targets = data[microbatch]
        for stage in way:
            x = stages[stage](x)
            x = x if boundary is None else _Crossed.apply(x, boundary)
        next_token_loss(head(x), targets).backward()  # type: ignore[no-untyped-call]
        found[microbatch] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    means = {}
    for part, microbatches in wanted.items():
        module = head if part == HEAD else stages[part]
        parameters = set(module.parameters())
        for name, parameter in model.named_parameters():
            if parameter in parameters:
                means[name] = sum(found[m][name] for m in microbatches) / len(microbatches)
    return means  # type: ignore[return-value]  # sum() begins with an int


class _Watched(StageServer):
    """Tells the lab before and after everything that it computes."""

    lab: "StageLab"
    number: int

    async def _compute(self, open_: Any, op: Op) -> None:
        self.lab.happens(self.lab, self.number, op, "started")
        await super()._compute(open_, op)
        self.lab.happens(self.lab, self.number, op, "finished")

    async def _serve_settle(self, stream: Any) -> None:
        home = self.lab.step.place[stream.peer]
        try:
            await super()._serve_settle(stream)
        finally:  # it has heard it even where its answer meets nobody
            if self._open[WINDOW].verdicts.get(home):
                self.lab.told.append((self.number, home))
                self.lab.happens(self.lab, self.number, None, "told")


class StageLab:
    """One process per peer of a plan."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        plan: Plan,
        *,
        seed: int = 1,
        happens: Happens | None = None,
        codec: str = "fp32",
        service: Mapping[str, Any] | None = None,
        droppable: Droppable = NOTHING,
        patience: Patience = PATIENCE,
        slow: Mapping[int, float] | None = None,
        most_homes: int | None = None,
        **link: Any,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        self.hub = MemoryHub(loop, random.Random(seed), LinkModel(**link))
        self.model = Decoder(CONFIG, seed=3)
        slowness = [(slow or {}).get(number, 1.0) for number in range(len(plan.peers))]
        """Times as long as usual that each peer computes; if some are named, everybody knows of all."""
        self.step = replace(step_of(plan, droppable, patience), most_homes=most_homes)
        if slow is not None:
            self.step = replace(self.step, visit_s=dict(enumerate(slowness)))
        self.happens = happens if happens is not None else lambda *_: None
        self.dead: set[int] = set()
        self.told: list[tuple[int, int]] = []
        """(peer, data node): who was told that its work counts, and by whom."""
        self.errors: list[RemoteError] = []
        self.lacks: list[tuple[int, NoRoom]] = []
        """(peer, what it has no room for)."""
        self.drivers: dict[int, Driver] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.servers: list[_Watched] = []
        self.networks: list[MemoryNetwork] = []
        self.data = batches(len(self.step.routes))
        self.boundary = boundary = Boundary.parse(codec, CONFIG.dim)
        for number in range(len(plan.peers)):
            network = MemoryNetwork(self.hub, signer(number).peer_id)
            mail = PipelineMail(network, signer(number), SWARM, pipeline_messages.decode)
            held = {stage for stage, peers in enumerate(plan.stages) if number in peers}
            server = _Watched(
                network=network,
                post=mail.send,
                learner=VirtualDoor(lambda name, times=slowness[number]: times * SECONDS.get(name, 0.001)),
                side=VirtualDoor(lambda _: 0.001),
                worker=Worker(self.model, LAYERS, held, head=number in self.step.homes or len(LAYERS) - 1 in held),
                service=Service(
                    forward=boundary,
                    backward=boundary,
                    vocab_size=32,
                    seq_len=8,
                    device=torch.device("cpu"),
                    **(service or {}),
                ),
                trip_s=lambda peer: 0.0,
                refused=self.errors.append,
                lacks=lambda error, number=number: self.lacks.append((number, error)),
            )
            server.lab, server.number = self, number
            listen(network, mail, server.handle, self.errors.append)
            server.serve()
            self.servers.append(server)
            self.networks.append(network)
            self.tasks[number] = group.create_task(self._live(server), context=clock.process_context(network.peer_id))
            if number in self.step.homes:
                self.drivers[number] = Driver(
                    network=network,
                    server=server,
                    post=mail.send,
                    step=self.step,
                    home=number,
                    batches=dict(enumerate(self.data)),
                    refused=self.errors.append,
                    lives={},
                    trial=LossTrial(),
                )

    async def _live(self, server: StageServer) -> None:
        try:
            await server.run()
        except asyncio.CancelledError:
            pass  # killed

    async def open(self) -> None:
        """The step, at all peers."""
        async with asyncio.TaskGroup() as group:
            for number, server in enumerate(self.servers):
                listener = self.drivers[number].listen if number in self.drivers else None
                at_its_own = clock.process_context(self.networks[number].peer_id)
                group.create_task(server.open(self.step, listener), context=at_its_own)

    async def run(self) -> Outcome:
        """The whole step, by all its data nodes."""
        await self.open()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(driver.run()) for driver in self.drivers.values()]
        first, *others = [task.result() for task in running]
        for other in others:
            first = replace(
                first,
                losses=first.losses | other.losses,
                cut=first.cut | other.cut,
                routes=first.routes | other.routes,
                lost=first.lost | other.lost,
                notes=first.notes + other.notes,
            )
        return first

    def kill(self, number: int, *, reset: bool = True) -> None:
        if number not in self.dead:
            self.dead.add(number)
            self.hub.kill(signer(number).peer_id, reset=reset)
            self.tasks[number].cancel()

    def visits(self, outcome: Outcome) -> dict[tuple[int, int], list[int]]:
        """Peers at which each (microbatch, hop) counts."""
        found = defaultdict(list)
        for number, server in enumerate(self.servers):
            if number not in self.dead | outcome.lost:
                for keys in server._open[WINDOW].desk.counted.values():
                    for key in keys:
                        found[key].append(number)
        return found

    async def contributions(self, outcome: Outcome) -> list[Accumulated]:
        alive = [number for number in range(len(self.servers)) if number not in self.dead | outcome.lost]
        return [await self.servers[number].settled(WINDOW) for number in alive]


class _Over(Exception):
    """Ends the task group of a lab; carries the result."""


def in_stages(main: Callable[[StageLab], Awaitable[T]], plan: Plan, **options: Any) -> T:
    """Run a test with a lab for this plan."""

    async def until_over() -> T:
        try:
            async with asyncio.TaskGroup() as group:
                raise _Over(await main(StageLab(group, plan, **options)))
        except* _Over as over:
            result: T = over.exceptions[0].args[0]
        return result

    torch.set_num_threads(1)
    return clock.run(until_over())


def two_columns(microbatches: int = 4, *, loss_at_home: bool = True) -> Plan:
    """Peer 0 is the data node; stages 1 to 3 have two peers each, and the microbatches take them by turns."""
    stages = ((0,), (1, 2), (3, 4), (5, 6))
    routes = [tuple(Hop(stage, peers[lane % len(peers)]) for stage, peers in enumerate(stages)) for lane in (0, 1)]
    return Plan(
        peers=tuple(names(7)),
        stages=stages,
        lanes=tuple(Lane(route=routes[lane % 2]) for lane in range(microbatches)),
        slots=(8,) * 7,
        policy=Policy.BACKWARD,
        loss_at_home=loss_at_home,
    )


async def whole(lab: StageLab) -> Outcome:
    """Run the step, and check its gradients and that nothing counts twice."""
    outcome = await lab.run()
    visits = lab.visits(outcome)
    assert all(len(peers) == 1 for peers in visits.values()), "counted twice"
    parts = [(m, HEAD if hop == len(outcome.routes[m]) else outcome.routes[m][hop].stage) for m, hop in visits]
    ways = {m: [route[hop].stage for hop in live_hops(route)] for m, route in outcome.routes.items()}
    wanted = expected(lab.model, LAYERS, lab.data, ways, parts, lab.boundary)
    found = mean_gradients(await lab.contributions(outcome))
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    return outcome
