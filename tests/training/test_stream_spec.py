"""What a spec of streamed data says, and what it may not say."""

from pathlib import Path

import pytest

from farflung.training.errors import DataError
from farflung.training.stream_spec import BUILDERS, StreamSpec, check_place


def test_specs_are_parsed() -> None:
    spec = StreamSpec.parse("allenai/c4:en:validation?rows=8&revision=abc")
    assert spec == StreamSpec(dataset="allenai/c4", config="en", split="validation", rows=8, revision="abc")


@pytest.mark.parametrize(
    "text",
    [
        "a:b:c:d:e",
        ":x",
        "a?rows=0",
        "a?rows=x",
        "a?color=red",
        "a?rows=&samples=5",
        "a?files=",
        "a?revision=",
        "a?rows",
        "a?rows=4&&samples=5",
        "a?rows=4&rows=5",
        "a?revision=%ff",
    ],
)
def test_wrong_specs_are_named(text: str) -> None:
    """An option that is empty or said twice is no option left out."""
    with pytest.raises(DataError, match="hf:"):
        StreamSpec.parse(text)


@pytest.mark.parametrize("path", ["/d/a+b.jsonl", "/d/a b.jsonl", "/d/é.jsonl", "/d/?[ab]*.jsonl", "/d/a=b.jsonl"])
def test_a_path_is_read_as_it_is_typed(path: str) -> None:
    assert StreamSpec.parse(f"json?files={path}&rows=2").files == path


@pytest.mark.parametrize(
    "spec",
    [
        StreamSpec(dataset="json", files="/d/a+b&c %41é.jsonl", samples=3),
        StreamSpec(dataset="a/b", column="body", rows=2, revision="x"),
        StreamSpec(dataset="a/b", config="en", split="test", files="part-*.parquet"),
        StreamSpec(dataset="/d/folder"),
    ],
)
def test_what_is_written_is_read_back(spec: StreamSpec) -> None:
    assert StreamSpec.parse(spec.written()) == spec


def test_paths_are_made_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()

    def full(text: str) -> str:
        return StreamSpec.parse(text).in_full().written()

    assert full("json?files=a/*.jsonl") == f"json?files={tmp_path}/a/*.jsonl"
    assert full("json?files=~/a.jsonl") == f"json?files={Path.home()}/a.jsonl"
    assert full("folder?files=*.jsonl") == f"{tmp_path}/folder?files=*.jsonl"
    assert full("./folder") == full("folder") == f"{tmp_path}/folder"
    for elsewhere in ("a/b?rows=2", "a/b?files=x/*.parquet", "json?files=hf://datasets/a/b/x.jsonl"):
        assert full(elsewhere) == elsewhere
    (tmp_path / "a:b").mkdir()
    with pytest.raises(DataError, match="hf:json"):
        StreamSpec(dataset=str(tmp_path / "a:b")).written()


def test_where_a_copy_lies_is_no_part_of_what_it_is() -> None:
    same = [
        StreamSpec(dataset="json", files="/a/x.jsonl", samples=5),
        StreamSpec(dataset="json", files="/b/y.jsonl", samples=5),
        StreamSpec(dataset="parquet", files="/b/y.parquet", samples=5),
        StreamSpec(dataset="/c/folder", samples=5),
    ]
    others = [
        StreamSpec(dataset="json", files="/a/x.jsonl", samples=6),
        StreamSpec(dataset="json", files="/a/x.jsonl", samples=5, rows=2),
        StreamSpec(dataset="json", files="/a/x.jsonl", samples=5, column="body"),
        StreamSpec(dataset="json", files="hf://datasets/a/b/x.jsonl", samples=5),
        StreamSpec(dataset="a/b", samples=5),
        StreamSpec(dataset="a/c", samples=5),
        StreamSpec(dataset="a/c", samples=5, revision="1"),
        StreamSpec(dataset="a/c", samples=5, files="x.jsonl"),
    ]
    assert len({spec.identity for spec in same}) == 1
    assert len({spec.identity for spec in (same[0], *others)}) == 1 + len(others)
    assert all(spec.is_local for spec in same) and not any(spec.is_local for spec in others[3:])


@pytest.mark.parametrize("name", ["pandas", "webdataset", "sql", "nobody"])
def test_files_are_read_in_formats_that_hold_data_only(name: str) -> None:
    with pytest.raises(DataError, match=r"json, csv, parquet, text, arrow.*convert"):
        StreamSpec(dataset=name, files="/d/x").check()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_format_needs_files(name: str) -> None:
    """Without, the library would look for some in the folder that a node happens to run in."""
    with pytest.raises(DataError, match=r"\?files=PATH"):
        StreamSpec(dataset=name).check()
    StreamSpec(dataset=name, files="/d/x").check()


@pytest.mark.parametrize("name", ["./folder", "../x", "a b/c"])
def test_what_else_is_no_name_of_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="neither a data set of the hub nor"):
        StreamSpec(dataset=name).check()


@pytest.mark.parametrize(
    "file",
    [
        "http://host.example/x.jsonl",
        "HTTPS://host.example/x.jsonl",
        "s3://bucket/x",
        "file:///etc/x",
        "zip://a.jsonl::https://host.example/x.zip",
        "hf://datasets/a/b/x::https://host.example/x.zip",
        "simplecache::x",
        "hf://https://host.example/x",
    ],
)
def test_no_stranger_says_which_host_everybody_asks(file: str) -> None:
    with pytest.raises(DataError, match="download"):
        StreamSpec(dataset="json", files=file).check()
    with pytest.raises(DataError, match="download"):
        StreamSpec(dataset="owner/name", files=file).check()


@pytest.mark.parametrize("file", ["/d/x.jsonl", "x/*.jsonl", "hf://datasets/a/b@main/x.jsonl", "C:\\d\\x.jsonl"])
def test_files_of_this_machine_and_of_the_hub_are_read(file: str) -> None:
    check_place(file)
