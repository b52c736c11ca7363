"""`farflung doctor`: what it finds, and what it refuses."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from farflung.compression import kernels
from farflung.node import daemon, disk
from farflung.node.cli import app
from farflung.node.doctor import examine, report
from farflung.node.options import CreateOptions, DoctorOptions
from farflung.protocol.errors import ConfigError


def limit_gb(left: float) -> float:
    """What to say as `--memory` that leaves so many GB: it limits the whole process, and this one has run other tests."""
    return left + psutil.Process().memory_info().rss / 1e9


def test_a_preset_is_examined(tmp_path: Path) -> None:
    asked = ["doctor", "--model", "10m", "--device", "cpu", "--memory", f"{limit_gb(4)}", "--json"]
    shown = CliRunner().invoke(app, [*asked, "--home", str(tmp_path / "none")])
    assert shown.exit_code == 0
    findings = json.loads(shown.stdout)
    memory = findings["device_bytes"]
    resident = memory["parameters"] + memory["gradients"] + memory["inner state"]
    assert memory["peak"] == resident + max(memory["activations"] + memory["casts"], memory["inner step"])
    assert memory["parameters"] == 4 * findings["parameters"]
    assert 4 * findings["parameters"] < memory["inner state"] < 4.2 * findings["parameters"], (
        "Muon's, as `create` has it"
    )
    adamw = json.loads(CliRunner().invoke(app, [*asked, "--optimizer", "adamw"]).stdout)
    assert adamw["device_bytes"]["inner state"] == 8 * findings["parameters"]
    assert memory["usable"] == findings["host_bytes"]["usable"] <= 4e9  # it is one memory
    assert not (tmp_path / "none").exists()  # looked at, not made


def test_less_memory_wants_more_options() -> None:
    ample = examine(DoctorOptions(model="10m", device="cpu", memory_gb=limit_gb(6)))
    scarce = examine(DoctorOptions(model="10m", device="cpu", memory_gb=limit_gb(ample["device_bytes"]["peak"] / 1e9)))
    assert ample["save_memory"] == "none"
    assert scarce["microbatch"] < ample["microbatch"] or scarce["save_memory"] != "none"
    with pytest.raises(ConfigError, match=r"give more with --memory, .* or join a swarm with a smaller model"):
        examine(DoctorOptions(model="8b", device="cpu", memory_gb=1))


def test_a_swarm_is_examined_by_its_manifest(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"some text to train on, number {n}. " for n in range(2000)))
    daemon.create(CreateOptions(name="s", preset="tiny", data=str(corpus), steps=10, optimizer="muon", home=tmp_path))
    findings = examine(DoctorOptions(swarm="s", device="cpu", home=tmp_path))
    assert (findings["model"], findings["optimizer"]) == ("s", "muon")
    assert findings["device_bytes"]["inner state"] < 8 * findings["parameters"]
    daemon.create(
        CreateOptions(name="w", preset="tiny", data=str(corpus), codec="fp32", optimizer="muon", home=tmp_path)
    )
    wide = examine(DoctorOptions(swarm="w", device="cpu", home=tmp_path))
    more = wide["disk_bytes"]["needed"] - findings["disk_bytes"]["needed"]
    # means of two contributions: of 4 bytes a parameter, not of 1.5 bits
    assert 7.6 < more / disk.KEPT_ROUNDS / findings["parameters"] < 7.7
    assert "device and host memory are one here: both sums must fit together" in report(wide)
    assert report(findings)[0].startswith("s: 0.2 M parameters")


def test_too_small_a_disk_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["doctor", "--model", "10m", "--device", "cpu", "--home", str(tmp_path)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    for form in ([], ["--json"]):
        shown = CliRunner().invoke(app, [*asked, *form])
        assert shown.exit_code == 2 and "NOT ENOUGH DISK: a node that trains this model keeps about 0." in shown.stdout


def test_what_lies_there_by_now_needs_no_more_room(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "learner-a").mkdir(parents=True)
    (tmp_path / "checkpoint" / "learner-a" / "state").write_bytes(bytes(700))
    (tmp_path / "events.jsonl").write_bytes(bytes(90))  # a log grows, and makes no room
    assert disk.stored_bytes(tmp_path) == 790 and disk.kept_bytes(tmp_path) == 700
    assert disk.stored_bytes(tmp_path / "not yet") == disk.kept_bytes(tmp_path / "not yet") == 0
    assert disk.lacks(1000, 700, 300) is None
    assert disk.lacks(1001, 700, 300) is not None


def test_what_goes_while_it_is_counted_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node removes its older checkpoint, and `doctor` may be asked beside it."""
    (tmp_path / "there").write_bytes(bytes(100))
    listed = [(str(tmp_path), ["gone"], ["there", "gone by now"]), (str(tmp_path / "gone"), [], ["state"])]
    monkeypatch.setattr(disk, "os", SimpleNamespace(walk=lambda folder: listed, lstat=os.lstat, path=os.path))
    assert disk.stored_bytes(tmp_path) == 100


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "11m"}, "no model is called '11m'"),
        ({"model": "1m", "optimizer": "adamv"}, "no inner optimizer"),
        ({"model": "1m", "save_memory": "4bit"}, "--save-memory must be"),
        ({"model": "1m", "dtype": "int8"}, "--dtype"),
        ({"swarm": "nobody"}, "knows no swarm yet"),
    ],
)
def test_wrong_questions_are_refused(options: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        examine(DoctorOptions(home=tmp_path, **options))  # type: ignore[arg-type]


def test_who_has_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options = DoctorOptions(model="1m", device="cpu", memory_gb=limit_gb(4))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert report(examine(options))[-1] == "C compiler: /usr/bin/cc"
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert "install gcc" in report(examine(options))[-1]
