"""Folders, the environment variable, names of swarms, and the length of socket paths."""

import os
from pathlib import Path

import pytest

from farflung.node import durable
from farflung.node.paths import MAX_SOCKET_PATH_BYTES, resolve_paths
from farflung.node.wanted import local_swarm
from farflung.protocol.errors import ConfigError

ONE, TWO = "ab" * 32, "cd" * 32


def test_home_wins_over_the_environment(tmp_path: Path) -> None:
    environ = {"FARFLUNG_HOME": str(tmp_path / "env")}
    assert resolve_paths(None, environ).identity == tmp_path / "env" / "config" / "identity.pem"
    assert resolve_paths(tmp_path / "arg", environ).state == tmp_path / "arg" / "state"


def test_without_a_home_the_platform_decides() -> None:
    paths = resolve_paths(None, {})
    assert len({paths.config, paths.data, paths.state, paths.cache}) >= 2
    assert all("farflung" in str(folder) for folder in (paths.config, paths.state))


def test_looking_makes_nothing(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path / "home", {})
    assert paths.swarms() == []
    assert not (tmp_path / "home").exists()


def test_swarms_are_found_by_name_full_name_and_hash(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path, {})
    one = paths.add_swarm(ONE, "alpha")
    assert paths.find_swarm() == one
    paths.add_swarm(TWO, "beta")
    for wanted in ("alpha", "alpha@abcdefghij", ONE, ONE[:8]):
        assert paths.find_swarm(wanted) == one
    assert paths.swarm(ONE) == one
    assert one.events.parent == one.checkpoint.parent == tmp_path / "state" / "swarms" / ONE


def test_what_cannot_be_found_is_explained(tmp_path: Path) -> None:
    paths = resolve_paths(tmp_path, {})
    with pytest.raises(ConfigError, match="farflung create"):
        paths.find_swarm("alpha")
    paths.add_swarm(ONE, "alpha")
    paths.add_swarm(TWO, "alpha")
    with pytest.raises(ConfigError, match=rf"alpha \({ONE[:12]}\), alpha \({TWO[:12]}\)"):
        paths.find_swarm("alpha")
    with pytest.raises(ConfigError, match=r"no swarm 'gamma'"):
        paths.find_swarm("gamma")
    with pytest.raises(ConfigError, match=r"knows no swarm 'alhpa'; did you mean 'alpha'\? it knows alpha"):
        paths.find_swarm("alhpa")
    with pytest.raises(
        ConfigError, match=r"knows no swarm 'alhpa' and no peer to ask; did you mean 'alpha'\? give `--peer"
    ):
        local_swarm(paths, "alhpa", ())
    asked = local_swarm(paths, "alhpa", [f"{'ab' * 32}@127.0.0.1:4001"])
    assert asked.swarm is None and asked.near == "; did you mean 'alpha'?"
    assert local_swarm(paths, "something-else", [f"{'ab' * 32}@127.0.0.1:4001"]).near == ""


@pytest.mark.parametrize("left", [b"", b"\xff\n", None])
def test_a_swarm_whose_name_is_damaged_is_found_by_its_hash(tmp_path: Path, left: bytes | None) -> None:
    paths = resolve_paths(tmp_path, {})
    swarm = paths.add_swarm(ONE, "alpha")
    if left is None:
        (swarm.folder / "name").unlink()
    else:
        (swarm.folder / "name").write_bytes(left)
    assert paths.find_swarm() == paths.find_swarm(ONE[:8]) == paths.swarm(ONE)
    assert paths.add_swarm(ONE, "alpha") == paths.find_swarm("alpha")


def test_a_name_is_there_as_long_as_it_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = resolve_paths(tmp_path, {})
    paths.add_swarm(ONE, "alpha")

    def cut_short(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable.os, "fsync", cut_short)
    with pytest.raises(KeyboardInterrupt):
        paths.add_swarm(ONE, "alpha")
    assert paths.find_swarm("alpha").hash_hex == ONE


@pytest.mark.parametrize("temporary", ["/t", "/t/" + "z" * 90], ids=["usual", "deep"])
def test_socket_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str) -> None:
    """Also where the temporary folder of a job is as deep as its homes."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: temporary)
    short = resolve_paths(Path("/h"), {}).swarm(ONE).socket
    assert short == Path("/h/state/run") / f"{ONE[:16]}.sock"
    long_homes = [tmp_path / ("x" * 120), tmp_path / ("y" * 120)]
    sockets = [resolve_paths(home, {}).swarm(ONE).socket for home in long_homes]
    assert all(len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES for socket in sockets)
    assert len(set(sockets)) == 2
    assert sockets[0] == resolve_paths(long_homes[0], {}).swarm(ONE).socket
