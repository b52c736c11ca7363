"""One TLS connection that carries segments of one stream at a time (frames.py), as an `asyncio.BufferedProtocol`.

The transport decrypts straight into the buffer that `get_buffer` names: the reader's own buffer whenever it covers the
segment. That, not the cipher, is what makes asyncio fast here: 0.8 to 1.2 GB/s on loopback against half of that with
streams. `farflung.node.tls` owns the connections and decides which stream uses which.
"""

import asyncio
import fcntl
import math
import socket
import ssl
import sys
import termios
from typing import Final, Protocol, cast

from farflung.node import frames
from farflung.node.network import PeerId
from farflung.node.tls_keys import peer_key
from farflung.protocol.errors import LimitExceeded, Malformed, RemoteError

WRITE_HIGH_BYTES: Final = 64 << 10
"""Bytes queued above the socket before a connection counts as busy: small, so that faster connections take more."""
NOTSENT_LOWAT_BYTES: Final = 128 << 10
"""Unsent bytes the kernel may queue, for the same reason."""
MAX_DISCARD_BYTES: Final = 4 << 20
"""Bytes taken and dropped after we closed a stream that the other side still writes; then the connection is cut."""
KEEPALIVE_S: Final = 20
USER_TIMEOUT_MS: Final = 30_000
"""A link cut without a reset is noticed after this time (Linux); protocol deadlines are shorter."""

_TCP_USER_TIMEOUT: Final = 18  # from linux/tcp.h; the socket module knows it on Linux only
_TCP_INFO_MSS: Final = slice(16, 20)  # of struct tcp_info in linux/tcp.h
_TCP_INFO_CWND: Final = slice(80, 84)
_TCP_INFO_BYTES_ACKED: Final = slice(120, 128)
_TCP_INFO_MIN_RTT_US: Final = slice(148, 152)


class Attached(Protocol):
    """What a connection needs of the stream it carries."""

    def segment_claimed(self, offset: int, length: int) -> None:
        """A segment is announced. Raises RemoteError."""

    def segment_place(self, offset: int, length: int) -> memoryview | None:
        """Where its bytes go; None: wait, `retry_place` will be called. An empty view: discard them."""

    def segment_landed(self, offset: int, length: int) -> None:
        """Its bytes are in place."""

    def stream_ended(self, total: int) -> None:
        """The other side sends no more than `total` bytes. Raises RemoteError."""

    def connection_writable(self) -> None:
        """A connection has room again."""

    def connection_done(self, connection: "TlsConnection") -> None:
        """Both directions ended on this connection; it is free."""

    def connection_failed(self, connection: "TlsConnection", reason: str) -> None:
        """The connection is gone."""


class Owner(Protocol):
    """What a connection needs of the carrier."""

    def accepted(self, connection: "TlsConnection") -> bool:
        """A dialled-in connection has proven its key; False to refuse it."""

    def stream_opened(self, connection: "TlsConnection", stream_id: bytes, kind: str) -> Attached | None:
        """The dialler puts this connection to a stream; None to refuse."""

    def transport_to(self, peer: PeerId, transport: asyncio.Transport) -> asyncio.Transport:
        """What to write to a peer with, which has proven its key: the transport itself, but in rehearsals."""

    def misbehaved(self, error: RemoteError) -> None:
        """The other side broke the protocol; the connection is cut."""

    def gone(self, connection: "TlsConnection") -> None:
        """The connection is closed."""


