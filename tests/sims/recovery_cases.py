"""A pipeline small enough to lose its stages in milliseconds: a language of one rule, four stages of a layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from farflung.sims import recovery_train
from farflung.sims.recovery_tiers import Tier
from farflung.training.data import TokenWindows
from farflung.training.model import ModelConfig

TOY = Tier(
    name="toy",
    model=ModelConfig(vocab_size=256, dim=16, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=32, seq_len=16),
    stages=4,
    regions=("a", "b", "c", "a"),
    microbatches=2,
    sequences=2,
    lr=1e-2,
    rise_steps=2,
    warm_steps=3,
    steps=6,
    eval_every=2,
    windows=8,
    checkpoint_every=2,
    seeds=1,
    event_steps=2,
    rates=(0.9,),
)
SAFE = replace(TOY, name="safe", safe_ends=True, sequences=8)
"""With a data node of its own, and so many bytes in a step that all shadows are refreshed after every round."""
AT_RISK = replace(
    TOY,
    name="at risk",
    model=replace(TOY.model, num_layers=5),
    stages=5,
    regions=("a", "b", "c", "a", "d"),
    sequences=8,
)
"""The same with the ends at stage 0, and a stage more: of four those that are left may not begin stage 0 and another one anew."""


@contextmanager
def use_small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    runs = [np.arange(4000) * 5 % 32, np.arange(400) * 5 % 32]
    data = TokenWindows(runs[:1], runs[1:], seq_len=16, hash_content=lambda: "toy")
    monkeypatch.setattr(recovery_train, "corpus", lambda tier: data)
    for cached in (recovery_train._windows, recovery_train._undisturbed):
        cached.cache_clear()
    yield
    for cached in (recovery_train._windows, recovery_train._undisturbed):
        cached.cache_clear()
