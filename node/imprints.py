"""Imprints: the last activations that went into a stage and came out of it, as its neighbours remember them.

    ... ──▶ stage before ──x──▶ the stage ──y──▶ stage after ──▶ ...
             has sent x                           was sent y

When a stage is lost with all its peers, pairs (x, y) of one microbatch are all that is left of what it computed. Whoever makes it anew asks for some
(`renewal`), to see whether what it has made does any of that, and to fit it (`training/recovery_fit.py`).

A peer keeps the payloads as they crossed the boundary: of the first microbatches of the last steps in which it had any, so that those before and after a
stage keep the same ones. Nothing is sent for it before somebody asks, and then the first sequence of each: a fit to all of a few microbatches would take
longer than it gains. Which pairs are asked for is decided in `protocol/imprint_pairs.py`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from farflung.compression.codec import CodecError, Payload
from farflung.node import framing
from farflung.node.door import Door
from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.errors import Malformed, NetworkError, Refused, RemoteError
from farflung.protocol.headers import Imprinted, ImprintKey, ImprintList, ImprintListRequest, ImprintRequest
from farflung.protocol.imprint_pairs import Halves, choose
from farflung.protocol.limits import MAX_IMPRINTS
from farflung.training.pipeline_boundary import Boundary
from farflung.training.recovery_fit import Pair

T = TypeVar("T")

KIND = "imprint"

STEPS = 2
"""Of which activations are kept: the one in which a stage is lost may not have brought any whole pair."""

MICROBATCHES = MAX_IMPRINTS // STEPS
"""The first ones of each step."""

LIST_S, FETCH_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Imprint:
    """One activation as it crossed a boundary: [batch, length, width], encoded."""

    batch: int
    length: int
    payload: Payload


@dataclass(slots=True)
class Imprints:
    """What a peer remembers of other stages."""

    _kept: dict[tuple[int, bool], dict[bytes, dict[ImprintKey, Imprint]]] = field(default_factory=dict)
    """By (stage, whether it is output), window and microbatch; the newest window last."""

    def keep(self, stage: int, key: ImprintKey, imprint: Imprint, *, output: bool) -> None:
        """What went into the stage, or has come out of it. Of stage 0 tokens went in, which nobody else has."""
        if stage == 0 or key.microbatch >= MICROBATCHES:
            return
        windows = self._kept.setdefault((stage, output), {})
        windows.setdefault(key.window, {})[key] = imprint
        while len(windows) > STEPS:
            del windows[next(iter(windows))]

    def keys(self, stage: int, *, output: bool) -> tuple[ImprintKey, ...]:
        windows = self._kept.get((stage, output), {})
        return tuple(key for found in windows.values() for key in found)

    def get(self, request: ImprintRequest) -> Imprint | None:
        windows = self._kept.get((request.stage, request.output), {})
        return windows.get(request.key.window, {}).get(request.key)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What neighbours of a stage have of it."""

    pairs: Sequence[Pair] = ()
    """Inputs and outputs, [1, T, D] each."""
    judges: bool = False
    """Whether they are of late enough steps to say what is no copy of it."""


def serve_imprints(
    network: Network,
    imprints: Imprints,
    boundary: Boundary,  # of forwards
    side: Door,
    admitted: Callable[[PeerId], bool],
    refused: Callable[[RemoteError], None],
) -> None:
    """Hand out what we remember."""

    async def serve(stream: Stream) -> None:
        if not admitted(stream.peer):
            raise Refused("asks for activations before being admitted to the swarm", peer=stream.peer)
        request: ImprintListRequest | ImprintRequest = await framing.read_header(
            stream, ImprintListRequest, ImprintRequest
        )
        if isinstance(request, ImprintListRequest):
            inputs, outputs = (imprints.keys(request.stage, output=output) for output in (False, True))
            await framing.write_header(stream, ImprintList(inputs, outputs))
            return
        found = imprints.get(request)
        payload = None if found is None else await side.run(_first_sequence, found, boundary)
        if found is None or payload is None:
            await framing.write_header(stream, Imprinted(0, 0))
        else:
            await framing.write_with_header(stream, Imprinted(found.length, len(payload)), payload)

    network.serve(KIND, framing.guarded(serve, refused, within_s=FETCH_S))


