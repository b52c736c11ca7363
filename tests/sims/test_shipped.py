"""Shipped scenarios under virtual time: each as far as it should be at its beginning, past what it is about, and in the end; and none breaks an invariant, by the judge or by its logs.

`make test` plays beginnings as their files have them, and past what they are about those in which that is what happens to peers, without the mathematics. `make thorough` plays all
of them whole.
"""

from typing import Any

import pytest
from msgspec import structs
from tests.thorough import further, mostly

from farflung.sims.aftermath import add_what_logs_show
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario, shipped
from farflung.sims.scenario_run import make_playable, simulate_any
from farflung.sims.sim_result import Result, summarise
from farflung.sims.witness import Witness

BEGINNINGS = {
    "apart": (470.0, 17, 6),
    "flash-crowd": (45.0, 0, 2),
    "home-8gb": (500.0, 1, 0),
    "local-3": (15.0, 1, 3),
    "pipeline-6": (32.0, 1, 6),
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

STORIES = {"partition": 420.0, "churn-8": 600.0, "replaced": 300.0, "groups": 420.0}
"""Seconds that are run with `mode = "cost"`, which takes some: `partition` until it has long been healed, `churn-8` with its three kills, `replaced` with two of five, `groups` with the one that
is killed."""

ELSEWHERE = {"attacker": "test_attacks", "nat": "test_nat"}
"""Whose beginnings other tests look at, the attacker and the relay that goes among them."""

WHOLE = ("local-3",)
"""Run to their end, as `stage-lost-6x1` is by `test_pipeline_scenario`."""


def run(scenario: Scenario) -> Result:
    playable = make_playable(scenario, scenario.seed, make_schedule(scenario, scenario.seed, SHIPPED))
    witness = Witness(playable.keys)
    report = simulate_any(playable.plan, sink=witness)
    add_what_logs_show(report, witness, playable.keys, lossy=scenario.network.loss > 0.0)
    return summarise(scenario, report, bytes_factor=playable.bytes_factor)


def shortened(name: str, seconds: float, **expected: Any) -> Scenario:
    """Its first so many seconds; of what it expects, `expected` in the place of what is for its end."""
    whole = load_scenario(SHIPPED / f"{name}.toml")
    soon = tuple(one for one in whole.happenings if one.at <= seconds)
    trained = min(whole.expect.min_training_share, COMING)
    expect = structs.replace(
        whole.expect, min_training_share=trained, max_loss=1e9, max_recovery_iterations=1e9, **expected
    )
    calm_s = whole.calm_s if seconds == whole.duration_s else 0.0
    return structs.replace(whole, duration_s=seconds, calm_s=calm_s, happenings=soon, expect=expect)


def test_every_shipped_scenario_is_run() -> None:
    assert set(BEGINNINGS) | set(STORIES) | set(ELSEWHERE) == set(shipped())


@pytest.mark.parametrize(
    "name", mostly(set(BEGINNINGS) - {"apart", "flash-crowd", "local-3", "spot", "thin-uplink"}, BEGINNINGS)
)
def test_the_beginning_is_as_it_should_be(name: str) -> None:
    seconds, rounds, members = BEGINNINGS[name]
    result = run(shortened(name, seconds, min_rounds=rounds, min_members=members))
    assert result["violations"] == []
    assert [one for one in result["expected"] if not one["met"]] == []


@pytest.mark.parametrize("name", mostly(set(STORIES) - {"groups"}, STORIES))
def test_what_it_is_about_happens_and_is_got_over(name: str) -> None:
    whole, seconds = load_scenario(SHIPPED / f"{name}.toml"), STORIES[name]
    rounds = int(whole.expect.min_rounds * seconds / whole.duration_s)
    result = run(structs.replace(shortened(name, seconds, min_rounds=rounds), mode="cost"))
    assert result["passed"], (result["violations"], result["expected"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*WHOLE, *further(*sorted(set(shipped()) - set(WHOLE)))])
def test_the_whole_is_as_its_file_expects(name: str) -> None:
    """None is cut: the longest, `replaced` and `flash-crowd`, take a processor two minutes and a half."""
    result = run(load_scenario(SHIPPED / f"{name}.toml"))
    assert result["passed"], (result["violations"], result["expected"])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_smaller_crowd_all_are_members_soon_and_rounds_go_on() -> None:
    """The whole takes two."""
    whole = load_scenario(SHIPPED / "flash-crowd.toml")
    old, crowd = whole.peers
    expect = structs.replace(whole.expect, min_members=34)
    result = run(structs.replace(whole, duration_s=250.0, peers=(old, structs.replace(crowd, count=30)), expect=expect))
    assert result["passed"], (result["violations"], result["expected"])
