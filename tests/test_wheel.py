"""The wheel, installed apart from the checkout, works from an empty directory."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FARFLUNG_HOME")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=110,
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
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=folder)
    # As plain folders: .pth files in there, the checkout's editable install among them, are not followed.
    there = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "others.pth").write_text("\n".join(there) + "\n")
    return folder / "bin" / "python"


def farflung(python: Path, cwd: Path, *words: object) -> str:
    code = "from farflung.sims.main import main; main()"
    return run(python, "-c", code, *words, cwd=cwd, OMP_NUM_THREADS="1")


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
    shown = farflung(installed, tmp_path, "join", "alone", "--home", "home", "--local", "--device", "cpu", "--no-live")
    assert "round 2 committed" in shown and "the run is complete" in shown
    facts = say("export", "alone", "model")
    assert facts["rounds"] == 2 and (tmp_path / "model" / "model.safetensors").exists()
