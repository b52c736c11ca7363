"""Where a node listens: ports that are free, and the addresses that they make.

A node takes two ports: libp2p's, and TLS on the one above. Whoever gives out an address before the node runs chooses the port here, from below those that
systems give to outgoing connections: so nobody has taken it when the node comes, or comes back.
"""

import asyncio
import errno
import ipaddress
import random
import socket

import psutil

from farflung.node.addresses import reach
from farflung.node.identity import Identity, libp2p_text

PORTS = range(20_000, 32_000, 2)
"""Of libp2p, to choose from."""

PORT_POLL_S = 0.1
PORT_S = 10.0
"""How long the last process of a node may hold its ports: libp2p's daemon ends a few seconds after a node that was killed."""

INVITATION_ADDRESSES = 4
"""Addresses of this node in an invitation, and of other members: enough to survive any one of them."""


def tls_port(port: int) -> int:
    """That beside a port of libp2p's; 0, any, where there is none above."""
    return port + 1 if 0 < port < 65535 else 0


def free_ports(count: int, *, local: bool) -> list[int]:
    """As many ports of which the next one is free as well; fewer when there are no more. `local`: on the loopback."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if is_free(port, local=local):
            found.append(port)
    return found


def is_free(port: int, *, local: bool) -> bool:
    """Whether a node could listen at `port`, with TLS beside it. libp2p itself would not notice another one of this user."""
    hosts = [(socket.AF_INET, "127.0.0.1")] if local else [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    both = [one for one in (port, tls_port(port)) if one]
    return all(_can_bind(family, host, one) for family, host in hosts for one in both)


async def until_free(port: int, *, local: bool) -> bool:
    """Wait for a killed node's libp2p to end too; whether the port is free now."""
    for _ in range(round(PORT_S / PORT_POLL_S)):
        if is_free(port, local=local):
            return True
        await asyncio.sleep(PORT_POLL_S)
    return is_free(port, local=local)


def own_addresses(identity: Identity, port: int, *, local: bool) -> list[str]:
    """Multiaddrs at which a node on `port` will be found, best first, as far as this machine's interfaces tell; none for port 0."""
    if port == 0:
        return []
    hosts: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {ipaddress.IPv4Address("127.0.0.1")}
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            try:
                host = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue  # an Ethernet address
            if not (local or host.is_loopback or host.is_link_local):
                hosts.add(host)
    ranked = sorted(hosts, key=lambda host: (reach(str(host)), host.version, int(host)))
    name = libp2p_text(identity.public_key)
    return [f"/ip{host.version}/{host}/tcp/{port}/p2p/{name}" for host in ranked[:INVITATION_ADDRESSES]]


def _can_bind(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are over hold nothing
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)  # others: a machine without IPv6
    return True
