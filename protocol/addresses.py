"""Addresses of peers in few bytes: multiaddrs and `tls://host:port`, for invitations.

Text of a multiaddr takes about 85 bytes, most of it a base58 peer id; here it takes about 49, and 10 when it
ends in the same peer id as the one before. Anything unusual is kept as text, so that decoding always gives
back exactly what was encoded.

    address  = 0x00 text | 0x01 component* | 0x02 component*    (text; multiaddr; `tls://` host and port)
    component = code (1 byte), value: ip4 4, ip6 16, port 2, name and p2p: length byte and bytes, others none

The codes are our own, one byte each; retired ones are not used again.
"""

import ipaddress
import re
from collections.abc import Iterator

from farflung.protocol.errors import Malformed
from farflung.protocol.limits import MAX_ADDRESS_CHARS

_TEXT, _MULTIADDR, _TLS = 0, 1, 2
_CODES = {
    "ip4": 1, "ip6": 2, "dns": 3, "dns4": 4, "dns6": 5, "dnsaddr": 6, "tcp": 7, "udp": 8, "p2p": 9,
    "quic": 11, "quic-v1": 12, "ws": 13, "wss": 14, "tls": 15, "p2p-circuit": 16, "webtransport": 17,
}  # fmt: skip
_SAME_P2P = 10
_PROTOCOLS = {code: protocol for protocol, code in _CODES.items()}
_NAMES = {"dns", "dns4", "dns6", "dnsaddr"}
_PORTS = {"tcp", "udp"}
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ADDRESS = re.compile(r"(/[a-z0-9-]+/|tls://)[!-~]+")
_TLS_ADDRESS = re.compile(r"tls://(?:\[(?P<ip6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]+)")


def is_address(text: str) -> bool:
    """Whether `text` looks like an address: short enough, visible ASCII, `/protocol/...` or `tls://...`."""
    return len(text) <= MAX_ADDRESS_CHARS and _ADDRESS.fullmatch(text) is not None


class AddressPacker:
    """Packs the addresses of one list, in order; remembers the last peer id."""

    def __init__(self) -> None:
        self._peer = b""

    def pack(self, text: str) -> bytes:
        """The bytes of one address; plain text when nothing shorter gives it back exactly."""
        before = self._peer
        try:
            packed = self._tls(text) if text.startswith("tls://") else self._multiaddr(text)
        except (ValueError, KeyError, IndexError, OverflowError):
            packed = b""
        unpacker = AddressUnpacker(before)
        if packed and _tries(unpacker, packed) == text:
            return packed
        self._peer = before
        return bytes([_TEXT]) + text.encode("utf-8")

    def _multiaddr(self, text: str) -> bytes:
        parts = iter(text.split("/")[1:])
        out = bytearray([_MULTIADDR])
        for protocol in parts:
            code = _CODES[protocol]
            if protocol == "p2p":
                peer = _base58_decode(next(parts, ""))
                out += bytes([_SAME_P2P]) if peer == self._peer else bytes([code, len(peer)]) + peer
                self._peer = peer
            else:
                out += bytes([code]) + _pack_value(protocol, parts)
        return bytes(out)

    def _tls(self, text: str) -> bytes:
        match = _TLS_ADDRESS.fullmatch(text)
        if match is None:
            return b""
        port = int(match["port"]).to_bytes(2)
        if match["ip6"] is not None:
            return bytes([_TLS, _CODES["ip6"]]) + ipaddress.IPv6Address(match["ip6"]).packed + port
        host = match["host"]
        if re.fullmatch(r"[0-9.]+", host):
            return bytes([_TLS, _CODES["ip4"]]) + ipaddress.IPv4Address(host).packed + port
        return bytes([_TLS, _CODES["dns"], len(host)]) + host.encode("ascii") + port


class AddressUnpacker:
    """Unpacks what an `AddressPacker` packed, in the same order."""

    def __init__(self, peer: bytes = b"") -> None:
        self._peer = peer

    def unpack(self, data: bytes) -> str:
        """The text of one address. Raises Malformed, which names no peer: addresses come in invitations."""
        if not data:
            raise Malformed("an empty address")
        try:
            if data[0] == _TEXT:
                text = data[1:].decode("utf-8")
            elif data[0] == _MULTIADDR:
                text = self._multiaddr(_Reader(data[1:]))
            elif data[0] == _TLS:
                text = self._tls(_Reader(data[1:]))
            else:
                raise Malformed(f"address of unknown form {data[0]}")
        except UnicodeDecodeError as err:
            raise Malformed("an address that is no text") from err
        if not is_address(text):
            raise Malformed(f"{text[:MAX_ADDRESS_CHARS]!r} is no address")
        return text

    def _multiaddr(self, reader: "_Reader") -> str:
        out = ""
        while not reader.done():
            code = reader.take(1)[0]
            if code == _SAME_P2P:
                out += "/p2p/" + _base58_encode(self._peer)
            elif code not in _PROTOCOLS:
                raise Malformed(f"address with unknown protocol {code}")
            elif _PROTOCOLS[code] == "p2p":
                self._peer = reader.take(reader.take(1)[0])
                out += "/p2p/" + _base58_encode(self._peer)
            else:
                out += f"/{_PROTOCOLS[code]}" + _unpack_value(_PROTOCOLS[code], reader)
        return out

    def _tls(self, reader: "_Reader") -> str:
        protocol = _PROTOCOLS.get(reader.take(1)[0], "")
        if protocol not in ("ip4", "ip6", "dns"):
            raise Malformed("tls address without a host")
        host = _unpack_value(protocol, reader)[1:]
        port = int.from_bytes(reader.take(2))
        if not reader.done():
            raise Malformed("tls address with bytes left over")
        return f"tls://[{host}]:{port}" if protocol == "ip6" else f"tls://{host}:{port}"


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise Malformed("an address that ends early")
        self._at += count
        return piece

    def done(self) -> bool:
        return self._at == len(self._data)


def _pack_value(protocol: str, parts: Iterator[str]) -> bytes:
    if protocol == "ip4":
        return ipaddress.IPv4Address(next(parts, "")).packed
    if protocol == "ip6":
        return ipaddress.IPv6Address(next(parts, "")).packed
    if protocol in _PORTS:
        return int(next(parts, "")).to_bytes(2)
    if protocol in _NAMES:
        name = next(parts, "").encode("ascii")
        return bytes([len(name)]) + name
    return b""


def _unpack_value(protocol: str, reader: _Reader) -> str:
    if protocol == "ip4":
        return f"/{ipaddress.IPv4Address(reader.take(4))}"
    if protocol == "ip6":
        return f"/{ipaddress.IPv6Address(reader.take(16))}"
    if protocol in _PORTS:
        return f"/{int.from_bytes(reader.take(2))}"
    if protocol in _NAMES:
        return "/" + reader.take(reader.take(1)[0]).decode("utf-8")
    return ""


def _tries(unpacker: AddressUnpacker, packed: bytes) -> str | None:
    try:
        return unpacker.unpack(packed)
    except Malformed:
        return None


def _base58_encode(data: bytes) -> str:
    number, out = int.from_bytes(data), ""
    while number:
        number, digit = divmod(number, 58)
        out = _BASE58[digit] + out
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + out


def _base58_decode(text: str) -> bytes:
    number = 0
    for char in text:
        number = number * 58 + _BASE58.index(char)
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8)
