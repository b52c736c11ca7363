"""A peer of the benchmarks: one process, run by `bench_round` and `bench_overhead`, that talks in JSON lines.

    python -m farflung.sims.bench_peer vector ...   a real node whose learner holds one vector and is always ready
    python -m farflung.sims.bench_peer node ...     a real node that trains a model, alone in its swarm
    python -m farflung.sims.bench_peer loop ...     the same training in a bare PyTorch loop

Nodes here are those of the daemon: real engine (DHT, control, TLS), `Peer`, storage on disk. Only the start is
shortened: identities follow from the rank, so every peer can write down the history in which all are members, and
nobody has to join or to download what is zero anyway.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor
from torch.nn.functional import cross_entropy

from farflung.compression import kernels
from farflung.compression.codec import Codec
from farflung.compression.int8 import Int8
from farflung.compression.policy import uniform
from farflung.node.door import Doors
from farflung.node.engine import Engine, EngineConfig
from farflung.node.events import Event, EventLog
from farflung.node.identity import Identity
from farflung.node.learner import Learner, SwarmLearner
from farflung.node.paths import resolve_paths
from farflung.node.peer import Facts, Peer
from farflung.node.runner import freeze_imports
from farflung.node.storage import FileStorage, Place
from farflung.node.trainer import Pace
from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Rules, Vote
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.training import presets
from farflung.training.corpus import python_documents
from farflung.training.data import TokenWindows, text_dataset
from farflung.training.inner import InnerConfig, StepReport
from farflung.training.order import SampleOrder
from farflung.training.outer import OuterConfig, OuterState
from farflung.training.replica import Replica
from farflung.training.schedule import Schedule
from farflung.training.tokenizer import ByteTokenizer

PATTERN_NUMEL = 1 << 16
"""Each peer's vector repeats this many Gaussian values, so that every peer knows everybody's mean."""

SCALE = 1e-3
"""Of the values: pseudo-gradients are small."""

OUTER = OuterConfig()

SWARM = hashlib.sha256(b"farflung bench").digest()

Say = Callable[..., None]


# ---- what both kinds of node share -----------------------------------------------------------------------------


def seed_of(rank: int) -> bytes:
    """The identity's seed of the peer with this rank."""
    return hashlib.sha256(f"farflung bench {rank}".encode()).digest()


def history_of(signers: Sequence[Ed25519Signer], rules: Rules) -> list[Certified]:
    """A genesis by the first peer, and a commit that makes all of them members."""
    founder = signers[0]
    genesis = chain.genesis(founder.peer_id, rules)
    history = [_certify(genesis, founder)]
    if len(signers) > 1:
        everybody = tuple(sorted(s.peer_id for s in signers))
        commit = chain.successor(SWARM, genesis, rules, view=everybody, left=(), result=None)
        history.append(_certify(commit, founder))
    return history


def _certify(commit: Commit, founder: Ed25519Signer) -> Certified:
    signed = chain.vote_bytes(SWARM, commit.height, 0, chain.commit_hash(SWARM, commit))
    return Certified(commit, 0, (Vote(founder.peer_id, founder.sign(signed)),))


def settings_of(founder: bytes, *, numel: int, codec: Codec, peers: int, pace: Pace) -> Settings:
    """Rules under which a round takes everybody, and no deadline cuts it short."""
    return Settings(
        swarm=SWARM,
        founder=founder,
        rules=Rules(
            window=3 * pace.inner_steps * pace.samples_per_step,
            lease=3,
            max_group=64,
            numel=numel,
            tokens_per_sample=pace.tokens_per_sample,
        ),
        align=codec.block,
        uplink=codec.spec,
        downlink=codec.spec,
        bytes_per_element=codec.max_nbytes(1 << 20) / (1 << 20),
        min_contributors=peers,
        total_rounds=pace.total_rounds,
        min_round_s=60.0,
        max_round_s=600.0,
        removal_s=120.0,
        heartbeat_s=5.0,
        admits=lambda peer, token: True,
    )


