"""What benches train in one process sees: a data set's samples in the order of a seed, a step at a time."""

import numpy as np
import torch
from torch import Tensor

from farflung.training.data import Dataset
from farflung.training.order import SampleOrder


def batch_of(data: Dataset, order: SampleOrder, step: int, size: int) -> Tensor:
    """The `size` samples of step `step` >= 0 of all peers: int64 [size, seq_len + 1]."""
    numbers = range(step * size, (step + 1) * size)
    return torch.from_numpy(np.stack([data.tokens(order.index(number)) for number in numbers]))
