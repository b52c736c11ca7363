"""A scenario whose manifest has a pipeline, under virtual time: its peers hold stages, as `pipeline_swarm` runs them.

Operations take what `local_stage` says of the peers' speeds, so `farflung sim local` plays the same; links, regions, sessions and faults are those of any
scenario. The report is worked out from the nodes' events, as that of local processes is; a judge looks at every stage's chain, and another one at all of
them together. Refused: `mode = "cost"`, for a pipeline's steps depend on its mathematics, and attackers.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from farflung.compression import kernels
from farflung.node.events import Event
from farflung.node.paths import resolve_paths
from farflung.node.race import until_first
from farflung.node.recipe import Recipe
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer, PeerId, Signer
from farflung.protocol.pipeline_messages import Domains
from farflung.sims import clock, regions
from farflung.sims.fault_playing import play
from farflung.sims.faults import Fault, Schedule
from farflung.sims.from_events import fill_report
from farflung.sims.hub import MemoryHub
from farflung.sims.last_ledger import ledger_of
from farflung.sims.links import LinkModel
from farflung.sims.local_stage import StagePace
from farflung.sims.outer_audit import known_means
from farflung.sims.pipeline_health import finished, lacks
from farflung.sims.pipeline_swarm import PipelineSwarm
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import key_seeds, link_of, read_scenario, training_seconds
from farflung.sims.simulation import Report
from farflung.sims.swarm import START_UNIX_S, innermost, verdict
from farflung.sims.trail import Sink, Trail
from farflung.training.data import Dataset
from farflung.training.pipeline_plan import Kind

OPERATIONS = {"_forward": Kind.F, "_backward": Kind.B, "_loss": Kind.LOSS}
"""What the calls of a stage server are."""

LOOK_S = 1.0
"""Between two looks whether all is well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """All that a simulation of a pipeline depends on; what `simulation.Plan` is for replicas."""

    seed: int
    """Draws what the network does."""
    schedule: Schedule
    scenario: Scenario
    recipe: Recipe
    dataset: Dataset
    signers: Sequence[Signer]
    calm_s: float = 0.0
    """After the schedule, so long at most all may take to be well."""
    stop_when_broken: bool = False


def has_pipeline(scenario: Scenario) -> bool:
    """Whether its peers hold stages of the model."""
    return scenario.stages > 1


def prepare_pipeline(scenario: Scenario, seed: int, schedule: Schedule) -> PipelinePlan:
    """Make what peers are made of for a schedule (`churn.make_schedule`). Raises ConfigError."""
    if scenario.mode != "real" or any(peer_class.attacks for peer_class in scenario.peers):
        raise ConfigError(
            f'{scenario.name} has a pipeline: it is simulated with mode = "real" and without attacks; change that, or leave out '
            "manifest.pipeline"
        )
    if scenario.costs.processors:
        raise ConfigError(
            f"{scenario.name} has a pipeline, whose peers have processors of their own in virtual time: leave costs.processors out"
        )
    check_served(scenario, schedule.founder)
    signers = [Ed25519Signer(key) for key in key_seeds(scenario, seed)]
    recipe, dataset = read_scenario(scenario, signers[schedule.founder].peer_id)
    assert dataset is not None
    return PipelinePlan(
        seed=seed,
        schedule=replace(schedule, duration_s=scenario.duration_s - scenario.calm_s),
        scenario=scenario,
        recipe=recipe,
        dataset=dataset,
        signers=signers,
        calm_s=scenario.calm_s,
    )


def check_served(scenario: Scenario, founder: int) -> None:
    """Refuse a pipeline of which some stage will always be without a peer: the founder has the first, others one that is written down, or any. Raises ConfigError."""
    others = [own.stage for peer, (own, _, _) in enumerate(scenario.roster()) if peer != founder]
    open_ = [stage for stage in range(1, scenario.stages) if stage not in others]
    anywhere = others.count(None)
    if len(open_) > anywhere:
        missing = ", ".join(map(str, open_))
        raise ConfigError(
            f"{scenario.name} has {scenario.stages} stages: {anywhere} of its {scenario.num_peers} peers can take stages {missing}, which need one each, for the "
            "founder holds stage 0 and the others have a stage of their own; add peers, change peers.stage, or lower manifest.pipeline.stages"
        )


def simulate_pipeline(plan: PipelinePlan, *, sink: Sink | None = None, keep: bool = False) -> Report:
    """Run a plan. `keep` keeps the log in the report, `sink` sees it as it grows."""
    torch.set_num_threads(1)
    kernels.prepare(resolve_paths().cache / "kernels")
    schedule = plan.schedule
    report = Report(plan.seed, schedule.num_peers, schedule.describe().splitlines())
    run = _Run(plan, report, sink, keep)
    try:
        clock.run(run.run(), start=START_UNIX_S)
    except clock.ClockError as error:
        run.on_broken("invariant {}: {}".format(*verdict(error)))
    except ExceptionGroup as group:
        crash = innermost(group)
        run.on_broken(f"invariant 8: a peer crashed: {type(crash).__name__}: {crash}")
    run.conclude()
    return report


