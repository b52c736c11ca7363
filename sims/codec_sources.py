"""What `farflung bench codec` encodes: three distributions, and pseudo-gradients of a model that it trains itself.

All have about the magnitude of a pseudo-gradient, 0.01: formats with few exponents do differently at 1. The Student
distribution with 4 degrees of freedom has the heaviest tails that still have a variance worth the name (its fourth
moment is infinite); weights' pseudo-gradients lie between Gaussian and Laplacian (compression digest, section 3.3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.sims.pseudo_gradients import Recipe, pseudo_gradient

SCALE = 1e-2
"""Root mean square of what is sampled."""

GAUSS, LAPLACE, STUDENT4 = "gauss", "laplace", "student4"
DELTA_ADAMW, DELTA_MUON = "delta (AdamW)", "delta (Muon)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Vectors that are encoded one by one; figures are over all of them."""

    name: str
    vectors: tuple[Tensor, ...]
    """fp32, 1-D."""
    about: str
    """One sentence for the page."""

    @property
    def numel(self) -> int:
        return sum(vector.numel() for vector in self.vectors)


def gauss(numel: int) -> Source:
    """Normal deviates, as a vector of `numel`."""
    x = torch.empty(numel).normal_(0, SCALE, generator=_seeded(1))
    return Source(name=GAUSS, vectors=(x,), about="independent normal deviates")


def laplace(numel: int) -> Source:
    """Differences of two exponential deviates, which are Laplacian: kurtosis 6."""
    generator = _seeded(2)
    x = torch.empty(numel).exponential_(generator=generator)
    x.sub_(torch.empty(numel).exponential_(generator=generator)).mul_(SCALE * 0.5**0.5)
    return Source(name=LAPLACE, vectors=(x,), about="independent Laplacian deviates (kurtosis 6)")


def student4(numel: int) -> Source:
    """Student's t with 4 degrees of freedom: normal / sqrt(chi2 / 4), where chi2 is twice the sum of two exponentials."""
    generator = _seeded(3)
    x = torch.empty(numel).exponential_(generator=generator)
    x.add_(torch.empty(numel).exponential_(generator=generator)).mul_(0.5).rsqrt_()
    x.mul_(torch.empty(numel).normal_(0, SCALE * 0.5**0.5, generator=generator))
    return Source(
        name=STUDENT4, vectors=(x,), about="independent Student deviates, 4 degrees of freedom (infinite kurtosis)"
    )


def delta(recipe: Recipe, progress: Callable[[str], None] = lambda text: None) -> Source:
    """The pseudo-gradient of one worker that trains by this recipe."""
    name, optimiser = {"adamw": (DELTA_ADAMW, "AdamW"), "muon": (DELTA_MUON, "Muon on the hidden matrices")}[
        recipe.optimiser
    ]
    made = pseudo_gradient(recipe, lambda text: progress(f"{name}: {text}"))
    return Source(
        name=name,
        vectors=made.vectors,
        about=f"pseudo-gradient of a small language model after {recipe.inner_steps} steps with {optimiser}, which followed "
        f"{recipe.warm_up_steps} of warm-up; training loss {made.loss:.2f} nats per byte",
    )


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
