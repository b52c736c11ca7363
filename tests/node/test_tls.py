"""The direct carrier over loopback: content, pins, limits, failures, reuse. No libp2p here."""

import asyncio
import random
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, cast

import pytest
from tests.node.tls_lab import ask, echo, end, read, run, until

from farflung.node import frames, tls, tls_connection, tls_stream
from farflung.node.identity import Identity
from farflung.node.tls import TlsCarrier
from farflung.node.tls_connection import TlsConnection
from farflung.node.tls_keys import make_context, peer_key
from farflung.node.tls_stream import StripedStream
from farflung.protocol.errors import NetworkError


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("segment", [frames.MAX_SEGMENT_BYTES, 5000])
def test_content_both_ways(connections: int, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TlsCarrier, "_segment_bytes", lambda self, connection: segment)

    async def main() -> None:
        async with end(connections) as server, end(connections) as client:
            senders: list[bytes] = []

            async def handler(stream: StripedStream) -> None:
                senders.append(stream.peer)
                await echo(stream)

            server.handlers["echo"] = handler
            for size in (0, 1, 8_000_000, 70_001):
                data = random.Random(size).randbytes(size)
                assert await ask(client, server, data) == data
                await until(lambda: all(connection.free for connection in client.carrier._all))
            assert senders == [client.key] * 4
            # All four streams went over the same connections.
            assert len(client.carrier._idle[server.key]) == len(client.carrier._all) == connections

    run(main)


def test_packets_behind_a_large_write_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_stream, "TAIL_S", (0.0, 0.005))
    monkeypatch.setattr(TlsCarrier, "_segment_bytes", lambda self, connection: tls_stream.SEGMENT_BYTES)
    written = 0

    def write_tail(self: TlsConnection) -> None:
        nonlocal written
        written += 1
        plain(self)

    plain = TlsConnection.write_tail
    monkeypatch.setattr(TlsConnection, "write_tail", write_tail)

    async def main() -> None:
        async with end(3) as server, end(3) as client:
            server.handlers["echo"] = echo
            data = random.Random(3).randbytes(2 * tls_stream.GROW_BYTES)
            assert await ask(client, server, b"small") == b"small" and written == 0
            assert await ask(client, server, data) == data
            await until(lambda: written >= 2)
            assert await ask(client, server, data) == data

    run(main)


def test_odd_reads_and_writes() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            rng = random.Random(1)
            data = rng.randbytes(3_000_000)
            received = bytearray()
            finished = asyncio.Event()

            async def handler(stream: StripedStream) -> None:
                while len(received) < len(data):
                    size = min(rng.choice([1, 7, 4096, 300_000]), len(data) - len(received))
                    received.extend(await read(stream, size))
                finished.set()

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            start = 0
            while start < len(data):
                size = rng.choice([1, 100, 65_536, 1_000_000])
                chunk = bytearray(data[start : start + size])
                await stream.write(chunk)
                chunk[:] = bytes(len(chunk))  # a buffer may be reused as soon as `write` returns
                start += size
            await finished.wait()
            await stream.close()
            assert received == data

    run(main)


def test_wrong_key_of_the_listener() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            with pytest.raises(NetworkError, match="another key"):
                await client.carrier.open(Identity.generate().public_key, "echo", server.address)
            assert not client.carrier._all

    run(main)


def test_refused_key_of_the_dialler() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            server.refused.add(client.key)
            with pytest.raises(NetworkError, match="cannot dial"):
                await client.carrier.open(server.key, "echo", server.address)
            assert not server.carrier._all and not server.carrier._incoming

    run(main)


def test_dialler_without_certificate() -> None:
    async def main() -> None:
        async with end() as server:
            context = make_context(Identity.generate(), server=False)
            bare = type(context)(context.protocol)
            bare.check_hostname = False
            bare.verify_mode = ssl.CERT_NONE
            bare.set_alpn_protocols([frames.TLS_ALPN])
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=bare)
            with pytest.raises(OSError):
                assert await reader.read(1) == b""
                raise OSError
            writer.close()
            assert not server.carrier._all

    run(main)


