"""Ports that a node can have, and the addresses that they make."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from farflung.node import listening
from farflung.node.identity import Identity
from farflung.node.listening import PORTS, free_ports, is_free, own_addresses, tls_port, until_free


@contextlib.contextmanager
def taken(port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Somebody listens there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, port))
        other.listen()
        yield other


def test_ports_come_in_pairs_and_are_nobody_elses() -> None:
    found = free_ports(20, local=True)
    assert len(set(found)) == 20 and set(found) <= set(PORTS)
    assert all(port % 2 == 0 and tls_port(port) == port + 1 < 32_768 for port in found), (
        "outgoing connections take those above"
    )
    assert tls_port(65535) == tls_port(0) == 0


def test_no_free_port_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1, local=True)
    monkeypatch.setattr(listening, "PORTS", range(port, port + 2, 2))
    with taken(port + 1):
        assert free_ports(1, local=True) == []


@pytest.mark.parametrize("above", [0, 1])
def test_a_port_is_taken_by_whoever_listens_on_it_or_on_that_of_tls(above: int) -> None:
    (port,) = free_ports(1, local=False)
    with taken(port + above):
        assert not is_free(port, local=True)
        assert not is_free(port, local=False)
    with taken(port + above, "0.0.0.0"):
        assert not is_free(port, local=True)
    assert is_free(port, local=True) and is_free(port, local=False)


def test_a_connection_that_is_over_holds_nothing() -> None:
    (port,) = free_ports(1, local=True)
    with taken(port) as server, socket.create_connection(("127.0.0.1", port)):
        server.accept()[0].close()  # the side that closes first keeps the port for a minute, in TIME_WAIT
    assert is_free(port, local=True)


def test_a_machine_without_ipv6_has_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            if self.family is socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "no such address")
            super().bind(address)

    (port,) = free_ports(1, local=False)
    monkeypatch.setattr(listening.socket, "socket", Probe)
    assert is_free(port, local=False)


def test_it_is_waited_for_whoever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1, local=True)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            with taken(port):
                waiting = tasks.create_task(until_free(port, local=True))
                await asyncio.sleep(0)
                assert not waiting.done()
            assert await waiting

    asyncio.run(main())
    monkeypatch.setattr(listening, "PORT_S", 0.0)
    with taken(port):
        assert not asyncio.run(until_free(port, local=True))


def test_addresses_are_those_of_the_interfaces_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = Identity.generate()
    found = ["192.168.1.5", "127.0.0.1", "fe80::1%eth0", "02:42:ac:11:00:02", "8.8.4.4", "::1", "2001:4860:4860::8844"]
    there = {"eth0": [SimpleNamespace(address=address) for address in found]}
    monkeypatch.setattr(listening.psutil, "net_if_addrs", lambda: there)

    def hosts(*, local: bool, port: int = 4242) -> list[str]:
        addresses = own_addresses(identity, port, local=local)
        assert all(address.endswith(f"/tcp/4242/p2p/{identity.libp2p_id}") for address in addresses)
        return [address.split("/")[2] for address in addresses]

    assert hosts(local=False) == ["8.8.4.4", "2001:4860:4860::8844", "192.168.1.5", "127.0.0.1"]
    assert hosts(local=True) == ["127.0.0.1"]
    assert hosts(local=False, port=0) == []
    there["docker0"] = [SimpleNamespace(address=f"172.17.0.{n}") for n in range(9)]
    assert len(hosts(local=False)) == 4 and hosts(local=False)[0] == "8.8.4.4"
