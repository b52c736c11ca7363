"""Pieces of a report's page. Text is escaped here, markup is given as `Markup`; nobody else writes a `<`."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NewType

from farflung.sims.report_style import STYLE_SHEET

Markup = NewType("Markup", str)
"""HTML that may stand in a page as it is."""


def text(said: str) -> Markup:
    """Plain text."""
    return Markup(escape(said))


def page(title: str, body: Sequence[Markup]) -> str:
    """A whole file, which fetches nothing."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE_SHEET}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def note(said: str) -> Markup:
    """A paragraph in muted ink; nothing for an empty text."""
    return Markup(f'<p class="note">{escape(said)}</p>' if said else "")


def header(title: str, said: str) -> Markup:
    """What the page is about."""
    return Markup(f"<h1>{escape(title)}</h1>{note(said)}")


def section(title: str, said: str, *body: Markup) -> Markup:
    """A part of the page under a heading."""
    return Markup(f"<section><h2>{escape(title)}</h2>{note(said)}{''.join(body)}</section>")


def folded(title: str, *body: Markup, kind: str = "") -> Markup:
    """Folded away; `kind` is a class of the style sheet."""
    opening = f'<details class="{kind}">' if kind else "<details>"
    return Markup(f"{opening}<summary>{escape(title)}</summary>{''.join(body)}</details>")


MOST_TOLD = 100
"""Of what is broken, on a page that stays light; `--json` tells all."""


def verdict(headline: str, said: str, broken: Sequence[str]) -> Markup:
    """What came of it, before anything else."""
    kind = "verdict broken" if broken else "verdict"
    told = [*broken[:MOST_TOLD], *([f"and {len(broken) - MOST_TOLD:,} more"] if len(broken) > MOST_TOLD else [])]
    items = "".join(f"<li>{escape(one)}</li>" for one in told)
    listed = f"<ul>{items}</ul>" if items else ""
    return Markup(f'<div class="{kind}"><p><strong>{escape(headline)}</strong> {escape(said)}</p>{listed}</div>')


def tiles(cells: Sequence[tuple[str, str, str]]) -> Markup:
    """(figure, what it is, kind: `good`, `bad` or empty)."""
    shown = (
        f'<div class="tile {kind}"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small, kind in cells
    )
    return Markup(f'<div class="tiles">{"".join(shown)}</div>')


def figures(drawn: Mapping[str, Markup]) -> Markup:
    """Pictures with captions, side by side where there is room."""
    shown = (f"<figure><h3>{escape(caption)}</h3>{svg}</figure>" for caption, svg in drawn.items())
    return Markup(f'<div class="figures">{"".join(shown)}</div>')


def wide(svg: Markup) -> Markup:
    """A picture that scrolls where there is no room for it."""
    return Markup(f'<div class="scroll wide" role="region" aria-label="wide picture" tabindex="0">{svg}</div>')


def legend(entries: Sequence[tuple[str, str]], *, mark: str = "dot") -> Markup:
    """(CSS variable, what has its colour)."""
    style = "border-color" if mark == "line" else "background"
    items = (
        f'<li><span class="{mark}" style="{style}: var({variable})"></span>{escape(said)}</li>'
        for variable, said in entries
    )
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def stacked_bar(shares: Sequence[tuple[str, float, str]]) -> Markup:
    """(CSS variable, share of the width, what it is)."""
    told = ", ".join(f"{name} {share:.0%}" for _, share, name in shares)
    parts = "".join(
        f'<span style="width: {100 * share:.2f}%; background: var({variable})"></span>' for variable, share, _ in shares
    )
    return Markup(f'<div class="bar" role="img" aria-label="{escape(told)}" title="{escape(told)}">{parts}</div>')


def dotted(variable: str, said: str) -> Markup:
    """Text behind a dot of its colour."""
    return Markup(f'<span class="dot" style="background: var({variable})"></span>{escape(said)}')


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Markup]],
    *,
    numbers: frozenset[int] = frozenset(),  # columns that are set to the right
    narrow: bool = False,
) -> Markup:
    """Cells are markup: `text` makes some."""

    def cells(opening: str, closing: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if column in numbers else "" for column in range(len(row)))
        return "".join(f"<{opening}{kind}>{cell}</{closing}>" for kind, cell in zip(kinds, row, strict=True))

    head = cells('th scope="col"', "th", [escape(heading) for heading in headings])
    body = "".join(f"<tr>{cells('td', 'td', row)}</tr>" for row in rows)
    width = ' class="narrow"' if narrow else ""
    return Markup(
        f'<div class="scroll"><table{width}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