def test_a_certificate_with_an_unknown_kind_of_key_proves_none() -> None:
    ed25519, unknown = b"\x2b\x65\x70", b"\x2b\x65\x7f"  # identifiers of a kind
    (good,) = make_context(Identity.generate(), server=True).get_ca_certs(binary_form=True)
    signed, key, rest, signature = good.split(ed25519)  # it stands before the key, and twice for the signature

    @dataclass
    class Shown:
        """As much of an `ssl.SSLObject` as is looked at."""

        certificate: bytes

        def selected_alpn_protocol(self) -> str:
            return frames.TLS_ALPN

        def getpeercert(self, binary_form: bool) -> bytes:
            return self.certificate

    assert peer_key(cast(ssl.SSLObject, Shown(good))) is not None
    bad = signed + ed25519 + key + unknown + rest + ed25519 + signature
    assert peer_key(cast(ssl.SSLObject, Shown(bad))) is None


def test_unserved_kind_fails_the_stream() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            stream = await client.carrier.open(server.key, "nothing", server.address)
            with pytest.raises(NetworkError):
                await read(stream, 1)
            with pytest.raises(NetworkError):
                await stream.write(b"x")
            await stream.close()

    run(main)


def test_end_of_stream() -> None:
    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                await stream.write(b"short")

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            with pytest.raises(NetworkError, match="ended"):
                await read(stream, 6)
            with pytest.raises(NetworkError, match="ended"):
                await read(stream, 1)
            await stream.close()

    run(main)


def test_back_pressure() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            proceed = asyncio.Event()
            size = 48 << 20

            async def handler(stream: StripedStream) -> None:
                await proceed.wait()
                await read(stream, size)

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            data = bytes(1 << 20)

            async def write() -> None:
                for _ in range(size >> 20):
                    await stream.write(data)

            async with asyncio.TaskGroup() as group:
                writing = group.create_task(write())
                sent = -1
                while sent != stream._sent:  # until nothing moves any more
                    sent = stream._sent
                    await asyncio.sleep(0.2)
                assert not writing.done() and sent < size
                (theirs,) = server.carrier._streams.values()
                assert theirs._in.held_bytes <= 5 << 20
                proceed.set()
            await stream.close()

    run(main)


def test_broken_connection_fails_both_sides_at_once() -> None:
    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                await read(stream, 4 << 20)  # more than is written

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            await stream.write(bytes(3 << 20))
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(asyncio.wait([group.create_task(swallow(stream))]))
                await until(lambda: len(stream._connections) == 2)
                next(iter(server.carrier._all)).abort("cable cut")
                await reading
            await until(lambda: bool(server.problems))
            with pytest.raises(NetworkError):
                await stream.write(b"x")
            await stream.close()
            await until(lambda: not client.carrier._all and not server.carrier._all)

    async def swallow(stream: StripedStream) -> None:
        with pytest.raises(NetworkError):
            await read(stream, 1)

    run(main)


def test_cancelled_read_gives_its_buffer_back() -> None:
    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                await read(stream, 1)

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await read(stream, 10)
            with pytest.raises(NetworkError, match="cancelled"):
                await read(stream, 1)
            await stream.close()

    run(main)


@pytest.mark.parametrize(
    "frame",
    [
        frames.HEADER.pack(frames.DATA, 0, 1 << 30),
        frames.HEADER.pack(frames.DATA, 0, 10),
        frames.HEADER.pack(frames.FIN, 0, 0),
        frames.HEADER.pack(frames.READY, 0, 0),
        frames.HEADER.pack(frames.OPEN, 0, 1 << 20),
        frames.HEADER.pack(frames.OPEN, 0, 18) + bytes(16) + b"\xff\xff",
        frames.HEADER.pack(99, 0, 0),
        frames.HEADER.pack(frames.OPEN, 0, 17) + bytes(16) + b"x" + frames.HEADER.pack(frames.FIN, 0, 0) * 2,
        (frames.HEADER.pack(frames.OPEN, 0, 17) + bytes(16) + b"x") * 2,
    ],
)
def test_nonsense_is_cut(frame: bytes) -> None:
    async def main() -> None:
        async with end() as server:

            async def handler(stream: StripedStream) -> None:
                await read(stream, 1)

            server.handlers["x"] = handler
            stranger = Identity.generate()
            context = make_context(stranger, server=False)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
            assert await reader.readexactly(frames.HEADER.size) == frames.HEADER.pack(frames.READY, 0, 0)
            writer.write(frame)
            try:
                rest = await reader.read()
            except OSError:
                rest = b""
            assert rest in (b"", frames.HEADER.pack(frames.FIN, 0, 0))
            writer.close()
            await until(lambda: not server.carrier._all)
            assert [error.peer for error in server.broken_rules] == [stranger.public_key]

    run(main)


