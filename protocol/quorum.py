"""Who may decide: dynamic linear voting and the rotation of proposers.

A commit needs more than half of the view that its parent names, or exactly half including that view's first key
(Jajodia and Mutchler, "Dynamic voting algorithms", 1990). Two disjoint groups can never both have that, whatever the
network does; and because each commit names the next view, a swarm can shrink one by one without losing the ability to go on.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TypeVar

from farflung.protocol.keys import PeerId

Voter = TypeVar("Voter", bytes, int)
"""A peer in a chain; a stage where those of a pipeline decide together (`accord`)."""


def is_quorum(view: Collection[Voter], voters: Collection[Voter]) -> bool:
    """Whether `voters` may decide for `view`."""
    have = len(set(view) & set(voters))
    return 2 * have > len(view) or (2 * have == len(view) > 0 and min(view) in voters)


def proposer(swarm: bytes, view: Sequence[PeerId], height: int, ballot: int) -> PeerId:
    """Whose turn it is to propose commit `height` at `ballot`: a rotation that differs at every height."""
    return _rotation(swarm, tuple(view), height)[ballot % len(view)]


@lru_cache(maxsize=64)  # asked on every tick and message, for the newest height or two
def _rotation(swarm: bytes, view: tuple[PeerId, ...], height: int) -> list[PeerId]:
    return sorted(view, key=lambda peer: sha256(swarm + height.to_bytes(8, "big") + peer).digest())
