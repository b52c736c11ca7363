"""`docs/recovery.md`, or that of another tier, and its picture, from the rows of one run of `farflung bench recovery`."""

from collections.abc import Sequence
from pathlib import Path

from farflung.compression.codec import spec_of
from farflung.node.shadows import DIFFERENCE, FIRST, WHOLE
from farflung.protocol.manifest_sections import PipelineSpec
from farflung.sims.check import machine
from farflung.sims.recovery_clock import recovery_s
from farflung.sims.recovery_failures import events
from farflung.sims.recovery_methods import METHODS, OURS, Method
from farflung.sims.recovery_plot import plot_losses
from farflung.sims.recovery_rows import Row, Single
from farflung.sims.recovery_tiers import CI, TIERS, Tier
from farflung.sims.recovery_words import checks, number_or_dash
from farflung.training.presets import num_parameters
from farflung.training.recovery_rise import RISE_STEPS

ABOUT = {
    "none": "no failures",
    "checkpoint": "all stages go back to the last checkpoint, every {every} iterations; computed from *none*, which replays to the same bits",
    "redundant": "every stage also runs the next one's forward: nothing is lost, and an iteration takes {redundant:g} s; computed from *none*",
    "checkfree": "gradient-norm-weighted mean of the neighbours, ends copied",
    "checkfree+": "with swapped order in half of the microbatches, so that end stages have twins",
    "copy": "a copy of the stage before",
    "random": "new initial weights",
    "ours": "what live nodes do, decided by their own code: the ladder, and shadows within {share:g} % of the bytes, whole as `{whole}` (to begin a stage with) or `{first}` (to keep), and then refreshed by `{difference}` differences; its learning rate rises over the first {rise} steps after a recovery, as in all rungs of the ladder",
}


LOST = (
    "The data node is stage 0, and the embedding, the final norm and the head go with it: CheckFree's stages send each other an exact copy of them in every iteration, "
    "as published, ours has them in its shadows."
)
SAFE = "The embedding, the final norm and the head are at a data node that is never lost, as in CheckFree's experiments; all stages may be lost, the first and the last as well."


