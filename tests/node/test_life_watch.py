"""What a peer does about calls that it knew before it was started."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.protocol.pipeline_says import A, B, C, of_three

from farflung.node.disk_room import Room
from farflung.node.events import EventLog
from farflung.node.life_watch import LifeWatch
from farflung.node.pipeline import Pipeline
from farflung.protocol.accord import Word
from farflung.protocol.errors import DiskFull
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import Life
from farflung.protocol.roll import Roll
from farflung.sims import clock

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


def test_nothing_follows_from_a_call_that_the_disk_has_no_room_for_until_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        me, watch, kept = watching(monkeypatch, lost=(1, 2))

        def full() -> None:
            raise DiskFull("no room", remedy="free space in /s")

        told = list[int]()
        monkeypatch.setattr(watch, "_tell", lambda life: told.append(life.stage))
        watch._roll.renewed[1] = Life(1, 1, B)
        usual, watch._keep = watch._keep, full
        assert not watch.follow(1.0) and not watch.follow(2.0) and not me.went and not told
        watch._keep = usual
        assert watch.follow(3.0) and me.went == [2] and kept == [1] and told == [1]

    clock.run(main())


def test_nobody_is_appointed_while_the_disk_has_no_room_for_it() -> None:
    """Or another one would be after a restart."""

    async def main() -> None:
        log, told = EventLog(None, swarm="s", peer="aa"), list[str]()
        log.subscribe(lambda event: told.append(event["event"]))
        signer = Ed25519Signer(bytes(32))
        roll = SimpleNamespace(appointments={}, swarm=bytes(32))

        def keep() -> None:
            if len(told) < 2:
                raise DiskFull("no room", remedy="free space in /s")

        lab: Any = SimpleNamespace(roll=roll, _signer=signer, _log=log, _keep=keep, _room=Room(log, "its appointments"))
        Pipeline._appoint(lab, 1, A)
        assert not roll.appointments and told == ["disk.full"]
        told.append("somebody makes room")
        Pipeline._appoint(lab, 1, A)
        assert list(roll.appointments) == [1] and told[2:] == ["disk.full", "stage.founded"]

    clock.run(main())


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
