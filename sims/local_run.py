"""`farflung sim local`: a scenario played by real processes in real time, and told in the words and files of `farflung sim run`.

What a judge sees under virtual time nobody sees here; judged is what the nodes' events prove: that the bits of a version were the same on all peers,
that no sample counted twice or was lost, that no node found an invariant broken, and that none ended by itself.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.compression import kernels
from farflung.node.events import Event
from farflung.node.identity import Identity
from farflung.node.paths import resolve_paths
from farflung.node.recipe import Recipe
from farflung.protocol.errors import ConfigError
from farflung.sims.churn import make_schedule
from farflung.sims.demonodes import now
from farflung.sims.facts import RUN, RunFacts, event_files, load_events, save_run
from farflung.sims.faults import Fault, Schedule, Start
from farflung.sims.from_events import fill_report, write_logs
from farflung.sims.how_far import how_far
from farflung.sims.last_ledger import last_ledger
from farflung.sims.local_node import LATE
from farflung.sims.local_plan import check_playable, check_speed
from farflung.sims.local_swarm import LocalSwarm
from farflung.sims.logs import Events
from farflung.sims.outputs import check_outputs
from farflung.sims.pipeline_scenario import check_served
from farflung.sims.report import report_folder
from farflung.sims.scenario import Scenario, find_scenario, load_scenario
from farflung.sims.scenario_plan import key_seeds, read_scenario, training_seconds
from farflung.sims.scenario_toml import check_apart, keep_scenario
from farflung.sims.sim_folder import run_facts
from farflung.sims.sim_result import Result, show, summarise
from farflung.sims.simulation import Report
from farflung.sims.summary import summarise as figures_of
from farflung.sims.summary import violations
from farflung.sims.told_to_end import orderly_end, run_until_told
from farflung.training.host_memory import available_bytes
from farflung.training.replica import Replica

MEASURING_S = 2.0


def run_local(
    name: str, *, seed: int | None, method: str | None = None, out: Path | None, minutes: float | None, quiet: bool
) -> Result:
    """Play a scenario; `out` gets what `sim run --out` writes, and what each node printed; `quiet`: nothing is said but how far it is. Blocks.

    Raises ConfigError (it cannot be played here), NodeFailed (the founder did not come up), SystemExit (told to end, it has).
    """
    path = find_scenario(name)
    whole = load_scenario(path)
    if method is not None:
        whole = msgspec.structs.replace(whole, method=method)
    scenario = playable(whole, minutes)
    check_outputs(folders=[out])
    seed = scenario.seed if seed is None else seed
    if out is not None:
        check_apart(out, path)
    schedule = make_schedule(scenario, seed, path.parent)
    began = time.perf_counter()
    with orderly_end(), tempfile.TemporaryDirectory(prefix="farflung-local-") as folder:
        swarm = found_locally(scenario, seed, schedule, Path(folder))
        with _progress(swarm, schedule):
            run_until_told(swarm.play(schedule))
        events, tell, result = _judge(swarm, seed, schedule)
        result |= {"wall_s": round(time.perf_counter() - began, 1)}
        if not quiet:
            show(result)
        if out is not None:
            (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            write_logs(swarm.keys, events, swarm.done, swarm.began, out)
            _copy_outputs(swarm, out)
            save_run(out / RUN, tell(expected=result["expected"]))
            keep_scenario(out, whole, seed, path, minutes=minutes)
            report_folder(out)
    return result


def playable(whole: Scenario, minutes: float | None = None) -> Scenario:
    """The scenario for at most so long. Raises ConfigError when processes cannot play it here."""
    scenario = shortened(whole, minutes)
    if sys.platform == "win32":
        raise ConfigError(
            "processes cannot be stopped and continued on Windows; use `farflung sim run`, or WSL for `sim local`"
        )
    check_playable(scenario, free_bytes=available_bytes())
    return scenario


def shortened(scenario: Scenario, minutes: float | None) -> Scenario:
    """The same for at most so long; what would happen later does not. Raises ConfigError."""
    if minutes is None or scenario.duration_s <= 60.0 * minutes:
        return scenario
    happenings = tuple(happening for happening in scenario.happenings if happening.at < 60.0 * minutes)
    return msgspec.structs.replace(scenario, duration_s=60.0 * minutes, calm_s=0.0, happenings=happenings)


def found_locally(
    scenario: Scenario, seed: int, schedule: Schedule, folder: Path, *, meter: bool = False
) -> LocalSwarm:
    """The swarm with its keys and manifest, those that `sim run` has too. Raises ConfigError when this machine is too slow for it, or a stage would have no peer."""
    check_served(scenario, schedule.founder)
    kernels.prepare(resolve_paths().cache / "kernels")
    identities = [Identity(Ed25519PrivateKey.from_private_bytes(key)) for key in key_seeds(scenario, seed)]
    recipe, _ = read_scenario(scenario, identities[schedule.founder].public_key)
    check_speed(scenario, recipe.manifest, step_s=step_seconds(recipe), cores=count_cores())
    return LocalSwarm(
        scenario=scenario,
        recipe=recipe,
        identities=identities,
        founder=schedule.founder,
        folder=folder,
        meter=meter,
    )


def count_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_seconds(recipe: Recipe) -> float:
    """The shortest of some inner steps on one core of this machine, at most two seconds' worth of them."""
    torch.set_num_threads(1)
    replica = Replica(recipe.model, recipe.inner, recipe.outer, seed=0)
    shape = recipe.manifest.samples_per_step, recipe.model.seq_len + 1
    tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    times: list[float] = []
    until = time.monotonic() + MEASURING_S
    while len(times) < 3 or time.monotonic() < until:
        began = time.monotonic()
        replica.train_step(tokens, 0)
        times.append(time.monotonic() - began)
    return min(times)


