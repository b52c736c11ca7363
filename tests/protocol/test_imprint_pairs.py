"""Which remembered activations a lost stage is made by."""

import pytest

from farflung.protocol.headers import ImprintKey
from farflung.protocol.imprint_pairs import PAIRS, Choice, Halves, choose
from farflung.protocol.keys import PeerId

A, B, C, LIAR = (bytes([letter]) * 32 for letter in b"abcl")


def key(step: int, microbatch: int = 0, window: int | None = None) -> ImprintKey:
    """Of a window whose name tells nothing of its step: that of a later one comes first."""
    return ImprintKey(step, (255 - step % 256 if window is None else window).to_bytes(32, "big"), microbatch)


def chosen(*said: tuple[int, int, PeerId, PeerId], reached: int) -> Choice:
    """Of (step, microbatch, who has the input, who the output)."""
    inputs = {key(step, microbatch): [before] for step, microbatch, before, _ in said}
    outputs = {key(step, microbatch): [after] for step, microbatch, _, after in said}
    return choose(inputs, outputs, reached)


def steps(choice: Choice) -> list[int]:
    return [pair.key.step for pair in choice.pairs]


def test_the_newest_are_chosen_whatever_their_windows_are_called() -> None:
    inputs = {key(step, microbatch, window): [A] for step, window in ((6, 1), (7, 2), (8, 3)) for microbatch in (0, 1)}
    outputs = {one: [B] for one in inputs}
    choice = choose(inputs, outputs, reached=8)
    assert [(pair.key.step, pair.key.microbatch) for pair in choice.pairs] == [(8, 0), (8, 1), (7, 0), (7, 1)]
    assert len(choice.pairs) == PAIRS and choice.judges


def test_what_the_stage_did_long_ago_does_not_make_up_the_number() -> None:
    """As a region was lost whose neighbour had been out of all routes for six steps."""
    said = [(1, 1, A, C), (1, 2, A, C), (7, 1, B, C), (7, 2, B, C)]
    choice = chosen(*said, reached=8)
    assert steps(choice) == [7, 7] and choice.judges


@pytest.mark.parametrize(("reached", "oldest"), [(3, 1), (8, 6), (23, 21), (24, 21), (600, 525), (80_000, 70_000)])
def test_far_is_an_eighth_of_the_run(reached: int, oldest: int) -> None:
    assert steps(chosen((oldest, 0, A, B), (oldest - 1, 0, A, B), reached=reached)) == [oldest]
    assert chosen((oldest, 0, A, B), reached=reached).judges
    assert not chosen((oldest - 1, 0, A, B), reached=reached).judges


def test_where_all_are_old_the_newest_are_chosen_and_judge_nobody() -> None:
    choice = chosen((3, 0, A, B), (20, 0, A, B), (19, 1, A, B), reached=60)
    assert steps(choice) == [20, 19] and not choice.judges


def test_where_there_is_no_pair_none_judges() -> None:
    assert choose({}, {}, 9) == choose({key(9): [A]}, {key(9, 1): [B]}, 9) == Choice((), judges=False)


def test_steps_that_the_run_has_not_reached_count_for_nothing() -> None:
    assert steps(chosen((9, 0, A, B), (10, 0, A, B), (1 << 39, 0, A, B), reached=9)) == [9]
    assert chosen((10, 0, A, B), reached=9) == Choice((), judges=False)


def test_a_half_of_a_wrong_step_meets_no_other() -> None:
    inputs = {ImprintKey(7, b"w" * 32, 0): [A], ImprintKey(7, b"w" * 32, 1): [A]}
    outputs = {ImprintKey(8, b"w" * 32, 0): [LIAR], ImprintKey(7, b"w" * 32, 1): [B]}
    assert choose(inputs, outputs, reached=8).pairs == (Halves(ImprintKey(7, b"w" * 32, 1), A, B),)


def test_who_says_that_it_has_all_does_not_count_beside_two_that_have_halves() -> None:
    made_up = [(8, microbatch, LIAR, LIAR) for microbatch in range(PAIRS)]
    choice = chosen(*made_up, (6, 0, A, B), reached=8)
    assert [(pair.key.step, pair.before, pair.after) for pair in choice.pairs] == [(6, A, B)]


def test_a_data_node_has_both_halves_of_the_second_of_two_stages() -> None:
    assert chosen((8, 0, A, A), (8, 1, B, B), reached=8).pairs == (Halves(key(8, 0), A, A), Halves(key(8, 1), B, B))


def test_halves_are_of_two_peers_where_two_have_them() -> None:
    said = choose({key(8): [LIAR, A]}, {key(8): [LIAR, B]}, reached=8)
    assert said.pairs == (Halves(key(8), LIAR, B),)
