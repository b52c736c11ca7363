"""What nodes' loops really compute, beside what messages, writes and calls take by themselves (`calibrate_ways`).

Eight real processes train a tiny model in rounds of some seconds. The operating system says what their loops' threads, and p2pd, took of processors from one round to the next: what
nodes make of what comes, what they log and look after, and that so many processes share caches is in that, and in no single measurement. How many messages, pieces of
streams and calls a round has is counted in a simulation of the same swarm. As many times as the one is these together, each of them takes in truth.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from farflung.node.events import Event
from farflung.sims.bench_workers import BenchError
from farflung.sims.churn import make_schedule
from farflung.sims.local_run import found_locally
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate
from farflung.sims.swarm import Swarm
from farflung.sims.told_to_end import orderly_end, run_until_told

KINDS = ("message", "write", "door")
"""What `calibrate_ways` measures one of, in seconds, and a simulation counts: control messages, pieces of streams, calls."""

ENOUGH = 5
"""Rounds."""


@dataclass(slots=True)
class Rounds:
    """What had been done by all nodes together when each round was committed first."""

    num_peers: int
    heights: set[int] = field(default_factory=set)
    done: list[tuple[bool, tuple[float, ...]]] = field(default_factory=list)
    """Whether all were members, and how much had been done, of each kind."""

    def see(self, event: Event, done: tuple[float, ...]) -> None:
        """An event came, when so much had been done."""
        if event["event"] == "round.commit" and event["round"] not in self.heights:
            self.heights.add(event["round"])
            self.done.append((len(event["view"]) == self.num_peers, done))

    def each(self) -> list[float]:
        """Of each kind from one round to the next, the mean while all are members. Raises BenchError when these are too few."""
        whole = [number for number, (are_all, _) in enumerate(self.done) if are_all]
        if len(whole) < ENOUGH:
            raise BenchError(
                f"{self.num_peers} nodes made {len(whole)} rounds together, and {ENOUGH} are needed: this machine is busy"
            )
        first, last = whole[0], whole[-1]
        return [
            (after - before) / (last - first)
            for before, after in zip(self.done[first][1], self.done[last][1], strict=True)
        ]


def loops_told(scenario: Scenario, ways: Mapping[str, float]) -> dict[str, Any]:
    """`loop_times`: as many times as `ways` says it all takes, as seconds of one message, write and call. Raises BenchError, ConfigError, NodeFailed."""
    loops_s = loop_seconds(scenario)
    counts, message_bytes = count_ways(scenario)
    return {
        "loops_s_per_round": round(loops_s, 4),
        **{f"{kind}s_per_round": round(number) for kind, number in counts.items()},
        "message_bytes": message_bytes,
        "loop_times": round(loops_s / sum(number * ways[f"{kind}_s"] for kind, number in counts.items()), 3),
    }


# ---- real nodes ----------------------------------------------------------------------------------------------------


def loop_seconds(scenario: Scenario) -> float:
    """Of processors, that all loops together take from one round to the next. Blocks for as long as the scenario takes."""
    schedule = make_schedule(scenario, scenario.seed, Path())
    rounds, clocks = Rounds(scenario.num_peers), list[_Clock]()
    with orderly_end(), tempfile.TemporaryDirectory(prefix="farflung-local-") as folder:
        swarm = found_locally(scenario, scenario.seed, schedule, Path(folder))

        def look(event: Event) -> None:
            if event["event"] != "round.commit" or len(pids := swarm.pids) < scenario.num_peers:
                return
            with contextlib.suppress(psutil.NoSuchProcess):  # it has crashed, of which the swarm tells
                if not clocks:
                    clocks.extend(map(_Clock, pids))
                rounds.see(event, (sum(one.seconds() for one in clocks),))

        swarm.on_event = look
        run_until_told(swarm.play(schedule))
        if swarm.crashed:
            raise BenchError("; ".join(swarm.crashed))
    return rounds.each()[0]


class _Clock:
    """Of a node that is up: seconds of its loop's thread, which is the first one, and of what it has started."""

    def __init__(self, pid: int) -> None:
        self._node = psutil.Process(pid)
        self._children = self._node.children(recursive=True)

    def seconds(self) -> float:
        loop = next((thread for thread in self._node.threads() if thread.id == self._node.pid), None)
        if loop is None:
            raise BenchError("this system does not tell what the first thread of a process computes; Linux does")
        of_children = (child.cpu_times() for child in self._children)
        return float(loop.user_time + loop.system_time + sum(times.user + times.system for times in of_children))


# ---- the same under virtual time -----------------------------------------------------------------------------------


def count_ways(scenario: Scenario) -> tuple[dict[str, float], int]:
    """How many of each kind a round has, those between two rounds included, and the bytes of a control message."""
    plan = prepare(
        msgspec.structs.replace(scenario, mode="cost"), scenario.seed, make_schedule(scenario, scenario.seed, Path())
    ).plan
    rounds, counts, sizes = Rounds(scenario.num_peers), dict.fromkeys(KINDS, 0.0), list[int]()

    def count(kind: str) -> None:
        counts[kind] += 1

    def seconds(peer: int, name: str, share: float) -> float:
        count("door")
        return plan.outfit.seconds(peer, name, share)

    def at_once(kind: str, now: float) -> float:
        count(kind)
        return now

    async def listen(swarm: Swarm) -> None:
        hub, judged = swarm.hub, swarm.hub.on_message
        hub.handled_at = lambda now: at_once("message", now)
        hub.read_at = lambda now: at_once("write", now)

        def sent(sender: bytes, message: bytes) -> None:
            sizes.append(len(message))
            judged(sender, message)

        hub.on_message = sent

    simulate(
        replace(plan, outfit=replace(plan.outfit, seconds=seconds)),
        sink=lambda line, event: rounds.see(event, tuple(counts.values())),
        meddler=listen,
    )
    return dict(zip(KINDS, rounds.each(), strict=True)), round(sum(sizes) / len(sizes))
