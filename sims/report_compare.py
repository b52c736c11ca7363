"""Several runs side by side: their figures in one table, their losses in one picture, their use of time in one list."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farflung.sims import markup
from farflung.sims.markup import Markup, text
from farflung.sims.plots import human_bytes, plot_losses, short_number
from farflung.sims.report_run import USE_LABELS, busy_share, duration, unmet_of, uses_of, utilisation_table
from farflung.sims.scene import Scene
from farflung.sims.summary import violations
from farflung.sims.svg import SERIES

Figures = Mapping[str, Any]

ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("invariants checked", lambda f: ", ".join(map(str, sorted({one["which"] for one in f["checked"]}))) or "none"),
    ("found broken", lambda f: f"{len(violations(f))} BROKEN" if violations(f) else "none"),
    (
        "method, seed",
        lambda f: ", ".join(map(str, (f["method"] or "not told", "none" if f["seed"] is None else f["seed"]))),
    ),
    ("as expected", lambda f: "nothing was" if not f["expected"] else "NO" if unmet_of(f) else "yes"),
    ("held-out loss, nats", lambda f: "none" if f["outer_loss"] is None else f"{f['outer_loss']:.4f}"),
    ("tokens that rounds counted", lambda f: short_number(f["tokens_committed"])),
    ("tokens per second", lambda f: short_number(f["tokens_per_s"])),
    ("time", lambda f: duration(f["seconds"])),
    ("share of time in training steps", busy_share),
    ("rounds committed", lambda f: f"{f['rounds_committed']:,}"),
    ("times a peer missed one", lambda f: f"{len(f['rounds_missed']):,}"),
    ("median round", lambda f: "none" if f["median_round_s"] is None else f"{f['median_round_s']:.2f} s"),
    (
        "bits per parameter, up / down",
        lambda f: " / ".join(f"{b:.2f}" for b in f["bits_per_parameter"].values()) or "none",
    ),
    ("sent by the busiest peer", lambda f: human_bytes(max(f["bytes_sent_per_peer"].values(), default=0))),
    ("sent by all", lambda f: human_bytes(sum(f["bytes_sent_per_peer"].values()))),
    ("peers, killed, joined", lambda f: f"{f['peers']}, {f['peers_killed']}, {f['peers_joined']}"),
    ("samples trained twice", lambda f: f"{f['samples_trained_twice']:,}"),
    ("samples lost", lambda f: "not known" if f["samples_lost"] is None else f"{f['samples_lost']:,}"),
)
"""What it is, and how a run's figures say it."""


def comparison(scenes: Sequence[Scene]) -> list[Markup]:
    """Verdict and sections."""
    broken = [f"{scene.label}: {said}" for scene in scenes for said in violations(scene.figures)]
    unmet = [f"{scene.label}: {said}" for scene in scenes for said in unmet_of(scene.figures)]
    headline = f"Invariants broken: {len(broken)}." if broken else "No invariant that was checked is broken in any run."
    rows = [[text(name), *(text(say(scene.figures)) for scene in scenes)] for name, say in ROWS]
    headings = ["", *(scene.label for scene in scenes)]
    figures = markup.table(headings, rows, numbers=frozenset(range(1, len(scenes) + 1)))
    colours = [(f"--series-{n}" if n <= len(SERIES) else "--muted", s.label) for n, s in enumerate(scenes, start=1)]
    sections = [markup.verdict(headline, _best(scenes), [*broken, *unmet]), markup.section("Side by side", "", figures)]
    if any(scene.has_losses for scene in scenes):
        note = "Of the outer parameters, on text held out from training. Runs on other data or models cannot be compared by it."
        pictures = markup.figures(plot_losses(scenes))
        sections.append(markup.section("Loss", note, pictures, markup.legend(colours, mark="line")))
    sections.append(
        markup.section(
            "How peers spent their time",
            "Shares of the time in which they were there, for each class of machines.",
            utilisation_table({scene.label: scene.figures for scene in scenes}),
            markup.legend([(f"--use-{use}", USE_LABELS[use]) for use in uses_of(scene.figures for scene in scenes)]),
        )
    )
    return sections


def _best(scenes: Sequence[Scene]) -> str:
    losses = {s.label: s.figures["outer_loss"] for s in scenes if s.figures["outer_loss"] is not None}
    if not losses:
        return "No run was evaluated."
    best = min(losses, key=lambda label: losses[label])
    return f"The lowest held-out loss, {losses[best]:.4f}, is that of {best}."
