"""The rounds whose transfers are welcome: of plans that were accepted here and are not over, and what was moved for each.

A transfer may overtake the message that announces its plan, so one for an unknown plan waits a while; what is still on its way for a plan that is
over is refused at once.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from farflung.compression.codec import Payload
from farflung.node.delivery import Delivery
from farflung.node.network import PeerId
from farflung.protocol.errors import Refused
from farflung.protocol.messages import Part, Plan

PLAN_WAIT_S = 10.0
"""How long a transfer may be ahead of the message that announces its plan."""

KEPT_OVER = 64
"""Plans that are remembered to be over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one peer moved for one plan."""

    sent_bytes: int = 0
    received_bytes: int = 0
    up_bits: float = 0.0
    """Bits per parameter of our contribution, our own part of it included; 0 when we made none."""
    owed: float | None = None
    """Norm of what it left out, in norms of our pseudo-gradient; None without error feedback."""


@dataclass(slots=True)
class Round:
    """Bytes of one plan."""

    plan: Plan
    contributions: dict[int, dict[PeerId, Payload]] = field(default_factory=dict)
    """Part (of ours) → contributor → payload."""
    deliveries: dict[PeerId, Delivery] = field(default_factory=dict)
    own: dict[int, Payload] = field(default_factory=dict)
    """Part (of others) → our contribution, which an unreduced mean comes without."""
    unsent: set[tuple[PeerId, int]] = field(default_factory=set)
    """(owner, part) of our contribution that is on its way."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    meetings: dict[int, asyncio.Task[Tensor | None]] = field(default_factory=dict)
    """Part (of ours) → what another group adds to its mean."""
    sent_bytes: int = 0
    received_bytes: int = 0
    encoded_bytes: int = 0
    encoded_numel: int = 0
    """Elements of our pseudo-gradient that `encoded_bytes` hold."""
    owed: float | None = None
    """See `Traffic`."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            up_bits=8 * self.encoded_bytes / max(1, self.encoded_numel),
            owed=self.owed,
        )

    def part(self, index: int, peer: PeerId) -> Part:
        """What `peer` sends something of. Raises Refused naming it."""
        if index >= len(self.plan.parts):
            raise Refused(f"part {index} of a plan of {len(self.plan.parts)}", peer=peer)
        return self.plan.parts[index]


class Rounds:
    """See the module. By the id of the plan."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, Round] = {}
        self._awaited: dict[bytes, list[asyncio.Future[None]]] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, plan_id: bytes) -> bool:
        return plan_id in self._under_way

    def get(self, plan_id: bytes) -> Round | None:
        """None when it is not under way."""
        return self._under_way.get(plan_id)

    def begin(self, plan_id: bytes, plan: Plan) -> None:
        """A plan was accepted, perhaps once more."""
        self._under_way.setdefault(plan_id, Round(plan))
        self._over.pop(plan_id, None)
        for waiter in self._awaited.pop(plan_id, []):
            if not waiter.done():
                waiter.set_result(None)

    def end(self, plan_id: bytes) -> Traffic:
        """The plan is over: end its transfers, free its bytes."""
        round_ = self._under_way.pop(plan_id, None)
        if round_ is None:
            return Traffic()
        for task in round_.tasks:
            task.cancel()
        self._over[plan_id] = None
        if len(self._over) > KEPT_OVER:
            self._over.popitem(last=False)
        return round_.traffic

    async def expected(self, plan_id: bytes, peer: PeerId) -> Round:
        """The round of a plan that `peer` names. Raises Refused naming it when there is none, also after a while."""
        if plan_id not in self._under_way and plan_id not in self._over:
            await self._announced(plan_id, peer)
        if plan_id not in self._under_way:
            raise Refused("a transfer for a plan that is over", peer=peer)
        return self._under_way[plan_id]

    def check(self, plan_id: bytes, round_: Round, peer: PeerId) -> None:
        """Raises Refused naming `peer` when the plan has been dropped since it sent what it did for `round_`; also when it has been taken up again, for nothing of
        that time is kept."""
        if self._under_way.get(plan_id) is not round_:
            raise Refused("a transfer for a plan that was dropped meanwhile", peer=peer)

    async def _announced(self, plan_id: bytes, peer: PeerId) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(plan_id, []).append(waiter)
        try:
            async with asyncio.timeout(PLAN_WAIT_S):
                await waiter
        except TimeoutError as error:
            raise Refused("a transfer for a plan that we do not know", peer=peer) from error
        finally:
            waiters = self._awaited.get(plan_id, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._awaited.pop(plan_id, None)
