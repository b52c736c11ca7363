"""What a DHT node of ours answers to others' requests, and whom it takes for a node."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.node.dht_lab import PEER, Lab, dictionary, id_of, key, put, run

from farflung.protocol.errors import LimitExceeded, Malformed, Refused


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def test_a_request_for_one_record_many_times_is_refused_before_anything_is_done(lab: Lab) -> None:
    """6,000 times took 2.3 GB, and ten seconds in which the loop stood still."""

    async def body() -> None:
        assert await lab.store(put(id_of(1), PEER)) == [True]
        looked = lab.looks()
        for ids, error in (
            ([id_of(1)] * 6000, LimitExceeded),
            (list(map(id_of, range(lab.module.MAX_KEYS + 1))), LimitExceeded),
            ([id_of(1), id_of(2), id_of(1)], Malformed),
            ([bytes(100) + id_of(1)], Malformed),
        ):
            with pytest.raises(error) as caught:
                await lab.find(*ids)
            assert caught.value.peer == PEER and lab.told[-1] is caught.value
        assert not looked
        answer = await lab.find(*map(id_of, range(lab.module.MAX_KEYS)))
        assert [bool(result.value) for result in answer.results] == [False, True] + [False] * 14 and len(looked) == 16

    run(body)


def test_an_answer_has_an_end_however_much_is_kept(lab: Lab) -> None:
    async def body() -> None:
        lab.protocol.keep([id_of(n) for n in range(3)])
        authors = [key(100 + n) for n in range(120)]
        for at in map(id_of, range(3)):
            for author in authors:
                assert await lab.store(put(at, author, 6000), by=author) == [True]
        one = await lab.find(id_of(0))
        # 0.7 MB lies there: a part of it comes, and another one a second later.
        assert 0.9 * lab.module.MAX_ANSWER_BYTES < one.ByteSize() < lab.module.MAX_ANSWER_BYTES + 4096
        lab.now += lab.module.DRAWN_S
        again = await lab.find(id_of(0))
        assert one.results[0].value != again.results[0].value
        three = await lab.find(*map(id_of, range(3)))
        assert len(three.results) == 3 and three.ByteSize() < lab.module.MAX_ANSWER_BYTES + 4096

    run(body)


def test_a_thousand_peers_that_look_for_each_other_are_served(lab: Lab) -> None:
    """One look in three was refused, and at a start of all of them three in four."""

    async def body() -> None:
        lab.protocol.keep([id_of(1)])
        peers = [key(1000 + number) for number in range(1000)]
        for peer in peers[:300]:
            assert await lab.store(put(id_of(1), peer, 600), by=peer) == [True]
            lab.now += 1.0
        drawn = lab.looks()
        for peer in 2 * peers:  # within five seconds
            answer = await lab.find(id_of(1), by=peer)
            assert answer.results[0].value
            lab.now += 0.0025
        assert not lab.told and 5 <= len(drawn) <= 6

    run(body)


def test_what_was_just_put_is_found_where_it_is_no_part_that_is_answered(lab: Lab) -> None:
    async def body() -> None:
        lab.protocol.keep([id_of(1)])
        for number in range(5, 10):
            assert await lab.store(put(id_of(1), key(number))) == [True]
            dictionary = lab.protocol.serializer.loads((await lab.find(id_of(1))).results[0].value)
            assert key(number).hex() in dictionary

    run(body)


def test_one_peer_may_have_only_so_much_served_and_all_together_as_well(lab: Lab) -> None:
    from hivemind.proto import dht_pb2

    from farflung.node import dht_rates

    async def served(by: bytes, most: int) -> int:
        for count in range(most):
            try:
                await lab.find(id_of(1), by=by)
            except LimitExceeded:
                return count
        return most

    async def body() -> None:
        takes = lab.module.REQUEST_S + lab.module.KEY_S
        assert await served(PEER, 10_000) == pytest.approx(dht_rates.BURST_OF_ONE_S / takes, abs=1)
        with pytest.raises(LimitExceeded):
            for _ in range(2):  # it is cheaper
                await lab.protocol.rpc_ping(dht_pb2.PingRequest(), lab.by(PEER))
        with pytest.raises(LimitExceeded):
            await lab.store(put(id_of(1), PEER))
        assert await served(key(3), 10) == 10  # others are not the worse for it
        lab.now += 10.0
        assert await served(PEER, 10_000) == pytest.approx(10.0 * dht_rates.SHARE_OF_ONE / takes, abs=1)
        # Who comes under many keys gets no more than there is for all.
        lab.now += 1000.0
        total = 0
        for number in range(100, 200):
            total += await served(key(number), 50)
        assert total == pytest.approx(dht_rates.BURST_OF_ALL_S / takes, abs=1)
        # Who asks for more than its own is named; of what all have asked for nobody is, and it is told of now and then.
        assert [type(error) for error in lab.told] == [LimitExceeded] * 2
        assert [error.peer for error in lab.told] == [PEER, None]
        lab.now += lab.module.TELL_OF_ALL_S
        for number in range(200, 300):
            await served(key(number), 50)
        assert [error.peer for error in lab.told] == [PEER, None, None]

    run(body)


def test_what_it_takes_to_read_many_small_records_counts_though_they_are_refused(lab: Lab) -> None:
    """16,384 of them came in 262 kB, took ten times as long as they counted, and were read again as often as they came."""
    from farflung.node import dht_rates
    from farflung.node.dht_guard import MAX_SUBKEYS

    async def body() -> None:
        read: list[int] = []
        loads = lab.protocol.serializer.loads

        def noted(raw: bytes) -> Any:
            value = loads(raw)
            read.append(len(value))
            return value

        lab.protocol.serializer.loads = noted
        many = dictionary(1, *map(key, range(MAX_SUBKEYS)))
        request = [(id_of(number), lab.protocol.IS_DICTIONARY, many) for number in range(lab.module.MAX_KEYS)]
        refused: list[str] = []
        while len(refused) < 1000 and not any("than one peer" in reason for reason in refused):
            with pytest.raises(LimitExceeded) as caught:
                await lab.store(*request)
            refused.append(caught.value.reason)
        assert refused[0] == f"more than {MAX_SUBKEYS} records to be stored at once"
        assert sum(read) <= dht_rates.BURST_OF_ONE_S / lab.module.ENTRY_S + 2 * MAX_SUBKEYS

    run(body)


def test_what_is_to_be_stored_is_whole_and_not_too_much_and_not_cached(lab: Lab) -> None:
    from hivemind.proto import dht_pb2

    from farflung.node.dht_guard import MAX_SUBKEYS

    async def body() -> None:
        assert await lab.store(put(id_of(1), PEER), cached=True) == [False]
        whole = lab.protocol.IS_DICTIONARY
        assert await lab.store((id_of(1), whole, dictionary(10, key(5), key(6)))) == [True]
        assert await lab.store(put(id_of(1), PEER), put(id_of(1), PEER)) == [True, False]
        assert await lab.store((id_of(1), lab.protocol.IS_REGULAR_VALUE, b"\xc4\x01v")) == [False]
        for raw, error in ((b"\xc1", "damaged"), (b"\xc4\x01v", "no dictionary")):
            with pytest.raises(ValueError, match=error):
                await lab.store((id_of(1), whole, raw))
        with pytest.raises(Malformed):
            short = dht_pb2.StoreRequest(keys=[id_of(1)], values=[b"v"], expiration_time=[1.0], in_cache=[False])
            await lab.protocol.rpc_store(short, lab.by(PEER))
        with pytest.raises(LimitExceeded):
            await lab.store(*[put(id_of(1), key(n)) for n in range(lab.module.MAX_KEYS + 1)])
        half = dictionary(10, *map(key, range(MAX_SUBKEYS // 2 + 1)))
        with pytest.raises(LimitExceeded):
            await lab.store((id_of(1), whole, half), (id_of(2), whole, half))
        found = lab.protocol.storage.get(int.from_bytes(id_of(1), "big"))
        assert {subkey for subkey, _ in found.value.items()} == {each.hex() for each in (PEER, key(5), key(6))}
        assert lab.protocol.storage.num_entries == 3

    run(body)


def test_who_asks_with_a_key_of_another_kind_is_refused(lab: Lab) -> None:
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import dht_pb2

    async def body() -> None:
        with pytest.raises(Refused):
            await lab.protocol.rpc_ping(
                dht_pb2.PingRequest(), SimpleNamespace(remote_id=PeerID(b"\x12\x20" + bytes(32)))
            )

    run(body)


def test_who_pings_says_an_id_that_can_be_or_none(lab: Lab) -> None:
    from hivemind.proto import dht_pb2

    async def body() -> None:
        for size in (0, 20):
            await lab.protocol.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=bytes(size))), lab.by(PEER))
        with pytest.raises(Malformed):
            await lab.protocol.rpc_ping(dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=b"\xff" * 21)), lab.by(PEER))

    run(body)


def test_one_peer_is_one_node_where_its_key_puts_it(lab: Lab) -> None:
    """One that made up 2,000 ids had 2,000 places in the table, and could have taken others' ids."""
    from hivemind.dht.routing import DHTID
    from hivemind.proto import dht_pb2

    async def body() -> None:
        await lab.meet(PEER)
        table = lab.protocol.routing_table
        other = lab.module.node_id_of(lab.peer(key(9)))
        for made_up in [other, *(DHTID.generate() for _ in range(100))]:
            await lab.protocol.update_routing_table(made_up, lab.peer(PEER))
            request = dht_pb2.FindRequest(keys=[id_of(1)], peer=dht_pb2.NodeInfo(node_id=made_up.to_bytes()))
            await lab.protocol.rpc_find(request, lab.by(PEER))
        assert table.uid_to_peer_id == {lab.module.node_id_of(lab.peer(PEER)): lab.peer(PEER)}
        await lab.protocol.update_routing_table(None, lab.peer(PEER), responded=False)
        assert not table.uid_to_peer_id and not table.peer_id_to_uid

    run(body)


