"""A run as the pictures need it: one name and colour per peer, what it did when, smoothed losses, shared
token counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from farflung.node.events import Event
from farflung.sims.facts import RunFacts
from farflung.sims.summary import Events
from farflung.sims.svg import MUTED, SERIES, STATES


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What all pictures of a run share: data, and one colour and name per peer."""

    events: Events
    run: RunFacts

    @cached_property
    def peers(self) -> list[str]:
        """Public keys in the order of the facts, then those that only events know."""
        listed = [facts.peer for facts in self.run.peers]
        return [*listed, *(peer for peer in self.events if peer not in listed)]

    @cached_property
    def names(self) -> dict[str, str]:
        """Name for people of every peer."""
        given = {facts.peer: facts.name for facts in self.run.peers}
        return {peer: given.get(peer, peer[:12]) for peer in self.peers}

    @cached_property
    def colours(self) -> dict[str, str]:
        """Peers beyond the palette share the muted colour: more hues than eight cannot be told apart."""
        return {peer: SERIES[n] if n < len(SERIES) else MUTED for n, peer in enumerate(self.peers)}

    def of(self, peer: str, *kinds: str) -> list[Event]:
        """Events of these kinds by one peer."""
        return [event for event in self.events.get(peer, ()) if event["event"] in kinds]


def state_spans(scene: Scene, peer: str) -> list[tuple[float, float, str]]:
    """(from, to, state) in unix seconds. A span ends with the next state, or with the last thing heard of
    that life.
    """
    spans: list[tuple[float, float, str]] = []
    state, since, last = "", 0.0, 0.0
    for event in scene.events.get(peer, ()):
        kind = event["event"]
        new = "joining" if kind == "node.start" else event["state"] if kind == "node.state" else state
        if new and new not in STATES:
            new = "waiting"
        if kind == "node.start" or kind == "node.stop" or new != state:
            if state:
                # After a kill nobody says when it ended: the last event of that life does.
                spans.append((since, last if kind == "node.start" else event["time"], state))
            state, since = "" if kind == "node.stop" else new, event["time"]
        last = event["time"]
    if state:
        kills = [i.time for i in scene.run.timeline if i.peer == peer and i.what == "kill" and i.time >= last]
        spans.append((since, kills[0] if kills else last, state))
    return [span for span in spans if span[1] > span[0]]


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average without the bias of its start (Adam's correction)."""
    smoothed: list[float] = []
    average = 0.0
    for number, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**number))
    return smoothed


def swarm_tokens(scene: Scene) -> dict[str, dict[float, int]]:
    """For every peer, tokens that all workers together had trained at the times of its steps."""
    steps = sorted((event["time"], event["tokens"], peer) for peer in scene.peers for event in scene.of(peer, "step"))
    total = 0
    at: dict[str, dict[float, int]] = {peer: {} for peer in scene.peers}
    for time, tokens, peer in steps:
        total += tokens
        at[peer][time] = total
    return at
