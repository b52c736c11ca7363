"""The learning rate of a stage whose optimiser begins with fresh moments rises over its first steps.

Adam's first steps have the size of the learning rate in every parameter, whatever their gradients, where later ones, whose moments know that most of a gradient is
noise, are several times smaller. A stage that came back from a copy is right at first, and such steps then take it away from where it was: in the bench's
model the loss is up to 0.02 nats higher after ten steps, and where a stage is lost every fifteen steps (33 % of them an hour) 2 % of the final loss
went that way (docs/experiments.md, 2026-11-25). Not of CheckFree, whose rule is kept as published where it is wanted alone.
"""

RISE_STEPS = 20
"""Until the learning rate is what it is for all others."""


def risen(steps_since: int | None) -> float:
    """What the learning rate is multiplied by, so many steps after the moments began (0 in the first); None: they did not."""
    return 1.0 if steps_since is None else min(1.0, (steps_since + 1) / RISE_STEPS)
