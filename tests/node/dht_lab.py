"""A DHT node of ours by itself: others' requests and answers are given to it, and nothing leaves the process."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from farflung.node.identity import libp2p_bytes
from farflung.protocol.errors import Refused, RemoteError

NODE, PEER = bytes(31) + b"\1", bytes(31) + b"\2"


def key(number: int) -> bytes:
    """Of a peer."""
    return number.to_bytes(32, "big")


def id_of(number: int) -> bytes:
    """Of a record."""
    return number.to_bytes(20, "big")


class Lab:
    """One node, whose tasks in the background are not run but listed, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from hivemind.dht.protocol import DHTProtocol
        from hivemind.dht.routing import RoutingTable
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

        from farflung.node import dht_guard, dht_protocol

        dht_guard.register()
        self.now = 0.0
        monkeypatch.setattr(dht_protocol, "monotonic", lambda: self.now)
        self.started: list[str] = []
        self.told: list[RemoteError] = []
        self.bad: set[str] = set()
        """Subkeys of records that are refused."""
        self.module = dht_protocol
        plain = DHTProtocol(_initialized_with_create=True)
        plain.node_id = dht_protocol.node_id_of(PeerID(libp2p_bytes(NODE)))
        plain.bucket_size, plain.num_replicas, plain.wait_timeout = 20, 5, 3.0
        plain.routing_table = RoutingTable(plain.node_id, 20, 5)
        plain.rpc_semaphore = asyncio.Semaphore(10)
        plain.client_mode, plain.authorizer = True, None
        records = dht_guard.CheckedRecords(self._check, self.told.append)
        plain.record_validator = records
        self.protocol: Any = dht_protocol.GuardedProtocol(plain, records, self._start)
        self._patch = monkeypatch

    def _check(self, at: bytes, subkey: str, value: bytes, expires_at: float) -> None:
        if subkey in self.bad:
            raise Refused(f"bad {subkey}")

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        work.close()
        self.started.append(name)

    def peer(self, public_key: bytes) -> Any:
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID

        return PeerID(libp2p_bytes(public_key))

    def by(self, public_key: bytes) -> Any:
        return SimpleNamespace(remote_id=self.peer(public_key))

    def others_answer(self, **calls: Callable[[Any], Any]) -> None:
        """What whoever is asked answers to a request, by the name of the call."""
        from hivemind.dht.protocol import DHTProtocol

        async def answered(answer: Callable[[Any], Any], request: Any, timeout: float) -> Any:
            return answer(request)

        stub = SimpleNamespace(**{name: partial(answered, answer) for name, answer in calls.items()})
        self._patch.setattr(DHTProtocol, "get_stub", lambda protocol, peer: stub)

    def looks(self) -> list[int]:
        """Under which ids records are taken out of the storage from now on, one for each time."""
        looked: list[int] = []
        some = self.protocol.storage.some

        def noted(at: int, room: int) -> Any:
            looked.append(at)
            return some(at, room)

        self._patch.setattr(self.protocol.storage, "some", noted)
        return looked

    async def find(self, *ids: bytes, by: bytes = PEER) -> Any:
        from hivemind.proto import dht_pb2

        return await self.protocol.rpc_find(dht_pb2.FindRequest(keys=ids), self.by(by))

    async def store(
        self, *puts: tuple[bytes, bytes, bytes], by: bytes = PEER, cached: bool = False, life_s: float = 60.0
    ) -> list[bool]:
        """`puts`: id, subkey and value, as they travel."""
        from hivemind.proto import dht_pb2

        request = dht_pb2.StoreRequest(
            keys=[put[0] for put in puts],
            subkeys=[put[1] for put in puts],
            values=[put[2] for put in puts],
            expiration_time=[time.time() + life_s] * len(puts),
            in_cache=[cached] * len(puts),
        )
        return list((await self.protocol.rpc_store(request, self.by(by))).store_ok)

    async def meet(self, public_key: bytes) -> None:
        """A node that is where it should be."""
        peer = self.peer(public_key)
        await self.protocol.update_routing_table(self.module.node_id_of(peer), peer)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


def put(at: bytes, of: bytes, size: int = 400) -> tuple[bytes, bytes, bytes]:
    return at, msgspec.msgpack.encode(of.hex()), msgspec.msgpack.encode(bytes(size))


def dictionary(size: int, *of: bytes) -> bytes:
    """Of records, as it travels."""
    from hivemind.utils.serializer import MSGPackSerializer

    from farflung.node.dht_guard import GuardedDictionary

    made = GuardedDictionary()
    for each in of:
        made.store(each.hex(), msgspec.msgpack.encode(bytes(size)), time.time() + 60.0)
    return bytes(MSGPackSerializer.dumps(made))