@contextlib.contextmanager
def _progress(swarm: LocalSwarm, schedule: Schedule) -> Iterator[None]:
    version = 0
    with how_far(swarm.scenario.name, schedule.duration_s, "s") as reach:

        def follow(event: Event) -> None:
            nonlocal version
            version = max(version, event.get("version", 0))
            reach(max(0.0, now() - swarm.began), f"round {version}, {len(swarm.alive)} processes")

        reach(0.0, "starting")
        swarm.on_event = follow
        yield


# ---- afterwards ----------------------------------------------------------------------------------------------------


def _judge(swarm: LocalSwarm, seed: int, schedule: Schedule) -> tuple[Events, Callable[..., RunFacts], Result]:
    """From the nodes' folders: what they said, what nobody of them knows (made with what was `expected` of the run), and the result."""
    scenario = swarm.scenario
    everything = load_events(event_files(swarm.folder))
    events = {peer: [e for e in one if e["time"] <= swarm.ended] for peer, one in everything.items()}
    folders = {node.peer: node.swarm for node in swarm.lives}
    tell = partial(
        run_facts,
        scenario,
        swarm.keys,
        swarm.done,
        swarm.crashed,
        between=(swarm.began, swarm.ended),
        seed=seed,
        ledger=last_ledger(folders.values(), events),
    )
    report = Report(seed, scenario.num_peers, schedule.describe().splitlines())
    speeds = [peer_class.tokens_per_s for peer_class, _, _ in scenario.roster()]
    steps_s = [training_seconds(swarm.recipe.manifest, speed)["train"] for speed in speeds]
    fill_report(report, swarm.keys, steps_s, events, swarm.done, swarm.began, swarm.ended)
    late = sum(len(file.read_text().splitlines()) for file in swarm.folder.rglob(LATE))
    report.violations = violations(figures_of(events, tell(expected=())))
    result = summarise(scenario, report) | {
        "start_s": start_seconds(swarm.keys, events, swarm.done),
        "late_steps": round(late / max(1, sum(one.steps for one in report.labour)), 4),
    }
    return events, tell, result


def start_seconds(keys: Sequence[str], events: Events, done: Sequence[tuple[float, Fault]]) -> float | None:
    """Median from the start of a process to `node.start`; None when no node came up."""
    took = []
    for at, fault in done:
        if isinstance(fault, Start):
            ups = [e["time"] for e in events.get(keys[fault.peer], ()) if e["event"] == "node.start" and e["time"] > at]
            gone = [
                later for later, other in done if later > at and isinstance(other, Start) and other.peer == fault.peer
            ]
            if ups and ups[0] < min(gone, default=math.inf):
                took.append(ups[0] - at)
    return round(median(took), 2) if took else None


def _copy_outputs(swarm: LocalSwarm, out: Path) -> None:
    """What each node printed."""
    for peer in range(len(swarm.keys)):
        with contextlib.suppress(FileNotFoundError):  # one that never started
            shutil.copy(swarm.home(peer) / "output.txt", out / f"{swarm.home(peer).name}.txt")
