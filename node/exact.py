"""Exact copies of what peers train, where lost stages come back by CheckFree's rule alone (2506.15461; digest, 2.2).

    who begins a stage anew    ──▶ the stages beside it: their layers as they train them now        (`fetch_layers`)
    stage 1 and the last stage ──▶ data nodes: have embedding, last norm and head changed? then a copy, fp32      (`Exact.run`)
    who begins stage 0 anew    ──▶ those peers: of their copies that which most have                (`fetch_ends`)

CheckFree's rule makes layers of layers, and nothing else of a model resembles its *ends*; so they are restored as they were. With the ladder they come with the
shadow of stage 0 (`shadows`) instead, for an exact copy after every step is many times what its budget allows. A look comes every second, so a copy is as old
as that and its transfer: where steps are quick it misses some.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from farflung.compression.codec import CodecError, Payload
from farflung.compression.digest import digest_of
from farflung.compression.registry import parse_codec
from farflung.node import framing
from farflung.node.door import Door, Doors
from farflung.node.events import EventLog
from farflung.node.fetching import SLOWEST_BYTES_PER_S, check_payload, rotated
from farflung.node.network import Network, PeerId, Stream
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.headers import ExactHeader, ExactRequest
from farflung.protocol.roll import Roll
from farflung.training.pipeline_slice import ends_of, layers_of, num_ends

EXACT = parse_codec("fp32")

KIND = "exact"

LOOK_S = 1.0
"""Between two questions whether there is a newer copy."""

FETCH_S = 120.0
"""Until somebody who is asked answers: the source takes its copy between two steps."""

HEAD_S = 20.0
"""The same where only what there is is asked."""

Mark = tuple[int, int]
"""Of a copy: the steps of the run that it has had, and the rounds among them."""

ANY: Mark = (0, 0)
"""Newer than which any copy is that has been trained."""

NONE: Mark = (1 << 62, 0)
"""The same that no copy is: who says so only asks what there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactCopy:
    """Parameters as somebody trained them."""

    payload: Payload
    """As `EXACT` encodes them."""
    name: bytes
    """Digest of that."""
    mark: Mark


@dataclass(slots=True)
class EndsShelf:
    """What a machine keeps of embedding, last norm and head; it outlives the peer, which may move."""

    copy: ExactCopy | None = None
    life: int = 0
    """Of stage 0, in which it was fetched: the next one counts on from the last round, and so from less than this may have had."""
    received_bytes: int = 0
    """Of all copies so far."""


class Exact:
    """A peer's part in it: it says what it trains, and beside stage 0 keeps the ends. `serve` and, until cancelled, `run`."""

    def __init__(
        self,
        *,
        network: Network,
        roll: Roll,
        recipe: StageRecipe,
        learner: StageLearner,
        doors: Doors,
        shelf: EndsShelf,
        log: EventLog,
        admitted: Callable[[PeerId], bool],
        refused: Callable[[RemoteError], None],
        step: Callable[[], int],
        mark: Callable[[], Mark | None],
    ) -> None:
        """`step`: number of the pipeline's next step; `mark`: of our own parameters, None while we have none that count."""
        self._network = network
        self._roll = roll
        self._recipe = recipe
        self._learner = learner
        self._doors = doors
        self._shelf = shelf
        self._log = log
        self._admitted = admitted
        self._refused = refused
        self._step = step
        self._mark = mark
        self._own: ExactCopy | None = None
        """Of a data node, the copy of the ends that was asked for last."""
        self._copying = asyncio.Lock()

    def serve(self) -> None:
        """Hand out what we train, or keep, to whoever asks."""

        async def serve(stream: Stream) -> None:
            if not self._admitted(stream.peer):
                raise Refused("asks for copies before being admitted to the swarm", peer=stream.peer)
            async with asyncio.timeout(FETCH_S):
                request = await framing.read_header(stream, ExactRequest)
            kept = request.ends and self._recipe.stage > 0
            copy = self._shelf.copy if kept else await self._copied(ends=request.ends)
            follows = copy is not None and copy.mark > (request.step, request.version)
            header = ExactHeader(b"", 0, 0, False) if copy is None else ExactHeader(copy.name, *copy.mark, follows)
            async with asyncio.timeout(FETCH_S):
                await framing.write_header(stream, header)
            if copy is not None and follows:
                await framing.write_long_blob(stream, copy.payload)

        self._network.serve(KIND, framing.guarded(serve, self._refused, within_s=None))

    async def run(self) -> None:
        """Keep the newest copy of the ends, where that falls to us: beside stage 0, if that can be begun anew. Its embedding goes to the first one, and its
        head gets from the last one."""
        stage = self._recipe.stage
        if stage == 0 or stage not in _beside_home(self._roll) or not self._roll.decides_together:
            self._shelf.copy = None  # of when we served another stage
            return
        while True:
            await asyncio.sleep(LOOK_S)
            await self._renew()

    async def _renew(self) -> None:
        shelf, life = self._shelf, self._roll.number(0)
        kept = ANY if shelf.copy is None or shelf.life != life else shelf.copy.mark
        numel = num_ends(self._recipe.whole.model)
        sources = rotated(self._roll.training(0, asyncio.get_running_loop().time()), self._roll.me)
        for source in sources:
            answer = await ask(self._network, self._doors.side, source, numel, kept, self._refused, ends=True)
            if answer is None or (copy := answer[1]) is None:
                continue  # it cannot be reached, has joined lately, or trains behind the others
            step, version = copy.mark
            # no later than it can be: one that claims more would never be renewed
            shelf.copy, shelf.life = replace(copy, mark=(min(step, self._step()), version)), life
            shelf.received_bytes += len(copy.payload)
            self._log.emit("ends", of_step=step, bytes=len(copy.payload), received_bytes=shelf.received_bytes)
            return

    async def _copied(self, *, ends: bool) -> ExactCopy | None:
        """What we train now, of the ends one copy for all who ask until the next step; None where that is nothing yet, or no numbers."""
        mark = self._mark()
        if mark is None:
            return None
        async with self._copying:
            if ends and self._own is not None and self._own.mark == mark:
                return self._own
            values = await self._doors.learner.run(self._taken, ends_of if ends else layers_of)
            try:
                payload = await self._doors.side.run(EXACT.encode, values)
            except CodecError:  # not finite: who trains with that stops by itself
                return None
            copy = ExactCopy(payload=payload, name=await self._doors.side.run(digest_of, payload), mark=mark)
            if ends:
                self._own = copy
            return copy

    def _taken(self, some: Callable[..., Tensor]) -> Tensor:
        return some(self._recipe.whole.model, self._recipe.part, self._learner.local_params())


