"""What a node keeps of others' records: whose they are decides what gives way, and all of it has an end."""

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

OWN, NAME = 7, 8
SHORT_S, LONG_S = 600.0, 3600.0
"""Lives of honest peers' records, and of those of who wants theirs to go first."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


HONEST, STRANGER = key(1), key(2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    from hivemind.utils import timed_storage

    from farflung.node import dht_guard

    dht_guard.register()
    time = {"now": 1000.0}
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: time["now"])
    yield time


@pytest.fixture
def storage(clock: dict[str, float]) -> Any:
    from farflung.node.dht_storage import GuardedStorage

    made = GuardedStorage()
    made.keep([OWN])
    return made


def put(storage: Any, at: int, of: bytes, *, by: bytes, life_s: float = SHORT_S, size: int = 400) -> bool:
    """The record of a peer, under a key."""
    return bool(storage.store_subkey(at, of.hex(), bytes(size), 1000.0 + life_s, by))


def under(storage: Any, at: int) -> set[str]:
    found = storage.get(at)
    return set() if found is None else {subkey for subkey, _ in found.value.items()}


def test_records_of_one_stranger_push_out_nobodys(storage: Any) -> None:
    """4,096 of these, to be held for an hour, pushed out the peers of a swarm, and all that came later as well."""
    from farflung.node.dht_storage import MAX_ENTRIES_OF_ONE

    other = 1 << 100
    assert all(put(storage, at, key(9), by=key(9)) for at in (OWN, other))
    taken = sum(put(storage, at, STRANGER, by=STRANGER, life_s=LONG_S) for at in range(1000, 1000 + 4096))
    assert taken == MAX_ENTRIES_OF_ONE  # and of the rest it is told that they are not kept
    assert under(storage, OWN) == under(storage, other) == {key(9).hex()}
    assert put(storage, OWN, HONEST, by=HONEST) and put(storage, other, HONEST, by=HONEST)
    assert HONEST.hex() in under(storage, OWN) & under(storage, other)


def test_keys_made_up_by_one_do_not_fill_an_open_swarm(storage: Any) -> None:
    from farflung.node.dht_storage import MAX_ENTRIES_OF_ONE

    made_up = [put(storage, OWN, key(n), by=STRANGER, life_s=LONG_S) for n in range(1000, 1000 + 1024)]
    assert sum(made_up) == MAX_ENTRIES_OF_ONE
    assert all(put(storage, OWN, key(n), by=key(n)) for n in range(100, 600))


def test_where_several_fill_a_swarm_who_has_put_most_gives_way_and_nobody_else(storage: Any) -> None:
    from farflung.node.dht_guard import MAX_SUBKEYS
    from farflung.node.dht_storage import MAX_ENTRIES_OF_ONE

    honest = [key(n) for n in range(100, 150)]
    assert all(put(storage, OWN, of, by=of) for of in honest)
    strangers = [key(n) for n in range(10, 15)]
    for number in range(len(strangers) * MAX_ENTRIES_OF_ONE):
        put(storage, OWN, key(1000 + number), by=strangers[number % len(strangers)], life_s=LONG_S)
    assert storage.num_entries == MAX_SUBKEYS
    newcomers = [key(n) for n in range(200, 250)]
    assert all(put(storage, OWN, of, by=of) for of in newcomers)
    assert {of.hex() for of in honest + newcomers} <= under(storage, OWN) and storage.num_entries == MAX_SUBKEYS


def test_where_all_have_the_same_a_new_record_is_refused_and_one_that_is_there_still_replaced(storage: Any) -> None:
    from farflung.node.dht_guard import MAX_SUBKEYS

    peers = [key(n) for n in range(100, 100 + MAX_SUBKEYS)]
    assert all(put(storage, OWN, of, by=of) for of in peers)
    before = under(storage, OWN)
    assert not put(storage, OWN, HONEST, by=HONEST, life_s=LONG_S)
    assert not put(storage, OWN, HONEST, by=HONEST, life_s=LONG_S, size=1)  # shorter than theirs
    assert put(storage, OWN, peers[0], by=peers[0], life_s=LONG_S)
    assert under(storage, OWN) == before
    assert not put(storage, OWN, peers[1], by=peers[1], life_s=LONG_S, size=5 << 20)  # there is no room for it
    assert storage.get(OWN).value.get(peers[1].hex()).value == bytes(400)
    # What this node puts itself has a place if anybody's has.
    assert storage.store(OWN, bytes(400), 1000.0 + SHORT_S, subkey=HONEST.hex())
    assert HONEST.hex() in under(storage, OWN) and storage.num_entries == MAX_SUBKEYS


def test_who_puts_anothers_record_again_cannot_have_it_pushed_out_with_its_own(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farflung.node import dht_storage
    from farflung.node.dht_guard import MAX_SUBKEYS

    monkeypatch.setattr(dht_storage, "MAX_ENTRIES_OF_ONE", MAX_SUBKEYS)
    late = key(3)
    assert put(storage, OWN, HONEST, by=HONEST) and put(storage, OWN, HONEST, by=STRANGER, life_s=SHORT_S + 1)
    # Nor is it of use to be first with it: the signer's own word counts.
    assert put(storage, OWN, late, by=STRANGER) and put(storage, OWN, late, by=late, life_s=SHORT_S + 1)
    for number in range(1000, 1000 + MAX_SUBKEYS - 2):
        assert put(storage, OWN, key(number), by=STRANGER)
    for number in range(100, 200):
        assert put(storage, OWN, key(number), by=key(number))
    assert {HONEST.hex(), late.hex()} <= under(storage, OWN)


def test_bytes_have_an_end_and_other_keys_fewer_entries(
    monkeypatch: pytest.MonkeyPatch, clock: dict[str, float]
) -> None:
    from farflung.node import dht_storage

    monkeypatch.setattr(dht_storage, "MAX_OTHER_BYTES", 1 << 20)
    monkeypatch.setattr(dht_storage, "MAX_OWN_BYTES", 1 << 20)
    storage = dht_storage.GuardedStorage()
    storage.keep([OWN])
    assert put(storage, OWN, HONEST, by=HONEST) and put(storage, 9, HONEST, by=HONEST)
    for number in range(1000, 2000):
        put(storage, OWN, key(number), by=key(number), size=16 << 10, life_s=LONG_S)
        put(storage, number, key(number), by=key(number), size=16 << 10, life_s=LONG_S)
    assert 1.9 * (1 << 20) < storage.num_bytes <= 2 << 20
    # Who has put a short one is not in the way of the next, and the next is not in the way of it.
    assert put(storage, OWN, key(5), by=key(5)) and put(storage, 9, key(5), by=key(5))
    assert under(storage, OWN) & under(storage, 9) == {HONEST.hex(), key(5).hex()}
    assert storage.num_bytes <= 2 << 20
    for number in range(2000, 2000 + 2 * dht_storage.MAX_OTHER_SUBKEYS):
        put(storage, 10, key(number), by=key(number), size=10)
    assert len(under(storage, 10)) == dht_storage.MAX_OTHER_SUBKEYS


def test_an_entry_takes_no_more_than_it_counts_as(clock: dict[str, float]) -> None:
    from farflung.node.dht_storage import GuardedStorage

    tracemalloc.start()
    try:
        storage = GuardedStorage()
        for number in range(1000, 2000):
            put(storage, number, key(number), by=key(number))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert storage.num_entries == 1000 and taken < storage.num_bytes


def test_a_search_writes_into_a_copy(storage: Any) -> None:
    """hivemind merges all answers to a search into what it first found, which is what lies here."""
    put(storage, OWN, HONEST, by=HONEST)
    storage.get(OWN).value.store("found elsewhere", b"x", 1001.0)
    assert under(storage, OWN) == {HONEST.hex()}


def test_what_expires_leaves_its_room_and_old_times_are_not_hoarded(storage: Any, clock: dict[str, float]) -> None:
    from farflung.node.dht_storage import MAX_ENTRIES_OF_ONE

    for number in range(1000, 1000 + MAX_ENTRIES_OF_ONE):
        assert put(storage, number, STRANGER, by=STRANGER)
    assert not put(storage, 9, STRANGER, by=STRANGER)
    for step in range(1000):
        assert put(storage, OWN, HONEST, by=HONEST, life_s=SHORT_S + step)
    assert len(storage._expiring) <= 2 * storage.num_entries + 64
    clock["now"] = 1000.0 + SHORT_S + 1
    assert storage.store_subkey(9, STRANGER.hex(), b"x", 2000.0, STRANGER)
    assert storage.num_entries == 2 and storage.keys() == [OWN, 9]
    clock["now"] = 1e4
    assert storage.get(OWN) is None and (storage.num_entries, storage.num_bytes, storage.keys()) == (0, 0, [])
    assert not storage._under and not storage._others._sizes


def test_keys_become_our_own_with_what_lies_under_them(clock: dict[str, float]) -> None:
    from farflung.node.dht_storage import MAX_OWN_KEYS, GuardedStorage

    storage = GuardedStorage()
    assert all(put(storage, at, HONEST, by=HONEST) for at in (OWN, NAME, 9))
    storage.keep([OWN, NAME])
    assert (storage._others.num_entries, storage.num_entries) == (1, 3)
    assert set(storage.keys()[:2]) == {OWN, NAME} and under(storage, OWN) == {HONEST.hex()}
    with pytest.raises(ValueError, match="own"):
        storage.keep(range(MAX_OWN_KEYS + 1))


def test_some_of_a_long_dictionary(storage: Any) -> None:
    for number in range(100):
        put(storage, OWN, key(number), by=key(number), size=1000)
    assert storage.size(OWN) == 100 * (1000 + 64)
    random.seed(0)
    drawn = [{subkey for subkey, _ in storage.some(OWN, 20_000).value.items()} for _ in range(50)]
    assert {len(each) for each in drawn} == {18} and len(set.union(*drawn)) == 100
    assert storage.some(OWN, 1000) is None and len(storage.some(OWN, 200_000).value) == 100


def test_counts_fit_what_is_kept_whatever_happens(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    from farflung.node import dht_storage

    for name, value in (("MAX_OTHER_BYTES", 60_000), ("MAX_OWN_BYTES", 30_000), ("MAX_OTHER_SUBKEYS", 4)):
        monkeypatch.setattr(dht_storage, name, value)
    rng = random.Random(1)
    storage = dht_storage.GuardedStorage()
    for step in range(3000):
        clock["now"] += rng.uniform(0.0, 1.0)
        by = rng.choice([None, *map(key, range(6))])
        of, at = key(rng.randrange(12)), rng.randrange(12)
        expires_at = clock["now"] + rng.uniform(-5.0, 100.0)
        storage.store_subkey(at, of.hex(), bytes(rng.randrange(4000)), expires_at, by)
        if step % 500 == 250:
            storage.keep(rng.sample(range(12), 2))
        sizes = {
            (at, subkey): dht_storage.ENTRY_BYTES + len(subkey) + len(entry.value)
            for at, kept in storage._kept.items()
            for subkey, entry in kept.items()
        }
        assert (storage.num_entries, storage.num_bytes) == (len(sizes), sum(sizes.values()))
        pools = [storage._others, *storage._own.values()]
        counted = {place: size for pool in pools for each in pool._sizes.values() for place, size in each.items()}
        assert counted == sizes
        assert storage._others.num_bytes <= 60_000 and all(p.num_bytes <= 30_000 for p in storage._own.values())
        for pool in pools:
            assert pool._totals == {
                by: sum(map(dht_storage._weight, each.values())) for by, each in pool._sizes.items()
            }
        assert storage._under.keys() == storage._kept.keys() - storage._own.keys()
