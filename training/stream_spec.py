"""What a spec of streamed data says: `hf:` and which rows of which data set.

It stands in a manifest that somebody else may have written, and is opened before anything of it can be compared: so it names a
data set of the hub, or files of this machine or of the hub, in formats that hold nothing but data.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from farflung.training.errors import DataError

BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""Formats that are read. The library knows others, such as `pandas`, whose files are pickles: programs in the clothes of data."""

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)

_HUB_FILES = "hf://"

_OPTIONS = ("rows", "samples", "revision", "files")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSpec:
    """Which rows of which data set."""

    dataset: str
    """Name on the hub, the full path of a local folder, or one of BUILDERS together with `files`."""
    config: str | None = None
    split: str = "train"
    column: str = "text"
    rows: int = 4
    """Consecutive rows in one sample."""
    samples: int | None = None
    """Samples in the data set; needed where it does not say how many rows it has."""
    revision: str | None = None
    """A commit of the data set on the hub; without it, whatever is newest there."""
    files: str | None = None
    """Path of the files: needed for a builder; else a choice among those of the data set."""

    @classmethod
    def parse(cls, text: str) -> "StreamSpec":
        """From DATASET[:CONFIG[:SPLIT[:COLUMN]]][?OPTIONS]. Raises DataError."""
        name, _, options = text.partition("?")
        parts = name.split(":")
        if len(parts) > 4 or not parts[0]:
            raise DataError(f"hf:{name} is not hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]")
        fields: dict[str, Any] = {}
        for key, value in zip(("dataset", "config", "split", "column"), parts, strict=False):
            if value:
                fields[key] = value
        for key, value in _options(name, options).items():
            if key in ("revision", "files") and value:
                fields[key] = value
            elif key in ("rows", "samples") and value.isdecimal() and int(value) > 0:
                fields[key] = int(value)
            else:
                raise DataError(f"hf:{name}: option {key}={value} is none of {', '.join(_OPTIONS)}, with a value")
        return cls(**fields)

    @property
    def is_built(self) -> bool:
        """Whether files alone are named, and a builder that reads them."""
        return self.dataset in BUILDERS

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine, and so elsewhere on another one."""
        if self.is_built:
            return not (self.files or "").startswith(_HUB_FILES)
        return Path(self.dataset).is_absolute()

    @property
    def identity(self) -> str:
        """What everybody who means the same says alike: not where files lie that each has himself; their content is compared."""
        where = "files" if self.is_local else f"{self.dataset} {self.files}"
        return f"{where} {self.config} {self.split} {self.column} {self.rows} {self.samples} {self.revision}"

    def check(self) -> None:
        """Raises DataError for what is not opened, whoever says it; nothing is read or fetched for that."""
        if self.is_built and self.files is None:
            raise DataError(f"hf:{self.dataset} reads files: say which, with ?files=PATH")
        if not self.is_built and not self.is_local and not _HUB_NAME.fullmatch(self.dataset):
            raise DataError(f"hf:{self.dataset} is neither a data set of the hub nor the full path of a folder")
        if self.files is None:
            return
        if not self.is_built and not self.is_local and "/" not in self.dataset:
            raise DataError(
                f"hf:{self.dataset}: files= goes with {', '.join(BUILDERS)}, with a folder, or with OWNER/NAME of the hub; other formats "
                "may hold programs: convert the files to one of these"
            )
        check_place(self.files)

    def in_full(self) -> "StreamSpec":
        """With paths that mean the same in whatever folder a node is started: from what a person typed."""
        if self.is_built:
            if self.files is None or "://" in self.files:
                return self
            return replace(self, files=str(Path(self.files).expanduser().absolute()))
        folder = Path(self.dataset).expanduser()
        if not folder.is_dir():
            return self
        return replace(self, dataset=str(folder.absolute()))

    def written(self) -> str:
        """What `parse` reads as this. Raises DataError where a path cannot be written."""
        if any(mark in self.dataset for mark in ":?"):
            raise DataError(
                f"hf: cannot name the folder {self.dataset!r} with a ':' or '?': name its files, as in hf:json?files=PATH"
            )
        names = [self.dataset, self.config or "", self.split, self.column]
        defaults = ["", "", "train", "text"]
        while len(names) > 1 and names[-1] == defaults[len(names) - 1]:
            names.pop()
        options = []
        for key in _OPTIONS:
            value = getattr(self, key)
            if value is not None and (key, value) != ("rows", 4):
                options.append(f"{key}={str(value).replace('%', '%25').replace('&', '%26')}")
        return ":".join(names) + ("?" + "&".join(options) if options else "")


def check_place(file: str) -> None:
    """Raises DataError for what lies neither on this machine nor on the hub.

    Every joiner opens what the manifest says: with the address of any other host in it, a stranger could send them all there.
    """
    if "://" in file.removeprefix(_HUB_FILES) or "::" in file:
        raise DataError(
            f"hf: files={file}: files are read on this machine and on the hub (hf://...), not at other addresses: download them, then say "
            "where they lie"
        )


def _options(name: str, text: str) -> Mapping[str, str]:
    if not text:
        return {}
    try:  # a + is no space in a path
        pairs = parse_qsl(text.replace("+", "%2B"), keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise DataError(f"hf:{name}: the options {text!r} are not KEY=VALUE&KEY=VALUE") from error
    if len({key for key, _ in pairs}) < len(pairs):
        raise DataError(f"hf:{name}: the options {text!r} say something twice")
    return dict(pairs)