class BenchStorage(FileStorage):
    """A node's disk that begins with the state of `height`, and notes when each commit reached this peer."""

    def __init__(self, folder: Path, height: int) -> None:
        super().__init__(folder)
        self._height = height
        self._certified_at = 0.0
        self.committed: dict[int, float] = {}
        """Height to unix seconds."""

    def sync_means(self, plan: bytes) -> None:
        self._certified_at = time.time()  # the first that is done about a certified round
        super().sync_means(plan)

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        self.committed[certified.commit.height] = self._certified_at
        super().append_commit(anchor, certified)

    def load_learner(self, learner: Learner) -> Place | None:
        return Place(self._height, 0, (), 0, b"")


@dataclass(kw_only=True)
class Node:
    """A node, and what it said."""

    peer: Peer
    engine: Engine
    storage: BenchStorage
    log: EventLog
    history: list[Certified]


def loop_factory() -> asyncio.AbstractEventLoop:
    """The loop that the daemon runs in."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def make_node(
    folder: Path,
    doors: Doors,
    learner: Learner,
    pace: Pace,
    *,
    rank: int,
    peers: int,
    host: str,
    contact: Sequence[str],
    up_mbit: float = 0.0,
) -> Node:
    """Start an engine on `host` and put a node on it. The caller closes the engine."""
    await doors.side.run(kernels.prepare, resolve_paths().cache / "kernels")
    freeze_imports()
    codec = Int8()
    signers = [Ed25519Signer(seed_of(r)) for r in range(peers)]
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed_of(rank)))
    config = EngineConfig.loopback(initial_peers=tuple(contact))
    libp2p = replace(config.libp2p, listen=(f"/ip4/{host}/tcp/0",))
    config = replace(
        config,
        libp2p=libp2p,
        tls_hosts=(host,),
        up_bytes_per_s=up_mbit * 125_000 or None,
    )
    engine = await Engine.create(identity, config)
    settings = settings_of(signers[0].peer_id, numel=learner.num_parameters, codec=codec, peers=peers, pace=pace)
    history = history_of(signers, settings.rules)
    storage = BenchStorage(folder / "swarm", history[-1].commit.height)
    log = EventLog(folder / "events.jsonl", swarm="bench", peer=identity.public_key.hex())
    peer = Peer(
        network=engine,
        signer=signers[rank],
        settings=settings,
        pace=pace,
        learner=learner,
        uplink=uniform(codec, learner.num_parameters),
        downlink=uniform(codec, learner.num_parameters),
        feedback=FeedbackSpec(),
        outer_step=(OUTER.lr, OUTER.momentum),
        doors=doors,
        storage=storage,
        log=log,
        facts=Facts(device="bench", pid=os.getpid()),
        checkpoint_s=1e9,
    )
    return Node(peer=peer, engine=engine, storage=storage, log=log, history=history)


# ---- a vector ------------------------------------------------------------------------------------------------------


class VectorLearner:
    """Holds the same pseudo-gradient for every round; the outer state is real."""

    def __init__(self, numel: int, rank: int, peers: int) -> None:
        self.outer = OuterState(torch.zeros(numel))
        self._delta = torch.empty(numel)
        self._mean = torch.stack([_pattern(r) for r in range(peers)]).mean(dim=0)
        _repeat(self._delta, _pattern(rank))
        self._momentum = 0.0
        self._moved = 0.0

    @property
    def num_parameters(self) -> int:
        return self.outer.num_parameters

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        return StepReport(loss=0.0, tokens=len(numbers), grad_norm=0.0, lr=0.0)

    def offer(self) -> None:
        pass

    def offered_gradient(self) -> Tensor:
        return self._delta  # as an averager is given its tensors: what it costs to take is the trainer's

    def apply(self, updates: Sequence[tuple[int, int, Tensor]], *, contributed: bool) -> None:
        for start, stop, mean in updates:
            self.outer.step_(start, stop, mean, OUTER.lr, OUTER.momentum)
        self._momentum = OUTER.momentum * self._momentum + 1.0
        self._moved -= OUTER.lr * (1.0 + OUTER.momentum * self._momentum)

    def nmse(self) -> float:
        """Squared error of the outer parameters relative to those that exact means would have made."""
        error = power = 0.0
        for start in range(0, self.num_parameters, PATTERN_NUMEL):
            got = self.outer.params[start : start + PATTERN_NUMEL]
            true = self._mean[: len(got)] * self._moved
            error += float((got - true).square().sum())
            power += float(true.square().sum())
        return error / power

    def adopt_outer(self, previous: Tensor | None, *, contributed: bool = False) -> None:
        raise RuntimeError("a peer of the benchmark fell behind")

    def discard_progress(self) -> None:
        pass

    def evaluate(self) -> float:
        return 0.0

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def load(self, folder: Path) -> None:
        pass


def _pattern(rank: int) -> Tensor:
    return torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(rank)) * SCALE


def _repeat(vector: Tensor, pattern: Tensor) -> None:
    for start in range(0, len(vector), PATTERN_NUMEL):
        vector[start : start + PATTERN_NUMEL] = pattern[: len(vector) - start]


async def run_vector(arguments: argparse.Namespace, folder: Path, say: Say, hear: Callable[[], Any]) -> None:
    """Say hello; hear everybody's addresses; do the rounds; say what each took."""
    learner = VectorLearner(arguments.numel, arguments.rank, arguments.peers)
    pace = Pace(inner_steps=1, samples_per_step=1, tokens_per_sample=1, total_rounds=arguments.rounds)
    node = await make_node(
        folder,
        Doors.threads(),
        learner,
        pace,
        rank=arguments.rank,
        peers=arguments.peers,
        host=arguments.host,
        contact=arguments.contact,
        up_mbit=arguments.up_mbit,
    )
    events: list[Event] = []
    node.log.subscribe(events.append)
    node.log.subscribe(lambda e: say(round=e["version"]) if e["event"] == "round.commit" else None)
    try:
        say(contact=node.engine.addresses(), codec=Int8().spec)
        others = await asyncio.to_thread(hear)
        ids = [Ed25519Signer(seed_of(r)).peer_id for r in range(arguments.peers)]
        for peer, addresses in zip(ids, others["addresses"], strict=True):
            node.engine.add_addresses(peer, addresses)
        known = [peer for peer in ids if peer != node.engine.peer_id]
        await node.peer.run(anchor=None, history=node.history, known=known)
    finally:
        await node.engine.close()
    say(rounds=_rounds(events, node.storage.committed), nmse=learner.nmse(), said=_odd(events))


