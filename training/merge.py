"""What makes one update of several peers' pseudo-gradients: weights, the weighted mean, and radial-directional averaging.

**Weights** (Decoupled DiLoCo, 2604.21428; digest 2.8): a peer that trained on c tokens in s steps weighs c * c / s, the
amount of data times tokens per step, which stands for its quality. With equal batches that is the number of steps, so
that a slow peer neither holds back nor is drowned out of proportion.

**RDA.** The mean of M directions that disagree is shorter than each of them, by M**-0.5 where they are orthogonal.
Radial-directional averaging keeps the length, tensor by tensor, embeddings excepted; phi(v) = v / |v|:

    |mean|  =  sum w_m |v_m| / sum w_m            direction  =  phi(sum w_m phi(v_m))

Norms are sums, whose last bits depend on the machine; so only the owner of a part computes this, and the others take
its bytes, as with every mean (`compression.aggregate`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def token_weights(
    tokens: Sequence[int],  # of each peer since its last contribution
    steps: Sequence[int],  # in which it trained on them; 0 for a peer that brings nothing
) -> list[float]:
    """Weights that sum to 1; a peer without steps weighs nothing. Raises ValueError when nobody contributes."""
    raw = [count * count / done if done else 0.0 for count, done in zip(tokens, steps, strict=True)]
    total = sum(raw)
    if total <= 0:
        raise ValueError("no peer has trained on any token: there is nothing to merge")
    return [weight / total for weight in raw]


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
