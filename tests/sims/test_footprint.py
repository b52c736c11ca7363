"""Simulations for which this machine has too little memory are refused before they begin; those that come with farflung are not."""

import pytest
from msgspec import structs
from typer.testing import CliRunner

from farflung.protocol.errors import ConfigError
from farflung.sims import sim_run
from farflung.sims.churn import make_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.footprint import check_memory, least_bytes
from farflung.sims.main import app
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario, shipped
from farflung.sims.scenario_run import plan_scenario


def least_gb(scenario: Scenario) -> float:
    one = Schedule(num_peers=scenario.num_peers, duration_s=scenario.duration_s, faults=(Start(at=0.0, peer=0),))
    return least_bytes(scenario, plan_scenario(scenario, 0, one)) / 1e9


def crowd(count: int, *, hours: float, max_group: int) -> Scenario:
    found = load_scenario(SHIPPED / "apart.toml")
    manifest = found.manifest | {"model": {"preset": "3m"}, "swarm": found.manifest["swarm"] | {"max_group": max_group}}
    return structs.replace(
        found,
        duration_s=3600.0 * hours,
        manifest=manifest,
        peers=(structs.replace(found.peers[0], count=count),),
    )


@pytest.mark.parametrize("name", shipped())
def test_what_comes_with_farflung_takes_less_than_a_gigabyte(name: str) -> None:
    assert 0.0 < least_gb(load_scenario(SHIPPED / f"{name}.toml")) < 1.0


def test_peers_take_what_was_measured() -> None:
    """Of a thousand in groups of 16 1.9 GB after an hour, with the 0.3 that Python and torch take; larger groups take more."""
    assert least_gb(crowd(1000, hours=1.0, max_group=16)) == pytest.approx(1.5, abs=0.1)
    assert least_gb(crowd(1000, hours=24.0, max_group=16)) == pytest.approx(2.5, abs=0.1)
    assert least_gb(crowd(1000, hours=1.0, max_group=64)) == pytest.approx(5.9, abs=0.1)


def test_more_peers_than_memory_holds_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load_scenario(SHIPPED / "partition.toml")
    plan = plan_scenario(scenario, 0, make_schedule(scenario, 0, SHIPPED))
    check_memory(scenario, plan, free_bytes=1e9)
    with pytest.raises(
        ConfigError, match=r"7 peers take 0\.1 GB of memory at least, and 0\.0 GB are free; lower peers\.count"
    ):
        check_memory(scenario, plan, free_bytes=1e7)
    monkeypatch.setattr(sim_run, "available_bytes", lambda: 1e7)
    done = CliRunner().invoke(app, ["sim", "run", "flash-crowd"])
    assert done.exit_code == 2 and "104 peers take 0.6 GB" in done.output.replace("\n", " ")
