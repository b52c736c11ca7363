"""The peers of one stage tell each other what they have summed up in a step, so that all of them take the same inner step.

For benchmarks of pipelines, whose stages have few peers and lose none while they learn: everybody sends everything to everybody else, as fp32. Whoever
adds the sums in the same order has the same bits.
"""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from farflung.node import framing
from farflung.node.network import Network, PeerId, Stream
from farflung.protocol.errors import RemoteError
from farflung.training.pipeline_worker import Accumulated

SUMS = "sums"

WITHIN_S = 60.0
"""For one exchange; after that somebody is gone, and the benchmark with it."""

_WINDOW_BYTES = 32


def save_sums(file: Path | BinaryIO, accumulated: Accumulated) -> None:
    """Sums and visits as an .npz file."""
    arrays: dict[str, Any] = {f"{part}|{name}": total.numpy() for (part, name), total in accumulated.sums.items()}
    arrays |= {f"{part}": np.int64(count) for part, count in accumulated.visits.items()}
    np.savez(file, **arrays)


def load_sums(file: Path | BinaryIO) -> Accumulated:
    """What `save_sums` wrote."""
    accumulated = Accumulated()
    with np.load(file) as arrays:
        for key, array in arrays.items():
            part, named, name = key.partition("|")
            if named:
                accumulated.sums[int(part), name] = torch.from_numpy(array)
            else:
                accumulated.visits[int(part)] = int(array)
    return accumulated


class Mates:
    """One peer's exchanges with those who hold the same stages."""

    def __init__(self, network: Network, most_bytes: int, refused: Callable[[RemoteError], None]) -> None:
        """`most_bytes`: of somebody's sums."""
        self._network = network
        self._most_bytes = most_bytes
        self._came: dict[tuple[bytes, PeerId], bytes | None] = {}
        self._arrived = asyncio.Condition()
        network.serve(SUMS, framing.guarded(self._serve, refused, within_s=WITHIN_S))

    async def exchange(self, window: bytes, mine: Accumulated, members: Sequence[PeerId]) -> list[Accumulated]:
        """What each of the members, of whom we are one, has summed up in this step; in their order.

        Raises NetworkError; TimeoutError when one of them does not tell.
        """
        file = io.BytesIO()
        save_sums(file, mine)
        others = [member for member in members if member != self._network.peer_id]
        async with asyncio.timeout(WITHIN_S):
            async with asyncio.TaskGroup() as group:
                for other in others:
                    group.create_task(self._tell(other, window, file.getvalue()), name="sums to a mate")
            async with self._arrived:
                await self._arrived.wait_for(lambda: all((window, other) in self._came for other in others))
        theirs = {other: self._came.pop((window, other)) for other in others}
        return [mine if member not in theirs else load_sums(io.BytesIO(theirs[member] or b"")) for member in members]

    async def _tell(self, other: PeerId, window: bytes, data: bytes) -> None:
        stream = await self._network.open_stream(other, SUMS)
        try:
            await stream.write(window)
            await framing.write_blob(stream, data)
        finally:
            await stream.close()

    async def _serve(self, stream: Stream) -> None:
        window = await framing.read_exactly(stream, _WINDOW_BYTES)
        data = await framing.read_blob(stream, self._most_bytes)
        async with self._arrived:
            self._came[window, stream.peer] = data
            self._arrived.notify_all()
