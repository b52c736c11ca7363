"""Links for machines whose kernel lacks netem: one process that carries every packet between TUN devices.

Each host's `eth0` is a TUN device whose other end this router holds. It reads IPv4 packets, sends them through
the sender's uplink and the receiver's downlink, and writes them to the receiver's device when they are due.

`Pipe` and `Switch` are the model, without IO: time is an argument, randomness is injected. A pipe does what netem
does, in its order: lose some packets, drop those that find the queue full, serve the rest at the rate, delay them. It
is fluid: the time at which a packet is through follows from the time it came, not from when this process got the CPU,
so coarse ticks and a busy machine delay single packets but do not change the rate. `Counts.latest_s` says by how much.

Segmentation offload: a TUN device opened without IFF_VNET_HDR takes none, so the kernel hands over packets of
the MTU at most, with finished checksums. `Counts.largest_bytes` is there to check it.

Trade-off: Python spends some 20 us on each packet, so this is for tens of Mbit/s per host, not for Gbit/s. Packets are
moved once per `TICK_S`, which saves most of the system calls and makes a packet up to that much late.
"""

import collections
import contextlib
import errno
import gc
import heapq
import ipaddress
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

TICK_S = 0.001
"""Least time between two passes of the router."""
START_S = 20.0
"""How long the router may take to create its devices, or to answer; it takes some 0.1 s."""
STOP_S = 5.0
"""How long the router may take to end when asked to; then it is killed."""

_READ_BYTES = 4096  # well above the MTU, so that a larger packet would be noticed
_READS_PER_PASS = 512  # of one host, so that none starves the others
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


class RouterError(RuntimeError):
    """The router could not start, died or does not answer; the message has what it said."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a host's access link; the fields are those of `wan.Link`."""

    rate_bit_s: float
    delay_s: float
    loss: float
    queue_s: float


class PipeCounts(msgspec.Struct, kw_only=True):
    """What happened to the packets offered to one direction of a link: each was lost, dropped or passed."""

    lost: int = 0
    """By chance."""
    dropped: int = 0
    """Because the queue was full."""
    passed: int = 0
    passed_bytes: int = 0
    """IP headers included."""

    @property
    def offered(self) -> int:
        """All packets that came."""
        return self.lost + self.dropped + self.passed


class Counts(msgspec.Struct, kw_only=True):
    """What the router has done so far; `up` and `down` are by host."""

    up: list[PipeCounts]
    down: list[PipeCounts]
    astray: int = 0
    """Packets to nobody: not IPv4, or not to one of the hosts."""
    undelivered: int = 0
    """Packets that the receiver's device refused: it is down or gone."""
    largest_bytes: int = 0
    """Of one packet."""
    latest_s: float = 0.0
    """By how much the latest packet was written too late; a few ms unless the machine is overloaded."""
    cpu_s: float = 0.0
    """Processor time of the router, its time in the kernel included."""
    wall_s: float = 0.0
    """Seconds since it started."""


class Pipe:
    """Loss, then a queue that drains at a rate, then a delay."""

    def __init__(self, way: Way, rng: random.Random) -> None:
        self._way = way
        self._rng = rng
        self._free_at = float("-inf")
        self.counts = PipeCounts()

    def offer(self, num_bytes: int, now: float) -> float | None:
        """Send a packet into the pipe; returns when it comes out, in seconds, or None when it never does.

        `now` must not decrease. A packet is dropped when those before it need more than `queue_s`.
        """
        way, counts = self._way, self.counts
        if self._rng.random() < way.loss:
            counts.lost += 1
            return None
        begins = max(now, self._free_at)
        if begins - now > way.queue_s:
            counts.dropped += 1
            return None
        counts.passed += 1
        counts.passed_bytes += num_bytes
        self._free_at = begins + num_bytes * 8 / way.rate_bit_s
        return self._free_at + way.delay_s


class Switch:
    """All the pipes, and the packets in them. `addresses` are the hosts' IPv4 addresses as 4 bytes each.

    Each pipe draws from a generator of its own, so that one host's traffic leaves the fates of the others' alone.
    """

    def __init__(self, ways: Sequence[Way], addresses: Sequence[bytes], *, seed: int) -> None:
        self._up = [Pipe(way, random.Random(f"{seed} {i} up")) for i, way in enumerate(ways)]
        self._down = [Pipe(way, random.Random(f"{seed} {i} down")) for i, way in enumerate(ways)]
        self._hosts = {address: i for i, address in enumerate(addresses)}
        # (when, number, receiver, whether through the downlink, packet)
        self._events: list[tuple[float, int, int, bool, bytes]] = []
        self._number = 0
        self.counts = Counts(up=[p.counts for p in self._up], down=[p.counts for p in self._down])

    def send(self, host: int, packet: bytes, now: float) -> None:
        """Take a packet from a host. `now` must not decrease, in seconds."""
        to = self._hosts.get(packet[16:20]) if packet[:1] >= b"\x40" and packet[:1] < b"\x50" else None
        if to is None:
            self.counts.astray += 1
            return
        self.counts.largest_bytes = max(self.counts.largest_bytes, len(packet))
        self._push(self._up[host].offer(len(packet), now), to, False, packet)

    def receive(self, now: float) -> Iterator[tuple[int, bytes, float]]:
        """Yields (host, packet, when it was due) for all that are due by `now`, in order."""
        events = self._events
        while events and events[0][0] <= now:
            when, _, to, arrived, packet = heapq.heappop(events)
            if arrived:
                yield to, packet, when
            else:
                self._push(self._down[to].offer(len(packet), when), to, True, packet)

    def next_due(self) -> float | None:
        """When `receive` next has something to do, or None when no packet is on its way."""
        return self._events[0][0] if self._events else None

    def _push(self, when: float | None, to: int, arrived: bool, packet: bytes) -> None:
        if when is not None:
            self._number += 1
            heapq.heappush(self._events, (when, self._number, to, arrived, packet))


