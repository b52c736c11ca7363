"""Starts the processes of a benchmark, talks to them in JSON lines, and ends them, by id."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from farflung.sims.told_to_end import orderly_end

GOODBYE_S = 20.0
"""How long a process may take to end when its work is done."""

POLL_S = 0.5
"""How often it is looked whether all processes still run."""

_STDERR_TAIL = 2000

Popen = Callable[..., "subprocess.Popen[Any]"]
"""(argv, **options of subprocess.Popen) to the process, in a session of its own."""


class BenchError(RuntimeError):
    """The benchmark did not come to figures; the message says why."""


class Worker:
    """One process of a benchmark, and its JSON lines."""

    def __init__(self, process: "subprocess.Popen[Any]", log: IO[bytes], dead: "list[Worker]") -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._dead = dead  # the first of all processes that failed: the others end with it
        self._orders, self._answers = process.stdin, process.stdout
        self._log = log
        self._cut = False

    def tell(self, **message: object) -> None:
        """Send one order. Raises BenchError when the process is gone."""
        try:
            self._orders.write(json.dumps(message).encode() + b"\n")
            self._orders.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._ended_early() from error

    def finish(self) -> None:
        """No orders after this."""
        self._orders.close()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises BenchError when the process is gone."""
        line = self._answers.readline()
        if not line:
            raise self._ended_early()
        message: dict[str, Any] = json.loads(line)
        return message

    def _ended_early(self) -> BenchError:
        first = self._dead[0] if self._dead else self
        return BenchError(f"a process of the benchmark ended early: {first.last_words()}")

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error that nobody meant."""
        return not self._cut and self._process.poll() not in (None, 0)

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _STDERR_TAIL))
        return self._log.read().decode(errors="replace").strip()

    def end(self, within_s: float) -> None:
        """Wait for its end, then end what is left of its session."""
        if not self._orders.closed:
            with contextlib.suppress(BrokenPipeError):
                self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()
        self._process.wait()
        self._answers.close()

    def cut(self) -> None:
        """SIGKILL, as when a machine loses its power; the others go on."""
        self._cut = True
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """End its session, by id."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def workers(within_s: float) -> Iterator[Callable[..., Worker]]:
    """Yields what starts a worker (`bench_peer` with these arguments); all of them end with the block.

    When one fails, and after `within_s` seconds, all are killed, and whoever waits for their words gets BenchError. In the main thread: SIGTERM ends the
    block, too.
    """
    running: list[Worker] = []
    dead: list[Worker] = []
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(orderly_end())
        # ours, for who is killed removes nothing; what still writes there when its node is dead is not to cost the figures
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="farflung-bench-", ignore_cleanup_errors=True))

        def start(arguments: Sequence[str], popen: Popen = subprocess.Popen) -> Worker:
            log = stack.enter_context(tempfile.TemporaryFile())
            own = tempfile.mkdtemp(dir=folder)
            argv = [sys.executable, "-m", "farflung.sims.bench_peer", "--folder", own, *arguments]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            if popen is subprocess.Popen:
                process = subprocess.Popen(argv, start_new_session=True, **pipes)  # type: ignore[call-overload]
            else:
                process = popen(argv, **pipes)
            running.append(Worker(process, log, dead))
            return running[-1]

        def watch() -> None:
            until = time.monotonic() + within_s
            while not over.wait(POLL_S) and time.monotonic() < until:
                dead.extend(worker for worker in list(running) if worker.failed)
                if dead:
                    break
            if not over.is_set():
                for worker in running:
                    worker.kill()

        watchdog = threading.Thread(target=watch, daemon=True)
        watchdog.start()
        patience = 0.0
        try:
            yield start
            patience = GOODBYE_S
        finally:
            over.set()
            watchdog.join()
            for worker in running:
                worker.end(patience)


def introduce(launch: Callable[[int, Sequence[str]], Worker], peers: int) -> tuple[list[Worker], dict[str, Any]]:
    """Start nodes with `launch(rank, contact)`, the later ones with an address of the first, and tell everybody where all
    are. Returns them, and the first one's hello. Raises BenchError.
    """
    first = launch(0, [])
    hello = first.hear()
    members = [first, *(launch(rank, hello["contact"][:1]) for rank in range(1, peers))]
    addresses = [hello["contact"], *(member.hear()["contact"] for member in members[1:])]
    for member in members:
        member.tell(addresses=addresses)
    return members, hello


def last_answers(members: Sequence[Worker], on_round: Callable[[int], None]) -> list[dict[str, Any]]:
    """What each says when all rounds are done; `on_round` is told the number of each that the first has done. Raises BenchError."""
    answers = []
    for member in members:
        while "round" in (message := member.hear()):
            if member is members[0]:
                on_round(message["round"])
        answers.append(message)
    return answers
