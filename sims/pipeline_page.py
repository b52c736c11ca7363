"""`docs/pipeline.md` and its pictures, from one run of `farflung bench pipeline`."""

from collections.abc import Sequence
from pathlib import Path

from farflung.sims.check import Check, machine
from farflung.sims.pipeline_figures import (
    DEATH_HEADINGS,
    NOTES,
    USED_HEADINGS,
    Measured,
    codec_cells,
    death_cells,
    plan_cells,
    skipping_cells,
    used_cells,
)
from farflung.sims.pipeline_measure import PlanFigures
from farflung.sims.pipeline_plot import plot_losses, plot_steps
from farflung.sims.pipeline_skipping import SkippingRow, SkippingTask
from farflung.sims.pipeline_task import FULL, SKIPPING, BenchTask
from farflung.sims.recovery_words import number_or_dash
from farflung.training.presets import num_parameters

PAGE, STEP_PICTURE, LOSS_PICTURE = "pipeline.md", "pipeline-step.png", "pipeline-loss.png"

MOST_ERROR_PERCENT = 10.0
"""Of the simulation."""
MOST_TIMES_NORMAL = 1.5
"""Of a step in which a peer is lost."""


def write_page(folder: Path, task: BenchTask, found: Measured, rows: Sequence[SkippingRow]) -> None:
    """Write the page and its pictures into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_steps(found.ran, found.simulated, folder / STEP_PICTURE)
    plot_losses(found.plans, task.target, folder / LOSS_PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(task, found, rows)) + "\n", encoding="utf-8")


def checks(found: Measured) -> list[Check]:
    """What the bench is held to."""
    worst = max((*found.plans, *found.codecs[1:]), key=lambda one: abs(one.ratio - 1.0))
    slowest = max(found.deaths, key=lambda one: one.times_normal)
    full, skipping = (next(one for one in found.plans if one.plan == name) for name in (FULL, SKIPPING))
    sooner: bool | None = None
    if full.seconds_to_target is not None and skipping.seconds_to_target is not None:
        sooner = skipping.seconds_to_target < full.seconds_to_target
    return [
        Check(
            target=f"a step takes what is simulated, within {MOST_ERROR_PERCENT:g} %",
            measured=f"{100 * (worst.ratio - 1):+.1f} % at worst ({worst.plan}, {worst.codec})",
            met=abs(worst.ratio - 1.0) <= MOST_ERROR_PERCENT / 100,
        ),
        Check(
            target="skipping is sooner at the target than full routed",
            measured=f"{number_or_dash(skipping.seconds_to_target, '.0f')} s and {number_or_dash(full.seconds_to_target, '.0f')} s",
            met=sooner,
        ),
        Check(
            target=f"a step in which a peer is lost takes at most {MOST_TIMES_NORMAL:g} times as long",
            measured=f"{slowest.times_normal:.2f} times at worst ({slowest.plan}, peer {slowest.peer}, {slowest.moment})",
            met=slowest.times_normal <= MOST_TIMES_NORMAL,
        ),
        Check(
            target="every microbatch of a living data node comes home",
            measured=f"{sum(one.cut for one in found.deaths)} did not",
            met=not any(one.cut for one in found.deaths),
        ),
    ]


def _lines(task: BenchTask, found: Measured, rows: Sequence[SkippingRow]) -> list[str]:
    skipped = SkippingTask()
    ups = [rate / 125_000 for rate in task.up_bytes_per_s]
    ways = [1000 * one for a, row in enumerate(task.latency_s) for b, one in enumerate(row) if a != b]
    forwards = [1000 * one for one in task.network.layer_s]
    return [
        "# Pipelines: steps of real processes, and what skipping is worth",
        "",
        f"Made by `farflung bench pipeline --page docs`; do not edit. Machine: {machine()}.",
        "",
        f"{task.peers} processes on this machine, each with the real engine, hold {task.model.num_layers} stages of one layer, two peers each ({num_parameters(task.model):,} parameters). "
        f"Uplinks of {min(ups):.0f} to {max(ups):.0f} Mbit/s, {min(ways):.0f} to {max(ways):.0f} ms one way, forwards of {min(forwards):.0f} to {max(forwards):.0f} ms, drawn with seed {task.seed}; "
        f"a step has {task.microbatches} microbatches of {task.tokens} tokens. {NOTES[0]}",
        "",
        "*full columns*: every microbatch goes down the column of its data node (DT-FM's assignment). *full routed*: all stages, by searched routes. *skipping*: "
        f"{task.visits} of {task.model.num_layers} stages, by searched routes (SkipPipe's 33 %). The two routed plans are trained with the same batches and the same inner optimiser (Muon at {task.lr:g}, chosen for the full one); peers of a stage average their gradients in each step. "
        f"*to the target*: until the held-out loss of the whole model is {task.target:g} nats per byte, with learning and all steps counted.",
        "",
        "| plan | simulated s | measured s | ratio | learning s | utilisation (least to most) | simulated | late operations | steps to the target | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_plan(one) for one in found.plans),
        "",
        f"\\{NOTES[1]} *late*: operations for which this machine was slower than what it rehearses.",
        "",
        "Utilisation of each peer, its seconds in operations over the step:",
        "",
        _line(USED_HEADINGS),
        "|" + "---|" * len(USED_HEADINGS),
        *(_line(cells) for cells in used_cells(found.plans)),
        "",
        f"![Held-out loss against time]({LOSS_PICTURE})",
        "",
        f"![One step of the plan that skips, measured and simulated]({STEP_PICTURE})",
        "",
        "## Goals",
        "",
        "| goal | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(found)),
        "",
        "## Bytes by codec",
        "",
        f"Steps of *{FULL}* with the same codec both ways; {NOTES[2]}",
        "",
        "| codec | bytes a token and boundary | simulated s | measured s | ratio |",
        "|---|---|---|---|---|",
        *(_codec(one) for one in found.codecs),
        "",
        "`subspace` throws away most of a model that was not made for it: its row is about bytes and time only.",
        "",
        "## A peer is killed in a step",
        "",
        "SIGKILL of each stage peer in a step: of one in the middle of the first route at three moments, of the others at one of these by turns, and of a data node; then it comes back. *simulated without it*: a step in which the other peer of "
        "that stage does everything from the beginning, with as many slots again, which is what losing half of a stage costs by itself. *rerouted*: microbatches that went to the other peer, or on without that stage (*shortened*: where routes skip, one that was on its way and late). "
        "*void*: microbatches of the data node that was killed; they count nowhere, and the other data node's go on.",
        "",
        _line(DEATH_HEADINGS),
        "|" + "---|" * len(DEATH_HEADINGS),
        *(_line(death_cells(one)) for one in found.deaths),
        "",
        "## Stages left out at inference",
        "",
        f"A model of {skipped.stages} stages of one layer ({num_parameters(skipped.model):,} parameters), trained in one process for {skipped.steps} steps of {skipped.microbatches} x {skipped.batch} sequences of {skipped.model.seq_len} bytes, with whole routes or with random routes that skip. "
        "Perplexity per byte on held-out windows; in all choices of stages but the first: mean (least to most), and the increase of the mean over the whole model.",
        "",
        f"| trained | whole | {' | '.join(f'{share} % left out' for share in rows[0].left_out)} |",
        f"|---|---|{'---|' * len(rows[0].left_out)}",
        *(_line(skipping_cells(row)) for row in rows),
    ]


def _plan(one: PlanFigures) -> str:
    *figures, steps, seconds = plan_cells(one)
    return _line([*figures, f"{one.late_percent:.1f} %", steps, seconds.replace("*", "\\*")])


def _codec(one: PlanFigures) -> str:
    codec, *figures = codec_cells(one)
    return _line([f"`{codec}`", *figures])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
