"""`farflung bench calibrate`: what things cost a node on this machine, as virtual time wants to know it (`costs`).

- `calls`: two real node processes train together behind fast links, once each with two sizes of model, and note what goes through their doors
  (`local_node.meter`). Of each call the median; a line through the two sizes says what a call costs and what a million parameters do. The nodes
  train a third of the time only, so that calls do not wait for the processor, and a round has two parts, each half of the model.
- `start_s`: median from the start of those processes to `node.start`: the interpreter, torch, libp2p, the manifest, the data.
- `message_s`: half a round trip of heartbeats between two real engines, sealed and opened on the way; `write_s`: half of a transfer of a small part between
  them, and its answer, over a stream as rounds use it; `door_s`: a call that does nothing. All three after pauses, as rounds come: one right after another
  takes a third of that. And each as many times as long as eight real nodes' loops compute for a round more than that explains (`calibrate_loops`).
- Told, but not in `costs` and so not in virtual time: seconds of an inner step on one core, of sealing and opening a heartbeat, and its bytes.

Timings are this machine's as it is now: other programs make them longer, and a lower priority does.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from farflung.node.identity import Identity
from farflung.node.recipe import Recipe
from farflung.sims.bench_workers import BenchError
from farflung.sims.calibrate_loops import loops_told
from farflung.sims.calibrate_ways import measure_ways
from farflung.sims.churn import make_schedule
from farflung.sims.costs import PASSES, PRICED, STARTS, TIMED, Costs, write_costs
from farflung.sims.facts import event_files, load_events
from farflung.sims.local_node import CALLS
from farflung.sims.local_run import found_locally, start_seconds, step_seconds
from farflung.sims.outputs import check_outputs
from farflung.sims.scenario import Scenario, parse_scenario
from farflung.sims.scenario_plan import read_scenario
from farflung.sims.told_to_end import orderly_end, run_until_told

SIZES = ("1m", "10m")
"""Presets; both take parts of a megabyte or more, and the larger one a step of some tenths of a second."""

SECONDS = 60.0
"""Of one run of two nodes."""

EIGHT_SECONDS = 100.0
"""Of the run of eight, half of which may pass before all are up."""

STEP_TOKENS = 128

BUSY = 1.0 / 3.0
"""Share of its time that a node trains."""

FAST_PEERS = """
about = "Peers behind fast links, to be measured."
mode = "real"
method = "none"
duration_s = {seconds}
[manifest.model]
preset = "{preset}"
seq_len = 64
[manifest.swarm]
batch_tokens = {tokens}
inner_steps = 4
delay_steps = {delay_steps}
min_round_s = 2.0
max_round_s = 60.0
[[peers]]
name = "pair"
count = {count}
tokens_per_s = {tokens_per_s}
up_mbit = 2000.0
down_mbit = 2000.0
latency_ms = 0.0
[network]
jitter_ms = 0.0
"""

Calls = Mapping[str, Sequence[float]]
"""Seconds of each call, by the name of the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What two nodes with one model were seen to do."""

    preset: str
    num_parameters: int
    step_s: float
    start_s: float | None
    calls: Calls


def run_calibrate(*, as_json: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Measure, show, write the costs as TOML to `out`. Raises BenchError, ConfigError, NodeFailed."""
    check_outputs(files=[out])
    console = Console(stderr=as_json)
    costs, told = calibrate(console)
    text = write_costs(costs)
    result = {"costs": msgspec.to_builtins(costs), "seen": told}
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        console.print(text, markup=False, highlight=False)
        for name, value in told.items():
            console.print(f"# {name} = {value}", markup=False, highlight=False, style="dim")
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return result


def calibrate(console: Console) -> tuple[Costs, dict[str, Any]]:
    """The costs, and what else was seen; progress is on the console. Raises BenchError, ConfigError, NodeFailed."""
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as shown:
        bar = shown.add_task("messages", total=None)
        told = measure_ways()
        runs = []
        for preset in SIZES:
            shown.update(bar, description=f"two nodes with the model {preset}")
            runs.append(measure_nodes(preset))
        shown.update(bar, description="eight nodes with a tiny model")
        told |= loops_told(eight_peers(), told)
    costs = costs_of(runs, told)
    lacking = unpriced(runs)
    for name, seen in lacking.items():
        console.print(
            f"NOT IN THE COSTS: {name or 'a call without a name'}: {seen}; add it to `sims/costs.py`",
            style="yellow",
            soft_wrap=True,
        )
    return costs, told | {
        "unpriced": lacking,
        "step_s": {run.preset: run.step_s for run in runs},
        "step_tokens": STEP_TOKENS,
    }


# ---- two nodes -----------------------------------------------------------------------------------------------------


