"""What is done to node processes reaches them, and none is left behind."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from farflung.sims.demonodes import DemoNode, NodeFailed

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoNode:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return DemoNode(
        name="node 1",
        role="",
        home=tmp_path,
        swarm_hash="ab" * 32,
        swarm_name="test",
        program="tests.sims.idle",
    )


async def until(condition: Callable[[], bool]) -> None:
    """Bounded by `act`."""
    while not condition():
        await asyncio.sleep(0.01)


def act(node: DemoNode, does: Callable[[psutil.Process, psutil.Process], Awaitable[None]]) -> None:
    """Start the node and its child, do something, and end it: nothing may be left."""

    async def main() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            living = tasks.create_task(node.run(["parent"]))
            await until(lambda: node.process is not None)
            assert node.process is not None
            parent = psutil.Process(node.process.pid)
            await until(lambda: bool(parent.children()))
            [child] = parent.children()
            await does(parent, child)
            await node.end()
            await living
            await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
            assert not parent.is_running()

    asyncio.run(main())


def test_a_stopped_node_goes_on_and_can_be_ended_while_it_stands(node: DemoNode) -> None:
    async def stop(parent: psutil.Process, child: psutil.Process) -> None:
        assert node.pause()
        await until(lambda: parent.status() == psutil.STATUS_STOPPED)
        assert child.status() != psutil.STATUS_STOPPED
        assert node.resume()
        await until(lambda: parent.status() != psutil.STATUS_STOPPED)
        assert node.pause()
        await until(lambda: parent.status() == psutil.STATUS_STOPPED)

    act(node, stop)


def test_whoever_has_no_process_is_not_stopped(node: DemoNode) -> None:
    assert not node.pause() and not node.resume()


def test_without_power_nothing_of_a_node_moves_until_it_is_ended(node: DemoNode) -> None:
    async def cut(parent: psutil.Process, child: psutil.Process) -> None:
        node.lose_power()
        await until(lambda: {parent.status(), child.status()} == {psutil.STATUS_STOPPED})
        assert node.killed

    act(node, cut)


def test_a_kill_is_no_failure_and_an_end_of_its_own_is(node: DemoNode) -> None:
    async def kill(parent: psutil.Process, child: psutil.Process) -> None:
        node.kill()
        await until(lambda: node.ended)

    act(node, kill)
    node.killed = node.ended = False
    node.program = "tests.sims.no_such_module"
    with pytest.raises(NodeFailed, match="no_such_module"):
        asyncio.run(node.run([]))
