"""`farflung bench overlap`: how much of its time a peer computes, when links are slow.

Four processes train the same model behind links of 20, 50 and 200 Mbit/s and a round trip of 100 ms (`wan`): as real
nodes whose training goes on for up to `delay_steps` while a round is under way, as the same nodes that stand until it is
over (DiLoCo; it has our codec for free), and data-parallel with a gloo all-reduce of fp32 gradients in each step.

- `utilisation` = seconds in inner steps / seconds, over the measured rounds, after one to warm up. A step is what the
  learner does; copies for the exchange, decoding and the outer step are not compute.
- Four processes share the processors of this machine with each other and with the emulation's router. So a step takes
  longer while others compute, or while a round is encoded and sent, and seconds in steps count that as compute. Hence
  `utilisation_at_calm_speed` = steps * step_s_calm / seconds, where `step_s_calm` is the median of the steps that all train
  before anything is sent: the share of the speed without a network that is left. On a machine with a processor for
  each node the truth is between the two.
- Bytes are the kernel's counts of each peer's interface, sent and received together, headers included.

All figures are medians over the peers. Not in them, as runs are short: evaluations (nodes bound them to 0.5 % of the
time) and checkpoints. Overlapping the all-reduce with the backward pass, as DDP does, could hide at most the time of
the steps themselves: `hidden_at_most` = computing / max(computing, rest).
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.sims import wan as wans
from farflung.sims.bench_round import MB, UP_CAP
from farflung.sims.bench_workers import BenchError, Worker, introduce, last_answers, workers
from farflung.sims.wan import Link, Wan
from farflung.training.methods import DEFAULT

DELAY_S = 0.025
"""Of each link and direction: 100 ms from a peer to another and back."""

LINKS_MBIT_S = (20.0, 50.0, 200.0)

PEERS = 4

OURS = "farflung"
"""What the names of our rows begin with."""

WITHIN_S = 240.0
"""For one method on one link; then something hangs, and the processes are ended."""

CALM_SKIPPED = 2
"""First steps, in which memory is taken and caches are filled."""

TARGET = 0.97
"""Of our utilisation."""

TARGET_MBIT_S = 50.0
"""And on faster links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all methods train."""

    preset: str = "3m"
    batch: int = 2
    """Sequences of one step of one peer."""
    inner_steps: int = 8
    """H: steps between two rounds."""
    rounds: int = 3
    """Measured, after one to warm up; data-parallel, all-reduces."""
    peers: int = PEERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A way to train together."""

    name: str
    codec: str
    """Of contributions, and of means where there is no other; empty: fp32 gradients in every step."""
    mean_codec: str = ""
    inner_steps: int
    """H."""
    fragments: int = 1
    kept: bool = False
    """What the codec leaves out stays with the sender."""
    overlaps: bool = True
    """Training goes on until the next round is due."""

    @property
    def lap(self) -> int:
        """Steps from a round to the next."""
        return self.inner_steps // self.fragments

    @property
    def delay_steps(self) -> int:
        """tau, at most."""
        return self.lap - 1 if self.overlaps else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapFigures:
    """One method on one link; see the module."""

    method: str
    codec: str
    mbit_s: float
    peers: int
    parameters: int
    inner_steps: int
    delay_steps: int
    utilisation: float
    utilisation_at_calm_speed: float
    hidden_at_most: float
    """Utilisation, had all that is not compute run beside the compute."""
    step_s: float
    """Median seconds of computation in a step."""
    step_s_calm: float
    """The same before anything is sent."""
    longest_step_s: float
    """Far more than the median when somebody else stopped this machine: measure again."""
    wall_s_per_step: float
    """All seconds over steps: what a step costs in truth."""
    bytes_per_step: float
    """Sent and received by one peer."""
    round_s: float | None
    """From the plan until all members held all means."""
    router_cpu: float | None
    """Processors that the emulation took; None when the kernel carries the packets."""
    router_late_s: float | None
    """By how much it delivered the latest packet too late: the link was slower than it should be."""


