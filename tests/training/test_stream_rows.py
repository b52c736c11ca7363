"""Rows of a stream by number: what is read for them, going back, and reading that fails."""

import errno
import itertools
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.training.errors import DataError, DataUnavailable, NotNow
from farflung.training.order import SampleOrder
from farflung.training.read_failures import may_pass, read_errors
from farflung.training.sources import open_dataset
from farflung.training.stream_opening import LIBRARY_TRIES
from farflung.training.stream_rows import PAUSES_S, PLACE_SPREAD, StreamRows, thinned
from farflung.training.tokenizer import ByteTokenizer

FILE_ROWS = (1300, 1, 777, 3000, 922)
ROWS = sum(FILE_ROWS)
GROUP = 100
"""Rows in one table of a parquet file."""


def text_of(row: int) -> str:
    return f"row {row:04}"


@pytest.fixture(scope="module", params=["json", "parquet"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A builder's name, and a folder with the rows in files of very different lengths."""
    folder = tmp_path_factory.mktemp(request.param)
    first = 0
    for number, count in enumerate(FILE_ROWS):
        texts = [text_of(row) for row in range(first, first + count)]
        if request.param == "json":
            (folder / f"{number}.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=GROUP)
        first += count
    return request.param, folder


@dataclass
class Watched:
    """A stream whose iterators count rows, and break where they are told to."""

    stream: Any
    breaks: list[tuple[int, Exception]] = field(default_factory=list)
    """What to raise once so many rows have been read since the start of the test, in order."""
    rows: int = 0
    opened: int = 0

    def with_format(self, name: str) -> "Watched":
        self.stream = self.stream.with_format(name)
        return self

    def state_dict(self) -> Any:
        return self.stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.stream.load_state_dict(state)

    def iter(self, batch_size: int) -> Iterator[Any]:
        self.opened += 1
        for batch in self.stream.iter(batch_size=batch_size):
            if self.breaks and self.rows >= self.breaks[0][0]:
                raise self.breaks.pop(0)[1]
            self.rows += len(batch)
            yield batch


def load(files: tuple[str, Path]) -> Any:
    import datasets

    builder, folder = files
    return datasets.load_dataset(builder, data_files=f"{folder}/*.{builder}", split="train", streaming=True)


def watched(
    files: tuple[str, Path], breaks: Sequence[tuple[int, Exception]] = ()
) -> tuple[StreamRows, Watched, list[float]]:
    """Rows, what they read, and how long they waited."""
    waits: list[float] = []
    stream = Watched(load(files), list(breaks))
    return StreamRows(stream, name="some/set", column="text", sleep=waits.append), stream, waits


@pytest.fixture(autouse=True)
def close_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of a few thousand rows has many places too; and nobody is told that it was opened."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("farflung.training.stream_rows.BATCH_ROWS", 32)
    monkeypatch.setattr("farflung.training.stream_rows.PLACE_ROWS", 64)
    monkeypatch.setattr("farflung.training.stream_rows.WORTH_OPENING_ROWS", 200)


def test_consecutive_windows_read_their_own_rows(files: tuple[str, Path]) -> None:
    rows, stream, _ = watched(files)
    for first in range(0, 3000, 4):
        assert rows.texts(first, 4) == [text_of(row) for row in range(first, first + 4)]
    assert 3000 <= stream.rows < 3000 + 32 and stream.opened == 1


def test_windows_with_those_of_others_between_are_read_over_once(files: tuple[str, Path]) -> None:
    rows, stream, _ = watched(files)
    for first in range(1000, ROWS - 64, 256):
        assert rows.texts(first, 64) == [text_of(row) for row in range(first, first + 64)]
    assert stream.rows <= ROWS and stream.opened == 1


@pytest.mark.parametrize("files", ["parquet"], indirect=True)  # of lines, one table holds a whole file
def test_the_files_too_are_read_once(files: tuple[str, Path]) -> None:
    stream = load(files)
    source = stream._ex_iterable
    generate, read = source.generate_tables_fn, []

    def counted(**kwargs: Any) -> Iterator[Any]:
        for key, table in generate(**kwargs):
            read.append(len(table))
            yield key, table

    source.generate_tables_fn = counted
    rows = StreamRows(stream, name="some/set", column="text")
    for first in range(0, 3000, 4):
        rows.texts(first, 4)
    assert 3000 <= sum(read) <= 3000 + 2 * GROUP
    rows.texts(2500, 4)  # of the file that begins at row 2078: what is before it there is gone over
    assert sum(read) <= 3000 + 2 * GROUP + (2500 - 2078) + 2 * GROUP


def test_going_back_reads_from_near_by_and_returning_does_not_read_it_all_again(files: tuple[str, Path]) -> None:
    rows, stream, _ = watched(files)
    rows.texts(5500, 4)
    before = stream.rows
    assert rows.texts(5100, 4) == [text_of(row) for row in range(5100, 5104)]
    assert stream.rows - before <= 64 + 2 * 400 / PLACE_SPREAD + 2 * 32
    back = stream.rows
    assert rows.texts(5504, 4) == [text_of(row) for row in range(5504, 5508)]
    assert stream.rows - back <= 400 + 2 * 32 and stream.opened <= 3


def test_a_place_ahead_is_opened_when_it_saves_much(files: tuple[str, Path]) -> None:
    rows, stream, _ = watched(files)
    rows.texts(5500, 4)
    rows.texts(10, 4)
    before = stream.rows
    assert rows.texts(5300, 1) == [text_of(5300)]
    assert stream.rows - before <= 64 + 2 * 200 / PLACE_SPREAD + 2 * 32


@settings(max_examples=30, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 200)), max_size=12))
def test_the_same_rows_whatever_was_asked_before(files: tuple[str, Path], requests: list[tuple[int, int]]) -> None:
    rows, _, _ = watched(files)
    for first, count in requests:
        count = min(count, ROWS - first)
        assert rows.texts(first, count) == [text_of(row) for row in range(first, first + count)]


