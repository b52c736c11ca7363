"""Real pseudo-gradients for `farflung bench codec`: a small model, the embedded corpus, H inner steps.

A worker warms up, then does the H steps of one round; what a codec would have to send is parameters before minus
parameters after. Twice: with AdamW everywhere, and with Muon for the hidden matrices. Nothing is kept on disk, and the
same machine gives the same bits again.

The matrices between two norms make one vector, as a node encodes them under a policy that sends norms as fp32; the
norms, a thousandth of the parameters, are left out. The recipes are small because the bench must end within
minutes: 1.4 M parameters in two vectors, for which the 32 bytes of a payload's header are 0.0004 bits each. Learning rates are the better of 1e-3 and 2e-3 by the
loss they reach. With 100 steps of warm-up and 2e-3, AdamW's pseudo-gradients had heavier tails (kurtosis 3.0 to 3.8
instead of 2.5 to 3.4) and an NMSE of 4.0e-5 instead of 3.6e-5 with int8(block=128): early training is harder to encode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.order import SampleOrder
from farflung.training.schedule import Schedule
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

Optimiser = Literal["adamw", "muon"]

SMALL = ModelConfig(vocab_size=264, dim=256, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=512, seq_len=64)
"""Codecs that read a vector as rows of 256 columns, as low rank does, then read most matrices as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the worker trains."""

    optimiser: Optimiser
    model: ModelConfig = SMALL
    batch: int = 8
    """Sequences in one step."""
    warm_up_steps: int
    """Before the round; the learning rate rises during the first 20 of them."""
    inner_steps: int = 30
    """H."""
    lr: float = 1e-3
    """After its rise."""
    seed: int = 0
    """Of the first parameters and of the samples' order."""


ADAMW = Recipe(optimiser="adamw", warm_up_steps=250)
MUON = Recipe(optimiser="muon", warm_up_steps=100, lr=2e-3)
"""Fewer steps, for each takes more than twice as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PseudoGradient:
    """What one worker would contribute to one round."""

    vectors: tuple[Tensor, ...]
    """fp32, 1-D: before minus after, of all 2-D parameters in the model's order, cut where others lie between them."""
    loss: float
    """Mean training loss of the round's H steps, nats per byte."""


def pseudo_gradient(recipe: Recipe, progress: Callable[[str], None] = lambda text: None) -> PseudoGradient:
    """Train, and return the last H steps' pseudo-gradient."""
    dataset = open_dataset("python", ByteTokenizer(), recipe.model.seq_len)
    order = SampleOrder(num_samples=dataset.num_samples, seed=recipe.seed)
    schedule = Schedule(peak=recipe.lr, warmup_steps=min(20, recipe.warm_up_steps), kind="constant")
    config = InnerConfig(schedule=schedule, optimizer=recipe.optimiser)
    model = Decoder(recipe.model, seed=recipe.seed)
    optimizer = make_optimizer(model, config)
    before: list[Tensor] = []
    losses: list[float] = []
    for step in range(recipe.warm_up_steps + recipe.inner_steps):
        if step == recipe.warm_up_steps:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            losses.clear()
        numbers = range(step * recipe.batch, (step + 1) * recipe.batch)
        tokens = torch.from_numpy(np.stack([dataset.tokens(order.index(number)) for number in numbers]))
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step(schedule.at(step))
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        progress(f"step {step + 1} of {recipe.warm_up_steps + recipe.inner_steps}, loss {losses[-1]:.2f}")
    with torch.no_grad():
        moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    runs = [list(run) for dims, run in groupby(moved, key=Tensor.dim) if dims == 2]
    vectors = tuple(torch.cat([matrix.flatten() for matrix in run]) for run in runs)
    return PseudoGradient(vectors=vectors, loss=float(np.mean(losses)))
