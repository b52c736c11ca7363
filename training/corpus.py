"""Texts as named documents in a fixed order, and which of them are held out.

The embedded corpus is the text of the Python installation itself: the standard library's sources, about 11
MB in 400 files. It needs no download, but it differs between Python versions; the data set's content hash
tells.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from farflung.training.errors import DataError

HELD_OUT_ONE_IN = 20

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
"""Of the standard library: what others installed, tests, and `encodings`, which is tables of characters."""

BLOCK_CHARACTERS = 1 << 14
"""A single file is cut into blocks of at most this size, so that some of it can be held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    name: str
    """Decides whether it is held out: a relative path, with the block's number for a single file."""
    text: str


def python_documents() -> list[Document]:
    """The standard library's .py files by relative path. Raises DataError when there are none."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = [
        document
        for document in _folder_documents(root, "*.py", SKIPPED_FOLDERS)
        if not document.name.startswith("_sysconfigdata")  # it tells of the machine, not of Python
    ]
    if not documents:
        raise DataError(f"no Python sources under {root}: this Python has none; give text:PATH instead of python")
    return documents


def text_documents(path: Path) -> list[Document]:
    """The files of a folder, one document each, or one file in blocks. Raises DataError without any text."""
    if path.is_dir():
        documents = _folder_documents(path, "*", frozenset())
    elif path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        size = max(1, min(BLOCK_CHARACTERS, len(text) // (2 * HELD_OUT_ONE_IN)))
        documents = [
            Document(name=f"{path.name}#{start // size}", text=text[start : start + size])
            for start in range(0, len(text), size)
        ]
    else:
        raise DataError(f"text:{path}: there is no such file or folder")
    if not documents:
        raise DataError(f"text:{path}: there is no text in it")
    return documents


def is_held_out(name: str) -> bool:
    """One name in twenty, by its hash: the same on all machines, whatever else there is."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


Named = TypeVar("Named")


def split(items: Sequence[Named], names: Sequence[str]) -> tuple[list[Named], list[Named]]:
    """(training, held out), in the given order and neither empty. Raises DataError for less than two items."""
    if len(items) < 2:
        raise DataError("the data is too small to hold a part of it out")
    flags = [is_held_out(name) for name in names]
    if all(flags) or not any(flags):  # few items: hold out the one with the least hash
        least = min(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
        flags = [i == least for i in range(len(names))]
    training = [item for item, held in zip(items, flags, strict=True) if not held]
    return training, [item for item, held in zip(items, flags, strict=True) if held]


def _folder_documents(root: Path, pattern: str, skipped: frozenset[str]) -> list[Document]:
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob(pattern)
        if path.is_file() and not skipped.intersection(path.relative_to(root).parts)
    )
    texts = ((name, (root / name).read_text(encoding="utf-8", errors="replace")) for name in names)
    return [Document(name=name, text=text) for name, text in texts if text]
