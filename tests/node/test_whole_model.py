"""Held-out loss of a pipeline's whole model, where a device has no room for a part of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farflung.node import whole_model
from farflung.node.borrowing import Moving
from farflung.node.whole_model import Versions, WholeModel
from farflung.protocol.errors import DiskFull
from farflung.training.errors import NotEnoughMemory


class Door:
    async def run(self, work: Any, *arguments: object) -> Any:
        return work(*arguments)


@pytest.mark.parametrize("lacking", [None, "enter", "pass", "leave", "disk"])
def test_without_room_the_model_is_kept_all_the_same(lacking: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def part(name: str) -> Any:
        def work(*_: object) -> float:
            computed.append(name)
            if name == lacking:
                raise NotEnoughMemory(f"cuda has no room for {name}")
            return 2.5

        return work

    async def borrow(self: WholeModel, recipe: Any, version: int) -> Moving:
        outer: Any = SimpleNamespace(params=torch.full((2,), float(recipe.part)))
        return Moving(outer, version - recipe.part, version)

    monkeypatch.setattr(whole_model, "stage_recipe", lambda whole, stage: SimpleNamespace(part=stage))
    monkeypatch.setattr(whole_model, "pass_through", part("pass"))
    monkeypatch.setattr(WholeModel, "_borrow", borrow)
    kept: list[tuple[int, list[float], Versions]] = []

    def keep(version: int, stages: Any, versions: Versions) -> None:
        kept.append((version, [float(one[0]) for one in stages.values()], versions))
        if lacking == "disk":
            raise DiskFull("no room", remedy="free space in /s")

    made: Any = WholeModel(
        network=SimpleNamespace(),  # type: ignore[arg-type]
        roll=SimpleNamespace(stages=3),  # type: ignore[arg-type]
        recipe=SimpleNamespace(whole=SimpleNamespace(model=None)),  # type: ignore[arg-type]
        learner=SimpleNamespace(  # type: ignore[arg-type]
            outer=SimpleNamespace(params=torch.zeros(2)),
            replica=SimpleNamespace(runtime=None),
            enter=part("enter"),
            leave=part("leave"),
        ),
        doors=SimpleNamespace(learner=Door(), side=Door()),  # type: ignore[arg-type]
        refused=lambda *_, **__: None,
        version=lambda: 7,
        keep=keep,
    )
    if lacking in (None, "disk"):
        assert asyncio.run(made.evaluate()) == 2.5 and computed == ["enter", "pass", "pass", "leave"]
    else:
        with pytest.raises(NotEnoughMemory, match=f"no room for {lacking}"):
            asyncio.run(made.evaluate())
        assert computed[-1] == lacking and computed.count(lacking) == 1, "nothing is computed after that"
    assert kept == [(7, [0.0, 1.0, 2.0], {0: (7, 7), 1: (6, 7), 2: (5, 7)})]
