"""How many connections of the direct carrier a peer gets, by how far away it is."""

import random
import ssl
import sys
import time

import pytest
from tests.node.tls_lab import ask, echo, end, read, run, slow_path

from farflung.node import tls, tls_connection, tls_stream
from farflung.node.tls_connection import TlsConnection
from farflung.node.tls_keys import peer_key
from farflung.node.tls_stream import StripedStream


def test_a_neighbour_counts_as_near_however_slow_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells TCP's own round trip")

    def slow_key(ssl_object: ssl.SSLObject) -> bytes | None:
        time.sleep(0.05)
        return peer_key(ssl_object)

    monkeypatch.setattr(tls_connection, "peer_key", slow_key)

    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            assert await ask(client, server, b"hello") == b"hello"
            (connection,) = client.carrier._all
            assert 0 < connection.rtt_s < tls.NEAR_RTT_S

    run(main)


def test_a_neighbour_gets_one_connection_however_much_it_is_sent() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells TCP's own round trip")

    async def main() -> None:
        async with end(None) as server, end(None) as client:
            server.handlers["echo"] = echo
            data = random.Random(6).randbytes(8 * tls_stream.GROW_BYTES)
            assert await ask(client, server, data) == data
            assert len(client.carrier._all) == 1

    run(main)


def test_far_peers_get_eight_connections_and_fast_ones_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # The far path is a relay on this machine: TCP's own round trip ends there.
    monkeypatch.setattr(TlsConnection, "measured_rtt_s", lambda self: None)

    async def main() -> None:
        async with end(None) as server:
            data = random.Random(5).randbytes(12_000_000)
            received = bytearray(len(data))

            async def handler(stream: StripedStream) -> None:
                await stream.readinto(memoryview(received))
                await stream.write(b"k")

            server.handlers["x"] = handler
            async with slow_path(server.port, 0.01, (2e6, 1e5)) as (port, carried):
                async with end(None) as client:
                    stream = await client.carrier.open(server.key, "x", [("127.0.0.1", port)])
                    await stream.write(data)
                    assert await read(stream, 1) == b"k"
                    assert len(client.carrier._all) == tls.FAR_CONNECTIONS
                    await stream.close()
            assert received == data
            fast, slow = carried  # split evenly, four connections of 0.1 MB/s would hold up four of 2 MB/s
            assert fast > 4 * slow

    run(main)
