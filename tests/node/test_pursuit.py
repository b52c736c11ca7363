"""A node whose link is too slow to come to the head of the swarm says so, with what was measured and what helps."""

import json
from dataclasses import replace

import pytest

from farflung.node.pursuit import LONG_S, STRETCH_S, Mark, slowness
from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.links import LinkModel
from farflung.sims.simulation import simulate

BEGUN = Mark(at=0.0, head=10, held=-1, chunks=0, downloads=1, received_bytes=0)
LATER = replace(BEGUN, at=STRETCH_S, head=30, received_bytes=1_200_000)
FOLLOWS = replace(BEGUN, held=8)


def found(before: Mark, now: Mark, first: Mark = BEGUN) -> float | str | None:
    """What is said of a download of a hundred chunks: how long it takes yet, None that it has no end, or nothing."""
    slow = slowness(first, before, now, chunks=100, round_bytes=50_000.0)
    return "nothing" if slow is None else slow.left_s


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (BEGUN, replace(LATER, chunks=20), "nothing"),
        (BEGUN, replace(LATER, chunks=1), 99 * STRETCH_S),
        (BEGUN, replace(LATER, chunks=20, received_bytes=900_000), None),
        (BEGUN, LATER, None),
        (replace(BEGUN, chunks=7), replace(LATER, chunks=7), None),
        (replace(BEGUN, chunks=100), replace(LATER, chunks=100), "nothing"),
        (BEGUN, replace(LATER, held=9), "nothing"),
        (FOLLOWS, replace(LATER, held=29), "nothing"),
        (FOLLOWS, replace(LATER, held=28), None),
        (FOLLOWS, replace(LATER, held=12), None),
        (FOLLOWS, replace(LATER, chunks=50, downloads=3), None),
    ],
)
def test_what_comes_of_two_minutes(before: Mark, now: Mark, said: float | str | None) -> None:
    assert found(before, now) == said
    assert said in ("nothing", None) or 99 * STRETCH_S > LONG_S


def test_the_sentence_has_what_was_measured_and_what_helps() -> None:
    slow = slowness(BEGUN, BEGUN, LATER, chunks=100, round_bytes=50_000.0)
    assert slow is not None and slow.lap_s == STRETCH_S / 20
    assert "it falls behind: this node's link brings 10 kB/s" in slow.reason
    assert "one every 6 s, need 8.33, beside control messages" in slow.reason and "`inner_steps`" in slow.reason
    no_rounds = slowness(BEGUN, BEGUN, replace(LATER, head=10), chunks=100, round_bytes=50_000.0)
    assert no_rounds is not None and no_rounds.lap_s == STRETCH_S and no_rounds.rounds_bytes_per_s == 0.0


@pytest.mark.parametrize(("down_bytes_per_s", "says"), [(2_500.0, True), (2.5e5, False)])
def test_a_newcomer_behind_a_link_that_rounds_and_control_messages_fill_says_so(
    down_bytes_per_s: float, says: bool
) -> None:
    """Of a state of 96 kB chunks come, and no faster than rounds of 12 kB every 4 s make them old."""
    pace = Pace(laps=Laps.fixed(4, 3), samples_per_step=2, tokens_per_sample=8, total_steps=1 << 40)
    starts = (Start(at=0.0, peer=0), Start(at=10.0, peer=1))
    wire = Wire(fragments=1, pace=pace, numel=12_000, step_s=(1.0, 1.0))
    plan = toy_plan(2, Schedule(num_peers=2, duration_s=200.0, faults=starts), wire, calm_s=0.0)
    plan = replace(plan, links=lambda peer: LinkModel(down_bytes_per_s=down_bytes_per_s) if peer else LinkModel())
    report = simulate(plan, keep=True)
    assert report.violations == [] and report.members == 2 - says
    told = [json.loads(line.split(maxsplit=3)[3]) for line in report.events if " 1 link.slow " in line]
    assert bool(told) == says
    states = [line for line in report.events if " 1 node.state " in line]
    if says:
        assert 0.5 * down_bytes_per_s < told[-1]["bytes_per_s"] <= down_bytes_per_s
        assert 3.5 < told[-1]["lap_s"] < 5.0 and told[-1]["rounds_bytes_per_s"] > 2_500
        assert any(told[0]["reason"] in line for line in states), "in the live view, and `status`"
