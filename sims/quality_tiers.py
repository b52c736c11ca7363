"""The sizes at which `farflung bench quality` runs (digest 7.3): model, tokens, learning rates, seeds.

The global batch is fixed and split by the peers, so all methods see the same tokens in the same order. Before the
rounds begin there is a short synchronous start, the same for all with the same inner optimiser, learning rate and seed;
its traffic is that of data-parallel training, and no method's bytes count it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from farflung.sims.quality_methods import Method
from farflung.training.model import ModelConfig
from farflung.training.presets import preset

EMBEDDED = "python"
"""The data set that every machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One size."""

    name: str
    model: ModelConfig
    data: str = EMBEDDED
    """Spec of the data set; tokens are bytes."""
    peers: int = 2
    """M."""
    batch: int
    """Sequences of a step, of all peers together."""
    microbatch: int
    """Sequences at a time in one worker."""
    warm_steps: int
    """Synchronous steps before the rounds."""
    rise_steps: int
    """Over which the learning rate rises; then it falls to a tenth on a cosine."""
    steps: int
    """Of the whole run."""
    adamw_lrs: tuple[float, ...]
    """Peak learning rates that are tried."""
    muon_lrs: tuple[float, ...]
    seeds: int
    """How often what the goals compare runs at its best learning rate; other methods do half as often."""
    heldout: int
    """Windows: the first half is for choosing, the second half for reporting."""
    device: str = "cpu"
    """cpu or cuda."""
    bf16: bool = False
    """Matrix products in bf16; without, in fp32 on a CPU and in TF32 on a GPU."""

    def __post_init__(self) -> None:
        if self.batch % self.peers or not 0 < self.warm_steps < self.steps:
            raise ValueError("the batch must be a multiple of the peers, and the run longer than its start")

    @property
    def num_tokens(self) -> int:
        """Of the whole run, all peers together."""
        return self.steps * self.batch * self.model.seq_len

    @property
    def precision(self) -> Literal["fp32", "tf32", "bf16"]:
        """Of matrix products."""
        if self.bf16:
            return "bf16"
        return "tf32" if self.device == "cuda" else "fp32"

    def on(self, device: str) -> "Tier":
        """The same where it trains on another device; a GPU takes a peer's share of a batch at once."""
        if device == self.device:
            return self
        microbatch = self.batch // self.peers if device == "cuda" else self.microbatch
        return replace(self, device=device, microbatch=microbatch)

    def untuned(self) -> "Tier":
        """The same with the middle rate of each grid only."""
        return replace(self, adamw_lrs=(_middle(self.adamw_lrs),), muon_lrs=(_middle(self.muon_lrs),))

    @property
    def tunes(self) -> bool:
        """Whether there is a learning rate to choose."""
        return max(len(self.adamw_lrs), len(self.muon_lrs)) > 1

    def warm_lr(self, method: Method, lr: float) -> float:
        """Peak learning rate of the synchronous start of a run with this one: the same, but that a method without an inner optimiser, whose rates are another thing,
        starts with the middle one of AdamW's grid whatever its own is."""
        return _middle(self.adamw_lrs) if method.inner == "gradient" else lr

    def lrs(self, method: Method) -> tuple[float, ...]:
        """The grid of a method."""
        grid = self.muon_lrs if method.inner == "muon" else self.adamw_lrs
        return tuple(lr * method.lr_scale for lr in grid)


def _middle(lrs: tuple[float, ...]) -> float:
    return sorted(lrs)[len(lrs) // 2]


CI = Tier(
    name="ci",
    model=ModelConfig(
        vocab_size=264, dim=64, num_layers=3, num_heads=4, num_kv_heads=4, ffn_dim=176, seq_len=64
    ),  # 167,872 parameters
    batch=64,
    microbatch=32,
    warm_steps=60,
    rise_steps=40,
    steps=600,
    adamw_lrs=(3e-3, 6e-3, 1.2e-2),
    muon_lrs=(6e-3, 1.2e-2, 2.4e-2),
    seeds=4,
    heldout=4096,
)
"""2.5 M tokens, 18 rounds of 30 steps: some 75 s of one core per run."""

NIGHTLY = Tier(
    name="nightly",
    model=ModelConfig(
        vocab_size=264, dim=96, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=288, seq_len=128
    ),  # 505,440 parameters
    batch=64,
    microbatch=16,
    warm_steps=200,
    rise_steps=100,
    steps=2600,
    adamw_lrs=(3e-3, 6e-3, 1.2e-2),
    muon_lrs=(6e-3, 1.2e-2, 2.4e-2),
    seeds=3,
    heldout=4096,
)
"""21 M tokens, 80 rounds of 30 steps."""

GPU = Tier(
    name="gpu",
    model=preset("35m"),
    batch=256,
    microbatch=32,
    warm_steps=150,
    rise_steps=100,
    steps=2850,
    adamw_lrs=(5e-4, 1e-3, 2e-3),
    muon_lrs=(1e-3, 2e-3, 4e-3),
    seeds=1,
    heldout=256,
    device="cuda",
    bf16=True,
)
"""747 M tokens, 20 per parameter and more, in 90 rounds of 30 steps; many epochs of the embedded corpus, so give `--data`."""

TIERS = {tier.name: tier for tier in (CI, NIGHTLY, GPU)}
