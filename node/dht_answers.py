"""What others answer to our requests of the DHT, looked at before hivemind reads it.

hivemind reads whatever comes: an id of 21 bytes in the answer to a ping raised in the task that had sent it, which ended the node; a peer id of
80 kB is written as base58 once it is read, which stood the loop still for seven seconds; and an answer to be kept for ever ends a search, whatever
others have.

Imports hivemind (and so torch): import it only where a DHT node is made.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from hivemind.proto import dht_pb2

from farflung.node.dht_guard import ID_BYTES
from farflung.protocol.errors import LimitExceeded, Malformed

MAX_PEER_ID_BYTES = 64
"""Of a neighbour's key as libp2p names it. Ours have 38, those of other kinds of keys fewer."""


class CheckedAnswers:
    """In the place of hivemind's stub for one peer. An answer that cannot be raises RemoteError, which hivemind's calls take for no answer."""

    def __init__(self, stub: Any, max_neighbours: int, max_bytes: int, told_time: Callable[[float], None]) -> None:
        """`max_neighbours`: named for a key. `max_bytes`: of records, in one answer. `told_time` is called with the seconds that our clock is ahead of the
        other's, when that has told its own. `budget` of the calls is hivemind's `timeout`."""
        self._stub = stub
        self._told_time = told_time
        self._max_neighbours = max_neighbours
        self._max_bytes = max_bytes

    async def rpc_ping(self, request: dht_pb2.PingRequest, **budget: float) -> dht_pb2.PingResponse:
        asked_at = time.time()
        response = await self._stub.rpc_ping(request, **budget)
        answered_at = time.time()
        _check_id(response.peer)
        if response.dht_time:  # who has not set it says 0
            self._told_time((asked_at + answered_at) / 2 - response.dht_time)
        return response

    async def rpc_store(self, request: dht_pb2.StoreRequest, **budget: float) -> dht_pb2.StoreResponse:
        response = await self._stub.rpc_store(request, **budget)
        _check_id(response.peer)
        if len(response.store_ok) != len(request.keys):
            raise Malformed(f"{len(response.store_ok)} answers for {len(request.keys)} records to be stored")
        return response

    async def rpc_find(self, request: dht_pb2.FindRequest, **budget: float) -> dht_pb2.FindResponse:
        response = await self._stub.rpc_find(request, **budget)
        _check_id(response.peer)
        if len(response.results) != len(request.keys):
            raise Malformed(f"{len(response.results)} answers for {len(request.keys)} records to be found")
        if sum(len(result.value) for result in response.results) > self._max_bytes:
            raise LimitExceeded(f"more than {self._max_bytes} bytes of records in an answer")
        for result in response.results:
            self._check_neighbours(result)
            if not math.isfinite(result.expiration_time):
                raise Malformed("records to be held for ever")
        return response

    def _check_neighbours(self, result: dht_pb2.FindResult) -> None:
        ids, peers = result.nearest_node_ids, result.nearest_peer_ids
        if max(len(ids), len(peers)) > self._max_neighbours:
            raise LimitExceeded(f"{max(len(ids), len(peers))} neighbours of a key, limit {self._max_neighbours}")
        if any(len(node_id) != ID_BYTES for node_id in ids):
            raise Malformed(f"a neighbour whose id has not {ID_BYTES} bytes")
        if any(len(peer) > MAX_PEER_ID_BYTES for peer in peers):
            raise LimitExceeded(f"a neighbour whose key has more than {MAX_PEER_ID_BYTES} bytes")


def _check_id(who: dht_pb2.NodeInfo) -> None:
    """Of the node that answers; one in client mode says none. Raises Malformed."""
    if len(who.node_id) not in (0, ID_BYTES):
        raise Malformed(f"a node whose id has {len(who.node_id)} bytes")
