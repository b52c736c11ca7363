"""A tier of `farflung bench quality` that trains in seconds, and its corpus."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from farflung.sims import quality_fleet, quality_train
from farflung.sims.quality_methods import by_names
from farflung.sims.quality_tiers import Tier
from farflung.training.data import TokenWindows
from farflung.training.model import ModelConfig

TOY = Tier(
    name="toy",
    model=ModelConfig(vocab_size=32, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, seq_len=16),
    batch=4,
    microbatch=4,
    warm_steps=3,
    rise_steps=2,
    steps=15,
    adamw_lrs=(3e-3, 6e-3),
    muon_lrs=(6e-3,),
    seeds=1,
    heldout=8,
)
LR = 6e-3
ADAMW = by_names("data-parallel adamw")[0]


def toy_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: the runs of a test see it in the place of Python's library."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    runs = [generator.integers(0, 32, 4000).cumsum() % 32 for _ in range(2)]
    data = TokenWindows(runs[:1], runs[1:], seq_len=16, hash_content=lambda: "toy")
    for module in (quality_train, quality_fleet):
        monkeypatch.setattr(module, "corpus", lambda tier: data)
    quality_train._warm_start.cache_clear()
    yield
    quality_train._warm_start.cache_clear()
