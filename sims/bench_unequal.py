"""`farflung bench unequal`: how much of its time each of four unequal peers computes, and what the swarm learns.

Four real nodes train the same model on emulated machines (`unequal_peer`) behind emulated links (`wan`) of unequal rates and a round trip of
100 ms, three times:

- `farflung`: speeds 1, 0.7, 0.4 and 0.2. A round is due when the fastest has made H steps (`protocol.rhythm`).
- `equal steps`: the same machines, everybody makes H steps, and the round waits for the slowest. It has our overlap and codec for free.
- `equal peers`: four machines of speed 0.575, which is the same in sum, as `farflung`. What the swarm could learn at best, from as many tokens.

`utilisation` = seconds in inner steps / seconds, of each peer, from its first committed round to its last. Losses are those of the outer
parameters on held-out text, at the tokens that both swarms have reached, interpolated between rounds; in the few rounds of this benchmark
they fall fast, so a gap of a per cent is a round's worth and not a result. All have one constant learning rate.
"""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.sims import wan as wans
from farflung.sims.bench_round import UP_CAP
from farflung.sims.bench_workers import BenchError, Worker, introduce, last_answers, workers
from farflung.sims.wan import Link

SPEEDS = (1.0, 0.7, 0.4, 0.2)
LINKS_MBIT_S = (20.0, 50.0, 20.0, 10.0)
"""Up and down, peer by peer."""

DELAY_S = 0.025
"""Of each link and direction: 100 ms from a peer to another and back."""

WITHIN_S = 180.0
"""For one swarm; then something hangs, and the processes are ended."""

TARGET = 0.95
"""Of the utilisation of each peer."""
MAX_GAP_PERCENT = 0.5
"""Of the loss, above that of equal peers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all swarms train."""

    preset: str = "1m"
    batch: int = 2
    """Sequences of one step."""
    inner_steps: int = 16
    """H."""
    step_s: float = 0.25
    """Seconds of a step at speed 1."""
    codec: str = "int8(block=128)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Swarm:
    """Who trains, and how."""

    name: str
    speeds: tuple[float, ...] = SPEEDS
    equal_steps: bool = False
    share: float = 1.0
    """Of the steps between two rounds: so much more often there is one."""
    rounds: int
    """Measured, after one to warm up."""


