"""Addresses of peers as text: libp2p multiaddrs, and `tls://host:port` for direct bulk. Parsing and order only."""

import ipaddress
import re

from farflung.node.identity import from_libp2p_text
from farflung.node.network import PeerId
from farflung.protocol import limits
from farflung.protocol.errors import ConfigError

MAX_ADDRESS_CHARS = 256

_LABEL = "[A-Za-z0-9-]{1,63}"
"""Of a host's name. Empty or longer ones are no network error to Python, but a UnicodeError when they are dialled."""
_TLS = re.compile(rf"tls://(\[[0-9a-zA-Z:.%]+\]|{_LABEL}(?:\.{_LABEL})*\.?):([0-9]{{1,5}})")
_NAMED = re.compile(r"(/.+)/p2p/([^/]+)")
_TCP = re.compile(rf"/(?:ip([46])/([^/%]+)|dns[46]?/{_LABEL}(?:\.{_LABEL})*\.?)/tcp/([0-9]{{1,5}})")
_IP = re.compile(r"/ip[46]/([^/]+)/")


def split_addresses(peer: PeerId, addresses: list[str]) -> tuple[list[str], list[tuple[str, int]]]:
    """(multiaddrs without /p2p/, TLS (host, port)) of one peer; what is no such address is left out.

    At most limits.MAX_ADDRESSES are looked at.
    """
    multiaddrs: list[str] = []
    direct: list[tuple[str, int]] = []
    for address in addresses[: limits.MAX_ADDRESSES]:
        if len(address) > MAX_ADDRESS_CHARS:
            continue
        if match := _TLS.fullmatch(address):
            host, port = match[1], int(match[2])
            if 0 < port < 65536 and (host[0] != "[" or _is_ipv6(host[1:-1])):
                direct.append((host.strip("[]"), port))
        elif address.startswith("/"):
            # The id before /p2p-circuit is the relay's; only one at the very end names the peer.
            named = _NAMED.fullmatch(address)
            try:
                if named and from_libp2p_text(named[2]) != peer:
                    continue
            except ValueError:
                continue
            multiaddrs.append(named[1] if named else address)
    return multiaddrs, direct


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def split_peer(address: str) -> tuple[PeerId, str]:
    """(peer, multiaddr without its /p2p/ end) of a `--peer` address. Raises ConfigError."""
    base, separator, name = address.rpartition("/p2p/")
    try:
        if not separator or not base.startswith("/") or len(address) > MAX_ADDRESS_CHARS:
            raise ValueError("not of the form /ip4/HOST/tcp/PORT/p2p/ID")
        return from_libp2p_text(name), base
    except ValueError as error:
        raise ConfigError(f"the address {address!r} of a peer is wrong: {error}") from error


def host_of(multiaddr: str) -> str | None:
    """The IP address in a multiaddr of a direct TCP listener; None for relays and other transports."""
    match = _IP.match(multiaddr)
    if match is None or "/tcp/" not in multiaddr or "/p2p-circuit" in multiaddr:
        return None
    try:
        return str(ipaddress.ip_address(match[1]))
    except ValueError:
        return None


def is_direct(multiaddr: str) -> bool:
    """Whether it is a TCP port of a host and nothing else, and so one that any libp2p can read."""
    match = _TCP.fullmatch(multiaddr)
    if match is None or int(match[3]) >= 65536:
        return False
    try:
        return match[1] is None or ipaddress.ip_address(match[2]).version == int(match[1])
    except ValueError:
        return False


def tls_address(host: str, port: int) -> str:
    return f"tls://[{host}]:{port}" if ":" in host else f"tls://{host}:{port}"


def reach(host: str) -> int:
    """Sort key: 0 for addresses of the whole internet, 1 for those of a local network, 2 for this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return 0  # a name was announced on purpose
    if address.is_loopback:
        return 2
    return 0 if address.is_global else 1
