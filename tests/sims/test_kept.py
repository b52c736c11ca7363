"""Finished runs in a file: found again, whoever wrote them, and a damaged line is named."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from farflung.sims.kept import Kept


@dataclass(frozen=True)
class Run:
    fingerprint: str

    @property
    def about(self) -> dict[str, object]:
        return {"called": f"run {self.fingerprint}"}


@dataclass(frozen=True)
class Outcome:
    loss: float


def kept(file: Path | None) -> Kept[Outcome]:
    return Kept(file, lambda entry: Outcome(**entry))


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    kept(file).keep(Run("a"), Outcome(1.5), 3.0)
    second = kept(file)
    second.keep(Run("b"), Outcome(0.5), 4.04)
    for runs in (second, kept(file)):
        assert runs.outcome(Run("a")) == runs.made(Run("a")) == Outcome(1.5)
        assert runs.made(Run("b")) == Outcome(0.5) and runs.outcome(Run("c")) is None
        with pytest.raises(KeyError):
            runs.made(Run("c"))
    second.keep(Run("d"), Outcome(0.25))
    _, of_b, of_d = file.read_text().splitlines()
    assert '"called": "run b", "seconds": 4.0' in of_b and "seconds" not in of_d


def test_without_a_file_it_is_remembered() -> None:
    runs = kept(None)
    runs.keep(Run("a"), Outcome(1.5), 3.0)
    assert runs.made(Run("a")) == Outcome(1.5) and runs.file is None


def test_a_line_that_was_cut_while_it_was_written_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    kept(file).keep(Run("a"), Outcome(1.5), 3.0)
    whole = file.read_text()
    file.write_text(f'{whole}{{"fingerprint": "b", "outc')
    again = kept(file)
    assert again.made(Run("a")) == Outcome(1.5) and file.read_text() == whole
    again.keep(Run("b"), Outcome(0.5), 1.0)
    assert kept(file).made(Run("b")) == Outcome(0.5)


@pytest.mark.parametrize("cut_at", [1, 10, 40])
def test_a_first_line_that_was_cut_is_dropped_too(tmp_path: Path, cut_at: int) -> None:
    file = tmp_path / "runs.jsonl"
    kept(file).keep(Run("a"), Outcome(1.5), 3.0)
    file.write_bytes(file.read_bytes()[:cut_at])
    kept(file)
    assert file.read_bytes() == b""


@pytest.mark.parametrize(
    "text", ["my thesis, in one line", "two lines\nof another's", '{"name": "config"}', '{\n"a": 1\n}']
)
def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"name another"):
        kept(file)
    assert file.read_text() == text


@pytest.mark.parametrize("line", ["half a li", "{}", '{"fingerprint": "b", "outcome": {"gain": 1}}', "3", ""])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "runs.jsonl"
    kept(file).keep(Run("a"), Outcome(1.5), 3.0)
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        kept(file)