def measure_overlap(
    method: Method,
    mbit_s: float,
    task: Task,
    *,
    within_s: float = WITHIN_S,
    progress: Callable[[str], None] = lambda text: None,
) -> OverlapFigures:
    """Train with one method behind links of one rate. Raises BenchError, WanError."""
    link = Link(rate_bit_s=mbit_s * 1e6, delay_s=DELAY_S)
    with wans.emulate([link] * task.peers) as net, workers(within_s) as start, tempfile.TemporaryDirectory() as folder:

        def launch(rank: int, contact: Sequence[str]) -> Worker:
            kind = "member" if method.codec else "parallel"
            arguments = [kind, "--rank", str(rank), "--peers", str(task.peers), "--contact", *contact]
            arguments += ["--rounds", str(task.rounds), "--preset", task.preset, "--batch", str(task.batch)]
            arguments += ["--steps", str(method.lap)]
            if method.codec:
                arguments += ["--codec", method.codec, "--delay", str(method.delay_steps)]
                arguments += ["--mean-codec", method.mean_codec, "--fragments", str(method.fragments)]
                arguments += ["--kept"] if method.kept else []
                arguments += ["--host", net.hosts[rank].address, "--up-mbit", str(UP_CAP * mbit_s)]
            return start(arguments, partial(net.popen, net.hosts[rank]))

        progress("starting")
        if method.codec:
            members, hello = introduce(launch, task.peers)
        else:
            members = [launch(rank, [str(Path(folder) / "store")]) for rank in range(task.peers)]
            hello = [member.hear() for member in members][-1]  # all of them have to say it
        progress("before the first exchange")
        results = last_answers(members, lambda done: progress(f"exchange {done} of {1 + task.rounds} done"))
        return _figures(method, mbit_s, task, hello["parameters"], results, _router(net))


