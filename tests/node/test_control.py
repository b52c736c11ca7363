"""The control socket: one answer, streams, errors, rights, limits, stopping."""

import asyncio
import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from farflung.node import control
from farflung.node.control import (
    ControlError,
    ControlServer,
    Handler,
    NoNode,
    only_node,
    request,
    runs,
    stream,
)
from farflung.node.events import EventLog
from farflung.node.inside import getting_ready
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.runner import loop_factory
from farflung.node.status import NodeStatus
from farflung.protocol.errors import ConfigError


@pytest.fixture
def swarm() -> Iterator[SwarmPaths]:
    """Below a short path: where a home's is too long for a socket, that lies in a folder which all homes share, and one test opens it."""
    with tempfile.TemporaryDirectory(prefix="ff-") as home:
        yield resolve_paths(Path(home), {}).add_swarm("ab" * 32, "alpha")


def serve(
    swarm: SwarmPaths,
    handlers: Mapping[str, Handler],
    use: Callable[[ControlServer], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run `use` against a server, then stop the server and wait for its end."""

    async def both() -> None:
        server = ControlServer(swarm.socket, handlers)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.run())
            await server.started.wait()
            await use(server)
            server.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(both())


def test_a_node_that_gets_ready_says_so(swarm: SwarmPaths) -> None:
    """As while it begins a stage anew: its status and its events are there, and all else is refused with what to do."""
    log = EventLog(None, swarm="alpha", peer="12" * 32)
    status = NodeStatus(swarm="alpha", peer="12" * 32)
    log.subscribe(status.apply)

    async def ask(_: ControlServer) -> None:
        log.emit("stage.recovery", stage=3, life=2, expected_s=1.0, reason="stage 3: shadow from a")
        told = await request(swarm, "status")
        assert (told["state"], told["recovered"][0]["reason"]) == ("starting", "stage 3: shadow from a")
        async with aclosing(stream(swarm, "events")) as events, asyncio.TaskGroup() as tasks:
            first = tasks.create_task(anext(events))
            while not first.done():
                log.emit("node.state", state="joining", reason="")
                await asyncio.sleep(0.01)
        assert first.result()["event"] == "node.state"
        for verb in ("peers", "ledger", "leave", "invitation"):
            with pytest.raises(ControlError, match="getting ready: look at it with `farflung status`"):
                await request(swarm, verb)

    serve(swarm, getting_ready(status, log), ask)


async def echo(args: dict[str, Any]) -> dict[str, Any]:
    return {"said": args}


async def refuse(args: dict[str, Any]) -> dict[str, Any]:
    raise ConfigError("not like this")


async def count(args: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for number in range(args["to"]):
        yield {"number": number}


async def raw(swarm: SwarmPaths, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(swarm.socket))
    writer.write(line)
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


def test_round_trip_and_stream(swarm: SwarmPaths) -> None:
    async def use(server: ControlServer) -> None:
        assert await request(swarm, "echo", word="hello") == {"said": {"word": "hello"}}
        assert [item["number"] async for item in stream(swarm, "count", to=3)] == [0, 1, 2]

    serve(swarm, {"echo": echo, "count": count}, use)
    assert not swarm.socket.exists()


def test_only_this_user_can_open_it(swarm: SwarmPaths) -> None:
    async def use(server: ControlServer) -> None:
        assert stat.S_IMODE(swarm.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(swarm.socket.parent.stat().st_mode) == 0o700

    serve(swarm, {}, use)
    swarm.socket.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        asyncio.run(ControlServer(swarm.socket, {}).run())


def test_the_command_that_closes_a_folder_works_as_it_is_told(tmp_path: Path) -> None:
    """On macOS there is a space in the path of all of them."""
    folder = tmp_path / "Application Support"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(ControlServer(folder / "a.sock", {}).run())
    told = str(caught.value).split("`")[1]
    assert shlex.split(told) == ["chmod", "700", str(folder)]
    subprocess.run(told, shell=True, check=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_errors_made_on_purpose_reach_the_client(swarm: SwarmPaths) -> None:
    async def use(server: ControlServer) -> None:
        with pytest.raises(ControlError, match="not like this") as caught:
            await request(swarm, "refuse")
        assert caught.value.kind == "ConfigError"
        with pytest.raises(ControlError, match="no verb 'jump'; there are echo, refuse"):
            await request(swarm, "jump")

    serve(swarm, {"refuse": refuse, "echo": echo}, use)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"x" * (control.MAX_REQUEST_BYTES + 100) + b"\n", "a line of more than"),
        (b"not json\n", "not a request"),
        (b'{"verb": "echo", "other": 1}\n', "not a request"),
        (b'{"verb": 3}\n', "not a request"),
        (b"\xff\xfe\n", "not a request"),
        (b'{"verb": "\xff"}\n', "not a request"),
        (b'{"verb": "echo", "args": {"deep": ' + b"[" * (control.MAX_REQUEST_BYTES // 2) + b"\n", "not a request"),
    ],
)
def test_bad_lines_are_refused_and_the_server_lives_on(swarm: SwarmPaths, line: bytes, said: str) -> None:
    async def use(server: ControlServer) -> None:
        assert said in (await raw(swarm, line))["error"]["message"]
        assert await request(swarm, "echo") == {"said": {}}

    serve(swarm, {"echo": echo}, use)


def test_connections_are_limited(swarm: SwarmPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 1)

    async def use(server: ControlServer) -> None:
        _, silent = await asyncio.open_unix_connection(str(swarm.socket))
        with pytest.raises(ControlError, match="more than 1 commands"):
            await request(swarm, "echo")
        silent.close()

    serve(swarm, {"echo": echo}, use)


def test_a_client_that_goes_with_unread_lines_harms_nobody(swarm: SwarmPaths) -> None:
    """Its socket is reset then, and uvloop's raise what is no ConnectionError when they are written to."""
    gone = asyncio.Event()

    async def news(args: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"news": 1}
        await gone.wait()
        await asyncio.sleep(0.05)  # the loop has heard of it
        yield {"news": 2}

    async def use(server: ControlServer) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, str(swarm.socket))
        await asyncio.get_running_loop().sock_sendall(client, b'{"verb": "news", "args": {}}\n')
        await asyncio.sleep(0.1)
        client.close()
        gone.set()
        await asyncio.sleep(0.2)
        assert await request(swarm, "echo", a=1)  # it lives

    serve(swarm, {"news": news, "echo": echo}, use, loop_factory)


def test_no_node_is_said_with_the_remedy(swarm: SwarmPaths) -> None:
    with pytest.raises(NoNode, match="no node of swarm alpha runs here; start it with `farflung join alpha`"):
        asyncio.run(request(swarm, "status"))


def test_the_node_of_another_user_is_said_to_be_one(swarm: SwarmPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service, or of one that was started with sudo. Tests may run as root, to whom nothing is closed: so the system's refusal is played."""

    class Closed(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # without the path, as the system's

    monkeypatch.setattr(socket, "socket", Closed)
    with pytest.raises(ControlError, match=r"node of swarm alpha belongs to another user .* ask as that one"):
        control._knock(swarm)
    assert runs(swarm), "as far as anybody can see"


LOOPS = pytest.mark.parametrize("loop", [None, loop_factory], ids=["asyncio", "uvloop"])
"""Commands have the one, nodes and those that drive them the other."""


@LOOPS
def test_a_node_killed_while_one_knocks_is_a_clear_error(
    swarm: SwarmPaths, loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    """Whoever waits to be let in is reset by the end of the process: uvloop, left to connect by itself, hears of it while it does."""

    async def knock() -> list[object]:
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(swarm.socket))
            dying.listen()

            async def die() -> None:
                dying.close()

            return await asyncio.gather(request(swarm, "status"), die(), return_exceptions=True)  # in this order

    swarm.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with asyncio.Runner(loop_factory=loop) as runner:
        error, _ = runner.run(knock())
    assert isinstance(error, ControlError) and str(error) == "the node of swarm alpha broke off"


@LOOPS
def test_a_stopped_node_whose_queue_is_full_runs_and_lets_nobody_in(
    swarm: SwarmPaths, loop: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    swarm.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as open_:
        stopped = open_.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(str(swarm.socket))
        stopped.listen(0)
        open_.enter_context(socket.socket(socket.AF_UNIX)).connect(str(swarm.socket))
        assert runs(swarm)
        with pytest.raises(ControlError, match="lets nobody in"), asyncio.Runner(loop_factory=loop) as runner:
            runner.run(request(swarm, "status"))
    assert not runs(swarm)


def test_the_socket_of_a_killed_node_is_replaced(swarm: SwarmPaths) -> None:
    control._bind(swarm.socket).close()
    assert swarm.socket.is_socket()
    with pytest.raises(NoNode):
        asyncio.run(request(swarm, "status"))

    async def use(server: ControlServer) -> None:
        assert await request(swarm, "echo") == {"said": {}}
        with pytest.raises(ConfigError, match="answers at"):
            await ControlServer(swarm.socket, {}).run()

    serve(swarm, {"echo": echo}, use)


def test_stopping_finishes_answers_and_ends_streams(swarm: SwarmPaths) -> None:
    log = EventLog(None, swarm="alpha", peer="aa")
    asked, allowed, listening, arrived = (asyncio.Event() for _ in range(4))

    async def leave(args: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await allowed.wait()
        return {"reason": "saved"}

    async def events(args: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        with log.follow() as followed:
            listening.set()
            async for event in followed:
                yield event

    async def use(server: ControlServer) -> None:
        async def watch() -> list[str]:
            heard = []
            async for item in stream(swarm, "events"):
                heard.append(item["event"])
                arrived.set()
            return heard

        async with asyncio.TaskGroup() as tasks:
            left = tasks.create_task(request(swarm, "leave"))
            watched = tasks.create_task(watch())
            await asked.wait()
            await listening.wait()
            log.emit("one")
            await arrived.wait()
            server.stop()
            allowed.set()
        assert left.result() == {"reason": "saved"}
        assert watched.result() == ["one"]

    serve(swarm, {"leave": leave, "events": events}, use)
    assert log._subscribers == []


def test_a_slow_node_is_a_clear_error(swarm: SwarmPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(args: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def use(server: ControlServer) -> None:
        with pytest.raises(ControlError, match=r"did not answer within 0\.05 s; if it was stopped with Ctrl-Z, `fg`"):
            await request(swarm, "never", timeout_s=0.05)

    monkeypatch.setattr(control, "GRACE_S", 0.05)
    serve(swarm, {"never": never}, use)


def test_one_node_per_swarm_and_home(swarm: SwarmPaths) -> None:
    with only_node(swarm):
        with pytest.raises(ConfigError, match="runs here already"), only_node(swarm):
            pass
    with only_node(swarm):
        assert os.path.exists(swarm.lock)


def test_a_disk_that_cannot_lock_is_named_with_the_remedy(swarm: SwarmPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"cannot be locked .No locks available.*FARFLUNG_HOME"), only_node(swarm):
        pass
