"""Greetings that somebody repeats for us: when we have to look again, and what those who hear of them take them for."""

import pytest
from tests.protocol.bus import beat

from farflung.protocol.greeting import Greeting
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import SUSPECT_AFTER, Liveness, Membership
from farflung.protocol.messages import Heartbeat, Opinion
from farflung.protocol.settings import ASLEEP_S

ME, OTHER, THIRD = b"m" * 32, b"o" * 32, b"t" * 32
BEAT_S = 2.0
BASIS, OTHER_BASIS = (1,), (2,)


class Repeats:
    """Carries greetings to everybody from the second one on."""

    def __init__(self) -> None:
        self.repeats = False
        self.since = 0.0

    def greet(self, beat: Heartbeat, to: list[PeerId], now: float) -> list[PeerId]:
        if not self.repeats:
            self.repeats, self.since = True, now
            return to
        return []

    def newest(self, now: float) -> float:
        return now - (now - self.since) % BEAT_S


class Told:
    """That somebody has greeted us last at some time."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.is_over = False

    def newest(self) -> float:
        return self.at

    def end(self) -> None:
        self.is_over = True


def member(now: float = 0.0) -> Membership:
    made = Membership(ME, BEAT_S)
    made.heard(OTHER, now, beat(every_s=BEAT_S))
    return made


def greet(greeting: Greeting, now: float, *, settled: bool = True) -> int:
    greeting.begin(now)
    return len(greeting.to(beat(), now, BASIS, settled=settled))


def test_without_a_carrier_everybody_is_greeted_beat_by_beat() -> None:
    greeting = Greeting(member())
    for now in (0.0, 2.0, 4.0):
        assert greeting.look(now, BASIS)
        assert greet(greeting, now) == 1
        assert greeting.due_at == now + BEAT_S and not greeting.look(now + 1.9, OTHER_BASIS)


def resting() -> tuple[Greeting, Repeats]:
    """Since two seconds after the beginning."""
    greeting, carrier = Greeting(member()), Repeats()
    greeting.carrier = carrier
    assert greet(greeting, 0.0) == 1 and greet(greeting, 2.0) == 0
    return greeting, carrier


def test_what_is_repeated_is_looked_at_now_and_then() -> None:
    greeting, _ = resting()
    assert ASLEEP_S - 3 * BEAT_S <= greeting.due_at - 2.0 < ASLEEP_S, "else it would take the machine to have slept"
    due_at = greeting.due_at
    assert not greeting.look(11.5, BASIS)
    assert greeting.due_at == due_at and greeting.look(due_at, BASIS)


def test_what_is_not_what_it_was_is_said_with_the_next_beat() -> None:
    greeting, _ = resting()
    assert not greeting.look(11.5, OTHER_BASIS)
    assert greeting.due_at == 12.0


def test_who_has_to_be_greeted_by_us_is_with_the_next_beat() -> None:
    greeting, carrier = resting()
    carrier.repeats = False
    assert not greeting.look(11.5, BASIS)
    assert greeting.due_at == 12.0


def test_another_state_is_said_with_the_next_beat() -> None:
    greeting, _ = resting()
    assert not greeting.look(11.5, BASIS)
    greeting.membership.state = "ready"
    assert greeting.due_at == 12.0 and greeting.look(12.0, BASIS)


def test_who_has_questions_does_not_rest() -> None:
    greeting = Greeting(member())
    greeting.carrier = Repeats()
    greet(greeting, 0.0)
    greet(greeting, 2.0, settled=False)
    assert greeting.due_at == 4.0


def test_a_sign_keeps_a_peer_alive_until_it_ends() -> None:
    membership = member()
    told = Told(100.0)
    membership.rely(OTHER, told)
    membership.tick(101.0)
    assert membership.peers[OTHER].liveness is Liveness.ALIVE
    membership.unrely(OTHER)
    assert membership.look_at == pytest.approx(100.0 + SUSPECT_AFTER * BEAT_S)
    membership.tick(100.0 + SUSPECT_AFTER * BEAT_S - 0.1)
    assert membership.peers[OTHER].liveness is Liveness.ALIVE
    membership.tick(100.0 + SUSPECT_AFTER * BEAT_S + 0.1)
    assert membership.peers[OTHER].liveness is Liveness.SUSPECT
    assert not told.is_over, "who ends it knows that"


def test_whoever_is_suspected_or_forgotten_is_to_be_heard_itself() -> None:
    membership = member()
    broken, forgotten = Told(50.0), Told(50.0)
    membership.heard(THIRD, 0.0, beat())
    membership.rely(OTHER, broken)
    membership.rely(THIRD, forgotten)
    membership.unreachable(OTHER, 51.0, "the connection broke")
    membership.forget(THIRD)
    assert broken.is_over and forgotten.is_over
    assert membership.peers[OTHER].sign is None


def test_by_a_sign_it_was_heard_whoever_asks() -> None:
    membership = member()
    membership.rely(OTHER, Told(50.0))
    (answer,) = membership.answer(THIRD, OTHER, 51.0)
    assert answer.message == Opinion(OTHER, 1.0)  # type: ignore[attr-defined]
    membership.leave(48.0)
    assert membership.sure([OTHER]) == {OTHER}
    membership.leave(49.5)
    assert membership.sure([OTHER]) == frozenset()


def test_what_others_pass_on_of_it_says_no_more_than_its_sign() -> None:
    membership = member()
    membership.rely(OTHER, Told(59.0))
    membership.told(OTHER, 60.0)
    assert not membership.unheard(OTHER) and membership.direct(OTHER)


def test_it_says_how_far_it_is() -> None:
    membership = member()
    membership.rely(OTHER, Told(50.0))
    membership.renew(OTHER, beat(step=7), 50.0)
    said = membership.heartbeat(OTHER)
    assert said is not None and said.step == 7 and membership.peers[OTHER].beat_at == 50.0
