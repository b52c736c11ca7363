"""The rows of a streamed data set by their numbers: read forward, and back from places that are remembered.

The `datasets` library opens a stream at its start, or where it has been before (`state_dict`); `skip(n)` reads all n rows. So
one iterator stays open, and a row further on is reached by reading over those in between, in tables, which costs
little but their bytes. On the way, places are remembered: close together near the furthest one, since what is asked for again
is mostly what a peer that vanished had not trained, and ever further apart behind it. To go on from a place
the library goes over the rows before it in its file, or in the one before where the place is near a beginning.

Reading fails now and then: it is tried again on a stream opened anew, from the nearest place, with pauses. At the start of a node that happens here, a few
times; later whoever asks for rows does it, who has other things to do meanwhile: what a network or a hub may lack for an hour (`read_failures`) is
never given up, and anything else after a few times.
"""

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from farflung.training.errors import DataError, DataUnavailable
from farflung.training.read_failures import may_pass, read_errors

BATCH_ROWS = 256
"""Rows that are taken from the stream at once; of what is read over no text is looked at."""

PLACE_ROWS = 4096
"""Fewest rows between two places."""

PLACE_SPREAD = 16
"""Going back by n rows reads over at most about n / 8 of them, or `PLACE_ROWS`. So places are few: 400 for any data set."""

WORTH_OPENING_ROWS = 1 << 14
"""A place ahead is gone to if that saves reading over so many rows: else it costs less to stay in the open file."""

PAUSES_S = (1.0, 5.0, 25.0)
"""Before reading again what could not be read."""


class StreamRows:
    """Texts by the numbers of their rows. Not for several threads at once: it holds one open stream."""

    def __init__(
        self,
        stream: Any,  # a `datasets.IterableDataset`
        *,
        name: str,  # of the data set, for errors
        column: str,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._name, self._column = stream.with_format("arrow"), name, column
        self._sleep, self._now = sleep, now
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None  # a table of the rows from _begin to _end
        self._begin = self._end = 0
        self._failures = 0
        """Of reading, one after another, none of which got further than to `_furthest`."""
        self._furthest = -1
        self._places: dict[int, Any] = {0: self._stream.state_dict()}  # states, by the row that comes next

    def texts(
        self,
        first_row: int,
        num_rows: int,
        *,
        patient: bool = False,  # whether to wait here for what cannot be read, for half a minute
    ) -> list[str]:
        """A row without text has the empty one: one such row must not end every node that comes to it.

        Raises DataError: where there is no such row or the column is not of texts, and what cannot be read after all; DataUnavailable where
        that may pass."""
        return [self._text(row, patient) for row in range(first_row, first_row + num_rows)]

    def _text(self, row: int, patient: bool) -> str:
        while not self._reach(row, patient):
            if self._batches is not None:
                raise DataError(f"hf:{self._name} has no row {row}, it has {self._end:,}: give a smaller samples=N")
            self._sleep(PAUSES_S[self._failures - 1])
        columns = self._batch.column_names
        if self._column in columns and is_text(kind := self._batch.column(self._column).type):
            return text_of(self._batch.column(self._column)[row - self._begin])
        if self._begin == 0:  # what everybody reads first decides what the column is
            there = "is missing" if self._column not in columns else f"is no text, but {kind}"
            raise DataError(f"hf:{self._name}: column {self._column!r} {there}; the columns are {sorted(columns)}")
        return ""

    def count(self, wanted: int, within_s: float) -> int | None:
        """How many rows there are, of at most `wanted`; None if it takes longer to tell, for they are read over. Raises DataError."""
        began = self._now()
        while self._end < wanted:
            if not self._reach(min(self._end + BATCH_ROWS, wanted) - 1, patient=True):
                if self._batches is not None:
                    return self._end
                self._sleep(PAUSES_S[self._failures - 1])
            if self._now() - began > within_s:
                return None
        return wanted

    def _reach(self, row: int, patient: bool) -> bool:
        """Read until the batch has this row; False when the stream ends before, or with none open when it is to be tried again after a pause. Raises DataError."""
        try:
            if self._batches is None or not self._is_ahead(row):
                self._open(row)
            assert self._batches is not None
            while self._end <= row:
                if (batch := next(self._batches, None)) is None:
                    return False
                self._batch, self._begin, self._end = batch, self._end, self._end + len(batch)
                self._remember()
        except read_errors() as error:
            self._batches = None
            self._failed(error, patient)
            return False
        if self._end > self._furthest:
            self._failures = 0
        return True

    def _failed(self, error: Exception, patient: bool) -> None:
        """Raises DataError, unless it is to be tried again here."""
        if self._end > self._furthest:  # it got on since the last time
            self._furthest, self._failures = self._end, 0
        self._failures += 1
        told = f"hf:{self._name} cannot be read from row {self._end} on"
        cause = f"({type(error).__name__}: {error}); check this machine's network and that the data set is still there"
        if self._failures <= len(PAUSES_S):
            if not patient:
                raise DataUnavailable(f"{told} {cause}") from error
        elif may_pass(error):
            raise DataUnavailable(f"{told}, tried {self._failures} times {cause}") from error
        else:
            raise DataError(
                f"{told}, tried {self._failures} times {cause}, then start again: a node goes on where it was"
            ) from error

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


def is_text(kind: Any) -> bool:
    """Of a column's type in Arrow."""
    import pyarrow

    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return bool(
        pyarrow.types.is_string(plain) or pyarrow.types.is_large_string(plain) or plain == pyarrow.string_view()
    )


def text_of(value: Any) -> str:
    """Of one value of a text column; what is no UTF-8 in it is replaced, as Python does, so on all peers alike."""
    plain = getattr(value, "value", value)  # of a dictionary's entry
    return bytes(plain.as_buffer()).decode(errors="replace") if plain is not None and plain.is_valid else ""


def thinned(places: Collection[int]) -> list[int]:
    """Which of the places stay: 0, and the others further apart the further they are behind the last one."""
    kept, last = [0], max(places)
    for place in sorted(places):
        if place - kept[-1] >= max(PLACE_ROWS, (last - place) / PLACE_SPREAD):
            kept.append(place)
    return kept