def _router(net: Wan) -> tuple[float, float] | None:
    """(processors, seconds late) of the router; None without one."""
    counts = net.counts()
    return None if counts is None else (counts.cpu_s / counts.wall_s, counts.latest_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One peer's measured time."""

    wall_s: float
    busy_s: float
    steps: float
    """Of a step that was under way at either end, its part inside."""
    num_bytes: int
    step_s: float
    step_s_calm: float
    longest_step_s: float


def seen(result: dict[str, Any]) -> Seen:
    """From what a peer's meter says to sums between its first and its last mark. Raises BenchError without two marks."""
    marks = result["marks"]
    if len(marks) < 2:
        raise BenchError("a peer saw no exchange after the warm-up")
    (began, *before), (ended, *after) = marks[0], marks[-1]
    busy_s = steps = 0.0
    inside: list[float] = []
    for start, stop, seconds in result["steps"]:
        share = max(0.0, min(stop, ended) - max(start, began)) / (stop - start)
        busy_s += share * seconds
        steps += share
        if share > 0.0:
            inside.append(seconds)
    calm = [seconds for _, _, seconds in result["steps"][CALM_SKIPPED : result["calm"]]]
    if not inside or not calm:
        raise BenchError("a peer did not train before the first exchange, or not after it")
    return Seen(
        wall_s=ended - began,
        busy_s=busy_s,
        steps=steps,
        num_bytes=sum(after) - sum(before),
        step_s=statistics.median(inside),
        step_s_calm=statistics.median(calm),
        longest_step_s=max(inside),
    )


def _figures(
    method: Method,
    mbit_s: float,
    task: Task,
    parameters: int,
    results: Sequence[dict[str, Any]],
    router: tuple[float, float] | None,
) -> OverlapFigures:
    """Medians over the peers. Raises BenchError when they did not train together."""
    odd = sorted({text for result in results for text in result["said"]})
    if odd:
        raise BenchError(f"the peers did not train together: {'; '.join(odd)[:500]}")
    if any(result["digests"] != results[0]["digests"] for result in results):
        raise BenchError("the peers hold different states")
    peers = [seen(result) for result in results]

    def median(of: Callable[[Seen], float]) -> float:
        return statistics.median(map(of, peers))

    return OverlapFigures(
        method=method.name,
        codec=method.codec or "fp32",
        mbit_s=mbit_s,
        peers=len(results),
        parameters=parameters,
        inner_steps=method.inner_steps if method.codec else 1,
        delay_steps=method.delay_steps,
        utilisation=median(lambda p: p.busy_s / p.wall_s),
        utilisation_at_calm_speed=median(lambda p: p.steps * p.step_s_calm / p.wall_s),
        hidden_at_most=median(lambda p: p.busy_s / max(p.busy_s, p.wall_s - p.busy_s)),
        step_s=median(lambda p: p.step_s),
        step_s_calm=median(lambda p: p.step_s_calm),
        longest_step_s=max(p.longest_step_s for p in peers),
        wall_s_per_step=median(lambda p: p.wall_s / p.steps),
        bytes_per_step=median(lambda p: p.num_bytes / p.steps),
        round_s=statistics.median(results[0]["round_s"][1:]) if results[0]["round_s"] else None,
        router_cpu=None if router is None else router[0],
        router_late_s=None if router is None else router[1],
    )


def methods_of(inner_steps: int) -> tuple[Method, ...]:
    """Ours, with codec and H of the baselines' nodes, and as the method `default` has it in short runs; and what it is to be compared with; the last one is what bytes are compared
    with."""
    return (
        Method(name=OURS, codec="int8(block=128)", inner_steps=inner_steps),
        Method(
            name=f"{OURS}, default",
            codec=DEFAULT.codec,
            mean_codec=DEFAULT.mean_codec,
            inner_steps=DEFAULT.inner_steps,
            fragments=DEFAULT.fragments,
            kept=True,
        ),
        Method(name="blocking DiLoCo", codec="int8(block=128)", inner_steps=inner_steps, overlaps=False),
        Method(name="data-parallel", codec="", inner_steps=inner_steps, overlaps=False),
    )


def run_overlap(
    *, as_json: bool = False, links: Sequence[float] = LINKS_MBIT_S, task: Task | None = None
) -> list[dict[str, Any]]:
    """Measure, show, and return one row for each method on each link, or one that says why there are none.

    Raises BenchError, WanError.
    """
    console = Console(stderr=as_json)
    task = Task() if task is None else task
    rows: list[dict[str, Any]] = []
    refused = wans.available()
    if refused is not None:
        rows.append({"skipped": refused})
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as shown:
        bar = shown.add_task("starting", total=None)
        for mbit_s in links if refused is None else ():
            measured: list[OverlapFigures] = []
            for method in methods_of(task.inner_steps):
                case = f"{mbit_s:.0f} Mbit/s, {method.name}"

                def say(text: str, of: str = case) -> None:
                    shown.update(bar, description=f"{of}: {text}")

                try:
                    measured.append(measure_overlap(method, mbit_s, task, progress=say))
                except BenchError as error:
                    raise BenchError(f"{case}: {error}") from error
            rows += _rows(measured)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        _show(rows, console)
    return rows


def _rows(measured: Sequence[OverlapFigures]) -> list[dict[str, Any]]:
    """Of one link: the figures, and how many times fewer bytes than the last one's."""
    most = measured[-1].bytes_per_step
    return [{**asdict(figures), "times_fewer_bytes": most / figures.bytes_per_step} for figures in measured]


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The goals that rows of `run_overlap` miss, for people."""
    return [
        f"{row['mbit_s']:.0f} Mbit/s, {row['method']}: computing {100 * row['utilisation']:.1f} % of the time; at least "
        f"{100 * TARGET:.0f} % is wanted"
        for row in rows
        if row.get("method", "").startswith(OURS) and row["mbit_s"] >= TARGET_MBIT_S and row["utilisation"] < TARGET
    ]


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    if "skipped" in rows[0]:
        console.print(f"skipped: {rows[0]['skipped']}", markup=False, highlight=False)
        return
    first = rows[0]
    table = Table(
        title=f"{first['peers']} peers train {first['parameters'] / 1e6:.1f} M parameters, H = {first['inner_steps']}, "
        f"of `default` {DEFAULT.inner_steps} with {DEFAULT.fragments} fragments; 100 ms round trip",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("Mbit/s", justify="right")
    table.add_column("method", no_wrap=True)  # two of them begin with the same word
    for name in ("trains %", "at calm speed %", "s a step", "s a round", "MB a step", "times fewer"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['mbit_s']:.0f}",
            row["method"],
            f"{100 * row['utilisation']:.1f}",
            f"{100 * row['utilisation_at_calm_speed']:.1f}",
            f"{row['wall_s_per_step']:.2f}",
            "" if row["round_s"] is None else f"{row['round_s']:.2f}",
            f"{row['bytes_per_step'] / MB:.2f}",
            f"{row['times_fewer_bytes']:.1f}",
        )
    console.print(table)
    console.print(
        f"trains: seconds in inner steps / seconds; at least {TARGET} is wanted of {OURS} at {TARGET_MBIT_S:.0f} Mbit/s and more. At calm speed: "
        "with the step time of before the first exchange, for the peers share this machine's processors.",
        style="dim",
        highlight=False,
    )
