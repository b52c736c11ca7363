"""What a machine that has a stage does when it is started again."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.node.test_storage import certified, save

from farflung.node.events import EventLog
from farflung.node.paths import SwarmPaths
from farflung.node.stage_start import SavedStage, Stage, StageStart, save_stage, stage_storage
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import Life
from farflung.protocol.pipeline_messages import UNKNOWN
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.pipeline_small import recipe
from farflung.training.runtime import Runtime

ME = Ed25519Signer(b"m" * 32)
OTHER = Ed25519Signer(b"o" * 32)


def started(swarm: SwarmPaths, said: list[str], events: list[dict[str, Any]]) -> Stage:
    """The stage that it takes. Raises TimeoutError when it waits outside for half a minute, where nobody answers."""

    async def main() -> Stage:
        network: Any = MemoryNetwork(
            MemoryHub(asyncio.get_running_loop(), random.Random(0), LinkModel()), ME.peer_id
        )  # in the place of an engine
        log = EventLog(None, swarm="x", peer="m", clock=lambda: 0.0)
        log.subscribe(events.append)
        start = StageStart(
            network, ME, swarm, recipe(), admission=b"", domains=UNKNOWN, refused=lambda error: None, log=log
        )
        async with asyncio.timeout(30.0):
            return await start.take(Runtime(), "auto", None, [OTHER.peer_id], said.append)

    return clock.run(main())


def machine(folder: Path, life: Life) -> SwarmPaths:
    """That has that stage."""
    swarm = SwarmPaths(name="x", hash_hex="00", folder=folder, socket=folder / "s")
    save_stage(swarm, SavedStage(life, (), (life,) if life.number else ()))
    return swarm


@pytest.mark.parametrize("life", [Life(1, 2, ME.peer_id), Life(1, 2, OTHER.peer_id), Life(1, 0, ME.peer_id)])
def test_it_keeps_its_stage(tmp_path: Path, life: Life) -> None:
    """Also where it has no state: one that it is to make first, or others have, or everybody makes for itself."""
    swarm, said, events = machine(tmp_path, life), [], list[dict[str, Any]]()
    if life.number == 0 or life.founder != ME.peer_id:
        stage_storage(swarm, life).append_commit(None, certified(0))
    assert started(swarm, said, events).life == life and not events


def test_it_keeps_what_it_has_begun(tmp_path: Path) -> None:
    life = Life(1, 2, ME.peer_id)
    swarm, said, events = machine(tmp_path, life), [], list[dict[str, Any]]()
    stage_storage(swarm, life).append_commit(None, certified(0))
    save(stage_storage(swarm, life), 0)
    assert started(swarm, said, events).life == life and not events


def test_a_chain_without_a_state_is_not_gone_on_with(tmp_path: Path) -> None:
    """Nor begun again: it waits outside, and says why."""
    life = Life(1, 2, ME.peer_id)
    swarm, said, events = machine(tmp_path, life), list[str](), list[dict[str, Any]]()
    stage_storage(swarm, life).append_commit(None, certified(0))
    with pytest.raises(TimeoutError):
        started(swarm, said, events)
    [spent] = events
    assert (spent["event"], spent["stage"], spent["life"]) == ("stage.spent", 1, 2)
    assert "this machine began it, and was ended before its state was on disk" in said[0]
