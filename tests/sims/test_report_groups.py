"""What a report shows of a swarm of several groups."""

from typing import Any

import pytest
from matplotlib.axes import Axes

from farflung.node.events import Event
from farflung.sims.facts import RunFacts
from farflung.sims.plots import plot_rounds
from farflung.sims.report_run import _missed_table, letters_by_round, reason_letters
from farflung.sims.scene import Scene
from farflung.sims.series import few_curves, outer_curves
from farflung.sims.svg import BAD

A, B = "aa" * 32, "bb" * 32
GROUP = "99" * 32


def says(peer: str, at: float, kind: str, group: str = "", **fields: Any) -> Event:
    event = {"time": at, "event": kind, "peer": peer, "height": 1, "version": 1, "step": 1, **fields}
    return event | ({"group": group} if group else {})


def scene(*events: Event) -> Scene:
    by_peer: dict[str, list[Event]] = {A: [], B: []}
    for event in sorted(events, key=lambda event: float(event["time"])):
        by_peer[event["peer"]].append(event)
    return Scene(events=by_peer, run=RunFacts(name="s", started=0.0, ended=100.0, peers=[]))


def evaluated(peer: str, at: float, version: int, loss: float, tokens: int, group: str = "") -> Event:
    return says(peer, at, "outer.eval", group, version=version, loss=loss, few_loss=loss + 1, tokens=tokens, seconds=1.0, samples=4)  # fmt: skip


def trained(peer: str, at: float, tokens: int, group: str = "") -> Event:
    return says(peer, at, "step", group, tokens=tokens, loss=None, samples=[], seconds=1.0)


def test_each_group_has_a_curve_of_its_own_in_the_order_of_time() -> None:
    """The second group is behind in versions: one line through both would go to and fro."""
    steps = [trained(peer, at + 0.5, 100, group) for at in range(0, 40, 10) for peer, group in ((A, ""), (B, GROUP))]
    first = [evaluated(A, 10.0, 5, 4.0, 70), evaluated(A, 30.0, 9, 3.0, 130)]
    other = [evaluated(B, 20.0, 4, 4.5, 60, GROUP), evaluated(B, 40.0, 6, 3.5, 90, GROUP)]
    curves = outer_curves(scene(*steps, *first, *other))
    assert {group: (curve["seconds"], curve["loss"]) for group, curve in curves.items()} == {
        "": ([10.0, 30.0], [4.0, 3.0]),
        GROUP: ([20.0, 40.0], [4.5, 3.5]),
    }
    assert [curve["tokens"] for curve in curves.values()] == [[200, 600], [400, 800]], "of the whole swarm"
    assert few_curves(scene(*steps, *first, *other))[GROUP]["loss"] == [5.5, 4.5]


def test_tokens_of_one_group_are_those_that_rounds_have_counted() -> None:
    curves = outer_curves(scene(trained(A, 1.0, 100), evaluated(A, 10.0, 5, 4.0, 70)))
    assert curves[""]["tokens"] == [70]


def committed(at: float, number: int, group: str = "") -> Event:
    return says(A, at, "round.commit", group, height=number, version=number, round=number, contributors={A: 4}, samples={}, parts_left_out=0, view=[A], digest="d" * 64, lap=1, seconds=2.0, contributed=True, up_bits=8.0, down_bits=8.0, owed=None, delay_steps=1)  # fmt: skip


def missed(at: float, number: int, reason: str, group: str = "") -> Event:
    return says(B, at, "round.missed", group, round=number, reason=reason)


def test_a_missed_round_is_marked_in_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups have a round 7, and a peer missed that of the second one; of the first one's round 8 there is no commit."""
    one = scene(committed(1.0, 7), committed(2.0, 7, GROUP), missed(3.0, 7, "late", GROUP), missed(4.0, 8, "gone"))
    told = one.figures["rounds_missed"]
    letters = letters_by_round(told, reason_letters(told))
    assert letters == {(7, GROUP): "a", (8, ""): "b"}
    bars: list[tuple[float, str]] = []
    bar = Axes.bar

    def note(axis: Axes, x: float, height: float, **look: Any) -> Any:
        bars.append((x, look["color"]))
        return bar(axis, x, height, **look)

    monkeypatch.setattr(Axes, "bar", note)
    plot_rounds(one, letters)
    assert [(x < 7, colour == BAD) for x, colour in bars] == [(True, False), (False, True)]
    page = str(_missed_table(told, reason_letters(told)))
    assert '<th scope="col">group</th>' in page and GROUP[:12] in page and "first" in page
