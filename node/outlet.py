"""Where a node shows itself: a terminal or a pipe, which may be slow, stuck or gone, and none of that is the node's concern.

What is written here waits in memory until a thread has handed it to the system, so nobody waits for a terminal that was stopped with Ctrl-S, or a pager that
nobody scrolls; what is too much for the memory is left out, and after an error (the reader has gone, the terminal was closed) all is. The thread writes to the
file descriptor itself: it holds no lock of Python's files, which would keep the process from ending.
"""

import asyncio
import io
import os
import queue
import threading
import time
from typing import TextIO

MAX_WAITING = 1 << 20
"""Characters."""

FULL_S = 0.05
"""Between two looks at whether a terminal takes more that was made non-blocking, by us or by another program."""


class Outlet(io.TextIOBase):
    """Takes the place of a text stream that has a file descriptor. Writing to it never blocks, and never fails."""

    def __init__(self, stream: TextIO) -> None:
        """What `stream` still holds goes out first. Raises OSError where it has no descriptor."""
        self._stream = stream  # which would close the descriptor if nobody referred to it
        self._descriptor = stream.fileno()
        self._is_terminal = stream.isatty()
        self._encoding = stream.encoding or "utf-8"
        stream.flush()
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._hand_over, name="outlet", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a constant there
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._counting:
            taken = not self._waiting or self._waiting + len(text) <= MAX_WAITING
            if taken:
                self._waiting += len(text)
        if taken:
            self._texts.put(text)
        return len(text)

    @property
    def is_full(self) -> bool:
        """Whether much is left out from here on."""
        return self._waiting > MAX_WAITING // 2

    def finish(self, within_s: float) -> None:
        """Wait until all is written, but not for longer; nothing may be written after this."""
        self._texts.put(None)
        self._thread.join(within_s)

    def _hand_over(self) -> None:
        open_ = True
        while (text := self._texts.get()) is not None:
            if open_:
                open_ = self._write_out(text.encode(self._encoding, errors="replace"))
            with self._counting:
                self._waiting -= len(text)

    def _write_out(self, data: bytes) -> bool:
        """Whether the other side is still there."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(FULL_S)
            except OSError:
                return False
        return True


def outlet_of(stream: TextIO) -> TextIO:
    """An outlet in the place of a stream; the stream itself, where it has no file descriptor, as in tests."""
    try:
        return Outlet(stream)  # type: ignore[return-value]  # as much of a TextIO as anybody asks for
    except OSError:
        return stream


async def until_room(stream: TextIO) -> None:
    """Before what must not be left out. Returns at once for what is no outlet."""
    while isinstance(stream, Outlet) and stream.is_full:  # noqa: ASYNC110 - it is a thread that makes room
        await asyncio.sleep(FULL_S)


def finish(*streams: TextIO, within_s: float) -> None:
    """Of those that are outlets."""
    for stream in streams:
        if isinstance(stream, Outlet):
            stream.finish(within_s)
