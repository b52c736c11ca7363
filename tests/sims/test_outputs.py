"""What cannot be written is refused in one line before anything is measured, and what was measured is shown before it is written."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.protocol.errors import ConfigError
from farflung.sims import (
    bandwidth_run,
    bench_calibrate,
    bench_churn,
    bench_codec,
    bench_drift,
    bench_feedback,
    bench_fidelity,
    bench_pipeline,
    bench_recovery,
    fuzzing,
    local_run,
    quality,
    sim_run,
)
from farflung.sims.costs import Costs
from farflung.sims.main import app
from farflung.sims.outputs import check_outputs


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old, new, folder = tmp_path / "old.json", tmp_path / "later" / "new.json", tmp_path / "docs" / "pages"
    old.write_text("known")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "not there yet")
    check_outputs(files=[old, None, new, link], folders=[folder, None])
    assert old.read_text() == "known" and new.parent.is_dir() and folder.is_dir() and link.is_symlink()
    assert not new.exists() and not link.exists()


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_outputs(files=[tmp_path / "pipe"])


def test_two_things_do_not_go_into_one_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="named for two things"):
        check_outputs(files=[tmp_path / "a.json", tmp_path / "b" / ".." / "a.json"])


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written \(it is a folder\)"):
        check_outputs(files=[tmp_path])
    with pytest.raises(ConfigError, match=r"file/a cannot be written \(File exists\)"):
        check_outputs(files=[tmp_path / "file" / "a"])
    with pytest.raises(ConfigError, match=r"file cannot be written \(File exists\)"):
        check_outputs(folders=[tmp_path / "file"])


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_where_no_files_can_be_made_even_root_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be written \(No such file"):
        check_outputs(files=[Path("/proc/x.png")])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    (tmp_path / "file").touch(mode=0o400)
    with pytest.raises(ConfigError, match="no file can be made there"):
        check_outputs(folders=[tmp_path / "locked"])
    with pytest.raises(ConfigError, match="not ours to change"):
        check_outputs(files=[tmp_path / "file"])


def measures(*_: object, **__: object) -> Any:
    raise AssertionError("something was measured")


@pytest.mark.parametrize(
    ("module", "measuring", "words"),
    [
        (sim_run, "make_schedule", "sim run straggler --out FILE"),
        (local_run, "make_schedule", "sim local local-3 --out FILE"),
        (fuzzing, "play", "sim fuzz --out FILE"),
        (bandwidth_run, "all_rows", "sim bandwidth --page FILE"),
        (bandwidth_run, "all_rows", "sim bandwidth --plot FOLDER"),
        (bench_calibrate, "calibrate", "bench calibrate --out FOLDER"),
        (bench_fidelity, "calibrate", "bench fidelity --page FILE"),
        (bench_codec, "measure_all", "bench codec --page FILE"),
        (bench_feedback, "measure", "bench feedback --page FILE"),
        (bench_churn, "play", "bench churn --page FILE"),
        (bench_drift, "_measure", "bench drift --page FILE"),
        (bench_recovery, "make", "bench recovery --page FILE"),
        (quality, "measure", "bench quality --page FILE"),
        (bench_pipeline, "measure", "bench pipeline --page FILE"),
        (bench_pipeline, "measure", "bench pipeline --out FOLDER"),
        (bench_pipeline, "measure", "bench pipeline --trace FOLDER"),
    ],
    ids=lambda given: given if isinstance(given, str) and " " in given else "",
)
def test_no_command_measures_what_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, measuring: str, words: str
) -> None:
    monkeypatch.setattr(module, measuring, measures)
    (tmp_path / "file").write_text("somebody's")
    named = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    result = CliRunner().invoke(app, [named.get(word, word) for word in words.split()])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and "cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1 and (tmp_path / "file").read_text() == "somebody's"


@pytest.mark.parametrize("words", ["--out FOLDER.html", "--out FILE/a.html", "--trace FILE/t.json"])
def test_a_report_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    monkeypatch.setattr("farflung.sims.report.load_scenes", lambda runs: [])
    monkeypatch.chdir(tmp_path)
    Path("FOLDER.html").mkdir()
    Path("FILE").touch()
    result = CliRunner().invoke(app, ["sim", "report", "run", *words.split()])
    assert result.exit_code == 2 and "cannot be written" in result.stderr, result.output


def test_a_fuzz_that_finds_nothing_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuzzing, "play", measures)
    fuzzing.fuzz(0, 1, minutes=0.0, out=tmp_path / "new")
    (tmp_path / "old").mkdir()
    fuzzing.fuzz(0, 1, minutes=0.0, out=tmp_path / "old")
    assert [one.name for one in tmp_path.iterdir()] == ["old"]


def test_figures_are_shown_even_if_they_cannot_be_written_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.toml"

    def fill_up(*_: object) -> tuple[Costs, dict[str, Any]]:
        out.mkdir()
        return Costs(), {"step_s": 1.0}

    monkeypatch.setattr(bench_calibrate, "calibrate", fill_up)
    with pytest.raises(IsADirectoryError):
        bench_calibrate.run_calibrate(as_json=True, out=out)
    assert json.loads(capsys.readouterr().out)["seen"] == {"step_s": 1.0}


@pytest.mark.parametrize(
    "words",
    [
        "demo --minutes",
        "sim local local-3 --minutes",
        "sim fuzz --minutes",
        "bench scale --minutes",
        "bench codec --size",
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*words.split(), value], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{words.split()[-1]}'" in result.output
    assert not list(tmp_path.iterdir())
