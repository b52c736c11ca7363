"""The requests of the DHT as a node of ours answers and sends them: hivemind's, each bounded before it is served.

hivemind answers whatever a request asks for: one of 132 kB, which named one key 6,000 times, took 2.3 GB and stood the loop still for ten seconds.
It believes a node's word for its place in the DHT: one peer fills the routing table with nodes that do not exist, and for each of them everything stored is looked
through, for what it should have. Here a node's place is the hash of its key, so one peer is one node, where chance puts it.

Nobody's answers are believed either: `dht_answers.py` looks at them before they are read, records that are wrong are left out of them, and of the neighbours
that they name those are taken that can be.
Imports hivemind (and so torch): import it only where a DHT node is made.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import dht_pb2

from farflung.node.dht_answers import CheckedAnswers
from farflung.node.dht_guard import (
    ID_BYTES,
    MAX_SUBKEYS,
    CheckedDictionaries,
    CheckedRecords,
    GuardedDictionary,
    register,
)
from farflung.node.dht_rates import Over, Rates
from farflung.node.dht_storage import GuardedStorage
from farflung.node.identity import from_libp2p_bytes
from farflung.node.network import PeerId
from farflung.node.pacing import TokenBucket
from farflung.protocol.errors import LimitExceeded, Malformed, Refused, RemoteError

MAX_KEYS = 16
"""In one request. We ask for one at a time; hivemind, for as many as its `chunk_size` says: 16."""
MAX_ANSWER_BYTES = 128 << 10
"""Of records in one answer. Of a dictionary that is longer some are drawn: of a thousand peers' records a fifth or so, by each replica others, and others
at the next look. A swarm of a thousand asks for 33 answers a second: of 512 kB each they were more than all may have served."""
DRAWN_S = 1.0
"""So long all who ask for what is under a key of our own swarm get the same part of it."""
MAX_REPLACEMENTS = 20
"""Nodes that wait for a place in a full bucket of the routing table, as many as have one."""
HAND_OVER_KEYS = 256
"""Of what is kept looked through for a node that we have just met, those of our own swarm first. Whoever puts a record puts it again: a peer its own
within two minutes, its swarm's manifest and claim every quarter of an hour."""
HAND_OVER_BYTES = 256 << 10
HAND_OVERS_PER_S = 0.2
HAND_OVERS_AT_ONCE = 8
"""So many nodes may come at once. Who comes later gets what is put again from then on; till then other replicas have it."""

REQUEST_S = 0.0003
"""What one request costs, as seconds of the loop; it is read, and its sender gets into the routing table."""
KEY_S = 0.0002
"""What each key in it costs: neighbours are searched."""
ENTRY_S = 5e-6
"""What it costs to read each record that is put, which is known when it is done: 13 bytes are one."""
RECORD_S = 0.0003
"""What each record costs that is put: a signature is checked."""
BYTE_S = 2e-8
"""What each byte costs of what is read, or drawn and packed for an answer."""
SENT_BYTE_S = 2e-9
"""What each byte costs of an answer that is packed already."""
TELL_OF_ALL_S = 600.0
"""Between two times that one is told of requests refused because all together asked for too much."""
BREATHE = 16
"""Records checked before others have a turn in the loop."""

Start = Callable[[Coroutine[Any, Any, Any], str], object]
"""Of a task in the background, and its name."""


