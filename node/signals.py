"""Signals by which a person or the system asks a process to end, as its event loop hears them."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM,) if sys.platform == "win32" else (signal.SIGTERM, signal.SIGHUP)
"""Beside Ctrl-C: the second is that of a terminal that was closed, or of a connection to it that was lost."""


@contextmanager
def heard(kinds: Iterable[signal.Signals], told: Callable[[signal.Signals], object]) -> Iterator[None]:
    """In the loop of the main thread: `told` is called for each of these signals until the block ends. Not on Windows, whose loops hear none.

    Who is to be deaf to them, as behind nohup, stays so; but not to SIGINT, which shells keep from what runs in the background for Ctrl-C's sake.
    """
    if sys.platform == "win32":
        yield
        return
    loop = asyncio.get_running_loop()
    before = {kind: signal.getsignal(kind) for kind in kinds}
    before = {k: handler for k, handler in before.items() if k is signal.SIGINT or handler is not signal.SIG_IGN}
    for kind in before:
        loop.add_signal_handler(kind, told, kind)
    try:
        yield
    finally:
        for kind, handler in before.items():
            loop.remove_signal_handler(kind)
            signal.signal(kind, handler)
