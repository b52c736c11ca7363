"""The rows of a streamed data set by their numbers: read forward, and back from places that are remembered.

The `datasets` library opens a stream at its start, or where it has been before (`state_dict`); `skip(n)` reads all n rows. So
one iterator stays open, and a row further on is reached by reading over those in between, in tables, which costs
little but their bytes. On the way, places are remembered: close together near the furthest one, since what is asked for again
is mostly what a peer that vanished had not trained, and ever further apart behind it. To go on from a place
the library goes over the rows before it in its file, or in the one before where the place is near a beginning.

Reading fails now and then: it is tried again on a stream opened anew, from the nearest place, a few times with growing pauses.
"""

import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from farflung.training.errors import DataError

BATCH_ROWS = 256
"""Rows that are taken from the stream at once; of what is read over no text is looked at."""

PLACE_ROWS = 4096
"""Fewest rows between two places."""

PLACE_SPREAD = 16
"""Going back by n rows reads over at most about n / 8 of them, or `PLACE_ROWS`. So places are few: 400 for any data set."""

WORTH_OPENING_ROWS = 1 << 14
"""A place ahead is gone to if that saves reading over so many rows: else it costs less to stay in the open file."""

PAUSES_S = (1.0, 5.0, 25.0)
"""Before reading again what could not be read; the library has tried for a minute or two by itself then."""

_ERRORS_ELSEWHERE = (
    ("datasets.exceptions", "DatasetsError"),
    ("httpx", "RequestError"),
    ("httpx2", "RequestError"),
    ("aiohttp", "ClientError"),
    ("pyarrow", "ArrowException"),
)
"""Of `datasets` and the libraries below it, those that need not be an OSError or ValueError."""


class StreamRows:
    """Texts by the numbers of their rows. Not for several threads at once: it holds one open stream."""

    def __init__(
        self,
        stream: Any,  # a `datasets.IterableDataset`
        *,
        name: str,  # of the data set, for errors
        column: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stream, self._name, self._column, self._sleep = stream.with_format("arrow"), name, column, sleep
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None  # a table of the rows from _begin to _end
        self._begin = self._end = 0
        self._places: dict[int, Any] = {0: self._stream.state_dict()}  # states, by the row that comes next

    def texts(self, first_row: int, num_rows: int) -> list[str]:
        """Raises DataError: where there is no such row or no text in it, and what cannot be read after all."""
        return [self._text(row) for row in range(first_row, first_row + num_rows)]

    def _text(self, row: int) -> str:
        if not self._reach(row):
            raise DataError(f"hf:{self._name} has no row {row}: give a smaller samples=N")
        columns = self._batch.column_names
        text = self._batch.column(self._column)[row - self._begin].as_py() if self._column in columns else None
        if not isinstance(text, str):
            raise DataError(f"hf:{self._name}: column {self._column!r} is no text; it has {sorted(columns)}")
        return text

    def _reach(self, row: int) -> bool:
        """Read until the batch has this row; False when the stream ends before. Raises DataError."""
        furthest, pauses = -1, iter(PAUSES_S)
        while True:
            try:
                if self._batches is None or not self._is_ahead(row):
                    self._open(row)
                assert self._batches is not None
                while self._end <= row:
                    if (batch := next(self._batches, None)) is None:
                        return False
                    self._batch, self._begin, self._end = batch, self._end, self._end + len(batch)
                    self._remember()
                return True
            except read_errors() as error:
                self._batches = None
                if self._end > furthest:  # it got on since the last time
                    furthest, pauses = self._end, iter(PAUSES_S)
                if (pause := next(pauses, None)) is None:
                    raise DataError(
                        f"hf:{self._name} cannot be read from row {self._end} on, tried {len(PAUSES_S) + 1} times "
                        f"({type(error).__name__}: {error}); check this machine's network and that the data set is still there, "
                        "then start again: a node goes on where it was"
                    ) from error
            self._sleep(pause)

    def _is_ahead(self, row: int) -> bool:
        """Whether the open stream has the row, or is the best way to it."""
        if row < self._end:
            return row >= self._begin
        return not any(self._end + WORTH_OPENING_ROWS <= place <= row for place in self._places)

    def _open(self, row: int) -> None:
        self._batches = None  # an iterator writes into the stream's state: never two
        place = max(place for place in self._places if place <= row)
        self._begin = self._end = place
        self._stream.load_state_dict(self._places[place])
        self._batches = iter(self._stream.iter(batch_size=BATCH_ROWS))

    def _remember(self) -> None:
        if self._end - max(place for place in self._places if place <= self._end) >= PLACE_ROWS:
            places = {**self._places, self._end: self._stream.state_dict()}
            self._places = {place: places[place] for place in thinned(places)}


def thinned(places: Collection[int]) -> list[int]:
    """Which of the places stay: 0, and the others further apart the further they are behind the last one."""
    kept, last = [0], max(places)
    for place in sorted(places):
        if place - kept[-1] >= max(PLACE_ROWS, (last - place) / PLACE_SPREAD):
            kept.append(place)
    return kept


def read_errors() -> tuple[type[Exception], ...]:
    """What opening and reading a stream may raise. A library that was never imported has raised nothing."""
    loaded = [(sys.modules[module], name) for module, name in _ERRORS_ELSEWHERE if module in sys.modules]
    return (OSError, EOFError, ValueError, zlib.error, *(getattr(module, name) for module, name in loaded))
