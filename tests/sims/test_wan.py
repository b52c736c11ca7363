"""Emulated links are as slow as they say, and leave nothing behind. Skipped, with the reason, where not
permitted."""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.sims import wan
from farflung.sims.tunnel import Counts
from farflung.sims.wan import Carrier, Link, WanError, available, emulate

SERVER = """
import socket, sys
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(1 << 16):
            if data.endswith(b"?"):
                peer.sendall(b"!")
"""

CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=60) as peer:
    started = time.perf_counter()
    peer.sendall(bytes(int(sys.argv[2])) + b"?")
    assert peer.recv(1) == b"!"
    print(time.perf_counter() - started)
"""


def round_trip_s(
    links: list[Link], num_bytes: int, carrier: Carrier | None = None, congestion: str | None = None
) -> float:
    """Seconds in which `num_bytes` go from the first host to the second, and a byte comes back."""
    return transfer(links, num_bytes, carrier, congestion)[0]


def transfer(
    links: list[Link], num_bytes: int, carrier: Carrier | None, congestion: str | None = None
) -> tuple[float, Counts | None]:
    """As `round_trip_s`, with the counts at the end."""
    with emulate(links, carrier=carrier, congestion=congestion) as net:
        server = net.popen(net.hosts[1], [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        argv = [sys.executable, "-c", CLIENT, net.hosts[1].address, str(num_bytes)]
        client = net.popen(net.hosts[0], argv, stdout=subprocess.PIPE, text=True)
        answer, _ = client.communicate(timeout=60)
        assert client.returncode == 0
        return float(answer), net.counts()


def leftovers() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if line.startswith(f"farflung-{os.getpid()}-")]


def skip_unless(carrier: Carrier, delays: bool) -> None:
    if reason := available(netem=delays):
        pytest.skip(reason)
    if reason := wan._why_not(carrier, delays=delays):
        pytest.skip(reason)


@pytest.fixture(params=["kernel", "tunnel"])
def rates(request: pytest.FixtureRequest) -> Carrier:
    """Each carrier that can do rates."""
    skip_unless(request.param, delays=False)
    carrier: Carrier = request.param
    return carrier


@pytest.fixture(params=["kernel", "tunnel"])
def delays(request: pytest.FixtureRequest) -> Carrier:
    """Each carrier that can do delay and loss too."""
    skip_unless(request.param, delays=True)
    carrier: Carrier = request.param
    return carrier


@pytest.fixture
def tunnel() -> None:
    skip_unless("tunnel", delays=True)


def test_a_rate_is_kept(rates: Carrier) -> None:
    fast, slow = Link(rate_bit_s=100e6), Link(rate_bit_s=4e6)
    ideal_s = 400_000 * 8 / 4e6
    by_uplink, by_downlink = (round_trip_s(links, 400_000, rates) for links in ([slow, fast], [fast, slow]))
    assert by_uplink > 0.8 * ideal_s and by_downlink > 0.8 * ideal_s
    assert round_trip_s([fast, fast], 400_000, rates) < min(by_uplink, by_downlink)


def test_a_delay_shows_in_the_round_trip(delays: Carrier) -> None:
    near, far = Link(rate_bit_s=20e6, delay_s=0.01), Link(rate_bit_s=20e6, delay_s=0.04)
    assert round_trip_s([near, far], 1, delays) > 0.095


def test_bytes_arrive_through_loss(delays: Carrier) -> None:
    lossy = Link(rate_bit_s=20e6, delay_s=0.005, loss=0.01)
    assert round_trip_s([lossy, lossy], 200_000, delays) > 0.02


@pytest.mark.usefixtures("tunnel")
def test_the_router_counts_what_it_does_to_a_bulk_transfer() -> None:
    link = Link(rate_bit_s=20e6, delay_s=0.002, loss=0.02)
    seconds, counts = transfer([link, link], 600_000, "tunnel", "cubic")
    assert counts is not None
    up, down = counts.up[0], counts.down[1]
    assert up.lost + down.lost > 3  # of some 430 packets, 4 %
    assert up.passed >= down.offered  # less only what is still between the two
    assert down.passed_bytes > 600_000
    assert down.passed_bytes * 8 < link.rate_bit_s * seconds
    assert counts.largest_bytes == wan.MTU_BYTES  # segments, not offloaded bundles of them
    assert 0 < counts.cpu_s < counts.wall_s
    assert seconds < counts.wall_s


@pytest.mark.usefixtures("tunnel")
def test_a_short_queue_drops() -> None:
    short = Link(rate_bit_s=4e6, delay_s=0.01, queue_s=0.02)
    _, counts = transfer([short, short], 400_000, "tunnel", "cubic")
    assert counts is not None
    assert counts.up[0].dropped > 0
    assert counts.up[0].lost == counts.down[1].lost == counts.down[1].dropped == 0


@pytest.mark.usefixtures("tunnel")
def test_the_router_and_the_hosts_are_gone_after_the_router_has_died() -> None:
    link = Link(rate_bit_s=1e6, delay_s=0.01)
    with pytest.raises(WanError, match="the router ended with -9"), emulate([link], carrier="tunnel") as net:
        process = net.popen(net.hosts[0], ["sleep", "600"])
        assert net.router_pid is not None
        os.kill(net.router_pid, signal.SIGKILL)
        with pytest.raises(WanError, match="the router"):
            net.counts()
    assert leftovers() == []
    assert process.returncode is not None


@pytest.mark.usefixtures("tunnel")
def test_the_router_ends_with_the_program_that_started_it() -> None:
    """Even when that is killed, and cannot clean up: the router's stdin ends then."""
    program = """
import os, signal, sys
from farflung.sims.wan import Link, emulate
with emulate([Link(rate_bit_s=1e6)], carrier="tunnel") as net:
    print(net.router_pid, net.hosts[0].namespace, flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", "-c", program], text=True, **pipes) as starter:  # type: ignore[call-overload]
        assert starter.stdout is not None
        pid, namespace = starter.stdout.readline().split()
        router = os.pidfd_open(int(pid))
        try:
            starter.kill()
            poll = select.poll()
            poll.register(router, select.POLLIN)
            assert poll.poll(20_000), "the router runs on"
        finally:
            os.close(router)
            for name in (namespace, f"{namespace.rpartition('-')[0]}-hub"):
                subprocess.run(["ip", "netns", "delete", name], check=True)


def test_the_congestion_control_is_that_asked_for(rates: Carrier) -> None:
    with emulate([Link(rate_bit_s=1e6)], carrier=rates, congestion="reno") as net:
        assert net.carrier == rates
        assert (net.router_pid is None) == (net.counts() is None) == (rates == "kernel")
        shown = ["ip", "-n", net.hosts[0].namespace, "route", "show", "10.77.0.0/24"]
        assert "congctl reno" in subprocess.run(shown, check=True, capture_output=True, text=True).stdout
    with pytest.raises(WanError), emulate([Link(rate_bit_s=1e6)], carrier=rates, congestion="no-such"):
        pass
    assert leftovers() == []


def test_nothing_is_left_behind(rates: Carrier) -> None:
    class Sabotage(Exception):
        pass

    link = Link(rate_bit_s=1e6)
    with pytest.raises(Sabotage), emulate([link, link], carrier=rates) as net:
        assert len(leftovers()) == 3
        process = net.popen(net.hosts[0], ["sleep", "600"])
        pid = net.router_pid
        raise Sabotage
    assert leftovers() == []
    assert process.returncode is not None
    assert pid is None or not Path(f"/proc/{pid}").exists()


def test_a_failure_on_the_way_leaves_nothing_behind(rates: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "qdisc", lambda self: ["no-such-qdisc"])
    monkeypatch.setattr(wan, "_TUN_QUEUE_PACKETS", "no-such-qdisc")
    with pytest.raises(WanError, match="no-such-qdisc"), emulate([Link(rate_bit_s=1e6)], carrier=rates):
        pass
    assert leftovers() == []


@pytest.mark.parametrize("works", ["kernel", "tunnel", None])
def test_the_kernel_is_preferred_and_the_tunnel_is_next(works: Carrier | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: program)
    monkeypatch.setattr(wan, "_why_not", lambda carrier, *, delays: None if carrier == works else f"no {carrier}")
    expected = "not permitted, or not in this kernel: no kernel; and without it: no tunnel"
    if sys.platform == "linux":
        assert available() == (None if works else expected)


@pytest.mark.skipif(sys.platform != "linux", reason="another reason comes first")
def test_reasons_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert available() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert available() == "the program `ip` (iproute2) is missing"


def test_delay_and_loss_ask_for_netem_and_rates_alone_do_not() -> None:
    assert Link(rate_bit_s=20e6).qdisc() == [*("tbf", "rate", "20000000bit", "burst", "25000", "latency", "100.000ms")]
    assert Link(rate_bit_s=20e6, delay_s=0.025, loss=0.01).qdisc() == [
        *("netem", "limit", "211", "delay", "25.000ms", "loss", "1.0000%", "rate", "20000000bit")
    ]


@pytest.mark.parametrize(
    "bad", [{"rate_bit_s": 0}, {"rate_bit_s": 1e6, "loss": 1.0}, {"rate_bit_s": 1e6, "delay_s": -1}]
)
def test_impossible_links_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a link"):
        Link(**bad)


@pytest.mark.parametrize("count", [0, wan.MAX_PEERS + 1])
def test_impossible_numbers_of_peers_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="links"), emulate([Link(rate_bit_s=1e6)] * count):
        pass
