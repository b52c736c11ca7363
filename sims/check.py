"""A target that a benchmark is held to, and what it measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One target and what was measured."""

    target: str
    measured: str
    met: bool | None
    """None: it cannot be told here."""

    @property
    def verdict(self) -> str:
        """For people."""
        return "not comparable" if self.met is None else "met" if self.met else "missed"
