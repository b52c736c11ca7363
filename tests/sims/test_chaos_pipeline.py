"""Pipelines that lose stages under virtual time: every invariant, from a seed and by hand."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from tests.thorough import further

from farflung.protocol.manifest_sections import CHECKFREE, CHECKFREE_PLUS, LADDER
from farflung.sims.chaos_pipeline import StageReport, run_dark, run_scene, run_seed
from farflung.sims.stage_losses import LAST, Blow, Scene, What, Whom, draw_scene

SEEDS = [3, 13]
"""`make soak` runs 1,000."""


DARK = [7, *further(3)]
"""Of 3, three stages are begun anew."""


def scene(*blows: Blow, placed: tuple[int, ...] = (0, 1, 2, 3), newcomers: int = 3) -> Scene:
    """Four stages, with copies."""
    return Scene(
        stages=max(placed) + 1,
        layers=max(placed) + 1,
        placed=placed,
        newcomers=newcomers,
        regions=tuple(number % 2 for number in range(len(placed) + newcomers)),
        skips=False,
        shadows=1.0,
        delay_steps=0,
        tied=False,
        drop=0.0,
        blows=blows,
    )


def made(report: StageReport) -> list[str]:
    """Lines of stages that were begun anew."""
    return [line for line in report.events if " stage.made " in line]


@pytest.mark.parametrize("seed", DARK)
def test_all_stages_train_on_when_everybody_has_lost_power(seed: int) -> None:
    report = run_dark(seed, keep=False)
    assert report.violations == [] and report.begun_anew == {3: 3, 7: 0}[seed]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seeded_losses_break_no_invariant_and_repeat_themselves() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        reports = list(pool.map(run_seed, [*SEEDS, SEEDS[1]]))
    for report in reports:
        assert report.violations == [], f"seed {report.seed}"
    first, again = reports[1], reports[-1]
    assert first.events == again.events, "same seed, same log"
    assert sum(report.begun_anew for report in reports) > 2


@pytest.mark.timeout(120)
def test_who_leaves_is_killed_and_comes_back_is_waited_for_once() -> None:
    """The one data node says goodbye, is killed meanwhile, and is back before its absence is over: the story ends all the same."""
    leaves = Blow(at=5.0, what=What.LEAVE, whom=Whom.STAGES, which=(0,), for_s=40.0)
    killed = Blow(at=5.5, what=What.KILL, whom=Whom.STAGES, which=(0,), for_s=6.0)
    report = run_scene(140, scene(leaves, killed, placed=(0, 1), newcomers=0))
    assert report.violations == [] and report.seconds < 600.0
    assert sum("start peer 0" in line for line in report.events) == 1


def test_every_kind_of_blow_is_drawn() -> None:
    scenes = [draw_scene(seed) for seed in range(300)]
    blows = [blow for scene in scenes for blow in scene.blows]
    assert {blow.what for blow in blows} == set(What) and {blow.whom for blow in blows} == set(Whom)
    assert {scene.stages for scene in scenes} == {2, 3, 4, 5, 6}
    assert {scene.recovery for scene in scenes} == {LADDER, CHECKFREE, CHECKFREE_PLUS}
    ways = {(scene.dynamic, scene.swaps, scene.skips) for scene in scenes}
    assert ways == {(False, swaps, skips) for swaps in (0, 1, 2) for skips in (False, True)} | {
        (True, 0, False),
        (True, 0, True),
    }
    peers = {count for scene in scenes for count in Counter(scene.placed).values()}
    assert peers == {1, 2}
    lost = {blow.which for blow in blows if blow.whom is Whom.STAGES}
    assert {(0, LAST), (1, 2), (0,), (LAST,)} <= lost
    assert scenes == [draw_scene(seed) for seed in range(300)]


def test_two_neighbours_are_lost_and_who_is_called_for_one_as_well() -> None:
    report = run_scene(
        1,
        scene(
            Blow(at=5.0, what=What.POWER, whom=Whom.STAGES, which=(1, 2)),
            Blow(at=6.0, what=What.COME),
            Blow(at=6.0, what=What.KILL, whom=Whom.CALLED),
        ),
    )
    assert report.violations == [] and report.begun_anew == 3
    assert len([line for line in report.events if "kill peer" in line or "loses power" in line]) == 3


def test_first_and_last_are_lost_and_the_first_comes_back() -> None:
    report = run_scene(2, scene(Blow(at=5.0, what=What.KILL, whom=Whom.STAGES, which=(0, LAST))))
    assert report.violations == [] and report.begun_anew == 1
    assert len(made(report)) == 1 and '"rung": "shadow"' in made(report)[0]
