"""A stage peer as a process of its own, for tests and benchmarks: real engine, `StageServer`, and on rank 0 the data node's `Driver`.

Run by `bench_peer stage`; talks in JSON lines. After the addresses of all it is told steps, one after another:

    <- {"contact": [...]}                      -> {"addresses": [[...], ...]}
    -> {"step": {...}, "window": "hex", ...}   <- {"opened": "hex"}
    -> {"go": true}                            <- {"landed": {...}}  rank 0 only, when its microbatches are home
                                               <- {"settled": "hex"}  gradients are in the file that the step named

A step may say at which operation this process ends, on the spot, as a machine does that loses its power; with exit code 0,
so that whoever started it knows that this was meant.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.node.door import Doors
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity
from farflung.node.pipeline_driver import Driver
from farflung.node.pipeline_mail import PipelineMail
from farflung.node.pipeline_step import Step
from farflung.node.stage_server import StageServer
from farflung.node.stage_step import Service
from farflung.protocol.errors import RemoteError
from farflung.protocol.flight import Patience
from farflung.protocol.keys import Ed25519Signer
from farflung.sims.bench_node import SWARM, Hear, Say, seed_of
from farflung.training.model import Decoder, ModelConfig
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_plan import Op, Plan
from farflung.training.pipeline_worker import Accumulated, Batch, Worker

PATIENCE = Patience(leg_s=10.0, answer_s=2.0, hard_s=60.0)


class World(msgspec.Struct, frozen=True):
    """What all processes of a pipeline agree on before its steps."""

    model: ModelConfig
    seed: int
    layers: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    """The ranks that hold each."""
    batch: int
    codec: str = "fp32"

    def held(self, rank: int) -> set[int]:
        return {stage for stage, ranks in enumerate(self.stages) if rank in ranks}

    def decoder(self) -> Decoder:
        return Decoder(self.model, seed=self.seed)

    def data(self, count: int) -> list[Batch]:
        """Tokens and targets of so many microbatches."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (count, self.batch, self.model.seq_len + 1)
        tokens = torch.randint(0, self.model.vocab_size, shape, generator=generator)
        return [(one[:, :-1], one[:, 1:]) for one in tokens]


def key_of(rank: int) -> str:
    """Name of a rank in a plan."""
    return Ed25519Signer(seed_of(rank)).peer_id.hex()


class _Server(StageServer):
    """Ends its process when it is about to compute one operation."""

    ends_at: str = ""

    async def _compute(self, open_: Any, op: Op) -> None:
        if str(op) == self.ends_at:
            os._exit(0)
        await super()._compute(open_, op)


async def run_stage(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """Serve stages, and drive the steps on rank 0, until the orders end."""
    world = msgspec.json.decode(arguments.world, type=World)
    rank: int = arguments.rank
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed_of(rank)))
    engine = await Engine.create(identity, EngineConfig.loopback(initial_peers=tuple(arguments.contact)))
    doors = Doors.threads()
    refused: list[str] = []

    def on_refused(error: RemoteError) -> None:
        refused.append(str(error))

    try:
        signer = Ed25519Signer(seed_of(rank))
        mail = PipelineMail(engine, signer, SWARM, refused=on_refused)
        boundary = Boundary.parse(world.codec, world.model.dim)
        held = world.held(rank)
        server = _Server(
            network=engine,
            post=mail.send,
            learner=doors.learner,
            side=doors.side,
            worker=Worker(world.decoder(), world.layers, held, head=bool({0, len(world.stages) - 1} & held)),
            service=Service(
                forward=boundary,
                backward=boundary,
                vocab_size=world.model.vocab_size,
                seq_len=world.model.seq_len,
                device=torch.device("cpu"),
            ),
            refused=on_refused,
        )
        mail.on_message(server.handle)
        server.serve()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.run(), name="stage server")
            say(contact=engine.addresses())
            for other, addresses in enumerate((await hear())["addresses"]):
                engine.add_addresses(bytes.fromhex(key_of(other)), addresses)
            while (order := await hear()) is not None:
                await _one_step(order, world, rank, server, mail, say, hear, refused, on_refused, engine)
            serving.cancel()
    finally:
        await engine.close()
        doors.close()


async def _one_step(
    order: Mapping[str, Any],
    world: World,
    rank: int,
    server: _Server,
    mail: PipelineMail,
    say: Say,
    hear: Hear,
    refused: list[str],
    on_refused: Callable[[RemoteError], None],
    engine: Engine,
) -> None:
    plan = msgspec.json.decode(json.dumps(order["step"]), type=Plan)
    window = bytes.fromhex(order["window"])
    step = Step(window=window, plan=plan, most_tokens=world.batch * world.model.seq_len)
    server.ends_at = order.get("ends_at", "")
    driver = None
    if rank == 0:
        driver = Driver(
            network=engine,
            server=server,
            post=mail.send,
            step=step,
            home=step.place[bytes.fromhex(key_of(0))],
            batches=dict(enumerate(world.data(len(step.routes)))),
            patience=PATIENCE,
            refused=on_refused,
        )
    await server.open(step, None if driver is None else driver.listen)
    say(opened=order["window"])
    await hear()
    if driver is not None:
        outcome = await driver.run()
        say(
            landed={str(microbatch): loss for microbatch, loss in outcome.losses.items()},
            routes={str(microbatch): route for microbatch, route in outcome.routes.items()},
            lost=sorted(outcome.lost),
            notes=[f"{note.what} {note.peer} {note.microbatch}: {note.reason}" for note in outcome.notes],
            seconds=outcome.seconds,
        )
    accumulated = await server.settled(window)
    server.close(window)
    if order.get("gradients"):
        save_sums(Path(order["gradients"]), accumulated)
    say(settled=order["window"], refused=refused)


def save_sums(path: Path, accumulated: Accumulated) -> None:
    """Sums and visits as an .npz file."""
    arrays: dict[str, Any] = {f"{part}|{name}": total.numpy() for (part, name), total in accumulated.sums.items()}
    arrays |= {f"{part}": np.int64(count) for part, count in accumulated.visits.items()}
    np.savez(path, **arrays)


def load_sums(path: Path) -> Accumulated:
    """What `save_sums` wrote."""
    accumulated = Accumulated()
    with np.load(path) as arrays:
        for key, array in arrays.items():
            part, named, name = key.partition("|")
            if named:
                accumulated.sums[int(part), name] = torch.from_numpy(array)
            else:
                accumulated.visits[int(part)] = int(array)
    return accumulated
