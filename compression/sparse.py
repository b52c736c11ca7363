"""Vectors that are zero but for a few elements, given as positions and values: to dense ones, and onto sums."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from farflung.compression.codec import ChunkReader
from farflung.compression.positions import Positions

Values = npt.NDArray[np.float32]


def reader(positions: Positions, values: Values) -> ChunkReader:
    """Reads chunks of the dense vector; the positions are sorted and all different."""

    def read(start: int, stop: int, out: Tensor) -> None:
        first, last = np.searchsorted(positions, (start, stop))
        dense = out.zero_().numpy()
        dense[positions[first:last] - start] = values[first:last]

    return read


def add_(acc: Tensor, positions: Positions, values: Values, weight: float) -> None:
    """acc += fp32(weight * values) at the positions; all other elements stay as they are, a -0.0 too.

    The product is rounded before it is added, as by `codec.decode_add_with`.
    """
    dense = acc.detach().numpy()
    dense[positions] += values * np.float32(weight)
