"""`docs/quality_ci.md` and its like, with a picture each, from the rows of one run of `farflung bench quality`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from farflung.sims.quality_methods import DELAY_STEPS, Method
from farflung.sims.quality_plot import CEILING, frontier, plot_frontier
from farflung.sims.quality_rows import Row
from farflung.sims.quality_runs import EXTENDED_BY, EXTENSIONS
from farflung.sims.quality_tiers import EMBEDDED, Tier
from farflung.sims.quality_words import budget, checks, settings
from farflung.training.methods import LONG_RUN
from farflung.training.presets import num_parameters

PRODUCTS = {
    "fp32": "",
    "tf32": "; matrix products are done in TF32",
    "bf16": "; matrix products are done in bf16",
}


def write_page(
    folder: Path,
    tier: Tier,
    rows: Sequence[Row],
    methods: Mapping[str, Method],  # of the rows, by name
    num_samples: int,  # of the data set
    options: str = "",  # of the command, beside the tier
) -> None:
    """Write the page of the tier, `quality_TIER.md`, and its picture into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"quality_{tier.name}.md"
    plot_frontier(rows, tier, page.with_suffix(".png"))
    page.write_text("\n".join(_lines(tier, rows, methods, num_samples, options)) + "\n", encoding="utf-8")


def _text(tier: Tier) -> str:
    return "the embedded corpus" if tier.data == EMBEDDED else f"`{tier.data}`"


def _lines(tier: Tier, rows: Sequence[Row], methods: Mapping[str, Method], num_samples: int, options: str) -> list[str]:
    epochs = tier.steps * tier.batch / num_samples
    return [
        "# Quality: what training loses when peers say little to each other",
        "",
        f"Made by `farflung bench quality --tier {tier.name}{options} --page docs`; do not edit. {_machines(rows)}",
        "",
        f"Tier {tier.name}: {num_parameters(tier.model):,} parameters, {tier.num_tokens:,} tokens of {_text(tier)}, {epochs:.2g} times all of it. "
        f"All methods see the same tokens in the same order, {tier.batch * tier.model.seq_len:,} a step, split by {tier.peers} peers. The first "
        f"{tier.warm_steps} of {tier.steps} steps are synchronous, and no method's bytes count them. Peers share a process; the mathematics, the codecs and the payloads are real{PRODUCTS[tier.precision]}. "
        f"{_how_rates_are_chosen(tier)}.",
        "",
        f"![Gap against bytes](quality_{tier.name}.png)",
        "",
        f"The line joins what no other method beats in both, of those up to {CEILING:.0f} %. Larger gaps stand at the upper edge, with their number.",
        "",
        "| method | inner | H | loss, nats | gap % | ± DP | gap % to AdamW | recovered | bits | fewer bytes | peak bits |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(row) for row in rows),
        "",
        "*gap*: of the loss, against data-parallel training with the same inner optimiser, seed by seed. "
        f"*± DP*: by which the seeds of that data-parallel training are apart, in %. {_spreads(rows)} A difference smaller than the largest of these says nothing, and two seeds may agree by chance. "
        "*recovered*: 0 is a peer alone with its share of the batch, 1 is data-parallel training. *bits*: sent and received by a peer, per parameter and step, as coded, headers included. "
        "*fewer bytes*: than a bf16 ring all-reduce in every step. *peak bits*: bits in the busiest step but the last, divided by the steps that they may take.",
        "",
        "## Goals",
        "",
        "| goal | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(rows)),
        "",
        *budget(rows, tier),
        "A goal is met or missed where all seeds say so; where they differ, their mean says nothing. What was tried to meet them, and what longer runs come to, is in [the log of experiments](experiments.md). Published gaps of Streaming DiLoCo in 4 bits, two peers, H = 30: +0.6 % at 35 M parameters, 0.0 % at 500 M; "
        "gaps shrink with the model, and these models are small.",
        "",
        "## The frontier",
        "",
        "Methods that no other beats in both, from many bytes to few:",
        "",
        f"- gap to data-parallel training with the same inner optimiser: {_frontier(rows, 'gap_percent_same_inner')}.",
        f"- gap to data-parallel AdamW: {_frontier(rows, 'gap_percent_adamw')}.",
        "",
        "## Settings and learning rates",
        "",
        f"What is published is set as published{', but for `diloco muon`, which has the momentum of `default`' if 'diloco muon' in methods else ''}, and of it {'only the inner learning rate' if tier.tunes else 'nothing'} is tuned. The settings of `default` and `thrifty` are ours, and were found by "
        f"runs of tier ci's model with the first two seeds, of up to {LONG_RUN:,} steps, by losses of both halves: a comparison that is fair to the others looks at further seeds. Behind each rate the loss on the half for choosing{', the chosen one in bold' if tier.tunes else ''}. "
        f"Their means are applied {DELAY_STEPS} steps after what they are made of was sent: in swarms of the shipped scenarios half of the means come sooner, and nine in ten by then or a little later. Of two peers "
        "a mean is what both have sent, as it was coded; of more it is coded once more. "
        + (
            f"While the best is at an edge of its grid, another one is tried beyond, times or over {EXTENDED_BY:g}, {EXTENSIONS} at most; a best one that is at an edge still may not be the best there is."
            if tier.tunes
            else "Other rates were not tried."
        ),
        "",
        "| method | settings | seeds | learning rates |",
        "|---|---|---|---|",
        *(f"| {row.method} | {settings(methods[row.method])} | {row.seeds} | {_grid(row)} |" for row in rows),
    ]


