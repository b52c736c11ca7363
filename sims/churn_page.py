"""`docs/churn.md` and its picture, from one run of `farflung bench churn`."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from farflung.sims import png
from farflung.sims.check import machine
from farflung.sims.churn_rows import HEADINGS, Churn, cells, checks
from farflung.sims.churn_swarms import (
    EQUAL,
    LATENCY_MS,
    LINKS_MBIT_S,
    PER_STEPS,
    REPLACED,
    REPLACED_SHARE,
    SPEEDS,
    UNEQUAL,
    WAITING,
    Task,
    replacements,
)
from farflung.sims.plots import WIDTH_IN
from farflung.sims.svg import INK
from farflung.training.methods import DEFAULT
from farflung.training.presets import num_parameters, preset
from farflung.training.tokenizer import ByteTokenizer

PAGE, PICTURE = "churn.md", "churn.png"
COLOURS = {EQUAL: png.COLOURS[INK], UNEQUAL: "#2a6fd0", WAITING: "#b98200", REPLACED: "#c8323a"}


def write_page(folder: Path, task: Task, found: Churn) -> None:
    """Write the page and its picture into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(found, folder / PICTURE)
    (folder / PAGE).write_text("\n".join(_lines(task, found)) + "\n", encoding="utf-8")


def plot(found: Churn, file: Path) -> None:
    """Loss against tokens, a line for each swarm and seed. Write the PNG; raises OSError."""
    with matplotlib.rc_context(png.style()):
        figure = Figure(figsize=(WIDTH_IN, 4.4), layout="constrained")
        axes = figure.subplots()
        for row in found.rows:
            for seed, one in enumerate(row.played):
                tokens, losses = zip(*one.curve, strict=True)
                axes.plot(
                    [count / 1e6 for count in tokens],
                    losses,
                    "--" if seed else "-",
                    color=COLOURS[row.swarm],
                    linewidth=1.0,
                    label="" if seed else row.swarm.name,
                )
        axes.set_yscale("log")
        axes.set_xlabel("millions of tokens that rounds counted (dashed: further seeds)")
        axes.set_ylabel("held-out loss, nats per byte")
        axes.legend()
        png.save(figure, file)


def _lines(task: Task, found: Churn) -> list[str]:
    """The page."""
    seeds = len(found.rows[0].played)
    parameters = num_parameters(preset(task.preset, vocab_size=ByteTokenizer().vocab_size, seq_len=task.seq_len))
    gone = len(replacements(len(SPEEDS), task, 0))
    return [
        "# Unequal machines, and peers that come and go",
        "",
        f"Made by `farflung bench churn --seeds {seeds} --page docs`; do not edit. Machine: {machine()}.",
        "",
        f"Four real nodes under virtual time train {parameters:,} parameters by the method `default` (H = {DEFAULT.inner_steps} in {DEFAULT.fragments} fragments, `{DEFAULT.codec}` for contributions and `{DEFAULT.mean_codec}` for means, Muon at {task.lr:g}, one rate after {task.warmup_steps} steps of all peers together, "
        f"from random weights); a step has {task.batch_tokens:,} tokens and takes {task.step_s:g} s at speed 1. Links of {', '.join(f'{rate:g}' for rate in LINKS_MBIT_S)} Mbit/s, {4 * LATENCY_MS:g} ms from a peer to another and back. "
        f"Each swarm has {task.duration_s:g} s; evaluating takes nodes no time.",
        "",
        f"* *equal*: four machines of the same speed, as fast together as the others, with rounds after about as many tokens (H = {EQUAL.inner_steps}).",
        "* *unequal*: a round is due when the fastest has made its steps, and everybody brings what it has.",
        "* *unequal, waiting*: everybody makes as many steps, and the round waits for the slowest (training overlaps all the same).",
        f"* *unequal, replaced*: {REPLACED_SHARE:.0%} of the peers per {PER_STEPS} steps of the fastest, {gone} in this run: one is killed, and a new one without any state comes at once to the same machine.",
        "",
        f"![Loss against tokens]({PICTURE})",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row, found)) + " |" for row in found.rows),
        "",
        "*computing*: time in inner steps, machine by machine, the least of all seeds, newcomers' waiting for their state included. *gap*: of held-out losses at equal tokens, mean over the evaluations in the last third of the tokens that both swarms reached, seed by seed; "
        "*± equal's seeds*: by which the same of the equal swarm's seeds is apart. *missed*: contributions that came too late for their round. *dropped steps*: whose progress came into no round. Figures of seeds stand behind each other.",
        "",
        "## Goals",
        "",
        "| goal | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(found)),
    ]