def test_connections_of_one_peer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "MAX_CONNECTIONS_PER_PEER", 2)

    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                await read(stream, 1)

            server.handlers["x"] = handler
            streams = [await client.carrier.open(server.key, "x", server.address) for _ in range(2)]
            with pytest.raises(NetworkError):
                await client.carrier.open(server.key, "x", server.address)
            for stream in streams:
                await stream.close()

    run(main)


def test_writer_to_a_closed_stream_is_cut() -> None:
    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                return

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            with pytest.raises(NetworkError):
                for _ in range(64):
                    await stream.write(bytes(1 << 20))
            assert stream._sent < (tls_connection.MAX_DISCARD_BYTES + (32 << 20))
            await stream.close()

    run(main)


def test_dead_address_does_not_hold_up_a_good_one() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            silent: list[asyncio.StreamWriter] = []
            dead = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
            port = dead.sockets[0].getsockname()[1]
            addresses = [("127.0.0.1", port), ("127.0.0.1", 1), *server.address]
            stream = await client.carrier.open(server.key, "echo", addresses)
            await stream.write((1).to_bytes(4, "big") + b"x")
            assert await read(stream, 1) == b"x"
            await stream.close()
            dead.close()
            for writer in silent:
                writer.close()

    run(main)


def test_a_process_that_has_ended_is_told_from_one_that_is_slow() -> None:
    """By its machine, which refuses connections where they were answered before."""

    async def main() -> None:
        async with end() as client:
            async with end() as server:
                server.handlers["echo"] = echo
                assert not await client.carrier.is_gone(server.key)  # we have never reached it
                assert await ask(client, server, b"hello") == b"hello"
                assert not await client.carrier.is_gone(server.key)
            assert await client.carrier.is_gone(server.key)
            with socket.socket() as stopped:  # its machine takes connections, and nobody does anything with them
                stopped.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stopped.bind(("127.0.0.1", server.port))
                stopped.listen()
                assert not await client.carrier.is_gone(server.key)

    run(main)


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "IDLE_S", 0.1)

    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            assert await ask(client, server, b"data") == b"data"
            await until(lambda: not client.carrier._all and not server.carrier._all)
            assert await ask(client, server, b"again") == b"again"

    run(main)


def test_a_fresh_connection_does_not_count_as_idle_since_ever() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            before = time.monotonic()
            connection = await client.carrier._dial_one(server.key, *server.address[0])
            assert connection.idle_since >= before, "or else it may be closed before its first stream"

    run(main)


def test_a_connection_that_is_gone_before_its_first_stream_is_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    dial_one = TlsCarrier._dial_one

    async def dial_and_lose(self: TlsCarrier, *arguments: Any) -> TlsConnection:
        connection = await dial_one(self, *arguments)
        connection.abort("the peer went away")
        return connection

    monkeypatch.setattr(TlsCarrier, "_dial_one", dial_and_lose)

    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            with pytest.raises(NetworkError, match="closed the connection at once"):
                await client.carrier.open(server.key, "echo", server.address)

    run(main)


def test_a_stream_that_never_ends_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_stream, "LINGER_S", 0.1)

    async def main() -> None:
        async with end() as server, end() as client:

            async def handler(stream: StripedStream) -> None:
                await asyncio.Event().wait()

            server.handlers["x"] = handler
            stream = await client.carrier.open(server.key, "x", server.address)
            await stream.close()
            await until(lambda: not client.carrier._all)

    run(main)


def test_late_connection_joins_a_closed_stream() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            stream = await client.carrier.open(server.key, "echo", server.address)
            await stream.write((1).to_bytes(4, "big") + b"x")
            assert await read(stream, 1) == b"x"
            await until(lambda: next(iter(server.carrier._streams.values()))._closed)
            late: TlsConnection = await client.carrier._dial(server.key, server.address)
            stream.add(late, stream.stream_id + b"echo")
            await stream.close()
            await until(lambda: len(client.carrier._idle.get(server.key, [])) == 2)

    run(main)
