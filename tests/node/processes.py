"""Processes that run `farflung join`, as people start them, and what their event files say."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.node.watching import HOOK, Opened, read_hook

from farflung.node.events import read_events
from farflung.node.paths import SwarmPaths, resolve_paths

PATIENCE_S = 240.0
"""More than any machine needs: who waits longer has found a bug."""

LOOK_S = 0.05
"""Between two looks at a file: nodes are other processes, so there is nothing to wait on."""


class Node:
    """A process that runs `farflung join`."""

    def __init__(self, home: Path, swarm: str, *options: str, watched: bool = False) -> None:
        """`watched`: what it opens is known, see `opened_since`."""
        command = [sys.executable, "-m", "farflung.sims.main", "join", swarm, "--local", "--no-live", "--threads", "1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._opened = home.with_suffix(".opened")
        if watched:
            folder = home.with_suffix(".watcher")
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(HOOK.format(log=str(self._opened)))
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])])
        self.home, self.log = home, home.with_suffix(".log")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *options, "--home", str(home)],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.paths = resolve_paths(home, {})

    @property
    def swarm(self) -> SwarmPaths:
        """The only one of its home."""
        (swarm,) = self.paths.swarms()
        return swarm

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of all its lives."""
        known = self.paths.swarms()
        if not known or not known[0].events.exists():
            return []
        return [event for event in read_events(known[0].events) if event["event"] == kind]

    def until(self, holds: Callable[[], object]) -> None:
        """Wait, while the process lives."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None and time.monotonic() < give_up_at, self.log.read_text()
            time.sleep(LOOK_S)

    def says(self, text: str) -> None:
        """Wait until it has printed this."""
        self.until(lambda: text in self.log.read_text())

    def word(self, begins: str) -> str:
        """A word that it prints: an invitation, an address."""
        found: list[str] = []

        def look() -> bool:
            whole_lines = self.log.read_text().rpartition("\n")[0]
            found.extend(word for word in whole_lines.split() if word.startswith(begins))
            return bool(found)

        self.until(look)
        return found[0]

    def rounds(self) -> int:
        return len(self.events("round.commit"))

    def opened_since(self, unix_s: float) -> list[Opened]:
        """Files that it has opened, if it is watched."""
        return [one for one in read_hook(self._opened) if one.at >= unix_s]

    def ended(self) -> int:
        """Wait for its end; the status."""
        return self.process.wait(PATIENCE_S)

    def interrupt(self) -> None:
        """Ctrl-C in its terminal, which goes to all processes there."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def nodes() -> Iterator[Callable[..., Node]]:
    """Starts nodes, which are asked to leave in the end: all at once, for each waits a while for the goodbyes of the dead."""
    started: list[Node] = []

    def start(home: Path, swarm: str, *options: str, watched: bool = False) -> Node:
        started.append(Node(home, swarm, *options, watched=watched))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.process.send_signal(signal.SIGTERM)
            node.process.send_signal(signal.SIGCONT)  # who is stopped hears nothing
        for node in started:
            try:
                node.process.wait(30.0)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
