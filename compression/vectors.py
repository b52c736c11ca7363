"""What quantisers of whole vectors share: a vector's elements a section at a time, its strength, and numbers that decode alike everywhere."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression import planes
from farflung.compression.codec import CodecError
from farflung.compression.planes import SECTION, Floats

MIN_STEP, MAX_STEP = 2.0**-100, 2.0**127
"""Of what is coded, so that what is about as large is a normal number, and finite."""


def parts(x: Tensor, numel: int) -> Iterator[Floats]:
    """So many elements at a time, on the CPU; good until the next ones."""
    staging = torch.empty(min(x.numel(), numel), dtype=torch.float32, pin_memory=True) if x.is_cuda else None
    for start in range(0, x.numel(), numel):
        part = x[start : start + numel]
        yield part.numpy() if staging is None else staging[: len(part)].copy_(part).numpy()


def sums_of_squares(x: Tensor) -> NDArray[np.float64]:
    """Of each `planes.BLOCK` elements."""
    return np.concatenate([np.empty(0), *map(planes.sums_of_squares, parts(x, SECTION))])


def step_of(
    squares: NDArray[np.float64],  # of all parts of a vector
    numel: int,
    relative: float,  # step of a vector whose root mean square is 1
) -> float:
    """The step for this vector; 0 if it counts as zero. Raises CodecError."""
    total = math.fsum(squares.tolist())
    if not math.isfinite(total):
        raise CodecError("cannot encode: an element is not finite")
    step = relative * math.sqrt(total / max(numel, 1))
    if step > MAX_STEP:
        raise CodecError("cannot encode: a quantisation step is above 2**127")
    return 0.0 if step < MIN_STEP else step


def check_normal(values: Floats, *, or_zero: bool) -> None:
    """Raise CodecError unless all are normal numbers, which decode to the same on every machine, or all 0 bits."""
    bits = values.view(np.uint32)
    exponents = bits >> 23 & 255
    good = (exponents > 0) & (exponents < 255)
    if not (good | (bits == 0) if or_zero else good).all():
        raise CodecError("a value is not finite, or subnormal")
