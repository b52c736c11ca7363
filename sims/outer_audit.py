"""What an outer step must have been, found from the state before and after it, with none of the code that takes it.

A rule with momentum leaves the mean that it was given behind in it, and so says twice where the parameters went. Without momentum there is only where they went: the
mean of a round is then what the contributors' pseudo-gradients say, or the judge finds another one (invariant 4); and the momentum must be what it was. Where codecs are
too coarse to compare it with these, their coding is repeated, part by part, as contributors and owners must have done it.
A coarse code of a mean turns the smallest difference in what is coded into a large one (another element is left out,
or gets another level), so with it all that came before is repeated to the last bit, fine contributions too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from farflung.compression import unreduced
from farflung.compression.codec import VectorCodec
from farflung.compression.policy import FlatCodec
from farflung.node.terms import Terms
from farflung.protocol.chain import Commit
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd

FINE = ("fp32", "bf16", "fp16", "int8")
"""Codecs whose errors are far below what one contribution more or less makes of a mean (`steps.MEAN_ERROR`); they may be
packed, too. Means are looked at without any code of theirs, unless they are coded coarsely."""

State = tuple[Tensor, Tensor]
"""Parameters and momentum, fp32 [n] each."""


def taken_step(rule: OuterRule, before: State, after: State) -> tuple[Tensor, Tensor]:
    """The mean that `rule` must have been given, and what it takes off the parameters then, fp32 [n] each. Raises TypeError for a rule that no swarm
    has."""
    (params, old), (moved, new) = before, after
    match rule:
        case Nesterov(lr=lr, momentum=mu):
            mean = new - mu * old
            return mean, lr * (mean + mu * new)
        case HeavyBall(lr=lr, momentum=mu, clip=clip, penalty=0):
            return new - mu * old, lr * new.minimum(new.new_tensor(clip)).maximum(new.new_tensor(-clip))
        case Sgd(lr=lr):
            return (params - moved) / lr, params - moved + (new - old)
    raise TypeError(f"swarms have no outer optimiser {rule}")


def known_means(terms: Terms) -> bool:
    """Whether the mean of a round can be told from the pseudo-gradients of its contributors: nothing is added to them, or to their mean, that was left out before.
    What stays in local parameters is in them."""
    return terms.feedback.uplink in ("none", "kept") and terms.feedback.downlink == "none"


def wanted_mean(
    terms: Terms, commit: Commit, start: int, shares: Sequence[tuple[Tensor, float]], met: Tensor | None, got: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """What everybody must have decoded of the part that begins with `start`, and what was added up for it before that was coded: from the pseudo-gradients and weights of
    its contributors, fp32 [n] each, and what a meeting has added. A mean that may be left unreduced is what `got`, fp32 [n], is nearer to: who its members were, no commit says."""
    last = terms.last if terms.settings.rules.ended_by(commit) else None
    uplink, downlink = last or terms.uplink, last or terms.downlink
    stop = start + len(got)
    down = downlink.part(start, stop) if _is_coarse(downlink) else None
    up = None if down is None and not _is_coarse(uplink) else uplink.part(start, stop)
    added = [weight * _coded(up, gradient) for gradient, weight in shares]
    added.append(torch.zeros_like(got) if met is None else met)
    exact = torch.zeros_like(got)
    for term in added:  # one after another, as owners do (`torch.sum` adds many in another order)
        exact += term
    possible = [_coded(down, exact), *([exact] if met is None and len(shares) <= unreduced.MOST else [])]
    return min(possible, key=lambda mean: float((mean - got).norm())), added


def _is_coarse(codec: FlatCodec) -> bool:
    return not all(segment.codec.spec.startswith(FINE) for segment in codec.segments)


def _coded(codec: VectorCodec | None, vector: Tensor) -> Tensor:
    return vector if codec is None else codec.decode(codec.encode(vector), len(vector))


def bits(vector: Tensor) -> bytes:
    """Of one on the CPU, as they are in memory."""
    return vector.numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of two vectors of fp32 on the CPU; several times as fast as `torch.equal` where they are long."""
    return np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32))
