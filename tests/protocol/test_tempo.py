"""What is learnt from the rounds of a chain."""

from types import SimpleNamespace
from typing import Any, cast

from tests.protocol.alone import IDS, RULES

from farflung.protocol import chain
from farflung.protocol.chain import Contribution, RoundResult
from farflung.protocol.settings import RECENT_ROUNDS
from farflung.protocol.tempo import Tempo

ALL = RULES.rules.numel


def took(num: int, seconds: float, numel: int = ALL) -> RoundResult:
    """A round of so many contributors that moved so many elements."""
    return RoundResult(
        plan=b"p" * 32,
        contributors=tuple(Contribution(peer, 100, 4, 1000) for peer in IDS[:num]),
        parts=(chain.PartResult(IDS[0], 0, numel, b"d" * 32),),
        seconds_ms=int(1000 * seconds),
    )


def tempo(*rounds: RoundResult) -> Tempo:
    history = SimpleNamespace(recent_rounds=lambda most=RECENT_ROUNDS: [*rounds][:most])
    return Tempo(RULES, cast(Any, None), cast(Any, history), cast(Any, None))


def test_deadlines_of_several_learn_nothing_from_rounds_of_somebody_alone() -> None:
    """Who is alone sends nothing, and is through at once."""
    assert tempo(took(1, 0.3), took(1, 0.2)).rounds_as_wide_s(ALL, alone=False) == []
    assert tempo(took(1, 0.3), took(3, 20.0)).rounds_as_wide_s(ALL, alone=False) == [20.0]
    assert tempo(took(1, 0.3), took(3, 20.0)).rounds_as_wide_s(ALL, alone=True) == [0.3]


def test_what_is_known_of_several_outlasts_rounds_that_only_one_of_them_came_into() -> None:
    """Else each of the next would wait for the longest that there is."""
    rounds = tempo(*[took(1, 0.3)] * (2 * RECENT_ROUNDS), *[took(2, 20.0)] * (2 * RECENT_ROUNDS))
    assert rounds.rounds_as_wide_s(ALL, alone=False) == [20.0] * RECENT_ROUNDS


def test_rounds_that_moved_less_would_have_taken_as_much_longer() -> None:
    assert tempo(took(3, 20.0, ALL // 2), took(3, 10.0)).rounds_as_wide_s(ALL, alone=False) == [40.0, 10.0]
    assert tempo(took(3, 20.0)).rounds_as_wide_s(ALL // 2, alone=False) == [20.0]
