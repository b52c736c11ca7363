"""Which peer comes of a stage: with what state, and of one that somebody else has begun anew meanwhile."""

import asyncio
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from farflung.node import peer_making
from farflung.node.events import EventLog
from farflung.node.peer_making import OUTSIDE, PeerMaking
from farflung.node.renewal import Overtaken
from farflung.node.status import NodeStatus


class Learner:
    pass


class Start:
    """`begin` raises or returns what it is told."""

    def __init__(self, held: object) -> None:
        self.held = held

    def called(self, stage: Any) -> Any:
        return nullcontext()

    async def begin(self, stage: Any, learner: Learner, storage: Any, doors: Any) -> object:
        if self.held is Overtaken:
            raise Overtaken
        return self.held

    def peer(self, stage: Any, learner: Learner, facilities: Any, prepare: Any) -> tuple[str, Any]:
        return "a peer", facilities


@pytest.mark.parametrize("held", [None, "what it held", Overtaken])
def test_a_stage_without_state_is_served_and_one_that_is_overtaken_let_go_of(
    held: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Learner]] = []
    moved: list[tuple[int, bool]] = []

    async def learner(*_: object) -> Learner:
        found = Learner()
        made.append(weakref.ref(found))
        return found

    async def move(stage: int) -> tuple[str, str]:
        gc.collect()
        moved.append((stage, made[0]() is None))
        return "another peer", "its storage"

    monkeypatch.setattr(peer_making, "stage_storage", lambda swarm, life: "its storage")
    making: Any = SimpleNamespace(
        swarm=None,
        rehearsal=None,
        doors=SimpleNamespace(learner=SimpleNamespace(run=learner)),
        move=move,
        _start=Start(held),
        _data=None,
        _prepare=None,
        _say_what_it_takes=lambda recipe, runtime: None,
        _facilities=lambda storage, checkpoint_s, held: held,
    )
    recipe = SimpleNamespace(stage=1, learner=None, own=SimpleNamespace(checkpoint_s=1.0))
    stage: Any = SimpleNamespace(life=None, recipe=recipe, runtime=None)
    peer: Any = asyncio.run(PeerMaking._serve(making, stage))
    if held is Overtaken:
        assert peer == ("another peer", "its storage") and moved == [(OUTSIDE, True)]
    else:
        assert peer == (("a peer", held), "its storage") and moved == []


def test_who_asks_while_the_data_are_opened_hears_of_it() -> None:
    log, status, heard = EventLog(None, swarm="alpha", peer="aa"), NodeStatus(swarm="alpha", peer="aa"), list[str]()
    log.subscribe(status.apply)

    async def opens(_: object) -> str:
        heard.append(status.reason)
        return "the data"

    making: Any = SimpleNamespace(
        recipe=SimpleNamespace(manifest=SimpleNamespace(data=SimpleNamespace(spec="hf:some/set"))),
        doors=SimpleNamespace(side=SimpleNamespace(run=opens)),
        log=log,
        say=lambda text: None,
        _open_data=None,
    )
    dataset: Any = asyncio.run(PeerMaking._dataset(making))
    assert (dataset, heard) == ("the data", ["opening the data (hf:some/set)"])