def test_the_routing_table_has_an_end_however_many_peers_come(lab: Lab) -> None:
    async def body() -> None:
        for number in range(1000, 4000):
            await lab.meet(key(number))
        table = lab.protocol.routing_table
        assert max(len(bucket.replacement_nodes) for bucket in table.buckets) == lab.module.MAX_REPLACEMENTS
        assert max(len(bucket.nodes_to_peer_id) for bucket in table.buckets) == lab.protocol.bucket_size
        kept = sum(len(bucket.nodes_to_peer_id) + len(bucket.replacement_nodes) for bucket in table.buckets)
        assert kept == len(table.uid_to_peer_id) == len(table.peer_id_to_uid) < 1500
        # Each node of a full bucket is asked once whether it is there.
        assert lab.started.count("ping of a DHT node") <= len(table.buckets) * lab.protocol.bucket_size

    run(body)


def test_few_of_those_who_come_at_once_are_handed_something_and_that_has_an_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each node that it did not know, hivemind looked through all that it kept."""

    sent: list[tuple[int, int]] = []

    async def call_store(peer: Any, keys: Any, values: Any, expirations: Any, in_cache: bool) -> None:
        """Never awaited here."""

    def noted(peer: Any, keys: Any, values: Any, expirations: Any, in_cache: bool) -> Any:
        sent.append((len(keys), sum(len(entry.value) for value in values for _, entry in value.items())))
        return call_store(peer, keys, values, expirations, in_cache)

    async def body() -> None:
        lab.protocol.keep([id_of(1)])
        for number in range(500):
            by = key(100 + number)
            assert await lab.store(put(id_of(1), by, 1000), put(id_of(1000 + number), by), by=by) == [True, True]
            lab.now += 1.0
        looks = 0
        nearest = lab.protocol.routing_table.get_nearest_neighbors

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal looks
            looks += 1
            return nearest(*args, **kwargs)

        monkeypatch.setattr(lab.protocol, "call_store", noted)
        monkeypatch.setattr(lab.protocol.routing_table, "get_nearest_neighbors", counted)
        for number in range(1000):
            await lab.meet(key(5000 + number))
        assert looks <= lab.module.HAND_OVERS_AT_ONCE * lab.module.HAND_OVER_KEYS
        assert 0 < len(sent) <= lab.module.HAND_OVERS_AT_ONCE
        # The first is all alone with us, and should have everything.
        assert sent[0][1] <= lab.module.HAND_OVER_BYTES and sent[0][1] > 0.9 * lab.module.HAND_OVER_BYTES
        assert all(num_keys <= lab.module.MAX_KEYS for num_keys, _ in sent)
        lab.now += 1.0 / lab.module.HAND_OVERS_PER_S
        looks = 0
        await lab.meet(key(9000))
        assert looks > 0

    run(body)


def test_what_was_kept_before_we_knew_our_swarm_is_checked_again(lab: Lab) -> None:
    async def body() -> None:
        assert await lab.store(put(id_of(1), key(5)), put(id_of(1), key(6)), put(id_of(2), key(6))) == [True] * 3
        lab.bad = {key(6).hex()}
        lab.protocol.keep([id_of(1)])
        found = lab.protocol.storage.get(int.from_bytes(id_of(1), "big"))
        assert {subkey for subkey, _ in found.value.items()} == {key(5).hex()}
        assert lab.protocol.storage.num_entries == 2 and len(lab.told) == 1

    run(body)
