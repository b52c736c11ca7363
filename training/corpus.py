"""Texts as named documents in a fixed order, and which of them are held out.

Of files that a person gives, a document is a block: held out by files, a folder could lose its one large text and train on the licence beside it.

The embedded corpus is the text of the Python installation itself: the standard library's sources, about 11
MB in 400 files. It needs no download, but it differs between Python versions; the data set's content hash
tells.
"""

import codecs
import hashlib
import io
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from farflung.training.errors import DataError
from farflung.training.files import files_in, unreadable

HELD_OUT_ONE_IN = 20

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
"""Of the standard library: what others installed, tests, and `encodings`, which is tables of characters."""

BLOCK_CHARACTERS = 1 << 14
"""Files are cut into blocks of about this size, and of less than twice as much, so that some of each can be held out."""

LOOKED_AT = 8000
"""Bytes of a file in which a zero tells that it is no text, as git has it."""

_READ_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    name: str
    """A relative path, and the block's number."""
    text: str
    """Decides whether it is held out: copies under other names go the same way."""


def python_documents() -> list[Document]:
    """The standard library's .py files by relative path. Raises DataError when there are none, or one cannot be read."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    # `_sysconfigdata` tells of the machine, not of Python.
    texts = ((name, _read(root / name)) for name in names if not name.startswith("_sysconfigdata"))
    documents = [Document(name=name, text=text) for name, text in texts if text]
    if not documents:
        raise DataError(f"no Python sources under {root}: this Python has none; give text:PATH instead of python")
    return documents


def text_documents(path: Path) -> Iterator[Document]:
    """A file, or the files of a folder, in blocks; read as they are asked for.

    Raises DataError without any text, for what cannot be read, and for what is no text in UTF-8.
    """
    if path.is_dir():
        root, files = path, files_in(path)
    elif path.is_file():
        root, files = path.parent, [path]
    else:
        raise DataError(f"text:{path}: there is no such file or folder")
    size = _block_size(files)
    if not size:
        raise DataError(f"text:{path}: there is no text in it")
    for file in files:
        for number, text in enumerate(_blocks(file, size)):
            yield Document(name=f"{file.relative_to(root).as_posix()}#{number}", text=text)


def digest_of(key: bytes) -> bytes:
    """What decides whether a key is held out: the same on all machines, whatever else there is."""
    return hashlib.sha256(key).digest()


def is_held_out(digest: bytes) -> bool:
    """One key in twenty."""
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


Keyed = TypeVar("Keyed")


def split(items: Sequence[Keyed], digests: Sequence[bytes]) -> tuple[list[Keyed], list[Keyed]]:
    """(training, held out), in the given order and neither empty; items of the same digest are on the same side. Raises DataError for less than two
    digests.
    """
    if len(set(digests)) < 2:
        raise DataError(
            "the data is too small to hold a part of it out, or the same text over and over; give more text"
        )
    flags = [is_held_out(digest) for digest in digests]
    if all(flags) or not any(flags):  # few items: hold out the one with the least hash
        flags = [digest == min(digests) for digest in digests]
    training = [item for item, held in zip(items, flags, strict=True) if not held]
    return training, [item for item, held in zip(items, flags, strict=True) if held]


def _block_size(files: Sequence[Path]) -> int:
    """Characters of a block; less where there are few, for blocks enough that some are held out; 0 without text."""
    least_blocks = 2 * HELD_OUT_ONE_IN
    there = 0
    for file in files:
        for text in _texts(file):
            there += len(text)
            if there >= least_blocks * BLOCK_CHARACTERS:
                return BLOCK_CHARACTERS
    return there and max(1, there // least_blocks)


def _blocks(path: Path, size: int) -> Iterator[str]:
    """A file in blocks that end at a line, or else a word, where one ends near."""
    rest = ""
    for text in _texts(path):
        rest += text
        start = 0
        while len(rest) - start >= 2 * size:
            end = _cut(rest, start, size)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:  # with what is more than a block: alone that could be too short for a sample, and all that is held out
        yield rest


def _cut(text: str, start: int, size: int) -> int:
    end = start + size
    for mark in "\n ":
        if (place := text.rfind(mark, end - size // 4, end)) >= 0:
            return place + 1
    return end


def _texts(path: Path) -> Iterator[str]:
    """The text of a file, piece by piece; every newline is one character, as checkouts differ in them. Raises DataError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset = 0
    try:
        with path.open("rb") as file:
            while raw := file.read(_READ_BYTES):
                if offset == 0 and (zero := raw.find(b"\0", 0, LOOKED_AT)) >= 0:
                    raise _no_text(path, zero)
                pending = len(decoder.getstate()[0])
                try:
                    yield newlines.decode(decoder.decode(raw))
                except UnicodeDecodeError as error:
                    raise _no_text(path, offset - pending + error.start) from error
                offset += len(raw)
    except OSError as error:
        raise unreadable(path, error) from error
    if pending := len(decoder.getstate()[0]):
        raise _no_text(path, offset - pending)
    yield newlines.decode("", final=True)


def _no_text(path: Path, offset: int) -> DataError:
    return DataError(
        f"{path} is no text in UTF-8, by its byte {offset:,} (the first is 0); convert it, or take it out of the data"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise unreadable(path, error) from error
