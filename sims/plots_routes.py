"""The report's picture of routes: where the microbatches of one step went, on a map where the peers' regions are known, else stage by stage."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon

from farflung.sims.map_places import Point, label_places, spread
from farflung.sims.markup import Markup
from farflung.sims.pipeline_log import LoggedStep
from farflung.sims.plots import WIDTH_IN
from farflung.sims.plots_pipeline import stage_of, window_steps
from farflung.sims.scene import Scene
from farflung.sims.svg import CARD, GRID, INK, MUTED, SERIES, STYLE, to_svg
from farflung.sims.world import PLACES, coasts

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

DASHES = (0, (3, 3))


def shown_step(scene: Scene) -> LoggedStep:
    """The first one of the Gantt chart: before the trouble, if that shows any, with routes as they were planned."""
    return window_steps(scene)[0]


def plot_routes(scene: Scene) -> Markup:
    """Peers are dots with the number of their stage; lines are microbatches, dashed where the last output goes home to the loss."""
    step = shown_step(scene)
    stages = stage_of([step])
    peers = sorted(stages, key=lambda one: (stages[one], scene.names.get(one, one)))
    mapped = all(scene.regions.get(peer) in PLACES for peer in peers)
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axis.set_axis_off()
        if mapped:
            places, height = _on_a_map(axis, {peer: scene.regions[peer] for peer in peers})
        else:
            places, height = _by_stages(axis, stages, [(peer, scene.names.get(peer, peer[:12])) for peer in peers])
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


def _on_a_map(axis: Axes, regions: Mapping[str, str]) -> tuple[dict[str, Point], float]:
    """Draw the land around the peers' regions, and place each peer near its region's; the map's height in inches."""
    project, height = _projection([PLACES[region] for region in regions.values()])
    for ring in coasts():
        points = [project(place) for place in ring]
        axis.add_patch(Polygon(points, closed=True, facecolor=GRID, edgecolor=CARD, linewidth=0.4, zorder=0))
    true = [project(PLACES[region]) for region in regions.values()]
    near = spread(true)
    places = dict(zip(regions, near, strict=True))
    together = defaultdict[str, list[Point]](list)
    for (peer, region), there in zip(regions.items(), true, strict=True):
        together[region].append(places[peer])
        axis.plot(*zip(there, places[peer], strict=True), color=MUTED, linewidth=0.8, zorder=1)
    for at, region in zip(label_places(list(together.items()), near), together, strict=True):
        axis.annotate(region, at, ha="center", va="center", color=INK, fontsize=9.5, zorder=7)
    return places, height


def _projection(places: Sequence[Point]) -> tuple[Callable[[Point], Point], float]:
    """From longitude and latitude to inches on a map that is as wide as the page and has room for these places; and its height."""
    east, north = [place[0] for place in places], [place[1] for place in places]
    level, centre = (min(north) + max(north)) / 2, (min(east) + max(east)) / 2
    squeeze = math.cos(math.radians(level))  # of a degree of longitude, beside one of latitude
    tall = max(LEAST_DEGREES, max(north) - min(north))
    wide = max(WIDEST * LEAST_DEGREES / 2, (max(east) - min(east)) * squeeze)
    ratio = min(WIDEST, max(TALLEST, wide / tall))
    height = WIDTH_IN / ratio
    per_degree = min((WIDTH_IN - 4 * MARGIN_IN) / wide, (height - 2 * MARGIN_IN) / tall)

    def project(place: Point) -> Point:
        x = WIDTH_IN / 2 + (place[0] - centre) * squeeze * per_degree
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
