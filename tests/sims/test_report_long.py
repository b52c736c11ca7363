"""A report of a long run is no longer than one of a short run, beyond what can be seen."""

import re

from farflung.node.events import Event
from farflung.sims.facts import RunFacts
from farflung.sims.plots import plot_rounds
from farflung.sims.plots_time import plot_membership
from farflung.sims.report_run import MOST_ROUNDS, _rounds_table, letters_by_round, reason_letters
from farflung.sims.scene import Scene
from farflung.sims.series import FINEST, series_of

A = "aa" * 32
ROUND_S = 8.0


def says(at: float, kind: str, number: int, **fields: object) -> Event:
    return {"time": at, "event": kind, "peer": A, "swarm": "s", "height": number, "version": number, "step": 0, **fields}  # fmt: skip


def scene(rounds: int) -> Scene:
    """Of one peer, which misses every hundredth round."""
    events = [says(0.0, "node.start", 0, device="cpu", resumed=False)]
    for number in range(1, rounds + 1):
        at = ROUND_S * number
        events.append(says(at, "node.state", number - 1, state="training", reason=""))
        events.append(says(at + 5, "node.state", number - 1, state="round", reason=""))
        if number % 100 == 0:
            events.append(says(at + 6, "round.missed", number, round=number, reason="late"))
        events.append(says(at + 7, "round.commit", number, round=number, contributors={A: 4}, samples={}, parts_left_out=0, view=[A], digest="d" * 64, lap=1, seconds=2.0, contributed=True, up_bits=8.0, down_bits=8.0, owed=None, delay_steps=1))  # fmt: skip
    return Scene(events={A: events}, run=RunFacts(name="s", started=0.0, ended=ROUND_S * (rounds + 1), peers=[]))


def drawn(one: Scene) -> int:
    """Characters of the pictures that have something of each round."""
    missed = one.figures["rounds_missed"]
    return len(plot_membership(one)) + len(plot_rounds(one, letters_by_round(missed, reason_letters(missed))))


def test_pictures_do_not_grow_with_the_run() -> None:
    long, longer = scene(1000), scene(3000)
    assert drawn(longer) < 1.3 * drawn(long) and drawn(longer) < 150_000
    spans = series_of(longer)["membership"]["states"][A[:12]]
    assert 1 <= len(spans) <= 2 / FINEST and {what for what, _, _ in spans} >= {"training"}


def test_of_many_rounds_the_first_and_the_last_are_listed() -> None:
    page = str(_rounds_table(scene(2 * MOST_ROUNDS + 1500)))
    numbers = [int(number) for number in re.findall(r'<tr><td class="number">([0-9]+)<', page)]
    assert numbers == [*range(1, MOST_ROUNDS + 1), *range(MOST_ROUNDS + 1501, 2 * MOST_ROUNDS + 1501)]
    assert "1,500 in between are left out" in page
    short = str(_rounds_table(scene(2 * MOST_ROUNDS)))
    assert "All rounds" in short and "in between" not in short and short.count("<tr><td") == 2 * MOST_ROUNDS
