"""A real node for the benchmarks, with a short start.

Nodes here are those of the daemon: real engine (DHT, control, TLS), `Peer`, storage on disk. Only the start is
shortened: identities follow from the rank, so every peer can write down the history in which all are members, and
nobody has to join or to download what is the same everywhere anyway.
"""

import argparse
import hashlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.compression import kernels
from farflung.compression.codec import Codec
from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.node.door import Doors
from farflung.node.engine import Engine, EngineConfig
from farflung.node.events import Event, EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.identity import Identity
from farflung.node.learner import Learner, WholeLearner
from farflung.node.network import PeerId
from farflung.node.paths import resolve_paths
from farflung.node.peer import Peer
from farflung.node.race import until_first
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.runner import freeze_imports
from farflung.node.storage import FileStorage, Place
from farflung.node.terms import Terms
from farflung.node.trainer import Pace
from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Rules, Vote, founded
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lap import Laps
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.training.rules import Nesterov

OUTER = Nesterov()

Say = Callable[..., None]
"""Tells whoever started the benchmark: one answer, by keywords."""

Hear = Callable[[], Awaitable[Any]]
"""The next order; None when there are no more."""

SWARM = hashlib.sha256(b"farflung bench").digest()


def seed_of(rank: int) -> bytes:
    """The identity's seed of the peer with this rank."""
    return hashlib.sha256(f"farflung bench {rank}".encode()).digest()


def history_of(signers: Sequence[Ed25519Signer], rules: Rules) -> list[Certified]:
    """A genesis by the first peer, and a commit that makes all of them members."""
    founder = signers[0]
    history = [founded(SWARM, founder, rules)]
    if len(signers) > 1:
        everybody = tuple(sorted(s.peer_id for s in signers))
        commit = chain.successor(SWARM, history[0].commit, rules, view=everybody, left=(), result=None)
        vote = founder.sign(chain.vote_bytes(SWARM, commit.height, 0, chain.commit_hash(SWARM, commit)))
        history.append(Certified(commit, 0, (Vote(founder.peer_id, vote),)))
    return history


def settings_of(
    founder: bytes,
    *,
    cuts: tuple[int, ...],  # elements at which fragments begin and end
    codec: Codec,  # of contributions
    mean_codec: Codec,
    peers: int,
    pace: Pace,
    patient: bool,
    early: bool,
) -> Settings:
    """Rules under which a round takes everybody (`patient`) or waits for the late as nodes do, and no deadline cuts it short.

    Without `early` nobody offers before its H steps, whoever waits: the protocol's rhythm without overlap (`protocol.rhythm`),
    though training overlaps.
    """
    return Settings(
        swarm=SWARM,
        founder=founder,
        rules=Rules(
            ahead=3 * pace.samples_per_step,
            lease=3,
            max_group=64,
            cuts=cuts,
            laps=pace.laps if early else replace(pace.laps, delay=0),
            total_steps=pace.total_steps,
            tokens_per_sample=pace.tokens_per_sample,
        ),
        step_tokens=pace.step_tokens,
        align=math.lcm(codec.block, mean_codec.block),
        uplink=codec.spec,
        downlink=mean_codec.spec,
        bytes_per_element=max(one.max_nbytes(1 << 20) for one in (codec, mean_codec)) / (1 << 20),
        min_contributors=peers if patient else 1,
        min_round_s=60.0 if patient else 1.0,
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
        self.committed: dict[int, float] = {}
        """Height to unix seconds."""

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        # Nothing that takes time is done about a certified round before.
        self.committed[certified.commit.height] = time.time()
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

    async def run(self, known: list[PeerId]) -> None:
        """Live in the swarm until it is done. Raises what makes the engine fail: a node that has become deaf would go on without it."""
        await until_first(
            self.peer.run(anchor=None, history=self.history, known=dict.fromkeys(known)), self.engine.wait_failed()
        )

    async def take_part(self, watch: Callable[[Event], None], say: Say, hear: Hear, **hello: object) -> list[Event]:
        """Say hello; hear everybody's addresses, by rank; do the rounds, while `watch` sees what happens; close the engine.

        Returns all events.
        """
        events: list[Event] = []
        self.log.subscribe(events.append)
        self.log.subscribe(watch)
        try:
            say(contact=self.engine.addresses(), **hello)
            addresses = (await hear())["addresses"]
            ids = [Ed25519Signer(seed_of(rank)).peer_id for rank in range(len(addresses))]
            for peer, known in zip(ids, addresses, strict=True):
                self.engine.add_addresses(peer, known)
            await self.run([peer for peer in ids if peer != self.engine.peer_id])
        finally:
            await self.engine.close()
        return events


async def make_node(
    arguments: argparse.Namespace,  # of `bench_peer`
    folder: Path,
    doors: Doors,
    learner: WholeLearner,
    *,
    tokens_per_sample: int = 1,
    patient: bool = True,  # see `settings_of`, also for the next
    early: bool = True,
) -> Node:
    """Start an engine and put a node on it. The caller closes the engine, or has it closed by `Node.take_part`."""
    rank, host, numel, parts = arguments.rank, arguments.host, learner.num_parameters, arguments.fragments
    codec, mean_codec = (parse_codec(spec) for spec in (arguments.codec, arguments.mean_codec or arguments.codec))
    align = math.lcm(codec.block, mean_codec.block)
    pace = Pace(
        laps=Laps.fixed(arguments.steps, arguments.delay),
        samples_per_step=arguments.batch,
        tokens_per_sample=tokens_per_sample,
        # the last round of a run moves all fragments: it is one that nobody looks at
        total_steps=arguments.steps * (1 + arguments.rounds + (parts > 1)),
    )
    await doors.side.run(kernels.prepare, resolve_paths().cache / "kernels")
    freeze_imports()
    signers = [Ed25519Signer(seed_of(r)) for r in range(arguments.peers)]
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed_of(rank)))
    config = EngineConfig.loopback(initial_peers=tuple(arguments.contact))
    libp2p = replace(config.libp2p, listen=(f"/ip4/{host}/tcp/0",))
    config = replace(
        config,
        libp2p=libp2p,
        tls_hosts=(host,),
        up_bytes_per_s=arguments.up_mbit * 125_000 or None,
    )
    engine = await Engine.create(identity, config)
    settings = settings_of(
        signers[0].peer_id,
        cuts=(*range(0, max(1, numel - align), -(-numel // (parts * align)) * align), numel),
        codec=codec,
        mean_codec=mean_codec,
        peers=len(signers),
        pace=pace,
        patient=patient,
        early=early,
    )
    history = history_of(signers, settings.rules)
    storage = BenchStorage(folder / "swarm", history[-1].commit.height)
    log = EventLog(folder / "events.jsonl", swarm="bench", peer=identity.public_key.hex())
    up, down = uniform(codec, numel), uniform(mean_codec, numel)
    feedback = FeedbackSpec(uplink="kept" if arguments.kept else "none")
    terms = Terms(settings=settings, pace=pace, uplink=up, downlink=down, feedback=feedback, outer=OUTER)
    facilities = Facilities(
        network=engine,
        signer=signers[rank],
        doors=doors,
        storage=storage,
        log=log,
        facts=Facts(device="bench", pid=os.getpid()),
        checkpoint_s=1e9,
    )
    peer = ReplicaPeer(terms, facilities, learner)
    return Node(peer=peer, engine=engine, storage=storage, log=log, history=history)


def odd_events(events: Sequence[Event]) -> list[str]:
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
