"""For processes that someone else has started, and that are to end with it, however it ends: SIGKILL, too, of which nobody is told.

The kernel closes a pipe whose other end nobody holds any more. Whoever starts us keeps that end to itself, and never writes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

ORPHAN_S = 5.0
"""How long a process may take to leave when whoever started it is gone."""


def leave_with_parent() -> None:
    """From now on: when our standard input closes, SIGTERM to ourselves, and the end if that is not enough."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_with_pool() -> None:
    """From now on, in a process of a pool: the end when the one that made the pool is gone. Else it would wait for work for ever, for it holds both ends
    of the queue."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