def _how_rates_are_chosen(tier: Tier) -> str:
    if tier.tunes:
        return "A method's inner learning rate is the best of a grid on one half of the held-out windows with the first seed, and its loss is the mean over its seeds on the other half"
    return "A method's inner learning rate is the middle one of its grid, not tuned here, and its loss is the mean over its seeds on the second half of the held-out windows"


def _machines(rows: Sequence[Row]) -> str:
    found = sorted({machine for row in rows for machine in row.machines})
    return f"Machine{'s' if len(found) > 1 else ''}: {'; '.join(found)}."


def _row(row: Row) -> str:
    cells = [
        (row.eval_loss, ".4f"),
        (row.gap_percent_same_inner, "+.2f"),
        (row.dp_spread_percent, ".2f"),
        (row.gap_percent_adamw, "+.2f"),
        (row.recovered, ".2f"),
        (row.bits_per_param_per_step or None, ".4g"),
        (row.bytes_ratio_vs_ddp_bf16, ",.0f"),
        (row.peak_bits_per_step or None, ".3g"),
    ]
    numbers = " | ".join("" if value is None else f"{value:{form}}" for value, form in cells)
    return f"| {row.method} | {row.inner} | {'' if row.H is None else row.H} | {numbers} |"


def _frontier(rows: Sequence[Row], field: str) -> str:
    shown = [row for row in rows if row.bytes_ratio_vs_ddp_bf16 and getattr(row, field) is not None]
    named = {(row.bytes_ratio_vs_ddp_bf16 or 0.0, float(getattr(row, field))): row.method for row in reversed(shown)}
    return ", ".join(f"{named[ratio, gap]} {gap:+.2f} % ({ratio:,.0f} times)" for ratio, gap in frontier(list(named)))


def _spreads(rows: Sequence[Row]) -> str:
    spreads = {row.inner: row.dp_spread_percent for row in rows if row.H is None}
    found = [f"{spread:.2f} % with {inner}" for inner, spread in spreads.items() if spread is not None]
    return f"The seeds of data-parallel training are apart by {' and '.join(found)}."


def _grid(row: Row) -> str:
    shown = [f"{lr:g}: {'diverged' if loss is None else f'{loss:.4f}'}" for lr, loss in row.grid]
    return ", ".join(f"**{text}**" if lr == row.lr else text for text, (lr, _) in zip(shown, row.grid, strict=True))
