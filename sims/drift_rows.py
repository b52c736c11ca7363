"""What `farflung bench drift` found: what its table, its figures and its page have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from farflung.sims.pipeline_drift import Trained, Way


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRow:
    """One way, beside gradients that are averaged in each step."""

    way: Way
    runs: tuple[Trained, ...]
    """Seed by seed."""
    gaps: tuple[float, ...]
    """Percent of the held-out loss, seed by seed."""

    @property
    def gap(self) -> float:
        return fmean(self.gaps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What was measured."""

    together: tuple[Trained, ...]
    """Gradients averaged in each step, seed by seed."""
    rows: tuple[DriftRow, ...]

    def row(self, routes: str, inner_steps: int, rounds: str) -> DriftRow:
        """The one of this way."""
        wanted = (routes, inner_steps, rounds)
        return next(r for r in self.rows if (r.way.routes, r.way.inner_steps, r.way.rounds) == wanted)


HEADINGS = ("routes", "H", "rounds", "held-out loss", "gap %", "of each seed", "in training")


def cells(row: DriftRow) -> Sequence[str]:
    """One row of the table."""
    return (
        row.way.routes,
        str(row.way.inner_steps),
        row.way.rounds,
        f"{fmean(one.heldout for one in row.runs):.4f}",
        f"{row.gap:+.2f}",
        ", ".join(f"{gap:+.2f}" for gap in row.gaps),
        f"{fmean(one.local for one in row.runs):.4f}",
    )
