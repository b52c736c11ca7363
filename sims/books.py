"""What a judge wants to know of a learner: which samples its local progress holds (invariant 6), and what it makes of them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.training.coupled import Offered

Witness = Callable[[tuple[int, ...], Tensor], None]
"""Sees samples and a pseudo-gradient of them, fp32 [n], which it must not change or keep."""


def nobody(samples: tuple[int, ...], gradient: Tensor) -> None:
    """Nobody looks."""


def gradient_of(outer: Tensor, sent: Offered) -> Tensor:
    """Outer minus sent parameters, fp32 [n]: 0 where none were offered."""
    gradient = torch.zeros_like(outer)
    gradient[sent.start : sent.stop] = outer[sent.start : sent.stop] - sent.values
    return gradient


class SampleBook:
    """For learners to inherit, who write it as they go."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        """Sample numbers in the local progress, in order."""
        self.sent_samples: list[int] = []
        """Those in the pseudo-gradient that was taken last."""
        self.witness: Witness = nobody
        """Is shown every pseudo-gradient."""
        self._offered_samples: list[int] = []

    def book_step(self, numbers: Sequence[int]) -> None:
        self.trained.extend(numbers)

    def book_offer(self) -> None:
        self._offered_samples = list(self.trained)

    def book_gradient(self, gradient: Tensor) -> None:
        """What was offered last is in flight; see `gradient_of`."""
        self.sent_samples = self._offered_samples
        self.witness(tuple(self.sent_samples), gradient)

    def book_counted(self) -> None:
        """A round has counted what was in flight."""
        del self.trained[: len(self.sent_samples)]

    def book_dropped(self) -> None:
        """Local progress is gone."""
        self.trained.clear()

    def book_freeze(self) -> dict[str, object]:
        """The books, as copies."""
        return {"trained": tuple(self.trained), "sent_samples": tuple(self.sent_samples)}

    def book_thaw(self, state: Mapping[str, object]) -> None:
        """Back to what `book_freeze` copied."""
        match state:
            case {"trained": tuple(trained), "sent_samples": tuple(sent_samples)}:
                self.trained, self.sent_samples = list(trained), list(sent_samples)
            case _:
                raise ValueError("not what `book_freeze` gave")
