"""What makes one update of several peers' pseudo-gradients: the weighted mean, and radial-directional averaging.

**Weights.** Decoupled DiLoCo (2604.21428; digest 2.8) has a peer that trained on c tokens in s steps weigh c * c / s, the amount of data times tokens per step.
A swarm's steps all have as many tokens, so that is c, which is what a contribution weighs (`protocol.chain.Contribution`).

**RDA.** The mean of M directions that disagree is shorter than each of them, by M**-0.5 where they are orthogonal.
Radial-directional averaging keeps the length, tensor by tensor, embeddings excepted; phi(v) = v / |v|:

    |mean|  =  sum w_m |v_m| / sum w_m            direction  =  phi(sum w_m phi(v_m))

Norms are sums, whose last bits depend on the machine; so only the owner of a part computes this, and the others take
its bytes, as with every mean (`compression.aggregate`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_mean(
    vectors: Sequence[Tensor],  # fp32 [k] each, in an order that all agree on
    weights: Sequence[float],  # that sum to 1
) -> Tensor:  # [k]
    """The plain merge: multiply and add round separately, in the order given."""
    mean = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        mean.add_(vector.mul(weight))
    return mean


def radial_mean(
    vectors: Sequence[Tensor],  # fp32 [k] each: one tensor's pseudo-gradients
    weights: Sequence[float],  # that sum to 1
) -> Tensor:  # [k]
    """The merge of RDA. Vectors of zeros count for the length and not for the direction."""
    norms = [float(torch.linalg.vector_norm(vector)) for vector in vectors]
    length = sum(weight * norm for weight, norm in zip(weights, norms, strict=True))
    shares = [weight / norm if norm > 0 else 0.0 for weight, norm in zip(weights, norms, strict=True)]
    direction = weighted_mean(vectors, shares)
    norm = float(torch.linalg.vector_norm(direction))
    return direction.mul_(length / norm) if norm > 0 else direction
