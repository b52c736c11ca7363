"""All stage peers of a pipeline, as processes, from the side of whoever started them (`stage_peer` is the other)."""

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from farflung.protocol.route import Leg, Route
from farflung.sims.bench_workers import BenchError, Worker, workers
from farflung.sims.stage_peer import World, key_of
from farflung.training.pipeline_plan import Kind, Op, Plan
from farflung.training.pipeline_simulate import Ran, Sent, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Far:
    """How far apart peers are; by rank."""

    latency_s: Sequence[Sequence[float]]
    up_bytes_per_s: Sequence[float]

    def arguments(self, rank: int) -> list[str]:
        """Of the process of that rank."""
        row = self.latency_s[rank]
        away = {key_of(other): seconds for other, seconds in enumerate(row) if other != rank}
        return ["--away", json.dumps(away), "--up-mbit", str(self.up_bytes_per_s[rank] / 125_000)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A peer is killed at a moment of a step."""

    rank: int
    before: Op | None = None
    after: Op | None = None
    """A backward whose microbatch has landed: what the peer has summed up is lost with it."""

    def order(self) -> dict[str, str]:
        moments = {"stands_before": self.before, "stands_after": self.after}
        return {key: str(op) for key, op in moments.items() if op is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """How a step went."""

    losses: dict[int, float]
    """By microbatch, of those that came home."""
    cut: dict[int, str]
    routes: dict[int, Route]
    """Where all of them went in the end."""
    lost: frozenset[int]
    notes: tuple[str, ...]
    seconds: float
    """From the first data node's beginning until the last one's microbatches were home."""
    learnt_s: float
    """Until all peers had taken their inner step."""
    busy_s: tuple[float, ...]
    """By rank: in operations; 0 of the dead."""
    late: int
    """Operations for which this machine was too slow."""
    sent_bytes: int
    """By all living peers, until everybody was told that the step is over."""
    ran: Timeline
    """What the living computed and sent."""


Launch = Callable[[int, Sequence[str]], Worker]
"""(rank, contact) to its process."""


class StageGroup:
    """Running processes. Everything raises BenchError when one of them ends that was not to."""

    def __init__(self, launch: Launch, peers: int, folder: Path) -> None:
        """Starts them; `folder` is for files between them and us."""
        self._launch = launch
        self._folder = folder
        self._names = [key_of(rank) for rank in range(peers)]
        first = launch(0, [])
        self._addresses: list[list[str]] = [first.hear()["contact"]]
        self._members = [first, *(launch(rank, self._addresses[0][:1]) for rank in range(1, peers))]
        self._addresses += [member.hear()["contact"] for member in self._members[1:]]
        self._introduce()
        self._world: World

    def enter(self, world: World) -> None:
        """All peers forget what was, and hold their stages of a new model."""
        self._world = world
        for member in self._members:
            member.tell(world=msgspec.to_builtins(world))
        for member in self._members:
            member.hear()

    def step(
        self,
        plan: Plan,  # whose peers are named by `key_of`
        batches: Tensor,  # int64 [microbatches, batch, seq_len + 1]
        *,
        number: int = 0,  # of the inner step
        death: Death | None = None,
        sums: Mapping[int, Path] | None = None,  # by rank: files for what was accumulated
    ) -> StepSeen:
        """One step of a plan among the peers that it names. Raises BenchError when peers refused something."""
        file = self._folder / "batches.npy"
        np.save(file, batches.numpy())
        ranks = [self._names.index(name) for name in plan.peers]
        homes = {ranks[lane.route[0].peer or 0] for lane in plan.lanes}
        order = {"step": msgspec.to_builtins(plan), "window": secrets.token_hex(32), "batches": str(file)}
        for rank in ranks:
            its: dict[str, Any] = {"number": number, "sums": str(sums[rank]) if sums else ""}
            if death is not None and death.rank == rank:
                its |= death.order()
            elif death is not None:
                its["loses_home"] = death.rank in homes
            self._members[rank].tell(**order, **its)
        for rank in ranks:
            self._members[rank].hear()
        for rank in ranks:
            self._members[rank].tell(go=True)
        if death is not None:
            self._members[death.rank].hear()
            self._members[death.rank].cut()
        alive = [rank for rank in ranks if death is None or rank != death.rank]
        if death is not None and death.rank in homes:
            for rank in alive:
                self._members[rank].tell(lost=self._names[death.rank])
        landed = {rank: self._members[rank].hear()["landed"] for rank in alive if rank in homes}
        settled = {rank: self._members[rank].hear()["settled"] for rank in alive}
        refused = sorted({said for one in settled.values() for said in one["refused"]})
        if refused and death is None:
            raise BenchError(f"peers refused something: {'; '.join(refused)[:500]}")
        return _seen(plan, ranks, landed, settled)

    def revive(self, rank: int) -> None:
        """Start a killed peer again; it has forgotten everything and enters the world of all."""
        contact = self._addresses[1 if rank == 0 else 0]
        member = self._members[rank] = self._launch(rank, contact[:1])
        self._addresses[rank] = member.hear()["contact"]
        self._introduce()
        member.tell(world=msgspec.to_builtins(self._world))
        member.hear()

    def parameters(self) -> dict[str, Tensor]:
        """Of the whole model, each from the first peer that holds it."""
        found: dict[str, Tensor] = {}
        for stage, ranks in enumerate(self._world.stages):
            file = self._folder / f"stage-{stage}.npz"
            self._members[ranks[0]].tell(save=str(file))
            self._members[ranks[0]].hear()
            with np.load(file) as arrays:
                found |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        return found

    def finish(self) -> None:
        """No orders after this."""
        for member in self._members:
            member.finish()

    def _introduce(self) -> None:
        for member in self._members:
            member.tell(addresses=self._addresses)


def _seen(plan: Plan, ranks: list[int], landed: Mapping[int, Any], settled: Mapping[int, Any]) -> StepSeen:
    began = min(one["began"] for one in landed.values())
    lanes = plan.schedule()
    routes = {
        int(m): tuple(Leg(*leg) for leg in route) for one in landed.values() for m, route in one["routes"].items()
    }
    ran = [
        Ran(
            Op(Kind(kind), microbatch, hop),
            _stage(plan, lanes[microbatch][0], hop),
            ranks.index(rank),
            start - began,
            end - began,
        )
        for rank, one in settled.items()
        for kind, microbatch, hop, start, end in one["ran"]
    ]
    sent = [
        Sent(Op(Kind(kind), microbatch, hop), ranks.index(rank), to, start - began, end - began)
        for rank, one in settled.items()
        for kind, microbatch, hop, to, start, end in one["sent"]
    ]
    return StepSeen(
        losses={int(m): loss for one in landed.values() for m, loss in one["losses"].items()},
        cut={int(m): reason for one in landed.values() for m, reason in one["cut"].items()},
        routes=routes,
        lost=frozenset(peer for one in landed.values() for peer in one["lost"]),
        notes=tuple(note for one in landed.values() for note in one["notes"]),
        seconds=max(one["began"] + one["seconds"] for one in landed.values()) - began,
        learnt_s=max(one["ended"] for one in settled.values()) - began,
        busy_s=tuple(settled[rank]["busy_s"] if rank in settled else 0.0 for rank in ranks),
        late=sum(one["late"] for one in settled.values()),
        sent_bytes=sum(one["sent_bytes"] for one in settled.values()),
        ran=Timeline(
            peers=plan.peers,
            ran=tuple(sorted(ran, key=lambda one: one.begin_s)),
            sent=tuple(sorted(sent, key=lambda one: one.begin_s)),
        ),
    )


def _stage(plan: Plan, lane: int, hop: int) -> int:
    return plan.lanes[lane].route[hop].stage


@contextlib.contextmanager
def stage_group(
    peers: int, folder: Path, *, within_s: float = math.inf, far: Far | None = None
) -> Iterator[StageGroup]:
    """Starts a process for each peer; all of them end with the block. Raises BenchError.

    `within_s`: then something hangs, and the processes are ended.
    """
    with workers(within_s) as start:

        def launch(rank: int, contact: Sequence[str]) -> Worker:
            arguments = [] if far is None else far.arguments(rank)
            return start(["stage", "--rank", str(rank), *arguments, "--contact", *contact])

        group = StageGroup(launch, peers, folder)
        yield group
        group.finish()
