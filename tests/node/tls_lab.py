"""What the tests of the direct carrier share: an end with an identity and handlers, small dialogues, a slow path."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from farflung.node.identity import Identity
from farflung.node.links import LinkBook
from farflung.node.pacing import Pacer
from farflung.node.scope import TaskScope
from farflung.node.tls import TlsCarrier
from farflung.node.tls_stream import StripedStream
from farflung.protocol.errors import NetworkError, RemoteError

Handler = Callable[[StripedStream], Awaitable[None]]


@dataclass
class End:
    identity: Identity
    scope: TaskScope
    carrier: TlsCarrier
    port: int = 0
    handlers: dict[str, Handler] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    problems: list[NetworkError] = field(default_factory=list)
    broken_rules: list[RemoteError] = field(default_factory=list)

    @property
    def address(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", self.port)]

    @property
    def key(self) -> bytes:
        return self.identity.public_key


@asynccontextmanager
async def end(connections: int | None = 2) -> AsyncIterator[End]:
    identity, scope = Identity.generate(), TaskScope()
    await scope.open()

    async def opened(stream: StripedStream) -> None:
        try:
            await made.handlers[stream.kind](stream)
        except NetworkError as error:
            made.problems.append(error)
        finally:
            await stream.close()

    carrier = TlsCarrier(
        identity,
        scope,
        LinkBook(),
        up=Pacer(None),
        down=Pacer(None),
        connections=connections,
        admit=lambda peer: peer not in made.refused,
        served=lambda kind: kind in made.handlers,
        opened=opened,
        refused=lambda error: made.broken_rules.append(error),
    )
    made = End(identity, scope, carrier)
    made.port = await carrier.listen(["127.0.0.1"], 0)
    try:
        yield made
    finally:
        await carrier.close()
        await scope.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


async def read(stream: StripedStream, size: int) -> bytes:
    buffer = bytearray(size)
    await stream.readinto(memoryview(buffer))
    return bytes(buffer)


async def until(condition: Callable[[], bool]) -> None:
    """Poll for something that only the other side's transport knows; bounded by the test's timeout."""
    while not condition():
        await asyncio.sleep(0.005)


async def echo(stream: StripedStream) -> None:
    size = int.from_bytes(await read(stream, 4), "big")
    await stream.write(await read(stream, size))


async def ask(client: End, server: End, data: bytes) -> bytes:
    stream = await client.carrier.open(server.key, "echo", server.address)
    assert stream.peer == server.key

    async def write() -> None:
        await stream.write(len(data).to_bytes(4, "big"))
        await stream.write(data)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        answer = await read(stream, len(data))
    await stream.close()
    return answer


@asynccontextmanager
async def slow_path(port: int, delay_s: float, rates: tuple[float, float]) -> AsyncIterator[tuple[int, list[int]]]:
    """A TCP relay in front of `port`: latency, and connections of two speeds (bytes/s) in turn. Yields its port, and how
    many bytes it has carried at each speed so far.
    """
    tasks = asyncio.TaskGroup()
    accepted = 0
    carried = [0, 0]

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, which: int | None) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def take() -> None:
            data = b"start"
            while data:
                data = await reader.read(16 << 10)
                if which is not None:
                    await asyncio.sleep(len(data) / rates[which])
                    carried[which] += len(data)
                await queue.put((asyncio.get_running_loop().time() + delay_s, data))

        async def give() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                if not data:
                    break
                writer.write(data)
                await writer.drain()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(take())
                group.create_task(give())
        except* OSError:
            pass  # one side cut its connection; so do we
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        which = accepted % 2
        accepted += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        tasks.create_task(pump(reader, far_writer, which))
        tasks.create_task(pump(far_reader, writer, None))

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # the relay itself holds little
    server = await asyncio.start_server(relay, sock=listener, limit=16 << 10)
    async with tasks:
        yield server.sockets[0].getsockname()[1], carried
        server.close()
