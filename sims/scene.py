"""A run as the pictures need it: its figures, one name and colour per peer, shared counts of tokens and bytes."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from farflung.node.events import Event, grown
from farflung.sims.facts import RunFacts, told_regions
from farflung.sims.logs import Events, stage_of
from farflung.sims.pipeline_log import LoggedStep, logged_steps
from farflung.sims.spans import Span, Stretch, compute_spans, pauses, phase_spans, silent_ends, state_spans
from farflung.sims.summary import outer_losses, summarise
from farflung.sims.svg import MUTED, SERIES


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What all pictures of a run share: data, and one colour and name per peer."""

    events: Events
    run: RunFacts
    label: str = ""
    """Of the run among others; empty when there is one."""
    place: int = 0
    """Of the run among others, from 0: their labels may differ in what an id cannot have."""

    @cached_property
    def figures(self) -> dict[str, Any]:
        """See `summary.summarise`."""
        return summarise(self.events, self.run)

    @cached_property
    def peers(self) -> list[str]:
        """Public keys in the order of the facts, then those that only events know."""
        return list(dict.fromkeys([*(facts.peer for facts in self.run.peers), *self.events]))

    @cached_property
    def names(self) -> dict[str, str]:
        """Name for people of every peer."""
        given = {facts.peer: facts.name for facts in self.run.peers}
        return {peer: given.get(peer, peer[:12]) for peer in self.peers}

    @cached_property
    def colours(self) -> dict[str, str]:
        """Peers beyond the palette share the muted colour: more hues than eight cannot be told apart."""
        return {peer: SERIES[n] if n < len(SERIES) else MUTED for n, peer in enumerate(self.peers)}

    @property
    def slug(self) -> str:
        """What the ids of its pictures end with, in a page that tells of several runs no other's: its place, and the label as far as ids can have it."""
        return f"{self.place}-{re.sub(r'[^a-z0-9]+', '-', self.label.lower())}" if self.label else ""

    @property
    def seconds(self) -> float:
        """Of the whole run, at least one."""
        return max(self.run.ended - self.run.started, 1.0)

    @cached_property
    def outer(self) -> list[Event]:
        """See `summary.outer_losses`."""
        return outer_losses(self.events)

    @cached_property
    def outer_few(self) -> list[Event]:
        """The same of evaluations that read a few samples only."""
        return outer_losses(self.events, "few_loss")

    @cached_property
    def steps(self) -> list[LoggedStep]:
        """Of a pipeline; empty without one."""
        return logged_steps(self.events)

    @cached_property
    def regions(self) -> dict[str, str]:
        """Of the peers whose region is known, or that have told one."""
        return told_regions(self.events) | {facts.peer: facts.region for facts in self.run.peers if facts.region}

    @property
    def has_losses(self) -> bool:
        """Whether anything was learnt: where only costs are simulated there is no loss."""
        return bool(self.outer) or any(e["loss"] is not None for peer in self.peers for e in self.of(peer, "step"))

    @cached_property
    def seers(self) -> list[str]:
        """Peers that see a loss when they train, of a pipeline the data nodes; while there are few enough to tell apart."""
        found = [peer for peer in self.peers if any(event["loss"] is not None for event in self.of(peer, "step"))]
        return found if len(found) <= len(SERIES) else []

    def of(self, peer: str, *kinds: str) -> list[Event]:
        """Events of these kinds by one peer."""
        return [event for event in self.events.get(peer, ()) if event["event"] in kinds]

    def states(self, peer: str) -> list[Span]:
        """See `spans.state_spans`."""
        return state_spans(self.events.get(peer, ()), self._ends.get(peer, ()))

    def computed(self, peer: str) -> list[Span]:
        """See `spans.compute_spans`."""
        return compute_spans(self.events.get(peer, ()), self.pauses.get(peer, ()))

    def phases(self, peer: str) -> list[Span]:
        """See `spans.phase_spans`."""
        return phase_spans(self.events.get(peer, ()), self._ends.get(peer, ()), self.pauses.get(peer, ()))

    @cached_property
    def pauses(self) -> dict[str, list[Stretch]]:
        """See `spans.pauses`."""
        return pauses(self.run.timeline, self.run.ended)

    @cached_property
    def _ends(self) -> dict[str, list[float]]:
        return silent_ends(self.run)

    def tokens_at(self, times: Sequence[float]) -> list[int]:
        """What all workers together had trained by then; of a pipeline the data nodes, for the other stages compute the same tokens."""
        steps = sorted(
            (e["time"], e["tokens"]) for peer in self.peers for e in self.of(peer, "step") if stage_of(e) == 0
        )
        moments = [at for at, _ in steps]
        totals = list(accumulate((tokens for _, tokens in steps), initial=0))
        return [totals[bisect_right(moments, time)] for time in times]

    def bytes_at(self, times: Sequence[float]) -> list[int]:
        """What all peers together had sent by then, as their `net` events have it."""
        sent = sorted(found for peer in self.peers for found in grown(self.events.get(peer, ()), "sent_bytes"))
        moments = [at for at, _ in sent]
        totals = list(accumulate((more for _, more in sent), initial=0))
        return [totals[bisect_right(moments, time)] for time in times]


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average without the bias of its start (Adam's correction)."""
    smoothed: list[float] = []
    average = 0.0
    for number, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**number))
    return smoothed


def swarm_tokens(scene: Scene) -> dict[str, dict[float, int]]:
    """For every peer, tokens that all workers together had trained at the times of its steps; of a pipeline the data nodes, for the other stages
    compute the same tokens."""
    steps = sorted(
        (event["time"], event["tokens"], peer)
        for peer in scene.peers
        for event in scene.of(peer, "step")
        if stage_of(event) == 0
    )
    total = 0
    at: dict[str, dict[float, int]] = {peer: {} for peer in scene.peers}
    for time, tokens, peer in steps:
        total += tokens
        at[peer][time] = total
    return at
