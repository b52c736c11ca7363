"""Which sample a sample number means: numbers go on without end, each epoch in an order of its own.

Number s is sample permutation(epoch)(s mod N) of epoch s div N. The permutation is a Feistel network with
cycle walking (Black and Rogaway 2002): stateless, no list of N entries, and integers only, so all machines
agree. Cost: four rounds, on average fewer than four walks, some ten microseconds.

Sources that are streamed can only be read forward: for those, every epoch is in the data set's own order.
"""

from dataclasses import dataclass

_MASK = (1 << 64) - 1
_ROUNDS = 4


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that spreads every bit over all."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in the permutation of [0, size) named `key`. Raises ValueError outside of it."""
    if not 0 <= index < size:
        raise ValueError(f"{index} is not in [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:  # walk along the cycle until back inside; the domain is at most four times `size`
        left, right = index >> half_bits, index & half_mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key + round_) ^ right) & half_mask)
        index = (left << half_bits) | right
        if index < size:
            return index


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The endless order of samples, the same for all peers of a swarm."""

    num_samples: int
    """N, samples in one epoch."""
    seed: int
    in_order: bool = False
    """Whether the permutation of every epoch is none."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("num_samples must be at least 1")

    def epoch(self, number: int) -> int:
        """Which epoch sample number `number` belongs to, from 0."""
        return number // self.num_samples

    def index(self, number: int) -> int:
        """Index into the data set of sample number `number` >= 0."""
        if number < 0:
            raise ValueError(f"sample number {number} is negative")
        epoch, place = divmod(number, self.num_samples)
        return place if self.in_order else permute(place, self.num_samples, _mix(_mix(self.seed & _MASK) + epoch))
