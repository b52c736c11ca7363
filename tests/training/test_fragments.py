"""Fragments: a partition of any model, in balance, along its layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.training.flat import Layout, Slot
from farflung.training.fragments import ALIGN, SLACK, Pattern, cut, in_line
from farflung.training.model import Decoder, ModelConfig
from farflung.training.presets import PRESETS

PATTERNS = st.sampled_from(["sequential", "strided"])
NAMES = st.sampled_from(["embed.weight", "norm.weight", "layers.{}.a", "layers.{}.b", "h.{}.weight", "blocks.{}.x.1.y"])


@st.composite
def models(draw: st.DrawFn) -> list[Slot]:
    slots: list[Slot] = []
    start = 0
    for number in range(draw(st.integers(1, 12))):
        name = draw(NAMES).format(draw(st.integers(0, 5)))
        shape = torch.Size(draw(st.lists(st.integers(1, 300), min_size=1, max_size=2)))
        slots.append(Slot(name=f"{number}_{name}" if draw(st.booleans()) else name, shape=shape, start=start))
        start = slots[-1].stop
    return slots


@given(slots=models(), count=st.integers(1, 40), pattern=PATTERNS)
def test_every_element_is_in_exactly_one_fragment_and_shares_are_equal(
    slots: list[Slot], count: int, pattern: Pattern
) -> None:
    numel = slots[-1].stop
    count = min(count, numel)
    fragments = cut(slots, count, pattern)
    times = torch.zeros(numel, dtype=torch.int64)
    for fragment in fragments:
        assert sorted(fragment.slices) == list(fragment.slices)
        for start, stop in fragment.slices:
            times[start:stop] += 1
    assert len(fragments) == count and bool((times == 1).all())
    share = numel / count
    assert all(abs(fragment.numel - share) <= 2 * SLACK * share + 1 for fragment in fragments)


@given(slots=models(), count=st.integers(1, 9), pattern=PATTERNS, seed=st.integers(0, 99))
def test_taking_and_putting_back_gives_the_same_vector(
    slots: list[Slot], count: int, pattern: Pattern, seed: int
) -> None:
    numel = slots[-1].stop
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    other = torch.zeros(numel)
    for fragment in cut(slots, min(count, numel), pattern):
        values = fragment.take(flat)
        fragment.put_(other, values)
        shapes = fragment.shapes(slots)
        assert sum(torch.Size(shape).numel() for _, shape in shapes) == fragment.numel == values.numel()
    assert torch.equal(flat, other)


def layers_in(slots: list[Slot], count: int, pattern: Pattern) -> list[set[str]]:
    return [
        {name.split(".")[2] for name, _ in fragment.shapes(slots) if ".layers." in name}
        for fragment in cut(slots, count, pattern)
    ]


def test_fragments_are_layers_next_to_each_other_or_a_stride_apart() -> None:
    config = ModelConfig(vocab_size=8, dim=64, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=192, seq_len=8)
    slots = Layout(Decoder(config, seed=0)).slots
    assert layers_in(slots, 3, "sequential") == [{"0", "1"}, {"2", "3"}, {"4", "5"}]
    assert layers_in(slots, 3, "strided") == [{"0", "3"}, {"1", "4"}, {"2", "5"}]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_vector_in_line_is_cut_into_neighbours_that_are_the_same_fragments(count: int) -> None:
    """So a swarm's fragments are each one piece of its flat vector, in either pattern."""
    config = ModelConfig(vocab_size=8, dim=64, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=192, seq_len=8)
    model = Decoder(config, seed=0)
    slots = Layout(model).slots
    order = [slot.name for slot in in_line(slots, count, "strided")]
    assert (order == [slot.name for slot in slots]) == (count == 1)
    for wanted, found in zip(
        cut(slots, count, "strided"), cut(Layout(model, order).slots, count, "sequential"), strict=True
    ):
        assert len(found.slices) == 1 and found.numel == wanted.numel
        assert sorted(found.shapes(Layout(model, order).slots)) == sorted(wanted.shapes(slots))


def test_a_parameter_larger_than_a_fragment_is_cut_at_round_numbers() -> None:
    slots = [
        Slot(name="embed.weight", shape=torch.Size([1000, 100]), start=0),
        Slot(name="layers.0.w", shape=torch.Size([100, 100]), start=100_000),
    ]
    fragments = cut(slots, 5, "strided")
    inside = [start for fragment in fragments for start, _ in fragment.slices if 0 < start < 100_000]
    assert len(inside) == 4 and all(start % ALIGN == 0 for start in inside)
    assert fragments[1].shapes(slots) == [("embed.weight", (fragments[1].numel, 1))]


def test_the_tied_head_of_a_preset_is_there_once() -> None:
    slots = Layout(Decoder(PRESETS["tiny"], seed=0)).slots
    assert sum(fragment.numel for fragment in cut(slots, 4)) == slots[-1].stop


@pytest.mark.parametrize("count", [0, 13])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="choose 1 to 12"):
        cut([Slot(name="w", shape=torch.Size([3, 4]), start=0)], count)
