"""What others are told of a peer that serves a stage, and how a peer's life ends."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The stage of a pipeline that a peer serves, for others to know."""

    stage: int
    layers: tuple[int, int]
    """First, and one past the last."""
    stage_peers: tuple[int, ...]
    """How many serve each stage."""
    forward_s: float
    """What one microbatch takes forward through it; 0 while unknown."""


@dataclass(frozen=True, slots=True)
class Left:
    """How a peer's life ended."""

    reason: str
    moves_to: int | None = None
    """The stage for which it has left its own."""
    avoids: frozenset[bytes] = frozenset()
    """Groups for which it has waited in vain, if it is to begin anew with another: its disk is as a newcomer's, but for its votes."""
