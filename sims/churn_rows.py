"""What the swarms of `farflung bench churn` come to: gaps at equal tokens, goals, and the cells of its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from farflung.sims.bench_unequal import MAX_GAP_PERCENT, TARGET, gap_percent
from farflung.sims.bench_workers import BenchError
from farflung.sims.check import Check
from farflung.sims.churn_swarms import EQUAL, REPLACED, SWARMS, UNEQUAL, ChurnSwarm, Played

MAX_REPLACED_PERCENT = 1.0
LAST_SHARE = 1 / 3
"""Of the tokens, at the end, in which gaps are taken."""

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnRow:
    """A swarm with all its seeds."""

    swarm: ChurnSwarm
    against: str | None
    """The swarm that its gaps are to; None for the reference."""
    played: tuple[Played, ...]
    """One per seed, from 0."""
    gaps: tuple[float, ...]
    """Of each seed, percent; none for the reference."""

    @property
    def gap(self) -> float | None:
        return fmean(self.gaps) if self.gaps else None

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Of each machine, the least of all seeds."""
        return tuple(map(min, zip(*(one.utilisation for one in self.played), strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Churn:
    """All swarms; see the module."""

    rows: tuple[ChurnRow, ...]
    spread_percent: float | None
    """By which the losses of the equal swarm's seeds are apart, 100 (max - min) / mean, at equal tokens; None with one seed."""

    def row(self, swarm: ChurnSwarm) -> ChurnRow:
        return next(row for row in self.rows if row.swarm == swarm)


def compare(played: Mapping[ChurnSwarm, Sequence[Played]]) -> Churn:
    """From what the swarms did, as many seeds of each. Raises BenchError when their curves have no tokens in common."""
    rows = []
    for swarm in SWARMS:
        against = None if swarm == EQUAL else UNEQUAL if swarm == REPLACED else EQUAL
        gaps: tuple[float, ...] = ()
        if against is not None:
            pairs = zip(played[swarm], played[against], strict=True)
            gaps = tuple(last_gap(own.curve, other.curve) for own, other in pairs)
        rows.append(
            ChurnRow(
                swarm=swarm, against=None if against is None else against.name, played=tuple(played[swarm]), gaps=gaps
            )
        )
    return Churn(rows=tuple(rows), spread_percent=_spread([one.curve for one in played[EQUAL]]))


def last_gap(ours: Curve, reference: Curve) -> float:
    """Mean gap in percent over our evaluations in the last third of the tokens that both reach. Raises BenchError."""
    if len(ours) < 2 or len(reference) < 2:
        raise BenchError("too few evaluations to compare; give the swarms more steps")
    most = min(ours[-1][0], reference[-1][0])
    within = [
        count
        for count, (tokens, _) in enumerate(ours, start=1)
        if count > 1 and max((1 - LAST_SHARE) * most, reference[0][0]) <= tokens <= most
    ]
    if not within:
        return gap_percent(ours, reference)
    return fmean(gap_percent(ours[:count], reference) for count in within)


def checks(found: Churn) -> list[Check]:
    """The goals, and whether they are met."""
    unequal, replaced = found.row(UNEQUAL), found.row(REPLACED)
    least = min(unequal.utilisation)
    return [
        Check(
            target=f"unequal: each computes at least {100 * TARGET:.0f} % of its time",
            measured=f"{100 * least:.1f} % at least",
            met=least >= TARGET,
        ),
        _at_most("unequal: loss above equal peers'", unequal, MAX_GAP_PERCENT, found.spread_percent),
        _at_most("replaced: loss above that without", replaced, MAX_REPLACED_PERCENT, found.spread_percent),
    ]


def missed(found: Churn) -> list[str]:
    """The goals that are missed, for people."""
    return [f"{check.target}: {check.measured}" for check in checks(found) if check.met is False]


def cells(row: ChurnRow, found: Churn) -> tuple[str, ...]:
    """Of a table; see HEADINGS."""
    return (
        row.swarm.name,
        " ".join(f"{speed:.3g}" for speed in row.swarm.speeds),
        " ".join(f"{100 * share:.1f}" for share in row.utilisation),
        "/".join(str(one.rounds) for one in row.played),
        "/".join(str(one.missed) for one in row.played),
        "/".join(str(one.dropped_steps) for one in row.played),
        "/".join(f"{one.curve[-1][0] / 1e6:.2f}" for one in row.played),
        "/".join(f"{one.curve[-1][1]:.4f}" for one in row.played),
        "" if row.gap is None else f"{row.gap:+.2f} ({', '.join(f'{gap:+.2f}' for gap in row.gaps)})",
        row.against or "",
        "" if found.spread_percent is None else f"{found.spread_percent:.2f}",
    )


HEADINGS = (
    "swarm",
    "speeds",
    "computing %",
    "rounds",
    "missed",
    "dropped steps",
    "M tokens",
    "last loss",
    "gap % (seeds)",
    "to",
    "± equal's seeds %",
)


def _at_most(target: str, row: ChurnRow, most: float, spread: float | None) -> Check:
    assert row.gap is not None
    near = "" if spread is None else f"; seeds of the equal swarm are apart by {spread:.2f} %"
    return Check(target=f"{target}, at most {most:g} %", measured=f"{row.gap:+.2f} %{near}", met=row.gap <= most)


def _spread(curves: Sequence[Curve]) -> float | None:
    if len(curves) < 2:
        return None
    first = curves[0]
    gaps = [0.0, *(last_gap(curve, first) for curve in curves[1:])]  # all relative to the first, in percent
    return (max(gaps) - min(gaps)) / (1 + fmean(gaps) / 100)