OURS = "farflung"
MEAN_SPEED = sum(SPEEDS) / len(SPEEDS)
SWARMS = (
    Swarm(name=OURS, rounds=16),
    Swarm(name="equal steps", equal_steps=True, rounds=3),
    # with rounds after as many tokens as ours, for more of them for the same tokens are another advantage
    Swarm(name="equal peers", speeds=(MEAN_SPEED,) * len(SPEEDS), share=MEAN_SPEED / max(SPEEDS), rounds=16),
)
"""About a minute each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnequalFigures:
    """One swarm; see the module."""

    swarm: str
    speeds: tuple[float, ...]
    utilisation: tuple[float, ...]
    """Of each peer."""
    missed: tuple[int, ...]
    """Rounds after the first that each peer was not part of; what it had trained came later."""
    rounds: int
    tokens_per_s: float
    """Of the whole swarm, as counted by its rounds."""
    late_steps: int
    """Steps that this machine could not compute in time: with many of them the speeds are not what they should be."""
    curve: tuple[tuple[int, float], ...]
    """(tokens, held-out loss) after each round."""


def measure_unequal(
    swarm: Swarm, task: Task, *, within_s: float = WITHIN_S, progress: Callable[[str], None] = lambda text: None
) -> UnequalFigures:
    """Train with one swarm. Raises BenchError, WanError."""
    links = [Link(rate_bit_s=mbit_s * 1e6, delay_s=DELAY_S) for mbit_s in LINKS_MBIT_S[: len(swarm.speeds)]]
    with wans.emulate(links) as net, workers(within_s) as start:

        def launch(rank: int, contact: Sequence[str]) -> Worker:
            arguments = ["paced", "--rank", str(rank), "--peers", str(len(swarm.speeds)), "--contact", *contact]
            arguments += ["--rounds", str(swarm.rounds), "--preset", task.preset, "--batch", str(task.batch)]
            inner_steps = max(1, round(swarm.share * task.inner_steps))
            arguments += ["--steps", str(inner_steps), "--delay", str(inner_steps - 1), "--codec", task.codec]
            arguments += ["--step-s", str(task.step_s / swarm.speeds[rank]), "--host", net.hosts[rank].address]
            arguments += ["--up-mbit", str(UP_CAP * LINKS_MBIT_S[rank])]
            arguments += ["--equal-steps"] if swarm.equal_steps else []
            return start(arguments, partial(net.popen, net.hosts[rank]))

        progress("starting")
        members, _ = introduce(launch, len(swarm.speeds))
        results = last_answers(members, lambda done: progress(f"round {done} of {1 + swarm.rounds} done"))
    return figures_of(swarm, results)


def figures_of(swarm: Swarm, results: Sequence[dict[str, Any]]) -> UnequalFigures:
    """From what the peers say. Raises BenchError when they did not train together."""
    first = results[0]
    if any(result["digests"] != first["digests"] for result in results):
        raise BenchError("the peers hold different states")
    if len(first["commits"]) < 2:
        raise BenchError("there was no round after the warm-up")
    began, *_, ended = first["commits"]
    tokens = list(itertools.accumulate(first["tokens"]))
    return UnequalFigures(
        swarm=swarm.name,
        speeds=swarm.speeds,
        utilisation=tuple(utilisation(result["steps"], result["commits"]) for result in results),
        missed=tuple(result["missed"] for result in results),
        rounds=len(first["commits"]) - 1,
        tokens_per_s=(tokens[-1] - tokens[0]) / (ended - began),
        late_steps=sum(len(result["late"]) for result in results),
        curve=tuple(zip(tokens, first["losses"], strict=True)),
    )


def utilisation(steps: Sequence[Sequence[float]], commits: Sequence[float]) -> float:
    """Share of the time between the first commit and the last that lies in steps (begin, end)."""
    began, *_, ended = commits
    return sum(max(0.0, min(stop, ended) - max(start, began)) for start, stop in steps) / (ended - began)


def gap_percent(ours: Sequence[tuple[int, float]], reference: Sequence[tuple[int, float]]) -> float:
    """100 (L - L_reference) / L_reference at the most tokens that both curves reach."""
    tokens = min(ours[-1][0], reference[-1][0])
    wanted = _at(reference, tokens)
    return 100 * (_at(ours, tokens) - wanted) / wanted


def _at(curve: Sequence[tuple[int, float]], tokens: int) -> float:
    """The loss at so many tokens, linear between rounds. Raises BenchError before the first."""
    for (low, before), (high, after) in itertools.pairwise(curve):
        if low <= tokens <= high:
            return before + (after - before) * (tokens - low) / (high - low)
    raise BenchError(f"no two rounds around {tokens} tokens")


def run_unequal(*, as_json: bool = False, task: Task | None = None) -> list[dict[str, Any]]:
    """Measure, show, and return a row for each swarm, or one that says why there are none. Raises BenchError, WanError."""
    console = Console(stderr=as_json)
    task = Task() if task is None else task
    refused = wans.available()
    measured: list[UnequalFigures] = []
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as shown:
        bar = shown.add_task("starting", total=None)
        for swarm in SWARMS if refused is None else ():

            def say(text: str, of: str = swarm.name) -> None:
                shown.update(bar, description=f"{of}: {text}")

            measured.append(measure_unequal(swarm, task, progress=say))
    rows: list[dict[str, Any]] = [{"skipped": refused}] if refused is not None else rows_of(measured)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif refused is not None:
        console.print(f"skipped: {refused}", markup=False, highlight=False)
    else:
        _show(rows, console)
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The goals that rows of `run_unequal` miss, for people."""
    found = []
    for row in rows:
        if row.get("swarm") == OURS and min(row["utilisation"]) < TARGET:
            found.append(
                f"{OURS}: a peer computes {100 * min(row['utilisation']):.1f} % of its time; at least {100 * TARGET:.0f} % is wanted"
            )
        if row.get("swarm") == OURS and row["gap_percent"] is not None and row["gap_percent"] > MAX_GAP_PERCENT:
            found.append(
                f"{OURS}: a loss {row['gap_percent']:+.2f} % above equal peers'; at most {MAX_GAP_PERCENT:g} % is wanted"
            )
    return found


def rows_of(measured: Sequence[UnequalFigures]) -> list[dict[str, Any]]:
    """The figures, and the gap of each to the last, the equal peers; None where too few tokens were reached to say."""
    reference = measured[-1].curve
    rows = []
    for figures in measured:
        comparable = figures.curve[-1][0] > reference[0][0] and reference[-1][0] > figures.curve[0][0]
        gap = gap_percent(figures.curve, reference) if comparable else None
        rows.append({**asdict(figures), "gap_percent": gap})
    return rows


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(
        title="four peers behind links of " + ", ".join(f"{x:.0f}" for x in LINKS_MBIT_S) + " Mbit/s",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("swarm", "speeds", "trains %", "rounds", "tokens/s", "missed", "loss", "at tokens", "gap %"):
        table.add_column(name, no_wrap=name == "swarm", min_width=max(map(len, name.split())))
    for row in rows:
        tokens, loss = row["curve"][-1]
        table.add_row(
            row["swarm"],
            " ".join(f"{speed:.3g}" for speed in row["speeds"]),
            " ".join(f"{100 * share:.1f}" for share in row["utilisation"]),
            str(row["rounds"]),
            f"{row['tokens_per_s']:.0f}",
            " ".join(map(str, row["missed"])),
            f"{loss:.3f}",
            f"{tokens / 1e3:.0f} k",
            "" if row["gap_percent"] is None else f"{row['gap_percent']:+.2f}",
        )
    console.print(table)
    console.print(
        f"trains: of each peer's time, at least {100 * TARGET:.0f} % is wanted of farflung. gap: of losses at equal tokens, to the equal peers.",
        style="dim",
        highlight=False,
    )
