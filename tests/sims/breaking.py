"""Products that are broken on purpose, and the seeds that show it: what `test_broken` and `test_broken_pipeline` have in common."""

import sys
from collections.abc import Callable

import pytest

SEEDS = 200
"""Within so many, from 0 on, each has to be caught."""

Patch = Callable[[pytest.MonkeyPatch], None]


class Broken(dict[str, Patch]):
    """By name, what breaks them. `run` simulates the seed of a name, and returns the violations that the judge found."""

    def __init__(self, run: Callable[[str, int], list[str]], *, neighbours: int) -> None:
        """`neighbours`: seeds that are tried from the recorded one on: any change of the protocol's timing changes what a seed meets."""
        super().__init__()
        self._run = run
        self._neighbours = neighbours

    def __call__(self, patch: Patch) -> Patch:
        """Take it up; as a decorator."""
        self[patch.__name__] = patch
        return patch

    def first_violation(self, name: str, first: int, monkeypatch: pytest.MonkeyPatch) -> str:
        """Of the first seed that shows it, from the recorded one on; empty where none does. Raises AssertionError when something crashed: what is broken
        plays by wrong rules, and needs a judge to be seen."""
        self[name](monkeypatch)
        for seed in range(first, min(SEEDS, first + self._neighbours)):
            if violations := self._run(name, seed):
                assert "crashed" not in violations[0], violations[0]
                return violations[0]
        return ""

    def search(self) -> None:
        """Look for the first seed of those named on the command line, or of all."""
        for name in sys.argv[1:] or self:
            print(name, self._first_seed(name), flush=True)

    def _first_seed(self, name: str) -> str:
        for seed in range(SEEDS):
            with pytest.MonkeyPatch.context() as monkeypatch:
                self[name](monkeypatch)
                violations = self._run(name, seed)
            if violations:
                return f"{seed}: {violations[0]}"
        return f"not caught in {SEEDS} seeds"
