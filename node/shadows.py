"""Shadows: compressed copies of other stages' outer parameters, for the case that such a stage is lost (`renewal`).

Every peer works out by itself, from the roll, who is to hold which stage's shadow (`training/recovery_places.py`: different failure domains, not beside the
stage), and whoever it is fetches it from any peer of that stage, when that saves most per byte within the budget (`recovery_refresh.py`). A stage with `RICH`
peers or more has none, unless they would all be lost together: another peer of it is nearer and exact. Regions and owners are what people tell of their
machines (`Domains`); of the network we see the addresses.

Outer parameters change by rounds only, so a copy is as good as new until the next one. It is whole each time, in `CODEC`: a byte a parameter, in which shadows did as well as exact ones (digest, 6.3). Coded differences are a quarter of that
(`recovery_shadow.py`), but then each holder needs the one peer that knows what it has, and a copy of a stage is what one wants when peers are gone. What a
holder keeps is the payload, in memory only. Weights alone are kept: moments and outer momentum begin afresh.

The budget is a share of what the pipeline's steps send, and each holder has the part of it that its shadows are of all. Both are counted in `Shelf`.
"""

import asyncio
import ipaddress
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from farflung.compression.codec import CodecError
from farflung.compression.registry import parse_codec
from farflung.node import framing
from farflung.node.door import Door
from farflung.node.events import EventLog
from farflung.node.fetching import check_payload
from farflung.node.network import Network, PeerId, Stream
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.keys import short
from farflung.protocol.messages import ShadowRequest
from farflung.protocol.pipeline_messages import Copy, Present
from farflung.protocol.roll import Roll
from farflung.training.recovery_costs import Rung, Setbacks
from farflung.training.recovery_places import Peer, Piece, fall_together, places
from farflung.training.recovery_refresh import Budget, Due, Kept, due, filled

CODEC = parse_codec("int8(block=128)")

RICH = 3
"""Peers of a stage that needs no shadow, if they do not all fall together."""

ROOM = 2
"""Shadows of the largest stage that a peer has memory for: a byte a parameter each."""

LOOK_S = 2.0
"""Between two looks at what is due."""

FETCH_S = 600.0
"""For one copy."""

COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Shadow:
    """What we hold of another stage."""

    step: int
    """Of the pipeline, at the round that made these parameters."""
    version: int
    payload: bytes


