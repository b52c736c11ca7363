"""What `make test` leaves to `make thorough`: further cases of what other cases show, and the longest stories, so that a change is judged in a quarter of an hour."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def further(*cases: Any) -> list[Any]:
    """Cases of a parametrised test for `make thorough`; those of several parameters are tuples."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.thorough) for one in cases]


def mostly(now: Collection[str], names: Iterable[str]) -> list[Any]:
    """All names, those that `make test` plays as they are, the others for `make thorough`."""
    names = list(names)
    assert set(now) <= set(names), set(now) - set(names)
    return [name if name in now else further(name)[0] for name in names]
