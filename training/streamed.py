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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from farflung.training.data import Tokens
from farflung.training.errors import DataError
from farflung.training.read_failures import read_errors
from farflung.training.stream_rows import StreamRows
from farflung.training.tokenizer import Tokenizer

HELD_OUT_SAMPLES = 256
"""Most samples at the head of the stream that are never trained on; at most one in twenty."""

LIBRARY_TRIES = 2
"""Of `datasets` for each read: what is but for a moment does not cost the open stream."""

LIBRARY_PAUSE_S = 1
"""After each of them that failed, the last as well. By itself the library waits for a minute where a hub asks for fewer requests."""

_LIBRARY_PAUSES = (
    "STREAMING_READ_RETRY_INTERVAL",
    "STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL",
    "STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL",
    "STREAMING_OPEN_RETRY_INTERVAL",
)
"""Its settings; not every version has all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSpec:
    """Which rows of which data set."""

    dataset: str
    """Name on the hub, a local folder, or a builder such as `json` together with `files`."""
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
    """For builders: path of the files."""

    @classmethod
    def parse(cls, name: str, options: Mapping[str, Sequence[str]]) -> "StreamSpec":
        """From DATASET[:CONFIG[:SPLIT[:COLUMN]]] and the options behind the `?`. Raises DataError."""
        fields: dict[str, Any] = {}
        parts = name.split(":")
        if len(parts) > 4 or not parts[0]:
            raise DataError(f"hf:{name} is not hf:DATASET[:CONFIG[:SPLIT[:COLUMN]]]")
        for key, value in zip(("dataset", "config", "split", "column"), parts, strict=False):
            if value:
                fields[key] = value
        for key, values in options.items():
            if key in ("revision", "files"):
                fields[key] = values[-1]
            elif key in ("rows", "samples") and values[-1].isdecimal() and int(values[-1]) > 0:
                fields[key] = int(values[-1])
            else:
                raise DataError(f"hf:{name}: option {key}={values[-1]} is none of rows, samples, revision, files")
        return cls(**fields)


class StreamedDataset:
    """Samples made of rows of a stream. Not for several threads at once, as `StreamRows`."""

    in_order = True

    def __init__(self, rows: StreamRows, spec: StreamSpec, num_rows: int, tokenizer: Tokenizer, seq_len: int) -> None:
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
        return np.stack([sample for sample in self._head[:k]])

    @cached_property
    def content_hash(self) -> str:
        """Of the spec, the order and the held-out samples; a stream cannot be hashed whole. Pin `revision` for certainty."""
        about = f"in order {self._spec} {self.num_samples} {self._seq_len} {self._tokenizer.content_hash}"
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
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: needs the datasets library: pip install datasets") from error
    try:
        stream = datasets.load_dataset(
            spec.dataset,
            spec.config,
            split=spec.split,
            revision=spec.revision,
            data_files=spec.files,
            streaming=True,
        )
    except read_errors() as error:
        raise DataError(f"hf:{spec.dataset}: {error}") from error
    _wait_little(datasets)
    splits = stream.info.splits or {}
    num_rows = splits[spec.split].num_examples if spec.split in splits else 0
    if not num_rows:
        if spec.samples is None:
            raise DataError(f"hf:{spec.dataset} does not say how many rows it has: add ?samples=N")
        num_rows = spec.samples * spec.rows
    rows = StreamRows(stream, name=spec.dataset, column=spec.column)
    return StreamedDataset(rows, spec, num_rows, tokenizer, seq_len)


def _wait_little(datasets: Any) -> None:
    """The library tries for minutes by itself, in the thread that the model's rounds wait for; who reads here tries again in better places."""
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = LIBRARY_TRIES
    for name in _LIBRARY_PAUSES:
        if hasattr(datasets.config, name):
            setattr(datasets.config, name, LIBRARY_PAUSE_S)
