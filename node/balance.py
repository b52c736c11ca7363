"""A peer's part in balancing the stages: it says what its own costs, notices which have too few peers, asks others to move, and moves.

`protocol/balance.py` decides whether somebody should, `protocol/balancer.py` remembers whom we asked; the coordinator of steps looks every few seconds.
Whoever is asked and may go

    1. says so (`Present.wants`), and gets ready: for stage 0 it opens the data, which may take minutes;
    2. goes on as before until a round of its stage has counted what it has trained, so that nothing of it is lost, or for so long at most;
    3. takes part in no step any more, and looks once more whether it is allowed to go: others may have gone, died or come back meanwhile;
    4. leaves its stage's chain as whoever stops does (`peer.stop`), and comes back to it when that has no quorum to let it go;
       else the process goes on as a newcomer to the other stage.

Until the last of these nothing has changed but what it says, so it may give up at any time, and a kill leaves a peer of the old stage.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from farflung.node.diary import Spent
from farflung.node.events import EventLog
from farflung.node.stage_recipe import StageRecipe
from farflung.node.stage_self import Self
from farflung.protocol.balance import Scene, wrong
from farflung.protocol.balancer import ALARM_BELOW, Balancer
from farflung.protocol.errors import ConfigError, Refused
from farflung.protocol.keys import PeerId
from farflung.protocol.pipeline_messages import Load, MoveOrder, Present, SwarmMessage
from farflung.protocol.roll import Roll
from farflung.protocol.types import as_text
from farflung.training.model import ModelConfig
from farflung.training.pipeline_slice import StageSlice, stage_weights

LOOK_S = 2.0
"""Between two looks at the stages."""

AGAIN_S = 4.0
"""Between saying that we go and going: two heartbeats, in which everybody hears it."""

URGENT_S = 120.0
"""How long a last replica waits for our next round. Then what we have trained since the last one is lost, which is less than a stage."""

PATIENCE_S = 1800.0
"""The same for a move by load. In a chain that has no rounds for so long nothing of ours is counted anyway."""

SHARE = 0.25
"""Of the newest step in what steps cost."""

STATE_BYTES = 8
"""Of one parameter's outer state: itself and its momentum, fp32."""

Prepare = Callable[[int], Awaitable[None]]
"""Get ready to serve a stage. Raises ConfigError when this machine cannot."""


