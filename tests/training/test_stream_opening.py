"""Opening streamed data: what is refused before a row is read, and what it says that cannot be opened."""

import json
from pathlib import Path
from typing import Any

import pytest

from farflung.training.errors import DataError
from farflung.training.stream_opening import OLDEST, open_rows
from farflung.training.stream_spec import StreamSpec


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(20)))
    return path


def opened(text: str) -> None:
    open_rows(StreamSpec.parse(text))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    mark = tmp_path / "went off"
    (tmp_path / "x.pkl").write_bytes(f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode())  # to load it opens the file
    with pytest.raises(DataError, match="json, csv, parquet, text, arrow"):
        opened(f"pandas?files={tmp_path}/x.pkl&samples=5")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["pandas", "xml"])
def test_no_format_is_read_that_the_library_takes_by_itself(
    rows: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A name of the hub that is one of its formats, and files of a format in a data set of the hub, are the same to the library."""
    import datasets

    load = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: load(name, data_files=str(rows)))
    with pytest.raises(DataError, match=f"format '{name}'"):
        opened("owner/name")


def test_what_a_data_set_of_the_hub_is_made_of_lies_there(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its description may name files of any other host."""
    import datasets

    load = datasets.load_dataset_builder

    def described(*_: Any, **__: Any) -> Any:
        builder = load("json", data_files=str(rows))
        builder.config.data_files = {"train": ["hf://datasets/a/b/x.jsonl", "https://host.example/x.jsonl"]}
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", described)
    with pytest.raises(DataError, match=r"host\.example"):
        opened("owner/name")


def test_a_folder_is_not_mistaken_for_a_name_of_the_hub(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner/name").mkdir(parents=True)
    rows.rename(tmp_path / "owner/name/rows.jsonl")
    monkeypatch.chdir(tmp_path)
    opened(f"{tmp_path}/owner/name")
    with pytest.raises(DataError, match="Couldn't reach"):
        opened("owner/name")


def test_a_script_beside_the_data_is_not_run(tmp_path: Path, rows: Path) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(tmp_path / 'went off')!r}, 'w')")
    with pytest.raises(DataError, match="scripts"):
        opened(f"{tmp_path}")
    assert not (tmp_path / "went off").exists()


def test_nobody_lets_code_of_the_hub_run() -> None:
    """That needs a word that stands nowhere."""
    folders = ("training", "node", "protocol", "compression", "sims")
    root = Path(__file__).parents[2]
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(sources) > 100
    assert not [path for path in sources if "trust_remote_code" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("version", ["3.6.0", "4.8.5", "5.1.0", "5.1.1.dev0", "unknown"])
def test_a_library_that_unpickles_is_not_used(rows: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("datasets.__version__", version)
    with pytest.raises(DataError, match=r"pip install -U datasets"):
        opened(f"json?files={rows}")


def test_the_package_asks_for_the_version_that_is_used() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert text.count('"datasets>=') == text.count(f'"datasets>={OLDEST[0]}.{OLDEST[1]}"') == 2


@pytest.mark.parametrize("version", ["5.2.0", "5.10.1", "6.0.0.dev0"])
def test_later_ones_are(rows: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("datasets.__version__", version)
    opened(f"json?files={rows}")
