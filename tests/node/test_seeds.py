"""Whom a node asks to get into the DHT, named and found."""

from farflung.node.network import PeerId
from farflung.node.seeds import MAX_ANSWERED, MAX_FOUND, SEEDS_AT_ONCE, Seeds

NAMED = [bytes([1, number]) * 16 for number in range(40)]
GOOD = [bytes([2, number]) * 16 for number in range(40)]
MADE_UP = [bytes([3, number]) * 16 for number in range(256)]


def turn(seeds: Seeds) -> list[PeerId]:
    """One turn through all, in which nobody answers."""
    asked: list[PeerId] = []
    while True:
        batch = seeds.take()
        asked += batch
        seeds.asked(batch, ())
        if not seeds.unasked:
            return asked


def test_the_newest_of_those_that_were_found_are_asked_beside_every_second_named_one() -> None:
    seeds = Seeds()
    assert not seeds and turn(seeds) == []
    for peer in NAMED:
        seeds.name(peer)
    for peer in GOOD:
        seeds.find(peer)
    newest = GOOD[: -MAX_FOUND - 1 : -1]
    asked = turn(seeds)
    assert asked[:4] == [NAMED[0], newest[0], NAMED[1], newest[1]]
    assert set(asked) == {*NAMED, *newest} and len(asked) == 40 + MAX_FOUND
    assert sum(peer in NAMED for peer in asked[:SEEDS_AT_ONCE]) == SEEDS_AT_ONCE // 2


def test_made_up_peers_take_the_place_neither_of_named_ones_nor_of_those_that_answered() -> None:
    seeds = Seeds()
    seeds.name(NAMED[0])
    for peer in GOOD[:3]:
        seeds.find(peer)
    batch = seeds.take()
    seeds.asked(batch, [NAMED[0], *GOOD[1:3]])
    for peer in MADE_UP:
        seeds.find(peer)
    batch = seeds.take()
    assert batch[:2] == [NAMED[0], GOOD[2]] and batch[2] == GOOD[1] and GOOD[0] not in batch
    seeds.asked(batch, batch)  # nodes of somebody's, which do answer
    for _ in range(9):
        for peer in MADE_UP:
            seeds.find(peer)
        batch = seeds.take()
        assert batch[:3] == [NAMED[0], GOOD[2], GOOD[1]]
        seeds.asked(batch, batch)
    assert len(turn(seeds)) <= 1 + MAX_ANSWERED + MAX_FOUND


def test_one_that_no_longer_answers_gives_way_and_may_come_back() -> None:
    seeds = Seeds()
    for peer in GOOD[:2]:
        seeds.find(peer)
    seeds.asked(seeds.take(), GOOD[:1])
    seeds.asked(seeds.take(), GOOD[1:2])
    assert seeds.take() == [GOOD[1], GOOD[0]]
    seeds.asked(GOOD[:2], ())
    seeds.find(GOOD[0])
    assert seeds.take() == [GOOD[0], GOOD[1]]


def test_one_that_is_named_later_is_asked_once() -> None:
    seeds = Seeds()
    seeds.find(GOOD[0])
    seeds.asked(seeds.take(), GOOD[:1])
    seeds.name(GOOD[0])
    seeds.find(GOOD[0])
    assert turn(seeds) == GOOD[:1]


def test_a_found_one_that_answers_does_not_keep_named_ones_from_being_asked() -> None:
    """Only the first eight of forty ever were, while the found one answered; it may be anybody's."""
    seeds = Seeds()
    for peer in NAMED:
        seeds.name(peer)
    for peer in GOOD[:8]:
        seeds.find(peer)
    alive = {NAMED[20], GOOD[0]}
    batches = []
    while not batches or NAMED[20] not in batches[-1]:
        assert len(batches) < 5
        batch = seeds.take()
        batches.append(batch)
        seeds.asked(batch, [peer for peer in batch if peer in alive])
        assert GOOD[0] in batch, "a node that has lost all whom it knew asks it"
    assert seeds.take()[0] == NAMED[20]