class _Run:
    """The moving parts of a simulation."""

    def __init__(self, plan: PipelinePlan, report: Report, sink: Sink | None, keep: bool) -> None:
        self._plan = plan
        self._report = report
        self._trail = Trail(keep, sink, report.events)
        self._ended = START_UNIX_S
        """When something was logged last."""
        self._is_broken: asyncio.Event | None = None
        self._swarm: PipelineSwarm | None = None
        self._keys = [signer.peer_id.hex() for signer in plan.signers]
        self._events: dict[str, list[Event]] = {key: [] for key in self._keys}
        """A line each."""

    async def run(self) -> None:
        plan, scenario = self._plan, self._plan.scenario
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        self._is_broken = asyncio.Event()
        roster = scenario.roster()
        where = {signer.peer_id: region for signer, (_, _, region) in zip(plan.signers, roster, strict=True)}

        def backbone(a: PeerId, b: PeerId) -> tuple[float, float]:
            return regions.between(where[a], where[b])

        randomness = random.Random(f"{plan.seed}/network")
        hub = MemoryHub(loop, randomness, LinkModel(), backbone=backbone, routers_seed=f"{plan.seed}/nat")
        for signer, (peer_class, _, _) in zip(plan.signers, roster, strict=True):
            hub.set_link(signer.peer_id, link_of(peer_class, scenario))
            hub.set_nat(signer.peer_id, peer_class.nat)
        async with asyncio.TaskGroup() as group:
            swarm = self._swarm = PipelineSwarm(
                plan.recipe,
                plan.dataset,
                plan.signers,
                hub,
                group,
                seconds=_seconds(scenario),
                start_s=scenario.costs.start_s,
                founder=plan.schedule.founder,
                domains={peer: Domains(region=region.lower()) for peer, (_, _, region) in enumerate(roster)},
                wanted={peer: own.stage for peer, (own, _, _) in enumerate(roster) if own.stage is not None},
                known_means=known_means(plan.recipe.terms()),
                on_event=self._on_event,
                on_broken=self.on_broken,
            )
            watching = group.create_task(swarm.watch())
            broken = [self._is_broken.wait()] if plan.stop_when_broken else []
            await until_first(self._story(swarm), *broken)
            swarm.look()
            self._touch()
            watching.cancel()
            for peer in hub.running():
                hub.resume(peer)  # whoever is stopped cannot end
            for task in swarm.tasks.values():
                task.cancel()

    async def _story(self, swarm: PipelineSwarm) -> None:
        """The schedule, and the judgement on how the swarm has come out of it."""
        plan = self._plan
        await play(plan.schedule, swarm.hub, swarm.ids, swarm, self._on_fault)
        if not plan.calm_s:
            return
        before, give_up_at = swarm.rounds(), self._trail.now + plan.calm_s
        while wrong := self._still_wrong(swarm, before):
            if self._trail.now >= give_up_at:
                self.on_broken(f"invariant 0: {'; '.join(wrong)}")
                return
            await asyncio.sleep(LOOK_S)

    def _still_wrong(self, swarm: PipelineSwarm, before: dict[int, int]) -> list[str]:
        """What is not well yet in the calm; `before`: rounds by stage when it began."""
        if finished(swarm):
            return []
        rounds = swarm.rounds()
        stand = [stage for stage in range(self._plan.scenario.stages) if rounds.get(stage, 0) <= before.get(stage, 0)]
        return [*(f"no round of stage {stage} in the calm stretch" for stage in stand), *lacks(swarm)]

    def conclude(self) -> None:
        """Work out the report."""
        plan, report = self._plan, self._report
        done = [(START_UNIX_S + fault.at, fault) for fault in report.faults]
        speeds = [own.tokens_per_s for own, _, _ in plan.scenario.roster()]
        steps_s = [training_seconds(plan.recipe.manifest, speed)["train"] for speed in speeds]
        fill_report(report, self._keys, steps_s, self._events, done, START_UNIX_S, self._ended)
        if self._swarm is not None:
            report.ledger = ledger_of(self._swarm.judge.home_histories, report.applied)
        report.seconds = self._ended - START_UNIX_S
        report.log_sha256 = self._trail.sha256

    def _touch(self) -> None:
        self._ended = asyncio.get_running_loop().time()

    # ---- the log -----------------------------------------------------------------------------------------------

    def _on_event(self, index: int, event: Event) -> None:
        self._touch()
        self._trail.event(index, event)
        self._events[self._keys[index]].append(event | {"peer": self._keys[index]})

    def _on_fault(self, line: str, fault: Fault | None) -> None:
        self._touch()
        self._trail.log(None, "fault", {"what": line})
        if fault is not None:
            self._report.faults.append(fault)

    def on_broken(self, what: str) -> None:
        """Told what the judges found, also when it has ended the simulation."""
        self._report.violations.append(what)
        if self._report.broken_at is None:
            self._report.broken_at = self._ended - START_UNIX_S
        self._trail.log_at(self._ended - START_UNIX_S, None, "invariant.broken", {"detail": what})
        if self._is_broken is not None:
            self._is_broken.set()


def _seconds(scenario: Scenario) -> Callable[[int, StageRecipe, str, float], float]:
    speeds = [peer_class.tokens_per_s for peer_class, _, _ in scenario.roster()]
    paces: dict[tuple[int, int], StagePace] = {}  # by peer and stage

    def seconds(peer: int, recipe: StageRecipe, name: str, share: float) -> float:
        if name not in OPERATIONS:
            return scenario.costs.seconds(name, share * recipe.own.num_parameters)
        if (peer, recipe.stage) not in paces:
            paces[peer, recipe.stage] = StagePace.of(recipe.whole.model, recipe.part, 1.0 / speeds[peer])
        return paces[peer, recipe.stage].seconds(OPERATIONS[name], recipe.tokens_per_microbatch)

    return seconds
