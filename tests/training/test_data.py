"""Data sources: what a sample is, what is held out, and hashes."""

import errno
import io
import itertools
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farflung.training.corpus import (
    BLOCK_CHARACTERS,
    Document,
    digest_of,
    is_held_out,
    python_documents,
    split,
    text_documents,
)
from farflung.training.data import Dataset, text_dataset
from farflung.training.errors import DataError
from farflung.training.files import files_in
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def held_out(key: bytes) -> bool:
    return is_held_out(digest_of(key))


class AnyIds(ByteTokenizer):
    vocab_size = 1 << 16


def check(dataset: Dataset, seq_len: int, vocab_size: int = BYTES.vocab_size) -> None:
    """What holds for every source."""
    assert dataset.num_samples >= 1
    for index in {0, dataset.num_samples // 2, dataset.num_samples - 1}:
        tokens = dataset.tokens(index)
        assert tokens.shape == (seq_len + 1,) and tokens.dtype == np.int64
        assert tokens.min() >= 0 and tokens.max() < vocab_size
        assert np.array_equal(tokens, dataset.tokens(index))
    heldout = dataset.heldout(4)
    assert heldout.shape[1] == seq_len + 1 and 1 <= heldout.shape[0] <= 4 and heldout.dtype == np.int64
    assert len(dataset.content_hash) == 64
    for index in (-1, dataset.num_samples):
        with pytest.raises(IndexError):
            dataset.tokens(index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    for number in range(60):
        (root / "deep" / f"{number:02}.txt").write_text(f"This is text number {number}. " * 20)
    return root


def test_the_embedded_corpus_is_this_python() -> None:
    documents = python_documents()
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if name.startswith(("site-packages", "test/", "encodings", "_sysconfigdata"))]
    # every platform's Python has a few hundred files; a few are held out, whatever else there is
    assert 200 < len(names) < 2000
    assert 0.02 < np.mean([held_out(document.text.encode()) for document in documents]) < 0.09


def test_the_embedded_corpus_as_a_data_set() -> None:
    dataset = open_dataset("python", BYTES, 128)
    check(dataset, 128)
    assert dataset.num_samples > 20_000
    text = BYTES.decode(dataset.heldout(100).flatten())
    assert "import" in text and "def " in text


def test_samples_overlap_by_one_token_and_miss_none(folder: Path) -> None:
    dataset = open_dataset(f"text:{folder}", BYTES, 32)
    check(dataset, 32)
    samples = [dataset.tokens(index) for index in range(dataset.num_samples)]
    assert all(a[-1] == b[0] for a, b in itertools.pairwise(samples))
    run = np.concatenate([sample[:-1] for sample in samples])
    kept = [p for p in sorted(folder.rglob("*.txt")) if not held_out(p.read_bytes())]
    whole = b"".join(p.read_bytes() + b"\0" for p in kept)
    ends = np.where(run == BYTES.end_of_text, 0, run)
    assert ends.astype(np.uint8).tobytes() == whole[: run.size]


def test_held_out_text_is_never_trained_on(folder: Path) -> None:
    dataset = open_dataset(f"text:{folder}", BYTES, 32)
    trained = BYTES.decode(np.concatenate([dataset.tokens(i) for i in range(dataset.num_samples)]))
    for path in folder.rglob("*.txt"):
        if held_out(path.read_bytes()):
            assert path.read_text()[:24] not in trained


def test_a_single_file_is_cut_into_blocks(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {number}\n" for number in range(3000)))
    dataset = open_dataset(f"text:{path}", BYTES, 64)
    check(dataset, 64)
    assert dataset.heldout(10**6).shape[0] * 64 < 0.3 * path.stat().st_size
    blocks = [document.text for document in text_documents(path)]
    assert "".join(blocks) == path.read_text() and max(map(len, blocks)) < 3 * min(map(len, blocks))
    assert len(blocks) >= 39 and all(block.endswith("\n") for block in blocks)


def test_blocks_end_at_words_or_anywhere_where_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    for text, end in (("word " * 300_000, " "), ("ü" * 1_500_000, "ü")):
        path.write_text(text)
        blocks = [document.text for document in text_documents(path)]
        assert "".join(blocks) == text and {block[-1] for block in blocks} == {end}
        assert all(3 * BLOCK_CHARACTERS // 4 < len(block) <= BLOCK_CHARACTERS for block in blocks[:-1])
        assert 0 < len(blocks[-1]) < 2 * BLOCK_CHARACTERS


@pytest.mark.parametrize("licences", [1, 40])
def test_of_a_folder_a_part_of_each_large_file_is_held_out(tmp_path: Path, licences: int) -> None:
    (tmp_path / "wiki.txt").write_text("".join(f"line {number} of a wiki\n" for number in range(80_000)))
    for number in range(licences):
        (tmp_path / f"LICENSE{number}").write_text(f"licence {number}: " + "as is, " * 120)
    dataset = open_dataset(f"text:{tmp_path}", BYTES, 64)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.01 * size < dataset.heldout_tokens < 0.15 * size
    assert 0.8 * size < dataset.num_samples * 64 < size


def test_a_folder_with_one_file_is_data(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "one.txt"
    path.write_text("".join(f"line {number}\n" for number in range(3000)))
    check(open_dataset(f"text:{path.parent}", BYTES, 64), 64)
    hashes = {open_dataset(f"text:{data}", BYTES, 64).content_hash for data in (path, path.parent)}
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as a checkout on another system has it
    assert len(hashes | {open_dataset(f"text:{path}", BYTES, 64).content_hash}) == 1


def test_opening_text_takes_little_more_memory_than_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.txt"
    path.parent.mkdir()
    path.write_text("".join(f"line {number}, a few words\n" for number in range(200_000)))
    tracemalloc.start()
    try:
        dataset = open_dataset(f"text:{path.parent}", BYTES, 64)
        _ = dataset.content_hash
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Two bytes a token, an eighth to grow into, and what is read at a time.
    assert peak < 2.25 * path.stat().st_size + (4 << 20)


def test_the_hash_tells_texts_and_lengths_apart(folder: Path) -> None:
    first = open_dataset(f"text:{folder}", BYTES, 32).content_hash
    assert open_dataset(f"text:{folder}", BYTES, 32).content_hash == first
    assert open_dataset(f"text:{folder}", BYTES, 33).content_hash != first
    changed = folder / "deep" / "00.txt"
    changed.write_text(changed.read_text().replace("This", "That"))
    assert open_dataset(f"text:{folder}", BYTES, 32).content_hash != first


def test_few_items_still_hold_one_out() -> None:
    items = [b"a", b"b", b"c"]
    training, heldout = split(items, [digest_of(item) for item in items])
    assert sorted(training + heldout) == items and len(heldout) == 1
    with pytest.raises(DataError):
        split([b"a"], [digest_of(b"a")])
    texts = [Document(name=name, text=name * 99) for name in "abc"]
    dataset = text_dataset(texts, BYTES, 9)
    assert (dataset.num_samples, dataset.heldout_tokens) == ((200 - 1) // 9, 100)
    least = min("abc", key=lambda name: digest_of(name.encode() * 99))
    assert BYTES.decode(dataset.heldout(1)[0]) == least * 10


@pytest.mark.parametrize("others", [1, 200])
def test_copies_under_other_names_are_on_one_side(others: int) -> None:
    texts = [f"text {number} of {others}" for number in range(others + 1)]
    documents = [Document(name=f"{copy}/{text}", text=text) for copy in "abc" for text in texts]
    parts = split(documents, [digest_of(document.text.encode()) for document in documents])
    training, heldout = ({document.text for document in part} for part in parts)
    assert training and heldout and not training & heldout and training | heldout == set(texts)
    with pytest.raises(DataError):
        split("ab", [digest_of(b"the same")] * 2)


def test_too_little_text_says_so() -> None:
    with pytest.raises(DataError, match="too small"):
        text_dataset([Document(name="a", text="ab"), Document(name="b", text="ab")], BYTES, 64)
    several = [Document(name=name, text=name * 99) for name in "ab"]
    with pytest.raises(
        DataError,
        match=r"of 100 tokens to train on and 100 held out each part has to hold a sample of 201; .*`seq_len`",
    ):
        text_dataset(several, BYTES, 200)


@pytest.mark.parametrize("spec", ["", "pythons", "python:x", "text:", "ftp:x", "text:/no/such/file"])
def test_wrong_specs_are_named(spec: str) -> None:
    with pytest.raises(DataError):
        open_dataset(spec, BYTES, 32)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that nobody can read from its start, root neither")
def test_text_that_cannot_be_read_says_so(folder: Path) -> None:
    bad = folder / "zz.txt"
    bad.symlink_to("/proc/self/mem")
    for path in (folder, bad):
        with pytest.raises(DataError, match=r"zz\.txt cannot be read: .*take it out"):
            open_dataset(f"text:{path}", BYTES, 32)


def test_what_is_no_text_is_found(folder: Path) -> None:
    bad = folder / "zz"
    far = "Grüße, " * 100_000
    for content, offset in (
        (b"\x89PNG\r\n\x1a\n", "0"),
        ("ascii as windows has it".encode("utf-16-le"), "1"),
        ("Grüße".encode("latin-1"), "2"),
        ("abc中文".encode("gbk"), "3"),
        (far.encode() + b"\xff", "900,000"),
        (far.encode() + "ü".encode()[:1], "900,000"),  # cut off
        (b"x" * ((1 << 18) - 1) + b"\xc3(", "262,143"),  # begins in one read, and is wrong in the next
    ):
        bad.write_bytes(content)
        for path in (folder, bad):
            with pytest.raises(DataError, match=rf"zz is no text in UTF-8, by its byte {offset} .*convert it, or take"):
                open_dataset(f"text:{path}", BYTES, 32)
    bad.write_text(far)
    assert "".join(document.text for document in text_documents(bad)) == far


# Folders


@pytest.mark.parametrize("kind,name", [("text", "a.txt"), ("shards", "a.u16.bin")])
def test_links_are_followed(tmp_path: Path, kind: str, name: str) -> None:
    plain, linked = tmp_path / "plain", tmp_path / "linked"
    (plain / "sub").mkdir(parents=True)
    (linked).mkdir()
    (linked / "sub").symlink_to(plain / "sub")
    for path, first in ((plain / name, 0), (plain / "sub" / name, 9000)):
        path.write_text("".join(f"{number:05}\n" for number in range(first, first + 3000)))
    (linked / name).symlink_to(plain / name)
    files_in_both = [[str(file.relative_to(root)) for file in files_in(root)] for root in (plain, linked)]
    assert files_in_both == [[name, f"sub/{name}"]] * 2
    tokenizer = BYTES if kind == "text" else AnyIds()
    assert len({open_dataset(f"{kind}:{root}", tokenizer, 16).content_hash for root in (plain, linked)}) == 1


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_links_that_cannot_be_followed_are_named(folder: Path, kind: str) -> None:
    link = folder / "deep" / "link"
    (folder / "other").mkdir()
    (folder / "other" / "back").symlink_to(folder / "deep")
    for target, words in (
        ("none", "link cannot be read: No such file"),
        ("link", "link cannot be read: Too many levels"),
        (folder, "leads back"),
        (folder / "other", "leads back"),
    ):
        link.symlink_to(target)
        with pytest.raises(DataError, match=rf"{words}.*take it out of the data"):
            open_dataset(f"{kind}:{folder}", BYTES, 32)
        link.unlink()


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_folders_that_cannot_be_read_are_named(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    iterdir = Path.iterdir

    def shut(path: Path) -> Iterator[Path]:  # for root, no folder is
        if path.name == "deep":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", shut)
    with pytest.raises(DataError, match=r"deep cannot be read: Permission denied; make it readable"):
        open_dataset(f"{kind}:{folder}", BYTES, 32)


# Token shards


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' names are text")
def test_a_shard_whose_name_is_no_text(tmp_path: Path) -> None:
    np.arange(5000, dtype="<u2").tofile(os.fsencode(tmp_path) + b"/\xff.u16.bin")
    check(open_dataset(f"shards:{tmp_path}", AnyIds(), 32), 32, AnyIds.vocab_size)


@pytest.mark.parametrize("name,dtype", [("a.u16.bin", "<u2"), ("a.u32.bin", "<u4"), ("a.bin", "<u2"), ("a.npy", "<i4")])
def test_shards_of_every_layout(tmp_path: Path, name: str, dtype: str) -> None:
    tokens = (np.arange(5000) % 250).astype(dtype)
    if name.endswith(".npy"):
        np.save(tmp_path / name, tokens)
    else:
        tokens.tofile(tmp_path / name)
    if name == "a.bin":
        (tmp_path / "a.bin.dtype").write_text("uint16\n")
    dataset = open_dataset(f"shards:{tmp_path / name}", BYTES, 32)
    check(dataset, 32)
    sample = dataset.tokens(3)
    assert np.array_equal(np.diff(sample) % 250, np.ones(32))
    assert dataset.num_samples + dataset.heldout(10**6).shape[0] == (5000 - 1) // 32


def test_a_folder_of_shards_has_every_window_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    windows = set()
    for shard in range(3):
        tokens = rng.integers(0, 250, 1000 + shard, dtype=np.uint16)
        tokens.tofile(tmp_path / f"{shard}.u16.bin")
        windows |= {tokens[i * 16 : i * 16 + 17].tobytes() for i in range((tokens.size - 1) // 16)}
    dataset = open_dataset(f"shards:{tmp_path}", BYTES, 16)
    check(dataset, 16)
    training = [dataset.tokens(i) for i in range(dataset.num_samples)]
    served = [row.astype(np.uint16).tobytes() for row in [*training, *dataset.heldout(10**6)]]
    assert len(served) == len(set(served)) == len(windows)
    assert set(served) == windows


def test_unusable_shards_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0" * 1000)
    with pytest.raises(DataError, match="u16"):
        open_dataset(f"shards:{tmp_path}", BYTES, 16)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"no \.bin or \.npy"):
        open_dataset(f"shards:{tmp_path}", BYTES, 16)
    with pytest.raises(DataError, match="no such file or folder"):
        open_dataset(f"shards:{tmp_path}/none", BYTES, 16)


def saved(array: Any, save: Callable[..., None] = np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "name,content,words",
    [
        ("empty.npy", b"", "as numpy saves it"),
        ("short.npy", b"abc", "as numpy saves it"),
        ("archive.npy", saved(np.arange(1000), np.savez), "as numpy saves it"),
        ("objects.npy", saved(np.array([{"a": 1}])), "as numpy saves it"),
        ("cut.npy", saved(np.arange(1000))[:500], "not all of one"),
        # Each of these takes another way out of numpy's reading of the header.
        ("unclosed.npy", saved(np.arange(1000)).replace(b"0,)", b"0, "), "as numpy saves it"),
        ("key.npy", saved(np.arange(1000)).replace(b" 'shape'", b"b'shape'"), "as numpy saves it"),
        ("type.npy", saved(np.arange(1000)).replace(b"<i8", b"<,8"), "as numpy saves it"),
        ("floats.npy", saved(np.ones(1000)), "not a row of integers"),
        ("empty.u16.bin", b"", "0 bytes are no row of uint16"),
        ("odd.u16.bin", b"\0" * 1001, "1001 bytes are no row of uint16"),
    ],
)
def test_a_broken_shard_is_named_with_the_remedy(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{words}.*anew"):
        open_dataset(f"shards:{tmp_path}", BYTES, 16)


@pytest.mark.parametrize("wrong", [300, -1])
def test_wrong_ids_far_inside_a_shard_are_found_with_the_hash(tmp_path: Path, wrong: int) -> None:
    tokens = np.arange(5000, dtype="<i4") % 250
    tokens[4000] = wrong
    np.save(tmp_path / "a.npy", tokens)
    dataset = open_dataset(f"shards:{tmp_path}", BYTES, 16)
    with pytest.raises(DataError, match=rf"a\.npy: id {wrong} is none of the tokenizer's 257"):
        _ = dataset.content_hash


# Streams, through the `datasets` library from local files


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {number:03} says hello", "n": number}) for number in range(200)]
    path.write_text("\n".join(lines))
    yield path


def test_a_stream_gives_the_rows_of_a_sample(rows: Path) -> None:
    dataset = open_dataset(f"hf:json?files={rows}&rows=2&samples=100", BYTES, 48)
    check(dataset, 48)
    assert dataset.num_samples == 95  # five of a hundred are held out
    sample = dataset.tokens(7)
    assert BYTES.decode(sample) == "row 024 says hellorow 025 says hello"
    assert sample[18] == sample[37] == sample[48] == BYTES.end_of_text
    assert BYTES.decode(dataset.heldout(1)[0]).startswith("row 000")
    assert [BYTES.decode(sample)[:7] for sample in dataset.heldout(3)] == ["row 000", "row 002", "row 006"]  # of five


def test_long_rows_are_cropped(rows: Path) -> None:
    dataset = open_dataset(f"hf:json:::text?files={rows}&rows=2&samples=100", BYTES, 20)
    assert BYTES.decode(dataset.tokens(0)) == "row 010 says hellorow"[:20]


def test_streams_that_do_not_fit_say_so(rows: Path) -> None:
    with pytest.raises(DataError, match=r"samples=N"):
        open_dataset(f"hf:json?files={rows}", BYTES, 16)
    with pytest.raises(DataError, match="has no row 2200"):
        open_dataset(f"hf:json?files={rows}&samples=1000", BYTES, 16).tokens(500)
    with pytest.raises(DataError, match="column 'n' is no text"):
        open_dataset(f"hf:json:::n?files={rows}&samples=50", BYTES, 16).tokens(0)
    with pytest.raises(DataError):
        open_dataset(f"hf:json?files={rows}.missing&samples=50", BYTES, 16)


@pytest.mark.parametrize("spec", ["hf:a:b:c:d:e", "hf::x", "hf:a?rows=0", "hf:a?rows=x", "hf:a?color=red"])
def test_wrong_stream_specs_are_named(spec: str) -> None:
    with pytest.raises(DataError, match="hf:"):
        open_dataset(spec, BYTES, 16)


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_dataset("hf:anything", BYTES, 16)


def test_the_number_of_rows_comes_from_the_data_set(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    load = datasets.load_dataset_builder

    def with_counts(*args: Any, **options: Any) -> Any:
        builder = load(*args, **options)
        builder.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=200)})
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", with_counts)
    dataset = open_dataset(f"hf:json?files={rows}&rows=4", BYTES, 16)
    assert dataset.num_samples == 48  # of fifty
