"""NoLoCo (2506.10911; digest 2.6): in each round peers meet in random pairs, and nothing waits for all of them.

With phi a peer's outer ("slow") parameters, theta its local ones, and means over the peers of its group g:

    m   <- a m - b mean_g(phi - theta) + b (mean_g(phi) - phi)         a = 0.5, b = 0.7
    phi <- phi + m

The second term is the group's mean pseudo-gradient; without the third the outer parameters of different peers would
wander apart. They differ for ever all the same: evaluate and export their mean. One round costs one exchange of twice
the bytes (phi travels too) with one peer, however large the swarm.

Pairs follow from the round's number alone, so that nobody needs to coordinate them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip:
    """Raises ValueError for numbers with which outer parameters cannot settle."""

    momentum: float = 0.5
    """a."""
    pull: float = 0.7
    """b."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 < self.pull <= 1:
            raise ValueError(f"momentum {self.momentum} must be in [0, 1) and pull {self.pull} in (0, 1]")

    def step(
        self,
        params: Tensor,  # fp32 [k], CPU: phi
        momentum: Tensor,  # same shape: m
        mean_update: Tensor,  # same shape: the group's mean of phi - theta
        mean_params: Tensor,  # same shape: the group's mean of phi
    ) -> tuple[Tensor, Tensor]:
        """phi and m one round later, as new tensors: element by element, one rounding per operation."""
        towards = mean_params.sub(params).sub(mean_update).mul(self.pull)
        momentum = momentum.mul(self.momentum).add(towards)
        return params.add(momentum), momentum


def pairs(
    members: Sequence[bytes],  # ids of the peers of a round, in any order
    round_id: bytes,
) -> list[tuple[bytes, ...]]:
    """Groups of two, the last of three where the number is odd; one alone stays alone. The same on every peer."""
    order = sorted(members, key=lambda member: blake2b(member, key=round_id[:64], digest_size=16).digest())
    groups = [tuple(order[start : start + 2]) for start in range(0, len(order), 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups
