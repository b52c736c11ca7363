"""Addresses of peers: what is taken, what is left out."""

import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farflung.node.addresses import host_of, is_direct, reach, split_addresses, split_peer, tls_address
from farflung.node.identity import libp2p_text
from farflung.protocol import limits
from farflung.protocol.errors import ConfigError

PEER = b"p" * 32
OTHER = b"o" * 32


def test_split() -> None:
    relay = f"/ip4/9.9.9.9/tcp/1/p2p/{libp2p_text(OTHER)}/p2p-circuit"
    addresses = [
        f"/ip4/1.2.3.4/tcp/5/p2p/{libp2p_text(PEER)}",
        "/ip4/1.2.3.5/tcp/5",
        f"/ip4/1.2.3.6/tcp/5/p2p/{libp2p_text(OTHER)}",
        f"{relay}/p2p/{libp2p_text(PEER)}",
        relay,
        "tls://1.2.3.4:443",
        "tls://[2001:db8::1]:443",
        "tls://host.example:0",
        "tls://host.example:99999",
        "http://host",
        "tls://" + "x" * 1000 + ":1",
    ]
    assert split_addresses(PEER, addresses) == (
        ["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.5/tcp/5", relay, relay],
        [("1.2.3.4", 443), ("2001:db8::1", 443)],
    )


@pytest.mark.parametrize(
    ("multiaddr", "direct"),
    [
        ("/ip4/1.2.3.4/tcp/5", True),
        ("/ip6/2001:db8::1/tcp/65535", True),
        ("/dns4/host.example/tcp/5", True),
        ("/dns/a..b/tcp/5", False),
        ("/ip4/300.0.0.1/tcp/5", False),
        ("/ip4/2001:db8::1/tcp/5", False),
        ("/ip6/fe80::1%eth0/tcp/5", False),
        ("/ip4/1.2.3.4/tcp/65536", False),
        ("/ip4/1.2.3.4/tcp/5,/ip4/1.2.3.4/tcp/5", False),
        ("/ip4/1.2.3.4/tcp/5/ws", False),
        ("/unix/tmp/x", False),
        ("/nonsense", False),
    ],
)
def test_what_any_libp2p_can_read(multiaddr: str, direct: bool) -> None:
    assert is_direct(multiaddr) == direct


def test_count_is_bounded() -> None:
    many = [f"tls://host:{port}" for port in range(1, 1000)]
    assert len(split_addresses(PEER, many)[1]) == limits.MAX_ADDRESSES


@given(st.lists(st.text(max_size=60)))
def test_nonsense_never_raises(addresses: list[str]) -> None:
    split_addresses(PEER, addresses)
    for address in addresses:
        is_direct(address)


@given(st.from_regex(r"tls://[A-Za-z0-9.-]{1,200}:80", fullmatch=True))
@example("tls://a..b:80")
@example("tls://.:80")
@example(f"tls://{'a' * 64}.example:80")
@example("tls://host.example.:80")
def test_a_host_can_be_looked_up(address: str) -> None:
    """What cannot even be asked of a name server is left out; Python raises what is no OSError for it."""
    named = split_addresses(PEER, [address])[1]
    try:
        address.removeprefix("tls://").removesuffix(":80").encode("idna")
    except UnicodeError:
        assert not named
    else:
        assert len(named) == 1


def test_peer_argument() -> None:
    assert split_peer(f"/ip4/1.2.3.4/tcp/5/p2p/{libp2p_text(PEER)}") == (PEER, "/ip4/1.2.3.4/tcp/5")
    for wrong in ("", "1.2.3.4:5", "/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/5/p2p/QmNope"):
        with pytest.raises(ConfigError):
            split_peer(wrong)


def test_hosts() -> None:
    assert host_of("/ip6/::1/tcp/5/p2p/x") == "::1"
    assert host_of("/ip4/1.2.3.4/udp/5/quic-v1") is None
    assert host_of("/ip4/1.2.3.4/tcp/5/p2p/x/p2p-circuit") is None
    assert tls_address("::1", 5) == "tls://[::1]:5"
    assert [reach(host) for host in ("8.8.8.8", "192.168.1.1", "127.0.0.1", "name.example")] == [0, 1, 2, 0]


@given(st.from_regex(r"\[[0-9a-f:.%]{0,12}\]", fullmatch=True))
@example("[.]")
@example("[fe80::1%eth0]")
@example("[1.2.3.4]")
def test_what_stands_in_brackets_is_an_address_that_can_be_dialled(host: str) -> None:
    for named, _ in split_addresses(PEER, [f"tls://{host}:80"])[1]:
        socket.getaddrinfo(named.partition("%")[0], 80, flags=socket.AI_NUMERICHOST)
