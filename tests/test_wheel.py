"""The wheel, installed apart from the checkout, works from an empty directory."""

import ast
import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tests.syntax import parsed

from farflung.sims.facts import load_run

ROOT = Path(__file__).parent.parent

FIGURES = {
    "outer_loss",
    "solo_loss",
    "bytes_sent_per_peer",
    "bits_per_parameter",
    "left_out",
    "ddp_bytes_per_peer",
    "rounds_committed",
    "rounds_missed",
    "digests_equal",
    "samples_trained_twice",
    "samples_lost",
    "samples_miscounted",
    "outer_better",
    "checked",
    "refused",
    "peers_killed",
    "peers_joined",
    "seconds",
    "tokens_committed",
    "tokens_per_s",
    "median_round_s",
    "peers",
    "utilisation",
    "judged",
    "expected",
    "pipeline",
    "recoveries",
    "shadows",
    "invariants_broken",
    "begin_late",
    "unwritten",
    "delay_steps",
    "seed",
    "method",
}
"""Of the demo's JSON."""

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, timeout_s: float = 110.0, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FARFLUNG_HOME")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools leaves build/ and *.egg-info where it builds.
    source = folder / "source"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "compression",
        "node",
        "protocol",
        "sims",
        "training",
    ):
        if (ROOT / name).exists():
            (source / name).symlink_to(ROOT / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    name = run(sys.executable, "-c", code, cwd=source).splitlines()[-1]
    return folder / name


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which finds everything but farflung where the tests have it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    # As plain folders: .pth files in there, the checkout's editable install among them, are not followed.
    there = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "others.pth").write_text("\n".join(there) + "\n")
    return python


def farflung(python: Path, cwd: Path, *words: object, timeout_s: float = 110.0) -> str:
    """By the console script."""
    return run(python.with_name("farflung"), *words, cwd=cwd, timeout_s=timeout_s, OMP_NUM_THREADS="1")


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level modules that a module imports, at its top or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]


def test_the_wheel_holds_our_folders_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if ".dist-info/" not in name]
    top = {tuple(name.split("/")[:2]) for name in names}
    folders = {"compression", "node", "protocol", "sims", "training"}
    assert top == {("farflung", folder) for folder in folders}
    sources = {f"farflung/compression/{file.name}" for file in (ROOT / "compression").glob("*.[ch]")}
    assert sources and sources <= set(names)
    scenarios = {f"farflung/sims/scenarios/{file.name}" for file in (ROOT / "sims" / "scenarios").glob("*.toml")}
    assert scenarios and scenarios <= set(names)


def test_it_is_imported_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import farflung.node.daemon as daemon; print(daemon.__file__)"
    assert str(installed.parent.parent) in run(installed, "-c", code, cwd=tmp_path)


def test_what_is_declared_is_what_is_imported(installed: Path) -> None:
    """Installed with `--no-deps` beside everything that the tests have, so no import would fail for want of a dependency."""
    site = sysconfig.get_path("purelib", vars={"base": str(installed.parents[1])})
    (wheel,) = metadata.distributions(name="farflung", path=[site])
    modules = {
        name
        for file in wheel.files or ()
        if file.suffix == ".py"
        for name in imported(parsed(file.read_text(encoding="utf-8")))
    }
    providers = metadata.packages_distributions()
    strangers = modules - sys.stdlib_module_names - {"farflung"}
    needed = {name: {one.lower() for one in providers[name]} for name in strangers}
    declared = [Requirement(text) for text in wheel.requires or ()]
    extra = {one.name.lower() for one in declared if one.marker is not None and "extra ==" in str(one.marker)}
    always = {one.name.lower() for one in declared} - extra
    streams = extra & {name for names in needed.values() for name in names}
    assert streams == {"datasets", "pyarrow"}  # farflung says so where they lack
    assert [name for name, from_ in needed.items() if not from_ & (always | streams)] == []
    assert [name for name in always if not any(name in from_ for from_ in needed.values())] == []