def _first_sequence(imprint: Imprint, boundary: Boundary) -> Payload | None:
    whole = boundary.decode(imprint.payload, imprint.batch, imprint.length, device=torch.device("cpu"))
    try:
        return boundary.encode(whole[:1])
    except CodecError:  # whoever sent them may have written numbers that decode, and that no encoder would
        return None


async def gather_pairs(
    network: Network,
    peers: Sequence[PeerId],  # that may remember some
    stage: int,
    boundary: Boundary,
    seq_len: int,  # no sequence is longer
    *,
    reached: int,  # the next step of the run
    side: Door,
    refused: Callable[[RemoteError], None],
) -> Remembered:
    """What the neighbours of a stage remember of it; nothing where nobody does, or who does cannot be reached."""
    asking = _Asking(network, stage, boundary, seq_len, side, refused)
    lists = await asyncio.gather(*(asking.fetch_list(peer) for peer in peers))
    inputs, outputs = defaultdict[ImprintKey, list[PeerId]](list), defaultdict[ImprintKey, list[PeerId]](list)
    for peer, listed in zip(peers, lists, strict=True):
        if listed is not None:
            for keys, holders in ((listed.inputs, inputs), (listed.outputs, outputs)):
                for key in keys:
                    holders[key].append(peer)
    choice = choose(inputs, outputs, reached)
    pairs = await asyncio.gather(*(asking.fetch_pair(halves) for halves in choice.pairs))
    return Remembered([pair for pair in pairs if pair is not None], choice.judges)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Requests about one stage."""

    network: Network
    stage: int
    boundary: Boundary
    seq_len: int
    side: Door
    refused: Callable[[RemoteError], None]

    async def fetch_list(self, peer: PeerId) -> ImprintList | None:
        async def read(stream: Stream) -> ImprintList:
            return await framing.read_header(stream, ImprintList)

        return await self._ask(peer, ImprintListRequest(self.stage), read, within_s=LIST_S)

    async def fetch_pair(self, halves: Halves) -> Pair | None:
        """None when one half cannot be had, or they do not belong together."""
        key = halves.key
        x, y = await asyncio.gather(
            self._fetch(key, halves.before, output=False), self._fetch(key, halves.after, output=True)
        )
        return None if x is None or y is None or x.shape != y.shape else (x, y)

    async def _fetch(self, key: ImprintKey, peer: PeerId, *, output: bool) -> Tensor | None:
        async def read(stream: Stream) -> Tensor | None:
            header = await framing.read_header(stream, Imprinted)
            if header.length == 0:
                return None
            if header.length > self.seq_len or header.nbytes > self.boundary.max_nbytes(header.length):
                raise Refused(f"{header.nbytes} bytes of activations for {header.length} tokens", peer=peer)
            payload = await framing.read_payload(stream, header.nbytes)
            try:
                x = await self.side.run(self.boundary.decode, payload, 1, header.length, device=torch.device("cpu"))
            except CodecError as error:
                raise Malformed(f"activations of stage {self.stage}: {error}", peer=peer) from error
            if not bool(x.isfinite().all()):
                raise Refused(f"activations of stage {self.stage} that are not finite", peer=peer)
            return x

        request = ImprintRequest(self.stage, output, key)
        return await self._ask(peer, request, read, within_s=FETCH_S)

    async def _ask(
        self,
        peer: PeerId,
        request: ImprintListRequest | ImprintRequest,
        read: Callable[[Stream], Awaitable[T]],
        *,
        within_s: float,
    ) -> T | None:
        """What `read` makes of the answer; None when there is none, or none that counts."""
        try:
            async with asyncio.timeout(within_s):
                stream = await self.network.open_stream(peer, KIND)
                try:
                    await framing.write_header(stream, request)
                    return await read(stream)
                finally:
                    await stream.close()
        except (NetworkError, TimeoutError):
            return None
        except RemoteError as error:
            self.refused(error)
            return None
