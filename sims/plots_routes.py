"""The report's picture of routes: where the microbatches of one step went, on a map where the peers' regions are known, else stage by stage.

Simulations know where their peers are; of real ones it is what their people say (`join --region`). A region that the map does not have stands beside it, or in a
circle where it has none of them: nobody is put where nobody said that it is.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from farflung.sims.map_places import CHAR_IN, LINE_IN, Point, in_a_column, label_places, on_a_circle, spread
from farflung.sims.markup import Markup
from farflung.sims.pipeline_log import LoggedStep
from farflung.sims.plots import WIDTH_IN
from farflung.sims.plots_pipeline import stage_of, window_steps
from farflung.sims.scene import Scene
from farflung.sims.svg import CARD, GRID, INK, MUTED, SERIES, STYLE, to_svg
from farflung.sims.world import PLACES, coasts, name_on_map

MOST_ROUTES = 24
"""That can be told apart, more or less."""

LEAST_DEGREES = 12.0
"""Of latitude that a map shows at least."""

WIDEST, TALLEST = 2.6, 1.7
"""Of a map: its width in heights, at most and at least."""

MARGIN_IN = 0.5
"""Around the places on a map."""

COLUMN_IN = 0.55
"""Between two peers of a stage."""

CIRCLE_IN = 4.2
"""Height of the circle of regions."""

BESIDE, UNTOLD = "not on the map", "region not told"

DASHES = (0, (3, 3))


def shown_step(scene: Scene) -> LoggedStep:
    """The first one of the Gantt chart: before the trouble, if that shows any, with routes as they were planned."""
    return window_steps(scene)[0]


def plot_routes(scene: Scene) -> Markup:
    """Peers are dots with the number of their stage; lines are microbatches, dashed where the last output goes home to the loss."""
    step = shown_step(scene)
    stages = stage_of([step])
    peers = sorted(stages, key=lambda one: (stages[one], scene.names.get(one, one)))
    labels = _labels(scene, peers)
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axis.set_axis_off()
        if not labels:
            places, height = _by_stages(axis, stages, [(peer, scene.names.get(peer, peer[:12])) for peer in peers])
        elif any(label in PLACES for label in labels.values()):
            places, height = _on_a_map(axis, labels)
        else:
            places, height = _in_a_circle(axis, labels)
        figure.set_size_inches(WIDTH_IN, height)
        axis.set_xlim(0.0, WIDTH_IN)
        axis.set_ylim(0.0, height)
        for number, (microbatch, route) in enumerate(list(step.routes.items())[:MOST_ROUTES]):
            way = [places[step.timeline.peers[place]] for place in route]
            bend = (0.08 + 0.05 * (number // 2 % 4)) * (1 if number % 2 else -1)
            _route(axis, way, SERIES[microbatch % len(SERIES)], bend)
        for peer in peers:
            axis.plot(*places[peer], marker="o", markersize=15, color=INK, markeredgecolor=CARD, zorder=5)
            said = str(stages[peer])
            axis.annotate(said, places[peer], ha="center", va="center", color=CARD, fontsize=9, weight="bold", zorder=6)
        shown = min(MOST_ROUTES, len(step.routes))
        told = f"the routes of {shown} microbatches of step {step.number} through {len(peers)} peers"
        return Markup(to_svg(figure, f"routes-{scene.slug}", told))


def places_told(scene: Scene) -> str:
    """What a reader must know of where the peers are drawn; a sentence, or nothing."""
    labels = set(_labels(scene, stage_of([shown_step(scene)])).values())
    unplaced = labels - set(PLACES)
    if not unplaced:
        return ""
    if unplaced == labels:
        return "Regions are as peers name them: the map has none of them, so they stand in a circle, and distances mean nothing."
    return "At the right edge, and so at no distance, are peers whose region is not on the map, or was not told."


def _labels(scene: Scene, peers: Iterable[str]) -> dict[str, str]:
    """The region of each peer, as the map names it where it has it; nothing where nobody told one."""
    told = {peer: scene.regions.get(peer, "") for peer in peers}
    if not any(told.values()):
        return {}
    return {peer: name_on_map(region) or region or UNTOLD for peer, region in told.items()}


def _on_a_map(axis: Axes, labels: Mapping[str, str]) -> tuple[dict[str, Point], float]:
    """Draw the land around those of the peers' regions that are on it, the others in a column beside it, and place each peer near its region's; the map's height in inches."""
    mapped = {label: PLACES[label] for label in labels.values() if label in PLACES}
    beside = Counter(label for label in labels.values() if label not in PLACES)
    edge = max(CHAR_IN * len(label) + MARGIN_IN for label in (BESIDE, *beside)) if beside else 0.0
    column, tall = in_a_column(list(beside.values()), WIDTH_IN - edge / 2)
    least = tall + 2 * LINE_IN if beside else 0.0
    project, height = _projection(list(mapped.values()), WIDTH_IN - edge, least)
    for ring in coasts():
        points = [project(place) for place in ring]
        axis.add_patch(Polygon(points, closed=True, facecolor=GRID, edgecolor=CARD, linewidth=0.4, zorder=0))
    if beside:
        axis.add_patch(Rectangle((WIDTH_IN - edge, 0.0), edge, height, facecolor=CARD, edgecolor="none", zorder=0.5))
        axis.axvline(WIDTH_IN - edge, color=GRID, linewidth=0.8, zorder=0.6)
        top = WIDTH_IN - edge / 2, height - LINE_IN
        axis.annotate(BESIDE, top, ha="center", va="center", color=MUTED)
    true = {label: project(place) for label, place in mapped.items()}
    true |= {label: (x, y + (height - least) / 2) for label, (x, y) in zip(beside, column, strict=True)}
    return _near(axis, labels, true), height