@dataclass(slots=True)
class Shelf:
    """What a machine holds of other stages; it outlives the peer, which may move."""

    shadows: dict[int, Shadow] = field(default_factory=dict)
    """By stage."""
    received_bytes: int = 0
    """Of all copies so far."""
    allowed_bytes: float = 0.0
    """By the budget, so far."""
    bucket_bytes: float = 0.0
    """What the budget allows now; negative is debt, which a peer that moves takes along."""

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What it holds, for others."""
        return tuple(Copy(stage, one.step, len(one.payload)) for stage, one in sorted(self.shadows.items()))


def serve_shelf(
    network: Network,
    shelf: Shelf,
    admitted: Callable[[PeerId], bool],
    refused: Callable[[RemoteError], None],
    *,
    stage: int = -1,
    own: Callable[[], Awaitable[Shadow]] | None = None,
) -> None:
    """Hand out what we hold; `own` makes a shadow of the `stage` that we serve ourselves, if we do."""

    async def serve(stream: Stream) -> None:
        if not admitted(stream.peer):
            raise Refused("asks for a shadow before being admitted to the swarm", peer=stream.peer)
        wanted = (await framing.read_header(stream, ShadowRequest)).stage
        shadow = shelf.shadows.get(wanted) if own is None or wanted != stage else await own()
        step, version = (0, 0) if shadow is None else (shadow.step, shadow.version)
        await stream.write(step.to_bytes(COUNT_BYTES, "big") + version.to_bytes(COUNT_BYTES, "big"))
        await framing.write_blob(stream, None if shadow is None else shadow.payload)

    network.serve("shadow", framing.guarded(serve, refused, within_s=FETCH_S))


async def fetch(network: Network, side: Door, holder: PeerId, stage: int, num_parameters: int) -> Shadow:
    """A shadow of a stage, from who serves that stage or has one. Raises NetworkError; Refused naming the peer for what is none."""
    try:
        async with asyncio.timeout(FETCH_S):
            stream = await network.open_stream(holder, "shadow")
            try:
                await framing.write_header(stream, ShadowRequest(stage))
                step = int.from_bytes(await framing.read_exactly(stream, COUNT_BYTES), "big")
                version = int.from_bytes(await framing.read_exactly(stream, COUNT_BYTES), "big")
                payload = await framing.read_blob(stream, CODEC.max_nbytes(num_parameters))
            finally:
                await stream.close()
    except TimeoutError as error:
        raise NetworkError("no answer to a request for a shadow") from error
    if payload is None:
        raise NetworkError(f"{short(holder)} has no shadow of stage {stage}")
    try:
        await check_payload(side, CODEC, payload, num_parameters)
    except CodecError as error:
        raise Refused(f"not a shadow of stage {stage}: {error}", peer=holder) from error
    return Shadow(step, version, payload)


class Shadows:
    """A peer's shadows: it serves its own stage's, and keeps those that fall to it fresh. `run` until cancelled."""

    def __init__(
        self,
        *,
        network: Network,
        roll: Roll,
        recipe: StageRecipe,
        learner: StageLearner,
        side: Door,
        shelf: Shelf,
        log: EventLog,
        refused: Callable[[RemoteError], None],
        present: Callable[[], Present],
        step: Callable[[], int],
        made_at: Callable[[], tuple[int, int]],
        step_bytes: int,
    ) -> None:
        """`present`: what we say of ourselves; `step`: number of the pipeline's next step; `made_at`: that of the round which made our own
        outer state, and its version; `step_bytes`: what all peers send in a step."""
        self._network = network
        self._roll = roll
        self._recipe = recipe
        self._sizes = [stage_recipe(recipe.whole, stage).own.num_parameters for stage in range(roll.stages)]
        self._learner = learner
        self._side = side
        self._shelf = shelf
        self._log = log
        self._refused = refused
        self._present = present
        self._step = step
        self._made_at = made_at
        self._step_bytes = step_bytes
        self._budget = Budget(share=recipe.pipeline.shadows)
        self._setbacks = Setbacks()
        self._counted_to: int | None = None
        """The step up to which the budget was filled; None before the first look."""
        self._replicas: dict[int, int] = {}
        """By stage whose shadow we hold, how many train in it, as of the last look."""
        self._alarmed: set[int] = set()
        """Those of them that have come down to one since, and our copy is of before."""
        self._own: Shadow | None = None
        self._encoding = asyncio.Lock()
        self._said: dict[int, str] = {}
        """By stage, who we said would hold its shadow, and why."""
        self._missing: Sequence[str] = ()
        """Why stages have no shadow, as we last said."""

    async def run(self) -> None:
        """Keep what falls to us fresh."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Fetch what is due now."""
        if self._budget.share > 0.0:
            for one in self._due():
                if not await self._refresh(one):
                    self._shelf.bucket_bytes += one.kept.nbytes

    async def own(self) -> Shadow:
        """Of the stage that we serve."""
        step, version = self._made_at()
        async with self._encoding:  # several ask for the same one at a time
            if self._own is None or (self._own.step, self._own.version) != (step, version):
                self._own = Shadow(step, version, await self._side.run(_encoded, self._learner.outer.params))
            return self._own

    # ---- what is due -------------------------------------------------------------------------------------------

    def _due(self) -> list[Due]:
        now, step = asyncio.get_running_loop().time(), self._step()
        said = {
            peer: one for peer in self._roll.known if self._roll.alive(peer, now) and (one := self._roll.present(peer))
        }
        said[self._roll.me] = self._present()
        training = [self._described(peer, one) for peer, one in sorted(said.items()) if one.stage >= 0 and one.trains]
        trained = [[peer for peer in training if peer.stage == stage] for stage in range(self._roll.stages)]
        poor = [
            stage
            for stage, peers in enumerate(trained)
            if stage > 0 and peers and (len(peers) < RICH or fall_together(peers, training))
        ]
        staying = [peer for peer in training if said[bytes.fromhex(peer.name)].wants < 0]
        mine = self._places(said, staying, poor)
        for stage in set(self._shelf.shadows) - set(mine):
            if trained[stage]:  # it lies somewhere else, or nowhere
                del self._shelf.shadows[stage]
        old = {stage for stage in mine if self._is_old(stage, now)}
        self._alarm({stage: len(trained[stage]) for stage in mine}, old)
        kept = {stage: self._kept(stage, len(trained[stage])) for stage in mine}
        counted_to = step if self._counted_to is None else self._counted_to
        steps, self._counted_to = max(0, step - counted_to), max(step, counted_to)
        sent = steps * self._step_bytes * len(mine) // max(1, len(poor))
        shelf = self._shelf
        shelf.bucket_bytes = filled(shelf.bucket_bytes, sent, list(kept.values()), self._budget)
        shelf.allowed_bytes += self._budget.share * sent
        found, shelf.bucket_bytes = due(
            [kept[stage] for stage in mine if stage in old],
            step,
            bucket_bytes=shelf.bucket_bytes,
            loss_per_step=self._loss_per_step(said),
            budget=self._budget,
        )
        return found

    def _alarm(self, replicas: dict[int, int], old: set[int]) -> None:
        """Note which stages have come down to their last replica. A copy that is as new as that is good enough."""
        for stage, count in replicas.items():
            if count == 1 < self._replicas.get(stage, count):
                self._alarmed.add(stage)
        self._alarmed &= {stage for stage in old if replicas[stage] == 1}
        self._replicas |= replicas

    def _described(self, peer: PeerId, said: Present) -> Peer:
        return Peer(
            name=peer.hex(),
            stage=said.stage,
            domains=(said.domains.region, _network_of(said), said.domains.owner),
            room_bytes=ROOM * max(self._sizes),
            uplink_bytes_s=said.up_bytes_per_s,
        )

    def _places(self, said: dict[PeerId, Present], peers: list[Peer], poor: list[int]) -> list[int]:
        """The stages whose shadows we are to hold."""
        pieces = [Piece(name=str(stage), stage=stage, nbytes=self._sizes[stage]) for stage in poor]
        current = {
            str(stage): [peer.hex() for peer, one in said.items() if stage in {copy.stage for copy in one.shadows}]
            for stage in poor
        }
        held, missing = places(peers, pieces, self._roll.stages, current=current)
        mine = [one for one in held if one.holder == self._roll.me.hex()]
        for one in mine:
            if self._said.get(int(one.piece)) != one.why:
                self._said[int(one.piece)] = one.why
                self._log.emit("shadow.place", stage=int(one.piece), reason=one.why)
        if missing != self._missing and self._recipe.stage == 0:
            for why in missing:
                self._log.emit("shadow.missing", reason=why)
        self._missing = missing
        return [int(one.piece) for one in mine]

    def _is_old(self, stage: int, now: float) -> bool:
        """Whether a round has changed the stage since our copy was made."""
        shadow, held = self._shelf.shadows.get(stage), self._roll.holders(stage, now)
        return shadow is None or (held is not None and held[0] > shadow.version)

    def _kept(self, stage: int, replicas: int) -> Kept:
        shadow = self._shelf.shadows.get(stage)
        rate = min(0.99, self._roll.losses_per_hour)
        return Kept(
            piece=str(stage),
            holder=self._roll.me.hex(),
            step=None if shadow is None else shadow.step,
            nbytes=CODEC.max_nbytes(self._sizes[stage]),
            replicas=replicas,
            setback_per_step=self._setbacks.per_step(stage),
            missing_setback=self._setbacks.iterations(Rung.MEAN, stage=stage, steps_behind=0, failures_per_hour=rate),
            alarmed=stage in self._alarmed,
        )

    def _loss_per_step(self, said: dict[PeerId, Present]) -> float:
        step_s = max((one.step_s for one in said.values()), default=0.0) or 1.0
        return -math.expm1(-self._roll.losses_per_hour / 3600.0 * step_s)

    async def _refresh(self, one: Due) -> bool:
        """False where nobody had it to give."""
        stage = int(one.kept.piece)
        now = asyncio.get_running_loop().time()
        held = self._roll.holders(stage, now)
        newest = 0 if held is None else held[0]
        for source in self._roll.training(stage, now):
            try:
                shadow = await fetch(self._network, self._side, source, stage, self._sizes[stage])
            except NetworkError:
                continue
            except RemoteError as error:
                self._refused(error)
                continue
            # no later than others say that the stage is: one that claims more would never be refreshed
            shadow = replace(shadow, step=min(shadow.step, self._step()), version=min(shadow.version, newest))
            self._shelf.shadows[stage] = shadow
            self._shelf.received_bytes += len(shadow.payload)
            self._log.emit(
                "shadow",
                stage=stage,
                of_step=shadow.step,
                bytes=len(shadow.payload),
                received_bytes=self._shelf.received_bytes,
                allowed_bytes=int(self._shelf.allowed_bytes),
                reason=one.why,
            )
            self._alarmed.discard(stage)
            return True
        return False


def _encoded(params: Tensor) -> bytes:
    """It may be in the middle of a round's step: then some elements are of the round before, and a shadow is no worse for that."""
    return bytes(CODEC.encode(params))


def _network_of(said: Present) -> str:
    """The /16 of a peer's first public IPv4 address, which mostly is of one provider; empty when it tells none."""
    for address in said.addresses:
        parts = address.split("/")
        if parts[1:2] == ["ip4"] and len(parts) > 2:
            try:
                ip = ipaddress.IPv4Address(parts[2])
            except ValueError:
                continue
            if ip.is_global:
                return str(ipaddress.ip_network(f"{ip}/16", strict=False))
    return ""
