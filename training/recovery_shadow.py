"""A shadow: a compressed copy of a stage's weights at a peer of another stage, kept up to date by coded differences.

The stage and the holder of its shadow both know, to the bit, what the holder has. A refresh is the codec's payload of

    state - shadow        and both then set        shadow <- shadow + decode(payload)

so what one refresh leaves out is in the next difference, and errors do not add up (digest, 5.5 and 2.7). An int8 code
of a difference is exact to 0.7 % of what changed since the last one. A chain begins with the initial weights, which
everybody can make from the seed, or with nothing, and then the first difference is a copy of the weights. When the
stage dies, the holder sends its shadow to the new peer as a refresh of nothing; both keep what that decodes to, and
the chain goes on from there. Only weights are kept: fresh moments do as well (digest, 6.3).

A shadow's name is a hash over the payloads that made it, and a refresh says which one it continues: one that was
missed or repeated is noticed without hashing the weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.compression.codec import Payload, VectorCodec
from farflung.compression.digest import digest_of
from farflung.training.errors import TrainingError

NAME_NBYTES = 32
"""Of a shadow's name."""

_EMPTY = b"farflung shadow 1"  # what the names of all shadows begin with


class WrongBase(TrainingError):
    """A refresh continues another shadow than the holder has; nothing was changed. Ask for a whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shadow:
    """What a holder has of a stage. The vector is never changed in place."""

    values: Tensor
    """fp32 [n] on the CPU."""
    name: bytes
    step: int
    """The stage's inner step that it is of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh:
    """What is sent."""

    base: bytes
    """Name of the shadow that it continues."""
    step: int
    payload: bytes

    @property
    def nbytes(self) -> int:
        """As sent, but for the envelope that every message has."""
        return len(self.base) + len(self.payload)


def empty(numel: int) -> Shadow:
    """Nothing yet: what a first refresh continues."""
    return Shadow(values=torch.zeros(numel), name=digest_of(_EMPTY, numel.to_bytes(8, "little")), step=0)


def refresh(
    shadow: Shadow,
    state: Tensor,  # fp32 [n], CPU
    step: int,
    codec: VectorCodec,
) -> tuple[Refresh, Shadow]:
    """What the stage sends, and what the holder will have. Raises CodecError when the state is not finite."""
    payload = bytes(codec.encode(state - shadow.values))
    sent = Refresh(base=shadow.name, step=step, payload=payload)
    return sent, applied(shadow, sent, codec)


def applied(shadow: Shadow, sent: Refresh, codec: VectorCodec) -> Shadow:
    """The holder's shadow after a refresh. Raises WrongBase, and CodecError for a damaged payload."""
    if sent.base != shadow.name:
        raise WrongBase(
            f"the refresh of step {sent.step} continues shadow {sent.base.hex()[:12]}, and here is {shadow.name.hex()[:12]}, "
            f"of step {shadow.step}; ask the stage for a whole copy"
        )
    values = shadow.values.clone()
    codec.decode_add_(sent.payload, values, 1.0)
    return Shadow(values=values, name=_continued(shadow.name, sent.step, sent.payload), step=sent.step)


def handed_over(shadow: Shadow, codec: VectorCodec) -> tuple[Refresh, Shadow]:
    """What the holder sends to the stage's new peer, and what both have from then on."""
    return refresh(empty(shadow.values.numel()), shadow.values, shadow.step, codec)


def _continued(name: bytes, step: int, payload: Payload) -> bytes:
    return digest_of(name, step.to_bytes(8, "little"), payload)