def _in_a_circle(axis: Axes, labels: Mapping[str, str]) -> tuple[dict[str, Point], float]:
    """Place each peer near its region's place on a circle; the height in inches."""
    regions = sorted(set(labels.values()))
    margin = MARGIN_IN + CHAR_IN * max(map(len, regions)) / 2
    circle = on_a_circle(len(regions), WIDTH_IN, CIRCLE_IN, margin)
    return _near(axis, labels, dict(zip(regions, circle, strict=True))), CIRCLE_IN


def _near(axis: Axes, labels: Mapping[str, str], at: Mapping[str, Point]) -> dict[str, Point]:
    """Places of peers near those of their labels, which are written beside them."""
    true = [at[label] for label in labels.values()]
    near = spread(true)
    places = dict(zip(labels, near, strict=True))
    together = defaultdict[str, list[Point]](list)
    for (peer, label), there in zip(labels.items(), true, strict=True):
        together[label].append(places[peer])
        axis.plot(*zip(there, places[peer], strict=True), color=MUTED, linewidth=0.8, zorder=1)
    for middle, label in zip(label_places(list(together.items()), near), together, strict=True):
        axis.annotate(label, middle, ha="center", va="center", color=INK, fontsize=9.5, zorder=7)
    return places


def _projection(places: Sequence[Point], width: float, least: float) -> tuple[Callable[[Point], Point], float]:
    """From longitude and latitude to inches on a map of this width that has room for these places; and its height, at least so much."""
    east, north = [place[0] for place in places], [place[1] for place in places]
    level, centre = (min(north) + max(north)) / 2, (min(east) + max(east)) / 2
    squeeze = math.cos(math.radians(level))  # of a degree of longitude, beside one of latitude
    tall = max(LEAST_DEGREES, max(north) - min(north))
    wide = max(WIDEST * LEAST_DEGREES / 2, (max(east) - min(east)) * squeeze)
    ratio = min(WIDEST, max(TALLEST, wide / tall))
    height = max(least, width / ratio)
    per_degree = min((width - 4 * MARGIN_IN) / wide, (height - 2 * MARGIN_IN) / tall)

    def project(place: Point) -> Point:
        x = width / 2 + (place[0] - centre) * squeeze * per_degree
        return x, height / 2 + (place[1] - level) * per_degree

    return project, height


def _by_stages(
    axis: Axes, stages: Mapping[str, int], named: Sequence[tuple[str, str]]
) -> tuple[dict[str, Point], float]:
    """A column for each stage; the height in inches."""
    columns = defaultdict[int, list[str]](list)
    for peer, _ in named:
        columns[stages[peer]].append(peer)
    most, last = max(len(its) for its in columns.values()), max(columns)
    height = (most + 0.6) * COLUMN_IN + 0.4
    places: dict[str, Point] = {}
    for stage, its in columns.items():
        x = WIDTH_IN * (stage + 0.5) / (last + 1)
        for number, peer in enumerate(its):
            places[peer] = x, height - 0.4 - (number + 0.5 + 0.5 * (most - len(its))) * COLUMN_IN
        axis.annotate(f"stage {stage}", (x, height - 0.15), ha="center", va="center", color=MUTED)
    for peer, name in named:
        axis.annotate(name, places[peer], (0, -16), textcoords="offset points", ha="center", va="center", fontsize=8.5)
    return places, height


def _route(axis: Axes, way: Sequence[Point], colour: str, bend: float) -> None:
    """There through all hops, and home again."""
    for number, here in enumerate(way if len(way) > 1 else ()):
        home = number + 1 == len(way)
        arrow = FancyArrowPatch(
            here,
            way[0] if home else way[number + 1],
            connectionstyle=f"arc3,rad={bend:.2f}",
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=8,
            shrinkB=9,
            color=colour,
            linewidth=1.3,
            linestyle=DASHES if home else "solid",
            alpha=0.85,
            zorder=3,
        )
        axis.add_patch(arrow)
