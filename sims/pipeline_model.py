"""What benches of pipelines train, with one layer in each stage: small enough for one core, and with Muon at a rate at which it learns in some hundred steps."""

from farflung.training.inner import InnerConfig
from farflung.training.model import ModelConfig
from farflung.training.schedule import Schedule

OPTIMIZER = "muon(momentum=0.95, adamw_lr=0.01)"
LR = 0.02


def model_of(stages: int) -> ModelConfig:
    """So many layers."""
    return ModelConfig(
        vocab_size=264,
        dim=64,
        num_layers=stages,
        num_heads=4,
        num_kv_heads=4,
        ffn_dim=168,
        seq_len=64,
        tie_embeddings=False,
    )


def inner_of(steps: int) -> InnerConfig:
    """Of a run of so many steps."""
    schedule = Schedule(peak=LR, warmup_steps=steps // 30, total_steps=steps, kind="wsd")
    return InnerConfig(schedule=schedule, optimizer=OPTIMIZER, weight_decay=0.0)
