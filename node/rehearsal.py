"""What a node has in the place of its own machine when a swarm is rehearsed on one machine (`farflung sim local`).

Nothing on the command line, in the environment or in a file leads here: a `Rehearsal` is an argument of `daemon.run_join` that only
`farflung.sims` gives, so no node can be slow by accident.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farflung.node.distance import Distances
from farflung.node.door import Doors
from farflung.node.learner import SwarmLearner
from farflung.node.stage_learner import StageLearner


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """How far away the others are, how slow the machine is, and who looks."""

    distances: Distances
    learner: Callable[[SwarmLearner], SwarmLearner]
    """Puts a slower one in the learner's place."""
    stage_learner: Callable[[StageLearner], StageLearner]
    """The same where a peer holds one stage of a pipeline."""
    doors: Callable[[Doors], Doors] = lambda doors: doors
    """Puts others in the doors' place, which measure what goes through them."""
