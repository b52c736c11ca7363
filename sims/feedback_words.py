"""The curves of `farflung bench feedback` by problem, and what to call them: what its table and its page have in common."""

from collections.abc import Sequence
from typing import Any

from farflung.sims.feedback_curves import Curve

Curves = dict[str, list[Curve]]
"""Problem -> its curves, the exact codec first where there is one."""

WORDS: dict[str, tuple[str, Any]] = {
    "quadratic": ("Quadratic, 300 rounds: distance to the optimum, 1 at the start", ".1e"),
    "downlink": ("Quadratic, exact contributions, coded means: what becomes of an owner's residual", ".1e"),
    "warm": ("Small model, warm start: held-out loss, nats per token", ".3f"),
    "cold": ("Small model, random weights, high rate: held-out loss, nats per token", ".3f"),
}
"""Problem -> (title, format of its values)."""


def finals(curves: Sequence[Curve]) -> dict[str, dict[str, float]]:
    """Codec -> kind of feedback -> the last value."""
    found: dict[str, dict[str, float]] = {}
    for curve in curves:
        found.setdefault(curve.codec, {})[curve.feedback] = curve.values[-1]
    return found


def kinds(curves: Sequence[Curve]) -> list[str]:
    """The kinds of feedback, in the order in which they were measured."""
    return list(dict.fromkeys(curve.feedback for curve in curves))
