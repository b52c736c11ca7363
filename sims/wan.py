"""A small internet in network namespaces: peers behind slow, distant, lossy links, for real processes.

Each peer is a namespace with one interface, `eth0`; all of them meet at a hub in one more namespace, and
nothing is visible outside. Two carriers bring packets from one to another:

- `kernel`: the hub is a bridge. Uplinks are shaped where packets leave the peer, downlinks where they leave the
  bridge; by `netem`, or by `tbf` where all links have a rate only.

      peer 0  eth0 ---veth--- port0  bridge  port1 ---veth--- eth0  peer 1
              (up)            (down)         (down)            (up)

- `tunnel`: for kernels without those. The hub is a process that holds the other ends of TUN devices; see `tunnel`.

So the round trip between peers a and b is 2 * (a.delay_s + b.delay_s), and a packet survives one way with
probability (1 - a.loss) * (1 - b.loss): 100 ms and 1 % between any two are 25 ms and 0.5 % for each. Needs root on
Linux with iproute2, and netem or /dev/net/tun: ask `available` first.

The kernel's segmentation offload is off, or loss would strike 64 kB at a time. How well TCP copes with loss depends
on its congestion control, which new namespaces take from the machine: name one to compare machines.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from farflung.sims.tunnel import Counts, Router, RouterError, Way, routing

Carrier = Literal["kernel", "tunnel"]
"""What brings packets from one host to another."""

MAX_PEERS = 250
"""Peers fit one /24."""
MTU_BYTES = 1500
COMMAND_TIMEOUT_S = 20.0
"""One call of `ip` or `tc`; they take milliseconds."""
STOP_S = 5.0
"""How long processes may take to end when asked to; then they are killed."""
_MIN_BURST_BYTES = 16_000
_TUN_QUEUE_PACKETS = 4000  # what a peer may send between two passes of the router
_BURST_S = 0.01  # tbf needs at least one timer tick of bytes, 10 ms on the slowest kernels


class WanError(RuntimeError):
    """`ip` or `tc` refused a command, or the router failed; the message has what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One peer's access to the internet, the same in both directions."""

    rate_bit_s: float
    """Bits per second."""
    delay_s: float = 0.0
    """Seconds that one packet takes between the peer and the bridge, on top of its queue."""
    loss: float = 0.0
    """Probability that a packet is lost, in each direction."""
    queue_s: float = 0.1
    """Seconds of traffic that the bottleneck holds before it drops."""

    def __post_init__(self) -> None:
        if not (self.rate_bit_s >= 1000 and self.delay_s >= 0 and 0 <= self.loss < 1 and self.queue_s > 0):
            raise ValueError(f"not a link: {self}")

    @property
    def needs_netem(self) -> bool:
        """Whether the kernel must have netem."""
        return self.delay_s > 0 or self.loss > 0

    def qdisc(self) -> list[str]:
        """The arguments of `tc qdisc add dev X root` for one direction."""
        rate = f"{self.rate_bit_s:.0f}bit"
        if not self.needs_netem:
            burst = max(_MIN_BURST_BYTES, math.ceil(self.rate_bit_s / 8 * _BURST_S))
            return ["tbf", "rate", rate, "burst", str(burst), "latency", f"{self.queue_s * 1000:.3f}ms"]
        # netem counts packets on their way too, so its limit covers delay and queue
        packets = math.ceil(self.rate_bit_s / 8 * (self.delay_s + self.queue_s) / MTU_BYTES) + 2
        arguments = ["netem", "limit", str(packets), "delay", f"{self.delay_s * 1000:.3f}ms"]
        if self.loss > 0:
            arguments += ["loss", f"{self.loss * 100:.4f}%"]
        return [*arguments, "rate", rate]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One peer's namespace."""

    namespace: str
    address: str
    """IPv4, reachable from the other hosts only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wan:
    """A running emulation; made by `emulate`."""

    hosts: tuple[Host, ...]
    carrier: Carrier
    _router: Router | None = None
    _processes: list["subprocess.Popen[Any]"] = field(default_factory=list)

    def popen(self, host: Host, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start `argv` inside a host, in a session of its own; `options` are those of subprocess.Popen.

        What still runs when the emulation ends is ended with it, children included.
        """
        process = subprocess.Popen(["ip", "netns", "exec", host.namespace, *argv], start_new_session=True, **options)
        self._processes.append(process)
        return process

    @property
    def router_pid(self) -> int | None:
        """Process of the router; None when the kernel carries the packets."""
        return None if self._router is None else self._router.pid

    def counts(self) -> Counts | None:
        """What happened to the packets so far; None when the kernel carries them. Raises WanError."""
        try:
            return None if self._router is None else self._router.counts()
        except RouterError as error:
            raise WanError(str(error)) from error


