"""What a DHT node of ours believes of others' answers, and that none of them ends it."""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.node.dht_lab import NODE, PEER, Lab, dictionary, id_of, key, put, run

from farflung.node.dht import Records
from farflung.node.scope import TaskScope


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def found(**changed: Any) -> Any:
    """An answer about one record, as it may be but for what is `changed`."""
    from hivemind.proto import dht_pb2

    good = {"type": dht_pb2.FOUND_DICTIONARY, "value": dictionary(10, key(5), key(6), key(7))}
    return dht_pb2.FindResult(**good | {"expiration_time": time.time() + 60.0} | changed)


def test_of_an_answer_the_good_records_and_the_nodes_that_can_be_are_taken(lab: Lab) -> None:
    from hivemind.proto import dht_pb2

    at = lab.module.DHTID.from_bytes(id_of(1))
    real = [lab.peer(key(n)) for n in range(20)]
    nodes = [lab.module.node_id_of(peer) for peer in real]
    nodes[1] = nodes[2]  # a node that claims the place of another

    async def body() -> None:
        result = found(
            nearest_node_ids=[node.to_bytes() for node in nodes], nearest_peer_ids=[peer.to_bytes() for peer in real]
        )
        lab.others_answer(rpc_find=lambda request: dht_pb2.FindResponse(results=[result]))
        lab.bad = {key(6).hex()}
        value, nearest = (await lab.protocol.call_find(lab.peer(PEER), [at]))[at]
        assert {subkey for subkey, _ in value.value.items()} == {key(5).hex(), key(7).hex()}
        assert [error.reason for error in lab.told] == [f"bad {key(6).hex()}"]
        assert set(nearest.values()) == {peer for peer in real if peer not in (real[1], lab.peer(NODE))}
        assert all(node == lab.module.node_id_of(peer) for node, peer in nearest.items())
        lab.bad = {key(n).hex() for n in (5, 6, 7)}
        assert (await lab.protocol.call_find(lab.peer(PEER), [at]))[at][0] is None

    run(body)


