"""What was done to a run from outside, in the report's pictures of when: lanes above them, and marks on the rows of those to whom it was done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from farflung.sims.incidents import LASTING, Thing, whom, words
from farflung.sims.scene import Scene
from farflung.sims.svg import BAD, CARD, DONE, GOOD, INK

LANE_IN = 0.3
"""Height of a lane."""

MOST_LANES = 6
"""More of what was done at the same time has no room; the list below the picture has all of it."""

LETTER = 0.007
"""Width of a letter in parts of the picture's."""

HATCH = "////"

STRIPS = {
    "partition": "cut off from most",
    "apart": "does not reach some",
    "slow": "computes slowly",
    "delay": "messages late",
}
"""What is drawn as a thin line below a peer's row, and what the legend says of it."""

STRIP = 0.1
"""Height of one, of a row."""

NARROWEST = 0.002
"""Of the picture's width: what is shorter is drawn as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What a picture shows, and how."""

    scene: Scene
    things: Sequence[Thing]
    start: float
    """Unix seconds, as `end`."""
    end: float
    divisor: float = 1.0
    """Seconds of a unit of its axis, which counts from `start`."""

    def place(self, at: float) -> float:
        """On the axis, cut off at its ends."""
        return (min(max(at, self.start), self.end) - self.start) / self.divisor

    @property
    def width(self) -> float:
        """Of the axis."""
        return (self.end - self.start) / self.divisor

    @property
    def seen(self) -> list[Thing]:
        """What lies in it."""
        return [thing for thing in self.things if thing.start <= self.end and thing.end >= self.start]


def lanes_of(frame: Frame, *, peers_too: bool) -> list[list[tuple[Thing, str]]]:
    """What lasted and was done to the network, with its words, so that nothing of a lane overlaps. `peers_too`: and what was done to peers."""
    lanes: list[list[tuple[Thing, str]]] = []
    free: list[float] = []
    for thing in frame.seen:
        if thing.what not in LASTING or not (peers_too or thing.what == "partition" or not thing.peers):
            continue
        told = f"{words(thing)}: {whom(thing, frame.scene)}" if thing.peers else words(thing)
        left = frame.place(thing.start)
        number = next((n for n, at in enumerate(free) if at <= left), len(free))
        if number == MOST_LANES:
            continue
        if number == len(free):
            lanes.append([])
            free.append(0.0)
        lanes[number].append((thing, told))
        free[number] = max(frame.place(thing.end), left + LETTER * (len(told) + 1) * frame.width)
    return lanes


def make_axes(
    figure: Figure, lanes: Sequence[object], height_in: float, name: str = "network"
) -> tuple[Axes | None, Axes]:
    """An axis for lanes, if there are any, with their name, above one for the picture proper, which is so high without labels."""
    if not lanes:
        return None, figure.subplots()
    top, axis = figure.subplots(2, 1, sharex=True, height_ratios=[LANE_IN * len(lanes), height_in])
    top.set_ylim(len(lanes) - 0.45, -0.55)
    top.set_yticks([0], [name])
    top.tick_params(axis="both", length=0, labelcolor=INK, labelbottom=False)
    top.grid(visible=False)
    top.spines[:].set_visible(False)
    return top, axis


def draw_lanes(top: Axes, axis: Axes, frame: Frame, lanes: Sequence[Sequence[tuple[Thing, str]]]) -> None:
    """Bars with words above, and bands through the picture for what was done to the network."""
    for row, lane in enumerate(lanes):
        for thing, told in lane:
            left, right, colour = frame.place(thing.start), frame.place(thing.end), DONE[thing.what]
            top.barh(row, right - left, left=left, height=0.72, color=colour, alpha=0.3, linewidth=0)
            beyond = left + LETTER * len(told) * frame.width > frame.width
            at, side = (frame.width, "right") if beyond else (left, "left")
            top.annotate(told, (at, row), (-4 if beyond else 4, 0), textcoords="offset points", va="center", ha=side)
            if thing.peers and thing.what != "partition":
                continue
            axis.axvspan(left, right, color=colour, alpha=0.13, linewidth=0, zorder=0)
            for edge in (thing.start, thing.end):
                if frame.start < edge < frame.end:
                    axis.axvline(frame.place(edge), color=colour, linewidth=0.9, linestyle=(0, (3, 2)), zorder=4)


def draw_on_rows(axis: Axes, frame: Frame, peers: Sequence[str], height: float) -> None:
    """Pauses over the rows of `peers`, which are so high, thin lines below them, and what happened at once."""
    row_of = {peer: row for row, peer in enumerate(peers)}
    for thing in frame.seen:
        left = frame.place(thing.start)
        width = max(frame.place(thing.end) - left, NARROWEST * frame.width)
        for row in (row_of[peer] for peer in thing.peers if peer in row_of):
            if thing.what == "pause":
                bar = axis.barh(row, width, left=left, height=height, color=CARD, linewidth=0.8, zorder=3)
                for patch in bar:
                    patch.set(edgecolor=DONE["pause"], hatch=HATCH)
            elif thing.what in STRIPS:
                level = row + height / 2 + 0.8 * STRIP
                axis.barh(level, width, left=left, height=STRIP, color=DONE[thing.what], zorder=3)
    _marks(axis, frame, row_of)


def _marks(axis: Axes, frame: Frame, row_of: Mapping[str, int]) -> None:
    """What happened at once, with a word where there is room for it."""
    free = dict.fromkeys(row_of, 0.0)
    for thing in frame.seen:
        if thing.start < frame.start or thing.start == frame.scene.run.started:
            continue  # clocks that are off from the beginning are no news
        for number, peer in enumerate(thing.peers):
            mark = _mark(thing, number)
            if peer not in row_of or mark is None:
                continue
            word, shape, colour, ink = mark
            at, row = frame.place(thing.start), row_of[peer]
            axis.plot(at, row, marker=shape, color=colour, markersize=9, markeredgecolor=CARD, zorder=7)
            room = LETTER * (len(word) + 2) * frame.width
            before = thing.what == "join"  # behind it is what the peer does
            if free[peer] <= (at - room if before else at):
                axis.annotate(
                    word,
                    (at, row),
                    (-8 if before else 8, 0),
                    textcoords="offset points",
                    ha="right" if before else "left",
                    va="center",
                    color=ink,
                    bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1.0},
                    zorder=6,
                )
            free[peer] = at if before else at + room


def _mark(thing: Thing, number: int) -> tuple[str, str, str, str] | None:
    """Word, shape, its colour, the word's; `number`: of the peer among those to whom it was done. None for what is not marked."""
    match thing.what:
        case "kill":
            return "killed", "X", BAD, BAD
        case "power":
            return "no power", "X", BAD, BAD
        case "join":
            return "joins", ">", GOOD, INK
        case "skew":
            return f"clock {thing.much[number]:+.3g} s", "d", INK, INK
        case _:
            return None


def handles(frame: Frame, *, on_rows: bool) -> list[Patch]:
    """Of the legend: what of it is drawn on rows."""
    seen = {thing.what for thing in frame.seen if thing.peers} if on_rows else set()
    found = [Patch(facecolor=CARD, edgecolor=DONE["pause"], hatch=HATCH, label="stopped")] if "pause" in seen else []
    return found + [Patch(color=DONE[what], label=label) for what, label in STRIPS.items() if what in seen]
