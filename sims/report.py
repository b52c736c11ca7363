"""Reports of runs: `report.html`, one page that fetches nothing, and `report.json` with the same: the figures, and the series that are plotted. Of a page
that is called otherwise, as `NAME.html`, the latter are in `NAME.report.json`: what is called `run.json` or `result.json` is a run's own.

Made from run folders (`facts.load_folder`) at any time after the run, by `farflung sim report` and by whoever ran the
nodes. Several runs are compared first, then each is told as it would be alone.
"""

import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from farflung.protocol.errors import ConfigError
from farflung.sims import markup
from farflung.sims.facts import load_folder
from farflung.sims.report_compare import comparison
from farflung.sims.report_run import run_sections, run_summary
from farflung.sims.scene import Scene
from farflung.sims.series import series_of

REPORT = "report.html"
"""In the folder of a run."""

OWN = frozenset({"run.json", "result.json", "failure.json"})
"""In the folder of a run, from whoever ran it, and with the ending of a trace."""


def load_scenes(folders: Sequence[Path]) -> list[Scene]:
    """The runs in these folders, labelled with the folders' names when there are several.

    Raises ConfigError for a folder without a run, or damaged files.
    """
    labels = [""] if len(folders) == 1 else _labels(folders)
    scenes = []
    for place, (folder, label) in enumerate(zip(folders, labels, strict=True)):
        run, events = load_folder(folder)
        scenes.append(Scene(events=events, run=run, label=label, place=place))
    return scenes


def _labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, numbered where two are the same, as no other is called."""
    names = [folder.resolve().name for folder in folders]
    taken = set(names)
    labels = []
    for number, name in enumerate(names, start=1):
        label = name
        if names.count(name) > 1:
            label = next(other for n in count(number) if (other := f"{name} {n}") not in taken)
            taken.add(label)
        labels.append(label)
    return labels


def report_folder(folder: Path) -> dict[str, Any]:
    """Write the report of the run in `folder` into it; returns the figures (`summary.summarise`). Raises ConfigError, OSError."""
    return write_report(load_scenes([folder]), folder / REPORT)


def figures_file(page: Path) -> Path:
    """Where the figures and series of a page go: beside it, under a name that nothing else of a run has."""
    return page.with_suffix(".json" if page.name == REPORT else ".report.json")


def check_names(page: Path, trace: Path | None, *, printed: bool) -> None:
    """Raise ConfigError for names under which a report would overwrite what a run is told from, or itself; `printed`: its figures go to standard output, too."""
    if page.suffix != ".html":
        raise ConfigError(f"--out {page}: a page ends in .html, so that it takes the place of nothing else; name it so")
    figures = figures_file(page)
    if printed and _is_standard_output(figures):
        raise ConfigError(f"{figures} is written beside the page: send what --json prints to another file")
    if trace is None:
        return
    if trace.suffix != ".json" or trace.name in OWN:
        raise ConfigError(
            f"--trace {trace}: a trace ends in .json, and is not called as a run's own files; name it otherwise"
        )
    if trace.resolve() == figures.resolve():
        raise ConfigError(f"--trace {trace}: the page's figures are written there; name it otherwise")


def _is_standard_output(file: Path) -> bool:
    """Whether a shell sends there what we print."""
    try:
        return os.path.samestat(file.stat(), os.fstat(sys.stdout.fileno()))
    except OSError:  # there is no such file, or no file behind standard output
        return False


def write_report(scenes: Sequence[Scene], out: Path) -> dict[str, Any]:
    """Write the page `out`, and its figures and series as JSON beside it; returns the figures: of one run, or {label: figures}. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    told = {scene.label: scene.figures | {"series": series_of(scene)} for scene in scenes}
    figures_file(out).write_bytes(_lines(told[scenes[0].label] if len(scenes) == 1 else told))
    out.write_text(render(scenes), encoding="utf-8")
    return figures_of(scenes)


def _lines(told: dict[str, Any]) -> bytes:
    """As JSON, a key a line: series are long, and nobody reads them number by number."""
    pairs = (msgspec.json.encode(key) + b": " + msgspec.json.encode(value) for key, value in told.items())
    return b"{\n" + b",\n".join(pairs) + b"\n}\n"


def figures_of(scenes: Sequence[Scene]) -> dict[str, Any]:
    """What `--json` prints."""
    return scenes[0].figures if len(scenes) == 1 else {scene.label: scene.figures for scene in scenes}


def render(scenes: Sequence[Scene]) -> str:
    """The page. Everything that came from nodes is escaped."""
    if len(scenes) == 1:
        scene = scenes[0]
        top = markup.header(f"Swarm {scene.run.name}", scene.run.description)
        return markup.page(f"farflung: {scene.run.name}", [top, run_summary(scene), *run_sections(scene)])
    top = markup.header(f"{len(scenes)} runs compared", ", ".join(scene.label for scene in scenes))
    each = [
        markup.folded(
            f"{scene.label}: swarm {scene.run.name}",
            markup.note(scene.run.description),
            run_summary(scene),
            *run_sections(scene),
            kind="run",
        )
        for scene in scenes
    ]
    return markup.page(f"farflung: {len(scenes)} runs", [top, *comparison(scenes), *each])
