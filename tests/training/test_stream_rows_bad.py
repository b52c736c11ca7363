"""Rows that hold no text, bytes that are no text, and files that hold no rows: a swarm has to get past the one, and be told of the other."""

import gc
import gzip
import json
import lzma
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farflung.training.errors import DataError
from farflung.training.sources import open_dataset
from farflung.training.stream_rows import BATCH_ROWS
from farflung.training.streamed import StreamedDataset
from farflung.training.tokenizer import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library closes no CSV file

COUNT = 1200
BAD = 2 * BATCH_ROWS + 301
"""Far behind what is read at the founding."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("farflung.training.stream_rows.PAUSES_S", (0.0, 0.0, 0.0))
    yield
    gc.collect()  # what is open still, while nobody is warned of it


def text_of(row: int) -> bytes:
    return f"row {row:04}".encode()


def json_with(bad: bytes, row: int = BAD) -> bytes:
    lines = [b'{"text": "%s"}' % text_of(number) for number in range(COUNT)]
    lines[row] = bad
    return b"\n".join(lines)


def read(spec: str) -> list[str]:
    """The texts of the rows from the one before the bad one to the one behind it."""
    dataset = open_dataset(f"{spec}&rows=1&samples={COUNT + 1}", ByteTokenizer(), 40)
    first = BAD - (COUNT + 1 - dataset.num_samples)
    _ = dataset.content_hash
    texts = [ByteTokenizer().decode(dataset.tokens(first + i)) for i in (-1, 0, 1)]
    with pytest.raises(DataError, match="has no row 1200, it has 1,200"):
        dataset.tokens(dataset.num_samples - 1)
    return texts


def expected(text: str) -> list[str]:
    return [text_of(BAD - 1).decode(), text, text_of(BAD + 1).decode()]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (b'{"text": null}', ""),
        (b"{}", ""),
        (b'{"other": 3}', ""),
        (b'{"text": ""}', ""),
        (b'{"text": "a\xff\xfeb"}', "a\ufffd\ufffdb"),
    ],
)
def test_a_line_without_text_is_an_empty_one(tmp_path: Path, bad: bytes, text: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(json_with(bad))
    assert read(f"hf:json?files={tmp_path}/rows.jsonl") == expected(text)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), "dictionary"])
@pytest.mark.parametrize(("bad", "text"), [(None, ""), (b"a\xff\xfe\xe2\x82b", "a\ufffd\ufffd\ufffdb")])
def test_a_table_too(tmp_path: Path, kind: Any, bad: bytes | None, text: str) -> None:
    values = [text_of(row) if row != BAD else bad for row in range(COUNT)]
    column = pa.array(values, pa.large_binary()).view(pa.large_string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "rows.parquet", row_group_size=100)
    assert read(f"hf:parquet?files={tmp_path}/rows.parquet") == expected(text)


@pytest.mark.parametrize("builder", ["text", "csv"])
def test_lines_and_cells_too(tmp_path: Path, builder: str) -> None:
    lines = [text_of(row) if row != BAD else b"a\xff\xfeb" for row in range(COUNT)]
    (tmp_path / "rows").write_bytes(b"\n".join([b"text", *lines] if builder == "csv" else lines))
    assert read(f"hf:{builder}?files={tmp_path}/rows") == expected("a\ufffd\ufffdb")


def test_a_cell_that_is_empty(tmp_path: Path) -> None:
    lines = [b"%d,%s" % (row, text_of(row) if row != BAD else b"") for row in range(COUNT)]
    (tmp_path / "rows.csv").write_bytes(b"\n".join([b"n,text", *lines]))
    assert read(f"hf:csv?files={tmp_path}/rows.csv") == expected("")


def test_cells_of_other_kinds_from_some_line_on(tmp_path: Path) -> None:
    """The library guesses types for ten thousand lines at a time."""
    count = 30_000
    cells = ["NA,1", ",", "007,x"]
    lines = (cells[row // 10_000] for row in range(count))
    (tmp_path / "rows.csv").write_text("\n".join(["text,n", *lines]))
    dataset = open_dataset(f"hf:csv?files={tmp_path}/rows.csv&rows=1&samples={count + 1}", ByteTokenizer(), 8)
    behind = count + 1 - dataset.num_samples
    for row, text in ((5_000, "NA"), (15_000, ""), (25_000, "007")):
        assert ByteTokenizer().decode(dataset.tokens(row - behind)) == text
    with pytest.raises(DataError, match="has no row 30000"):
        dataset.tokens(dataset.num_samples - 1)


def test_a_table_without_the_column(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("body,n\nrow,1\n")
    with pytest.raises(DataError, match=r"not found: \['text'\]"):
        _ = open_dataset(f"hf:csv?files={tmp_path}/rows.csv&rows=1&samples=9", ByteTokenizer(), 8).content_hash


@pytest.mark.parametrize(
    ("row", "said"),
    [({"n": 3}, "column 'text' is missing; the columns are \\['n'\\]"), ({"text": 3}, "'text' is no text, but int64")],
)
def test_a_column_that_is_none_is_said_at_the_founding(tmp_path: Path, row: dict[str, int], said: str) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 100))
    dataset = open_dataset(f"hf:json?files={tmp_path}/rows.jsonl&rows=1&samples=100", ByteTokenizer(), 40)
    with pytest.raises(DataError, match=said):
        _ = dataset.content_hash


def damaged(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes(byte ^ 255 for byte in packed[middle : middle + 20]) + packed[middle + 20 :]


@pytest.mark.parametrize("builder", ["json", "text", "csv"])
@pytest.mark.parametrize("packing", ["xz", "gz", "zip"])
def test_a_damaged_archive_is_a_data_error(tmp_path: Path, packing: str, builder: str) -> None:
    plain = b"text\n" * (builder == "csv") + json_with(b'{"text": ""}') * 50
    path = tmp_path / f"rows.jsonl.{packing}"
    if packing == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rows.jsonl", plain)
        path.write_bytes(damaged(path.read_bytes()))
    else:
        path.write_bytes(damaged({"xz": lzma, "gz": gzip}[packing].compress(plain)))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=f"hf:{builder}"):
        dataset = open_dataset(f"hf:{builder}?files={path}&rows=1&samples=59000", ByteTokenizer(), 40)
        assert isinstance(dataset, StreamedDataset)
        dataset.check_end()


@pytest.mark.parametrize("builder", ["json", "text", "csv", "parquet", "arrow"])
def test_an_empty_file_is_a_data_error(tmp_path: Path, builder: str) -> None:
    (tmp_path / "rows").touch()
    with pytest.raises(DataError, match=f"hf:{builder}"):
        _ = open_dataset(f"hf:{builder}?files={tmp_path}/rows&samples=5", ByteTokenizer(), 40).content_hash


def test_a_founder_is_told_how_many_samples_there_are(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(json_with(b'{"text": ""}'))

    def stream(samples: int) -> StreamedDataset:
        dataset = open_dataset(f"hf:json?files={tmp_path}/rows.jsonl&rows=7&samples={samples}", ByteTokenizer(), 40)
        assert isinstance(dataset, StreamedDataset)
        return dataset

    fits = stream(COUNT // 7)
    fits.check_end()
    _ = fits.content_hash
    assert fits.tokens(fits.num_samples - 1).size == 41
    with pytest.raises(DataError, match=r"has 1,200 rows, 172 samples of 7 need 1,204: give samples=171 or less"):
        stream(COUNT // 7 + 1).check_end()
