"""The peers of `bench_overlap`: members of a swarm, and data-parallel training over gloo, both on emulated links.

Each trains some steps before anything is sent (`calm`), then does what it is there for, and notes when it was computing
and what its network interface has carried. Steps are timed around the computation itself, in the process that does it;
bytes are the kernel's counts of the interface, so headers, acknowledgements and repetitions are in, whoever sent them.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from farflung.node.door import Doors
from farflung.node.events import Event
from farflung.node.learner import SwarmLearner
from farflung.sims.bench_model import BareLoop, make_training
from farflung.sims.bench_node import Hear, Say, make_node, odd_events
from farflung.training.inner import StepReport

INTERFACE = "eth0"
"""Of a host of the emulation."""


def interface_bytes(table: str, name: str) -> tuple[int, int]:
    """(sent, received) of an interface in the text of /proc/net/dev. Raises ValueError when it is not there."""
    for line in table.splitlines():
        device, colon, counts = line.partition(":")
        if colon and device.strip() == name:
            columns = counts.split()
            return int(columns[8]), int(columns[0])
    raise ValueError(f"there is no network interface {name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """When a peer computed, and what its interface had carried at some moments. Seconds are the monotonic clock's."""

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """(begin, end, seconds of computation) of each inner step."""
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, bytes sent, bytes received): the ends of the warm-up and of each measured round or, data-parallel, of all."""

    def mark(self) -> None:
        """Note the time and the interface's counts."""
        table = Path("/proc/net/dev").read_text(encoding="ascii")
        self.marks.append((time.monotonic(), *interface_bytes(table, INTERFACE)))


# ---- a member of a swarm -------------------------------------------------------------------------------------------


class TimedLearner(SwarmLearner):
    """Notes when it trains. It does not evaluate: nodes spend at most 0.5 % of their time on that, but in a short run the
    first evaluation is more.
    """

    meter: Meter

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        began = time.monotonic()
        report = super().train(numbers, global_step)
        ended = time.monotonic()
        self.meter.steps.append((began, ended, ended - began))
        return report

    def evaluate(self) -> float:
        return 0.0

    def evaluate_few(self) -> float:
        return 0.0


async def run_member(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """Take part in the rounds; say what was measured."""
    doors = Doors.threads()
    replica, dataset, order = await doors.learner.run(make_training, arguments)
    learner = TimedLearner(replica, dataset, order)
    learner.meter = meter = Meter()
    node = await make_node(arguments, folder, doors, learner, tokens_per_sample=replica.model.config.seq_len)
    calm: list[int] = []  # steps trained when a round was planned
    measured = 1 + arguments.rounds

    def watch(event: Event) -> None:
        if event["event"] == "round.plan":
            calm.append(len(meter.steps))
        elif event["event"] == "round.commit":
            meter.mark()
            if len(meter.marks) <= measured:
                say(round=event["version"])

    events = await node.take_part(watch, say, hear, parameters=replica.num_parameters)
    commits = [e for e in events if e["event"] == "round.commit"]
    since = events[events.index(commits[0]) :]  # in the warm-up peers may not have heard of each other yet
    say(
        steps=meter.steps,
        marks=meter.marks[:measured],
        calm=calm[0],
        digests=[e["digest"] for e in commits],
        round_s=[e["seconds"] for e in commits[:measured]],
        said=odd_events(since) + [_lack(e, arguments.peers) for e in commits if _lack(e, arguments.peers)],
    )


def _lack(commit: Event, peers: int) -> str:
    """What was missing from a round, if anything."""
    absent = peers - len(commit["contributors"])
    return f"round {commit['round']} went without {absent} peers" if absent else ""


# ---- data-parallel -------------------------------------------------------------------------------------------------


def run_parallel(arguments: argparse.Namespace, say: Say) -> None:
    """One all-reduce of the fp32 gradients in each step, when the backward pass is over."""
    from torch import distributed

    loop = BareLoop(*make_training(arguments))
    numel = sum(p.numel() for p in loop.parameters)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    [store] = arguments.contact
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=arguments.rank, world_size=arguments.peers
    )
    meter = Meter()
    say(parameters=numel)
    distributed.barrier()
    for step in range(arguments.steps + 1 + arguments.rounds):
        calm = step < arguments.steps
        # before the first all-reduce everybody trains on the same samples, so that all parameters stay equal
        first = step if calm else step * arguments.peers + arguments.rank
        began = time.monotonic()
        loop.gradients(first * arguments.batch, arguments.batch)
        seconds = 0.0
        if not calm:
            gradients = [p.grad for p in loop.parameters if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            sent = time.monotonic()
            distributed.all_reduce(flat)
            seconds = time.monotonic() - sent
            _unflatten(flat.div_(arguments.peers), gradients)
        loop.update(step)
        ended = time.monotonic()
        meter.steps.append((began, ended, ended - began - seconds))
        if step >= arguments.steps:
            meter.mark()
            say(round=step - arguments.steps + 1)
    digest = hashlib.sha256(torch.cat([p.detach().flatten() for p in loop.parameters]).numpy().tobytes()).hexdigest()
    say(steps=meter.steps, marks=meter.marks, calm=arguments.steps, digests=[digest], round_s=[], said=[])
    distributed.destroy_process_group()


def _unflatten(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
