"""`farflung sim bandwidth`: the table on the terminal or as JSON, the figure and the page `docs/bandwidth.md`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from farflung.sims.bandwidth import PEERS, SHARE
from farflung.sims.bandwidth_page import write_page
from farflung.sims.bandwidth_plot import plot_utilisation
from farflung.sims.bandwidth_table import THRESHOLDS, Row, agreement, all_rows, differences, grid
from farflung.sims.outputs import check_outputs


def run_bandwidth(*, as_json: bool = False, plot: Path | None = None, page: Path | None = None) -> dict[str, Any]:
    """Compute, show, draw into the PNG `plot`, write the page into the folder `page`; returns what `--json` prints.

    Raises ConfigError when a file cannot be written.
    """
    check_outputs(files=[plot], folders=[page])
    rows = all_rows()
    found = agreement(rows)
    plain = {
        "peers": PEERS,
        "share": SHARE,
        "thresholds": list(THRESHOLDS),
        "speeds_gbit_s": [float(speed) for speed in grid()],
        "rows": [asdict(row) for row in rows],
        "agreement": asdict(found) | {"share": found.share},
        "differences": differences(rows),
    }
    if as_json:
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(rows, Console())
    if plot is not None:
        plot_utilisation(rows, plot)
    if page is not None:
        write_page(page, rows)
    return plain


def _show(rows: Sequence[Row], console: Console) -> None:
    table = Table(
        title="Gbit/s for a compute utilisation of ...; in brackets: points of the grid from the published figure",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("method", no_wrap=True)
    for threshold in THRESHOLDS:
        table.add_column(f"{threshold:.0%}", justify="right", no_wrap=True)
    before = rows[0].model
    for row in rows:
        if row.model != before:
            table.add_section()
            before = row.model
        style = "bold" if row.published_gbit_s is None else ""
        table.add_row(row.model, row.method, *_cells(row), style=style)
    console.print(table)
    found = agreement(rows)
    console.print(
        f"{found.within_one} of {found.entries} published entries within one point of the grid, {found.exact} exactly:",
        style="green",
        highlight=False,
    )
    for said in differences(rows):
        console.print(f"  {said}", style="dim", highlight=False)


def _cells(row: Row) -> list[str]:
    off = row.points_off or (0,) * len(THRESHOLDS)
    return [
        ("none" if speed is None else f"{speed:.3g}") + (f" ({points:+d})" if points else "")
        for speed, points in zip(row.gbit_s, off, strict=True)
    ]