def node_id_of(peer: PeerID) -> DHTID:
    """The place of a peer in the DHT."""
    return DHTID.generate(source=peer.to_bytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """Some of what is under a key, packed."""

    packed: bytes
    expires_at: float
    until: float
    """When others are drawn, by our clock."""


class GuardedProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's protocol of one node; made by `install`."""

    def __init__(self, plain: DHTProtocol, records: CheckedRecords, start: Start) -> None:
        """`plain` serves nobody (it is in client mode), and is not used any more."""
        super().__init__(_initialized_with_create=True)
        self.__dict__.update(vars(plain))
        self.client_mode = False
        self.node_info = dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())
        self.serializer = CheckedDictionaries(records)
        self.storage = GuardedStorage()
        self._records = records
        self._start = start
        self._rates = Rates(monotonic())
        self._told_time: dict[PeerID, Callable[[float], None]] = {}
        """Of those whose time we ask for. Whoever pings us can have us ping it back, and is not believed for that."""
        self._tell_of_all_at = -math.inf
        self._drawn: dict[DHTID, _Drawn | None] = {}
        """For each key of our own swarm what those get who ask for it alone, where it is not all."""
        self._hand_overs = TokenBucket(HAND_OVERS_PER_S, HAND_OVERS_AT_ONCE, monotonic())

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # It is made of the class's name: others ask for it by hivemind's.
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    def keep(self, keys: Collection[bytes]) -> None:
        """Keep what is under these keys of our own swarm, whatever comes under others. What is there already is checked again."""
        own = [DHTID.from_bytes(key) for key in keys]
        self.storage.keep(own)
        self._drawn = dict.fromkeys(own)
        for key in own:
            found = self.storage.get(key)
            for subkey, (value, expires_at) in [] if found is None else list(found.value.items()):
                if not self._validate_record(key.to_bytes(), self.serializer.dumps(subkey), value, expires_at):
                    self.storage.drop(key, subkey)

    # --- what others ask ------------------------------------------------------------------------------------------

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """As hivemind's. Raises RemoteError, which the other side is told."""
        sender = self._sender(context)
        self._charge(sender, REQUEST_S)
        if len(request.peer.node_id) not in (0, ID_BYTES):
            raise self._told(Malformed(f"a node whose id has {len(request.peer.node_id)} bytes", peer=sender))
        return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """As hivemind's, within the limits. Raises RemoteError, which the other side is told."""
        sender = self._sender(context)
        keys = self._keys(request.keys, sender)
        if len(set(keys)) < len(keys):
            raise self._told(Malformed("a request for the same record twice", peer=sender))
        now = monotonic()
        drawn = self._drawn.get(keys[0]) if len(keys) == 1 else None
        if drawn is None or now >= drawn.until:
            drawn = None
            answer_s = min(MAX_ANSWER_BYTES, sum(self.storage.size(key) for key in keys)) * BYTE_S
        else:
            answer_s = len(drawn.packed) * SENT_BYTE_S
        self._charge(sender, REQUEST_S + len(keys) * KEY_S + answer_s)
        await self._meet(request.peer, context.remote_id)
        response = dht_pb2.FindResponse(results=[], peer=self.node_info)
        asking = DHTID.from_bytes(request.peer.node_id[:ID_BYTES])
        room = MAX_ANSWER_BYTES
        for key in keys:
            answer = drawn or self._draw(key, room)
            if answer is None:
                result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            else:
                room = max(0, room - len(answer.packed))
                result = dht_pb2.FindResult(
                    type=dht_pb2.FOUND_DICTIONARY, value=answer.packed, expiration_time=answer.expires_at
                )
            for node_id, peer in self.routing_table.get_nearest_neighbors(key, k=self.bucket_size, exclude=asking):
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(peer.to_bytes())
            response.results.append(result)
            if key in self._drawn and len(keys) == 1 and self.storage.size(key) > MAX_ANSWER_BYTES:
                self._drawn[key] = answer
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """As hivemind's, within the limits, and nothing is cached. Raises RemoteError, or ValueError for a dictionary that cannot be read; the
        other side is told."""
        sender = self._sender(context)
        keys = self._keys(request.keys, sender)
        num = {len(part) for part in (keys, request.subkeys, request.values, request.expiration_time, request.in_cache)}
        if len(num) != 1:
            raise self._told(Malformed("records to be stored that are not all whole", peer=sender))
        self._charge(sender, REQUEST_S + request.ByteSize() * BYTE_S)
        puts: list[list[tuple[bytes, bytes, float]]] = []
        num_records = 0
        for one in zip(request.subkeys, request.values, request.expiration_time, strict=True):
            puts.append(self._read(*one))
            num_records += len(puts[-1])
            self._rates.spend(sender, len(puts[-1]) * ENTRY_S, monotonic())
            if num_records > MAX_SUBKEYS:
                raise self._told(LimitExceeded(f"more than {MAX_SUBKEYS} records to be stored at once", peer=sender))
        self._charge(sender, num_records * RECORD_S)
        await self._meet(request.peer, context.remote_id)
        response = dht_pb2.StoreResponse(store_ok=[], peer=self.node_info)
        num_checked = 0
        for key, put, in_cache in zip(keys, puts, request.in_cache, strict=True):
            taken = bool(put) and not in_cache
            for tag, value, expires_at in put if taken else ():
                num_checked += 1
                if num_checked % BREATHE == 0:
                    await asyncio.sleep(0)
                taken = self._store(key, tag, value, expires_at, sender) and taken
            response.store_ok.append(taken)
        return response

    def _draw(self, key: DHTID, room: int) -> _Drawn | None:
        found = self.storage.some(key, room)
        if found is None:
            return None
        packed = self.serializer.dumps(found.value)
        return _Drawn(packed=packed, expires_at=found.expiration_time, until=monotonic() + DRAWN_S)

    def _read(self, tag: bytes, value: bytes, expires_at: float) -> list[tuple[bytes, bytes, float]]:
        """The records that one is asked to store under a key: one, or a dictionary of them. Raises ValueError."""
        if tag != self.IS_DICTIONARY:
            return [(tag, value, expires_at)]
        dictionary = self.serializer.loads(value)
        if not isinstance(dictionary, GuardedDictionary):
            raise ValueError("no dictionary of records")
        return [(self.serializer.dumps(subkey), *entry) for subkey, entry in dictionary.items()]

    def _store(self, key: DHTID, tag: bytes, value: bytes, expires_at: float, sender: PeerId) -> bool:
        if not self._validate_record(key.to_bytes(), tag, value, expires_at):
            return False
        return bool(self.storage.store_subkey(key, self.serializer.loads(tag), value, expires_at, sender))

    def _sender(self, context: P2PContext) -> PeerId:
        try:
            return from_libp2p_bytes(context.remote_id.to_bytes())
        except ValueError:
            raise self._told(Refused("a request of a key of another kind than ours")) from None

    def _keys(self, keys: Collection[bytes], sender: PeerId) -> list[DHTID]:
        if len(keys) > MAX_KEYS:
            raise self._told(LimitExceeded(f"a request for {len(keys)} records, limit {MAX_KEYS}", peer=sender))
        if any(len(key) != ID_BYTES for key in keys):
            raise self._told(Malformed(f"a request for a record whose id has not {ID_BYTES} bytes", peer=sender))
        return [DHTID.from_bytes(key) for key in keys]

    def _charge(self, sender: PeerId, seconds: float) -> None:
        """Raises LimitExceeded, with the peer when it is its own doing; that all together asked for too much is told of now and then."""
        now = monotonic()
        over = self._rates.take(sender, seconds, now)
        if over is Over.ITS_OWN:
            raise self._told(LimitExceeded("more requests of records than one peer may have served", peer=sender))
        if over is Over.ALL:
            error = LimitExceeded("more requests of records than all peers together may have served")
            if now >= self._tell_of_all_at:
                self._tell_of_all_at = now + TELL_OF_ALL_S
                self._records.tell(f"{error.reason} at {now}".encode(), error)
            raise error

    def _told(self, error: RemoteError) -> RemoteError:
        """To be raised; each reason is told of once for each peer."""
        self._records.tell((error.peer or b"") + error.reason.encode(), error)
        return error

    # --- what others answer ---------------------------------------------------------------------------------------

    def get_stub(self, peer: PeerID) -> CheckedAnswers:
        # Packing adds 15 bytes to a record, which has more than four times as many with its signature.
        return CheckedAnswers(
            super().get_stub(peer),
            self.bucket_size,
            MAX_ANSWER_BYTES * 5 // 4,
            self._told_time.get(peer, lambda ahead_s: None),
        )

    async def call_ping_for_time(self, peer: PeerID) -> tuple[DHTID | None, float | None]:
        """As `call_ping`, and the seconds that our clock is ahead of the peer's, when it has told its own."""
        told: list[float] = []
        self._told_time[peer] = told.append
        try:
            node_id = await self.call_ping(peer)
        finally:
            self._told_time.pop(peer, None)  # whoever asks it at the same time has taken it out already
        return node_id, told[-1] if told else None

    async def call_find(
        self, peer: PeerID, keys: Collection[DHTID]
    ) -> dict[DHTID, tuple[Any, dict[DHTID, PeerID]]] | None:
        """As hivemind's; of the neighbours that are answered, the nodes that can be, but for ourselves: who names us to us makes hivemind fail when
        it puts a record."""
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (value, self._possible(nearest)) for key, (value, nearest) in found.items()}

    def _possible(self, nearest: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        return {
            node_id: peer
            for node_id, peer in nearest.items()
            if node_id == node_id_of(peer) and node_id != self.node_id
        }

    def _validate_dictionary(self, key_bytes: bytes, dictionary: GuardedDictionary) -> bool:
        """Leaves the bad records out. Whether any is left: an honest node may keep some that only we know to be bad."""
        for subkey, (value, expires_at) in list(dictionary.items()):
            if not self._validate_record(key_bytes, self.serializer.dumps(subkey), value, expires_at):
                del dictionary[subkey]
        return len(dictionary) > 0

    # --- who is there ---------------------------------------------------------------------------------------------

    async def _meet(self, who: dht_pb2.NodeInfo, peer: PeerID) -> None:
        """Who asks, when it serves others itself."""
        if len(who.node_id) == ID_BYTES:
            await self.update_routing_table(DHTID.from_bytes(who.node_id), peer)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """As hivemind's, for nodes that are where their key puts them."""
        if not responded:
            await super().update_routing_table(node_id, peer_id, responded=False)
            return
        if node_id != node_id_of(peer_id):
            return
        table = self.routing_table
        if node_id not in table and self._hand_overs.takes(1, monotonic()):
            self._hand_over(node_id, peer_id)
        unheard = table.add_or_update_node(node_id, peer_id)
        bucket = table.buckets[table.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > MAX_REPLACEMENTS:
            del table[next(iter(bucket.replacement_nodes))]
        bucket.nodes_requested_for_ping.intersection_update(bucket.nodes_to_peer_id)
        if unheard is not None:
            self._start(self.call_ping(unheard[1]), "ping of a DHT node")

    def _hand_over(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Some of what a node should have that we have just met, in one message."""
        keys, values, expirations, room = [], [], [], HAND_OVER_BYTES
        for key in map(DHTID, self.storage.keys()[:HAND_OVER_KEYS]):
            nearest = self.routing_table.get_nearest_neighbors(key, self.num_replicas, exclude=self.node_id)
            distances = [other.xor_distance(key) for other, _ in nearest]
            ours = not distances or self.node_id.xor_distance(key) < distances[0]
            if not ours or (distances and node_id.xor_distance(key) >= distances[-1]):
                continue
            found = self.storage.some(key, room)
            if found is None:
                break
            room -= self.storage.size(key)
            keys.append(key)
            values.append(found.value)
            expirations.append(found.expiration_time)
            if len(keys) == MAX_KEYS or room <= 0:
                break
        if keys:
            self._start(self.call_store(peer_id, keys, values, expirations, in_cache=False), "records to a DHT node")


async def install(node: DHTNode, records: CheckedRecords, start: Start) -> None:
    """Have a DHT node, made in client mode, serve others within the limits. To be called before it has met any peer."""
    register()
    node.protocol = GuardedProtocol(node.protocol, records, start)
    await node.protocol.add_p2p_handlers(node.p2p)
