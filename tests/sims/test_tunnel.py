"""The link model in exact numbers, and a router that says why when it cannot route. No privileges needed."""

import random
import subprocess

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.sims import tunnel
from farflung.sims.tunnel import Counts, Pipe, RouterError, Switch, Way, routing

A, B, C = b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x02", b"\x0a\x00\x00\x03"


def way(rate_bit_s: float = 8000, delay_s: float = 0.0, loss: float = 0.0, queue_s: float = 1e9) -> Way:
    return Way(rate_bit_s=rate_bit_s, delay_s=delay_s, loss=loss, queue_s=queue_s)


def packet(to: bytes, num_bytes: int = 100, first: int = 0x45) -> bytes:
    """An IPv4 packet, as far as the router looks at it."""
    return (bytes([first]) + bytes(15) + to).ljust(num_bytes, b".")


def arrivals(switch: Switch, now: float) -> list[tuple[int, int, float]]:
    """(host, bytes, when) of what arrives by `now`."""
    return [(host, len(data), round(when, 9)) for host, data, when in switch.receive(now)]


# --- one pipe ---


def test_packets_leave_at_the_rate_and_arrive_after_the_delay() -> None:
    pipe = Pipe(way(rate_bit_s=8000, delay_s=0.5), random.Random(0))  # 1000 bytes take 1 s
    assert [pipe.offer(1000, now) for now in (0.0, 0.0, 0.25)] == [1.5, 2.5, 3.5]
    assert pipe.offer(500, 10.0) == 11.0  # an idle link saves nothing up


def test_a_full_queue_drops_what_comes_last() -> None:
    pipe = Pipe(way(queue_s=2.0), random.Random(0))
    assert [pipe.offer(1000, 0.0) for _ in range(5)] == [1.0, 2.0, 3.0, None, None]
    assert pipe.offer(1000, 1.0) == 4.0  # one second later there is room for one
    assert (pipe.counts.passed, pipe.counts.dropped, pipe.counts.lost) == (4, 2, 0)
    assert pipe.counts.passed_bytes == 4000


def test_a_packet_larger_than_the_queue_passes_an_idle_link() -> None:
    assert Pipe(way(queue_s=0.001), random.Random(0)).offer(1000, 0.0) == 1.0


class Scripted(random.Random):
    """Draws what it is told to."""

    def __init__(self, *draws: float) -> None:
        super().__init__(0)
        self._draws = list(draws)

    def random(self) -> float:
        return self._draws.pop(0)


def test_lost_packets_take_no_capacity() -> None:
    pipe = Pipe(way(loss=0.1), Scripted(0.5, 0.09, 0.1))
    assert [pipe.offer(1000, 0.0) for _ in range(3)] == [1.0, None, 2.0]
    assert (pipe.counts.offered, pipe.counts.lost) == (3, 1)


def test_loss_is_as_frequent_as_asked_for() -> None:
    pipe = Pipe(way(loss=0.01), random.Random(1))
    for _ in range(100_000):
        pipe.offer(1, 0.0)
    assert 900 < pipe.counts.lost < 1100


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 1500)), max_size=60), st.floats(0.01, 5))
def test_no_pipe_is_faster_than_its_rate_or_holds_more_than_its_queue(
    offers: list[tuple[float, int]], queue_s: float
) -> None:
    pipe, now = Pipe(way(queue_s=queue_s), random.Random(0)), 0.0
    served: list[float] = []
    for pause, num_bytes in offers:
        now += pause
        out = pipe.offer(num_bytes, now)
        if out is not None:
            assert now < out <= now + queue_s + num_bytes / 1000 + 1e-6
            assert not served or out >= served[-1] + num_bytes / 1000 - 1e-6
            served.append(out)
    assert pipe.counts.offered == len(offers)


# --- all of them ---


def test_a_packet_takes_the_uplink_and_then_the_downlink() -> None:
    switch = Switch([way(delay_s=1), way(rate_bit_s=4000, delay_s=2)], [A, B], seed=0)
    switch.send(0, packet(B, 1000), 0.0)
    assert switch.next_due() == 2.0  # at the hub: 1 s of rate, 1 s of delay
    assert arrivals(switch, 5.9) == []
    assert switch.next_due() == 6.0  # 2 s of rate, 2 s of delay
    assert arrivals(switch, 6.0) == [(1, 1000, 6.0)]
    assert switch.next_due() is None