class TlsConnection(asyncio.BufferedProtocol):
    """See the module. `expected` is the key the listener must show, or None on the listening side."""

    def __init__(self, owner: Owner, expected: PeerId | None) -> None:
        self._owner = owner
        self._expected = expected
        self.dialed = expected is not None
        self.peer: PeerId = b""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle_since = 0.0
        self.rtt_s = 0.0
        self.writable = False
        self.sent_fin = False
        self._got_fin = False
        self._transport: asyncio.Transport | None = None
        self._stream: Attached | None = None
        self._reason = "the connection was closed"
        self._header = bytearray(frames.HEADER.size)
        self._view = memoryview(self._header)
        self._filled = 0
        self._frame: tuple[int, int, int] | None = None  # None: the view is the header
        self._waiting = False
        self._scratch: bytearray | None = None
        self._discarding = 0  # bytes of the current segment still to drop
        self._discarded = 0
        self._acknowledged = 0

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports have asyncio's methods without its base class.
        self._transport = cast(asyncio.Transport, transport)
        ssl_object: ssl.SSLObject = transport.get_extra_info("ssl_object")
        key = peer_key(ssl_object)
        if key is None or (self._expected is not None and key != self._expected):
            self.abort("the other side holds another key than the one expected")
            return
        self.peer = key
        self._transport = self._owner.transport_to(key, self._transport)
        self._tune(transport.get_extra_info("socket"))
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_HIGH_BYTES // 2)
        self.writable = True
        if not self.dialed:
            if not self._owner.accepted(self):
                self.abort("refused")
                return
            self._transport.write(frames.HEADER.pack(frames.READY, 0, 0))

    def get_buffer(self, sizehint: int) -> memoryview:
        assert not self._waiting, "reading is paused"
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._view):
            return
        try:
            if self._frame is None:
                self._on_header()
            else:
                self._on_payload()
        except RemoteError as error:
            self._owner.misbehaved(error)
            self.abort(error.reason)

    def eof_received(self) -> None:
        self._reason = "the other side closed the connection"

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._stream is not None:
            self._stream.connection_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable = False
        self._view = memoryview(self._header)  # let go of a reader's buffer
        if exc is not None:
            self._reason = f"the connection broke: {exc}"
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self._reason))
            self.ready.exception()  # the dialler may have given up already
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.connection_failed(self, self._reason)
        self._owner.gone(self)

    # --- our side -------------------------------------------------------------------------------------------------

    @property
    def free(self) -> bool:
        return self._stream is None and not self.closing

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def queued_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def attach(self, stream: Attached, open_frame: bytes | None) -> None:
        """Carry `stream` from now on; the dialler passes the OPEN payload."""
        assert self.free and self._transport is not None
        self._stream = stream
        self.sent_fin = self._got_fin = False
        self._discarded = 0
        if open_frame is not None:
            self._transport.write(frames.HEADER.pack(frames.OPEN, 0, len(open_frame)) + open_frame)

    def write_segment(self, offset: int, data: memoryview) -> None:
        """Send one segment. The TLS layer encrypts at once, so `data` may change afterwards."""
        assert self._transport is not None and not self.sent_fin
        self._transport.writelines((frames.HEADER.pack(frames.DATA, offset, len(data)), data))

    def write_tail(self) -> None:
        """Send a packet that means nothing."""
        if self._transport is not None and not self.closing and not self.sent_fin:
            self._transport.write(frames.HEADER.pack(frames.TAIL, 0, 0))

    def write_fin(self, total: int) -> None:
        """We send no more of this stream here."""
        assert self._transport is not None and not self.sent_fin
        self.sent_fin = True
        if not self.closing:
            self._transport.write(frames.HEADER.pack(frames.FIN, total, 0))
        self._detach_if_done()

    def retry_place(self) -> None:
        """The reader moved: a segment that had to wait may have a place now."""
        if self._waiting and self._frame is not None and self._place(*self._frame[1:]):
            self._waiting = False
            assert self._transport is not None
            if not self.closing:
                self._transport.resume_reading()

    def abort(self, reason: str) -> None:
        """Cut the connection at once."""
        if not self.closing:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close a free connection."""
        if self._transport is not None:
            self._transport.close()

    def unacknowledged_bytes(self) -> int:
        """Written, and not acknowledged by the other side's TCP; where the system does not tell, not taken by our own."""
        if sys.platform != "linux" or self._transport is None:
            return self.queued_bytes
        sock: socket.socket = self._transport.get_extra_info("socket")
        in_kernel = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return in_kernel + self.queued_bytes

    def window_bytes(self) -> float:
        """What TCP lets out before it is acknowledged; infinite where the system does not tell."""
        return self._tcp_info(_TCP_INFO_CWND) * self._tcp_info(_TCP_INFO_MSS) or math.inf

    def acknowledged_bytes(self) -> int:
        """Bytes that the other side's TCP has acknowledged; 0 where the system does not tell. The last count once it is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._acknowledged = self._tcp_info(_TCP_INFO_BYTES_ACKED)
        return self._acknowledged

    def measured_rtt_s(self) -> float | None:
        """The shortest round trip that TCP has seen here; None where the system does not tell. A processor under load makes
        what one measures by a handshake twenty times longer, and this not at all.
        """
        return self._tcp_info(_TCP_INFO_MIN_RTT_US) / 1e6 or None

    def _tcp_info(self, number: slice) -> int:
        """A field of the kernel's statistics of this socket; 0 where there is none (other systems, old kernels)."""
        if sys.platform != "linux" or self._transport is None:
            return 0
        sock: socket.socket = self._transport.get_extra_info("socket")
        return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, number.stop)[number], sys.byteorder)

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

    def _expect_header(self) -> None:
        self._frame = None
        self._view = memoryview(self._header)
        self._filled = 0

    def _on_header(self) -> None:
        kind, offset, length = frames.parse_header(self._header, self.peer)
        if kind == frames.READY:
            if not self.dialed or self.ready.done():
                raise Malformed("an unexpected READY frame", peer=self.peer)
            self.ready.set_result(None)
            self._expect_header()
        elif kind == frames.OPEN:
            if self.dialed or self._stream is not None:
                raise Malformed("an unexpected OPEN frame", peer=self.peer)
            self._frame = kind, offset, length
            self._view = memoryview(bytearray(length))
            self._filled = 0
        elif kind == frames.TAIL:
            self._expect_header()
        elif self._stream is None or self._got_fin:
            raise Malformed("a frame outside a stream", peer=self.peer)
        elif kind == frames.FIN:
            self._stream.stream_ended(offset)
            self._got_fin = True
            self._expect_header()
            self._detach_if_done()
        else:
            self._stream.segment_claimed(offset, length)
            self._frame = kind, offset, length
            self._filled = 0
            if not self._place(offset, length):
                self._waiting = True
                assert self._transport is not None
                self._transport.pause_reading()

    def _on_payload(self) -> None:
        assert self._frame is not None
        kind, offset, length = self._frame
        if kind == frames.OPEN:
            payload = bytes(self._view)
            self._expect_header()
            stream_id = payload[: frames.STREAM_ID_BYTES]
            name = frames.decode_kind(payload[frames.STREAM_ID_BYTES :], self.peer)
            if self._owner.stream_opened(self, stream_id, name) is None:
                self.abort(f"no stream of kind {name!r} is served here")
            return
        self._expect_header()
        if self._discarding:
            self._discarding = 0
        elif self._stream is not None:
            self._stream.segment_landed(offset, length)

    def _place(self, offset: int, length: int) -> bool:
        assert self._stream is not None
        view = self._stream.segment_place(offset, length)
        if view is None:
            return False
        if not len(view):
            self._discarded += length
            if self._discarded > MAX_DISCARD_BYTES:
                raise LimitExceeded("the other side writes to a stream that was closed", peer=self.peer)
            if self._scratch is None:
                self._scratch = bytearray(frames.MAX_SEGMENT_BYTES)
            view = memoryview(self._scratch)[:length]
            self._discarding = length
        self._view = view
        self._filled = 0
        return True

    def _detach_if_done(self) -> None:
        if self.sent_fin and self._got_fin and self._stream is not None:
            stream, self._stream = self._stream, None
            stream.connection_done(self)
