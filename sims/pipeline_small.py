"""A swarm with a pipeline, small enough for virtual time: counting as a language, and a model of four layers."""

from typing import Any

import numpy as np

from farflung.node.recipe import Recipe, read_recipe
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import (
    AdmissionSpec,
    DataSpec,
    DeadlineSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    PipelineSpec,
)
from farflung.training.data import Tokens

SAMPLES = 512
SEQ_LEN = 8


class Counting:
    """Every sample counts on from where its number says, modulo ten."""

    in_order = False
    num_samples = SAMPLES
    content_hash = "00" * 32

    def tokens(self, index: int) -> Tokens:
        return ((index + np.arange(SEQ_LEN + 1)) % 10).astype(np.int64)

    def heldout(self, k: int) -> Tokens:
        return np.stack([self.tokens(index) for index in range(k)])


def signers(count: int) -> list[Ed25519Signer]:
    return [Ed25519Signer(bytes([number + 1]) * 32) for number in range(count)]


def recipe(*, stages: int = 2, layers: int = 4, **changes: Any) -> Recipe:
    pipeline = {"stages": stages, "microbatches": 4, **changes.pop("pipeline", {})}
    return read_recipe(
        Manifest(
            **{
                "name": "counting",
                "founder": signers(1)[0].peer_id,
                "created": 1_700_000_000,
                "model": ModelSpec(
                    vocab_size=256, dim=16, num_layers=layers, num_heads=2, num_kv_heads=1, ffn_dim=24, seq_len=SEQ_LEN
                ),
                "data": DataSpec(spec="counting", content_hash=bytes(32), num_samples=SAMPLES),
                "batch_tokens": SEQ_LEN * 8,
                "total_steps": 24,
                "inner_steps": 4,
                "inner": InnerSpec(lr=2e-2, warmup_steps=2),
                "outer": OuterSpec(lr=0.7, momentum=0.5),
                "deadlines": DeadlineSpec(min_round_s=1.0, max_round_s=30.0),
                "pipeline": PipelineSpec(**pipeline),
                "admission": AdmissionSpec(rule="open"),
                **changes,
            }
        )
    )
