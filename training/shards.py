"""Token shards: files of token ids made elsewhere, memory-mapped and never copied whole.

Layouts, all without a header of our own:

- `NAME.u16.bin`, `NAME.u32.bin`: little-endian unsigned ids of 2 or 4 bytes, one after the other;
- `NAME.bin`: the same, with the width in a side file `NAME.bin.dtype` that holds `uint16` or `uint32`;
- `NAME.npy`: one-dimensional array of integers in numpy's own format (never pickled).

A shard is cut into runs of whole windows; one run in twenty is held out, by the hash of shard name and run
number.
"""

import hashlib
from pathlib import Path
from tokenize import TokenError

import numpy as np
import numpy.typing as npt

from farflung.training.corpus import digest_of, split
from farflung.training.data import TokenWindows
from farflung.training.errors import DataError
from farflung.training.files import files_in
from farflung.training.tokenizer import Tokenizer

RUN_WINDOWS = 1024
"""Most windows of one run. Shorter ones would make a long list for terabytes of tokens."""

_READ_BYTES = 1 << 24

_NAMES = "surrogateescape"
"""How Python has the bytes of a file's name that are no UTF-8."""


def open_shards(path: Path, tokenizer: Tokenizer, seq_len: int) -> TokenWindows:
    """A shard, or all shards of a folder in the order of their names. Raises DataError, and so does its hash for ids that `tokenizer` has not."""
    if not path.exists():
        raise DataError(f"shards:{path}: there is no such file or folder")
    files = [path]
    if path.is_dir():
        files = [file for file in files_in(path) if file.suffix in (".bin", ".npy")]
    root = path if path.is_dir() else path.parent
    shards = {file.relative_to(root).as_posix(): _map(file) for file in files}
    if not shards:
        raise DataError(f"shards:{path}: no .bin or .npy file in it")

    total_windows = sum(max(0, (tokens.size - 1) // seq_len) for tokens in shards.values())
    run_tokens = seq_len * max(1, min(RUN_WINDOWS, total_windows // 200))
    runs, digests = [], []
    for name, tokens in shards.items():
        for number, start in enumerate(range(0, tokens.size - seq_len, run_tokens)):
            runs.append(tokens[start : start + run_tokens + 1])
            digests.append(digest_of(f"{name}#{number}".encode(errors=_NAMES)))
    training, heldout = split(runs, digests)  # by name, since what is in them may be terabytes

    def hash_content() -> str:
        digest = hashlib.sha256(f"{tokenizer.content_hash} {seq_len}".encode())
        for name, tokens in shards.items():
            digest.update(f"\n{name} {tokens.dtype.str} {tokens.size}\n".encode(errors=_NAMES))
            step = _READ_BYTES // tokens.itemsize
            for start in range(0, tokens.size, step):
                block = tokens[start : start + step]
                _check_ids(block, tokenizer, f"shard {root / name}")
                digest.update(block.tobytes())
        return digest.hexdigest()

    return TokenWindows(training, heldout, seq_len=seq_len, hash_content=hash_content)


def _map(file: Path) -> npt.NDArray[np.integer]:
    try:
        return _map_npy(file) if file.suffix == ".npy" else _map_bin(file)
    except OSError as error:
        raise DataError(f"shard {file}: {error}") from error


def _map_bin(file: Path) -> npt.NDArray[np.integer]:
    dtype, num_bytes = np.dtype(_dtype(file)), file.stat().st_size
    if num_bytes == 0 or num_bytes % dtype.itemsize:
        raise DataError(
            f"shard {file}: {num_bytes} bytes are no row of {dtype.name}: give the right width, or make it anew"
        )
    return np.memmap(file, dtype=dtype, mode="r")


def _map_npy(file: Path) -> npt.NDArray[np.integer]:
    try:
        array = np.lib.format.open_memmap(file, mode="r")  # `np.load` would take archives too
    except (ValueError, TypeError, SyntaxError, TokenError) as error:  # a damaged header raises any of them
        raise DataError(f"shard {file} is no array as numpy saves it, or not all of one: make it anew") from error
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise DataError(f"shard {file}: {array.dtype} of shape {array.shape}, not a row of integers: make it anew")
    return array


def _dtype(file: Path) -> str:
    side_file = file.with_name(file.name + ".dtype")
    by_suffix = {".u16": "uint16", ".u32": "uint32"}.get(Path(file.stem).suffix)
    name = by_suffix or (side_file.read_text(errors="replace").strip() if side_file.is_file() else "")
    if name not in ("uint16", "uint32"):
        raise DataError(f"shard {file}: call it NAME.u16.bin or NAME.u32.bin, or write uint16 or uint32 to {side_file}")
    return {"uint16": "<u2", "uint32": "<u4"}[name]


def _check_ids(tokens: npt.NDArray[np.integer], tokenizer: Tokenizer, where: str) -> None:
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= tokenizer.vocab_size:
        raise DataError(
            f"{where}: id {least if least < 0 else most} is none of the tokenizer's {tokenizer.vocab_size}: "
            "give the tokenizer that made these shards, or make them anew"
        )
