"""Real node processes of one machine, as the demo and `farflung sim local` run them: started, followed over their control sockets, stopped,
killed, ended.

Each has a folder of its own for everything it keeps (FARFLUNG_HOME), a session of its own (so that Ctrl-C reaches only who started
it), and is ended by its process id.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from farflung.node.control import ControlError, NoNode, stream
from farflung.node.events import Event
from farflung.node.identity import Identity
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.status import NodeStatus
from farflung.protocol.errors import LocalError

CONNECT_S = 0.2
"""Between two attempts to reach a node that is starting."""

GOODBYE_S = 60.0
"""How long a node may take to leave when asked to; then it is killed. While somebody is still coming, and with others gone that greetings wait for, 20 s are not rare."""

OUTPUT_TAIL = 1500
"""Characters of a node's output to show when it fails."""


class NodeFailed(LocalError):
    """A node ended that was not meant to."""


@dataclass(slots=True)
class DemoNode:
    """One node process."""

    name: str
    """For people: `node 1`."""
    role: str
    home: Path
    swarm_hash: str
    swarm_name: str
    peer: str = ""
    """Public key in hex."""
    status: NodeStatus = field(init=False)
    process: asyncio.subprocess.Process | None = None
    killed: bool = False
    dismissed: bool = False
    """Asked to leave: how it ends is no failure any more."""
    ended: bool = False
    on_event: Callable[["DemoNode", Event], None] = lambda node, event: None
    program: str = "farflung.sims.demo_node"
    """Module to run; it sees to it that it ends with us (`orphans.leave_with_parent`)."""
    _silent: list[psutil.Process] = field(default_factory=list)
    """After a loss of power: all processes of the node, this one first."""

    def __post_init__(self) -> None:
        self.peer = Identity.load_or_create(resolve_paths(self.home).identity).public_key.hex()
        self.status = NodeStatus(swarm=self.swarm_name, peer=self.peer)

    @property
    def swarm(self) -> SwarmPaths:
        return resolve_paths(self.home).swarm(self.swarm_hash, self.swarm_name)

    @property
    def output(self) -> Path:
        return self.home / "output.txt"

    async def run(self, words: list[str]) -> None:
        """Start the program with `words`, follow the node until it ends. Raises NodeFailed when it fails by itself."""
        command = [sys.executable, "-P", "-m", self.program, *words, "--home", str(self.home)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "160"}
        with self.output.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,  # closes with us, whatever ends us: the program looks at it
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self.home,
                start_new_session=True,
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow())
                status = await self.process.wait()
                self.ended = True
                following.cancel()
        finally:
            await self.end()
        if status != 0 and not self.killed and not self.dismissed:
            raise NodeFailed(f"{self.name} ended with status {status}; its last words:\n{self.last_words()}")

    @property
    def exit_status(self) -> int | None:
        """With which its process ended; None before."""
        return None if self.process is None else self.process.returncode

    def kill(self) -> bool:
        """SIGKILL, now. False when there is no process."""
        if not self._signal(signal.SIGKILL):
            return False
        self.killed = True
        return True

    def pause(self) -> bool:
        """SIGSTOP: the node stands, its libp2p goes on; the same."""
        return self._signal(signal.SIGSTOP)

    def resume(self) -> bool:
        """SIGCONT; the same."""
        return self._signal(signal.SIGCONT)

    def lose_power(self) -> bool:
        """From now on nothing of it says anything, and no connection shows why; `end` kills it. False when there is no process."""
        if self.process is None or self.process.returncode is not None:
            return False
        self.killed = True
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(self.process.pid)
            self._silent = [node, *node.children(recursive=True)]
        for process in self._silent:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        return True

    def ask_to_leave(self) -> bool:
        """SIGTERM: leave cleanly. False when there is no process."""
        if not self._signal(signal.SIGTERM):
            return False
        self.dismissed = True
        return True

    async def end(self) -> None:
        """Make sure that the process is gone."""
        if self.process is None or self.process.returncode is not None:
            return
        if self._silent:
            self.process.kill()
            for process in self._silent[1:]:  # they see that the node is gone, and end
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        self.ask_to_leave()
        self.resume()  # whoever is stopped hears nothing
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def last_words(self) -> str:
        """The end of what the node printed."""
        return self.output.read_text(errors="replace")[-OUTPUT_TAIL:] if self.output.exists() else ""

    def _signal(self, number: signal.Signals) -> bool:
        """Whether there is a process to send it to."""
        if self.process is None or self.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return True

    async def _follow(self) -> None:
        """Fold the node's events, and hand each to `on_event` the moment it comes."""
        while not self.ended:
            try:
                async with aclosing(stream(self.swarm, "events")) as events:
                    async for event in events:
                        self.status.apply(event)
                        self.on_event(self, event)
            except (NoNode, ControlError):
                await asyncio.sleep(CONNECT_S)


def now() -> float:
    """Unix seconds, as the nodes' events have them."""
    return time.time()
