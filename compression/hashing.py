"""Random numbers that are a pure function of (seed, counter), the same on every machine and in every version.

The output function of SplitMix64 (Steele, Lea and Flood, 2014) over a counter: integer arithmetic only, so that
two ends that know a seed know the same positions, signs or basis without sending them. Generators of torch and
numpy promise no such thing across versions.
"""

import numpy as np
import numpy.typing as npt

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def random_words(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` words of 64 random bits for `seed` in [0, 2**64); the first ones do not depend on `count`."""
    state = np.arange(1, count + 1, dtype=np.uint64)
    state *= _INCREMENT
    state += np.uint64(seed)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def random_seed(*numbers: int) -> int:
    """One seed of 64 bits from several numbers in [0, 2**64), whose order counts."""
    seed = 0
    for number in numbers:
        seed = int(random_words(seed ^ number, 1)[0])
    return seed


def random_uniform(seed: int, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in (-1, 1), odd multiples of 2**-53: exact, so the same everywhere."""
    odd = (random_words(seed, count) >> np.uint64(10)).astype(np.int64) | 1
    return (odd - (1 << 53)).astype(np.float64) * 2.0**-53
