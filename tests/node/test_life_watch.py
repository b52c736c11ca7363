"""What a peer does about calls that it knew before it was started."""

from typing import Any, cast

import pytest
from tests.protocol.pipeline_says import A, B, C, of_three

from farflung.node.events import EventLog
from farflung.node.life_watch import LifeWatch
from farflung.protocol.accord import Word
from farflung.protocol.lives import Life
from farflung.protocol.roll import Roll

CALL = Life(2, 1, A)


class Me:
    """A data node, one of two; the other one is B."""

    holds, caught_up, finished = (3, b"d" * 32), True, False
    word, chain = Word(0), ((A, B), [A, B])

    def __init__(self, spared: bool) -> None:
        self.spared = spared
        self.went: list[int] = []

    def go(self, stage: int, reason: str) -> None:
        self.went.append(stage)

    def decide(self) -> None: ...


class Part:
    def __init__(self, me: Me) -> None:
        self.me = me


def watching(
    monkeypatch: pytest.MonkeyPatch, *, lost: tuple[int, ...], decided: Life = CALL, spared: bool = True
) -> tuple[Me, LifeWatch, list[int]]:
    """A peer of three stages that was called for stage 2; how often it wrote to disk."""
    roll = of_three(A)
    roll.renewed[2] = decided
    monkeypatch.setattr(Roll, "lost", lambda self, now, *, held: lost)
    me, kept = Me(spared), list[int]()
    log = cast(EventLog, type("Log", (), {"emit": lambda self, event, **facts: None})())
    part: Any = Part(me)
    watch = LifeWatch(part, roll=roll, life=Life(0, 0, B), owed=[CALL], log=log, keep=lambda: kept.append(1))
    return me, watch, kept


def test_it_goes_where_it_was_called_when_too_few_stages_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    me, watch, _ = watching(monkeypatch, lost=(1, 2))
    assert watch.follow(1.0) and me.went == [2] and watch.called_to == 2
    assert not watch.follow(2.0) and me.went == [2]


@pytest.mark.parametrize(
    "changes",
    [
        {"lost": (2,)},  # stages 0 and 1 can call somebody else
        {"lost": (1, 2), "spared": False},  # its own stage cannot spare it
        {"lost": (1, 2), "decided": Life(2, 2, C)},  # somebody else was called since
    ],
)
def test_else_it_stays_and_says_nothing(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    me, watch, kept = watching(monkeypatch, **changes)
    assert [watch.follow(float(second)) for second in range(1, 5)] == [False] * 4
    assert me.went == [] and kept == []