def test_what_is_declared_lets_in_what_the_tests_have(installed: Path) -> None:
    """No index is asked: `pip install .` would find in place what the wheel itself asks for."""
    site = sysconfig.get_path("purelib", vars={"base": str(installed.parents[1])})
    (wheel,) = metadata.distributions(name="farflung", path=[site])
    declared = [Requirement(text) for text in wheel.requires or ()]
    wanted = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": "data"})]
    assert {"torch", "hivemind", "datasets"} <= {one.name for one in wanted}
    versions = {one.name: metadata.version(one.name) for one in wanted}
    # A torch for one kind of device has a local version, as 2.10.0+cpu.
    assert [str(one) for one in wanted if not one.specifier.contains(versions[one.name], prereleases=True)] == []
    assert wheel.metadata["Requires-Python"] is not None
    assert SpecifierSet(wheel.metadata["Requires-Python"]).contains(platform.python_version(), prereleases=True)


def test_scenarios_are_found_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    assert "churn-8" in json.loads(farflung(installed, tmp_path, "sim", "list", "--json"))


def test_a_swarm_is_founded_trained_and_exported_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i * i}\n" for i in range(3000)))

    def say(*words: object) -> Any:
        return json.loads(farflung(installed, tmp_path, *words, "--home", "home", "--json"))

    assert len(say("id", "show")["peer"]) == 64
    made = say(
        *("create", "alone", "--data", "text.txt", "--preset", "tiny"),
        *("--steps", 6, "--inner-steps", 3, "--batch-tokens", 256),
    )
    assert made["invitation"].startswith("farflung1")
    told = farflung(installed, tmp_path, "join", "alone", "--home", "home", "--local", "--device", "cpu", "--json")
    events = [json.loads(line) for line in told.splitlines()]  # and nothing else
    assert [event["round"] for event in events if event["event"] == "round.commit"] == [1, 2, 3, 4, 5, 6]
    assert events[-1]["event"] == "node.stop" and events[-1]["reason"] == "the run is complete"
    facts = say("export", "alone", "model")
    assert facts["rounds"] == 6 and (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.timeout(600)
def test_the_demo_keeps_its_promises(installed: Path, tmp_path: Path) -> None:
    """Everything but the loss, which needs more rounds than a test has time for: as short as it goes."""
    words = ("demo", "--json", "--minutes", "1.5", "--out", "out")
    figures = json.loads(farflung(installed, tmp_path, *words, timeout_s=590.0))
    assert set(figures) == FIGURES
    assert (figures["digests_equal"], figures["samples_trained_twice"], figures["samples_lost"]) == (True, 0, 0)
    assert (figures["peers_killed"], figures["peers_joined"]) == (1, 2)
    assert figures["rounds_committed"] >= 5
    assert figures["invariants_broken"] == [] and figures["samples_miscounted"] == 0
    assert {one["which"] for one in figures["checked"]} == {1, 2, 3, 4, 5, 6, 8, 9}, "what logs can show"
    assert all(missed["reason"] for missed in figures["rounds_missed"])
    assert max(figures["bytes_sent_per_peer"].values()) < figures["ddp_bytes_per_peer"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    out = tmp_path / "out"
    assert "<svg" in (out / "report.html").read_text()
    written = json.loads((out / "report.json").read_text())
    assert set(written.pop("series")) == {"loss", "bytes", "membership", "rounds"} and written == figures
    assert (out / "model" / "model.safetensors").exists()
    facts = load_run(out / "run.json")
    assert [incident.what for incident in facts.timeline].count("start") == 4
    assert [text.startswith("def ") for text in facts.samples] == [True] * 3, "how long they are is the model's affair"
    assert max(len(text) for text in facts.samples) > len("def ")
    assert facts.ledger is not None and facts.ledger.cursor > 0
