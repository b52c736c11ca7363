"""Tensors and a few facts in a folder, replaced in one step, so that a peer goes on after a crash with the
bits it had.

A folder holds `state.json` and the tensor files that it names. The tensor files are written and flushed
first, under names of their own; then state.json is replaced in one rename, and only then the old tensor
files go. A crash at any point leaves a whole state behind. Only safetensors and JSON: nothing on disk can
run code.

There are several files because tensors of a GPU are copied to the host before one is written: of a whole inner state that would
be as much memory again.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from farflung.training.errors import DamagedCheckpoint

FORMAT = 3
PART_BYTES = 1 << 30
"""Of tensors in one file; a larger one has a file of its own."""

Fact = int | float | str


def write_state(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Fact]) -> None:
    """Make `tensors` and `facts` the state in `folder`, which is created if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    digests: dict[str, str] = {}
    before = {file.name for file in folder.glob("*.safetensors")}
    try:
        for part in _parts(tensors):
            file, digest = _write_part(folder, part)
            digests[file.name] = digest
    except OSError:  # of a full disk these parts would take what is left
        for name in set(digests) - before:
            (folder / name).unlink()
        raise
    about = {"format": FORMAT, "tensors": digests, "facts": dict(facts)}
    partial_json = folder / "state.json.partial"
    partial_json.write_text(json.dumps(about, indent=2), encoding="utf-8")
    _flush(partial_json)
    partial_json.replace(folder / "state.json")
    if os.name == "posix":  # the renames themselves; Windows has no handle on a folder
        _flush(folder)
    for old in folder.glob("*.safetensors"):
        if old.name not in digests:
            old.unlink()


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Fact]]:
    """What `write_state` wrote. Raises DamagedCheckpoint when it is missing, incomplete or altered."""
    try:
        about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / 'state.json'}: {error}") from error
    match about:
        case {"format": int(format_)} if format_ != FORMAT:
            raise DamagedCheckpoint(f"{folder} has format {format_}; this version reads {FORMAT}")
        case {"format": int(), "tensors": dict(digests), "facts": dict(facts)}:
            pass
        case _:
            raise DamagedCheckpoint(f"{folder / 'state.json'} does not describe a state")
    if not all(isinstance(value, Fact) for value in facts.values()):
        raise DamagedCheckpoint(f"{folder / 'state.json'} has facts that are neither numbers nor text")
    tensors: dict[str, Tensor] = {}
    for name, digest in digests.items():
        tensor_file = folder / Path(name).name  # a name only: never outside of the folder
        try:
            if _sha256(tensor_file) != digest:
                raise DamagedCheckpoint(f"{tensor_file} is not what was saved: its SHA-256 differs")
            tensors |= safetensors.torch.load_file(tensor_file)
        except (OSError, safetensors.SafetensorError) as error:
            raise DamagedCheckpoint(f"{tensor_file}: {error}") from error
    return tensors, facts


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(one.nbytes for one in part.values()) + tensor.nbytes > PART_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part  # an empty one too, if there are no tensors: then a file says so


_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""As Rust tells the system's number of an error."""


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """One file of them. Raises OSError."""
    try:
        safetensors.torch.save_file(tensors, path, metadata=metadata)
    except safetensors.SafetensorError as error:  # so it says what the system says of a full disk and the like
        number = _OS_ERROR.search(str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def _write_part(folder: Path, tensors: dict[str, Tensor]) -> tuple[Path, str]:
    """The file and its digest."""
    partial = folder / "state.safetensors.partial"
    save_tensors(partial, tensors)
    _flush(partial)
    digest = _sha256(partial)
    file = folder / f"{digest[:16]}.safetensors"
    partial.replace(file)
    return file, digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until the file, or the folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
