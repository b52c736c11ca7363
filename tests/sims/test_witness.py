"""What a witness of a simulation keeps is little, and the audit says of it what it says of all that nodes wrote."""

import random
from typing import Any

import pytest
from msgspec import structs
from tests.thorough import mostly

from farflung.node.events import Event
from farflung.sims.audit import CHECKS, Check
from farflung.sims.audit_samples import account, check_samples
from farflung.sims.churn import make_schedule
from farflung.sims.facts import RunFacts
from farflung.sims.logs import Logs
from farflung.sims.scenario import SHIPPED, load_scenario
from farflung.sims.scenario_run import make_playable, simulate_any
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.witness import Witness

BEGINNINGS = {"attacker": 300.0, "local-3": 40.0, "spot": 900.0, "pipeline-6": 60.0}
"""Scenarios, and seconds of them."""


def looked(events: dict[str, list[Event]]) -> list[Check]:
    logs = Logs(events=events, run=RunFacts(name="run", started=0.0, ended=1.0, peers=[]))
    return [*(check(logs) for check in CHECKS), *check_samples(logs, account(logs))]


def spoilt(log: list[Event], rng: random.Random) -> list[Event]:
    """Some of it is missing, and some of it is not true."""
    found = []
    for event in log:
        lie: dict[str, Any] = {}
        if rng.random() < 0.03:
            match event["event"]:
                case "round.commit":
                    lie = {"digest": "0", "contributors": {peer: 7 for peer in event["contributors"]}}
                case "view.commit":
                    lie = {"view": []}
                case "step":
                    lie = {"samples": [[start + 1, stop + 1] for start, stop in event["samples"]]}
                case _:
                    lie = {"version": event["version"] + rng.choice((-1, 1))} if "version" in event else {}
        if rng.random() > 0.02:
            found.append(event | lie)
    return found


@pytest.mark.parametrize("name", mostly({"local-3"}, BEGINNINGS))
def test_the_audit_says_the_same_of_what_is_kept(name: str) -> None:
    whole = load_scenario(SHIPPED / f"{name}.toml")
    seconds = BEGINNINGS[name]
    soon = tuple(one for one in whole.happenings if one.at <= seconds)
    scenario = structs.replace(whole, duration_s=seconds, calm_s=0.0, happenings=soon)
    playable = make_playable(scenario, 1, make_schedule(scenario, 1, SHIPPED))
    log: list[Event] = []
    simulate_any(playable.plan, sink=lambda line, event: log.append(event))
    broken = 0
    for seed in range(8):
        said = spoilt(log, random.Random(seed)) if seed else log
        witness, everything = Witness(playable.keys), dict[str, list[Event]]()
        for event in said:
            witness("", event)
            if "peer" in event:
                peer = playable.keys[event["peer"]]
                told = event | {"peer": peer, "time": START_UNIX_S + event["time"]}
                everything.setdefault(peer, []).append(told)
        found = looked(witness.events)
        assert found == looked(everything)
        assert sum(check.count for check in found) > 10
        broken += sum(len(check.broken) for check in found)
        if not seed:
            assert not any(check.broken for check in found) and len(witness.events) > 2
            assert sum(map(len, witness.events.values())) < 0.7 * len(log)
    assert broken > 10, "or this tests little"