def fast_peers(
    preset: str,
    *,
    tokens_per_s: float,
    count: int = 2,
    seconds: float = SECONDS,
    delay_steps: Literal["auto"] | int = 0,
) -> Scenario:
    """The scenario that is measured."""
    text = FAST_PEERS.format(
        preset=preset,
        tokens=STEP_TOKENS,
        delay_steps=json.dumps(delay_steps),
        tokens_per_s=tokens_per_s,
        count=count,
        seconds=seconds,
    )
    return parse_scenario(text, name="calibrate")


def eight_peers() -> Scenario:
    """A step takes a second. Nobody stands while one of them evaluates: else most rounds would be without somebody."""
    return fast_peers("tiny", tokens_per_s=float(STEP_TOKENS), count=8, seconds=EIGHT_SECONDS, delay_steps="auto")


def measure_nodes(preset: str) -> Run:
    """Let two processes train, and collect what they noted. Raises BenchError when they made no rounds together."""
    recipe = _recipe(fast_peers(preset, tokens_per_s=1.0))
    step_s = step_seconds(recipe)
    scenario = fast_peers(preset, tokens_per_s=BUSY * recipe.manifest.batch_tokens / step_s)
    schedule = make_schedule(scenario, scenario.seed, Path())
    with orderly_end(), tempfile.TemporaryDirectory(prefix="farflung-local-") as folder:
        swarm = found_locally(scenario, scenario.seed, schedule, Path(folder), meter=True)
        run_until_told(swarm.play(schedule))
        events = load_events(event_files(swarm.folder))
        together = sum(
            e["event"] == "round.commit" and len(e["contributors"]) == 2 for one in events.values() for e in one
        )
        if swarm.crashed or not together:
            raise BenchError("; ".join(swarm.crashed) or "the two nodes made no round together: this machine is busy")
        return Run(
            preset=preset,
            num_parameters=recipe.num_parameters,
            step_s=step_s,
            start_s=start_seconds(swarm.keys, events, swarm.done),
            calls=read_calls(swarm.folder.rglob(CALLS)),
        )


def _recipe(scenario: Scenario) -> Recipe:
    founder = Identity.generate().public_key
    return read_scenario(scenario, founder)[0]


def read_calls(files: Iterable[Path]) -> dict[str, list[float]]:
    """What metered nodes wrote, without calls of a node's start, and those whose times a scenario gives. Others are here whether `costs` knows them or not."""
    calls: dict[str, list[float]] = {}
    for file in sorted(files):
        for line in file.read_bytes().splitlines():
            name, seconds = msgspec.json.decode(line, type=tuple[str, float])
            if name not in STARTS | TIMED:
                calls.setdefault(name, []).append(seconds)
    return calls


def unpriced(runs: Sequence[Run]) -> dict[str, str]:
    """Calls that nodes made and `costs` has no price for, as new ones, or old ones that were renamed: in virtual time each takes what any call does."""
    names = {name for run in runs for name in run.calls} - PRICED
    seen = {name: [seconds for run in runs for seconds in run.calls.get(name, ())] for name in sorted(names)}
    return {name: f"{len(each)} calls, {median(each):.6f} s each" for name, each in seen.items()}


def costs_of(runs: Sequence[Run], ways: Mapping[str, float]) -> Costs:
    """A line through two sizes for each call; through the origin for a pass that one size alone has made."""
    small, large = runs
    calls: dict[str, tuple[float, float]] = {}
    for name in sorted({*small.calls, *large.calls} & PRICED):
        seen = [(run.num_parameters / 1e6, median(run.calls[name])) for run in runs if name in run.calls]
        (first, first_s), (last, last_s) = seen[0], seen[-1]
        if len(seen) == 2:
            million_s = min(max(0.0, (last_s - first_s) / (last - first)), first_s / first)
        else:
            million_s = first_s / first if name in PASSES else 0.0
        calls[name] = (round(first_s - million_s * first, 7), round(million_s, 7))
    hands = [call_s for name, (call_s, _) in calls.items() if name not in PASSES]
    passes = [million_s for name, (_, million_s) in calls.items() if name in PASSES and million_s > 0.0]
    starts = [run.start_s for run in runs if run.start_s is not None]
    return Costs(
        start_s=round(median(starts), 2),
        message_s=round(ways["loop_times"] * ways["message_s"], 6),
        write_s=round(ways["loop_times"] * ways["write_s"], 6),
        door_s=round(ways["loop_times"] * ways["door_s"], 6),
        hand_s=round(median(hands), 6) if hands else Costs().hand_s,
        pass_parameters_per_s=round(1e6 / median(passes)) if passes else Costs().pass_parameters_per_s,
        trained_per_s=round(median(STEP_TOKENS * run.num_parameters / run.step_s for run in runs)),
        calls=calls,
    )
