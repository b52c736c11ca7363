"""Files of a swarm's folder that cannot be used, and what is said to be done about them."""

from pathlib import Path

import pytest
from tests.node.test_discovery import SIGNERS, founded, of_a_later_version

from farflung.node.paths import resolve_paths
from farflung.node.swarmfiles import load_manifest, save_manifest
from farflung.protocol.errors import ConfigError


def test_a_manifest_of_another_version_is_not_called_damaged(tmp_path: Path) -> None:
    """To fetch it again would not help."""
    signed = of_a_later_version(SIGNERS[0])
    swarm = resolve_paths(tmp_path, {}).add_swarm(signed.swarm.hex(), "alpha")
    save_manifest(swarm, signed.encode())
    with pytest.raises(ConfigError, match="Install the farflung that the swarm runs") as caught:
        load_manifest(swarm)
    assert "remove it" not in str(caught.value)
    save_manifest(swarm, founded(SIGNERS[0])[1].encode())
    with pytest.raises(ConfigError, match=r"manifest cannot be used \(manifest .* wanted .*\); remove it"):
        load_manifest(swarm)
