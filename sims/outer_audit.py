"""What an outer step must have been, found from the state before and after it, with none of the code that takes it.

A rule with momentum leaves the mean that it was given behind in it, and so says twice where the parameters went. Without momentum there is only where they went: the
mean of a round is then what the contributors' pseudo-gradients say, or the judge finds another one (invariant 4); and the momentum must be what it was.
"""

import numpy as np
from torch import Tensor

from farflung.node.terms import Terms
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd

FINE = ("fp32", "bf16", "fp16", "int8")
"""Codecs whose errors are far below what one contribution more or less makes of a mean (`steps.MEAN_ERROR`); they may be packed, too."""

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


def exact_means(terms: Terms) -> bool:
    """Whether the mean of a round can be told from the pseudo-gradients of its contributors: codecs are fine, and nothing is kept back for later."""
    codecs = [terms.uplink, terms.downlink, *([] if terms.last is None else [terms.last])]
    specs = [segment.codec.spec for codec in codecs for segment in codec.segments]
    return terms.feedback == FeedbackSpec() and all(spec.startswith(FINE) for spec in specs)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of two vectors of fp32 on the CPU; several times as fast as `torch.equal` where they are long."""
    return np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32))