def too_much(name: str) -> list[Any]:
    """Answers about a record that cannot be."""
    from farflung.node.dht_answers import MAX_PEER_ID_BYTES
    from farflung.node.dht_protocol import MAX_ANSWER_BYTES

    cases: dict[str, list[Any]] = {
        "none": [],
        "two for one": [found(), found()],
        "a long key": [found(nearest_node_ids=[bytes(20)], nearest_peer_ids=[bytes(MAX_PEER_ID_BYTES + 1)])],
        "a long id": [found(nearest_node_ids=[bytes(21)], nearest_peer_ids=[bytes(38)])],
        "many ids": [found(nearest_node_ids=[bytes(20)] * 21)],
        "many keys": [found(nearest_peer_ids=[bytes(38)] * 21)],
        "many bytes": [found(value=bytes(MAX_ANSWER_BYTES * 5 // 4 + 1))],
        "for ever": [found(expiration_time=math.inf)],  # ends a search, whatever others have
    }
    return cases[name]


@pytest.mark.parametrize(
    "name", ["none", "two for one", "a long key", "a long id", "many ids", "many keys", "many bytes", "for ever"]
)
def test_an_answer_that_cannot_be_is_none_and_is_not_read(lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """To read one peer id of 80 kB took seven seconds."""
    from hivemind.dht import protocol as hiveminds
    from hivemind.proto import dht_pb2

    at = lab.module.DHTID.from_bytes(id_of(1))
    answer = dht_pb2.FindResponse(results=too_much(name))
    read: list[bytes] = []
    lab.others_answer(rpc_find=lambda request: answer)
    monkeypatch.setattr(hiveminds, "PeerID", read.append)
    monkeypatch.setattr(lab.protocol.serializer, "loads", read.append)

    async def body() -> None:
        await lab.meet(key(7))
        assert await lab.protocol.call_find(lab.peer(key(7)), [at]) is None
        await asyncio.sleep(0)
        assert not read and not lab.protocol.routing_table.uid_to_peer_id

    run(body)


def test_a_record_is_put_though_a_node_names_us_to_us(lab: Lab) -> None:
    """hivemind asserts that nobody does: whoever did so ended the node that put its record."""
    from hivemind.dht.node import Blacklist, DHTNode
    from hivemind.proto import dht_pb2

    node = DHTNode(_initialized_with_create=True)
    node.protocol, node.node_id, node.peer_id = lab.protocol, lab.protocol.node_id, lab.peer(NODE)
    node.num_replicas, node.num_workers, node.cache_on_store = 5, 4, False
    node.blacklist = Blacklist(5.0, 2.0)
    us = found(nearest_node_ids=[node.node_id.to_bytes()], nearest_peer_ids=[node.peer_id.to_bytes()])
    lab.others_answer(
        rpc_find=lambda request: dht_pb2.FindResponse(results=[us]),
        rpc_store=lambda request: dht_pb2.StoreResponse(store_ok=[True]),
    )

    async def body() -> None:
        await lab.meet(PEER)
        assert await node.store("key", b"value", time.time() + 60.0, subkey="subkey")
        assert lab.protocol.storage.num_entries == 1

    run(body)


@pytest.mark.parametrize("size", [1, 19, 21, 4000])
def test_whatever_is_answered_the_tasks_of_the_node_go_on(lab: Lab, size: int) -> None:
    """An id of 21 bytes in an answer to a ping ended a node."""
    from hivemind.proto import dht_pb2

    who = dht_pb2.NodeInfo(node_id=b"\xff" * size)
    lab.others_answer(
        rpc_ping=lambda request: dht_pb2.PingResponse(peer=who),
        rpc_store=lambda request: dht_pb2.StoreResponse(peer=who, store_ok=[True] * len(request.keys)),
        rpc_find=lambda request: dht_pb2.FindResponse(peer=who, results=[found()]),
    )

    async def body() -> None:
        scope = TaskScope()
        await scope.open()
        started: list[asyncio.Task[None]] = []

        def start(work: Coroutine[Any, Any, None], name: str) -> None:
            lab.started.append(name)
            if (task := scope.start(work, name)) is not None:
                started.append(task)

        lab.protocol._start = start
        assert await lab.store(put(id_of(1), PEER)) == [True]
        number = 1000
        while lab.started.count("ping of a DHT node") < 3:
            await lab.meet(key(number))
            number += 1
        assert await lab.protocol.call_find(lab.peer(PEER), [lab.module.DHTID.from_bytes(id_of(1))]) is None
        await asyncio.wait(started)
        assert "records to a DHT node" in lab.started
        assert not scope.failed and all(task.result() is None for task in started)
        await scope.close()

    run(body)


def test_who_does_not_answer_a_ping_as_it_should_is_not_there(lab: Lab) -> None:
    from hivemind.proto import dht_pb2

    answer = dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\xff" * 21))
    lab.others_answer(rpc_ping=lambda request: answer)

    async def body() -> None:
        await lab.meet(PEER)
        assert await lab.protocol.call_ping(lab.peer(PEER)) is None
        await asyncio.sleep(0)
        assert not lab.protocol.routing_table.uid_to_peer_id
        answer.peer.node_id = lab.module.node_id_of(lab.peer(PEER)).to_bytes()
        assert await lab.protocol.call_ping(lab.peer(PEER)) == lab.module.node_id_of(lab.peer(PEER))

    run(body)


class Asking:
    """The node of a lab as far as asking seeds goes, which all have the time that they say."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.protocol, self.node_id = lab.protocol, lab.protocol.node_id
        self.records = Records(self, self.connect)  # type: ignore[arg-type]

    async def connect(self, peer: bytes) -> None:
        pass

    async def find_nearest_nodes(self, ids: list[Any]) -> None:
        pass

    def answers(self, peer: bytes, time_s: float) -> None:
        """Whoever is asked next is this one."""
        from hivemind.proto import dht_pb2

        who = dht_pb2.NodeInfo(node_id=self.lab.module.node_id_of(self.lab.peer(peer)).to_bytes())
        self.lab.others_answer(rpc_ping=lambda request: dht_pb2.PingResponse(peer=who, dht_time=time_s))


def test_what_time_others_have_is_known_from_what_seeds_answer(lab: Lab) -> None:
    """By it a node can tell that its own clock is wrong."""

    async def body() -> None:
        node = Asking(lab)
        for number, time_s in enumerate([0.0, math.nan, math.inf, *(time.time() - ahead for ahead in (200, 201, 202))]):
            node.answers(key(number), time_s)
            assert await node.records._ping(key(number))
        assert node.records.clock_trouble() == (
            "this machine's clock and those of 3 peers differ by 3 min: set the one that is wrong"
        ), "only found"
        for number in range(3, 6):
            node.records.add_seed(key(number))
            node.answers(key(number), time.time() - 200.0)
            assert await node.records._ping(key(number))
        assert node.records.clock_trouble() == "this machine's clock is 3 min ahead of those of 3 peers: set it"

    run(body)


def test_who_has_us_ping_it_does_not_tell_us_the_time(lab: Lab) -> None:
    """64 keys of a stranger's made an honest node say that its clock was wrong."""
    from hivemind.proto import dht_pb2

    async def body() -> None:
        node = Asking(lab)
        lab.now = time.monotonic()
        for number in range(64):
            node.answers(key(number), time.time() - 3600.0)
            peer = lab.peer(key(number))
            who = dht_pb2.NodeInfo(node_id=lab.module.node_id_of(peer).to_bytes())
            request = dht_pb2.PingRequest(peer=who, validate=True)
            assert (await lab.protocol.rpc_ping(request, lab.by(key(number)))).available
            await lab.protocol.call_ping(peer)
        assert node.records.clock_trouble() == ""

    run(body)
