"""Streamed data in a manifest: what a founder is told, and a joiner whose copy lies elsewhere."""

import json
from pathlib import Path

import pytest
from tests.node.founded import found

from farflung.node import founding
from farflung.node.recipe import swarm_dataset, swarm_tokenizer
from farflung.protocol.errors import ConfigError
from farflung.training.tokenizer import Tokenizer

OPTIONS = "rows=2&samples=100"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number:03} says hello"}) + "\n" for number in range(200)))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path, corpus: Path) -> Tokenizer:
    _, manifest = found(tmp_path, corpus, name="other")
    return swarm_tokenizer(manifest, tmp_path / "none")


def test_a_path_in_a_spec_is_kept_in_full(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be started in another folder."""
    monkeypatch.chdir(tmp_path)
    _, manifest = found(tmp_path, rows, data=f"hf:json?files=data/a.jsonl&{OPTIONS}")
    assert manifest.data.spec == f"hf:json?rows=2&samples=100&files={rows}"
    assert founding.data_spec("hf:data?samples=4") == f"hf:{rows.parent}?samples=4"
    assert founding.data_spec("hf:owner/name:en") == "hf:owner/name:en"
    with pytest.raises(ConfigError, match="color"):
        founding.data_spec("hf:owner/name?color=red")


def test_a_copy_elsewhere_is_the_same_data(tmp_path: Path, rows: Path, tokenizer: Tokenizer) -> None:
    _, manifest = found(tmp_path, rows, data=f"hf:json?files={rows}&{OPTIONS}")
    copy = tmp_path / "b.jsonl"
    rows.rename(copy)
    with pytest.raises(ConfigError, match=r"cannot be opened: hf:json.*; say where it lies here with `--data`"):
        swarm_dataset(manifest, tokenizer)
    dataset = swarm_dataset(manifest, tokenizer, founding.data_spec(f"hf:json?files={copy}&{OPTIONS}"))
    assert dataset.num_samples == manifest.data.num_samples
    wrong = [f"hf:json?files={copy}&rows=2&samples=99", f"hf:json?files={copy}&{OPTIONS}&revision=3"]
    for spec in wrong:
        with pytest.raises(ConfigError, match=r"is not what swarm 'alpha' trains on.*same .*rows, samples.*as in 'hf:"):
            swarm_dataset(manifest, tokenizer, spec)
    with pytest.raises(ConfigError, match=r"trains on.*Copy the founder's files"):
        copy.write_text(copy.read_text().replace("row 000", "row ooo"))
        swarm_dataset(manifest, tokenizer, f"hf:json?files={copy}&{OPTIONS}")


def test_a_founder_is_told_of_rows_that_are_not_there(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(ConfigError, match="has 200 rows, 101 samples of 2 need 202: give samples=100 or less"):
        found(tmp_path, rows, data=f"hf:json?files={rows}&rows=2&samples=101")


def test_a_joiner_reads_nothing_that_a_stranger_may_not_ask_for(
    tmp_path: Path, rows: Path, tokenizer: Tokenizer
) -> None:
    _, manifest = found(tmp_path, rows, data=f"hf:json?files={rows}&{OPTIONS}")
    for spec in (f"hf:pandas?files={rows}&samples=9", "hf:json?files=https://host.example/x.jsonl&samples=9"):
        with pytest.raises(ConfigError, match=r"cannot be opened: hf:.*(convert|download)"):
            swarm_dataset(manifest, tokenizer, spec)
