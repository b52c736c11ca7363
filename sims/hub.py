"""The internet under virtual time, and the fate of the processes on it, with everything that goes wrong.

One `MemoryHub` joins any number of processes, each of which has a `network.MemoryNetwork`. Control messages go the way of
`datagrams`; bulk streams are those of `streams`; records are those of `records`. On top, at any moment:

- `partition`: nothing passes between groups. Messages sent or arriving meanwhile are lost, streams stall and break after a timeout. Several can be open.
- `kill`: the process is gone. Its streams reset, what was on its way to it is lost, what it had sent still arrives. Its
  `MemoryNetwork` never delivers again; a restarted peer makes a new one with the same id.
- `pause`: the process is stopped (SIGSTOP). Tasks that run in `process_context(peer)` stand still, its kernel keeps taking bytes up to
  the windows and messages up to a bound, and everything happens at once at `resume`.
- `disturb`: more loss, duplicates or delay for a while. `set_skew`: a wrong clock.

Same seed and same program, same sequence of events, whatever Python's hash seed: no set of bytes is ever iterated, and all
timers and callbacks run in the total order of `farflung.sims.clock`. `on_event` sees every event, `counts` counts them by (what, detail).
"""

import asyncio
import contextvars
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from farflung.node.distance import TCP_WAYS, TLS_WAYS
from farflung.protocol.errors import NetworkError
from farflung.protocol.keys import PeerId
from farflung.sims.clock import VirtualLoop
from farflung.sims.datagrams import Datagrams
from farflung.sims.links import Disturbance, LinkModel, Path, Rates, one_after_another, path_between
from farflung.sims.nat import PUNCH_TRIPS, Nat, Routers
from farflung.sims.partitions import Partitions
from farflung.sims.process import Process
from farflung.sims.records import RecordStore
from farflung.sims.streams import Connection, MemoryStream

_DIAL_RETRY_S = 1.0
"""Between two attempts to reach a silent peer: the first retransmission of a TCP SYN comes after 1 s."""


@dataclass(frozen=True, slots=True)
class NetEvent:
    """One thing that happened on the network."""

    at: float
    """Virtual seconds."""
    what: str
    """`deliver`, `drop`, `duplicate` or `queue` a message; `open`, `refuse`, `chunk`, `stream-end`, `stream-broken` or
    `handler-failed` of a stream; `put`, `put-refused`, `get` or `get-miss` of records; `kill`, `pause`, `resume`, `partition`, `heal`."""
    sender: PeerId
    receiver: PeerId
    num_bytes: int
    detail: str
    """Why, or of which kind; few values, fit for counting."""


Backbone = Callable[[PeerId, PeerId], tuple[float, float]]
"""What lies between the access links of two peers: latency in seconds, added to theirs, and bytes per second of one direction, which all
streams of the pair share; infinite where nothing in the middle limits them."""


