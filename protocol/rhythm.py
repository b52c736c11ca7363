"""When a peer offers what it has trained, and how long a round waits for those who have not: unequal peers.

A round is due when the fastest member has trained H steps, and everybody else brings what it has by then: DyLU's
H_i = v_i / max v * H (2401.09135, digest 2.7), without a number of steps that would have to be agreed upon. Heartbeats say how fast
each peer is and how long it will take, so that each can offer between the two of its steps that are next to that moment:

    due    = min over the others of when they will have made H
    offer  : when one more step would end later than due + lateness

A peer that has offered trains on for up to tau steps (`delay_steps`). What the round, in the time it usually takes, leaves of them is
hidden: a peer can be kept waiting for so long at no cost. Half of it is the grace window (Decoupled DiLoCo, 2604.21428, digest 2.8,
with gamma = 1/2), for rounds do not always take equally long; half of that again may be spent on purpose:

    hidden = tau * step_s - round_s      grace = max(hidden / 2, SHARE * H * step_s, least)      lateness = min(own step_s / 2, hidden / 4)
    least  = min(MESSAGES * round_s, MESSAGES_S)

So where rounds hide behind training, the nearest boundary is chosen, as often early as late, and no one stands for it; where
nothing is hidden, the last boundary in time. The least is what messages take: of peers that are equally fast some hear of the last commit later, and are heard
later, and where a lap is shorter than a round most of them would be late in each. Nor is anybody waited for longer because the manifest's shortest round (`min_round_s`) is not
over: where a step of one takes many of another somebody is late in each round, and the fast would stand in all of them.

Without overlap (tau = 0) nobody offers early: to offer is to stand, and who stands leaves its share of a common processor to the
fastest, which is then faster still (six nodes of the demo on two cores: 2.5 laps of work in a round instead of 5, held-out loss
1.88 instead of 1.71). There everybody makes H steps, and a round waits for up to a lap of the first, unless by their own word all who
have not offered will come later than that: whoever is half as fast is waited for, and nobody for one that needs many laps. It comes
into every so many rounds, and nothing that it has trained is lost.

Where training overlaps, a step that is longer than a whole lap of the fastest comes into every second round, or third; nobody waits for it
longer than the grace.

The last round of a run waits for one of the manifest's laps, however short its own is: what is not in it is lost (`tempo`).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

SHARE = 0.1
"""Of H steps' time, that is waited for somebody late although nothing hides it: messages and steps do not take equally long."""

MESSAGES = 1 / 4
"""Of what a round takes, where that is round trips: a commit on its way to a member, and its word that it is ready on the way back."""

MESSAGES_S = 1.0
"""And no longer, for the rest of a longer round is bytes on their way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    """What the manifest says about steps and rounds."""

    inner_steps: int
    """H: steps of the fastest member between two rounds."""
    delay_steps: int
    """tau: steps that a peer may train while a round is under way."""
    step_tokens: int
    """Tokens of one step."""

    def is_whole(self, offer: "Offer") -> bool:
        """Whether somebody has made all H steps, so that the round is due."""
        return offer.tokens >= self.inner_steps * self.step_tokens


@dataclass(frozen=True, slots=True)
class Runner:
    """A member that trains, by its own word."""

    ready_at: float
    """When it will have made H steps, seconds; in the past when it waits for a round."""
    tokens_per_s: float
    """Positive."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a member has ready for a round."""

    ready_at: float
    """When it said so, seconds."""
    tokens: int
    tokens_per_s: float
    """How fast it trains; 0 when that is not known."""


def is_due(rhythm: Rhythm, others: Iterable[Runner], *, step_s: float, round_s: float, now: float) -> bool:
    """Whether a peer between two steps, of `step_s` seconds each, should offer now; `round_s`: what a round usually takes."""
    first = min(others, key=lambda runner: runner.ready_at, default=None)
    if first is None or rhythm.delay_steps == 0:
        return False
    hidden = hidden_s(rhythm, step_s=rhythm.step_tokens / first.tokens_per_s, round_s=round_s)
    return now + step_s > first.ready_at + min(step_s / 2, hidden / 4)


def hidden_s(rhythm: Rhythm, *, step_s: float, round_s: float) -> float:
    """Seconds for which a peer that has offered can be kept waiting before it stands."""
    return max(0.0, rhythm.delay_steps * step_s - round_s)


def grace_s(rhythm: Rhythm, *, step_s: float, round_s: float) -> float:
    """Seconds that a round waits for others, once a peer with steps of `step_s` has offered."""
    lap_s = rhythm.inner_steps * step_s
    if rhythm.delay_steps == 0:
        return lap_s
    return max(hidden_s(rhythm, step_s=step_s, round_s=round_s) / 2, SHARE * lap_s, min(MESSAGES * round_s, MESSAGES_S))


def patient_until(
    rhythm: Rhythm, offers: Collection[Offer], awaited: Iterable[Runner], *, round_s: float, longest_s: float
) -> float:
    """Until when a round with these offers waits for those who train; 0 without offers. Nobody is kept waiting for more than `longest_s`.

    The grace runs from when the round is due, i.e. the first has H steps: who offered before chose to be early.
    """
    first = [offer.ready_at for offer in offers if rhythm.is_whole(offer)]
    due = min(first or [runner.ready_at for runner in awaited], default=0.0)
    ends = []
    for offer in offers:
        grace = longest_s
        if offer.tokens_per_s > 0.0:
            grace = grace_s(rhythm, step_s=rhythm.step_tokens / offer.tokens_per_s, round_s=round_s)
        early = max(0.0, due - offer.ready_at)
        ends.append(offer.ready_at + min(early + grace, longest_s))
    return min(ends, default=0.0)
