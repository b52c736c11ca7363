"""What an outer step must have been, found from the state before and after it, with none of the code that takes it.

A rule with momentum leaves the mean that it was given behind in it, and so says twice where the parameters went. Without momentum there is only where they went: the
mean of a round is then what the contributors' pseudo-gradients say, or the judge finds another one (invariant 4); and the momentum must be what it was.
"""

from torch import Tensor

from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd

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
