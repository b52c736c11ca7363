"""The table of Streaming DiLoCo on bandwidth as published (2501.18512, table 4; digest section 1.5), and ours beside it.

The published figures are points of a logarithmic grid, 50 from 0.1 to 1000 Gbit/s, two neighbours a factor of 1.2068
apart: the first at which a utilisation is reached. Ours are on the same grid, continued downwards for slow links.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from farflung.sims.bandwidth import BF16_BITS, Method, Model, Speeds, needed_speed, our_methods, utilisation
from farflung.training.streaming import Timetable

THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations of which the speeds are told."""

RATIO = 10 ** (4 / 49)
"""Of neighbours on the grid: 1.2068."""

SLOWER = 25
"""Points of the grid below the paper's slowest: down to about 1 Mbit/s."""

MODELS = (
    Model(name="1B", parameters=1e9, layers=24, step_s=0.1),
    Model(name="10B", parameters=10e9, layers=48, step_s=0.8),
    Model(name="100B", parameters=100e9, layers=108, step_s=4.9),
)

FRAGMENT_LAYERS = 3
"""Of the published streaming rows."""

INTERVAL = 100
"""H of the published rows."""

FP4_BITS = 4.0

PUBLISHED: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data-parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "+ overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "+ fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data-parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "+ overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "+ fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data-parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "+ overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "+ fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""(model, method) → Gbit/s for each of the thresholds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method for one model."""

    model: str
    method: str
    bits: float
    """Per parameter and exchange."""
    interval: int
    """H."""
    fragments: int
    delay: int
    """tau."""
    gbit_s: tuple[float | None, ...]
    """Needed for each of the thresholds; None where the grid does not reach so far."""
    published_gbit_s: tuple[float, ...] | None
    """None for our methods."""
    points_off: tuple[int | None, ...] | None
    """Ours less published, in points of the grid."""
    utilisation: tuple[float, ...]
    """At each speed of the grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How much of the published table comes out."""

    entries: int
    exact: int
    """The same point of the grid."""
    within_one: int
    """That point or a neighbour."""

    @property
    def share(self) -> float:
        return self.within_one / self.entries


def grid() -> Speeds:
    """Speeds in Gbit/s: the paper's points, and SLOWER below them."""
    below = 0.1 * RATIO ** np.arange(-SLOWER, 0, dtype=np.float64)
    return np.concatenate([below, np.logspace(-1, 3, 50)])


def published_methods(model: Model) -> list[Method]:
    """Those of the paper; fragments depend on the number of layers."""
    whole = Timetable(interval=INTERVAL)
    fragments = model.layers // FRAGMENT_LAYERS
    streaming = Timetable(interval=INTERVAL, fragments=fragments)
    overlapped = Timetable(interval=INTERVAL, fragments=fragments, delay=1)
    return [
        Method(name="data-parallel", timetable=Timetable(interval=1), bits=BF16_BITS),
        Method(name="diloco", timetable=whole, bits=BF16_BITS),
        Method(name="streaming", timetable=streaming, bits=BF16_BITS),
        Method(name="+ overlap", timetable=overlapped, bits=BF16_BITS),
        Method(name="+ fp4", timetable=overlapped, bits=FP4_BITS),
    ]


def all_rows() -> list[Row]:
    """Every model with every method, the published ones first."""
    speeds = grid()
    return [_row(model, method, speeds) for model in MODELS for method in [*published_methods(model), *our_methods()]]


def _row(model: Model, method: Method, speeds: Speeds) -> Row:
    reached = utilisation(model, method, speeds)
    needed = tuple(needed_speed(speeds, reached, threshold) for threshold in THRESHOLDS)
    published = PUBLISHED.get((model.name, method.name))
    return Row(
        model=model.name,
        method=method.name,
        bits=method.bits,
        interval=method.timetable.interval,
        fragments=method.timetable.fragments,
        delay=method.timetable.delay,
        gbit_s=needed,
        published_gbit_s=published,
        points_off=None if published is None else tuple(map(points_off, needed, published)),
        utilisation=tuple(float(value) for value in reached),
    )


def points_off(ours: float | None, published: float) -> int | None:
    """Points of the grid from the published figure, which is rounded to one decimal, to ours."""
    if ours is None:
        return None
    nearest = round(math.log(published / 0.1, RATIO))
    return round(math.log(ours / 0.1, RATIO)) - nearest


def agreement(rows: Iterable[Row]) -> Agreement:
    """Over all published entries. One that is not reached on the grid agrees with nothing."""
    off = [points for row in rows for points in row.points_off or ()]
    near = [abs(points) for points in off if points is not None]
    return Agreement(entries=len(off), exact=near.count(0), within_one=sum(points <= 1 for points in near))


def differences(rows: Iterable[Row]) -> list[str]:
    """One sentence for each entry that is not the published one."""
    said = []
    for row in rows:
        if row.published_gbit_s is None or row.points_off is None:
            continue
        for threshold, ours, theirs, points in zip(
            THRESHOLDS, row.gbit_s, row.published_gbit_s, row.points_off, strict=True
        ):
            if points != 0:
                told = "more than the grid has" if ours is None else f"{ours:.2f} Gbit/s ({points:+d})"
                said.append(f"{row.model} {row.method}, {threshold:.0%}: {told}; published {theirs:g}")
    return said