def _rounds(events: Sequence[Event], committed: dict[int, float]) -> list[dict[str, Any]]:
    """Unix seconds of what happened in each committed round, as this peer saw it."""
    rounds: dict[int, dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "round.plan":
                rounds[event["round"]] = {"planned": event["time"]}
            case "round.cut" if event["round"] in rounds:
                rounds[event["round"]]["cut"] = event["time"]
            case "round.commit" if event["round"] in rounds:
                rounds[event["round"]] |= {
                    "held_s": event["seconds"],
                    "committed": committed[event["round"]],
                    "applied": event["time"],
                    "sent_bytes": event["sent_bytes"],
                    "digest": event["digest"],
                    "contributors": len(event["contributors"]),
                    "left_out": event["parts_left_out"],
                }
    return [rounds[height] for height in sorted(rounds)]


def _odd(events: Sequence[Event]) -> list[str]:
    """What should not have happened."""
    odd = (
        "round.missed",
        "round.abort",
        "peer.dead",
        "peer.unreachable",
        "refused",
        "state.repair",
        "progress.dropped",
    )
    return [f"{e['event']}: {e.get('reason', '')}" for e in events if e["event"] in odd]


# ---- a model -------------------------------------------------------------------------------------------------------


def make_training(arguments: argparse.Namespace) -> tuple[Replica, TokenWindows, SampleOrder]:
    """Model, data and order: the same for the node and the bare loop."""
    tokenizer = ByteTokenizer()
    config = presets.preset(arguments.preset, vocab_size=tokenizer.vocab_size)
    dataset = text_dataset(python_documents(), tokenizer, config.seq_len)
    inner = InnerConfig(schedule=Schedule(peak=1e-3, warmup_steps=100, total_steps=10_000))
    replica = Replica(config, inner, OUTER, seed=0)
    return replica, dataset, SampleOrder(num_samples=dataset.num_samples, seed=0, block=dataset.block)


class TurnLearner(SwarmLearner):
    """Stands before each turn of `steps` inner steps until it is told to go, and says how long the turn took."""

    def __init__(
        self,
        replica: Replica,
        dataset: TokenWindows,
        order: SampleOrder,
        steps: int,
        say: Say,
        go: Callable[[], Any],
    ) -> None:
        super().__init__(replica, dataset, order)
        self._steps = steps
        self._done = 0
        self._began = 0.0
        self._say = say
        self._go = go

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        if self._done % self._steps == 0:  # here the round of the last turn is over, too
            if self._done:
                self._say(seconds=time.perf_counter() - self._began)
            self._go()
            self._began = time.perf_counter()
        self._done += 1
        return super().train(numbers, global_step)


async def run_node(arguments: argparse.Namespace, folder: Path, say: Say, hear: Callable[[], Any]) -> None:
    """A lone node, for as many turns as it is told."""
    doors = Doors.threads()
    replica, dataset, order = await doors.learner.run(make_training, arguments)
    orders: SimpleQueue[bool] = SimpleQueue()
    steps = arguments.steps
    learner = TurnLearner(replica, dataset, order, steps, say, orders.get)
    pace = Pace(
        inner_steps=steps,
        samples_per_step=arguments.batch,
        tokens_per_sample=replica.model.config.seq_len,
        total_rounds=1 << 40,
    )
    node = await make_node(folder, doors, learner, pace, rank=0, peers=1, host="127.0.0.1", contact=[])
    try:
        async with asyncio.TaskGroup() as group:
            life = group.create_task(node.peer.run(anchor=None, history=node.history, known=[]), name="node")
            say(**_facts(replica, arguments))
            while await asyncio.to_thread(hear) is not None:
                orders.put(True)
            orders.put(True)  # the last step, after which the node ends
            node.peer.stop("the benchmark is over")
            await life
    finally:
        await node.engine.close()


def run_loop(arguments: argparse.Namespace, say: Say, hear: Callable[[], Any]) -> None:
    """The same training without a node."""
    replica, dataset, order = make_training(arguments)
    model, inner = replica.model, replica.inner_config
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=inner.schedule.peak, betas=inner.betas, eps=inner.eps, fused=True)
    say(**_facts(replica, arguments))
    number = step = 0
    loss = torch.zeros(())
    while hear() is not None:
        began = time.perf_counter()
        for _ in range(arguments.steps):
            batch = [dataset.tokens(order.index(number + i)) for i in range(arguments.batch)]
            tokens = torch.from_numpy(np.stack(batch))
            for group in optimizer.param_groups:
                group["lr"] = inner.schedule.at(step)
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, inner.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            number += arguments.batch
            step += 1
        say(seconds=time.perf_counter() - began, loss=loss.item())


