"""The same words for ever: payloads and bases depend on them."""

import numpy as np
import pytest

from farflung.compression.hashing import random_seed, random_uniform, random_words


def test_words_are_those_of_splitmix64() -> None:
    # Vigna's reference implementation, splitmix64.c, seeded with 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_words(1234567, 4).tolist() == expected
    assert random_words(1234567, 2).tolist() == expected[:2] and len(random_words(7, 0)) == 0
    assert random_words((1 << 64) - 1, 1).dtype == np.uint64


def test_every_number_counts_in_a_seed() -> None:
    seeds = {random_seed(*numbers) for numbers in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (1 << 63, 2)]}
    assert len(seeds) == 8


def test_uniform_numbers_are_exact() -> None:
    values = random_uniform(5, 1 << 16)
    assert np.abs(values).max() < 1 and abs(values.mean()) < 0.01
    assert values.var() == pytest.approx(1 / 3, rel=0.01)
    assert [value.hex() for value in random_uniform(0, 2)] == ["0x1.8882a0e5ec773p-1", "-0x1.18761955e469cp-3"]
