"""Data sets of the Hugging Face hub, streamed: rows come over the network as they are trained on.

A sample is made of a fixed number of consecutive rows: their texts with end-of-text behind each, cropped
to seq_len + 1 tokens, or filled up with end-of-text. So every sample number means the same rows on every
machine, and nothing but a count of rows is shared. What is beyond the crop is never trained on: choose
`rows` near the sequence length.

The first rows of the stream are the held-out part. Samples are numbered in the stream's own order, in every epoch
alike: a stream can only be read forward (`stream_rows`), so a permutation would read it anew for every few
samples, and the library's shuffle buffer cannot be opened in the middle with the same rows in it. Every peer
reads over the samples of the others, and one that starts anew over all that come before its own. So use data that was
shuffled when it was published, or shuffle it once and publish it; text in the order of its sources trains badly. What is
too large for that is better made into token shards (`shards`).
"""

import hashlib
from functools import cached_property

import numpy as np

from farflung.training.data import Tokens
from farflung.training.errors import DataError
from farflung.training.stream_opening import open_rows
from farflung.training.stream_rows import StreamRows
from farflung.training.stream_spec import StreamSpec
from farflung.training.tokenizer import Tokenizer

HELD_OUT_SAMPLES = 256
"""Most samples at the head of the stream that are never trained on; at most one in twenty."""

COUNTING_S = 120.0
"""How long a founder's machine looks for the last row of a data set that does not say how many it has."""


class StreamedDataset:
    """Samples made of rows of a stream. Not for several threads at once, as `StreamRows`."""

    in_order = True

    def __init__(
        self,
        rows: StreamRows,
        spec: StreamSpec,
        num_rows: int | None,  # None where the data set does not say
        tokenizer: Tokenizer,
        seq_len: int,
    ) -> None:
        self._is_counted = num_rows is not None
        if num_rows is None:
            if spec.samples is None:
                raise DataError(f"hf:{spec.dataset} does not say how many rows it has: add ?samples=N")
            num_rows = spec.samples * spec.rows
        total = num_rows // spec.rows if spec.samples is None else min(spec.samples, num_rows // spec.rows)
        self._num_heldout = max(1, min(HELD_OUT_SAMPLES, total // 20))
        self.num_samples = total - self._num_heldout
        if self.num_samples < 1:
            raise DataError(f"hf:{spec.dataset}: {num_rows} rows are too few for samples of {spec.rows} rows")
        self._rows, self._spec, self._tokenizer, self._seq_len = rows, spec, tokenizer, seq_len

    def tokens(self, index: int) -> Tokens:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self._sample(self._num_heldout + index)

    def heldout(self, k: int) -> Tokens:
        k = min(k, self._num_heldout)
        return np.stack([self._head[i * self._num_heldout // k] for i in range(k)])

    def check_end(self) -> None:
        """Read on to the last row, where only `samples` says that it is there. Raises DataError that says how many there are.

        For founders: a swarm cannot get past the end of its data. What is longer than `COUNTING_S` of reading is believed.
        """
        if self._is_counted:
            return
        wanted = (self._num_heldout + self.num_samples) * self._spec.rows
        found = self._rows.count(wanted, COUNTING_S)
        if found is not None and found < wanted:
            raise DataError(
                f"hf:{self._spec.dataset} has {found:,} rows, {self._spec.samples:,} samples of {self._spec.rows} need {wanted:,}: give "
                f"samples={found // self._spec.rows} or less"
            )

    @cached_property
    def content_hash(self) -> str:
        """Of the spec, the order and the held-out samples; a stream cannot be hashed whole. Pin `revision` for certainty."""
        about = f"in order {self._spec.identity} {self.num_samples} {self._seq_len} {self._tokenizer.content_hash}"
        return hashlib.sha256(about.encode() + np.stack(self._head).astype("<i8").tobytes()).hexdigest()

    @cached_property
    def _head(self) -> list[Tokens]:
        return [self._sample(number, patient=True) for number in range(self._num_heldout)]

    def _sample(self, number: int, *, patient: bool = False) -> Tokens:
        run = np.full(self._seq_len + 1, self._tokenizer.end_of_text, dtype=np.int64)
        place = 0
        for text in self._rows.texts(number * self._spec.rows, self._spec.rows, patient=patient):
            ids = self._tokenizer.encode(text)[: max(0, run.size - place)]
            run[place : place + ids.size] = ids
            place += ids.size + 1
        return run


def open_stream(spec: StreamSpec, tokenizer: Tokenizer, seq_len: int) -> StreamedDataset:
    """Open the data set that `spec` names. Raises DataError, also when `datasets` is not installed."""
    rows, num_rows = open_rows(spec)
    return StreamedDataset(rows, spec, num_rows, tokenizer, seq_len)
