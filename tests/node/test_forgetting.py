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
            LocalError, match=rf"alpha is forgotten, but .*{ONE}{FORGOTTEN}/bad could not be removed: Input"
        ):
            forget(alpha(paths))
    assert [swarm.name for swarm in paths.swarms()] == ["beta"]
    forget(paths.find_swarm("beta"))
    assert not list((paths.state / "swarms").iterdir())


@pytest.mark.parametrize(
    ("last", "warned"), [(None, False), (EVENT, True), (EVENT | {"event": "node.stop", "reason": "asked to"}, False)]
)
def test_it_is_asked_first(paths: Paths, tmp_path: Path, last: dict[str, object] | None, warned: bool) -> None:
    if last is not None:
        alpha(paths).events.write_text(json.dumps(last) + "\n")
    asked = ["forget", "alpha", "--home", str(tmp_path)]
    for answer in ("n\n", ""):
        refused = CliRunner().invoke(app, asked, input=answer)
        assert refused.exit_code == 1 and "forgotten" not in refused.stdout and "(abababababab): 5" in refused.stderr
        assert ("may vote twice" in refused.stderr) == warned
    assert alpha(paths).folder.exists()
    done = CliRunner().invoke(app, asked, input="y\n")
    assert done.exit_code == 0 and "forgotten: alpha, 5" in done.stdout
    gone = json.loads(CliRunner().invoke(app, ["forget", "beta", "--yes", "--json", "--home", str(tmp_path)]).stdout)
    assert gone["forgotten"] == TWO and gone["bytes"] > 5000
    assert CliRunner().invoke(app, asked).exit_code == 2, "nobody knows it"