class MemoryHub:
    """A modelled internet for any number of peers. `link` is the access link of each that has none of its own."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        link: LinkModel,
        *,
        backbone: Backbone | None = None,
        on_event: Callable[[NetEvent], None] | None = None,
        on_message: Callable[[PeerId, bytes], None] = lambda sender, message: None,
        routers_seed: str = "",
    ) -> None:
        self.loop = loop
        self.link = link
        self.on_message = on_message
        """Sees every control message as it is sent, and its sender."""
        self.on_delivery: Callable[[PeerId, PeerId, bytes], None] = lambda sender, receiver, message: None
        """The same as it is handed to its receiver."""
        self.handled_at: Callable[[float], float] | None = None
        """When a control message that is at its receiver's machine now has been taken in; None: at once."""
        self.read_at: Callable[[float], float] | None = None
        """The same of a piece of a stream."""
        self.on_change: Callable[[PeerId | None], None] = lambda peer: None
        """Whose process has begun, ended, stopped or gone on; None: what lies between has changed."""
        self.counts: Counter[tuple[str, str]] = Counter()
        self.delivered_bytes: defaultdict[PeerId, float] = defaultdict(float)
        """Bulk of each sender that has arrived."""
        self._partitions = Partitions()
        self.records = RecordStore(rng, self._partitions.since)
        self.on_event = on_event
        self._backbone = backbone
        self._rng = rng
        self._links: dict[PeerId, LinkModel] = {}
        self._skews: dict[PeerId, float] = {}
        self._running: dict[PeerId, Process] = {}
        self._paused: dict[PeerId, deque[tuple[PeerId, bytes]]] = {}
        self._silent: set[PeerId] = set()
        """Whose machines have gone with them, and answer nothing."""
        self._disturbances: dict[int, Disturbance] = {}
        self._num_disturbances = 0
        self._routers = Routers(routers_seed)
        self._paths: dict[tuple[PeerId, PeerId], Path] = {}
        """Under the present links and disturbances: asked several times for every chunk."""
        self._ways: dict[tuple[PeerId, PeerId], tuple[bool, PeerId | None]] = {}
        self._connections: dict[int, Connection] = {}
        self._num_connections = 0
        self._rates = Rates()
        self._datagrams = Datagrams(self, rng, self._rates, self._take)
        # Empty: the network's own timers belong to no process, so they go on while their cause is stopped.
        self._context = contextvars.Context()

    # --- what a test or a schedule of faults does ---

    def set_link(self, peer: PeerId, link: LinkModel) -> None:
        """Give one peer its own access link; of `connect_timeout_s`, `break_after_s` and `record_*` the hub's count."""
        self._links[peer] = link
        self._find_ways()

    def set_nat(self, peer: PeerId, nat: Nat) -> None:
        """Put a router in front of a peer, which then cannot be dialled (`nat`)."""
        self._routers.put(peer, nat)
        self._find_ways()

    def set_skew(self, peer: PeerId, seconds: float) -> None:
        """Set how far a peer's clock is ahead, in seconds; it keeps it over restarts."""
        self._skews[peer] = seconds

    def partition(self, groups: Sequence[Sequence[PeerId]], *, bridged: bool = False) -> int:
        """Cut the network between groups, beside any cut so far, until `heal` is called with the number returned. Peers in no group form one more, or, when
        it is `bridged`, reach all.

        Raises ValueError when a peer is in two groups.
        """
        number = self._partitions.open(self.now(), groups, bridged=bridged)
        self._find_ways()
        self.record("partition", b"", b"", 0, f"{len(groups)} groups")
        self._check_links()
        return number

    def heal(self, number: int | None = None) -> None:
        """End one partition, or all. Streams that no other one stalls go on, unless they have failed. Raises KeyError when there is none of this number."""
        self._partitions.heal(self.now(), number)
        self._find_ways()
        self.record("heal", b"", b"", 0, "")
        self._check_links()

    def _check_links(self) -> None:
        for connection in list(self._connections.values()):
            connection.check_link()

    def kill(self, peer: PeerId, *, reset: bool = True) -> None:
        """End a peer's process on the spot; without `reset` its machine goes silent, and streams to it only time out.

        The network is all that dies here: the caller cancels the peer's tasks. Raises KeyError when it is not running.
        """
        network = self._running[peer]
        self.record("kill", peer, peer, 0, "reset" if reset else "silent")
        self.resume(peer)
        self._take_down(network, reset=reset)
        if not reset:
            self._silent.add(peer)

    def _take_down(self, network: Process, *, reset: bool) -> None:
        del self._running[network.peer_id]
        self._find_relays()
        self._paused.pop(network.peer_id, None)
        self._rates.forget(network.peer_id)
        network.stop_serving()
        self.on_change(network.peer_id)
        for connection in list(self._connections.values()):
            if network.peer_id in connection.peers:
                connection.killed(network.peer_id, reset=reset)
            elif network.peer_id == connection.relay:
                connection.relay_killed()

    def pause(self, peer: PeerId) -> None:
        """Stop a peer's process where it stands. Raises KeyError when it is not running."""
        network = self._running[peer]
        self._paused.setdefault(peer, deque())
        self.on_change(peer)
        self.loop.freeze(network.peer_id)
        self.record("pause", peer, peer, 0, "")

    def resume(self, peer: PeerId) -> None:
        """Let a paused process go on, first with what it was doing, then with the messages it kept; else no effect."""
        kept = self._paused.pop(peer, None)
        if kept is None:
            return
        self.record("resume", peer, peer, 0, "")
        self.loop.thaw(peer)
        for sender, message in kept:
            self.loop.call_soon(self._arrive, sender, self._running[peer], message, context=self._context)
        self.on_change(peer)

    def disturb(self, disturbance: Disturbance) -> int:
        """Make the network worse until `calm` is called with the number returned."""
        self._num_disturbances += 1
        self._disturbances[self._num_disturbances] = disturbance
        self._find_ways()
        return self._num_disturbances

    def calm(self, number: int) -> None:
        """End one disturbance. Raises KeyError when there is none of this number."""
        del self._disturbances[number]
        self._find_ways()

    # --- facts ---

    def running(self) -> list[PeerId]:
        """Peers with a live process, paused ones included, in the order in which they started."""
        return list(self._running)

    @property
    def quiet(self) -> bool:
        """True while there is no partition, and nothing that makes the network worse."""
        return not self._partitions and not self._disturbances

    def is_paused(self, peer: PeerId) -> bool:
        """True while the peer's process is stopped."""
        return peer in self._paused

    def link_of(self, peer: PeerId) -> LinkModel:
        """The access link of a peer."""
        return self._links.get(peer, self.link)

    def unix_time(self, peer: PeerId) -> float:
        """What a peer's clock shows, in seconds."""
        return self.loop.time() + self._skews.get(peer, 0.0)

    # --- the wire (`streams.Wire`) ---

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call back at `when` virtual seconds, in no process's context."""
        return self.loop.call_at(when, callback, *args, context=self._context)

    def cut(self, a: PeerId, b: PeerId) -> bool:
        """True while a partition separates the two."""
        return bool(self._partitions) and self._partitions.separate(a, b)

    def path(self, a: PeerId, b: PeerId) -> Path:
        """The path between two peers under the present disturbances, over a relay if it takes one."""
        path = self._paths.get((a, b))
        if path is None:
            relay = self.relay(a, b)
            legs = [(a, b)] if relay is None else [(a, relay), (relay, b)]
            path = self._paths[a, b] = one_after_another([self._leg(*leg) for leg in legs])
        return path

    def _leg(self, a: PeerId, b: PeerId) -> Path:
        disturbances = tuple(d for d in self._disturbances.values() if d.touches(a, b))
        between = (0.0, math.inf) if self._backbone is None else self._backbone(a, b)
        return path_between(self.link_of(a), self.link_of(b), disturbances, between)

    def relay(self, a: PeerId, b: PeerId) -> PeerId | None:
        """Who passes on what two peers have for each other; None when they reach each other directly, or not at all."""
        return self._way(a, b)[1] if self._routers else None

    def reach(self, a: PeerId, b: PeerId) -> bool:
        """Whether anything gets from one to the other: there is no cut, and a relay where it takes one."""
        return not self.cut(a, b) and self._way(a, b) != (False, None)

    def _way(self, a: PeerId, b: PeerId) -> tuple[bool, PeerId | None]:
        """Whether two peers reach each other directly, and if not, by whom."""
        if not self._routers:
            return True, None
        way = self._ways.get((a, b))
        if way is None:
            if a == b or self._routers.direct(a, b):
                way = True, None
            else:
                there = (peer for peer in self._running if not self.cut(a, peer) and not self.cut(peer, b))
                way = False, self._routers.relay(a, b, there)
            self._ways[a, b] = way
        return way

    def _find_ways(self) -> None:
        """Links, routers, cuts or relays have changed."""
        self._paths.clear()
        self._ways.clear()
        self.on_change(None)

    def _find_relays(self) -> None:
        """Somebody has come or gone, who may relay for others."""
        if self._routers:
            self._find_ways()

    def up(self, peer: PeerId, num_bytes: float) -> float:
        """Queue bytes on a peer's uplink; returns when the last has left."""
        return self._rates.reserve(peer, "up", num_bytes, self.link_of(peer).up_bytes_per_s, self.now())

    def across(self, sender: PeerId, receiver: PeerId, num_bytes: float, left_at: float) -> float:
        """Queue bytes that leave an uplink at `left_at` on what lies between; returns when the last is through, latency aside."""
        rate = self.path(sender, receiver).bytes_per_s
        if math.isinf(rate):
            return left_at
        return self._rates.reserve(sender, receiver, num_bytes, rate, left_at)

    def down(self, peer: PeerId, num_bytes: float) -> float:
        """Queue bytes on a peer's downlink; returns when the last is in."""
        return self._rates.reserve(peer, "down", num_bytes, self.link_of(peer).down_bytes_per_s, self.now())

    def taken_in(self) -> float:
        """When a piece of a stream that is at its receiver's machine now has been taken in."""
        return self.now() if self.read_at is None else self.read_at(self.now())

    def draw_break_s(self) -> float:
        """How long a stream over a cut link takes to fail, in seconds."""
        return self._rng.uniform(*self.link.break_after_s)

    def delivered(self, sender: PeerId, num_bytes: float) -> None:
        """Count what has come to its receiver."""
        self.delivered_bytes[sender] += num_bytes

    def record(self, what: str, sender: PeerId, receiver: PeerId, num_bytes: int, detail: str) -> None:
        """Count and log one event."""
        self.counts[what, detail] += 1
        if self.on_event is not None:
            self.on_event(NetEvent(self.now(), what, sender, receiver, num_bytes, detail))

    def forget(self, connection: Connection) -> None:
        """A connection whose ends are both over."""
        self._connections.pop(connection.number, None)

    # --- what processes call ---

    def attach(self, network: Process) -> None:
        """A process has started. Raises ValueError when its id is running already."""
        if network.peer_id in self._running:
            raise ValueError(f"peer {network.peer_id.hex()[:12]} is running already")
        self._running[network.peer_id] = network
        self._silent.discard(network.peer_id)
        self._find_relays()
        self.on_change(network.peer_id)

    def detach(self, network: Process) -> None:
        """A process has ended of its own accord: its operating system closes what it left open."""
        if self.is_running(network):
            self.resume(network.peer_id)
            self._take_down(network, reset=True)

    def runs(self, peer: PeerId) -> bool:
        """Whether a peer has a live process."""
        return peer in self._running

    def is_running(self, network: Process) -> bool:
        """True until this very process ends; a later one of the same peer does not count."""
        return self._running.get(network.peer_id) is network

    def post(self, source: Process, receiver: PeerId, message: bytes) -> None:
        """Send one control message into the modelled network."""
        sender = source.peer_id
        target = self._running.get(receiver)
        self.on_message(sender, message)
        if not self.is_running(source):
            self.record("drop", sender, receiver, len(message), "sender gone")
        elif self.is_paused(sender):
            self.record("drop", sender, receiver, len(message), "sender paused")
        elif target is None:
            self.record("drop", sender, receiver, len(message), "receiver gone")
        elif target is source:
            self.at(self.now(), self._arrive, sender, target, message)
        elif not self.reach(sender, receiver):
            why = "cut" if self.cut(sender, receiver) else "no relay"
            self.record("drop", sender, receiver, len(message), why)
        else:
            self._datagrams.send(sender, target, message)

    def _take(self, sender: PeerId, target: Process, message: bytes) -> None:
        """It is at the receiver's machine."""
        if self.handled_at is None:
            self._arrive(sender, target, message)
        else:
            self.at(self.handled_at(self.now()), self._arrive, sender, target, message)

    def _arrive(self, sender: PeerId, target: Process, message: bytes) -> None:
        receiver = target.peer_id
        if not self.is_running(target):
            self.record("drop", sender, receiver, len(message), "receiver gone")
        elif self.cut(sender, receiver):
            self.record("drop", sender, receiver, len(message), "cut")
        elif (kept := self._paused.get(receiver)) is None:
            target.deliver(sender, message)
        elif len(kept) < self.link_of(receiver).queue_messages:
            kept.append((sender, message))
            self.record("queue", sender, receiver, len(message), "")
        else:
            self.record("drop", sender, receiver, len(message), "queue full")

    async def dial(self, source: Process, peer: PeerId, kind: str) -> MemoryStream:
        """Open a stream: three round trips, for TCP, TLS 1.3 and READY (`node.tls`), or at once over a connection that was kept. Raises NetworkError."""
        me = source.peer_id
        give_up_at = self.now() + self.link.connect_timeout_s
        while not self.reach(me, peer) or self.is_paused(peer) or peer in self._silent:
            if self.now() >= give_up_at:
                self._refuse(me, peer, "no answer")
            await asyncio.sleep(min(_DIAL_RETRY_S, give_up_at - self.now()))
        if source.keeps(self._running.get(peer)):
            await asyncio.sleep(0.0)
        else:
            trips = TCP_WAYS + (PUNCH_TRIPS if self._routers.punched(me, peer) else 0.0)
            await asyncio.sleep(trips * self.path(me, peer).latency_s)
            if peer in self._running:  # else there is nobody to shake hands with
                await asyncio.sleep(TLS_WAYS * self.path(me, peer).latency_s)
        target = self._running.get(peer)
        if not self.is_running(source):
            raise NetworkError("this network was closed")
        if target is None and peer in self._silent:  # it has lost power while it was asked
            await asyncio.sleep(max(0.0, give_up_at - self.now()))
            self._refuse(me, peer, "no answer")
        if target is None:
            self._refuse(me, peer, "connection refused")
        if not target.serves(kind):
            self._refuse(me, peer, "kind not served")
        source.note_dialled(target)
        self.record("open", me, peer, 0, kind)
        self._num_connections += 1
        meters = (source.meter(peer), target.meter(me))
        if not self.reach(me, peer):
            self._refuse(me, peer, "no answer")
        relay = self.relay(me, peer)
        connection = Connection(self, self._num_connections, kind, me, peer, meters, relay)
        self._connections[connection.number] = connection
        connection.check_link()
        target.accept(kind, connection.server)
        return connection.client

    async def refuses(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether a machine answers a connection, within one trip there and back, by saying that nobody listens."""
        if not self.reach(sender, receiver) or receiver in self._silent:
            await asyncio.sleep(self.link.connect_timeout_s)
            return False
        await asyncio.sleep(2.0 * self.path(sender, receiver).latency_s)
        return receiver not in self._running

    def _refuse(self, sender: PeerId, receiver: PeerId, why: str) -> NoReturn:
        self.record("refuse", sender, receiver, 0, why)
        raise NetworkError(f"no stream to {receiver.hex()[:12]}: {why}")

    async def put(self, author: PeerId, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a record; True when it was taken."""
        await self._ask_the_dht()
        taken = self.records.put(
            key,
            subkey,
            value,
            expires_at,
            author=author,
            now=self.now(),
            delay_s=self.link.record_delay_s,
        )
        self.record("put" if taken else "put-refused", author, b"", len(value), "")
        return taken

    async def get(self, reader: PeerId, key: str) -> dict[str, bytes]:
        """Look records up, as `reader` finds them."""
        await self._ask_the_dht()
        found, num_missed = self.records.get(key, reader=reader, now=self.now(), miss=self.link.record_miss)
        self.record("get", b"", reader, sum(map(len, found.values())), "")
        for _ in range(num_missed):
            self.record("get-miss", b"", reader, 0, "")
        return found

    async def _ask_the_dht(self) -> None:
        slow_s = self.link.record_timeout_s if self._partitions else 0.0
        await asyncio.sleep((self.link.record_delay_s + slow_s) * self._rng.random())
