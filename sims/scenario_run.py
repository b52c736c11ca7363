"""A scenario under virtual time, whatever it is made of: replicas (`scenario_plan`) or stages of a pipeline (`pipeline_scenario`)."""

from dataclasses import dataclass

from farflung.sims.faults import Schedule
from farflung.sims.pipeline_scenario import PipelinePlan, has_pipeline, prepare_pipeline, simulate_pipeline
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import Plan, Report, simulate
from farflung.sims.trail import Sink

AnyPlan = Plan | PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Playable:
    """A scenario that can be run, and what its log stands for."""

    plan: AnyPlan
    keys: list[str]
    """Public keys in hex, by the peer's number."""
    bytes_factor: float = 1.0
    """Bytes that one simulated byte stands for, of contributions and means."""
    state_factor: float = 1.0
    """The same of outer states."""
    bits: tuple[float, float] | None = None
    """Bits per parameter that contributions and means stand for; None: they have their own."""
    sample_tokens: int = 1
    """What one of the tokens that learners tell of a step stands for: those that only cost time count samples."""


def make_playable(scenario: Scenario, seed: int, schedule: Schedule) -> Playable:
    """Make the nodes of a scenario for a schedule (`churn.make_schedule`). Raises ConfigError."""
    if has_pipeline(scenario):
        pipeline = prepare_pipeline(scenario, seed, schedule)
        return Playable(plan=pipeline, keys=[signer.peer_id.hex() for signer in pipeline.signers])
    prepared = prepare(scenario, seed, schedule)
    outfit = prepared.plan.outfit
    return Playable(
        plan=prepared.plan,
        keys=[signer.peer_id.hex() for signer in outfit.signers],
        bytes_factor=prepared.bytes_factor,
        state_factor=prepared.state_factor,
        bits=prepared.bits if scenario.mode == "cost" else None,
        sample_tokens=outfit.terms.pace.tokens_per_sample if scenario.mode == "cost" else 1,
    )


def plan_scenario(scenario: Scenario, seed: int, schedule: Schedule) -> AnyPlan:
    """What to simulate. Raises ConfigError."""
    return make_playable(scenario, seed, schedule).plan


def simulate_any(plan: AnyPlan, *, sink: Sink | None = None, keep: bool = False) -> Report:
    """Run a plan. `keep` keeps the log in the report, `sink` sees it as it grows."""
    if isinstance(plan, PipelinePlan):
        return simulate_pipeline(plan, sink=sink, keep=keep)
    return simulate(plan, sink=sink, keep=keep)
