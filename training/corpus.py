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


LOOKED_AT = 8000
"""Bytes of a file in which a zero tells that it is no text, as git has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    name: str
    """A relative path, with the block's number for a single file."""
    text: str
    """Decides whether it is held out: copies under other names go the same way."""


def python_documents() -> list[Document]:
    """The standard library's .py files by relative path. Raises DataError when there are none, or one cannot be read."""
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
    """The files of a folder, one document each, or one file in blocks.

    Raises DataError without any text, and for what cannot be read.
    """
    if path.is_dir():
        documents = _folder_documents(path, "*", frozenset())
    elif path.is_file():
        text = _read(path)
        size = max(1, min(BLOCK_CHARACTERS, len(text) // (2 * HELD_OUT_ONE_IN)))
        count = len(text) // size
        documents = [
            # The last one takes the rest: alone it could be too short for a sample, and all that is held out.
            Document(name=f"{path.name}#{k}", text=text[k * size : (k + 1) * size if k < count - 1 else None])
            for k in range(count)
        ]
    else:
        raise DataError(f"text:{path}: there is no such file or folder")
    if not documents:
        raise DataError(f"text:{path}: there is no text in it")
    return documents


def no_text(path: Path) -> Path | None:
    """Of a file, or the files of a folder, the first that is no text in UTF-8; None: all are. For who founds a swarm: of one that there is everybody has to read what
    it was founded with. Raises DataError."""
    for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
        try:
            with file.open("rb") as opened:
                if b"\0" in opened.read(LOOKED_AT):
                    return file
        except OSError as error:
            raise _unreadable(file, error) from error
    return None


def is_held_out(key: bytes) -> bool:
    """One key in twenty, by its hash: the same on all machines, whatever else there is."""
    return _chance(hashlib.sha256(key).digest())


Keyed = TypeVar("Keyed")


def split(items: Sequence[Keyed], keys: Sequence[bytes]) -> tuple[list[Keyed], list[Keyed]]:
    """(training, held out), in the given order and neither empty; items of the same key are on the same side. Raises DataError for less than two
    keys.
    """
    digests = [hashlib.sha256(key).digest() for key in keys]
    if len(set(digests)) < 2:
        raise DataError("the data is too small to hold a part of it out, or the same text over and over")
    flags = [_chance(digest) for digest in digests]
    if all(flags) or not any(flags):  # few items: hold out the one with the least hash
        flags = [digest == min(digests) for digest in digests]
    training = [item for item, held in zip(items, flags, strict=True) if not held]
    return training, [item for item, held in zip(items, flags, strict=True) if held]


def _chance(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _folder_documents(root: Path, pattern: str, skipped: frozenset[str]) -> list[Document]:
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob(pattern)
        if path.is_file() and not skipped.intersection(path.relative_to(root).parts)
    )
    texts = ((name, _read(root / name)) for name in names)
    return [Document(name=name, text=text) for name, text in texts if text]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}; make it readable, or take it out of the data")