def write_page(
    folder: Path,
    methods: Sequence[Method],
    tier: Tier,
    rows: Sequence[Row],
    once: Sequence[Single],
    *,
    single_seeds: int | None = None,  # of single losses; None: as many as of whole runs
) -> None:
    """Write the page and its picture into `folder`, which is made when missing. Raises OSError."""
    lines = _lines(methods, tier, rows, once, single_seeds)
    folder.mkdir(parents=True, exist_ok=True)
    plot_losses(rows, tier, folder / f"{name_of(tier)}.png")
    (folder / f"{name_of(tier)}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def name_of(tier: Tier) -> str:
    """Of its page."""
    return "recovery" if tier.name == CI.name else f"recovery_{tier.name}"


def _lines(
    methods: Sequence[Method], tier: Tier, rows: Sequence[Row], once: Sequence[Single], single_seeds: int | None
) -> list[str]:
    clock, rates = tier.clock, ",".join(f"{100 * rate:g}" for rate in tier.rates)
    some = "" if methods == list(METHODS) else f' --methods "{",".join(method.name for method in methods)}"'
    often = (
        ""
        if tier.checkpoint_every == TIERS[tier.name].checkpoint_every
        else f" --checkpoint-every {tier.checkpoint_every}"
    )
    fewer = "" if single_seeds is None else f" --single-seeds {single_seeds}"
    return [
        "# Recovery: what the loss of a pipeline stage costs",
        "",
        f"Made by `farflung bench recovery --tier {tier.name} --seeds {tier.seeds} --rates {rates}{some}{often}{fewer} --page docs`; do not edit. Machine: {machine()}.",
        "",
        f"Tier {tier.name}: {num_parameters(tier.model):,} parameters in {tier.stages} stages of one peer each, {tier.steps} iterations of "
        f"{tier.microbatches * tier.sequences * tier.model.seq_len:,} tokens of the embedded corpus, after {tier.warm_steps} undisturbed ones that are the same for all; seeds: {tier.seeds}. Before an iteration, stages are lost: weights, moments "
        "and what their peer kept for others are overwritten, and a method recovers from what survives. All methods of a seed have the same failures, batches and learning rates. "
        f"{SAFE if tier.safe_ends else LOST} "
        "Two neighbours at once are left out of the patterns, which the published rule cannot recover, and measured by themselves below.",
        "",
        f"Iterations are trained; hours are modelled on the published clock of CheckFree's 500 M model: {clock.iteration_s:g} s per iteration, {clock.recovery_s:g} s per recovery{_our_recovery(tier)}, and a chance to fail "
        f"per iteration that comes to the stated one per hour. Ours is charged for its bytes as if nothing overlapped; writing checkpoints costs nothing here.",
        "",
        f"![Loss against iterations and modelled hours]({name_of(tier)}.png)",
        "",
        "| method | |",
        "|---|---|",
        *(f"| {method.name} | {_about(method.name, tier)} |" for method in methods),
        "",
        "| failures per stage and hour | method | stages lost | final loss, nats | gap % | ± | of each seed | iterations to target | hours | kept % | recovered % | back by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(row) for row in rows),
        "",
        "*gap*: of the final loss, to training without failures at equal iterations, seed by seed; *±*: standard deviation over the seeds. *target*: the loss that training without failures has at half of its iterations; "
        "where not all seeds got there, how many did. *kept*, *recovered*: bytes that keep copies fresh and that new peers get, over the pipeline's own (activations and gradients in 8 bits), as coded.",
        "",
        "## Loss on the way",
        "",
        f"| failures per stage and hour | method |{''.join(f' after {step} |' for step in _quarters(tier))}",
        f"|---|---|{'---|' * len(_quarters(tier))}",
        *(_on_the_way(row, tier) for row in rows),
        "",
        "Held-out loss in nats after so many iterations, mean over the seeds; hours are those of the table above, in proportion.",
        "",
        "## Goals",
        "",
        "In brackets, the limits above and below which the mean of what differs from seed to seed is with 95 % each (Student). A goal is met or missed where both are on the same side of it.",
        "",
        "| goal | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(rows, once, tier)),
        *(_single_losses(tier, once, tier.seeds if single_seeds is None else single_seeds) if once else []),
    ]


def _single_losses(tier: Tier, once: Sequence[Single], seeds: int) -> list[str]:
    return [
        "",
        "## Single losses",
        "",
        f"After {tier.midway.warm_steps} undisturbed iterations, in the middle of a run, something is lost, once; seeds: {seeds}. *jump*: loss right after the recovery, over the undisturbed; *left*: {tier.event_steps} iterations later; "
        "*behind*: iterations by which training then lags, at the speed at which it learns there. Twins are compared with training in the swapped order.",
        "",
        *(f"* **{event.name}**: {event.about}, {_numbers(event.stages)}." for event in events(tier)),
        "",
        "| lost | back by | jump, nats | left, nats | iterations behind | stages came back by |",
        "|---|---|---|---|---|---|",
        *(_single(one) for one in once),
    ]


def _about(name: str, tier: Tier) -> str:
    return ABOUT[name].format(
        every=tier.checkpoint_every,
        redundant=tier.clock.redundant_s,
        share=100 * PipelineSpec().shadows,
        whole=spec_of(WHOLE),
        first=spec_of(FIRST),
        rise=RISE_STEPS,
        difference=spec_of(DIFFERENCE),
    )


def _our_recovery(tier: Tier) -> str:
    """What ours takes, in a swarm."""
    usual, home = (recovery_s(tier, OURS, frozenset({stage})) for stage in (1, 0))
    longer = "" if home == usual else f", {home:.0f} s with three minutes of it where stage 0 is lost"
    return f" ({usual:.0f} s of ours: half a minute of silence until a stage is found lost, and a shadow's way{longer})"


def _row(row: Row) -> str:
    steps, hours = number_or_dash(row.steps_to_target, ".0f"), number_or_dash(row.hours_to_target, ".2f")
    if row.reached < row.seeds:
        steps = hours = f"{row.reached} of {row.seeds}"
    cells = [
        _rate(row),
        row.method,
        f"{row.losses:.1f}",
        number_or_dash(row.final_loss, ".4f"),
        number_or_dash(row.gap_percent, "+.2f"),
        number_or_dash(row.spread_percent, ".2f"),
        ", ".join(number_or_dash(gap, "+.2f") for gap in row.gaps),
        steps,
        hours,
        f"{row.kept_percent:.2f}",
        f"{row.recovered_percent:.2f}",
        _by(row.rungs),
    ]
    return f"| {' | '.join(cells)} |"


def _rate(row: Row) -> str:
    return f"{100 * row.rate:g} %" if row.rate else "none"


def _quarters(tier: Tier) -> list[int]:
    """Iterations, of those after which there is a loss, the next ones to a quarter, a half, three quarters and all of a run."""
    return sorted({-(-tier.steps * quarter // (4 * tier.eval_every)) * tier.eval_every for quarter in range(1, 5)})


def _on_the_way(row: Row, tier: Tier) -> str:
    losses = dict(row.curve)
    cells = [number_or_dash(losses.get(step), ".4f") for step in _quarters(tier)]
    return f"| {_rate(row)} | {row.method} | {' | '.join(cells)} |"


def _single(one: Single) -> str:
    cells = [number_or_dash(one.jump, "+.4f"), number_or_dash(one.left, "+.4f"), number_or_dash(one.setback, "+.1f")]
    return f"| {one.event} | {one.rung} | {' | '.join(cells)} | {_by(one.rungs)} |"


def _by(rungs: dict[str, int]) -> str:
    return ", ".join(f"{rung} {count}" for rung, count in rungs.items())


def _numbers(stages: Sequence[Sequence[int]]) -> str:
    return " or ".join(" and ".join(map(str, one)) for one in stages)
