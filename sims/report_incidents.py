"""The list of what was done to a run from outside."""

from farflung.sims import markup
from farflung.sims.incidents import things_done, whom, words
from farflung.sims.markup import Markup, text
from farflung.sims.scene import Scene

FEW_ROWS = 12
"""A longer list is folded away."""

MOST_ROWS = 200
"""What came after so many is in `run.json`."""


def list_things(scene: Scene) -> Markup:
    """A table, in the order in which things began; nothing where nothing was done."""
    things = things_done(scene.run)
    if not things:
        return Markup("")
    rows = []
    for thing in things[:MOST_ROWS]:
        since, until = (f"{at - scene.run.started:,.1f} s" for at in (thing.start, thing.end))
        cells = since, until if thing.end > thing.start else "", words(thing), whom(thing, scene)
        rows.append([text(cell) for cell in cells])
    listed = markup.table(["from", "until", "what was done", "whom"], rows, numbers=frozenset({0, 1}), narrow=True)
    if len(rows) <= FEW_ROWS:
        return listed
    title = "All that was done" if len(rows) == len(things) else f"The first {MOST_ROWS} of {len(things)} things done"
    return markup.folded(title, listed)
