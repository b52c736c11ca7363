"""Outer optimisers against straight references, element by element in fp32, to the bit."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.training.fragments import Fragment
from farflung.training.outer import OuterState
from farflung.training.rules import (
    MOST_GROWN,
    HeavyBall,
    Nesterov,
    OuterRule,
    Sgd,
    Sign,
    advance_,
    empty_buffers,
    grown,
)

N, ROUNDS = 200, 20
WHOLE = Fragment(((0, N),))
F = np.float32
TINY = float(np.finfo(F).tiny)
Number = np.float32
Reference = Callable[[Number, list[Number], Number], Number]


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sgd(theta: Number, state: list[Number], d: Number) -> Number:
    return theta - d * F(0.9)


def nesterov(theta: Number, state: list[Number], d: Number) -> Number:
    state[0] = state[0] * F(0.9) + d
    return theta - (state[0] * F(0.9) + d) * F(0.7)


def heavy_ball(theta: Number, state: list[Number], d: Number) -> Number:
    state[0] = state[0] * F(0.5) + d
    return theta - min(max(state[0], F(-1.5)), F(1.5)) * F(0.8)


def co2(theta: Number, state: list[Number], d: Number) -> Number:
    gap = state[1] / max(state[2], F(TINY))
    state[0] = state[0] * F(0.5) + d / (gap * F(2.0) + F(1.0))
    moved = min(max(state[0], F(-1.5)), F(1.5)) * F(0.8)
    state[1] = abs(moved)
    state[2] = state[2] * F(0.5) + abs(moved) * F(0.5)
    return theta - moved


def sign(theta: Number, state: list[Number], d: Number) -> Number:
    return theta - F(np.sign(d)) * F(0.01)


RULES: list[tuple[OuterRule, Reference]] = [
    (Sgd(lr=0.9), sgd),
    (Nesterov(lr=0.7, momentum=0.9), nesterov),
    (HeavyBall(lr=0.8, momentum=0.5, clip=1.5), heavy_ball),
    (HeavyBall(lr=0.8, momentum=0.5, clip=1.5, penalty=2.0), co2),
    (Sign(lr=0.01), sign),
]


@pytest.mark.parametrize("rule,reference", RULES, ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_trajectories_are_the_formulas_to_the_bit(rule: OuterRule, reference: Reference) -> None:
    params = random(N, 1)
    buffers = empty_buffers(rule, params)
    theta = [F(value) for value in params.tolist()]
    state = [[F(0)] * 3 for _ in range(N)]
    for round_ in range(ROUNDS):
        update = random(N, 100 + round_)
        advance_(rule, params, buffers, WHOLE, update)
        theta = [reference(theta[i], state[i], F(d)) for i, d in enumerate(update.tolist())]
    assert params.numpy().tolist() == [float(value) for value in theta]
    for number, buffer in enumerate(buffers):
        assert buffer.numpy().tolist() == [float(own[number]) for own in state]


@given(cuts=st.lists(st.integers(0, N), max_size=6), which=st.integers(0, len(RULES) - 1))
def test_fragments_in_any_cut_and_order_give_the_same_bits(cuts: list[int], which: int) -> None:
    rule = RULES[which][0]
    whole, pieces = random(N, 1), random(N, 1)
    whole_buffers, buffers = empty_buffers(rule, whole), empty_buffers(rule, pieces)
    bounds = [0, *sorted(cuts), N]
    spans = [span for span in itertools.pairwise(bounds) if span[0] < span[1]]
    for round_ in range(3):
        update = random(N, 7 + round_)
        advance_(rule, whole, whole_buffers, WHOLE, update)
        for fragment in (Fragment(tuple(spans[1::2])), Fragment(tuple(spans[::2]))):
            if fragment.slices:
                advance_(rule, pieces, buffers, fragment, fragment.take(update))
    assert torch.equal(whole, pieces)
    assert all(torch.equal(one, other) for one, other in zip(whole_buffers, buffers, strict=True))


def test_nesterov_is_the_outer_state_that_swarms_have() -> None:
    state, params = OuterState(random(N, 1)), random(N, 1)
    rule = Nesterov(lr=0.7, momentum=0.5)
    buffers = empty_buffers(rule, params)
    for round_ in range(5):
        state.step_(0, N, random(N, round_), 0.7, 0.5)
        advance_(rule, params, buffers, WHOLE, random(N, round_))
    assert torch.equal(state.params, params) and torch.equal(state.momentum, buffers[0])


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES if rule.num_buffers <= 1], ids=repr)
def test_outer_states_move_by_their_rule(rule: OuterRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.training.outer.BLOCK_ELEMENTS", 7)
    state, params = OuterState(random(N, 1), rule=rule), random(N, 1)
    buffers = empty_buffers(rule, params)
    for round_ in range(5):
        state.advance_(10, N, random(N - 10, round_))
        advance_(rule, params, buffers, Fragment(((10, N),)), random(N - 10, round_))
    assert torch.equal(state.params, params)
    assert torch.equal(state.momentum, buffers[0] if buffers else torch.zeros(N))


def test_an_outer_state_has_one_buffer() -> None:
    state = OuterState(random(N, 1), rule=HeavyBall(penalty=1.0))
    before = state.digest()
    with pytest.raises(ValueError, match="has 3 buffers; outer state holds one"):
        state.advance_(0, N, random(N, 2))
    assert state.digest() == before


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    rule, params = Nesterov(), random(N, 1)
    buffers = empty_buffers(rule, params)
    for update in (torch.ones(N - 1), torch.ones(N, dtype=torch.float64)):
        with pytest.raises(ValueError, match="as many fp32 numbers"):
            advance_(rule, params, buffers, WHOLE, update)
    assert torch.equal(params, random(N, 1)) and not buffers[0].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sgd(lr=0),
        lambda: Nesterov(momentum=1.0),
        lambda: HeavyBall(clip=0),
        lambda: HeavyBall(penalty=-1),
        lambda: Sign(lr=-1),
    ],
)
def test_numbers_that_cannot_be_are_refused(make: Callable[[], OuterRule]) -> None:
    with pytest.raises(ValueError):
        make()


@given(
    tokens=st.lists(st.integers(1, 10**9), min_size=1, max_size=64),
    growth=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    factor=st.integers(1, 1000),
)
def test_a_rate_grows_with_the_number_of_contributors_and_small_ones_count_less(
    tokens: list[int], growth: float, factor: int
) -> None:
    rule = Nesterov(lr=0.7, momentum=0.5)

    def rate(tokens: list[int]) -> float:
        found = grown(rule, growth, tokens)
        assert isinstance(found, Nesterov) and found.momentum == 0.5
        return found.lr

    most = rate([tokens[0]] * len(tokens))
    assert most == pytest.approx(0.7 * (min(max(len(tokens), 2), 16) / 2) ** growth, abs=1e-6)
    assert 0.7 <= rate(tokens) <= most, "unequal shares are worth fewer"
    assert rate([count * factor for count in tokens]) == pytest.approx(rate(tokens), abs=2e-6)
    assert growth or rate(tokens) == 0.7


@pytest.mark.parametrize(
    ("tokens", "lr"),
    [
        ([], 0.7),
        ([5], 0.7),
        ([5, 5], 0.7),
        ([4096] * 8, 0.989949),
        ([4096] * 8 + [1] * 8, 0.99007),
        ([4096] * MOST_GROWN, 1.177255),
        ([4096] * 64, 1.177255),
    ],
)
def test_rates_of_some_rounds(tokens: list[int], lr: float) -> None:
    assert grown(Nesterov(lr=0.7), 0.25, tokens) == Nesterov(lr=lr)
