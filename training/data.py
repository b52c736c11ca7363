"""A data set: numbered training samples, a held-out part, and a hash that tells whether two machines mean
the same.

A sample is seq_len + 1 tokens; its last token is the first of the next one, so that every token is a
target once.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from farflung.training.corpus import Document, digest_of, is_held_out, split
from farflung.training.errors import DataError
from farflung.training.tokenizer import Tokenizer

Tokens = npt.NDArray[np.int64]


class Dataset(Protocol):
    """What training needs of a data source."""

    @property
    def num_samples(self) -> int:
        """Training samples in one epoch, at least 1."""

    @property
    def in_order(self) -> bool:
        """Whether it can only be read forward (`order.SampleOrder.in_order`)."""

    @property
    def content_hash(self) -> str:
        """Hex SHA-256 over everything that decides the samples, the tokenizer and seq_len included."""

    def tokens(self, index: int) -> Tokens:
        """Training sample `index` in [0, num_samples): int64 [seq_len + 1]. Raises IndexError, DataError; DataUnavailable where that may
        be had later."""

    def heldout(self, k: int) -> Tokens:
        """`k` held-out samples, or all if there are fewer: int64 [at most k, seq_len + 1], evenly spread."""


class TokenWindows:
    """Consecutive windows of arrays of tokens, some of them held out. The arrays may be memory-mapped."""

    in_order = False

    def __init__(
        self,
        runs: Sequence[npt.NDArray[np.integer]],  # 1-D each; windows do not cross from one to the next
        heldout_runs: Sequence[npt.NDArray[np.integer]],
        *,
        seq_len: int,
        hash_content: Callable[[], str],  # called once, when first asked for: it may read terabytes
    ) -> None:
        self._seq_len = seq_len
        self._runs, self._ends = list(runs), _window_ends(runs, seq_len)
        self._heldout_runs, self._heldout_ends = list(heldout_runs), _window_ends(heldout_runs, seq_len)
        if not self._ends[-1:].any() or not self._heldout_ends[-1:].any():
            there = [sum(run.size for run in part) for part in (runs, heldout_runs)]
            raise DataError(
                f"the data is too small: of {there[0]:,} tokens to train on and {there[1]:,} held out each part has to hold a sample "
                f"of {seq_len + 1:,}; give more text, or a shorter `seq_len`"
            )
        self._hash_content = hash_content

    @property
    def num_samples(self) -> int:
        return int(self._ends[-1])

    @property
    def heldout_tokens(self) -> int:
        """What of it is held out, in tokens."""
        return sum(run.size for run in self._heldout_runs)

    @cached_property
    def content_hash(self) -> str:
        return self._hash_content()

    def tokens(self, index: int) -> Tokens:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return _window(self._runs, self._ends, index, self._seq_len)

    def heldout(self, k: int) -> Tokens:
        total = int(self._heldout_ends[-1])
        k = min(k, total)
        picks = [i * total // k for i in range(k)]
        return np.stack([_window(self._heldout_runs, self._heldout_ends, i, self._seq_len) for i in picks])


def text_dataset(documents: Iterable[Document], tokenizer: Tokenizer, seq_len: int) -> TokenWindows:
    """All texts in memory, two bytes a token or four, each with an end-of-text behind it, joined into one run for each part.

    Raises DataError when they are too few."""
    dtype: type[np.unsignedinteger] = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    # They grow text by text: what is kept of a text is its ids in the width that they stay in, and only once.
    runs = {False: bytearray(), True: bytearray()}
    digests, sizes = [], []
    for document in documents:
        digests.append(digest_of(document.text.encode()))
        ids = np.append(tokenizer.encode(document.text), tokenizer.end_of_text).astype(dtype)
        sizes.append(ids.size)
        runs[is_held_out(digests[-1])] += ids.data
    if all(runs.values()):
        training, heldout = (np.frombuffer(runs[part], dtype=dtype) for part in (False, True))
    else:  # few texts, all in the same run
        whole = np.frombuffer(runs[False] or runs[True], dtype=dtype)
        texts = [whole[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        training, heldout = (np.concatenate(part) for part in split(texts, digests))

    def hash_content() -> str:
        digest = hashlib.sha256(f"{tokenizer.content_hash} {seq_len} {training.size} {heldout.size}".encode())
        for run in (training, heldout):
            digest.update(run.astype(run.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()

    return TokenWindows([training], [heldout], seq_len=seq_len, hash_content=hash_content)


def _window_ends(runs: Sequence[npt.NDArray[np.integer]], seq_len: int) -> npt.NDArray[np.int64]:
    """For each run, how many windows it and those before it hold."""
    return np.cumsum([max(0, (run.size - 1) // seq_len) for run in runs], dtype=np.int64)


def _window(runs: Sequence[npt.NDArray[np.integer]], ends: npt.NDArray[np.int64], index: int, seq_len: int) -> Tokens:
    which = int(np.searchsorted(ends, index, side="right"))
    start = (index - (int(ends[which - 1]) if which else 0)) * seq_len
    return runs[which][start : start + seq_len + 1].astype(np.int64)
