"""`docs/compression.md` and its two pictures, from the rows of one run of `farflung bench codec`."""

from collections.abc import Sequence
from pathlib import Path

from farflung.sims.check import machine
from farflung.sims.codec_plots import plot_rate_distortion, plot_speed
from farflung.sims.codec_rows import COSINE, Row, number
from farflung.sims.codec_sources import GAUSS, Source
from farflung.sims.codec_targets import RATES, checks, nearest_to_bound

PAGE, RATES_PNG, SPEED_PNG = "compression.md", "compression-rates.png", "compression-speed.png"


def write_page(folder: Path, sources: Sequence[Source], rows: Sequence[Row], skipped: Sequence[str]) -> None:
    """Write the page and its pictures into `folder`, which is made when missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_rate_distortion(rows, folder / RATES_PNG)
    plot_speed(rows, folder / SPEED_PNG)
    (folder / PAGE).write_text("\n".join(_lines(sources, rows, skipped)) + "\n", encoding="utf-8")


def _lines(sources: Sequence[Source], rows: Sequence[Row], skipped: Sequence[str]) -> list[str]:
    size = max(row.mb for row in rows)
    lines = [
        "# Compression: how few bits, how much error, how fast",
        "",
        f"Made by `farflung bench codec --page docs`; do not edit. Machine: {machine()}.",
        "",
        "A round sends what H inner steps have changed. A codec makes few bytes of it. Two numbers say how good it is: **bits per parameter** "
        "as sent, headers and tables included, and **NMSE**, the squared error as a share of the squared length: 0 is exact, and 1 is as bad as sending "
        "nothing. How much error training stands is another question: with [error feedback](feedback.md), where each peer adds what was lost to its next contribution, far more than without.",
        "",
        "What is encoded:",
        "",
        *(f"* **{source.name}**: {source.about}; {source.numel / 1e6:.1f} M elements." for source in sources),
        "",
        "## Error against bits",
        "",
        f"![NMSE against bits per parameter, all codecs, each source]({RATES_PNG})",
        "",
        "Lower left is better. No code at all can do better on independent Gaussian values than the dashed line, D = 2^(-2R). The pseudo-gradients are nearly "
        "Gaussian one by one, but not independent: a code that knows that they form matrices of low rank can pass below it.",
        "",
        *_quality_table(sources, rows),
        "",
        "Cells: bits per parameter, then NMSE. The matrices between two norms of the model are encoded as one vector, as a node does under a policy like `1d:fp32,int8(block=128)`; the norms' few weights, which then travel as fp32, are left out.",
        "",
        "### How far from the bound",
        "",
        "On Gaussian data the bound is known, so the distance can be told: the bits that a perfect code of the same error would save.",
        "",
        "| bits per parameter | nearest codec | its bits | bits above the bound |",
        "|---|---|---|---|",
        *_bound_lines(rows),
        "",
        "## Speed",
        "",
        f"![Encode and decode-add beside memcpy]({SPEED_PNG})",
        "",
        f"One core, {size:.0f} MB of Gaussian fp32. GB/s are bytes of fp32 per second of processor time, in both directions; memcpy (`copy_`) took turns with "
        "encoding and decode-adding, and all figures are medians. *Eager* is PyTorch in the place of our C kernels: what a machine without a C compiler has. Decode-add is what the owner of a part does with each contribution: decode, multiply by a weight, add.",
        "",
        *_speed_table(rows),
        "",
        "## The mean of many peers",
        "",
        "Every contribution is encoded once on its way to the owner of its part, and the mean once on its way back. The first error shrinks with the number of peers, "
        f"the second does not. Gaussian workers whose pairwise cosine is {COSINE:g}, as that of pseudo-gradients:",
        "",
        "| peers and codecs | bits, up and down | NMSE of the mean |",
        "|---|---|---|",
        *(
            f"| {row.source}: {row.codec} | {row.bits_per_param:.2f} | {number(row.nmse, '.2e')} |"
            for row in rows
            if row.encode_gbs is None
        ),
        "",
        "## Targets",
        "",
        "What was asked for, and whether this run has it. The classes of quality are about the AdamW pseudo-gradient.",
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(check.line for check in checks(rows)),
        "",
        "## Other projects",
        "",
        "hivemind's codecs get parts of 512 KiB, as its averager cuts them.",
        "",
        *dict.fromkeys(f"* could encode but not decode: {row.by} {row.codec}, {row.note}" for row in rows if row.note),
        *(f"* not measured: {text}" for text in skipped),
    ]
    return lines


def _quality_table(sources: Sequence[Source], rows: Sequence[Row]) -> list[str]:
    names = [source.name for source in sources]
    lines = ["| codec | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    by_codec: dict[str, list[str]] = {}
    for row in rows:
        if row.source in names and not row.eager:
            by_codec.setdefault(row.label, []).append(f"{row.bits_per_param:.3g}, {number(row.nmse, '.2g')}")
    return lines + [f"| {codec} | {' | '.join(cells)} |" for codec, cells in by_codec.items()]


def _bound_lines(rows: Sequence[Row]) -> list[str]:
    found = [(rate, nearest_to_bound(rows, rate)) for rate in RATES]
    return [
        f"| {rate:g} | {row.label} | {row.bits_per_param:.3g} | {number(row.bits_above_bound, '.3f')} |"
        if row is not None
        else f"| {rate:g} | none has about this rate | | |"
        for rate, row in found
    ]


def _speed_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| codec | encode GB/s | / memcpy | decode-add GB/s | / memcpy | memcpy GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.source == GAUSS:
            figures = (
                (row.encode_gbs, ".2f"),
                (row.encode_ratio, ".3f"),
                (row.decode_add_gbs, ".2f"),
                (row.decode_add_ratio, ".3f"),
                (row.memcpy_gbs, ".1f"),
            )
            lines.append(f"| {row.label} | " + " | ".join(number(value, form) for value, form in figures) + " |")
    return lines
