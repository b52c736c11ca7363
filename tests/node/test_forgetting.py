"""`farflung forget`: what goes, what stays, and what is asked first."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farflung.node.cli import app
from farflung.node.control import only_node
from farflung.node.forgetting import FORGOTTEN, forget
from farflung.node.paths import Paths, SwarmPaths, resolve_paths
from farflung.protocol.errors import ConfigError, LocalError

ONE, TWO = "ab" * 32, "cd" * 32
EVENT = {"event": "step", "time": 1.0, "swarm": "alpha", "peer": "aa", "height": 0, "version": 0, "step": 3}


def line(**fields: object) -> str:
    return json.dumps(EVENT | fields) + "\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = resolve_paths(tmp_path, {})
    paths.config.mkdir()
    paths.identity.write_text("a key")
    for swarm in (paths.add_swarm(ONE, "alpha"), paths.add_swarm(TWO, "beta")):
        (swarm.checkpoint / "learner-a").mkdir(parents=True)
        (swarm.checkpoint / "learner-a" / "state").write_bytes(bytes(5000))
    return paths


def alpha(paths: Paths) -> SwarmPaths:
    return paths.find_swarm("alpha")


def test_one_swarm_goes_and_all_else_stays(paths: Paths) -> None:
    forget(alpha(paths))
    assert [swarm.name for swarm in paths.swarms()] == ["beta"]
    assert [child.name for child in (paths.state / "swarms").iterdir()] == [TWO]
    assert paths.identity.read_text() == "a key"
    assert (paths.find_swarm("beta").checkpoint / "learner-a" / "state").stat().st_size == 5000


def test_a_swarm_whose_node_runs_is_kept(paths: Paths) -> None:
    swarm = alpha(paths)
    with only_node(swarm), pytest.raises(ConfigError, match="runs here already"):
        forget(swarm)
    assert (swarm.checkpoint / "learner-a" / "state").exists()


def test_what_an_interruption_left_goes_the_next_time(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        raise OSError(5, "Input/output error", str(folder / "bad"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        with pytest.raises(
            LocalError, match=rf"{ONE}{FORGOTTEN}/bad of a swarm that is forgotten could not be removed: Input"
        ):
            forget(alpha(paths))
    assert [swarm.name for swarm in paths.swarms()] == ["beta"]
    again = paths.add_swarm(ONE, "alpha")  # it is joined once more
    (again.folder / "events.jsonl").write_text("")
    forget(again)
    assert [child.name for child in (paths.state / "swarms").iterdir()] == [TWO]


@pytest.mark.parametrize(
    ("log", "warned"),
    [
        ("", None),
        (line(), "was killed or failed"),
        (line(event="node.stop", reason="asked to", member=False), None),
        (line(event="node.stop", reason="asked to", member=True), "before the others had let it go"),
        (line(event="node.stop", reason="asked to", member=False) + line(event="kernels"), None),
        (line(event="node.stop", reason="asked to", member=False) + line(event="node.start") + line(), "was killed"),
        (line(event="node.failed", reason="no room"), "was killed or failed"),
        ("{}\n", "is not known"),
    ],
)
def test_it_is_asked_first(paths: Paths, tmp_path: Path, log: str, warned: str | None) -> None:
    alpha(paths).events.write_text(log)
    asked = ["forget", "alpha", "--home", str(tmp_path)]
    for answer, code in (("n\n", 2), ("", 1)):
        refused = CliRunner().invoke(app, asked, input=answer)
        assert refused.exit_code == code and "forgotten" not in refused.stdout and "(abababababab): 5" in refused.stderr
        assert (warned or "alpha") in refused.stderr
        assert ("Its node" in refused.stderr or "Whether" in refused.stderr) == (warned is not None)
    assert alpha(paths).folder.exists()
    done = CliRunner().invoke(app, asked, input="y\n")
    assert done.exit_code == 0 and "forgotten: alpha, 5" in done.stdout
    gone = json.loads(CliRunner().invoke(app, ["forget", "beta", "--yes", "--json", "--home", str(tmp_path)]).stdout)
    assert gone["forgotten"] == TWO and gone["bytes"] > 5000
    assert CliRunner().invoke(app, asked).exit_code == 2, "nobody knows it"
