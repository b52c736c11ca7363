"""What `farflung bench pipeline` found, and the words that its tables and its page share."""

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.sims.pipeline_measure import DeathFigures, PlanFigures
from farflung.training.pipeline_simulate import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that the processes did."""

    plans: tuple[PlanFigures, ...]
    codecs: tuple[PlanFigures, ...]
    """Steps of the full plan."""
    deaths: tuple[DeathFigures, ...]
    ran: Timeline
    """The last step of the plan that skips."""
    simulated: Timeline


def percent(shares: Sequence[float]) -> str:
    """Mean, least and most."""
    return f"{100 * sum(shares) / len(shares):.0f} % ({100 * min(shares):.0f} to {100 * max(shares):.0f})"


NOTES = (
    "Computing is rehearsed: every operation really computes, and then sleeps until it has taken as long as on its peer's machine; links are shaped in "
    "user space inside the transport. Nothing in the simulation is fitted to what was measured.",
    "* steps of the other full plan, whose gradients are the same, times the seconds of this one.",
    "bytes: acknowledged on TLS connections, both ways, over the tokens that cross; control messages are not among them.",
)