@given(steps=st.lists(st.integers(1, 10**9), min_size=1, max_size=600))
def test_places_are_few_and_closer_the_nearer_to_the_last(steps: list[int]) -> None:
    kept = [0]
    for step in steps:
        last = kept[-1] + max(step, 64)
        kept = thinned([*kept, last])
        assert kept[0] == 0 and kept[-1] == last and len(kept) <= 400


def test_going_far_back_costs_a_share_of_the_way() -> None:
    kept, last = [0], 0
    for last in range(64, 300_000, 64):
        kept = thinned([*kept, last])
    gaps = [(behind, ahead - behind) for behind, ahead in itertools.pairwise(kept)]
    assert 50 < len(gaps) < 400
    assert all(gap <= 2 * max(64, (last - behind) / PLACE_SPREAD) for behind, gap in gaps)


def test_a_broken_connection_is_tried_again(files: tuple[str, Path]) -> None:
    broken = [(500, ConnectionError("Server Disconnected")), (900, TimeoutError()), (900, EOFError("cut"))]
    rows, stream, waits = watched(files, broken)
    read = [text for first in range(0, 1200, 4) for text in rows.texts(first, 4, patient=True)]
    assert read == [text_of(row) for row in range(1200)]
    assert not stream.breaks and waits == [PAUSES_S[0], *PAUSES_S[:2]]
    assert stream.rows < 1200 + 32 + 3 * (64 + 32)  # from the nearest place


def test_one_that_stays_broken_is_a_data_error_that_says_what_to_do(files: tuple[str, Path]) -> None:
    rows, stream, waits = watched(files, [(500, OSError("a torn file"))] * 4)
    rows.texts(0, 400)
    with pytest.raises(
        DataError, match=r"hf:some/set .*4 times \(OSError: a torn file\); check .*network.* start again"
    ) as raised:
        rows.texts(400, 400, patient=True)
    assert not isinstance(raised.value, NotNow)
    assert waits == list(PAUSES_S) and not stream.breaks
    assert rows.texts(400, 400) == [text_of(row) for row in range(400, 800)]  # it is back


