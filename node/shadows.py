"""Shadows: compressed copies of other stages' parameters, for the case that such a stage is lost (`renewal`).

Every peer works out by itself, from the roll, who is to hold which stage's shadow (`training/recovery_places.py`: different failure domains, not beside the
stage), and whoever it is fetches it from a peer of that stage, when that saves most per byte within the budget (`recovery_refresh.py`). A stage with `RICH`
peers or more has none, unless they would all be lost together: another peer of it is nearer and exact. Stage 0 has one like the others, embedding and head
with it, where it can be begun anew (`accord`). Regions and owners are what people tell of their
machines (`Domains`); of the network we see the addresses.

A copy is of what its source trains, not of the outer parameters: those change by rounds only, and where a stage has one peer nobody else has what that has trained since.
The first copy is whole, in `FIRST`. After that the source sends what has changed since, in `DIFFERENCE`, half of it, and so does the founder who was
given a copy to begin the stage with, in `WHOLE` (`recovery_shadow.py`). For that both keep the copy as it is, four bytes a parameter in host memory. Another source, and the
same after a refresh that failed, begins with a whole copy. Weights alone are kept: moments and outer momentum begin afresh.

The budget is a share of what the pipeline's steps send, and each holder has the part of it that its shadows are of all. Both are counted in `Shelf`.
"""

import asyncio
import ipaddress
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from farflung.compression.codec import CodecError, VectorCodec, check_magnitude
from farflung.compression.registry import parse_codec
from farflung.node import framing
from farflung.node.door import Door, Doors
from farflung.node.events import EventLog
from farflung.node.exact import EndsShelf
from farflung.node.fetching import check_payload
from farflung.node.network import Network, PeerId, Stream
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import MOST_HOLDERS, ROOM, StageRecipe, stage_recipe
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ShadowRequest
from farflung.protocol.keys import short
from farflung.protocol.pipeline_messages import Copy, Present
from farflung.protocol.roll import Roll
from farflung.training.recovery_costs import Setbacks
from farflung.training.recovery_places import Peer, Piece, fall_together, places
from farflung.training.recovery_refresh import Budget, Due, Kept, due, filled
from farflung.training.recovery_shadow import (
    NAME_NBYTES,
    Refresh,
    Shadow,
    WrongBase,
    applied,
    empty,
    handed_over,
    refresh,
)

FIRST = parse_codec("deadzone(bits=4.0)")
"""Of a copy to be kept that continues none. It overdraws the budget, so half of int8's bytes; what it leaves out is in the next difference.

One step for the whole stage: of matrices whose weights are small next to the others' it keeps little until then (docs/experiments.md)."""

WHOLE = parse_codec("int8(block=128)")
"""Of a copy to begin a stage with."""

DIFFERENCE = parse_codec("deadzone(bits=2.0)")
"""Of what has changed since the copy before."""

LARGEST = 2.0**120
"""Magnitude of a parameter. What decodes may be larger, or become so by a difference, and could then not be encoded for who asks us."""

RICH = 3
"""Peers of a stage that needs no shadow, if they do not all fall together."""

UNLISTED_S = 600.0
"""How long we remember what somebody was given who is not heard to have it: it may still be on its way, or the word of it."""

LOOK_S = 2.0
"""Between two looks at what is due."""

FETCH_S = 120.0
"""Until the first byte of a copy comes: the source encodes it first."""

COUNT_BYTES = 8


@dataclass(slots=True)
class Shelf:
    """What a machine holds of other stages, and others of its own; it outlives the peer, which may move."""

    shadows: dict[int, Shadow] = field(default_factory=dict)
    """By stage."""
    sources: dict[int, PeerId] = field(default_factory=dict)
    """By stage whose shadow we have, who can continue it, as far as we know."""
    given: dict[PeerId, Shadow] = field(default_factory=dict)
    """By holder, what it has of our stage. Who was given that last comes last."""
    given_of: int = -1
    """The stage that this is of; -1: none yet."""
    ends: EndsShelf = field(default_factory=EndsShelf)
    """With CheckFree alone: exact copies of embedding, last norm and head."""
    received_bytes: int = 0
    """Of all copies so far."""
    allowed_bytes: float = 0.0
    """By the budget, so far."""
    bucket_bytes: float = 0.0
    """What the budget allows now; negative is debt, which a peer that moves takes along."""

    @property
    def copies(self) -> tuple[Copy, ...]:
        """What it holds, for others."""
        return tuple(
            Copy(stage, one.step, WHOLE.expected_nbytes(one.values.numel()))
            for stage, one in sorted(self.shadows.items())
        )

    def keep(self, stage: int, shadow: Shadow, source: PeerId) -> None:
        """Hold this."""
        self.shadows[stage], self.sources[stage] = shadow, source

    def drop(self, stage: int) -> None:
        """Hold nothing of this stage."""
        del self.shadows[stage]
        self.sources.pop(stage, None)

    def serve(self, stage: int) -> None:
        """This is our own stage from now on: what others have of another one, nobody continues."""
        if stage != self.given_of:
            self.given.clear()
            self.given_of = stage

    def give(self, holder: PeerId, shadow: Shadow) -> None:
        """Remember that somebody has this of our stage."""
        self.given.pop(holder, None)
        self.given[holder] = shadow
        for forgotten in list(self.given)[:-MOST_HOLDERS]:
            del self.given[forgotten]


