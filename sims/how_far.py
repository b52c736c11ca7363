"""How far something has come that takes long, on stderr: a bar on a terminal, elsewhere a line for each tenth of it."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Reach = Callable[[float, str], None]
"""Takes how much of it is done, and what else there is to say of that."""

LINES = 10
"""Told of the whole, where no bar is, or a few more; at most one for each unit."""


@contextlib.contextmanager
def how_far(name: str, total: float, unit: str) -> Iterator[Reach]:
    """What is to be called each time that something of `total` is done, and at its beginning with 0."""
    if not sys.stderr.isatty():
        yield _Lines(name, total, unit)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, unit=unit, said="")
        yield lambda done, said: bar.update(task, completed=min(done, total), said=said)


class _Lines:
    def __init__(self, name: str, total: float, unit: str) -> None:
        self._name = name
        self._total = total
        self._unit = unit
        self._each = max(1.0, total // LINES)
        self._due = 0.0
        self._began = time.monotonic()

    def __call__(self, done: float, said: str) -> None:
        if done < self._due:
            return
        self._due = (done // self._each + 1) * self._each
        took = f"{time.monotonic() - self._began:,.0f} s"
        told = f"{self._name}: {min(done, self._total):,.0f} of {self._total:,.0f} {self._unit} after {took}"
        sys.stderr.write(f"{told}{said and f'; {said}'}\n")
        sys.stderr.flush()
