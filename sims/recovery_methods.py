"""The ways to survive the loss of a stage that `farflung bench recovery` compares: data, one entry each, in the order of
the table.

`none` never fails. Two methods are computed from its curve and not trained again (`recovery_clock`): a rollback to a
checkpoint replays the same data to the same bits, and redundant computation loses nothing but time. The others are
trained, and recover by `recovery_keepers`.
"""

from dataclasses import dataclass
from typing import Literal

from farflung.training.recovery_checkfree import CheckFree
from farflung.training.recovery_costs import Rung
from farflung.training.recovery_refresh import Budget

Kind = Literal["none", "checkpoint", "redundant", "rule", "copy", "random", "ladder"]
"""How a stage comes back: by CheckFree's rule, as a copy of a neighbour, anew, or by our ladder."""


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
    """Of the ladder: keep shadows."""
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
)

SWAPS_ALONE = Method(name="checkfree+ without failures", kind="none", checkfree=SWAPPED)
"""What the swapped order costs when nothing fails."""

SHADOWED = Method(name="shadow", kind="ladder", shadows=True, forced=Rung.SHADOW)

SINGLE = (
    SHADOWED,
    Method(name="swap twin", kind="rule", checkfree=SWAPPED),
    Method(name="fitted mean", kind="ladder", forced=Rung.FITTED),
    Method(name="neighbour mean", kind="rule"),
    Method(name="interpolation", kind="ladder", forced=Rung.INTERPOLATION),
    Method(name="copy", kind="copy"),
    Method(name="random", kind="random"),
)
"""Of single losses: one for each rung."""


def by_names(names: str | None) -> list[Method]:
    """The methods of a comma-separated list, all of them for None; `none` always, and first. Raises ValueError."""
    if names is None:
        return list(METHODS)
    known = {method.name: method for method in METHODS}
    asked = {name.strip() for name in names.split(",")} | {"none"}
    if unknown := sorted(asked - set(known)):
        raise ValueError(f"no method is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [method for method in METHODS if method.name in asked]
