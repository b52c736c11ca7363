"""Who may decide: never two sides at once; and whose turn it is: everybody's, sooner or later."""

from itertools import combinations

import pytest

from farflung.protocol.quorum import is_quorum, proposer

PEERS = [bytes([i]) * 32 for i in range(9)]


def subsets(view: list[bytes]) -> list[frozenset[bytes]]:
    return [frozenset(c) for k in range(len(view) + 1) for c in combinations(view, k)]


@pytest.mark.parametrize("num", range(1, 8))
def test_two_disjoint_sets_are_never_both_quorums(num: int) -> None:
    view = PEERS[:num]
    quorums = [s for s in subsets(view) if is_quorum(view, s)]
    assert quorums and not any(a.isdisjoint(b) for a in quorums for b in quorums)
    assert frozenset(view) in quorums and frozenset() not in quorums


@pytest.mark.parametrize("num", range(1, 8))
def test_of_every_cut_in_two_at_least_the_larger_side_decides(num: int) -> None:
    view = PEERS[:num]
    for side in subsets(view):
        other = frozenset(view) - side
        assert is_quorum(view, side) + is_quorum(view, other) == 1, "exactly one side goes on"


def test_half_with_the_first_is_enough() -> None:
    view = PEERS[:4]
    assert is_quorum(view, [PEERS[0], PEERS[3]])
    assert not is_quorum(view, [PEERS[1], PEERS[2]])
    assert is_quorum(list(reversed(view)), [PEERS[0], PEERS[3]]), "the first by key, not by place"


def test_outsiders_and_repetitions_do_not_count() -> None:
    view = PEERS[:5]
    assert not is_quorum(view, [PEERS[0], PEERS[1], PEERS[7], PEERS[8]])
    assert not is_quorum(view, [PEERS[0]] * 5)
    assert not is_quorum([], PEERS)


@pytest.mark.parametrize("num", range(1, 8))
def test_a_swarm_can_shrink_to_one(num: int) -> None:
    view = PEERS[:num]
    while len(view) > 1:
        assert is_quorum(view, view[:-1])
        view = view[:-1]
    assert is_quorum(view, view)


@pytest.mark.parametrize("num", [1, 2, 5, 9])
def test_the_rotation_covers_everybody(num: int) -> None:
    view = PEERS[:num]
    for height in range(20):
        turns = [proposer(b"w" * 32, view, height, ballot) for ballot in range(2 * num)]
        assert set(turns[:num]) == set(view)
        assert turns[:num] == turns[num:]


def test_the_rotation_depends_on_swarm_and_height_and_not_on_the_order_of_the_view() -> None:
    first = {proposer(b"w" * 32, PEERS, height, 0) for height in range(200)}
    assert first == set(PEERS), "no member leads more than its share of first ballots"
    assert any(proposer(b"w" * 32, PEERS, h, 0) != proposer(b"x" * 32, PEERS, h, 0) for h in range(5))
    assert all(proposer(b"w" * 32, PEERS, h, 3) == proposer(b"w" * 32, PEERS[::-1], h, 3) for h in range(20))
