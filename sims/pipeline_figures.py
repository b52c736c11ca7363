"""What `farflung bench pipeline` found, and the words that its tables and its page share."""

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.sims.pipeline_measure import DeathFigures, PlanFigures
from farflung.sims.pipeline_skipping import SkippingRow
from farflung.sims.pipeline_task import COLUMNS, FULL, SKIPPING
from farflung.sims.recovery_words import number_or_dash
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


def plan_cells(one: PlanFigures) -> list[str]:
    """Plan, simulated and measured seconds, ratio, learning seconds, utilisation, what was simulated of it, steps and seconds to the target."""
    return [
        one.plan,
        f"{one.simulated_s:.2f}",
        f"{one.measured_s:.2f}",
        f"{one.ratio:.3f}",
        number_or_dash(one.learning_s, ".2f"),
        _percent(one.utilisation),
        _percent(one.utilisation_simulated),
        number_or_dash(one.steps_to_target, ".1f"),
        number_or_dash(one.seconds_to_target, ".0f") + (" *" if one.computed else ""),
    ]


def codec_cells(one: PlanFigures) -> list[str]:
    """Codec, bytes a token and boundary, simulated and measured seconds, ratio."""
    seconds = (f"{one.simulated_s:.2f}", f"{one.measured_s:.2f}")
    return [one.codec, f"{one.bytes_per_token_and_boundary:.1f}", *seconds, f"{one.ratio:.3f}"]


DEATH_HEADINGS = (
    "plan",
    "peer",
    "moment",
    "seconds",
    "times normal",
    "simulated without it",
    "rerouted",
    "of them shortened",
    "cut",
    "void",
)


def death_cells(one: DeathFigures) -> list[str]:
    """In the order of `DEATH_HEADINGS`."""
    seconds = (f"{one.seconds:.2f}", f"{one.times_normal:.2f}", number_or_dash(one.simulated_without_s, ".2f"))
    counts = (one.rerouted, one.shortened, one.cut, one.void)
    return [one.plan, f"{one.peer} (stage {one.stage})", one.moment, *seconds, *map(str, counts)]


USED_HEADINGS = ("peer", *(f"{plan}{of}" for plan in (COLUMNS, FULL, SKIPPING) for of in ("", ", simulated")))


def used_cells(plans: Sequence[PlanFigures]) -> list[list[str]]:
    """For each peer its share of the step in operations, measured and simulated, plan by plan."""
    shares = [shares for one in plans for shares in (one.utilisation, one.utilisation_simulated)]
    return [
        [str(peer), *(f"{100 * share:.0f} %" for share in of_peer)]
        for peer, of_peer in enumerate(zip(*shares, strict=True))
    ]


def skipping_cells(row: SkippingRow) -> list[str]:
    """How it was trained, perplexity of the whole model, and with each share of stages left out."""
    return [row.trained, f"{row.perplexity:.2f}", *(row.told(share) for share in row.left_out)]


def _percent(shares: Sequence[float]) -> str:
    """Mean, least and most."""
    return f"{100 * sum(shares) / len(shares):.0f} % ({100 * min(shares):.0f} to {100 * max(shares):.0f})"


NOTES = (
    "Computing is rehearsed: every operation really computes, and then sleeps until it has taken as long as on its peer's machine; links are shaped in "
    "user space inside the transport. Nothing in the simulation is fitted to what was measured.",
    "* steps of the other full plan, whose gradients are the same, times the seconds of this one.",
    "bytes: acknowledged on TLS connections, both ways, over the tokens that cross; control messages are not among them.",
)