# --- the router's process ---


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    ways: list[Way]
    addresses: list[str]
    seed: int


def open_tun(name: str) -> int:
    """Create a TUN device in this network namespace; returns its file, non-blocking. Raises OSError.

    The device is gone when the file is closed, whatever namespace it is in by then.
    """
    import fcntl  # here, so that the module can be imported on Windows

    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


def main() -> None:
    """The router: a plan on stdin, `ready` on stdout, counts for every further line, and an end at the end of
    stdin, which is also how it notices that the program that started it is gone."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        plan = msgspec.json.decode(stdin.readline(), type=_Plan)
    # A late router would be a slower network than the one asked for. Niceness does not help where the kernel shares
    # processors by session (autogroup); real time does, and costs the others no more than the routing itself.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing below makes cycles
    addresses = [ipaddress.IPv4Address(address).packed for address in plan.addresses]
    switch = Switch(plan.ways, addresses, seed=plan.seed)
    files = [open_tun(f"tun{i}") for i in range(len(plan.ways))]
    os.write(1, b"ready\n")
    _route(files, switch)


def _route(files: list[int], switch: Switch) -> None:
    hosts = {file: host for host, file in enumerate(files)}
    counts, started = switch.counts, time.monotonic()
    poll = select.epoll()
    poll.register(0, select.EPOLLIN)
    for file in files:
        poll.register(file, select.EPOLLIN)
    now = started
    while True:
        due = switch.next_due()
        events = poll.poll(None if due is None else max(0.0, due - time.monotonic()))
        now = time.monotonic()
        for file, _ in events:
            if file == 0:
                asked = os.read(0, 4096)
                if not asked:
                    return
                counts.cpu_s, counts.wall_s = time.process_time(), now - started
                os.write(1, (msgspec.json.encode(counts) + b"\n") * asked.count(b"\n"))
            elif not _drain(file, hosts[file], switch, now):
                poll.unregister(file)
        for host, packet, when in switch.receive(now):
            try:
                os.write(files[host], packet)
            except OSError as error:
                if not _is_refusal(error):
                    raise
                counts.undelivered += 1
            counts.latest_s = max(counts.latest_s, now - when)
        # what comes meanwhile is moved together
        time.sleep(max(0.0, now + TICK_S - time.monotonic()))


def _drain(file: int, host: int, switch: Switch, now: float) -> bool:
    """Take what a host has sent; returns whether its device is still there."""
    try:
        for _ in range(_READS_PER_PASS):
            switch.send(host, os.read(file, _READ_BYTES), now)
    except BlockingIOError:
        return True
    except OSError as error:
        if not _is_refusal(error):
            raise
        return False
    return True


def _is_refusal(error: OSError) -> bool:
    """Whether a device is down or removed, or a packet is none that the kernel takes."""
    return error.errno in (errno.EIO, errno.EBADFD, errno.EINVAL)


# --- the program that starts it ---


class Router:
    """A running router, as seen by the program that started it; made by `routing`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def counts(self) -> Counts:
        """What it has done so far. Raises RouterError."""
        return msgspec.json.decode(self._ask(b"counts\n"), type=Counts)

    def _ask(self, line: bytes) -> bytes:
        """Send a line and return the line that answers it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError as error:
            raise RouterError("the router is dead") from error
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        answer, until = b"", time.monotonic() + START_S
        while not answer.endswith(b"\n"):
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise RouterError(f"the router did not answer within {START_S:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise RouterError(f"the router ended without an answer: {self._last_words()}")
            answer += piece
        return answer

    def _last_words(self) -> str:
        """The end of what it wrote to stderr; waits for its end."""
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").splitlines()
        return "; ".join(collections.deque(lines, maxlen=1)) or "no message"

    def _end(self) -> str | None:
        """End it; returns what was wrong with it, if anything."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.close()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        wrong = f"the router ended with {process.returncode}: {self._last_words()}"
        process.stdout.close()
        process.stderr.close()
        return wrong if process.returncode != 0 else None


@contextlib.contextmanager
def routing(namespace: str, ways: Sequence[Way], addresses: Sequence[str], *, seed: int = 0) -> Iterator[Router]:
    """Run a router in `namespace`, where its devices `tun0`, `tun1`, ... wait to be moved to the hosts.

    They are gone when it ends. Raises RouterError when it cannot start, and on the way out when it had died; an
    exception from inside goes first.
    """
    plan = _Plan(ways=list(ways), addresses=list(addresses), seed=seed)
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-P", "-m", "farflung.sims.tunnel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # an interrupt from the terminal is for the program, which then ends the router
    )
    router = Router(process)
    try:
        router._ask(msgspec.json.encode(plan) + b"\n")
        yield router
    finally:
        wrong = router._end()
    if wrong is not None:
        raise RouterError(wrong)


if __name__ == "__main__":
    main()
