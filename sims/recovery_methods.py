"""The ways to survive the loss of a stage that `farflung bench recovery` compares: data, one entry each, in the order of
the table.

`none` never fails. Two methods are computed from its curve and not trained again (`recovery_clock`): a rollback to a
checkpoint replays the same data to the same bits, and redundant computation loses nothing but time. The others are
trained, and recover by `recovery_keepers`.

Ours is two: `ours (live)` is what ships, decided by live nodes' own code (`recovery_live`); `ours` has shadows of the
ends as well, which no live node keeps yet. As live nodes cannot get the data node back, tiers in which
that may be lost have the one, and all others the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farflung.sims.recovery_tiers import Tier
from farflung.training.recovery_checkfree import CheckFree
from farflung.training.recovery_costs import Rung
from farflung.training.recovery_refresh import Budget

Kind = Literal["none", "checkpoint", "redundant", "rule", "copy", "random", "ladder", "live"]
"""How a stage comes back: by CheckFree's rule, as a copy of a neighbour, anew, by our ladder, or by our ladder as live nodes climb it."""


IN_ORDER = CheckFree()
SWAPPED = CheckFree(plus=True)
BUDGET = Budget()


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the table."""

    name: str
    kind: Kind
    checkfree: CheckFree = IN_ORDER
    """How gradient norms are averaged and learning rates raised; with `plus` the order is swapped."""
    shadows: bool = False
    """Keep shadows; they slow the others' bytes down."""
    codec: str = "deadzone(bits=2.0)"
    """Of the differences that shadows are refreshed by."""
    budget: Budget = BUDGET
    """Of shadows."""
    forced: Rung | None = None
    """Of the ladder: take this rung where it is offered, whatever it costs."""

    @property
    def computed(self) -> bool:
        """From the curve of `none`."""
        return self.kind in ("checkpoint", "redundant")

    @property
    def fails(self) -> bool:
        """Its training is disturbed by failures."""
        return self.kind not in ("none", "redundant")


METHODS = (
    Method(name="none", kind="none"),
    Method(name="checkpoint", kind="checkpoint"),
    Method(name="redundant", kind="redundant"),
    Method(name="checkfree", kind="rule"),
    Method(name="checkfree+", kind="rule", checkfree=SWAPPED),
    Method(name="copy", kind="copy"),
    Method(name="random", kind="random"),
    Method(name="ours", kind="ladder", shadows=True),
    Method(name="ours (live)", kind="live", shadows=True),
)
DELTAS, LIVE = METHODS[-2:]

SWAPS_ALONE = Method(name="checkfree+ without failures", kind="none", checkfree=SWAPPED)
"""What the swapped order costs when nothing fails."""

SHADOWED = Method(name="shadow", kind="ladder", shadows=True, forced=Rung.SHADOW)

SINGLE = (
    SHADOWED,
    LIVE,
    Method(name="swap twin", kind="rule", checkfree=SWAPPED),
    Method(name="fitted mean", kind="ladder", forced=Rung.FITTED),
    Method(name="neighbour mean", kind="rule"),
    Method(name="interpolation", kind="ladder", forced=Rung.INTERPOLATION),
    Method(name="copy", kind="copy"),
    Method(name="random", kind="random"),
)
"""Of single losses: one for each rung."""

BELONGS_TO = {
    "neighbour mean": "checkfree",
    "swap twin": "checkfree+",
    "copy": "copy",
    "random": "random",
    LIVE.name: LIVE.name,
}
"""By name of such a rung, the method that comes down to it; all others are our ladder's."""


def ours_of(tier: Tier) -> Method:
    """Our method in the tables of a tier."""
    return LIVE if tier.safe_ends else DELTAS


def methods_of(tier: Tier) -> list[Method]:
    """All that a tier compares."""
    other = DELTAS if tier.safe_ends else LIVE
    return [method for method in METHODS if method is not other]


def rungs_of(methods: Sequence[Method], tier: Tier) -> list[Method]:
    """The rungs of single losses that these methods come down to."""
    names = {method.name for method in methods}
    return [rung for rung in SINGLE if BELONGS_TO.get(rung.name, ours_of(tier).name) in names]


def by_names(names: str | None, tier: Tier) -> list[Method]:
    """The methods of a comma-separated list, all of the tier's for None; `none` always, and first. Raises ValueError."""
    known = {method.name: method for method in methods_of(tier)}
    if names is None:
        return list(known.values())
    asked = {name.strip() for name in names.split(",")} | {"none"}
    if unknown := sorted(asked - set(known)):
        raise ValueError(f"tier {tier.name} has no method called {', '.join(unknown)}; there are {', '.join(known)}")
    return [method for method in known.values() if method.name in asked]