class Part(Protocol):
    """What balancing asks of the pipeline that it belongs to."""

    me: Self

    @property
    def step(self) -> int:
        """Number of the next step."""

    @property
    def leads(self) -> bool:
        """Whether it is our turn to plan."""

    @property
    def idle(self) -> bool:
        """Whether we take part in no step, and have not promised to."""

    @property
    def finished(self) -> bool:
        """Whether there will be no more steps."""

    def present(self) -> Present:
        """What we say of ourselves."""

    def announce(self) -> None:
        """Say it to everybody."""

    def tell(self, to: PeerId, message: SwarmMessage) -> None:
        """To ourselves as to the others, but not at once."""

    def begin_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do something as long as we live, beside everything else."""


@dataclass(slots=True)
class Going:
    """We have said that we go."""

    to: int
    forbidden: Callable[[Scene], str]
    since: float
    until: float
    """Then we go whether a round has counted what we trained or not."""
    prepared: bool = False


class Balance:
    """See the module."""

    def __init__(
        self, part: Part, *, roll: Roll, recipe: StageRecipe, log: EventLog, fits: frozenset[int], prepare: Prepare
    ) -> None:
        """`fits`: the other stages that this machine may move to."""
        self._part = part
        self._roll = roll
        self._stage = recipe.stage
        self._total_steps = recipe.whole.manifest.total_steps
        self._weights = stage_weights(recipe.whole.model, recipe.part.sizes)
        self._state_bytes = stage_bytes(recipe.whole.model, recipe.part.sizes)
        self._log = log
        self._prepare = prepare
        self._balancer = Balancer(roll.heartbeat_s)
        self._going: Going | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._looked_at = -math.inf
        self._since: int | None = None
        self.fits = fits
        self.load = Load(0.0, 0.0, 0.0)

    # ---- what others may read ----------------------------------------------------------------------------------

    @property
    def alarm(self) -> dict[int, int]:
        """By stage, the replicas of those that have fewer than two, and had for a while."""
        return self._balancer.alarm

    @property
    def to(self) -> int:
        """The stage that we are about to move to; -1 when we stay."""
        return -1 if self._going is None else self._going.to

    @property
    def stands(self) -> bool:
        """Whether we take part in nothing any more, because we go."""
        going = self._going
        return going is not None and going.prepared and (not self._part.me.unsent or self._now() >= going.until)

    @property
    def since(self) -> int:
        """The pipeline's step at which we began to train here."""
        if self._since is None and self._part.me.trains:
            self._since = self._part.step
        return self._part.step if self._since is None else self._since

    # ---- what happens ------------------------------------------------------------------------------------------

    def spent(self, spent: Spent) -> None:
        """What a step has cost us."""
        rate = self._part.me.up_bytes_per_s
        new = Load(spent.visits, spent.computing_s, spent.sent_bytes / rate if rate else 0.0)
        share = 1.0 if self.load == Load(0.0, 0.0, 0.0) else SHARE
        self.load = Load(
            *(old + share * (now - old) for old, now in zip(_figures(self.load), _figures(new), strict=True))
        )

    def asked(self, sender: PeerId, order: MoveOrder, now: float) -> None:
        """Somebody wants us to move. Raises Refused, naming the sender, when it is not for that one to say."""
        if sender != self._roll.me and sender not in self._roll.training(0, now):
            raise Refused("a peer that is no data node wants us to move to another stage", peer=sender)
        if order.stage == self._stage and self._going is None:
            within_s = URGENT_S if order.urgent else PATIENCE_S
            self.move(
                order.to,
                order.reason,
                within_s,
                lambda scene: wrong(scene, self._roll.me, order.to, urgent=order.urgent),
            )

    def move(self, to: int, reason: str, within_s: float, forbidden: Callable[[Scene], str]) -> None:
        """Begin to move. `forbidden` is asked now and until we go, and says why we must not, or nothing; a round that counts what we have
        trained is waited for so long."""
        if why := self._forbids(to, forbidden):
            self._log.emit("stage.stay", to=to, reason=why)
            return
        now = self._now()
        self._going = Going(to, forbidden, now, now + within_s)
        self._log.emit("stage.move", to=to, reason=reason)
        self._part.announce()
        self._preparing = self._part.begin_task(self._get_ready(self._going), "ready for another stage")

    def look(self) -> None:
        """Called several times a second."""
        now = self._now()
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._look(now)
        going = self._going if self._part.me.trains else None  # whoever leaves, for wherever, is not held up
        if going is not None and self.stands and self._part.idle and now >= going.since + AGAIN_S:
            if why := self._forbids(going.to, going.forbidden):
                self._stay(why)
            else:
                self._part.me.go(going.to, f"moves to stage {going.to}")

    # ---- inside ------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        scene = self._scene(now)
        begun = self._part.step > 0 and not self._part.finished
        replicas = [len(peers) for peers in scene.staff] if begun else [ALARM_BELOW] * len(self._weights)
        if self._balancer.watch(replicas, now):
            self._log.emit("stage.alarm", replicas={str(stage): count for stage, count in self.alarm.items()})
        if self._going is not None:
            why = self._forbids(self._going.to, self._going.forbidden)
            if why and self._part.me.trains:
                self._stay(why)
        elif self._part.leads and begun and (move := self._balancer.order(scene, now)) is not None:
            self._part.tell(move.peer, MoveOrder(move.stage, move.to, move.urgent, as_text(move.reason)))

    def _scene(self, now: float) -> Scene:
        roll = self._roll
        others = {
            peer: said
            for peer in roll.known
            if roll.alive(peer, now) and (said := roll.present(peer)) is not None
            if said.stage < 0 or said.life == roll.number(said.stage)
        }
        return Scene(
            said=others | {roll.me: self._part.present()},
            weights=self._weights,
            state_bytes=self._state_bytes,
            founder=roll.founder,
            step=self._part.step,
            steps_left=max(0, self._total_steps - self._part.step),
        )

    def _forbids(self, to: int, forbidden: Callable[[Scene], str]) -> str:
        if to not in self.fits:
            return f"this machine cannot serve stage {to}, or was told to serve stage {self._stage}"
        if self._roll.life(to) is None:
            return f"nobody has told us who began the chain of stage {to}"
        return forbidden(self._scene(self._now()))

    def _stay(self, why: str) -> None:
        assert self._going is not None and self._preparing is not None
        self._log.emit("stage.stay", to=self._going.to, reason=why)
        self._going = None
        self._preparing.cancel()
        self._part.announce()

    async def _get_ready(self, going: Going) -> None:
        try:
            await self._prepare(going.to)
        except ConfigError as error:
            self.fits -= {going.to}
            self._stay(str(error))
        else:
            going.prepared = True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def stage_bytes(model: ModelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Outer state of each stage, which a newcomer downloads."""
    stages = [StageSlice(sizes, stage).shapes(model) for stage in range(len(sizes))]
    return tuple(STATE_BYTES * sum(shape.numel() for _, shape in shapes) for shapes in stages)


def _figures(load: Load) -> tuple[float, float, float]:
    return load.visits, load.computing_s, load.sending_s