def test_senders_share_the_downlink_in_the_order_in_which_packets_reach_the_hub() -> None:
    switch = Switch([way(delay_s=5), way(delay_s=1), way()], [A, B, C], seed=0)
    switch.send(0, packet(C, 1000), 0.0)  # at the hub after 6 s
    switch.send(1, packet(C, 500), 0.0)  # after 1.5 s
    switch.send(1, packet(C, 4500), 0.0)  # after 6 s, sent later than the first
    assert arrivals(switch, 100.0) == [(2, 500, 2.0), (2, 1000, 7.0), (2, 4500, 11.5)]


def test_a_late_router_changes_no_times() -> None:
    prompt, late = (Switch([way(delay_s=1)] * 2, [A, B], seed=0) for _ in range(2))
    seen = []
    for second in range(5):
        for switch in (prompt, late):
            switch.send(0, packet(B, 1000), float(second))
        seen += arrivals(prompt, float(second))
    assert seen + arrivals(prompt, 100.0) == arrivals(late, 100.0)


def test_both_directions_are_independent() -> None:
    switch = Switch([way(), way()], [A, B], seed=0)
    switch.send(0, packet(B, 1000), 0.0)
    switch.send(1, packet(A, 1000), 0.0)
    assert arrivals(switch, 9.0) == [(1, 1000, 2.0), (0, 1000, 2.0)]


@pytest.mark.parametrize("data", [b"", b"\x45", packet(b"\x0a\x00\x00\x09"), packet(B, first=0x60)])
def test_packets_to_nobody_are_counted_and_dropped(data: bytes) -> None:
    switch = Switch([way(), way()], [A, B], seed=0)
    switch.send(0, data, 0.0)
    assert (switch.next_due(), switch.counts.astray, switch.counts.up[0].offered) == (None, 1, 0)


def fates(seed: int, others: bool) -> list[float]:
    """Sizes that survive from the first host to the second, with or without other traffic."""
    switch = Switch([way(loss=0.3)] * 3, [A, B, C], seed=seed)
    for num_bytes in range(100, 200):
        switch.send(0, packet(B, num_bytes), 0.0)
        if others:
            switch.send(1, packet(C), 0.0)
    return [num_bytes for host, num_bytes, _ in arrivals(switch, 1e9) if host == 1]


def test_the_seed_decides_what_is_lost_and_other_hosts_do_not() -> None:
    assert fates(1, False) == fates(1, True)
    assert fates(1, False) != fates(2, False)
    assert 30 < len(fates(1, False)) < 70  # 0.7 squared


def test_counts_survive_the_way_to_the_other_process() -> None:
    switch = Switch([way(), way()], [A, B], seed=0)
    switch.send(0, packet(B, 1200), 0.0)
    counts = msgspec.json.decode(msgspec.json.encode(switch.counts), type=Counts)
    assert counts == switch.counts
    assert (counts.up[0].passed_bytes, counts.largest_bytes) == (1200, 1200)


# --- a router that fails ---


def run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> "list[subprocess.Popen[bytes]]":
    """Let `routing` start a shell script; returns what it starts."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(argv: list[str], **options: object) -> "subprocess.Popen[bytes]":
        started.append(popen(["sh", "-c", script], **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_a_router_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_instead(monkeypatch, "read plan; echo 'first' >&2; echo 'no such device' >&2; exit 3")
    with pytest.raises(RouterError, match="ended without an answer: no such device"):
        with routing("anywhere", [way()], ["10.0.0.1"]):
            pass
    assert started[0].returncode == 3


def test_a_router_that_hangs_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "START_S", 0.05)
    monkeypatch.setattr(tunnel, "STOP_S", 0.05)
    started = run_instead(monkeypatch, "exec sleep 600")
    with pytest.raises(RouterError, match="did not answer"), routing("anywhere", [way()], ["10.0.0.1"]):
        pass
    assert started[0].returncode == -9


def test_a_router_that_fails_at_the_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "read plan; echo ready; read more; echo 'oh no' >&2; exit 4")
    with pytest.raises(RouterError, match="ended with 4: oh no"), routing("anywhere", [way()], ["10.0.0.1"]):
        pass


def test_an_exception_from_inside_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started = run_instead(monkeypatch, "read plan; echo ready; read more; exit 4")
    with pytest.raises(KeyError), routing("anywhere", [way()], ["10.0.0.1"]):
        raise KeyError
    assert started[0].returncode == 4
