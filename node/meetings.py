"""How the groups of a large swarm keep together: now and then, owners of parts mix in how another group stands.

A group is a swarm of its own, with rounds of its own (`protocol.chain.Half`). What keeps all of them at one model are meetings, as in NoLoCo (2506.10911), where pairs of peers meet and
here pairs of groups do: in every `swarm.meet_every`-th round of a fragment each owner asks a peer of another group for its outer parameters of that part, while contributions come in, and adds

    w (theta - theta'),    w such that the outer step, momentum and all, goes half of the way to theta' (`training.rules.halfway`)

to the mean before it is encoded. The others decode it like any mean, so one group has the same bits everywhere, and no commit says anything of it. Each part may meet
another group at another version of its own. If nobody answers in time, the part does not meet, and nothing is lost but that, and the time: the mean has waited.

Of each parameter it moves 16 bits to one peer of the group, for all of it together, where a round moves a few bits to each.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from farflung.node import framing
from farflung.node.door import Doors
from farflung.node.learner import Learner
from farflung.node.network import Network, PeerId, Stream
from farflung.node.slots import Slots
from farflung.protocol.errors import Malformed, NetworkError, Refused, RemoteError
from farflung.protocol.headers import OuterRequest
from farflung.protocol.limits import MAX_NEIGHBOURS, MAX_OUTER_ELEMENTS
from farflung.protocol.messages import Part, Plan
from farflung.protocol.neighbours import Neighbours

BYTES = 2
"""An element, bf16."""

SHARE = 0.5
"""Of the time for contributions, which a meeting may take."""

MOST_TIMES = 4.0
"""As long as our outer parameters of a part another group's may be: whoever makes some up must not throw our group off its way at one go. Groups that
meet differ in length by percents."""

TINY = 0.01
"""Root mean square below which a part's parameters, ours or theirs, say nothing by their length: biases begin with zeros."""

SERVED_AT_ONCE = 4
"""Other groups' owners; more wait for their turn."""

VERSION_BYTES = 8

KIND = "outer"


class Seen(NamedTuple):
    """What a group has said in our turns."""

    turn: int
    """Ours, the last one."""
    version: int
    """Its version then, when we first met it in that turn."""
    before: int
    """And in the turn before, in which we met it; -1: in none."""


