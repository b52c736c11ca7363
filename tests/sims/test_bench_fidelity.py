"""Virtual time beside real processes: what is compared, and that shared processors make it slower."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from farflung.protocol.errors import ConfigError
from farflung.sims import bench_fidelity, local_run
from farflung.sims.bench_fidelity import compared, lines, missed, run_fidelity
from farflung.sims.churn import make_schedule
from farflung.sims.costs import Costs, write_costs
from farflung.sims.scenario import Scenario, find_scenario, load_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import Report, simulate
from farflung.training.presets import num_parameters, preset

LOCAL: dict[str, Any] = {
    "about": "Some peers.",
    "duration_s": 900.0,
    "peers": 8,
    "faults": 13,
    "rounds": 40,
    "median_round_s": 0.2,
    "sent_bytes": 2_700_000,
    "net_bytes": 5_400_000,
    "contributed": 270,
    "training_share": 0.8,
    "late_steps": 0.01,
    "violations": [],
    "expected": [],
}


def test_what_is_held_to_what() -> None:
    virtual = LOCAL | {
        "rounds": 43,
        "median_round_s": 0.16,
        "sent_bytes": 3_030_000,
        "net_bytes": 9_000_000,
        "contributed": 300,
    }
    found = compared(LOCAL, virtual)
    assert found["off_percent"] == {"rounds": 7.5, "round_s": -20.0, "payload": 1.0, "net": 50.0, "training": 0.0}
    assert missed(found) == [
        "median round within 15 %: -20.0 %",
        "all bytes that peers sent (`net`) for each contribution within 2 %: +50.0 %",
    ]
    page = "\n".join(
        lines(
            "churn-8", found | {"local": LOCAL, "virtual": virtual, "costs": msgspec.to_builtins(Costs(processors=2))}
        )
    )
    assert "| rounds committed | 40 | 43 | +7.5 % |" in page and "2 processors for all peers" in page
    assert "| median round within 15 % | -20.0 % | **missed** |" in page
    assert "| payload bytes of committed rounds, for each contribution | 10,000 | 10,100 | +1.0 % |" in page
    assert "| all bytes that peers sent (`net`), for each contribution | 20,000 | 30,000 | +50.0 % |" in page


def test_both_are_played_with_the_same_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Costs] = []

    def virtual(scenario: str, *, seed: None, out: None, quiet: bool, costs: Costs) -> dict[str, Any]:
        seen.append(costs)
        return LOCAL

    monkeypatch.setattr(bench_fidelity, "run_local", lambda *_, **__: LOCAL)
    monkeypatch.setattr(local_run, "available_bytes", lambda: 64e9)
    monkeypatch.setattr(bench_fidelity, "run_scenario", virtual)
    (tmp_path / "costs.toml").write_text(write_costs(Costs(hand_s=0.5, start_s=7.0)))
    found = run_fidelity("churn-8", costs=tmp_path / "costs.toml", page=tmp_path)
    assert missed(found) == [] and seen[0].hand_s == 0.5 and seen[0].processors >= 1
    assert "a start takes 7.0 s" in (tmp_path / "fidelity.md").read_text()


UNMET = {"what": "rounds >= 50", "got": 40, "met": False}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"violations": ["invariant 5: two histories", "another"]}, "invariant 5: two histories, and 1 more"),
        ({"expected": [UNMET]}, "expected rounds >= 50, got 40"),
    ],
)
def test_a_run_that_is_not_well_is_missed_whatever_its_figures_are(broken: dict[str, Any], reason: str) -> None:
    assert missed(compared(LOCAL | broken, LOCAL)) == [f"processes fit to be compared: {reason}"]
    assert missed(compared(LOCAL, LOCAL | broken)) == [f"virtual time fit to be compared: {reason}"]


@pytest.mark.parametrize("sides", [("processes",), ("virtual time",), ("processes", "virtual time")])
def test_a_run_without_rounds_is_missed_and_can_be_told(sides: tuple[str, ...]) -> None:
    empty = LOCAL | {
        "rounds": 0,
        "median_round_s": None,
        "sent_bytes": 0,
        "net_bytes": 9,
        "contributed": 0,
        "training_share": 0.0,
    }
    local, virtual = (empty if side in sides else LOCAL for side in ("processes", "virtual time"))
    found = compared(local, virtual)
    goals = missed(found)
    assert goals[: len(sides)] == [f"{side} fit to be compared: no round was committed" for side in sides]
    assert "median round within 15 %: nothing to compare" in goals and len(goals) == len(sides) + 4
    found |= {"local": local, "virtual": virtual, "costs": msgspec.to_builtins(Costs(processors=2))}
    page = "\n".join(lines("churn-8", json.loads(json.dumps(found))))
    assert "| none |" in page and "| nothing to compare |" in page


def test_what_cannot_be_played_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "available_bytes", lambda: 1e9)
    monkeypatch.setattr(bench_fidelity, "calibrate", lambda *_: pytest.fail("it was measured first"))
    with pytest.raises(ConfigError, match="processes take some"):
        run_fidelity("churn-8")


def played(scenario: Scenario) -> Report:
    return simulate(prepare(scenario, 0, make_schedule(scenario, 0, Path())).plan)


@pytest.mark.thorough
def test_processes_that_share_processors_make_slower_rounds_and_come_up_one_after_another() -> None:
    scenario = msgspec.structs.replace(load_scenario(find_scenario("local-3")), duration_s=60.0, happenings=())
    costs = Costs(start_s=4.0, hand_s=0.02, message_s=0.002)
    apart = played(msgspec.structs.replace(scenario, costs=costs))
    together = played(msgspec.structs.replace(scenario, costs=msgspec.structs.replace(costs, processors=1)))
    assert not apart.violations and not together.violations
    assert median(together.round_seconds) > 1.2 * median(apart.round_seconds)
    assert [sum(one.running_s for one in report.labour) for report in (apart, together)] == pytest.approx(
        [3 * 56.0, 56.0 + 52.0 + 48.0], abs=1.0
    )


@pytest.mark.thorough
def test_what_steps_compute_slows_rounds_down_where_training_goes_on() -> None:
    scenario = msgspec.structs.replace(load_scenario(find_scenario("local-3")), duration_s=60.0, happenings=())
    goes_on = {**scenario.manifest, "swarm": {**scenario.manifest["swarm"], "delay_steps": "auto"}}
    scenario = msgspec.structs.replace(scenario, manifest=goes_on)
    costs = Costs(start_s=4.0, hand_s=0.02, message_s=0.002, processors=1)
    computing = msgspec.structs.replace(costs, trained_per_s=num_parameters(preset("tiny")) * 256 / 0.05)
    asleep, busy = (played(msgspec.structs.replace(scenario, costs=one)) for one in (costs, computing))
    assert not asleep.violations and not busy.violations and asleep.rounds == busy.rounds
    assert median(busy.round_seconds) > 1.1 * median(asleep.round_seconds), (
        "a tenth of their time, on one processor for three"
    )


def test_steps_that_share_too_few_processors_take_longer_than_they_say() -> None:
    scenario = msgspec.structs.replace(load_scenario(find_scenario("local-3")), duration_s=60.0, happenings=())
    costs = Costs(processors=1, trained_per_s=num_parameters(preset("tiny")) * 256 / 0.5)
    report = played(msgspec.structs.replace(scenario, costs=costs))
    steps, running_s = (sum(getattr(one, what) for one in report.labour) for what in ("steps", "running_s"))
    assert not report.violations and report.rounds > 1, (
        "three peers with steps of half a second, which they also compute"
    )
    assert steps == pytest.approx(running_s / 3 / 0.5, rel=0.1)