def test_a_network_that_is_away_is_never_given_up_and_nobody_waits_for_it_here(files: tuple[str, Path]) -> None:
    """A node has commits to apply meanwhile."""
    rows, stream, waits = watched(files, [(500, ConnectionError("Server Disconnected"))] * 40)
    for _ in range(40):
        with pytest.raises(DataUnavailable, match=r"hf:some/set cannot be read from row .*Server Disconnected"):
            rows.texts(400, 400)
    assert not waits and not stream.breaks
    assert rows.texts(400, 400) == [text_of(row) for row in range(400, 800)]


def test_what_else_fails_is_given_up_after_as_many_tries_as_at_the_start(files: tuple[str, Path]) -> None:
    rows, stream, waits = watched(files, [(500, pa.ArrowInvalid("no parquet"))] * 4)
    for _ in PAUSES_S:
        with pytest.raises(DataUnavailable):
            rows.texts(400, 400)
    with pytest.raises(DataError) as raised:
        rows.texts(400, 400)
    assert not isinstance(raised.value, NotNow) and not waits and not stream.breaks


class Status(OSError):
    """As the hub's library raises it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.response = SimpleNamespace(status_code=code)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (Status(503), True),
        (Status(429), True),
        (Status(404), False),
        (Status(401), False),
        (caused(ValueError("cut short"), ConnectionError()), True),
        (caused(FileNotFoundError("gone"), Status(404)), False),
        (FileNotFoundError("gone"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("not JSON"), False),
        (pa.ArrowInvalid("no parquet"), False),
    ],
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes and isinstance(error, read_errors())


def test_the_librarys_own_errors_of_a_network_may_pass() -> None:
    import datasets.utils.file_utils as library

    assert all(may_pass(kind("no answer")) for kind in library.CONNECTION_ERRORS_TO_RETRY)


@pytest.mark.parametrize("status", [None, 504, 429])
def test_the_library_does_not_wait_for_minutes_while_a_model_is_trained(
    status: int | None, files: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config as settings_
    import datasets.utils.file_utils as library
    from huggingface_hub.errors import HfHubHTTPError

    def fail(*_: object) -> bytes:
        if status is None:
            raise library.CONNECTION_ERRORS_TO_RETRY[0]("no answer")
        raise HfHubHTTPError("no", response=SimpleNamespace(status_code=status, headers={}, request=None))

    open_dataset(spec_of(files), ByteTokenizer(), 40)
    assert settings_.STREAMING_READ_MAX_RETRIES == settings_.STREAMING_OPEN_MAX_RETRIES == LIBRARY_TRIES
    slept = list[float]()
    monkeypatch.setattr(library, "time", SimpleNamespace(sleep=slept.append))
    file = library._add_retries_to_file_obj_read_method(SimpleNamespace(read=fail))
    with pytest.raises(ConnectionError):
        file.read(1)
    assert sum(slept) < 5.0


def test_getting_on_again_is_not_mistaken_for_getting_further(files: tuple[str, Path]) -> None:
    """Rows that are read again before the one that breaks do not earn another try."""

    class BadRow(Watched):
        def iter(self, batch_size: int) -> Iterator[Any]:
            assert self.opened < 10, "it never gives up"
            for batch in super().iter(batch_size):
                if text_of(700) in batch.column("text").to_pylist():
                    raise OSError("this part of the file is damaged")
                yield batch

    waits: list[float] = []
    stream = BadRow(load(files))
    rows = StreamRows(stream, name="some/set", column="text", sleep=waits.append)
    with pytest.raises(DataError, match=r"damaged"):
        rows.texts(690, 20, patient=True)
    assert waits == list(PAUSES_S) and stream.opened == 4


def test_errors_of_libraries_that_are_no_os_errors(files: tuple[str, Path]) -> None:
    rows, _, waits = watched(files, [(100, pa.ArrowNotImplementedError("cut in the middle"))])
    assert rows.texts(0, 300, patient=True)[-1] == text_of(299) and waits == [PAUSES_S[0]]


def test_bugs_are_not_hidden(files: tuple[str, Path]) -> None:
    rows, _, waits = watched(files, [(100, ZeroDivisionError())])
    with pytest.raises(ZeroDivisionError):
        rows.texts(0, 300)
    assert not waits


def test_the_end_is_no_fault_of_the_network(files: tuple[str, Path]) -> None:
    rows, stream, waits = watched(files)
    for _ in range(2):
        with pytest.raises(
            DataError, match=f"hf:some/set has no row {ROWS}, it has {ROWS:,}: give a smaller samples=N"
        ):
            rows.texts(ROWS - 2, 4)
    assert not waits and stream.opened <= 2
    assert rows.texts(ROWS - 1, 1) == [text_of(ROWS - 1)] and rows.texts(0, 1) == [text_of(0)]


def test_rows_are_counted_as_far_as_somebody_wants_to_know(files: tuple[str, Path]) -> None:
    rows, stream, _ = watched(files, [(500, ConnectionError("Server Disconnected"))])
    assert rows.count(700, 1e9) == 700 and rows.count(300, 1e9) == 300
    assert rows.texts(20, 1) == [text_of(20)]
    assert rows.count(ROWS, 1e9) == ROWS and rows.count(ROWS + 1, 1e9) == ROWS
    assert rows.count(10 * ROWS, 1e9) == ROWS and not stream.breaks
    assert rows.texts(ROWS - 1, 1) == [text_of(ROWS - 1)]


def test_counting_ends_when_it_takes_long(files: tuple[str, Path]) -> None:
    clock = itertools.count()
    stream = Watched(load(files))
    rows = StreamRows(stream, name="some/set", column="text", now=lambda: float(next(clock)))
    assert rows.count(ROWS, 9.5) is None and stream.rows == 10 * 32


def spec_of(files: tuple[str, Path]) -> str:
    builder, folder = files
    return f"hf:{builder}?files={folder}/*.{builder}&rows=4&samples={ROWS // 4}"


@settings(max_examples=10, deadline=None)
@given(numbers=st.lists(st.integers(0, 4 * ROWS), min_size=1, max_size=20))
def test_a_sample_number_means_the_same_on_every_peer_and_after_a_restart(
    files: tuple[str, Path], numbers: list[int]
) -> None:
    one, other = (open_dataset(spec_of(files), ByteTokenizer(), 40) for _ in range(2))
    order = SampleOrder(num_samples=one.num_samples, seed=5, in_order=one.in_order)
    assert one.content_hash == other.content_hash
    samples = [one.tokens(order.index(number)) for number in numbers]
    again = [other.tokens(order.index(number)) for number in reversed(numbers)]
    for number, sample, same in zip(numbers, samples, reversed(again), strict=True):
        assert np.array_equal(sample, same)
        first = 4 * (number % one.num_samples) + ROWS - ROWS % 4 - 4 * one.num_samples  # behind the held-out rows
        assert ByteTokenizer().decode(sample).startswith(text_of(first))


def test_an_epoch_ends_and_the_next_one_begins_with_every_sample_once(files: tuple[str, Path]) -> None:
    dataset = open_dataset(spec_of(files), ByteTokenizer(), 40)
    order = SampleOrder(num_samples=dataset.num_samples, seed=5, in_order=dataset.in_order)
    count = dataset.num_samples
    epochs = [
        [dataset.tokens(order.index(number)).tobytes() for number in range(e * count, (e + 1) * count)] for e in (0, 1)
    ]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) == count
