"""An attacker does what it is said to do, honest peers refuse it with typed errors, and nothing of theirs is harmed."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
import torch

from farflung.protocol import envelope, messages, planning, proposer
from farflung.protocol.effects import Send
from farflung.protocol.envelope import Envelope, Opener
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Collected
from farflung.protocol.participation import Participation
from farflung.protocol.replay import ReplayGuard
from farflung.sims.attacks import Attack, Backwards
from farflung.sims.churn import make_schedule
from farflung.sims.harm import Harm
from farflung.sims.scenario import SHIPPED, Scenario, load_scenario
from farflung.sims.scenario_plan import key_seeds, prepare
from farflung.sims.simulation import Report, simulate
from farflung.sims.toy import ToyLearner
from farflung.training.rules import Nesterov

SECONDS = 300.0


def shortened(*attacks: str) -> Scenario:
    found = load_scenario(SHIPPED / "attacker.toml")
    peers = tuple(c if not c.attacks else msgspec.structs.replace(c, attacks=attacks) for c in found.peers)
    return msgspec.structs.replace(found, duration_s=SECONDS, calm_s=0.0, peers=peers)


def attacked(*attacks: str, seconds: float = SECONDS) -> tuple[Report, Counter[str]]:
    """The report, and the errors with which honest peers refused something."""
    scenario = msgspec.structs.replace(shortened(*attacks), duration_s=seconds)
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


def believes_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "verify", lambda *_: None)


def believes_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayGuard, "accept", lambda *_, **__: None)


def believes_what_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Opener.check
    monkeypatch.setattr(Opener, "check", lambda self, data, now, carrier, **how: check(self, data, 0.0, carrier, **how))
    monkeypatch.setattr(envelope, "MAX_MESSAGE_LIFE_S", math.inf)


def believes_other_swarms(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: Opener, data: bytes, now: float, carrier: bytes, **how: Any) -> Envelope:
        return honest(Opener(envelope.swarm_of(data, carrier)), data, now, carrier, **how)

    honest = Opener.check
    monkeypatch.setattr(Opener, "check", check)


@pytest.mark.parametrize(
    ("broken", "attack", "said"),
    [
        (believes_signatures, "forge", "a message with a forged signature"),
        (believes_repetitions, "replay", "a message that it has had before"),
        (believes_what_has_expired, "stale", "a message that has expired"),
        (believes_other_swarms, "swarm", "a message for another swarm"),
    ],
)
def test_whoever_believes_an_attacker_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], attack: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    found = attacked(attack, seconds=90.0)[0].violations
    assert found and all(one.startswith("invariant 8:") and one.endswith(said) for one in found)


def test_who_begins_anew_with_another_group_has_had_no_message_before() -> None:
    """In the same process: what the node before it has heard it cannot know."""
    attacker, swarm, found = Ed25519Signer(b"a" * 32), b"s" * 32, list[str]()
    honest, outfit = b"h" * 32, SimpleNamespace(terms=SimpleNamespace(settings=SimpleNamespace(swarm=swarm)))
    stage = SimpleNamespace(
        attackers={attacker.peer_id},
        numbers={honest: 0, attacker.peer_id: 1},
        hub=SimpleNamespace(now=lambda: 9.0, unix_time=lambda peer: 1000.0),
        outfit=outfit,
        peers={0: object()},
    )
    harm = Harm(cast(Any, stage), lambda which, detail: found.append(detail))
    goodbye = messages.Goodbye("for now")
    sealed = envelope.seal(attacker, swarm, messages.tag(goodbye), 1, 1030.0, messages.encode(goodbye))
    for alarms in (0, 1):
        harm.arrives(attacker.peer_id, honest, sealed)
        harm.look()
        assert len(found) == alarms
    stage.peers[0] = object()
    harm.arrives(attacker.peer_id, honest, sealed)
    harm.look()
    assert len(found) == 1


@pytest.mark.thorough
def test_a_peer_without_attacks_is_honest() -> None:
    report, refused = attacked()
    assert report.violations == [] and report.rounds >= 5 and report.members == 8
    assert not set(refused) & {"BadSignature", "LimitExceeded", "Malformed", "WrongSwarm", "WrongVersion"}


def test_an_attacker_hides_nothing_that_honest_proposers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = planning.choose_cut

    def all_but_one(
        reports: Mapping[bytes, frozenset[bytes]], sizes: Mapping[bytes, int], tokens: Mapping[bytes, int]
    ) -> tuple[tuple[bytes, ...], frozenset[bytes]]:
        counted, owners = choose(reports, sizes, tokens)
        return counted[len(counted) > 2 :], owners

    monkeypatch.setattr(proposer, "choose_cut", all_but_one)
    thrown_away = [said for said in attacked("stale", seconds=120.0)[0].violations if said.startswith("invariant 3:")]
    assert len(thrown_away) >= 10


def test_whom_an_attacking_owner_does_not_name_honest_proposers_may_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    report, hidden = Participation.report, list[bytes]()
    attacker = Ed25519Signer(key_seeds(shortened("stale"), 0)[7]).peer_id

    def hides_one(self: Participation, membership: Membership, to: bytes, now: float) -> list[Any]:
        effects: list[Any] = report(self, membership, to, now)
        if membership.me != attacker or not effects:
            return effects
        first, *others = effects[0].message.peers
        hidden.append(first)
        return [Send(to, Collected(self.plan_id, tuple(others)))]

    monkeypatch.setattr(Participation, "report", hides_one)
    story, _ = attacked("stale", seconds=120.0)
    assert story.violations == [] and hidden and story.missed


@pytest.mark.parametrize("numel", [64, 65])
def test_noise_has_the_norm_of_the_progress_it_hides(numel: int) -> None:
    honest, evil = (ToyLearner(numel, Nesterov(lr=0.7, momentum=0.5)) for _ in range(2))
    sabotaged = Backwards(evil, evil.coupled)
    for learner in (honest, sabotaged):
        learner.train([1, 2, 3], 0)
        learner.offer(0, numel)
    true, false = honest.offered_gradient(0, numel), sabotaged.offered_gradient(0, numel)
    torch.testing.assert_close(false, true.flip(0))
    assert sabotaged.num_parameters == numel
