"""Shipped scenarios under virtual time: the beginning of each breaks no invariant, and is as far as it should be; those that take less than a minute are run whole, too."""

import pytest
from msgspec import structs
from tests.thorough import further, mostly

from farflung.sims.churn import make_schedule
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario, shipped
from farflung.sims.scenario_run import make_playable, simulate_any
from farflung.sims.sim_result import Result, summarise

BEGINNINGS = {
    "apart": (470.0, 17, 6),
    "churn-8": (12.0, 0, 6),
    "flash-crowd": (45.0, 0, 2),
    "groups": (195.0, 4, 10),
    "home-8gb": (500.0, 1, 0),
    "local-3": (15.0, 1, 3),
    "partition": (22.0, 0, 7),
    "pipeline-6": (32.0, 1, 6),
    "replaced": (10.0, 0, 5),
    "spot": (400.0, 1, 4),
    "stage-0-lost-6x2": (30.0, 0, 0),
    "stage-lost-6x1": (30.0, 0, 0),
    "stage-lost-6x2": (30.0, 0, 0),
    "straggler": (240.0, 4, 6),
    "thin-uplink": (300.0, 8, 6),
    "trace": (600.0, 3, 2),
}
"""Seconds that are run, rounds and members there must be then. What else a file expects, of missed contributions and time spent training, holds as well."""

COMING = 0.75
"""Of the time, that is spent training in a beginning: all download the model in it."""

ELSEWHERE = {"attacker": "test_attacks", "nat": "test_nat"}
"""Whose beginnings other tests look at."""

WHOLE = ("local-3",)
"""Run to their end, as `stage-lost-6x1` is by `test_pipeline_scenario`."""

WHOLE_LATER = ("home-8gb", "spot", "straggler", "thin-uplink", "trace")
"""That take minutes."""


def run(scenario: Scenario) -> Result:
    playable = make_playable(scenario, scenario.seed, make_schedule(scenario, scenario.seed, SHIPPED))
    return summarise(scenario, simulate_any(playable.plan), bytes_factor=playable.bytes_factor)


def test_every_shipped_scenario_is_run() -> None:
    assert set(BEGINNINGS) | set(ELSEWHERE) == set(shipped())


@pytest.mark.parametrize("name", mostly(set(BEGINNINGS) - {"apart", "groups", "spot"}, BEGINNINGS))
def test_the_beginning_is_as_it_should_be(name: str) -> None:
    whole = load_scenario(SHIPPED / f"{name}.toml")
    seconds, rounds, members = BEGINNINGS[name]
    expect = structs.replace(
        whole.expect,
        min_rounds=rounds,
        min_members=members,
        min_training_share=min(whole.expect.min_training_share, COMING),
        max_loss=1e9,
        max_recovery_iterations=1e9,
    )
    soon = tuple(one for one in whole.happenings if one.at <= seconds)
    result = run(structs.replace(whole, duration_s=seconds, calm_s=0.0, happenings=soon, expect=expect))
    assert result["violations"] == []
    assert [one for one in result["expected"] if not one["met"]] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*WHOLE, *further(*WHOLE_LATER)])
def test_the_whole_is_as_its_file_expects(name: str) -> None:
    result = run(load_scenario(SHIPPED / f"{name}.toml"))
    assert result["passed"], (result["violations"], result["expected"])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_smaller_crowd_all_are_members_soon_and_rounds_go_on() -> None:
    """The whole takes a minute."""
    whole = load_scenario(SHIPPED / "flash-crowd.toml")
    old, crowd = whole.peers
    expect = structs.replace(whole.expect, min_members=34)
    result = run(structs.replace(whole, duration_s=250.0, peers=(old, structs.replace(crowd, count=30)), expect=expect))
    assert result["passed"], (result["violations"], result["expected"])
