"""The local control API of a running node: JSON lines over a Unix socket that only this user can open.

One connection carries one request. Lines, in order:

```
-> {"verb": "status", "args": {}}
<- {"result": {...}}                                        a verb with one answer
<- {"item": {...}} {"item": {...}} ... {"end": true}        a verb that streams
<- {"error": {"type": "ConfigError", "message": "..."}}     instead of either, or in the middle of a stream
```

There is no TCP and no token: the socket has mode 0600 in a folder of mode 0700, so the operating system says
who may speak. Verbs a node serves: `status`, `peers`, `ledger` (of one sample too, with `sample`), `invitation`, `leave` (answers once
the node has handed over and saved), `events` (streams). Until there is a peer, all but `status` and `events` are refused.
"""

import asyncio
import fcntl
import os
import shlex
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from farflung.node.paths import HOME_VARIABLE, SwarmPaths
from farflung.protocol.errors import ConfigError, FarflungError, LocalError

MAX_REQUEST_BYTES = 64 << 10
"""One request line. Requests are a verb and a few words."""

MAX_REPLY_BYTES = 4 << 20
"""One line of an answer, as the client accepts it: a table of all peers of a large swarm."""

MAX_CONNECTIONS = 32
"""Commands and live views at one time."""

REQUEST_S = 10.0
"""How long a client may take to send its request line."""

GRACE_S = 2.0
"""How long a stopping server waits for answers that are on their way."""

_GOES_ON = "if it was stopped with Ctrl-Z, `fg` in its terminal or `kill -CONT` with its process id lets it go on"

Answer = dict[str, Any]
Handler = Callable[[Answer], Awaitable[Answer] | AsyncIterator[Answer]]
"""Called with the request's args: an `async def` that returns the answer, or an async generator of items.

It raises FarflungError for what the client should read; anything else is a bug and ends the node with a
traceback.
"""


class NoNode(LocalError):
    """No node of this swarm runs on this machine."""


class ControlError(LocalError):
    """The node refused a request or broke off. `kind` is the name of the error's class over there."""

    def __init__(self, message: str, kind: str = "ControlError") -> None:
        super().__init__(message)
        self.kind = kind


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    verb: str
    args: Answer = {}


class ControlServer:
    """Serves verbs until `stop` is called (answers under way are finished) or its task is cancelled (they are
    not).
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._stopping = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self.started = asyncio.Event()
        """Set once clients can connect."""

    def stop(self) -> None:
        """Accept nobody any more, end streams, let single answers go out within GRACE_S; then `run` returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Bind the socket and serve. Raises ConfigError when another node answers there."""
        listening = _bind(self._path)
        try:
            async with asyncio.TaskGroup() as tasks:

                def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    task = tasks.create_task(self._connection(reader, writer))
                    self._connections.add(task)
                    task.add_done_callback(self._connections.discard)
                    task.add_done_callback(self._streams.discard)

                server = await asyncio.start_unix_server(accept, sock=listening, limit=MAX_REQUEST_BYTES)
                try:
                    self.started.set()
                    await self._stopping.wait()
                finally:
                    server.close()
                for task in tuple(self._streams):
                    task.cancel()
                if self._connections:
                    await asyncio.wait(self._connections, timeout=GRACE_S)
                for task in tuple(self._connections):
                    task.cancel()
        finally:
            listening.close()
            self._path.unlink(missing_ok=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                await self._answer(reader, writer)
            except FarflungError as error:
                await _send(writer, {"error": {"type": type(error).__name__, "message": str(error)}})
        except ConnectionError:
            pass  # the client is gone, and nobody is left to tell
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) > MAX_CONNECTIONS:
            raise ControlError(f"more than {MAX_CONNECTIONS} commands at one time")
        line = await _read_line(reader, MAX_REQUEST_BYTES, REQUEST_S)
        if line is None:
            return  # somebody only looked whether we are there
        try:
            request = msgspec.json.decode(line, type=_Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ControlError(f"not a request: {error}") from error
        handler = self._handlers.get(request.verb)
        if handler is None:
            raise ControlError(f"no verb {request.verb!r}; there are {', '.join(sorted(self._handlers))}")
        answer = handler(request.args)
        if isinstance(answer, AsyncIterator):
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                async for item in answer:
                    await _send(writer, {"item": item})
                await _send(writer, {"end": True})
            finally:
                if isinstance(answer, AsyncGenerator):
                    await answer.aclose()  # now, and not when the garbage collector gets to it
        else:
            await _send(writer, {"result": await answer})


async def request(swarm: SwarmPaths, verb: str, *, timeout_s: float = 10.0, **args: Any) -> Answer:
    """Ask the node of `swarm` that runs on this machine for one answer.

    Raises NoNode when none runs, ControlError when it refuses, breaks off or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s), aclosing(_exchange(swarm, verb, args)) as lines:
            async for line in lines:
                if "result" in line:
                    result: Answer = line["result"]
                    return result
    except TimeoutError as error:
        raise ControlError(
            f"the node of swarm {swarm.name} did not answer within {timeout_s:g} s; {_GOES_ON}"
        ) from error
    raise ControlError(f"the node of swarm {swarm.name} ended without an answer")


