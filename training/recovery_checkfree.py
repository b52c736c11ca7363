"""CheckFree and CheckFree+ as published, switchable alone: recovery of a lost stage from the stages beside it
(2506.15461).

    lost stage i, 1 <= i <= S - 2      the norm-weighted mean of i - 1 and i + 1 (`recovery_rules`)
    lost stage 0 or S - 1              CheckFree: a copy of the only neighbour
    any of 0, 1, S - 2, S - 1          CheckFree+: a copy of its twin, 0 <-> 1 and S - 2 <-> S - 1

after which the stage's learning rate is raised by a tenth, its optimiser's moments and step counter are zero, nobody
else is touched, and training goes on with the current batch. CheckFree+ makes twins of the end stages by a swapped
order: half of the microbatches, the odd ones, visit 1, 0, 2, ..., S - 3, S - 1, S - 2. That costs convergence when
nothing fails (digest, 2.3), and is only for replica-free pipelines whose ends are at risk. Embedding, norm and head
are kept as exact copies by the stages next to them, so they are never made of anything else. Two adjacent stages at
once cannot be recovered, nor can a twin with its twin.

Where the digest (2.2, 2.7) leaves a choice, or differs from the authors' code:
- w is the plain norm of the gradient, not its square, and measured before clipping: the code measures it after
  clipping each stage to 1, where all stages that clip look alike;
- w may be a moving average, as one step's norm is noisy: `norm_decay`;
- the bump does not compound over failures, and falls linearly back to 1 over `bump_steps`; the code leaves it for
  good.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from farflung.training.errors import Unrecoverable
from farflung.training.recovery_rules import weighted_mean

FEWEST_PLUS_STAGES = 4
"""Below, the two swaps of CheckFree+ would meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckFree:
    """Settings; the defaults are the digest's, `norm_decay=0` and `bump_steps=None` the authors'."""

    plus: bool = False
    """CheckFree+: twins at both ends."""
    lr_bump: float = 1.1
    """A recovered stage's learning rate is multiplied by this."""
    bump_steps: int | None = 100
    """Steps over which the factor falls back to 1; None leaves it."""
    norm_decay: float = 0.9
    """Of the moving average of gradient norms; 0 takes the last step's."""

    def __post_init__(self) -> None:
        if (
            not 1.0 <= self.lr_bump
            or not 0.0 <= self.norm_decay < 1.0
            or not (self.bump_steps is None or self.bump_steps > 0)
        ):
            raise ValueError("lr_bump is at least 1, norm_decay in [0, 1), and bump_steps positive or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """Norm-weighted mean of two stages."""

    before: int
    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A copy of a stage."""

    of: int


def rule(config: CheckFree, stage: int, num_stages: int, lost: frozenset[int]) -> Mean | Copy:
    """What `stage` is made of when the stages `lost` are gone together, itself among them.

    Raises Unrecoverable when that is lost too, and ValueError for too few stages.
    """
    check_stages(config, num_stages)
    twin = twin_of(stage, num_stages) if config.plus else None
    if twin is not None:
        needed = {twin}
    else:
        needed = {other for other in (stage - 1, stage + 1) if 0 <= other < num_stages}
    if gone := sorted(needed & lost):
        raise Unrecoverable(f"stage {stage} is made of stage {gone[0]}, which is lost too; interpolate or draw it anew")
    if len(needed) == 1:
        return Copy(of=needed.pop())
    return Mean(before=stage - 1, after=stage + 1)


def made(how: Mean | Copy, survivors: Mapping[int, Tensor], norms: Mapping[int, float | None]) -> Tensor:
    """The new stage, fp32 [n], from the survivors' vectors and gradient norms. Raises Unrecoverable for unequal sizes."""
    if isinstance(how, Copy):
        return survivors[how.of].clone()
    return weighted_mean(survivors[how.before], survivors[how.after], norms[how.before], norms[how.after])


def twin_of(stage: int, num_stages: int) -> int | None:
    """The stage with which this one changes places in half of the microbatches; None in the middle."""
    return {0: 1, 1: 0, num_stages - 2: num_stages - 1, num_stages - 1: num_stages - 2}.get(stage)


def order(config: CheckFree, num_stages: int, microbatch: int) -> tuple[int, ...]:
    """The stages that a microbatch visits, one after another. Raises ValueError for too few stages."""
    check_stages(config, num_stages)
    stages = list(range(num_stages))
    if config.plus and microbatch % 2:
        stages[0], stages[1] = stages[1], stages[0]
        stages[-2], stages[-1] = stages[-1], stages[-2]
    return tuple(stages)


def lr_factor(config: CheckFree, steps_since: int | None) -> float:
    """What a stage's learning rate is multiplied by, `steps_since` it was recovered (0 in its first step); None: never."""
    if steps_since is None:
        return 1.0
    if config.bump_steps is None:
        return config.lr_bump
    left = max(0.0, 1.0 - steps_since / config.bump_steps)
    return 1.0 + (config.lr_bump - 1.0) * left


def smoothed(config: CheckFree, average: float | None, norm: float) -> float:
    """The moving average after a step whose unclipped gradient norm was `norm`; the first norm is the first average."""
    if average is None:
        return norm
    return config.norm_decay * average + (1.0 - config.norm_decay) * norm


def check_stages(config: CheckFree, num_stages: int) -> None:
    """Raises ValueError when there are too few stages."""
    fewest = FEWEST_PLUS_STAGES if config.plus else 2
    if num_stages < fewest:
        raise ValueError(f"{num_stages} stages; CheckFree{'+' if config.plus else ''} needs at least {fewest}")
