"""Data nodes dial whom a stage's state was with and who has fallen silent; what comes of it counts for what they knew when they dialled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

from tests.protocol.test_lives import B, C, of_three, says

from farflung.node.knocking import Knocking
from farflung.node.network import Network, PeerId
from farflung.protocol.lives import QUIET_AFTER
from farflung.protocol.roll import Roll

HOLDS = says(1, life=1, digest=b"c" * 32)


class Ended:
    """A network in which all processes have ended."""

    def __init__(self) -> None:
        self.dialled: list[PeerId] = []

    async def is_gone(self, peer: PeerId) -> bool:
        self.dialled.append(peer)
        return True


def knocks(roll: Roll, now: float) -> tuple[list[Coroutine[Any, Any, None]], Ended, Knocking]:
    """Who looks, and what it has begun."""
    network, begun = Ended(), list[Coroutine[Any, Any, None]]()
    knocking = Knocking(network=cast(Network, network), roll=roll, begin_task=lambda task, name: begun.append(task))
    knocking.look(now)
    return begun, network, knocking


def data_node() -> Roll:
    roll = of_three()
    roll.by_chain = True
    return roll


def test_each_is_dialled_once_in_a_heartbeat_until_it_is_found_ended() -> None:
    roll = data_node()
    roll.heard(B, HOLDS, 1.0)
    quiet = 1.0 + QUIET_AFTER * roll.heartbeat_s + 0.1
    begun, network, knocking = knocks(roll, quiet)
    knocking.look(quiet + 0.5 * roll.heartbeat_s)
    assert len(begun) == 1
    knocking.look(quiet + roll.heartbeat_s)
    assert len(begun) == 2
    for task in begun:
        asyncio.run(task)
    assert network.dialled == [B, B] and roll.entries[B].ended_at is not None
    knocking.look(quiet + 2.0 * roll.heartbeat_s)
    assert len(begun) == 2


def test_whoever_is_forgotten_or_heard_before_it_is_dialled_is_not_found_ended() -> None:
    roll = data_node()
    for peer in (B, C):
        roll.heard(peer, HOLDS, 1.0)
    quiet = 1.0 + QUIET_AFTER * roll.heartbeat_s + 0.1
    begun, network, _ = knocks(roll, quiet)
    roll.forget(B)
    roll.heard(C, HOLDS, quiet)
    for task in begun:
        asyncio.run(task)
    assert network.dialled == [B, C] and B not in roll.entries and roll.entries[C].ended_at is None
