"""What a peer of a pipeline says of itself, for tests; and a small swarm of such."""

from typing import Any

from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import LOST_AFTER, Life
from farflung.protocol.pipeline_messages import Load, PlannedLane, Present, StepPlan
from farflung.protocol.roll import Roll, in_order
from farflung.protocol.route import Leg

NOTHING_YET = Load(0.0, 0.0, 0.0)


def says(stage: int, **changes: Any) -> Present:
    """A peer that trains in its stage and is free."""
    return Present(
        **{
            "stage": stage, "life": 0, "wants": -1, "trains": True, "free": True, "step": 0, "window": b"", "finished": False, "version": 0, "digest": b"", "forward_s": 0.0,
            "up_bytes_per_s": 0.0, "admission": b"", "addresses": (), "appointments": (), "peers": (), "lives": (), "lost": (),
            "step_s": 0.0, "losses_per_hour": 0.1, "grad_norm": 0.0, "shadows": (), "since": 0, "load": NOTHING_YET, "fits": (), **changes,
        }
    )  # fmt: skip


SWARM = b"s" * 32
FOUNDER = Ed25519Signer(b"f" * 32)
A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))
LATE = LOST_AFTER * 2.0 + 0.1
"""When a stage of which nobody was heard since 0 is lost."""
FIRST, SECOND = in_order(SWARM, [A, B])
"""Data nodes, in their order; C and D serve stage 1."""


def roll_of(me: bytes, **others: Present) -> Roll:
    roll = Roll(SWARM, FOUNDER.peer_id, me, stages=2, heartbeat_s=2.0)
    for name, present in others.items():
        roll.heard({"A": A, "B": B, "C": C, "D": D}[name], present, 0.0)
    return roll


def of_three(me: bytes = A) -> Roll:
    """A and B are data nodes; stage 1 was begun by C, and D serves stage 2."""
    roll = Roll(SWARM, A, me, stages=3, heartbeat_s=2.0)
    roll.renew([Life(1, 1, C), Life(2, 1, D)], 0.0)
    roll.tick(0.0)
    return roll


def hear(roll: Roll, now: float, **said: object) -> None:
    for name, present in said.items():
        roll.heard({"A": A, "B": B, "C": C, "D": D}[name], present, now)  # type: ignore[arg-type]


def everybody(me: bytes, **changed: Present) -> Roll:
    others = {"A": says(0), "B": says(0), "C": says(1), "D": says(1)} | changed
    return roll_of(me, **{name: said for name, said in others.items() if {"A": A, "B": B}.get(name) != me})


def plan_of(peers: list[list[bytes]], window: bytes = b"w" * 32) -> StepPlan:
    flat = tuple(peer for stage in peers for peer in stage)
    places = tuple(tuple(flat.index(peer) for peer in stage) for stage in peers)
    lane = PlannedLane((Leg(0, 0), Leg(1, len(peers[0]))), 4)
    return StepPlan(window, 7, flat, places, (lane,), 10.0)
