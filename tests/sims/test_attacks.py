"""An attacker does what it is said to do, honest peers refuse it with typed errors, and nothing of theirs is harmed."""

from collections import Counter
from typing import Any, get_args

import msgspec
import pytest
import torch

from farflung.protocol.errors import RemoteError
from farflung.sims.attacks import Attack, Backwards
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import Report, simulate
from farflung.sims.toy import ToyLearner
from farflung.training.rules import Nesterov

SECONDS = 300.0


def shortened(*attacks: str) -> Scenario:
    found = load_scenario(SHIPPED / "attacker.toml")
    peers = tuple(c if not c.attacks else msgspec.structs.replace(c, attacks=attacks) for c in found.peers)
    return msgspec.structs.replace(found, duration_s=SECONDS, peers=peers)


def attacked(*attacks: str) -> tuple[Report, Counter[str]]:
    """The report, and the errors with which honest peers refused something."""
    scenario = shortened(*attacks)
    refused: Counter[str] = Counter()

    def sink(line: str, event: dict[str, Any]) -> None:
        if event["event"] == "refused" and event["peer"] < 7:
            refused[event["error"]] += 1

    return simulate(prepare(scenario, 0, make_schedule(scenario, 0, SHIPPED)).plan, sink=sink), refused


def test_every_attack_is_refused_and_the_swarm_goes_on() -> None:
    report, refused = attacked(*get_args(Attack))
    assert report.violations == []
    assert report.rounds >= 5 and report.members == 8
    by_chance = {"Refused"}  # what is said again may be said to its author
    assert set(refused) | by_chance == {error.__name__ for error in RemoteError.__subclasses__()}


def test_a_peer_without_attacks_is_honest() -> None:
    report, refused = attacked()
    assert report.violations == [] and report.rounds >= 5 and report.members == 8
    assert not set(refused) & {"BadSignature", "LimitExceeded", "Malformed", "WrongSwarm", "WrongVersion"}


@pytest.mark.parametrize("numel", [64, 65])
def test_noise_has_the_norm_of_the_progress_it_hides(numel: int) -> None:
    honest, evil = (ToyLearner(numel, Nesterov(lr=0.7, momentum=0.5)) for _ in range(2))
    sabotaged = Backwards(evil, evil.coupled)
    for learner in (honest, sabotaged):
        learner.train([1, 2, 3], 0)
        learner.offer()
    true, false = honest.offered_gradient(0, numel), sabotaged.offered_gradient(0, numel)
    torch.testing.assert_close(false, true.flip(0))
    assert sabotaged.num_parameters == numel
