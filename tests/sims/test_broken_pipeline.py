"""The check of the check: a pipeline's recovery that is broken on purpose, each time caught by the judges.

As in `test_broken`, `CAUGHT` has the first seed of 0 to 199 that shows it. Run as a script this module looks for them anew:
`python tests/sims/test_broken_pipeline.py [NAME …]`.
"""

from dataclasses import replace

import pytest
from tests.sims.breaking import Broken
from tests.thorough import mostly
from torch import Tensor

from farflung.node import shadows
from farflung.node.renewal import Renewal
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_step import OpenStep
from farflung.protocol import accord
from farflung.protocol.keys import PeerId
from farflung.protocol.roll import Roll
from farflung.sims.chaos_pipeline import run_scene
from farflung.sims.stage_losses import Blow, Scene, What, Whom, draw_scene


def run(name: str, seed: int) -> list[str]:
    """What is found in the seed's scene, but where only one thing shows what is broken."""
    dynamic = name == "counts_what_was_given_up_by_open_routes"
    if dynamic or name == "counts_what_was_given_up":
        scene = replace(WRONGLY_SUSPECTED, dynamic=dynamic)
    elif name == "fewer_stages_than_enough_decide":
        scene = replace(CUT_APART, blows=(*CUT_APART.blows, Blow(at=5.0, what=What.CUT, whom=Whom.STAGES, which=(0, 1), for_s=400.0)))  # fmt: skip
    else:
        scene = draw_scene(seed)
    return run_scene(seed, scene, keep=False, stop_when_broken=True).violations


broken = Broken(run, neighbours=8)

WRONGLY_SUSPECTED = Scene(
    stages=2,
    layers=2,
    placed=(0, 1, 1),
    newcomers=0,
    regions=(0, 0, 0),
    skips=False,
    shadows=0.0,
    delay_steps=0,
    tied=True,
    drop=0.0,
    blows=tuple(
        Blow(at=at, what=What.PAUSE, whom=Whom.FIRST, which=(1,), for_s=18.0) for at in (7.3, 45.7, 87.1, 128.9, 167.3)
    ),
)
"""One of two peers stands still in a step, and goes on when others have done its part."""

CUT_APART = replace(
    WRONGLY_SUSPECTED,
    stages=3,
    layers=3,
    placed=(0, 1, 1, 1, 2, 2, 2),
    newcomers=2,
    regions=(0,) * 9,
    tied=False,
    blows=(Blow(at=1.0, what=What.COME), Blow(at=2.0, what=What.COME)),
)
"""With machines enough for all stages on the side where stage 0 is not."""


# ---- who begins a stage anew, and when --------------------------------------------------------------------------------


@broken
def nobody_begins_a_lost_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.node.stage_peer.begins", lambda *_: {})


@broken
def begins_a_stage_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost_after_a_while(self: Roll, now: float, *, held: int) -> tuple[int, ...]:
        early = self._listens_since is None or now < self._listens_since + 100.0
        return () if early or held == 1 else (1,)

    monkeypatch.setattr(Roll, "lost", lost_after_a_while)


@broken
def fewer_stages_than_enough_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accord, "enough", lambda stages, voters: True)


# ---- what it is made of ----------------------------------------------------------------------------------------------


@broken
def makes_it_of_another_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = Renewal._shadow

    async def wrong(self: Renewal, holders: list[PeerId]) -> Tensor | None:
        found = await shadow(self, holders)
        return None if found is None else found.flip(0)

    monkeypatch.setattr(Renewal, "_shadow", wrong)
    monkeypatch.setattr(StageLearner, "misfit", lambda self, pairs, boundary: 0.0)


@broken
def goes_on_with_half_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = Renewal._go_on

    async def wrong(self: Renewal) -> None:
        await go_on(self)
        params = self._learner.outer.params
        params[len(params) // 2 :] = 0.0

    monkeypatch.setattr(Renewal, "_go_on", wrong)


# ---- what counts -----------------------------------------------------------------------------------------------------


@broken
def counts_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = OpenStep.settle
    monkeypatch.setattr(OpenStep, "settle", lambda self, home, *, counts: settle(self, home, counts=True))


@broken
def counts_what_was_given_up_by_open_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = OpenStep.settle
    monkeypatch.setattr(OpenStep, "settle", lambda self, home, *, counts: settle(self, home, counts=True))


@broken
def copies_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "filled", lambda *_: 1e12)


# ---- what catches them -------------------------------------------------------------------------------------------------

CAUGHT: dict[str, tuple[int, str]] = {
    "nobody_begins_a_lost_stage": (2, "not well"),
    "begins_a_stage_that_is_there": (0, "though it was there"),
    "fewer_stages_than_enough_decide": (0, "which nobody decided"),
    "makes_it_of_another_stage": (2, "of nothing that it ever was"),
    "goes_on_with_half_of_what_it_has": (11, "not as it ever was"),
    "counts_what_was_given_up": (17, "both count"),
    "counts_what_was_given_up_by_open_routes": (0, "both count"),
    "copies_cost_nothing": (0, "of copies when it got one more"),
}
"""Name → first seed, and what is said."""

LONG = {"nobody_begins_a_lost_stage", "begins_a_stage_that_is_there", "copies_cost_nothing"}
"""Whose swarms take half a minute to play."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", mostly(set(broken) - LONG, broken))
def test_what_is_broken_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = CAUGHT[name]
    assert said in broken.first_violation(name, first, monkeypatch)


if __name__ == "__main__":
    broken.search()
