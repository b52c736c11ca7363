"""Late means, merges and gossip: what each must reduce to."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.allocations import peak_bytes

from farflung.training.gossip import Gossip, pairs
from farflung.training.late import eager, mix_, rebase_
from farflung.training.merge import radial_mean, weighted_mean

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(lambda raw: [w / sum(raw) for w in raw])


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_eager_is_the_mean_for_equal_rounds_and_for_one_peer() -> None:
    mean, own, before = random(50, 1), random(50, 2), random(50, 3)
    assert torch.equal(eager(mean, own, own, 0.5), mean)
    torch.testing.assert_close(eager(before, own, before, 1.0), own)


def test_eager_trajectory_is_the_formula() -> None:
    rounds = [[random(20, 10 * r + m) for m in range(3)] for r in range(4)]
    zeros = torch.zeros(20)
    late_mean, late = zeros, [zeros] * 3
    for own in rounds:
        for m in range(3):
            others = sum((late[k] for k in range(3) if k != m), zeros)
            torch.testing.assert_close(eager(late_mean, own[m], late[m], 1 / 3), (others + own[m]) / 3)
        late_mean, late = weighted_mean(own, [1 / 3] * 3), own


def test_local_parameters_follow() -> None:
    outer, sent = random(50, 1), random(50, 2)
    for alpha, expected in ((0.0, outer), (1.0, sent), (0.5, (sent + outer) / 2)):
        local = sent.clone()
        mix_(local, outer, alpha)
        assert torch.equal(local, expected)
    local = sent.clone()
    rebase_(local, outer, sent)
    assert torch.equal(local, outer), "without progress: to the bit"
    local = sent + 1
    rebase_(local, outer, sent)
    torch.testing.assert_close(local, outer + 1)


def test_mixing_takes_no_memory_where_the_outer_ones_may_be_written_over() -> None:
    """And gives the same bits."""
    outer, local = random(10_000, 1), random(10_000, 2)
    plain, cramped, copy = local.clone(), local.clone(), outer.clone()
    mix_(plain, outer, 0.3)
    assert peak_bytes(lambda: mix_(cramped, copy, 0.3, scratch=copy)) < outer.nbytes / 10
    assert torch.equal(plain, cramped)


def test_a_broken_number_does_not_survive_alpha_zero() -> None:
    local = torch.tensor([math.nan, math.inf])
    mix_(local, torch.zeros(2), 0.0)
    assert local.tolist() == [0.0, 0.0]


@given(weights=WEIGHTS, seed=st.integers(0, 99))
def test_rda_keeps_the_mean_length_and_the_direction_of_the_mean_of_directions(weights: list[float], seed: int) -> None:
    vectors = [random(30, seed + m) * (m + 1) for m in range(len(weights))]
    merged = radial_mean(vectors, weights)
    norms = [float(v.norm()) for v in vectors]
    assert float(merged.norm()) == pytest.approx(sum(w * n for w, n in zip(weights, norms, strict=True)), rel=1e-4)
    towards = weighted_mean([v / v.norm() for v in vectors], weights)
    assert float(torch.cosine_similarity(merged, towards, dim=0)) == pytest.approx(1, abs=1e-4)


def test_rda_of_equal_vectors_is_that_vector_and_of_opposite_ones_is_nothing() -> None:
    v = random(30, 1)
    torch.testing.assert_close(radial_mean([v, v, v], [0.2, 0.3, 0.5]), v)
    assert not radial_mean([v, -v], [0.5, 0.5]).any()
    assert not radial_mean([torch.zeros(4)] * 2, [0.5, 0.5]).any()
    torch.testing.assert_close(radial_mean([v, torch.zeros(30)], [0.5, 0.5]), v / 2)


def test_gossip_is_the_formula_and_brings_peers_together() -> None:
    rule = Gossip()
    phi = [random(40, m) for m in range(4)]
    momenta = [torch.zeros(40) for _ in phi]
    spread = float(torch.stack(phi).std(dim=0).mean())
    still = torch.zeros(40)
    for round_ in range(40):
        for group in pairs([b"0", b"1", b"2", b"3"], round_.to_bytes(4, "big")):
            index = [int(member) for member in group]
            mean = sum((phi[m] for m in index), still) / len(index)
            for m in index:
                expected = 0.5 * momenta[m] + 0.7 * (mean - phi[m])
                before = phi[m]
                phi[m], momenta[m] = rule.step(phi[m], momenta[m], still, mean)
                torch.testing.assert_close(momenta[m], expected)
                torch.testing.assert_close(phi[m], before + expected)
    assert float(torch.stack(phi).std(dim=0).mean()) < spread / 100


def test_gossip_alone_moves_along_its_own_pseudo_gradient() -> None:
    phi, update = random(10, 1), random(10, 2)
    moved, _ = Gossip(momentum=0.0, pull=1.0).step(phi, torch.zeros(10), update, phi)
    torch.testing.assert_close(moved, phi - update)


@given(count=st.integers(1, 30), seed=st.integers(0, 1000))
def test_pairs_are_a_partition_that_all_agree_on(count: int, seed: int) -> None:
    members = [bytes([number]) for number in range(count)]
    round_id = seed.to_bytes(4, "big")
    groups = pairs(members, round_id)
    assert sorted(member for group in groups for member in group) == members
    assert all(2 <= len(group) <= 3 for group in groups) or count == 1
    assert groups == pairs(members[::-1], round_id)


def test_pairs_change_from_round_to_round() -> None:
    members = [bytes([number]) for number in range(8)]
    assert len({tuple(sorted(map(tuple, map(sorted, pairs(members, bytes([r])))))) for r in range(20)}) > 10


@pytest.mark.parametrize("numbers", [{"momentum": 1.0}, {"pull": 0.0}])
def test_numbers_that_cannot_be_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Gossip(**numbers)
