"""A stage peer as a process of its own, for tests and benchmarks: real engine, `StageServer`, and at data nodes the `Driver`.

Run by `bench_peer stage`; talks in JSON lines with whoever started it (`stage_group`):

    <- {"contact": [...]}
    -> {"addresses": [[...], ...]}              of all, by rank; again when somebody came back
    -> {"world": {...}}                         <- {"ready": true}      model and stages: everything before it is forgotten
    -> {"step": {...}, "window": "hex", ...}    <- {"opened": "hex"}
    -> {"go": true}                             <- {"landed": {...}}    of a data node, when its microbatches are home
                                                <- {"settled": {...}}   after the inner step, if the world has one
    -> {"save": "file"}                         <- {"saved": true}      parameters that are held, by the model's names

A step may say before which operation this process stands still (`<- {"stands": ...}`), or after which backward, once its microbatch has landed; so
it can be killed at that moment.

The machine is rehearsed where the world says what operations take: each really computes, and then sleeps until it has taken as long as it would there.
Operations whose computing alone took longer are counted as late.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor, nn

from farflung.node.distance import Distances
from farflung.node.door import Doors
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity
from farflung.node.network import Network, PeerId
from farflung.node.pipeline_driver import Driver, Outcome
from farflung.node.pipeline_step import Step
from farflung.node.sealed_mail import PipelineMail
from farflung.node.stage_server import StageServer
from farflung.node.stage_step import OpenStep, Service
from farflung.protocol import pipeline_messages
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.flight import Patience
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.messages import PipelineMessage
from farflung.sims.bench_node import SWARM, Hear, Say, seed_of
from farflung.sims.stage_mates import Mates, save_sums
from farflung.training.errors import NoRoom
from farflung.training.inner import InnerConfig
from farflung.training.inner_optimizer import InnerOptimizer
from farflung.training.model import Decoder, ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import Kind, Op, Plan
from farflung.training.pipeline_rules import Rules
from farflung.training.pipeline_worker import Accumulated, Batch, Worker, mean_gradients
from farflung.training.recovery_trial import LossTrial

PATIENCE = Patience(leg_s=10.0, answer_s=2.0, hard_s=60.0)


class Pace(msgspec.Struct, frozen=True):
    """What operations take, as in `pipeline_costs.Costs`."""

    forward_s: tuple[tuple[float, ...], ...]
    """[stage][rank]"""
    backward: float
    loss: float

    def seconds(self, kind: Kind, stage: int, rank: int) -> float:
        factor = {Kind.F: 1.0, Kind.LOSS: self.loss, Kind.B: self.backward}[kind]
        return factor * self.forward_s[stage][rank]


class World(msgspec.Struct, frozen=True):
    """What all processes of a pipeline agree on before its steps."""

    model: ModelConfig
    seed: int
    layers: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    """The ranks that hold each."""
    batch: int
    """Sequences of a microbatch."""
    heads: tuple[int, ...] = (0,)
    """The stages whose peers compute losses."""
    codec: str = "fp32"
    pace: Pace | None = None
    """None: as fast as this machine."""
    inner: InnerConfig | None = None
    """The step that peers take with the mean over their stage; None: sums are only summed."""

    def held(self, rank: int) -> set[int]:
        return {stage for stage, ranks in enumerate(self.stages) if rank in ranks}

    def mates(self, rank: int) -> list[int]:
        """Who holds the same stages; ourselves among them."""
        held = self.held(rank)
        return [one for one in sorted({one for ranks in self.stages for one in ranks}) if self.held(one) == held]

    def decoder(self) -> Decoder:
        return Decoder(self.model, seed=self.seed)


def _raise(error: NoRoom) -> None:
    raise error


def key_of(rank: int) -> str:
    """Name of a rank in a plan."""
    return Ed25519Signer(seed_of(rank)).peer_id.hex()


def load_batches(file: Path) -> list[Batch]:
    """Tokens and targets of each microbatch, of an .npy file of int64 [microbatches, batch, seq_len + 1]."""
    return [(one[:, :-1], one[:, 1:]) for one in torch.from_numpy(np.load(file))]


class PacedWorker(Worker):
    """A worker on the machine of a rank; counts its seconds. Losses are paced as at data nodes."""

    def __init__(self, world: World, rank: int) -> None:
        held = world.held(rank)
        super().__init__(world.decoder(), world.layers, held, head=bool(held & set(world.heads)))
        self._pace, self._rank = world.pace, rank
        self.busy_s = 0.0
        """In operations, so long as they take there."""
        self.late = 0
        """Operations for which this machine was too slow."""

    def forward(self, stage: int, x: Tensor) -> Tensor:
        with self._taking(Kind.F, stage):
            return super().forward(stage, x)

    def loss(self, x_BTD: Tensor, targets_BT: Tensor, into: Accumulated) -> tuple[float, Tensor]:
        with self._taking(Kind.LOSS, 0):
            return super().loss(x_BTD, targets_BT, into)

    def backward(self, stage: int, x: Tensor, gradient: Tensor, into: Accumulated) -> Tensor | None:
        with self._taking(Kind.B, stage):
            return super().backward(stage, x, gradient, into)

    @contextmanager
    def _taking(self, kind: Kind, stage: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self._pace is not None:
            left_s = began + self._pace.seconds(kind, stage, self._rank) - time.monotonic()
            self.late += left_s < 0.0
            time.sleep(max(0.0, left_s))
        self.busy_s += time.monotonic() - began


class WatchedServer(StageServer):
    """Notes when it did what, and stands still where it is told to."""

    say: Say
    stands_before = stands_after = ""
    ran: list[tuple[str, int, int, float, float]]
    """(kind, microbatch, hop, began, ended) on the machine's monotonic clock."""
    news: asyncio.Event
    """Set by every control message."""

    def handle(self, sender: PeerId, message: PipelineMessage) -> None:
        super().handle(sender, message)
        self.news.set()

    async def _compute(self, open_: OpenStep, op: Op) -> None:
        if str(op) == self.stands_before:
            await self._stand(op)
        began = time.monotonic()
        await super()._compute(open_, op)
        self.ran.append((op.kind, op.microbatch, op.hop, began, time.monotonic()))
        if str(op) == self.stands_after:
            while (op.microbatch, op.hop) in open_.kept:
                self.news.clear()
                await self.news.wait()
            await self._stand(op)

    async def _stand(self, op: Op) -> None:
        """Until this process is killed; nothing of it answers any more, or the step might end before."""
        self.say(stands=str(op))
        threading.Event().wait()


