"""The sizes at which `farflung bench recovery` runs: model, stages, steps, failures; and the published clock.

Failures are those of CheckFree's experiments, scaled to the bench: its 500 M model takes 91.3 s per iteration, so a
chance of p per stage and hour is 1 - (1 - p)**(91.3 / 3600) per stage and iteration (digest, 2.4), and that is what a
stage of the bench's model fails with in each of its iterations. So a run has as many losses per iteration as theirs
had, and one of 200 iterations with six stages some 2, 3, 5 and 12 losses at 5, 10, 16 and 33 %.
"""

from dataclasses import dataclass, replace
from typing import Self

from farflung.training.model import ModelConfig
from farflung.training.presets import preset

RATES = (0.05, 0.10, 0.16, 0.33)
"""Chance that a given stage is lost within an hour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """What the modelled wall-clock counts: CheckFree's 500 M model as published (digest, 2.6)."""

    iteration_s: float = 91.3
    redundant_s: float = 151.04
    """Of an iteration of redundant computation, where every stage also runs the next stage's forward."""
    recovery_s: float = 30.0
    """From a loss to the stage serving again; two neighbours' weights are moved in it."""
    stage_parameters: int = 83_333_333
    """Of a stage: 500 M in six."""

    @property
    def link_bytes_s(self) -> float:
        """The rate at which two neighbours' fp32 weights arrive in `recovery_s`: 22 MB/s."""
        return 2 * 4 * self.stage_parameters / self.recovery_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One size."""

    name: str
    model: ModelConfig
    stages: int
    """Of equally many layers each."""
    regions: tuple[str, ...]
    """By stage, where its peer stands: what a region's loss takes away."""
    data: str = "python"
    """Spec of the data set; tokens are bytes."""
    microbatches: int
    """Of a step; even, as CheckFree+ swaps stages in half of them."""
    sequences: int
    """Of a microbatch."""
    lr: float
    """Of Adam (0.9, 0.999), constant after the warm-up: what a rollback goes back to is then what it was."""
    rise_steps: int
    """Of the learning rate's warm-up."""
    warm_steps: int
    """Undisturbed steps before all runs of a seed, which are not counted: a model that has learnt nothing yet has nothing to lose."""
    steps: int
    """In which stages are lost, and from which on steps and bytes count."""
    eval_every: int
    windows: int
    """Held-out windows."""
    checkpoint_every: int
    seeds: int
    event_steps: int
    """Steps that training goes on for after a single loss."""
    safe_ends: bool = False
    """The embedding, the final norm and the head are at a data node of their own, which is never lost, as in CheckFree's experiments: all stages
    are of layers alone. Else they are with stage 0, and go with it."""
    is_short: bool = False
    """CheckFree's losses leave too few iterations to recover in before the target: who is there first says nothing of the published ranking."""
    rates: tuple[float, ...] = RATES
    clock: Clock = Clock()

    def __post_init__(self) -> None:
        if self.model.num_layers % self.stages or self.microbatches % 2 or len(self.regions) != self.stages:
            raise ValueError("stages have equally many layers and a region each, and microbatches are even")
        if self.seeds < 1 or self.checkpoint_every < 1:
            raise ValueError("there is at least one seed, and checkpoints come every iteration or less often")
        if self.steps % self.eval_every or self.event_steps % self.eval_every:
            raise ValueError("steps and event_steps are multiples of eval_every")
        if self.warm_steps < 1 or self.rise_steps > self.warm_steps:
            raise ValueError("the learning rate is constant when stages may be lost")

    @property
    def layers(self) -> int:
        """Of a stage."""
        return self.model.num_layers // self.stages

    @property
    def midway(self) -> Self:
        """The same with undisturbed steps up to the middle of a run: when something is lost once, stages have learnt what is theirs to do."""
        return replace(self, warm_steps=self.warm_steps + self.steps // 2)

    @property
    def num_tokens(self) -> int:
        """Of a run, its undisturbed steps included."""
        return (self.warm_steps + self.steps) * self.microbatches * self.sequences * self.model.seq_len


CI = Tier(
    name="ci",
    model=ModelConfig(
        vocab_size=264, dim=48, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=128, seq_len=64
    ),  # 179,184 parameters
    stages=6,
    regions=("a", "b", "c", "d", "a", "b"),
    microbatches=2,
    sequences=4,
    lr=3e-3,
    rise_steps=50,
    warm_steps=300,
    steps=200,
    eval_every=25,
    windows=192,
    checkpoint_every=50,
    seeds=3,
    event_steps=50,
    is_short=True,
)
"""256 k tokens: some 10 s of one core per run, and 12 s per seed before."""

NIGHTLY = Tier(
    name="nightly",
    model=preset("3m", seq_len=128),  # six layers, 3.3 M parameters
    stages=6,
    regions=("a", "b", "c", "d", "a", "b"),
    microbatches=4,
    sequences=8,
    lr=1.5e-3,
    rise_steps=100,
    warm_steps=1000,
    steps=2000,
    eval_every=50,
    windows=512,
    checkpoint_every=50,
    seeds=3,
    event_steps=200,
)
"""12 M tokens, ten times as many losses per run."""

PUBLISHED = Tier(
    name="published",
    model=ModelConfig(
        vocab_size=264, dim=64, num_layers=12, num_heads=4, num_kv_heads=4, ffn_dim=176, seq_len=64
    ),  # 620,608 parameters
    stages=6,
    regions=("a", "b", "c", "d", "a", "b"),
    microbatches=2,
    sequences=4,
    lr=3e-3,
    rise_steps=50,
    warm_steps=150,
    steps=700,
    eval_every=50,
    windows=384,
    checkpoint_every=100,
    seeds=3,
    event_steps=50,
    safe_ends=True,
)
"""The digest's small copy of CheckFree's set-up (6.3), as near as a CPU allows: theirs has 24 layers in six stages, and 500 M parameters. Some 7, 12, 19 and 45
losses per run, which takes some 65 s of one core; all methods, rates and seeds an hour and a half. Checkpoints are as rare as for the model whose clock this is (2.5)."""

TIERS = {tier.name: tier for tier in (CI, NIGHTLY, PUBLISHED)}
