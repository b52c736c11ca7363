"""Records in hivemind's Kademlia DHT, in our own event loop, with the guards (`dht_guard.py`, `dht_protocol.py`, `dht_storage.py`).

Searches always ask for the latest over all replicas; hivemind's caches are switched off, since a cached heartbeat is a
wrong one. Seeds (`seeds.py`) are asked some at a time, until one answers: a machine remembers more peers than can be dialled at once, and all
but one may be gone. When none does all are tried again, and once we are in the first ones now and then, because two halves that
started apart stay apart otherwise (hivemind issue 624).
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import structlog

from farflung.node.clocks import Clocks
from farflung.node.identity import libp2p_bytes
from farflung.node.network import PeerId
from farflung.node.seeds import Seeds
from farflung.protocol import limits
from farflung.protocol.errors import NetworkError, RemoteError

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p.p2p_daemon import P2P

    from farflung.node.dht_guard import RecordCheck
    from farflung.node.dht_protocol import Start

REPLICAS = 5
RPC_S = 3.0
RETRY_S = 2.0
"""Pause after all seeds were asked in vain, doubled from time to time."""
RETRY_MAX_S = 60.0
REJOIN_S = 600.0
"""How often seeds are asked again once we are in."""
SEARCH_S = 30.0
PUT_S = 45.0
"""A search for the nodes that are to have it, the record's way to them, and to join again before, if need be."""
CLOSE_S = 3.0

_log = structlog.get_logger(__name__)


def key_digest(key: str) -> bytes:
    """What the check of records sees of a record's key: hivemind's 20-byte id of it."""
    return hashlib.sha1(msgspec.msgpack.encode(key), usedforsecurity=False).digest()


