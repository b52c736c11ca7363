"""Seeds that have passed: what a soak of hours need not run again when it is begun once more.

A seed is known again by all that decides its log: what runs it, whether it is run twice, and every line of our code. One that broke an invariant is not kept.
"""

import hashlib
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from farflung.sims.kept import Kept

PACKAGES = ("compression", "node", "protocol", "sims", "training")
SOURCES = ("*.py", "*.c", "*.h")


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakedSeed:
    """A seed as it is known again."""

    command: str
    kind: str
    seed: int
    twice: bool
    """Whether it is run twice."""
    code: str
    """`code_digest()`."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides its log."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def about(self) -> dict[str, object]:
        """For people."""
        return {"command": self.command, "kind": self.kind, "seed": self.seed, "code": self.code}


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What a seed came to."""

    log_sha256: str


class Passes:
    """The seeds of one command and kind that have passed by this code, in a file and in this process."""

    def __init__(
        self,
        file: Path,
        command: str,
        kind: str,
        twice: Collection[int],  # seeds that are run twice
    ) -> None:
        """Makes the file when missing. Raises OSError, and ValueError when it is one of something else."""
        self._kept = Kept(file, lambda entry: Passed(**entry))
        self._command, self._kind, self._twice, self._code = command, kind, twice, code_digest()

    def __contains__(self, seed: int) -> bool:
        return self._kept.outcome(self._known(seed)) is not None

    def add(self, seed: int, log_sha256: str) -> None:
        """It has passed, with this log. Raises OSError."""
        self._kept.keep(self._known(seed), Passed(log_sha256=log_sha256))

    def _known(self, seed: int) -> SoakedSeed:
        twice = seed in self._twice
        return SoakedSeed(command=self._command, kind=self._kind, seed=seed, twice=twice, code=self._code)


def code_digest() -> str:
    """Hex digits for all modules and C sources of ours, and for the versions of Python and torch. Raises OSError."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    for name in PACKAGES:
        for file in sorted(file for pattern in SOURCES for file in (root / name).glob(pattern)):
            digest.update(f"\0{name}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