async def ask(
    network: Network,
    side: Door,
    holder: PeerId,
    numel: int,
    newer_than: Mark,
    refused: Callable[[RemoteError], None],
    *,
    ends: bool,
) -> tuple[ExactHeader, ExactCopy | None] | None:
    """What a peer has, and that itself if it is newer; None where it cannot be had, or is none."""
    try:
        return await _asked(network, side, holder, numel, newer_than, ends=ends)
    except NetworkError:
        return None
    except RemoteError as error:
        refused(error)
        return None


async def _asked(
    network: Network, side: Door, holder: PeerId, numel: int, newer_than: Mark, *, ends: bool
) -> tuple[ExactHeader, ExactCopy | None]:
    """Raises NetworkError; Refused naming the peer for what is none."""
    limit = EXACT.max_nbytes(numel)
    within_s = HEAD_S if newer_than == NONE else FETCH_S + limit / SLOWEST_BYTES_PER_S
    try:
        async with asyncio.timeout(within_s):
            stream = await network.open_stream(holder, KIND)
            try:
                await framing.write_header(stream, ExactRequest(ends, *newer_than))
                header = await framing.read_header(stream, ExactHeader)
                payload = await framing.read_long_blob(stream, limit) if header.follows else None
            finally:
                await stream.close()
    except TimeoutError as error:
        raise NetworkError("no answer to a request for an exact copy") from error
    if payload is None:
        return header, None
    try:
        await check_payload(side, EXACT, payload, numel)
    except CodecError as error:
        raise Refused(f"not the parameters of our model: {error}", peer=holder) from error
    if await side.run(digest_of, payload) != header.name:
        raise Refused("a copy with another digest than it says", peer=holder)
    return header, ExactCopy(payload=payload, name=header.name, mark=(header.step, header.version))


async def fetch_layers(
    network: Network, side: Door, holders: Sequence[PeerId], numel: int, refused: Callable[[RemoteError], None]
) -> Tensor:
    """What any of these peers, all of one stage, trains in its layers, fp32 [numel] on the CPU. Raises NetworkError when none of them gives it."""
    for holder in holders:
        answer = await ask(network, side, holder, numel, ANY, refused, ends=False)
        if answer is not None and (copy := answer[1]) is not None:
            return await side.run(EXACT.decode, copy.payload, numel)
    raise NetworkError("nobody of the stage could be asked for its layers")


async def fetch_ends(
    network: Network,
    side: Door,
    recipe: StageRecipe,
    roll: Roll,
    shelf: EndsShelf,  # our own
    step: int,  # of the pipeline, the next one: nobody has a copy of a later one
    refused: Callable[[RemoteError], None],
) -> Tensor | None:
    """The ends, fp32 [n] on the CPU: of the copies here and at the stages beside stage 0 that which most have, of several the newest; None where nobody has
    one. Raises NetworkError when none can be had, and somebody might have one."""
    numel, now = num_ends(recipe.whole.model), asyncio.get_running_loop().time()
    beside = [roll.serving(stage, now) for stage in sorted(_beside_home(roll))]
    holders = sorted({peer for peers in beside for peer in peers})
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(network, side, peer, numel, NONE, refused, ends=True)) for peer in holders]
    found: dict[tuple[bytes, Mark], list[PeerId]] = {}
    if shelf.copy is not None:
        found[shelf.copy.name, shelf.copy.mark] = [roll.me]
    untold = not all(beside)
    for holder, task in zip(holders, asked, strict=True):
        answer = task.result()
        if answer is None or answer[0].step > step:
            untold = True
        elif (header := answer[0]).name:
            found.setdefault((header.name, (header.step, header.version)), []).append(holder)
    for name, mark in sorted(found, key=lambda one: (len(found[one]), one[1], one[0]), reverse=True):
        for holder in found[name, mark]:
            if holder == roll.me:
                copy = shelf.copy
            else:
                answer = await ask(network, side, holder, numel, ANY, refused, ends=True)
                copy = None if answer is None else answer[1]
            if copy is not None and copy.name == name:
                return await side.run(EXACT.decode, copy.payload, numel)
    if found or untold:
        raise NetworkError("those who may have copies of embedding and head could not be asked")
    return None


def _beside_home(roll: Roll) -> set[int]:
    return {1, roll.stages - 1}