class Meetings:
    """See the module."""

    def __init__(
        self,
        network: Network,
        doors: Doors,
        learner: Learner,
        neighbours: Neighbours,
        *,
        every: int,  # so manieth round of a fragment; 0: none
        turn: Callable[[], int],  # how often each fragment has had its round
        weight: Callable[[], float],  # of a difference in the mean of the next round; see `halfway`
        admission: bytes,  # ours
        admits: Callable[[PeerId, bytes], bool],
        version: Callable[[], int],  # of the outer state
        steady: Callable[[], asyncio.Event],  # set while nothing changes that
        met: Callable[
            [bytes, Plan, Part, PeerId, Tensor], None
        ],  # plan and its name, part, whom, what is added to the mean
        unmet: Callable[[Plan, Part, PeerId, str], None],  # whom we asked, and why it came to nothing
        refused: Callable[[RemoteError], None],
    ) -> None:
        self._network = network
        self._doors = doors
        self._learner = learner
        self._neighbours = neighbours
        self._every = every
        self._turn = turn
        self._weight = weight
        self._admission = admission
        self._admits = admits
        self._version = version
        self._steady = steady
        self._met = met
        self._unmet = unmet
        self._refused = refused
        self._slots = Slots(SERVED_AT_ONCE)
        self._served: set[PeerId] = set()
        """Who is being answered, or waits for that: nobody has more than one answer at a time."""
        self._asking: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        """Of each peer we ask for one part at a time."""
        self._seen: dict[bytes, Seen] = {}
        """Of groups that we have met."""

    # ---- as an owner -------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether owners meet in the next round, if they know whom. By turns of all fragments, and not by rounds: else some of them might never meet."""
        return self._every > 0 and self._turn() % self._every == 0 and bool(self._neighbours.groups)

    async def term(self, plan_id: bytes, plan: Plan, k: int) -> Tensor | None:
        """What to add to the mean of our part `k`, fp32 [stop - start]; None where nobody was met."""
        part = plan.parts[k]
        peer = self._neighbours.choose(self._turn() // max(1, self._every) + k)
        if peer is None:
            return None
        weight = self._weight()
        group, turn = self._neighbours.groups[peer], self._turn()
        theirs: Tensor | None = None
        try:
            async with asyncio.timeout(SHARE * plan.scatter_s):
                theirs, version = await self._ask(peer, part)
                await self._steady().wait()
            if self._stands(group, turn, version):
                self._unmet(
                    plan, part, peer, f"its group has come no further than version {version} since we last met it"
                )
                return None
            term = await self._doors.side.run(self._difference, part, theirs, weight)
            if term is None:
                raise Refused(f"outer parameters more than {MOST_TIMES:g} times as long as ours", peer=peer)
        except (NetworkError, TimeoutError, RemoteError) as error:
            if theirs is None or isinstance(error, RemoteError):
                self._neighbours.forget(peer)  # records tell of others, and of this one again if it is there
            if isinstance(error, RemoteError):
                self._refused(error)
            late = f"{'no answer' if theirs is None else 'our own state was not ready'} within {SHARE * plan.scatter_s:.1f} s"
            self._unmet(plan, part, peer, late if isinstance(error, TimeoutError) else str(error))
            return None
        self._met(plan_id, plan, part, peer, term)
        return term

    def _stands(self, group: bytes, turn: int, version: int) -> bool:
        """Whether a group has had no round since our last turn: it has lost its quorum, or is slow, and would hold us back once more by what it has told us already."""
        seen = self._seen.pop(group, Seen(turn, version, -1))
        if seen.turn != turn:
            seen = Seen(turn, version, seen.version)
        elif seen.version <= seen.before:
            seen = seen._replace(version=version)  # it stood when we asked first
        self._seen[group] = seen
        if len(self._seen) > MAX_NEIGHBOURS:
            del self._seen[next(iter(self._seen))]
        return version <= seen.before

    async def _ask(self, peer: PeerId, part: Part) -> tuple[Tensor, int]:
        """And the version of which its first piece is."""
        versions: list[int] = []
        theirs = torch.empty(part.stop - part.start, dtype=torch.float32)
        async with self._asking.setdefault(peer, asyncio.Lock()):
            stream = await self._network.open_stream(peer, KIND)
            try:
                for start in range(part.start, part.stop, MAX_OUTER_ELEMENTS):
                    stop = min(start + MAX_OUTER_ELEMENTS, part.stop)
                    into = theirs[start - part.start : stop - part.start]
                    versions.append(await self._ask_piece(stream, start, stop, into))
            finally:
                await stream.close()
        return theirs, versions[0]

    async def _ask_piece(self, stream: Stream, start: int, stop: int, theirs: Tensor) -> int:
        """Into `theirs`; returns their version."""
        await framing.write_header(stream, OuterRequest(start, stop, self._admission))
        version = int.from_bytes(await framing.read_exactly(stream, VERSION_BYTES), "big")
        data = await framing.read_long_blob(stream, BYTES * (stop - start))
        if data is None:
            raise NetworkError("it tells nothing of its outer state at the moment")
        if len(data) != BYTES * (stop - start):
            raise Malformed("other outer parameters than were asked for", peer=stream.peer)
        if not await self._doors.side.run(_decode, data, theirs):
            raise Malformed("outer parameters that are no numbers", peer=stream.peer)
        return version

    def _difference(self, part: Part, theirs: Tensor, weight: float) -> Tensor | None:
        """None where they are so long that they cannot be of a group that has learnt what ours has."""
        ours = self._learner.outer.params[part.start : part.stop]
        tiny = TINY * math.sqrt(len(ours))
        if not float(theirs.norm()) <= MOST_TIMES * max(float(ours.norm()), tiny):
            return None
        return ours.sub(theirs).mul_(weight)

    # ---- for others --------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Tell other groups how ours stands."""
        self._network.serve(KIND, framing.guarded(self._serve, self._refused, within_s=None))

    async def _serve(self, stream: Stream) -> None:
        """One request after another, until whoever asks ends the stream."""
        while True:
            request = await self._next_request(stream)
            if stream.peer in self._served:
                # What was given up may be noticed by its sender first, so this is no offence.
                await self._tell(stream, 0, None)
                return
            self._served.add(stream.peer)
            try:
                async with self._slots.slot(0):
                    await self._answer(stream, request)
            finally:
                self._served.discard(stream.peer)

    async def _next_request(self, stream: Stream) -> OuterRequest:
        async with asyncio.timeout(framing.STALL_S):
            request = await framing.read_header(stream, OuterRequest)
        if not self._admits(stream.peer, request.admission):
            raise Refused("asks for outer parameters without an invitation", peer=stream.peer)
        if not request.start < request.stop <= len(self._learner.outer.params):
            raise Refused(f"asked for elements {request.start} to {request.stop}", peer=stream.peer)
        if request.stop - request.start > MAX_OUTER_ELEMENTS:
            raise Refused(f"asked for more than {MAX_OUTER_ELEMENTS} elements at once", peer=stream.peer)
        return request

    async def _answer(self, stream: Stream, request: OuterRequest) -> None:
        async with asyncio.timeout(
            framing.STALL_S
        ):  # or whoever downloads its state for long would have no place for others
            await self._steady().wait()
        version, data = self._version(), None
        if version >= 0:
            data = await self._doors.side.run(_encoded, self._learner.outer.params[request.start : request.stop])
        await self._tell(stream, max(version, 0), data)

    async def _tell(self, stream: Stream, version: int, data: memoryview | None) -> None:
        await stream.write(version.to_bytes(VERSION_BYTES, "big"), overhead=VERSION_BYTES)
        await framing.write_long_blob(stream, data)


def _encoded(params: Tensor) -> memoryview:
    data: Any = (
        params.to(torch.bfloat16).view(torch.uint8).numpy()
    )  # Any: numpy declares no buffer protocol before 3.12
    return memoryview(data)


def _decode(data: bytes, into: Tensor) -> bool:
    """Whether all of it are numbers."""
    into.copy_(torch.frombuffer(bytearray(data), dtype=torch.bfloat16))
    return bool(into.isfinite().all())
