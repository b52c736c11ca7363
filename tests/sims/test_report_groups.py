"""What a report shows of a swarm of several groups."""

from typing import Any

from farflung.node.events import Event
from farflung.sims.facts import RunFacts
from farflung.sims.scene import Scene
from farflung.sims.series import few_curves, outer_curves

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
