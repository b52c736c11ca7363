"""What a simulation takes of this machine's memory, before it is begun: who runs out of it after an hour has nothing.

Measured with 16 and 64 peers for 15 virtual minutes (`cost`), and with 4 and 12 for two (`real`), above what the process has before its first peer (0.3 GB):

    numbers       70 bytes for each that a peer holds: parameters in `real` mode (214 MB for 3.1 M, 15 MB for 0.2 M), thousands in the place of them in `cost` mode
    the group     what a peer knows of each member of its group, and has had from it: in groups of 16 a peer takes 1.3 MB, in groups of 64, with four times the numbers, 7.8 MB
    time          0.045 MB an hour (docs/experiments.md)

Below are somewhat less, for nobody should be refused what would fit.
"""

from farflung.protocol.errors import ConfigError
from farflung.sims.pipeline_scenario import PipelinePlan
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_run import AnyPlan

NUMBER_BYTES = 60.0
MEMBER_BYTES = 60e3
HOUR_BYTES = 45e3


def least_bytes(scenario: Scenario, plan: AnyPlan) -> float:
    """That its peers take by the end, at least."""
    if isinstance(plan, PipelinePlan):
        numbers, group = plan.recipe.num_parameters / scenario.stages, plan.recipe.manifest.max_group
    else:
        rules = plan.outfit.terms.settings.rules
        numbers, group = rules.numel, rules.max_group
    of_members = MEMBER_BYTES * min(group, scenario.num_peers)
    return scenario.num_peers * (NUMBER_BYTES * numbers + of_members + HOUR_BYTES * scenario.duration_s / 3600.0)


def check_memory(scenario: Scenario, plan: AnyPlan, *, free_bytes: float) -> None:
    """Raises ConfigError where the peers of a scenario take more than is free."""
    least = least_bytes(scenario, plan)
    if least > free_bytes:
        smaller = "a smaller manifest.swarm.max_group" if scenario.mode == "cost" else "a smaller manifest.model.preset"
        raise ConfigError(
            f"{scenario.name}: {scenario.num_peers:,} peers take {least / 1e9:.1f} GB of memory at least, and {free_bytes / 1e9:.1f} GB are free; "
            f"lower peers.count, or give {smaller}"
        )