class Records:
    """The DHT node of a peer."""

    def __init__(self, node: "DHTNode", connect: Callable[[PeerId], Awaitable[None]]) -> None:
        self._node = node
        self._connect = connect
        self._seeds = Seeds()
        self._clocks = Clocks()
        self._own: frozenset[bytes] = frozenset()
        self._wake = asyncio.Event()
        self.joined = asyncio.Event()

    @classmethod
    async def start(
        cls,
        p2p: "P2P",
        check: "RecordCheck",
        refused: Callable[[RemoteError], None],
        connect: Callable[[PeerId], Awaitable[None]],
        start: "Start",
    ) -> "Records":
        """`refused` is told what `check` finds; `connect` makes libp2p dial a peer by its known addresses, raises NetworkError; `start` begins a task
        that nobody waits for."""
        from hivemind.dht.node import DHTNode

        from farflung.node import dht_guard, dht_protocol

        records = dht_guard.CheckedRecords(check, refused)
        node = await DHTNode.create(
            p2p=p2p,
            node_id=dht_protocol.node_id_of(p2p.peer_id),
            client_mode=True,  # until it has its guards
            num_replicas=REPLICAS,
            wait_timeout=RPC_S,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
            record_validator=records,
        )
        await dht_protocol.install(node, records, start)
        return cls(node, connect)

    def keep(self, keys: Collection[bytes]) -> None:
        """Keys (as `key_digest` gives them) of our own swarm: what is kept under them is not pushed out by what comes under others, and is checked
        once more, for the check may know more by now."""
        self._own = frozenset(keys)
        self._node.protocol.keep(keys)

    def look_again(self) -> None:
        """The clock has jumped: what is kept of our own swarm is checked once more, for what was taken by a clock that was ahead would outlast what is put now; and
        seeds are asked, for after a sleep whoever we knew may be gone, and for what time it is."""
        self._clocks.forget()
        self._node.protocol.keep(self._own)
        self.ask_again()

    def ask_again(self) -> None:
        """Ask seeds now, not when it is time to: there may have been no network when they were asked last."""
        self._wake.set()

    def clock_trouble(self) -> str:
        """See `network.Network.clock_trouble`."""
        return self._clocks.trouble(time.monotonic())

    def add_seed(self, peer: PeerId) -> None:
        """A peer through which the DHT can be joined: one that our user or our own disk knows. The best come first."""
        self._seeds.name(peer)
        self._wake.set()

    def found(self, peer: PeerId) -> None:
        """One of our own swarm, at an address that `connect` knows, who may be asked as well."""
        was_alone = not self._seeds
        self._seeds.find(peer)
        if was_alone:
            self._wake.set()  # others wait for their turn: how often we ask is not for them to say

    async def stay_joined(self) -> None:
        """Join through the seeds, and again later. Runs until cancelled."""
        retry = RETRY_S
        while True:
            self._wake.clear()
            if not await self.join_once() and self._seeds.unasked:
                continue  # there are seeds that have not been asked
            if self.joined.is_set() or not self._seeds:
                pause, retry = REJOIN_S, RETRY_S
            else:
                pause, retry = retry, min(RETRY_MAX_S, 2 * retry)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def join_once(self) -> bool:
        """Ask the next seeds; True when one answered that we can ask for others. Those that answer are the first to be asked from then on."""
        batch = self._seeds.take()
        async with asyncio.TaskGroup() as group:
            asked = {seed: group.create_task(self._ping(seed)) for seed in batch}
        answered = [seed for seed, task in asked.items() if task.result()]
        self._seeds.asked(batch, answered)
        if not answered:
            return False
        await self._node.find_nearest_nodes([self._node.node_id])
        self.joined.set()
        return True

    async def _ping(self, peer: PeerId) -> bool:
        """Whether it is a node that we can ask: one of another id than its key's has no place in our table."""
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

        from farflung.node.dht_protocol import node_id_of

        try:
            await self._connect(peer)
        except NetworkError as error:
            _log.info("a seed does not answer", peer=peer.hex()[:12], error=str(error))
            return False
        who = PeerID(libp2p_bytes(peer))
        said, ahead_s = await self._node.protocol.call_ping_for_time(who)
        if said != node_id_of(who):
            _log.info("a seed is no node of the DHT", peer=peer.hex()[:12])
            return False
        if ahead_s is not None:
            self._clocks.note(peer, ahead_s, time.monotonic(), named=self._seeds.is_named(peer))
        return True

    async def _find_back(self) -> None:
        """Join again when nobody is left whom we could ask. hivemind forgets a node for one late answer; a machine under load that
        so forgot the only other one kept its records to itself till it next joined, and was found by nobody."""
        table = self._node.protocol.routing_table
        if self.joined.is_set() and not table.get_nearest_neighbors(self._node.node_id, 1, exclude=self._node.node_id):
            await self.join_once()

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        """See `network.Network.put_record`. Raises NetworkError, and ValueError for a record of ours above the limits."""
        if len(value) > limits.MAX_RECORD_BYTES or len(subkey) > limits.MAX_TEXT:
            raise ValueError(f"a record has at most {limits.MAX_RECORD_BYTES} bytes, not {len(value)}")
        if not expires_at > time.time():
            return False
        try:
            async with asyncio.timeout(PUT_S):
                await self._find_back()
                return bool(await self._node.store(key, value, expires_at, subkey=subkey))
        except TimeoutError:
            raise NetworkError(f"no node took the record {key!r} within {PUT_S:.0f} s") from None

    async def get(self, key: str) -> dict[str, bytes]:
        """See `network.Network.get_records`."""
        await self._find_back()
        try:
            async with asyncio.timeout(SEARCH_S):
                found = await self._node.get(key, latest=True)
        except TimeoutError:
            raise NetworkError(f"no answer about {key!r} within {SEARCH_S:.0f} s") from None
        if found is None or not isinstance(found.value, dict):
            return {}
        now = time.time()
        return {
            subkey: entry.value
            for subkey, entry in found.value.items()
            if isinstance(subkey, str) and isinstance(entry.value, bytes) and entry.expiration_time > now
        }

    async def close(self) -> None:
        """Leave the DHT; returns in time also when the libp2p daemon no longer answers."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._node.shutdown()
        except TimeoutError:
            _log.info("the DHT node did not shut down in time")