def _facts(replica: Replica, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "parameters": replica.num_parameters,
        "tokens": arguments.steps * arguments.batch * replica.model.config.seq_len,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Run one process: orders come in on stdin, answers go out on stdout, everything else to stderr."""
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="kind", required=True)
    vector = kinds.add_parser("vector")
    vector.add_argument("--rank", type=int, required=True)
    vector.add_argument("--peers", type=int, required=True)
    vector.add_argument("--numel", type=int, required=True)
    vector.add_argument("--rounds", type=int, required=True)
    vector.add_argument("--host", default="127.0.0.1")
    vector.add_argument("--up-mbit", type=float, default=0.0)
    vector.add_argument("--contact", nargs="*", default=[])
    for kind in ("node", "loop"):
        training = kinds.add_parser(kind)
        training.add_argument("--preset", required=True)
        training.add_argument("--batch", type=int, required=True)
        training.add_argument("--steps", type=int, required=True)
        training.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    # libraries and child processes may write to stdout: only our lines go to the parent
    with (
        os.fdopen(os.dup(1), "w") as answers,
        tempfile.TemporaryDirectory(prefix="farflung-bench-") as folder,
    ):
        os.dup2(2, 1)

        def say(**message: object) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        def hear() -> Any:
            line = sys.stdin.readline()
            return json.loads(line) if line else None

        threads = 1 if arguments.kind == "vector" else arguments.threads  # vectors: several share this machine
        if threads:
            torch.set_num_threads(threads)
        if arguments.kind == "loop":
            run_loop(arguments, say, hear)
            return
        run = run_vector if arguments.kind == "vector" else run_node
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run(arguments, Path(folder), say, hear))


if __name__ == "__main__":
    main()
