"""Exact copies of embedding, last norm and head at the stages beside stage 0, where lost stages come back by CheckFree's rule alone (2506.15461; digest, 2.2).

    stage 1 and the last stage ──▶ a data node: what it trains of them now, fp32, after every step      (`Ends.run`)
    who begins stage 0 anew    ──▶ those peers: the newest copy that any of them has                    (`newest`)

CheckFree's rule makes layers of layers, and nothing else of a model resembles its ends; so they are restored as they were. With the ladder they come with the
shadow of stage 0 (`shadows`) instead, for an exact copy in every step is many times what its budget allows.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from farflung.compression.codec import CodecError
from farflung.compression.registry import parse_codec
from farflung.node import framing
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.fetching import check_payload
from farflung.node.network import Network, PeerId, Stream
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.errors import NetworkError, Refused, RemoteError
from farflung.protocol.keys import short
from farflung.protocol.roll import Roll
from farflung.training.pipeline_slice import ends_of, num_ends

EXACT = parse_codec("fp32")

KIND = "ends"

LOOK_S = 1.0
"""Between two looks at whether there was a step."""

FETCH_S = 30.0
"""Until the first byte of a copy comes."""

STEP_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EndsCopy:
    """The ends of a model as a data node had them."""

    values: Tensor
    """fp32 [n] on the CPU, as of `pipeline_slice.ends_of`."""
    step: int
    """The pipeline's next step then."""


@dataclass(slots=True)
class EndsShelf:
    """What a machine keeps of them; it outlives the peer, which may move."""

    copy: EndsCopy | None = None
    received_bytes: int = 0
    """Of all copies so far."""


class Ends:
    """A peer's part in it: a data node says what it trains, its neighbours keep it. `serve` and, until cancelled, `run`."""

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
        step: Callable[[], int],  # number of the pipeline's next step
    ) -> None:
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
        self._encoding = asyncio.Lock()

    @property
    def _keeps(self) -> bool:
        """Whether our stage is beside stage 0: its embedding goes to the first one, and its head gets from the last one."""
        return self._recipe.stage in (1, self._roll.stages - 1) and self._recipe.stage > 0

    def serve(self) -> None:
        """Hand out what we train, or keep, to whoever asks."""

        async def serve(stream: Stream) -> None:
            if not self._admitted(stream.peer):
                raise Refused("asks for copies before being admitted to the swarm", peer=stream.peer)
            async with self._encoding:  # each takes memory
                copy = await self._own() if self._recipe.stage == 0 else self._shelf.copy
                payload = None if copy is None else await self._doors.side.run(EXACT.encode, copy.values)
            async with asyncio.timeout(FETCH_S):
                await stream.write((0 if copy is None else copy.step).to_bytes(STEP_BYTES, "big"))
            await framing.write_long_blob(stream, payload)

        self._network.serve(KIND, framing.guarded(serve, self._refused, within_s=None))

    async def run(self) -> None:
        """Keep a copy as new as the last step, where that falls to us."""
        if not self._keeps:
            self._shelf.copy = None  # of when we served another stage
            return
        while True:
            await asyncio.sleep(LOOK_S)
            kept, step = self._shelf.copy, self._step()
            if kept is None or kept.step < step:
                await self._renew(step)

    async def _renew(self, step: int) -> None:
        for source in self._roll.training(0, asyncio.get_running_loop().time()):
            try:
                copy, nbytes = await fetch(self._network, self._doors, source, self._recipe)
            except NetworkError:
                continue
            except RemoteError as error:
                self._refused(error)
                continue
            shelf = self._shelf
            # no later than it can be: one that claims more would never be renewed
            shelf.copy = EndsCopy(values=copy.values, step=min(copy.step, step))
            shelf.received_bytes += nbytes
            self._log.emit("ends", of_step=shelf.copy.step, bytes=nbytes, received_bytes=shelf.received_bytes)
            return

    async def _own(self) -> EndsCopy:
        step, state = self._step(), await self._doors.learner.run(self._learner.local_params)
        return EndsCopy(values=ends_of(self._recipe.whole.model, self._recipe.part, state), step=step)


async def fetch(network: Network, doors: Doors, holder: PeerId, recipe: StageRecipe) -> tuple[EndsCopy, int]:
    """What a peer has of the ends, and the bytes that it came in. Raises NetworkError; Refused naming the peer for what is none."""
    numel = num_ends(recipe.whole.model)
    try:
        async with asyncio.timeout(FETCH_S) as patience:
            stream = await network.open_stream(holder, KIND)
            try:
                step = int.from_bytes(await framing.read_exactly(stream, STEP_BYTES), "big")
                patience.reschedule(None)
                payload = await framing.read_long_blob(stream, EXACT.max_nbytes(numel))
            finally:
                await stream.close()
    except TimeoutError as error:
        raise NetworkError("no answer to a request for copies of the ends") from error
    if payload is None:
        raise NetworkError(f"{short(holder)} has no copy of the ends")
    try:
        await check_payload(doors.side, EXACT, payload, numel)
    except CodecError as error:
        raise Refused(f"not the ends of our model: {error}", peer=holder) from error
    return EndsCopy(values=await doors.side.run(EXACT.decode, payload, numel), step=step), len(payload)


async def newest(
    network: Network,
    doors: Doors,
    recipe: StageRecipe,
    roll: Roll,
    shelf: EndsShelf,  # our own
    refused: Callable[[RemoteError], None],
) -> EndsCopy | None:
    """Of the copies here and at the stages beside stage 0; None where nobody has one."""
    now = asyncio.get_running_loop().time()
    found = [] if shelf.copy is None else [shelf.copy]
    for holder in sorted({peer for stage in (1, roll.stages - 1) for peer in roll.serving(stage, now)}):
        try:
            found.append((await fetch(network, doors, holder, recipe))[0])
        except NetworkError:
            continue
        except RemoteError as error:
            refused(error)
    return max(found, key=lambda copy: copy.step, default=None)