class StagePeer:
    """One process; see the module."""

    def __init__(self, rank: int, engine: Engine, group: asyncio.TaskGroup, say: Say) -> None:
        self._rank = rank
        self._engine = engine
        self._group = group
        self._say = say
        self._doors = Doors.threads()
        self._refused: list[str] = []
        self._mail = PipelineMail(engine, Ed25519Signer(seed_of(rank)), SWARM, pipeline_messages.decode)
        self._serving: asyncio.Task[None] | None = None
        self._world: World
        self._worker: PacedWorker
        self._server: WatchedServer
        self._mates: Mates
        self._optimizer: InnerOptimizer | None = None

    async def obey(self, hear: Hear) -> None:
        """Until the orders end."""
        try:
            while (order := await hear()) is not None:
                match order:
                    case {"addresses": addresses}:
                        for rank, known in enumerate(addresses):
                            self._engine.add_addresses(bytes.fromhex(key_of(rank)), known)
                    case {"world": world}:
                        await self._enter(msgspec.convert(world, World))
                        self._say(ready=True)
                    case {"step": _}:
                        await self._step(order, hear)
                    case {"save": file}:
                        held = self._worker.named_parameters()
                        arrays: dict[str, Any] = {name: one.detach().numpy() for name, one in held.items()}
                        np.savez(file, **arrays)
                        self._say(saved=True)
        finally:
            await self._leave()
            self._doors.close()

    async def _enter(self, world: World) -> None:
        await self._leave()
        self._world = world
        self._worker = PacedWorker(world, self._rank)
        boundary = Boundary.parse(world.codec, world.model.dim)
        self._server = WatchedServer(
            network=self._engine,
            post=self._mail.send,
            learner=self._doors.learner,
            side=self._doors.side,
            worker=self._worker,
            service=Service(
                forward=boundary,
                backward=boundary,
                vocab_size=world.model.vocab_size,
                seq_len=world.model.seq_len,
                device=torch.device("cpu"),
            ),
            trip_s=lambda peer: 0.0,
            refused=self._refuse,
            lacks=_raise,
        )
        self._server.say, self._server.news = self._say, asyncio.Event()
        held = self._worker.named_parameters()
        self._mates = Mates(self._engine, 16 * sum(one.numel() for one in held.values()) + (1 << 20), self._refuse)
        self._optimizer = None if world.inner is None else _optimizer(held, world.inner)
        listen(self._engine, self._mail, self._server.handle, self._refuse)
        self._server.serve()
        self._serving = self._group.create_task(self._server.run(), name="stage server")

    async def _leave(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    async def _step(self, order: Mapping[str, Any], hear: Hear) -> None:
        world, server, worker = self._world, self._server, self._worker
        plan = msgspec.convert(order["step"], Plan, str_keys=True)
        window = bytes.fromhex(order["window"])
        rules = Rules(visits=min(len(lane.route) for lane in plan.lanes))
        droppable = Droppable.of_routes(rules.visits, len(plan.stages), rules.max_jump)
        step = Step(
            number=order["number"],
            window=window,
            plan=plan,
            most_tokens=world.batch * world.model.seq_len,
            patience=PATIENCE,
            droppable=droppable,
        )
        server.stands_before, server.stands_after = order.get("stands_before", ""), order.get("stands_after", "")
        server.ran, worker.busy_s, worker.late = [], 0.0, 0
        home = step.place[self._engine.peer_id]
        driver = None
        if home in step.homes:
            batches = load_batches(Path(order["batches"]))
            driver = Driver(
                network=self._engine,
                server=server,
                post=self._mail.send,
                step=step,
                home=home,
                batches={number: batches[number] for number in range(len(step.routes)) if step.home(number) == home},
                refused=self._refuse,
                lives={},
                trial=LossTrial(),
            )
        await server.open(step, None if driver is None else driver.listen)
        self._say(opened=order["window"])
        await hear()
        sent = self._engine.delivered_bytes()
        if driver is not None:
            began = time.monotonic()
            outcome = await driver.run()
            self._say(landed=_told(outcome, began))
        if order.get("loses_home"):  # nobody here watches over who lives, so whoever killed it says so
            news = await hear()
            assert news is not None
            server.lost(bytes.fromhex(news["lost"]))
        accumulated = await server.settled(window)
        sent = self._engine.delivered_bytes() - sent
        parcels = [[op.kind, op.microbatch, op.hop, *rest] for op, *rest in server.diary(window).sent]
        server.close(window)
        if order.get("sums"):
            save_sums(Path(order["sums"]), accumulated)
        if self._optimizer is not None:
            await self._learn(window, accumulated, order["number"])
        told = {
            "ended": time.monotonic(),
            "ran": server.ran,
            "busy_s": worker.busy_s,
            "late": worker.late,
            "sent": parcels,
        }
        self._say(settled=told | {"sent_bytes": sent, "refused": self._refused})

    async def _learn(self, window: bytes, accumulated: Accumulated, number: int) -> None:
        """Average with the mates, and take inner step `number`."""
        assert self._optimizer is not None and self._world.inner is not None
        members = [bytes.fromhex(key_of(rank)) for rank in self._world.mates(self._rank)]
        means = mean_gradients(await self._mates.exchange(window, accumulated, members))
        held = self._worker.named_parameters()
        for name, parameter in held.items():
            parameter.grad = means.get(name, torch.zeros_like(parameter))
        nn.utils.clip_grad_norm_(held.values(), self._world.inner.max_grad_norm)
        self._optimizer.step(self._world.inner.schedule.at(number))
        self._optimizer.zero_grad()

    def _refuse(self, error: RemoteError) -> None:
        self._refused.append(str(error))


def listen(
    network: Network,
    mail: PipelineMail,
    handler: Callable[[PeerId, PipelineMessage], None],
    refused: Callable[[RemoteError], None],  # is told of bad mail, and of RemoteErrors that the handler raises
) -> None:
    """A server by itself gets nothing but this mail."""

    def receive(sender: PeerId, data: bytes) -> None:
        try:
            message = mail.open(sender, data)
            if not isinstance(message, PipelineMessage):
                raise Refused("a message about a swarm to a stage peer that is in none", peer=sender)
            handler(sender, message)
        except RemoteError as error:
            refused(error)

    network.on_message(receive)


def _optimizer(held: Mapping[str, nn.Parameter], config: InnerConfig) -> InnerOptimizer:
    peak = config.schedule.peak
    groups = parse_optimizer(config.optimizer).groups(
        held.items(), lr=peak, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return InnerOptimizer(groups)


def _told(outcome: Outcome, began: float) -> dict[str, Any]:
    return {
        "began": began,
        "seconds": outcome.seconds,
        "losses": {str(microbatch): loss for microbatch, loss in outcome.losses.items()},
        "cut": {str(microbatch): reason for microbatch, reason in outcome.cut.items()},
        "routes": {str(microbatch): route for microbatch, route in outcome.routes.items()},
        "lost": sorted(outcome.lost),
        "notes": [f"{note.what} {note.peer} {note.microbatch}: {note.reason}" for note in outcome.notes],
    }


async def run_stage(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """Serve stages, and drive steps, until the orders end."""
    rank: int = arguments.rank
    away = {bytes.fromhex(peer): seconds for peer, seconds in json.loads(arguments.away).items()}
    config = EngineConfig.loopback(initial_peers=tuple(arguments.contact))
    if away:
        distances = Distances(one_way_s=away, up_bytes_per_s=arguments.up_mbit * 125_000)
        config = replace(config, distances=distances)
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed_of(rank)))
    engine = await Engine.create(identity, config)
    try:
        async with asyncio.TaskGroup() as group:
            peer = StagePeer(rank, engine, group, say)
            say(contact=engine.addresses())
            await peer.obey(hear)
    finally:
        await engine.close()