async def stream(swarm: SwarmPaths, verb: str, **args: Any) -> AsyncGenerator[Answer, None]:
    """Items of a verb that streams, until the node ends the stream or itself. Raises as `request` does."""
    async with aclosing(_exchange(swarm, verb, args)) as lines:
        async for line in lines:
            if "item" in line:
                yield line["item"]


@contextmanager
def only_node(swarm: SwarmPaths) -> Iterator[None]:
    """Hold the lock of a swarm's folder: two nodes with one identity would vote twice.

    Raises ConfigError when another process holds it, or where files cannot be locked. The system drops the lock when the process dies, however
    it dies.
    """
    swarm.folder.mkdir(parents=True, exist_ok=True)
    with swarm.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"a node of swarm {swarm.name} runs here already; look at it with "
                f"`farflung status {swarm.name}`, or give another one its own --home"
            ) from error
        except OSError as error:  # ENOLCK, ENOTSUP and others, by the file system
            raise ConfigError(
                f"{swarm.lock} cannot be locked ({error.strerror}), as on some network file systems; put this node's files on a "
                f"disk of this machine: --home, or the environment variable {HOME_VARIABLE}"
            ) from error
        yield


async def _exchange(swarm: SwarmPaths, verb: str, args: Answer) -> AsyncGenerator[Answer, None]:
    reader, writer = await asyncio.open_unix_connection(sock=_knock(swarm), limit=MAX_REPLY_BYTES)
    try:
        await _send(writer, {"verb": verb, "args": args})
        while (line := await _read_line(reader, MAX_REPLY_BYTES, None)) is not None:
            reply = msgspec.json.decode(line, type=Answer)
            if "end" in reply:
                return
            if "error" in reply:
                raise ControlError(reply["error"]["message"], reply["error"]["type"])
            yield reply
    except ConnectionError as error:
        raise ControlError(f"the node of swarm {swarm.name} broke off") from error
    finally:
        writer.close()


def _knock(swarm: SwarmPaths) -> socket.socket:
    """Connected to its node. By hand, for event loops differ in what they make of a full queue, and of who dies meanwhile. Raises NoNode, ControlError."""
    with ExitStack() as undo:
        knocking = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        knocking.setblocking(False)
        try:
            knocking.connect(str(swarm.socket))
        except BlockingIOError as error:  # it has let nobody in for a hundred of them
            raise ControlError(f"the node of swarm {swarm.name} lets nobody in; {_GOES_ON}") from error
        except PermissionError as error:  # in a closed folder: whether it runs is not to be seen
            raise ControlError(
                f"the node of swarm {swarm.name} belongs to another user ({swarm.socket} is closed to this one); ask as that one"
            ) from error
        except (FileNotFoundError, ConnectionError) as error:
            raise NoNode(
                f"no node of swarm {swarm.name} runs here; start it with `farflung join {swarm.name}`"
            ) from error
        undo.pop_all()
    return knocking


async def _read_line(reader: asyncio.StreamReader, most: int, timeout_s: float | None) -> bytes | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise ControlError(f"a line of more than {most} bytes") from error
    except TimeoutError as error:
        raise ControlError(f"no request within {timeout_s:g} s") from error


async def _send(writer: asyncio.StreamWriter, line: Answer) -> None:
    if writer.is_closing():  # uvloop raises RuntimeError when one writes to what the other side has reset
        raise ConnectionResetError("the client is gone")
    writer.write(msgspec.json.encode(line) + b"\n")
    await writer.drain()


def _bind(path: Path) -> socket.socket:
    """A bound socket of mode 0600 that does not listen yet, so nobody can connect before the mode is right."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid():
        raise ConfigError(f"{path.parent} belongs to another user; give this node its own --home")
    if stat.S_IMODE(folder.st_mode) & 0o077:
        raise ConfigError(
            f"{path.parent} is open to other users; close it with `chmod 700 {shlex.quote(str(path.parent))}`"
        )
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionError:
                path.unlink()  # left behind by a killed node
            else:
                raise ConfigError(f"a node answers at {path} already")
    with ExitStack() as undo:
        control = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        control.bind(str(path))
        path.chmod(0o600)
        undo.pop_all()  # it worked: the socket stays open
    return control


def runs(swarm: SwarmPaths) -> bool:
    """Whether there is a node that would answer; a killed one leaves its socket behind."""
    try:
        _knock(swarm).close()
    except NoNode:
        return False
    except ControlError:  # it is stopped, or not ours to see
        return True
    return True
