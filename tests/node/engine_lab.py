"""Real engines on loopback, for the tests that need them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity
from farflung.node.network import Stream


def run(main: Callable[[], Awaitable[None]], seconds: float = 60) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main()

    asyncio.run(bounded())


@asynccontextmanager
async def engines(count: int, **changes: object) -> AsyncIterator[list[Engine]]:
    """`count` engines; all join through the first and know nothing else of each other."""
    async with AsyncExitStack() as stack:
        made: list[Engine] = []
        for _ in range(count):
            seeds = (made[0].addresses()[0],) if made else ()
            config = replace(EngineConfig.loopback(initial_peers=seeds), **changes)  # type: ignore[arg-type]
            made.append(await Engine.create(Identity.generate(), config))
            stack.push_async_callback(made[-1].close)
        yield made


def introduce(nodes: list[Engine]) -> None:
    for one in nodes:
        for other in nodes:
            one.add_addresses(other.peer_id, other.addresses())


async def read(stream: Stream, size: int) -> bytes:
    buffer = bytearray(size)
    await stream.readinto(memoryview(buffer))
    return bytes(buffer)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
