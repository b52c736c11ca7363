"""`farflung sim run` of a scenario whose manifest has a pipeline: its peers hold stages, as `pipeline_swarm` runs them.

Operations take what `local_stage` says of the peers' speeds, so `farflung sim local` plays the same; links, regions, sessions and faults are those of any
scenario. The result is worked out from the nodes' events, as that of local processes is; a judge looks at every stage's chain, and what it finds broken
is in the result, but not made smaller. Refused: `mode = "cost"`, for a pipeline's steps depend on its mathematics, and attackers.
"""

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from farflung.node.events import Event
from farflung.node.recipe import Recipe
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer, PeerId
from farflung.protocol.pipeline_messages import Domains
from farflung.sims import clock, regions
from farflung.sims.facts import save_run
from farflung.sims.fault_playing import play
from farflung.sims.faults import Schedule
from farflung.sims.from_events import fill_report, log_text, write_logs
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.local_stage import StagePace
from farflung.sims.pipeline_swarm import PipelineSwarm
from farflung.sims.report import report_folder
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import key_seeds, link_of, read_scenario, training_seconds
from farflung.sims.sim_folder import RUN, run_facts
from farflung.sims.sim_result import Result, show, summarise
from farflung.sims.simulation import Report
from farflung.sims.swarm import START_UNIX_S
from farflung.training.data import Dataset
from farflung.training.pipeline_plan import Kind

OPERATIONS = {"_forward": Kind.F, "_backward": Kind.B, "_loss": Kind.LOSS}
"""What the calls of a stage server are."""


def has_pipeline(scenario: Scenario) -> bool:
    """Whether its peers hold stages of the model."""
    return scenario.stages > 1


def run_pipeline(scenario: Scenario, seed: int, schedule: Schedule, *, out: Path | None, quiet: bool) -> Result:
    """As `sim_run.run_scenario`. Raises ConfigError."""
    if scenario.mode != "real" or any(peer_class.attacks for peer_class in scenario.peers):
        raise ConfigError(
            f'{scenario.name} has a pipeline: it is simulated with mode = "real" and without attacks; change that, or leave out '
            "manifest.pipeline"
        )
    signers = [Ed25519Signer(key) for key in key_seeds(scenario, seed)]
    recipe, dataset = read_scenario(scenario, signers[schedule.founder].peer_id)
    assert dataset is not None
    began = time.perf_counter()
    if not quiet:
        Console(stderr=True).print(f"{scenario.name}: {scenario.duration_s:,.0f} s of virtual time ...")
    swarm = simulate_pipeline(scenario, recipe, dataset, signers, seed, schedule)
    keys = [key.hex() for key in swarm.ids]
    events: dict[str, list[Event]] = {key: [] for key in keys}
    for _, peer, event in swarm.events:
        events[keys[peer]].append(event | {"swarm": scenario.name, "peer": keys[peer]})
    done = [(START_UNIX_S + fault.at, fault) for fault in schedule.faults]
    report = Report(seed, scenario.num_peers, schedule.describe().splitlines())
    steps_s = [training_seconds(recipe.manifest, own.tokens_per_s)["train"] for own, _, _ in scenario.roster()]
    until = START_UNIX_S + scenario.duration_s
    fill_report(report, keys, steps_s, events, done, START_UNIX_S, until)
    report.violations = swarm.broken
    report.log_sha256 = hashlib.sha256(log_text(keys, events, done, START_UNIX_S).encode()).hexdigest()
    result = summarise(scenario, report) | {"wall_s": round(time.perf_counter() - began, 1)}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_logs(keys, events, done, START_UNIX_S, out)
        (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        facts = run_facts(scenario, keys, done, report.violations, result["expected"], (START_UNIX_S, until))
        save_run(out / RUN, facts)
        report_folder(out)
    if not quiet:
        show(result)
    return result


def simulate_pipeline(
    scenario: Scenario, recipe: Recipe, dataset: Dataset, signers: list[Ed25519Signer], seed: int, schedule: Schedule
) -> PipelineSwarm:
    """Play the schedule under virtual time."""
    where = {signer.peer_id: region for signer, (_, _, region) in zip(signers, scenario.roster(), strict=True)}

    def backbone(a: PeerId, b: PeerId) -> tuple[float, float]:
        return regions.between(where[a], where[b])

    async def main() -> PipelineSwarm:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        randomness = random.Random(f"{seed}/network")
        hub = MemoryHub(loop, randomness, LinkModel(), backbone=backbone, routers_seed=f"{seed}/nat")
        for signer, (peer_class, _, _) in zip(signers, scenario.roster(), strict=True):
            hub.set_link(signer.peer_id, link_of(peer_class, scenario))
            hub.set_nat(signer.peer_id, peer_class.nat)
        async with asyncio.TaskGroup() as group:
            swarm = PipelineSwarm(
                recipe,
                dataset,
                signers,
                hub,
                group,
                seconds=_seconds(scenario),
                founder=schedule.founder,
                domains={peer: Domains(region=region.lower()) for peer, (_, _, region) in enumerate(scenario.roster())},
                wanted={peer: own.stage for peer, (own, _, _) in enumerate(scenario.roster()) if own.stage is not None},
            )
            watching = group.create_task(swarm.watch())
            await play(schedule, hub, swarm.ids, swarm)
            swarm.look()
            watching.cancel()
            for peer in hub.running():
                hub.resume(peer)  # whoever is stopped cannot end
            for task in swarm.tasks.values():
                task.cancel()
        return swarm

    return clock.run(main(), start=START_UNIX_S)


def _seconds(scenario: Scenario) -> Callable[[int, StageRecipe, str], float]:
    speeds = [peer_class.tokens_per_s for peer_class, _, _ in scenario.roster()]
    paces: dict[tuple[int, int], StagePace] = {}  # by peer and stage

    def seconds(peer: int, recipe: StageRecipe, name: str) -> float:
        if name not in OPERATIONS:
            return scenario.costs.seconds(name, recipe.own.num_parameters)
        if (peer, recipe.stage) not in paces:
            paces[peer, recipe.stage] = StagePace.of(recipe.whole.model, recipe.part, 1.0 / speeds[peer])
        return paces[peer, recipe.stage].seconds(OPERATIONS[name], recipe.tokens_per_microbatch)

    return seconds
