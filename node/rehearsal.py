"""What a node has in the place of its own machine when a swarm is rehearsed on one machine (`farflung sim local`).

Nothing on the command line, in the environment or in a file leads here: a `Rehearsal` is an argument of `daemon.run_join` that only
`farflung.sims` gives, so no node can be slow by accident.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farflung.node.distance import Distances
from farflung.node.learner import SwarmLearner


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """How far away the others are, and how slow the machine is."""

    distances: Distances
    learner: Callable[[SwarmLearner], SwarmLearner]
    """Puts a slower one in the learner's place."""
