"""What a control message, a write to a stream and a call through a door take beside their way, between two real engines of one process.

Each is measured after a pause, as rounds come: one right after another takes a third of that, for the machine has turned to nothing else.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

from farflung.node import framing
from farflung.node.delivery import ACK, KIND
from farflung.node.door import ThreadDoor
from farflung.node.engine import Engine, EngineConfig
from farflung.node.enginelog import engine_log
from farflung.node.identity import Identity
from farflung.node.network import PeerId, Stream
from farflung.node.runner import run_loop
from farflung.node.signer import IdentitySigner
from farflung.protocol import headers, messages
from farflung.protocol.envelope import Opener, seal

PINGS = 300

PAUSE_S = 0.01
"""Before each of them."""

PART_BYTES = 4096
"""Of a small part of a round: one write, with its header."""


def measure_ways() -> dict[str, Any]:
    """Between two real engines, and from a loop to a thread."""
    with tempfile.TemporaryDirectory(prefix="farflung-") as folder, engine_log(Path(folder) / "engine.log"):
        return run_loop(_measure_ways())


async def _measure_ways() -> dict[str, Any]:
    here, there = Identity.generate(), Identity.generate()
    first = await Engine.create(here, EngineConfig.loopback())
    try:
        second = await Engine.create(there, EngineConfig.loopback(initial_peers=(first.addresses()[0],)))
        try:
            first.add_addresses(second.peer_id, second.addresses())
            messages_told = await _ping(first, here, second, there)
            return messages_told | {"write_s": await _write(first, second), "door_s": await _knock()}
        finally:
            await second.close()
    finally:
        await first.close()


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    """Median seconds of a work that is done PINGS times, each after a pause."""
    took: list[float] = []
    for _ in range(PINGS):
        await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        await work()
        took.append(time.perf_counter() - began)
    return median(took[PINGS // 10 :])


async def _ping(first: Engine, here: Identity, second: Engine, there: Identity) -> dict[str, Any]:
    """Heartbeats there and back."""
    swarm = bytes(32)
    beat = messages.Heartbeat(
        1, 0, 1, bytes(32), "training", 100, 1e4, 1e6, 0.0, 3.0, "CPU", b"", tuple(first.addresses()), 2.0
    )
    signers = {first.peer_id: IdentitySigner(here), second.peer_id: IdentitySigner(there)}
    openers = {first.peer_id: Opener(swarm), second.peer_id: Opener(swarm)}
    seals: list[float] = []
    opens: list[float] = []
    back = asyncio.Event()

    def say(engine: Engine, to: PeerId) -> None:
        began = time.perf_counter()
        body = messages.encode(beat)
        sealed = seal(signers[engine.peer_id], swarm, messages.tag(beat), len(seals) + 1, time.time() + 60.0, body)
        seals.append(time.perf_counter() - began)
        engine.send(to, sealed)

    def hear(engine: Engine, sender: PeerId, data: bytes) -> None:
        began = time.perf_counter()
        messages.decode(openers[engine.peer_id].open(data, time.time(), sender).body, peer=sender)
        opens.append(time.perf_counter() - began)

    def answer(sender: PeerId, data: bytes) -> None:
        hear(second, sender, data)
        say(second, sender)

    def note(sender: PeerId, data: bytes) -> None:
        hear(first, sender, data)
        back.set()

    async def there_and_back() -> None:
        back.clear()
        say(first, second.peer_id)
        await back.wait()

    first.on_message(note)
    second.on_message(answer)
    trip_s = await _timed(there_and_back)
    size = len(seal(signers[first.peer_id], swarm, messages.tag(beat), 1, time.time(), messages.encode(beat)))
    return {
        "message_s": trip_s / 2,
        "seal_s": median(seals),
        "open_s": median(opens),
        "heartbeat_bytes": size,
    }


async def _write(first: Engine, second: Engine) -> float:
    """Seconds of one write to a stream: a small part and its answer are two."""
    header = headers.MeanHeader(bytes(32), 0, PART_BYTES)

    async def serve(stream: Stream) -> None:
        while True:
            one: headers.MeanHeader = await framing.read_header(stream, headers.MeanHeader)
            await framing.read_payload(stream, one.nbytes)
            await stream.write(ACK)

    second.serve(KIND, framing.guarded(serve, lambda error: None, within_s=60.0))
    stream = await first.open_stream(second.peer_id, KIND)

    async def there_and_back() -> None:
        await framing.write_with_header(stream, header, bytes(PART_BYTES))
        await framing.read_exactly(stream, len(ACK))

    try:
        return await _timed(there_and_back) / 2
    finally:
        await stream.close()


async def _knock() -> float:
    """Seconds of a call that does nothing."""
    door = ThreadDoor("calibrate", 1)
    try:
        return await _timed(lambda: door.run(int))
    finally:
        door.close()
