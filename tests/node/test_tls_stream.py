"""Which connection a segment goes to, over links with latency."""

import asyncio
from typing import Any, cast

from farflung.node import tls_stream
from farflung.node.links import LinkBook
from farflung.node.pacing import Pacer
from farflung.node.tls_connection import TlsConnection
from farflung.node.tls_stream import LEAST_QUEUE_BYTES, SEGMENT_BYTES, StripedStream
from farflung.sims import clock

PEER = b"p" * 32
RTT_S = 0.1


class Link:
    """As much of a connection as a stream writes to: it acknowledges at a rate, from the moment that it gets something."""

    writable = True
    closing = False

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.longest = 0.0
        """Queue that a segment has found."""
        self.written = 0
        self._left, self._at = 0.0, 0.0

    def attach(self, stream: StripedStream, open_frame: bytes | None) -> None:
        pass

    def write_tail(self) -> None:
        pass

    def unacknowledged_bytes(self) -> int:
        now = asyncio.get_running_loop().time()
        self._left, self._at = max(0.0, self._left - self.bytes_per_s * (now - self._at)), now
        return int(self._left)

    def window_bytes(self) -> float:
        return self.bytes_per_s * RTT_S

    def write_segment(self, offset: int, data: memoryview) -> None:
        self.longest = max(self.longest, self.unacknowledged_bytes())
        self._left += len(data)
        self.written += len(data)


def write(links: list[Link], num_bytes: int) -> float:
    """Seconds until everything has been acknowledged."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        stream = StripedStream(
            PEER, b"s" * 16, "test", up=Pacer(None), down=Pacer(None), meter=LinkBook().meter(PEER, "tls"),
            grow=lambda stream: None, freed=lambda connection: None,
        )  # fmt: skip
        for link in links:
            stream.add(cast(TlsConnection, cast(Any, link)), None)
        began = loop.time()
        await stream.write(bytes(num_bytes))
        while any(link.unacknowledged_bytes() for link in links):
            await asyncio.sleep(0.01)
        return loop.time() - began

    return clock.run(main())


def test_all_connections_end_together_however_slow_one_is() -> None:
    links = [Link(1e6), Link(1e6), Link(1e6), Link(2e4)]
    assert write(links, 3_020_000) < 3.0  # 1.0 if all were busy to the end; the least that the slow one gets takes 1.6
    assert 0 < links[3].written <= LEAST_QUEUE_BYTES + 4 * SEGMENT_BYTES


def test_fast_connections_are_kept_busy() -> None:
    assert write([Link(1e8), Link(1e8)], 200_000_000) < 1.1


def test_a_connection_gets_no_more_than_its_share_of_what_is_left() -> None:
    links = [Link(2e6), Link(2e6)]
    write(links, 1_000_000)
    assert LEAST_QUEUE_BYTES < max(link.longest for link in links) <= tls_stream.QUEUE_SHARE * 1_000_000 / 2
