"""The learning rate of a stage that its founder has begun anew, with fresh moments, rises over its first steps.

Adam's first steps have the size of the learning rate in every parameter, whatever their gradients, where later ones, whose moments know that most of a gradient is
noise, are several times smaller. A stage that came back from a copy is right at first, and such steps then take it away from where it was: in the bench's
model the loss is 0.01 to 0.03 nats higher after ten steps (docs/experiments.md, 2026-11-25). Measured of copies; of what is made of others it is assumed. Not of
CheckFree, whose rule is kept as published where it is wanted alone, and not yet of peers that download a stage's state and have fresh moments, too.
"""

RISE_STEPS = 20
"""Until the learning rate is what it is for all others."""


def risen(steps_since: int | None) -> float:
    """What the learning rate is multiplied by, so many steps after the moments began (0 in the first); None: they did not."""
    return 1.0 if steps_since is None else min(1.0, (steps_since + 1) / RISE_STEPS)