MOST_READERS = 8
"""To whom shadows are sent at once: each is a copy in memory until its reader has it all."""


def serve_shelf(
    network: Network,
    shelf: Shelf,
    admitted: Callable[[PeerId], bool],
    refused: Callable[[RemoteError], None],
    *,
    roll: Roll,
    side: Door,
    log: EventLog,
    stage: int = -1,
    own: Callable[[PeerId, ShadowRequest], Awaitable[Refresh | None]] | None = None,
) -> None:
    """Hand out what we hold; `own` makes a refresh of the `stage` that we serve ourselves, if we do, for who asks for it."""

    async def hand_over(to: PeerId, request: ShadowRequest) -> Refresh | None:
        wanted = request.stage
        if request.have or wanted not in shelf.shadows:  # differences are made by who trains it
            return None
        sent, handed = await side.run(handed_over, shelf.shadows[wanted], _whole(request))
        life = roll.life(wanted)
        if life is not None and life.founder == to:  # it begins the stage with this, and can say how that changes
            shelf.keep(wanted, handed, to)
            log.emit("shadow.given", stage=wanted, life=life.number, to=to.hex(), of_step=handed.step)
        return sent

    readers, slots = set[tuple[PeerId, int]](), asyncio.Semaphore(MOST_READERS)

    async def serve(stream: Stream) -> None:
        if not admitted(stream.peer):
            raise Refused("asks for a shadow before being admitted to the swarm", peer=stream.peer)
        async with asyncio.timeout(FETCH_S):
            request = await framing.read_header(stream, ShadowRequest)
        reader = (stream.peer, request.stage)
        if reader in readers:
            raise Refused(f"asks for a shadow of stage {request.stage} while it is sent one", peer=stream.peer)
        readers.add(reader)
        try:
            async with slots:
                await hand_out(stream, request)
        finally:
            readers.discard(reader)

    async def hand_out(stream: Stream, request: ShadowRequest) -> None:
        if own is not None and request.stage == stage:
            sent = await own(stream.peer, request)
        else:
            sent = await hand_over(stream.peer, request)
        step, base = (0, bytes(NAME_NBYTES)) if sent is None else (sent.step, sent.base)
        async with asyncio.timeout(FETCH_S):
            await stream.write(step.to_bytes(COUNT_BYTES, "big") + base)
        await framing.write_long_blob(stream, None if sent is None else sent.payload)

    network.serve("shadow", framing.guarded(serve, refused, within_s=None))


async def fetch(
    network: Network,
    side: Door,
    holder: PeerId,
    stage: int,
    num_parameters: int,
    have: Shadow | None = None,
    *,
    founds: bool = False,
) -> tuple[Shadow, int]:
    """A shadow of a stage, from who serves that stage or has one, and the bytes that it came in. `have`: what we have of it, which is to be continued;
    `founds`: to begin the stage with it. Raises NetworkError; Refused naming the peer for what is none."""
    request = ShadowRequest(stage, b"" if have is None else have.name, founds)
    old, codec = (empty(num_parameters), _whole(request)) if have is None else (have, DIFFERENCE)
    try:
        async with asyncio.timeout(FETCH_S) as patience:
            stream = await network.open_stream(holder, "shadow")
            try:
                await framing.write_header(stream, request)
                step = int.from_bytes(await framing.read_exactly(stream, COUNT_BYTES), "big")
                base = bytes(await framing.read_exactly(stream, NAME_NBYTES))
                patience.reschedule(None)
                payload = await framing.read_long_blob(stream, codec.max_nbytes(num_parameters))
            finally:
                await stream.close()
    except TimeoutError as error:
        raise NetworkError("no answer to a request for a shadow") from error
    if payload is None:
        raise NetworkError(f"{short(holder)} has no such shadow of stage {stage}")
    try:
        await check_payload(side, codec, payload, num_parameters)
        shadow = await side.run(applied, old, Refresh(base=base, step=step, payload=payload), codec)
        await side.run(check_magnitude, shadow.values, LARGEST)
    except (CodecError, WrongBase) as error:
        raise Refused(f"not a shadow of stage {stage}: {error}", peer=holder) from error
    return shadow, len(payload)


