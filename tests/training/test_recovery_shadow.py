"""Shadows: both ends have the same bits, errors do not add up, and a wrong refresh changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.compression.codec import CodecError
from farflung.compression.registry import parse_codec
from farflung.training.recovery_shadow import (
    NAME_NBYTES,
    Refresh,
    Shadow,
    WrongBase,
    applied,
    empty,
    handed_over,
    refresh,
)

INT8, COARSE = parse_codec("int8(block=128)"), parse_codec("deadzone(bits=2.0)")
NUMEL = 1000


def seeded(values: torch.Tensor) -> Shadow:
    """An exact copy."""
    return refresh(empty(values.numel()), values, 0, parse_codec("fp32"))[1]


def walk(steps: int, seed: int = 0) -> list[torch.Tensor]:
    """A stage's weights over time."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(NUMEL, generator=generator)
    states = [state]
    for _ in range(steps):
        state = state + 0.01 * torch.randn(NUMEL, generator=generator)
        states.append(state)
    return states


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.lists(st.sampled_from([INT8, COARSE]), min_size=1, max_size=6))
def test_both_ends_have_the_same_bits(seed: int, codecs: list[object]) -> None:
    here = there = seeded(walk(0, seed)[0])
    for step, (codec, state) in enumerate(zip(codecs, walk(len(codecs), seed)[1:], strict=True), start=1):
        sent, here = refresh(here, state, step, codec)  # type: ignore[arg-type]
        there = applied(there, sent, codec)  # type: ignore[arg-type]
        assert torch.equal(here.values, there.values) and here.name == there.name
        assert here.step == there.step == step


def test_what_a_refresh_leaves_out_is_in_the_next_one() -> None:
    """Errors stay as large as one refresh leaves them; coding every difference by itself would add them up."""
    states = walk(40)
    shadow, errors = seeded(states[0]), []
    for step, state in enumerate(states[1:], start=1):
        _, shadow = refresh(shadow, state, step, COARSE)
        errors.append(float((state - shadow.values).norm()))
    assert max(errors[20:]) < 1.5 * max(errors[:20])
    assert errors[-1] < float((states[-1] - states[-2]).norm())


def test_int8_differences_are_nearly_exact() -> None:
    before, after = walk(1)
    _, shadow = refresh(seeded(before), after, 1, INT8)
    assert float((after - shadow.values).norm() / (after - before).norm()) < 0.01


def test_bytes_are_those_of_the_codec() -> None:
    sent, _ = refresh(empty(NUMEL), walk(0)[0], 1, INT8)
    assert sent.nbytes == NAME_NBYTES + INT8.max_nbytes(NUMEL) == NAME_NBYTES + len(sent.payload)


def test_a_missed_or_repeated_refresh_is_noticed() -> None:
    states = walk(3)
    shadow = seeded(states[0])
    first, after_first = refresh(shadow, states[1], 1, INT8)
    second, after_second = refresh(after_first, states[2], 2, INT8)
    for holder, wrong in ((shadow, second), (after_first, first), (after_second, second)):
        kept = holder.values.clone()
        with pytest.raises(WrongBase, match="whole copy"):
            applied(holder, wrong, INT8)
        assert torch.equal(holder.values, kept)


def test_damage_is_refused_and_changes_nothing() -> None:
    states = walk(1)
    shadow = seeded(states[0])
    sent, _ = refresh(shadow, states[1], 1, INT8)
    damaged = Refresh(base=sent.base, step=1, payload=sent.payload[:-1])
    with pytest.raises(CodecError):
        applied(shadow, damaged, INT8)
    assert torch.equal(shadow.values, states[0])


def test_a_new_peer_and_the_holder_go_on_from_what_was_handed_over() -> None:
    states = walk(3)
    _, held = refresh(seeded(states[0]), states[1], 1, COARSE)
    sent, holders = handed_over(held, INT8)
    newcomers = applied(empty(NUMEL), sent, INT8)
    assert torch.equal(newcomers.values, holders.values) and newcomers.name == holders.name
    assert newcomers.step == held.step == 1
    assert float((newcomers.values - held.values).norm() / held.values.norm()) < 0.01
    again, source = refresh(newcomers, states[2], 2, COARSE)
    assert torch.equal(applied(holders, again, COARSE).values, source.values)


def test_other_beginnings_have_other_names() -> None:
    assert len({empty(3).name, empty(4).name, seeded(torch.zeros(3)).name, seeded(torch.ones(3)).name}) == 4


def test_a_state_that_is_not_finite_is_refused() -> None:
    shadow: Shadow = seeded(torch.zeros(4))
    with pytest.raises(CodecError):
        refresh(shadow, torch.tensor([0.0, float("nan"), 0.0, 0.0]), 1, INT8)