def available(*, netem: bool = True) -> str | None:
    """Why this machine cannot emulate links, or None when it can. `netem`: with delay and loss, not rates
    alone.

    Tries it out in a namespace that is removed again.
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program `{program}` (iproute2) is missing"
    no_kernel = _why_not("kernel", delays=netem)
    if no_kernel is None:
        return None
    no_tunnel = _why_not("tunnel", delays=netem)
    if no_tunnel is None:
        return None
    return f"not permitted, or not in this kernel: {no_kernel}; and without it: {no_tunnel}"


@contextlib.contextmanager
def emulate(
    links: Sequence[Link], *, carrier: Carrier | None = None, congestion: str | None = None, seed: int = 0
) -> Iterator[Wan]:
    """One host for each link, all joined. Everything is removed on the way out, also after an exception.

    `carrier`: by default the kernel if it can, else the tunnel. `congestion`: TCP's congestion control, such as
    `cubic`; by default the machine's. `seed` decides which packets are lost in the tunnel; netem seeds itself.

    Raises ValueError for no or too many links, and WanError where `available` has a reason, or on the way out
    when the router had died.
    """
    if not 1 <= len(links) <= MAX_PEERS:
        raise ValueError(f"{len(links)} links, possible are 1 to {MAX_PEERS}")
    if carrier is None:
        delays = any(link.needs_netem for link in links)
        carrier = "kernel" if _why_not("kernel", delays=delays) is None else "tunnel"
    prefix = f"farflung-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        with contextlib.ExitStack() as stack:
            hub = _namespace(stack, f"{prefix}-hub")
            hosts = tuple(
                Host(namespace=_namespace(stack, f"{prefix}-{i}"), address=f"10.77.0.{i + 1}")
                for i in range(len(links))
            )
            router = None
            if carrier == "kernel":
                _join_by_bridge(hub, hosts, links)
            else:
                router = _join_by_tunnel(stack, hub, hosts, links, seed)
            for host in hosts if congestion is not None else ():
                route = ["10.77.0.0/24", "dev", "eth0", "src", host.address, "congctl", str(congestion)]
                _run("ip", "-n", host.namespace, "route", "replace", *route)
            wan = Wan(hosts=hosts, carrier=carrier, _router=router)
            stack.callback(_end_all, wan._processes)
            yield wan
    except RouterError as error:
        raise WanError(str(error)) from error


def _why_not(carrier: Carrier, *, delays: bool) -> str | None:
    """Try a carrier out; returns why it does not work, or None when it does."""
    probe = Link(rate_bit_s=1e6, delay_s=0.001, loss=0.01) if delays else Link(rate_bit_s=1e6)
    try:
        with emulate([probe], carrier=carrier) as wan:
            _run("ip", "netns", "exec", wan.hosts[0].namespace, "true")
    except WanError as error:
        return str(error)
    return None


def _join_by_bridge(hub: str, hosts: Sequence[Host], links: Sequence[Link]) -> None:
    _run("ip", "-n", hub, "link", "add", "name", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "dev", "bridge", "addrgenmode", "none", "up")
    for index, (host, link) in enumerate(zip(hosts, links, strict=True)):
        port = f"port{index}"
        veth = ["type", "veth", "peer", "name", "eth0", "netns", host.namespace]
        _run("ip", "-n", hub, "link", "add", "name", port, *veth)
        _run("ip", "-n", hub, "link", "set", "dev", port, "master", "bridge")
        _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for namespace, device in ((hub, port), (host.namespace, "eth0")):
            plain = ["mtu", str(MTU_BYTES), "gso_max_segs", "1", "addrgenmode", "none", "up"]
            _run("ip", "-n", namespace, "link", "set", "dev", device, *plain)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *link.qdisc())


def _join_by_tunnel(
    stack: contextlib.ExitStack, hub: str, hosts: Sequence[Host], links: Sequence[Link], seed: int
) -> Router:
    ways = [Way(**dataclasses.asdict(link)) for link in links]
    router = stack.enter_context(routing(hub, ways, [host.address for host in hosts], seed=seed))
    for index, host in enumerate(hosts):
        _run("ip", "-n", hub, "link", "set", "dev", f"tun{index}", "netns", host.namespace, "name", "eth0")
        _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        plain = ["mtu", str(MTU_BYTES), "txqueuelen", str(_TUN_QUEUE_PACKETS), "addrgenmode", "none"]
        _run("ip", "-n", host.namespace, "link", "set", "dev", "eth0", *plain)
        _run("ip", "-n", host.namespace, "link", "set", "dev", "eth0", "up")  # later, or IPv6 says hello
    return router


def _namespace(stack: contextlib.ExitStack, name: str) -> str:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    _run("ip", "-n", name, "link", "set", "dev", "lo", "up")
    return name


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise WanError(f"`{' '.join(command)}`: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WanError(f"`{' '.join(command)}`: {error}") from error


def _end_all(processes: list["subprocess.Popen[Any]"]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_S)
        _signal(process, signal.SIGKILL)  # what is left of its session
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _signal(process: "subprocess.Popen[Any]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
