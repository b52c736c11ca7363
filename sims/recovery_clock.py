"""From curves over iterations to modelled wall-clock, and the two methods that need no training of their own.

    seconds after k iterations
        none          k T
        redundant     k T_r                  T_r as published; its training never notices a failure
        others        k T + R e(k)           e(k) steps before which something was lost, R to replace peers
        ours          k T (1 + s) + R e(k)   s bytes of shadows per byte of the pipeline, as if an iteration were all
                                             sending and nothing overlapped; R of a swarm: silence until the stage is
                                             found lost, three minutes of it for a data node, and a shadow's way

A rollback to a checkpoint replays the same batches at the same learning rates to the same bits, so its curve is that
of `none` read at the iteration that it has got to: after a failure, the last multiple of the period. That is how
CheckFree's authors drew it, and what a test does for real. Writing checkpoints and replaying data cost nothing here,
a reload no more than any other recovery.
"""

from collections.abc import Sequence
from itertools import pairwise

from farflung.node.recipe import HEARTBEAT_S
from farflung.node.shadows import WHOLE
from farflung.node.trying import LISTEN_S
from farflung.protocol.lives import HOME_LOST_AFTER, LOST_AFTER
from farflung.sims.recovery_methods import Method
from farflung.sims.recovery_tiers import Tier

Curve = tuple[tuple[int, float], ...]
"""(steps done, held-out loss in nats per token)."""


def progress(failures: Sequence[frozenset[int]], every: int) -> list[int]:
    """By steps made, 0 and up: how far training with a checkpoint every so many steps has got."""
    reached = [0]
    for lost in failures:
        reached.append((reached[-1] // every * every if lost else reached[-1]) + 1)
    return reached


def rolled_back(curve: Curve, failures: Sequence[frozenset[int]], every: int) -> Curve:
    """The curve of `none` as checkpoints make it."""
    reached = progress(failures, every)
    return tuple((step, at(curve, reached[step])) for step, _ in curve)


def at(curve: Curve, step: float) -> float:
    """The loss at a step within the curve, linear between its points."""
    for (low, first), (high, second) in pairwise(curve):
        if low <= step <= high:
            return first + (second - first) * (step - low) / (high - low)
    raise ValueError(f"step {step} is not within the curve")


def first_at(curve: Curve, target: float) -> float | None:
    """The step at which the curve first has this loss, linear between its points; None when it never has."""
    for (low, first), (high, second) in pairwise(curve):
        if first > target >= second:
            return low + (high - low) * (first - target) / (first - second)
    return None


def seconds(
    tier: Tier,
    method: Method,
    steps: float,
    failures: Sequence[frozenset[int]],
    shadow_share: float,  # bytes of shadows per byte of the pipeline
) -> float:
    """Modelled wall-clock after so many steps, see the module."""
    clock = tier.clock
    if method.kind == "none":
        return steps * clock.iteration_s
    if method.kind == "redundant":
        return steps * clock.redundant_s
    recoveries = sum(recovery_s(tier, method, lost) for lost in failures[: int(steps)] if lost)
    slower = 1.0 + shadow_share if method.kind == "ours" else 1.0
    return steps * clock.iteration_s * slower + recoveries


def recovery_s(tier: Tier, method: Method, lost: frozenset[int]) -> float:
    """From a loss to all of these stages serving again."""
    clock = tier.clock
    if method.kind != "ours":
        return clock.recovery_s
    home = 0 in lost and not tier.safe_ends
    silence_s = (HOME_LOST_AFTER if home else LOST_AFTER) * HEARTBEAT_S
    return silence_s + LISTEN_S + WHOLE.max_nbytes(clock.stage_parameters) / clock.link_bytes_s
