"""The ways to survive the loss of a stage that `farflung bench recovery` compares: data, one entry each, in the order of
the table.

`none` never fails. Two methods are computed from its curve and not trained again (`recovery_clock`): a rollback to a
checkpoint replays the same data to the same bits, and redundant computation loses nothing but time. The others are
trained, and recover by `recovery_keepers`; ours is what ships, decided by nodes' own code (`recovery_live`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farflung.training.recovery_checkfree import CheckFree

Kind = Literal["none", "checkpoint", "redundant", "rule", "fitted", "interpolation", "copy", "random", "ours"]
"""How a stage comes back: by CheckFree's rule, the same fitted to what the neighbours saw, between the nearest stages that are left, as a copy of a
neighbour, anew, or as live nodes bring it back."""


IN_ORDER = CheckFree()
SWAPPED = CheckFree(plus=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the table."""

    name: str
    kind: Kind
    checkfree: CheckFree = IN_ORDER
    """How gradient norms are averaged and learning rates raised; with `plus` the order is swapped."""

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
    Method(name="ours", kind="ours"),
)
OURS = METHODS[-1]

SWAPS_ALONE = Method(name="checkfree+ without failures", kind="none", checkfree=SWAPPED)
"""What the swapped order costs when nothing fails."""

SINGLE = (
    OURS,
    Method(name="swap twin", kind="rule", checkfree=SWAPPED),
    Method(name="fitted mean", kind="fitted"),
    Method(name="neighbour mean", kind="rule"),
    Method(name="interpolation", kind="interpolation"),
    Method(name="copy", kind="copy"),
    Method(name="random", kind="random"),
)
"""Of single losses: one for each rung."""

BELONGS_TO = {
    "neighbour mean": "checkfree",
    "swap twin": "checkfree+",
    "copy": "copy",
    "random": "random",
}
"""By name of such a rung, the method that comes down to it; all others are of our ladder."""


NODES_OWN = frozenset({"ours", "fitted", "interpolation"})
"""Kinds that are as nodes do it."""


def rungs_of(methods: Sequence[Method]) -> list[Method]:
    """The rungs of single losses that these methods come down to."""
    names = {method.name for method in methods}
    return [rung for rung in SINGLE if BELONGS_TO.get(rung.name, OURS.name) in names]


def by_names(names: str | None) -> list[Method]:
    """The methods of a comma-separated list, all for None; `none` always, and first. Raises ValueError."""
    known = {method.name: method for method in METHODS}
    if names is None:
        return list(METHODS)
    asked = {name.strip() for name in names.split(",")} | {"none"}
    if unknown := sorted(asked - set(known)):
        raise ValueError(f"no method is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [method for method in METHODS if method.name in asked]
