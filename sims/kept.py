"""Runs that are kept: a JSON-lines file with one line for each that is finished, so that a comparison of hours goes on where it was interrupted.

A run is known by a fingerprint of all that decides what it comes to: a changed setting is a new run, and a file may hold the runs of many ablations.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

BEGINNING = b'{"fingerprint": "'
"""Of a line."""


class Told(Protocol):
    """What `dataclasses.asdict` takes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


OutcomeT = TypeVar("OutcomeT", bound=Told)


class Known(Protocol):
    """A run, as it is known again."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides its outcome."""

    @property
    def about(self) -> Mapping[str, object]:
        """The same for people who read the file."""


class Kept(Generic[OutcomeT]):
    """The file, and all that is in it; without one, what was kept by this process."""

    def __init__(
        self,
        file: Path | None,
        parse: Callable[
            [dict[str, Any]], OutcomeT
        ],  # from what JSON makes of an outcome; ValueError, KeyError, TypeError
    ) -> None:
        """Makes the file's folder when missing. Raises OSError, and ValueError when a line of the file is no run. When the last one has no end its writer was
        cut off: it is dropped, but not from a file that is not ours."""
        self.file = file
        self._outcomes: dict[str, OutcomeT] = {}
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        whole, _, cut_off = file.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
            try:
                entry = json.loads(line)
                self._outcomes[entry["fingerprint"]] = parse(entry["outcome"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} of {file} is no run: remove it, or name another file") from error
        if not cut_off:
            return
        # nobody but us begins a line so; a file of whole runs is ours whatever its last line is
        if not self._outcomes and cut_off[: len(BEGINNING)] != BEGINNING[: len(cut_off)]:
            raise ValueError(f"{file} is no file of runs: name another one")
        os.truncate(file, file.stat().st_size - len(cut_off))

    def outcome(self, run: Known) -> OutcomeT | None:
        """What the run came to, if it was ever made."""
        return self._outcomes.get(run.fingerprint)

    def made(self, run: Known) -> OutcomeT:
        """What a run came to that was made. Raises KeyError."""
        return self._outcomes[run.fingerprint]

    def keep(self, run: Known, outcome: OutcomeT, seconds: float | None = None) -> None:
        """Remember it, on disk too if there is a file. Raises OSError."""
        self._outcomes[run.fingerprint] = outcome
        if self.file is None:
            return
        took = {} if seconds is None else {"seconds": round(seconds, 1)}
        entry = {"fingerprint": run.fingerprint, **run.about, **took, "outcome": asdict(outcome)}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
            out.flush()
            os.fsync(out.fileno())
