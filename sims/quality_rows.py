"""From outcomes to the rows of the table: gaps to data-parallel training, what of the peers' help arrived, and bytes.

With L a loss at the best learning rate, DP data-parallel training and half one worker with a peer's share of the batch, both
with the same inner optimiser, and all differences taken seed by seed:

    gap_percent_same_inner   100 (L - L_DP) / L_DP                 of the same inner optimiser
    gap_percent_adamw        the same against AdamW's
    recovered                (L_half - L) / (L_half - L_DP)        0: no better than alone; 1: as good as data-parallel
    dp_spread_percent        100 (max - min) / mean of L_DP over its seeds: a smaller gap says nothing

The gaps and what was recovered are means over the seeds; `eval_losses` and `gaps_*` are those of each, from seed 0 on.
DeMo, which has no inner optimiser of its own, is compared with AdamW.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.sims.quality_methods import METHODS, Inner, Method
from farflung.sims.quality_runs import Grid, Tuned, best, mean
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_train import ring_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method; see the module. None where a run diverged, or where there is nothing to compare with."""

    method: str
    inner: str
    peers: int
    H: int | None
    lr: float
    seeds: int
    eval_loss: float | None
    eval_losses: tuple[float | None, ...]
    gap_percent_same_inner: float | None
    gaps_same_inner: tuple[float | None, ...]
    gap_percent_adamw: float | None
    gaps_adamw: tuple[float | None, ...]
    dp_spread_percent: float | None
    recovered: float | None
    bits_per_param_per_step: float
    """Of the seeds that did not diverge; 0 where all did, or where nothing is sent."""
    bytes_ratio_vs_ddp_bf16: float | None
    peak_bits_per_step: float
    grid: Grid
    machines: tuple[str, ...]
    """On which its seeds ran, each once."""


def references(methods: Sequence[Method]) -> list[Method]:
    """What the methods are compared with, in the order of the table: AdamW's data-parallel training, and that of every
    inner optimiser among them, with its worker alone."""
    inners = {_compared(method) for method in methods}
    return [m for m in METHODS if m.outer is None and (m.inner in inners or (m.whole_batch and m.inner == "adamw"))]


def rows(tuned: Sequence[Tuned], tier: Tier) -> list[Row]:
    """One for each method; all `references` must be among them."""
    whole = {one.method.inner: one for one in tuned if one.method.whole_batch}
    alone = {one.method.inner: one for one in tuned if one.method.outer is None and not one.method.whole_batch}
    return [_row(one, whole, alone, tier) for one in tuned]


def _row(one: Tuned, whole: Mapping[Inner, Tuned], alone: Mapping[Inner, Tuned], tier: Tier) -> Row:
    method, inner = one.method, _compared(one.method)
    sent = [outcome for outcome in one.outcomes if outcome.eval_loss is not None]
    bits = mean([outcome.bits_per_param_per_step for outcome in sent]) or 0.0
    same_inner, to_adamw = _gaps(one, whole[inner]), _gaps(one, whole["adamw"])
    return Row(
        method=method.name,
        inner=method.inner,
        peers=tier.peers if method.outer is not None or method.whole_batch else 1,
        H=None if method.outer is None else method.outer.timetable.interval,
        lr=best(one.grid),
        seeds=len(one.outcomes),
        eval_loss=mean(one.losses),
        eval_losses=tuple(one.losses),
        gap_percent_same_inner=mean(same_inner),
        gaps_same_inner=same_inner,
        gap_percent_adamw=mean(to_adamw),
        gaps_adamw=to_adamw,
        dp_spread_percent=_spread(whole[inner]),
        recovered=_recovered(one, whole[inner], alone.get(inner)),
        bits_per_param_per_step=bits,
        bytes_ratio_vs_ddp_bf16=ring_bits(tier.peers) / bits if bits else None,
        peak_bits_per_step=mean([outcome.peak_bits_per_step for outcome in sent]) or 0.0,
        grid=one.grid,
        machines=tuple(sorted({outcome.machine for outcome in one.outcomes})),
    )


def _compared(method: Method) -> Inner:
    return "adamw" if method.inner == "gradient" else method.inner


def _gaps(one: Tuned, reference: Tuned) -> tuple[float | None, ...]:
    pairs = zip(one.losses, reference.losses, strict=False)
    return tuple(None if a is None or b is None else 100 * (a - b) / b for a, b in pairs)


def _spread(reference: Tuned) -> float | None:
    losses = [loss for loss in reference.losses if loss is not None]
    if len(losses) < 2:
        return None
    return 100 * (max(losses) - min(losses)) / (sum(losses) / len(losses))


def _recovered(one: Tuned, whole: Tuned, alone: Tuned | None) -> float | None:
    if alone is None:
        return None
    triples = zip(one.losses, whole.losses, alone.losses, strict=False)
    return mean([None if a is None or b is None or c is None or b == c else (c - a) / (c - b) for a, b, c in triples])