def _whole(request: ShadowRequest) -> VectorCodec:
    """What encodes a copy that continues none."""
    return WHOLE if request.founds else FIRST


class Shadows:
    """A peer's shadows: it serves its own stage's, and keeps those that fall to it fresh. `run` until cancelled."""

    def __init__(
        self,
        *,
        network: Network,
        roll: Roll,
        recipe: StageRecipe,
        learner: StageLearner,
        doors: Doors,
        shelf: Shelf,
        log: EventLog,
        refused: Callable[[RemoteError], None],
        present: Callable[[], Present],
        step: Callable[[], int],
        trained: Callable[[], int],
        step_bytes: int,
    ) -> None:
        """`present`: what we say of ourselves; `step`: number of the pipeline's next step; `trained`: how many steps our own parameters have had;
        `step_bytes`: what all peers send in a step."""
        self._network = network
        self._roll = roll
        self._recipe = recipe
        self._sizes = [stage_recipe(recipe.whole, stage).own.num_parameters for stage in range(roll.stages)]
        self._learner = learner
        self._doors = doors
        self._shelf = shelf
        self._log = log
        self._refused = refused
        self._present = present
        self._step = step
        self._trained = trained
        self._step_bytes = step_bytes
        self._budget = Budget(share=recipe.pipeline.shadows)
        self._setbacks = Setbacks()
        self._counted_to: int | None = None
        """The step up to which the budget was filled; None before the first look."""
        self._replicas: dict[int, int] = {}
        """By stage whose shadow we hold, how many train in it, as of the last look."""
        self._alarmed: set[int] = set()
        """Those of them that have come down to one since, and our copy is of before."""
        self._refreshing: set[int] = set()
        """Stages whose copy is being fetched."""
        self._unlisted: dict[PeerId, tuple[bytes, float]] = {}
        """By holder that does not list what it was given last, the name of that, and since when."""
        shelf.serve(recipe.stage)
        self._encoding = asyncio.Lock()
        self._said: dict[int, str] = {}
        """By stage, who we said would hold its shadow, and why."""
        self._missing: list[str] = []
        """Why stages have no place for a shadow, as we last said."""

    async def run(self) -> None:
        """Keep what falls to us fresh; a source that is slow keeps no other copy waiting."""
        for stage, shadow in sorted(self._shelf.shadows.items()):  # of when we served another stage, or none
            self._log.emit("shadow.held", stage=stage, of_step=shadow.step)
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(LOOK_S)
                for one in self._begun():
                    group.create_task(self._carry_out(one))

    async def look(self) -> None:
        """Fetch what is due now, one after the other."""
        for one in self._begun():
            await self._carry_out(one)

    def _begun(self) -> list[Due]:
        """The refreshes that are due now, each to be carried out."""
        self._forget_given()
        found = self._due() if self._budget.share > 0.0 else []
        self._refreshing |= {int(one.kept.piece) for one in found}
        return found

    async def _carry_out(self, one: Due) -> None:
        nbytes = 0
        try:
            nbytes = await self._refresh(one)
        finally:
            self._shelf.bucket_bytes += one.kept.nbytes - nbytes
            self._refreshing.discard(int(one.kept.piece))

    async def own(self, holder: PeerId, request: ShadowRequest) -> Refresh | None:
        """Of the stage that we serve: whole, or for who has the copy of that name; None where we do not know it (any more)."""
        async with self._encoding:  # each takes memory
            known = self._shelf.given.get(holder)
            if not request.have:
                old, codec = empty(self._sizes[self._recipe.stage]), _whole(request)
            elif known is not None and known.name == request.have:
                old, codec = known, DIFFERENCE
            else:
                return None
            step, state = self._trained(), await self._doors.learner.run(self._learner.local_params)
            try:
                sent, shadow = await self._doors.side.run(refresh, old, state, step, codec)
            except CodecError:  # not finite: who trains with that stops by itself
                return None
            self._shelf.give(holder, shadow)
            return sent

    def _forget_given(self) -> None:
        """What those have of our stage who are gone, or have let go of it."""
        now, unlisted = asyncio.get_running_loop().time(), dict[PeerId, tuple[bytes, float]]()
        for holder, shadow in list(self._shelf.given.items()):
            said = self._roll.present(holder) if self._roll.alive(holder, now) else None
            if said is not None and self._recipe.stage in {copy.stage for copy in said.shadows}:
                continue
            name, since = self._unlisted.get(holder, (shadow.name, now))
            since = since if name == shadow.name else now
            if now < since + UNLISTED_S:
                unlisted[holder] = shadow.name, since
            else:
                del self._shelf.given[holder]
        self._unlisted = unlisted

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
            if (stage > 0 or self._roll.decides_together)
            and peers
            and (len(peers) < RICH or fall_together(peers, training))
        ]
        staying = [peer for peer in training if said[bytes.fromhex(peer.name)].wants < 0]
        mine = self._places(said, staying, poor)
        elsewhere = {copy.stage for peer, one in said.items() if peer != self._roll.me for copy in one.shadows}
        needed = set(poor) - elsewhere - {self._recipe.stage}  # whoever is to hold them has not fetched them yet
        for stage in set(self._shelf.shadows) - set(mine) - needed - self._refreshing:
            if trained[stage]:  # it lies somewhere else, or nowhere
                self._shelf.drop(stage)
                self._log.emit("shadow.dropped", stage=stage)
        for stage, source in list(self._shelf.sources.items()):
            if trained[stage] and source not in self._roll.training(stage, now):  # a founder may be about to
                del self._shelf.sources[stage]
        self._alarm({stage: len(trained[stage]) for stage in mine})
        kept = {stage: self._kept(stage, len(trained[stage])) for stage in mine}
        counted_to = step if self._counted_to is None else self._counted_to
        steps, self._counted_to = max(0, step - counted_to), max(step, counted_to)
        sent = steps * self._step_bytes * len(mine) // max(1, len(poor))
        shelf = self._shelf
        shelf.bucket_bytes = filled(shelf.bucket_bytes, sent, list(kept.values()), self._budget)
        shelf.allowed_bytes += self._budget.share * sent
        found, shelf.bucket_bytes = due(
            [one for stage, one in kept.items() if stage not in self._refreshing],
            step,
            bucket_bytes=shelf.bucket_bytes,
            loss_per_step=self._loss_per_step(said),
            budget=self._budget,
        )
        return found

    def _alarm(self, replicas: dict[int, int]) -> None:
        """Note which stages have come down to their last replica."""
        for stage, count in replicas.items():
            if count == 1 < self._replicas.get(stage, count):
                self._alarmed.add(stage)
        self._alarmed &= {stage for stage, count in replicas.items() if count == 1}
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
            self._log.emit("shadow.missing", reasons=missing)
        self._missing = missing
        return [int(one.piece) for one in mine]

    def _kept(self, stage: int, replicas: int) -> Kept:
        shadow = self._shelf.shadows.get(stage)
        rate = min(0.99, self._roll.losses.per_hour)
        return Kept(
            piece=str(stage),
            holder=self._roll.me.hex(),
            step=None if shadow is None else shadow.step,
            nbytes=(DIFFERENCE if stage in self._shelf.sources else FIRST).expected_nbytes(self._sizes[stage]),
            replicas=replicas,
            setback_per_step=self._setbacks.per_step(stage),
            missing_setback=self._setbacks.without_copy(stage, rate),
            alarmed=stage in self._alarmed,
        )

    def _loss_per_step(self, said: dict[PeerId, Present]) -> float:
        step_s = max((one.step_s for one in said.values()), default=0.0) or 1.0
        return -math.expm1(-self._roll.losses.per_hour / 3600.0 * step_s)

    async def _refresh(self, one: Due) -> int:
        """The bytes that it took; 0 where nobody had it to give."""
        stage, shelf = int(one.kept.piece), self._shelf
        alarmed = stage in self._alarmed
        usual = shelf.sources.pop(stage, None)  # should that not continue it, a whole copy waits for the bytes
        have = None if usual is None else shelf.shadows[stage]
        training = self._roll.training(stage, asyncio.get_running_loop().time())
        for source in training if usual is None else [usual]:
            try:
                shadow, nbytes = await fetch(self._network, self._doors.side, source, stage, self._sizes[stage], have)
            except NetworkError:
                continue
            except RemoteError as error:
                self._refused(error)
                continue
            # no later than it can be: one that claims more would never be refreshed
            shadow = replace(shadow, step=min(shadow.step, self._step()))
            shelf.keep(stage, shadow, source)
            shelf.received_bytes += nbytes
            self._log.emit(
                "shadow",
                stage=stage,
                of_step=shadow.step,
                bytes=nbytes,
                received_bytes=shelf.received_bytes,
                allowed_bytes=int(shelf.allowed_bytes),
                reason=one.why,
            )
            if alarmed:  # and not since we asked
                self._alarmed.discard(stage)
            return nbytes
        return 0


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
