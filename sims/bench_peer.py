"""A peer of the benchmarks: one process, run by `bench_round`, `bench_overhead`, `bench_overlap` and `bench_unequal`, that talks in JSON lines.

python -m farflung.sims.bench_peer vector ...    a real node whose learner holds one vector and is always ready
python -m farflung.sims.bench_peer node ...      a real node that trains a model, alone in its swarm
python -m farflung.sims.bench_peer loop ...      the same training in a bare PyTorch loop
python -m farflung.sims.bench_peer member ...    a real node that trains a model with others (`overlap_peer`)
python -m farflung.sims.bench_peer parallel ...  the same training, data-parallel over gloo (`overlap_peer`)
python -m farflung.sims.bench_peer paced ...     a real node that trains with others on a machine of a given speed (`unequal_peer`)
python -m farflung.sims.bench_peer stage ...     a peer of a pipeline (`stage_peer`)

Before that stands `--folder FOLDER`, an empty one for what it keeps; whoever starts it removes it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from farflung.compression.int8 import Int8
from farflung.node.door import Doors
from farflung.node.events import Event
from farflung.node.heap import keep_freed_memory
from farflung.node.learner import SwarmLearner
from farflung.node.runner import loop_factory
from farflung.sims.bench_model import BareLoop, make_training
from farflung.sims.bench_node import OUTER, Hear, Say, make_node, odd_events
from farflung.sims.overlap_peer import run_member, run_parallel
from farflung.sims.stage_peer import run_stage
from farflung.sims.unequal_peer import run_paced
from farflung.training.coupled import Update
from farflung.training.data import TokenWindows
from farflung.training.inner import StepReport
from farflung.training.order import SampleOrder
from farflung.training.outer import OuterState
from farflung.training.replica import Replica

PATTERN_NUMEL = 1 << 16
"""Each peer's vector repeats this many Gaussian values, so that every peer knows everybody's mean."""

SCALE = 1e-3
"""Of the values: pseudo-gradients are small."""

ORPHAN_S = 60.0
"""How long a peer goes on after its orders have ended: longer than a living parent waits for its end."""

# ---- a vector ------------------------------------------------------------------------------------------------------


class VectorLearner:
    """Holds the same pseudo-gradient for every round; the outer state is real.

    A node trains on while it takes the digest of a round's state. Here nothing else is trained, and the next round
    would begin in the middle of that; so `train` waits until the last round is reported.
    """

    def __init__(self, numel: int, rank: int, peers: int) -> None:
        self.outer = OuterState(torch.zeros(numel))
        self.reported = threading.Event()
        self.reported.set()
        self._delta = torch.empty(numel)
        self._mean = torch.stack([_pattern(r) for r in range(peers)]).mean(dim=0)
        _repeat(self._delta, _pattern(rank))
        self._momentum = 0.0
        self._moved = 0.0

    @property
    def num_parameters(self) -> int:
        return self.outer.num_parameters

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        self.reported.wait()
        return StepReport(loss=0.0, tokens=len(numbers), grad_norm=0.0, lr=0.0)

    def start_over(self) -> None:
        self.discard_progress()

    def pass_over(self, numbers: Sequence[int]) -> None:
        pass

    def offer(self, start: int, stop: int) -> None:
        pass

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        return self._delta[start:stop]  # as an averager is given its tensors: what it costs to take is the trainer's

    def apply(
        self,
        updates: Sequence[Update],
        *,
        contributed: bool,
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.reported.clear()
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

    def adopt_outer(
        self,
        previous: Tensor | None,
        *,
        counted: Sequence[tuple[int, int]] = (),
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        raise RuntimeError("a peer of the benchmark fell behind")

    def discard_progress(self) -> None:
        pass

    def evaluate(self) -> float:
        return 0.0

    def evaluate_few(self) -> float:
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


async def run_vector(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """Take part in the rounds; say what each took."""
    learner = VectorLearner(arguments.numel, arguments.rank, arguments.peers)
    node = await make_node(arguments, folder, Doors.threads(), learner)

    def watch(event: Event) -> None:
        if event["event"] == "round.commit":
            learner.reported.set()
            say(round=event["version"])

    try:
        events = await node.take_part(watch, say, hear, codec=arguments.codec)
    finally:
        learner.reported.set()  # who waits for it would keep a process that failed from ending
    say(rounds=_rounds(events, node.storage.committed), nmse=learner.nmse(), said=odd_events(events))


def _rounds(events: Sequence[Event], committed: dict[int, float]) -> list[dict[str, Any]]:
    """Unix seconds of what happened in each committed round, as this peer saw it."""
    rounds: dict[int, dict[str, Any]] = {}
    for event in events:
        match event["event"]:
            case "round.plan":
                rounds[event["round"]] = {"planned": event["time"]}
            case "round.cut" if event["round"] in rounds:
                rounds[event["round"]]["cut"] = event["time"]
            case "span" if event["what"] == "decode" and event["round"] in rounds:
                rounds[event["round"]]["averaged"] = event["time"]
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


# ---- a model ------------------------------------------------------------------------------------------------------


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


async def run_node(arguments: argparse.Namespace, folder: Path, say: Say, hear: Hear) -> None:
    """A lone node, for as many turns as it is told."""
    doors = Doors.threads()
    replica, dataset, order = await doors.learner.run(make_training, arguments)
    turns: SimpleQueue[bool] = SimpleQueue()
    learner = TurnLearner(replica, dataset, order, arguments.steps, say, turns.get)
    node = await make_node(arguments, folder, doors, learner, tokens_per_sample=replica.model.config.seq_len)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(node.run([]), name="node")
            say(**_facts(replica, arguments))
            while await hear() is not None:
                turns.put(True)
            node.peer.stop("the benchmark is over")
            turns.put(True)  # the last step, after which the node ends
    finally:
        turns.put(True)  # a learner that stands before a turn would keep a process that failed from ending
        await node.engine.close()


def run_loop(arguments: argparse.Namespace, say: Say, orders: "SimpleQueue[str]") -> None:
    """The same training without a node."""
    replica, dataset, order = make_training(arguments)
    loop = BareLoop(replica, dataset, order)
    say(**_facts(replica, arguments))
    number = step = 0
    loss = torch.zeros(())
    while orders.get():
        began = time.perf_counter()
        for _ in range(arguments.steps):
            loss = loop.gradients(number, arguments.batch)
            loop.update(step)
            number += arguments.batch
            step += 1
        say(seconds=time.perf_counter() - began, loss=loss.item())


def _facts(replica: Replica, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "parameters": replica.num_parameters,
        "tokens": arguments.steps * arguments.batch * replica.model.config.seq_len,
        "threads": torch.get_num_threads(),
    }


def _read_orders(put: Callable[[str], object]) -> None:
    """Begin to read lines from stdin, and after them an empty one, in a thread that keeps nobody from ending.

    Whoever closes stdin waits for our end; who is still here after that has lost its parent.
    """

    def read() -> None:
        for line in sys.stdin:
            put(line)
        put("")
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()


async def _run_node(
    run: Callable[[argparse.Namespace, Path, Say, Hear], Awaitable[None]],
    arguments: argparse.Namespace,
    folder: Path,
    say: Say,
) -> None:
    """One of the nodes, which hears orders without a thread that would have to end before the loop can."""
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[str] = asyncio.Queue()

    def put(line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears any more
            loop.call_soon_threadsafe(orders.put_nowait, line)

    async def hear() -> Any:
        line = await orders.get()
        return json.loads(line) if line else None

    _read_orders(put)
    await run(arguments, folder, say, hear)


def main() -> None:
    """Run one process: orders come in on stdin, answers go out on stdout, everything else to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    kinds = parser.add_subparsers(dest="kind", required=True)
    vector, member, parallel, paced = (kinds.add_parser(kind) for kind in ("vector", "member", "parallel", "paced"))
    for among_others in (vector, member, parallel, paced):
        among_others.add_argument("--rank", type=int, required=True)
        among_others.add_argument("--peers", type=int, required=True)
        among_others.add_argument("--rounds", type=int, required=True)
        among_others.add_argument("--contact", nargs="*", default=[])
        among_others.set_defaults(threads=1)  # they share this machine
    vector.add_argument("--numel", type=int, required=True)
    vector.set_defaults(steps=1, batch=1, delay=0, codec=Int8().spec)
    for node in (vector, member, paced):
        node.add_argument("--host", default="127.0.0.1")
        node.add_argument("--up-mbit", type=float, default=0.0)
    for replica in (member, paced):
        replica.add_argument("--delay", type=int, required=True)
        replica.add_argument("--codec", required=True)
    member.add_argument("--mean-codec", default="", help="of means; empty: that of contributions")
    member.add_argument("--fragments", type=int, default=1)
    member.add_argument("--kept", action="store_true")
    parser.set_defaults(mean_codec="", fragments=1, kept=False)
    paced.add_argument("--step-s", type=float, required=True)
    paced.add_argument("--equal-steps", action="store_true")
    lone, loop = (kinds.add_parser(kind) for kind in ("node", "loop"))
    for alone in (lone, loop):
        alone.add_argument("--threads", type=int, default=0)
    lone.set_defaults(rank=0, peers=1, rounds=1 << 40, contact=[], host="127.0.0.1", up_mbit=0.0)
    lone.set_defaults(delay=0, codec=Int8().spec)
    for training in (member, parallel, paced, lone, loop):
        training.add_argument("--preset", required=True)
        training.add_argument("--batch", type=int, required=True)
        training.add_argument("--steps", type=int, required=True)
    stage = kinds.add_parser("stage")
    stage.add_argument("--rank", type=int, required=True)
    stage.add_argument("--contact", nargs="*", default=[])
    stage.add_argument("--away", default="{}")
    stage.add_argument("--up-mbit", type=float, default=0.0)
    stage.set_defaults(threads=1)
    arguments = parser.parse_args()
    # libraries and child processes may write to stdout: only our lines go to the parent
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(**message: object) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        match arguments.kind:
            case "loop":
                orders: SimpleQueue[str] = SimpleQueue()
                _read_orders(orders.put)
                run_loop(arguments, say, orders)
            case "parallel":
                _read_orders(lambda line: None)  # there are none; but the end of stdin counts
                run_parallel(arguments, say)
            case kind:
                run = {
                    "vector": run_vector,
                    "node": run_node,
                    "member": run_member,
                    "paced": run_paced,
                    "stage": run_stage,
                }[kind]
                keep_freed_memory()  # as the daemon does
                with asyncio.Runner(loop_factory=loop_factory) as runner:
                    runner.run(_run_node(run, arguments, arguments.folder, say))


if __name__ == "__main__":
    main()
