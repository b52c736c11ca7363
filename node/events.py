"""What a node did, as JSON lines: the one record that status, reports and the demo read (schema:
docs/events.md).

structlog builds the lines: an `EventLog` owns a logger with its processors instead of configuring the library
globally, so that several nodes live in one process under simulation. One event is one `write` of one line to
a file opened for appending, so a killed node tears at most its last line; `read_events` forgives exactly
that, and a restarted node cuts the torn line off before it appends.

What the disk does not take, as a full one does, is no reason to stop training: subscribers hear it all the same, and that the file lacks it (`log.full`).
Once there is room again the file says how many lines it lacks (`log.unwritten`), and goes on.

Not thread-safe: `emit` belongs to the event loop's thread, as everything but torch does.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from farflung.protocol.errors import ConfigError

Event = dict[str, Any]
Subscriber = Callable[[Event], None]
"""Called in the event loop's thread for every event; must not block, raise or change the event."""

FOLLOW_EVENTS = 1024
"""Events waiting for one follower. A stuck terminal loses the oldest beyond this; the file loses nothing."""


HEADING: dict[str, type | tuple[type, ...]] = {
    "event": str,
    "time": (int, float),
    "swarm": str,
    "peer": str,
    "height": int,
    "version": int,
    "step": int,
}
"""What every line has."""

MAX_LOG_BYTES = 256 << 20
"""Of a log's file, and of the one before it: at a step a second each has more than a week."""


TELL_AGAIN_S = 60.0
"""Between two times that subscribers hear that the disk does not take the lines: some have come since."""


class EventLog:
    """Appends the events of one node of one swarm to a file and hands them to subscribers."""

    def __init__(self, path: Path | None, *, swarm: str, peer: str, clock: Callable[[], float] = time.time) -> None:
        """Open `path` for appending (None: subscribers only).

        `peer` is the public key in hex; `clock` gives unix seconds and is virtual in simulations.
        """
        self._clock = clock
        self._subscribers: list[Subscriber] = []
        self._resources = ExitStack()
        self._lines: _Lines | None = None
        self._lacks: _Lacks | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._lines = self._resources.enter_context(closing(_Lines(path)))
        self._logger: _Logger = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors=[self._stamp, self._write, self._publish],
            wrapper_class=_Logger,
            context_class=dict,
            swarm=swarm,
            peer=peer,
            height=0,
            version=0,
            step=0,
        )

    def bind(self, **context: int | str) -> None:
        """Set what every later line carries: `height`, `version`, `step`, and of a swarm of several groups `group`. What is empty is not written."""
        empty = [key for key, value in context.items() if value == ""]
        given = {key: value for key, value in context.items() if value != ""}
        self._logger = self._logger.try_unbind(*empty).bind(**given)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event, unless the disk refuses it, and hand it to subscribers. Fields are JSON-able; keys of the context may be given to override
        it for this line.
        """
        self._logger.write(event, **fields)

    @contextmanager
    def span(self, what: str, round_: int) -> Iterator[None]:
        """Write a `span` when what is done inside is over, however it ends: cancelled work took its time, too."""
        began = self._clock()
        try:
            yield
        finally:
            self.emit("span", what=what, round=round_, seconds=round(self._clock() - began, 3))

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on, until the returned function is called."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def follow(self, *, max_waiting: int = FOLLOW_EVENTS) -> "Follower":
        """Every event from now on, to be read with `async for` inside `with`."""
        return Follower(self, max_waiting)

    def close(self) -> None:
        """Close the file; `emit` raises ValueError afterwards."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stamp(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {"time": round(self._clock(), 3), "event": event.pop("event"), **event}

    def _write(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Into the file, after what it lacks. What is said of the file itself subscribers hear before this event."""
        if self._lines is None:
            return event
        heading = {key: event[key] for key in (*HEADING, "group") if key in event}
        written = [dict(event)]
        if self._lacks is not None:
            lacks = {"count": self._lacks.count, "since": self._lacks.since}
            written.insert(0, {**heading, "event": "log.unwritten", **lacks})
        try:
            self._lines.write("".join(f"{rendered(one)}\n" for one in written))
        except OSError as error:
            self._lacks = self._lacks or _Lacks(event["time"])
            if event["time"] >= self._lacks.told_at + TELL_AGAIN_S:
                self._lacks.told_at = event["time"]
                told = {"reason": self._lines.refused(error), "count": self._lacks.count}
                self._publish(logger, method, {**heading, "event": "log.full", **told})
            self._lacks.count += 1
        else:
            self._lacks = None
            for told in written[:-1]:
                self._publish(logger, method, told)
        return event

    def _publish(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for subscriber in tuple(self._subscribers):  # a subscriber may unsubscribe while it is called
            subscriber(dict(event))
        return event


@dataclass(slots=True)
class _Lacks:
    """What a file lacks at its end."""

    since: float
    """Unix seconds of the first."""
    count: int = 0
    """Lines."""
    told_at: float = -math.inf


class _Lines:
    """The end of a log: when its file is full it becomes the older one, in the place of that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = False
        """The disk has refused a write, and may have taken some of it."""
        self._open()

    def _open(self) -> None:
        # No buffer: it would keep what the disk has refused, and write it later, in the middle of something else.
        self._file = self._path.open("ab", buffering=0)
        self._num_bytes = self._path.stat().st_size

    def write(self, text: str) -> None:
        """All of it or nothing. Raises OSError where the disk does not take it."""
        if self._torn:
            self._file.truncate(self._num_bytes)
            self._torn = False
        data = memoryview(text.encode())
        if self._num_bytes + len(data) > MAX_LOG_BYTES:
            self._begin_anew()
        self._torn, left = True, data
        while left:  # a disk that becomes full takes the beginning, and refuses the rest
            left = left[self._file.write(left) :]
        self._torn = False
        self._num_bytes += len(data)

    def _begin_anew(self) -> None:
        full = self._file
        if self._path.exists():  # else it was moved before, and the disk had no room for another one
            self._path.replace(older_events(self._path))
        self._open()
        full.close()

    def refused(self, error: OSError) -> str:
        """What to say where the disk does not take a line."""
        return f"{self._path.name} cannot be written ({error.strerror or error}), and what this node does is not in it: free space in {self._path.parent}"

    def close(self) -> None:
        self._file.close()


def older_events(path: Path) -> Path:
    """Where events are that were in `path` before it was full."""
    return path.with_name(f"{path.stem}.older{path.suffix}")


class Follower(AsyncIterator[Event]):
    """Events of one log for one slow reader: a bounded queue that drops the oldest and says how many.

    After a loss the reader gets one `log.skipped` with `count` before the next event.
    """

    def __init__(self, log: EventLog, max_waiting: int) -> None:
        self._waiting: asyncio.Queue[Event] = asyncio.Queue(maxsize=max_waiting)
        self._skipped = 0
        self._unsubscribe = log.subscribe(self._keep)

    def _keep(self, event: Event) -> None:
        if self._waiting.full():
            self._waiting.get_nowait()
            self._skipped += 1
        self._waiting.put_nowait(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._skipped:
            count, self._skipped = self._skipped, 0
            return {"event": "log.skipped", "count": count}
        return await self._waiting.get()


class _Logger(structlog.BoundLoggerBase):
    """structlog's wrapper without levels: an event here has a name, not a severity."""

    def write(self, event: str, **fields: Any) -> None:
        self._proxy_to_logger("msg", event, **fields)


def rendered(event: Event, **_: Any) -> str:
    """An event as a line of JSON; the rest is structlog's."""
    # msgspec writes NaN as null, which is JSON; the standard library writes NaN, which is not.
    return msgspec.json.encode(event).decode()


TAKE_OUT = "take the line out of the file to have the rest"

TAIL_BYTES = 1 << 20
"""Where the last start or end of a node is looked for."""


def kept_events(path: Path) -> Iterator[Event]:
    """Of a node's log, oldest first: from the older file, too, as far as there are any. Raises as `read_events`."""
    for file in (older_events(path), path):
        if file.exists():
            yield from read_events(file)


def read_events(path: Path) -> Iterator[Event]:
    """Events of one file, oldest first. A torn last line (the node was killed while writing) is left out.

    Raises ConfigError naming file and line when any other line is no JSON object, or lacks what every event has (HEADING).
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # only the last line can lack its end
            yield _event(line, f"{path}, line {number}")


@dataclass(frozen=True, slots=True)
class LastLife:
    """Of the last node that wrote a log."""

    at: float
    """When it wrote last, unix seconds."""
    end: Event | None
    """Its `node.stop` or `node.failed`; None: there is none (yet)."""


def last_life(path: Path) -> LastLife | None:
    """By the end of a log, or of the older file where there is nothing in it yet; None where there is nothing at all. Raises as `read_events`."""
    newest: Event | None = None
    for event in _newest_first(path):
        newest = newest or event
        if event["event"] in ("node.stop", "node.failed"):
            return LastLife(event["time"], event)
        if event["event"] == "node.start":
            break
    return None if newest is None else LastLife(newest["time"], None)


def _newest_first(path: Path) -> Iterator[Event]:
    for file in (path, older_events(path)):
        if not file.exists():
            continue
        begin = max(0, file.stat().st_size - TAIL_BYTES)
        with file.open("rb") as lines:
            lines.seek(begin)
            if begin:
                lines.readline()  # the rest of one
            whole, _, _ = lines.read().rpartition(b"\n")
        if whole:
            yield from (_event(line, f"{file}, among the last lines") for line in reversed(whole.split(b"\n")))
            return


def _event(line: bytes, where: str) -> Event:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); {TAKE_OUT}") from error
    if not isinstance(event, dict):
        raise ConfigError(f"{where}: not an event; {TAKE_OUT}")
    for key, kind in HEADING.items():
        if not isinstance(event.get(key), kind):
            raise ConfigError(f"{where}: not an event, which has `{key}` (docs/events.md); {TAKE_OUT}")
    return event


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        keep = size
        while keep:
            start = max(0, keep - 4096)
            file.seek(start)
            end = file.read(keep - start).rfind(b"\n")
            if end >= 0:
                keep = start + end + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)


@dataclass(slots=True)
class Meter:
    """Reads a counter in the `net` events of one node. It counts on when the node moves to another stage, and from nothing in a new process: there
    `node.start` has another `pid`, but under simulation, where the counter falls."""

    key: str
    _known: int = 0
    _pid: int | None = None

    def more(self, event: Event) -> int:
        """By how much it has grown with the node's next event."""
        if event["event"] == "node.start":
            pid = event.get("pid")
            self._known, self._pid = self._known if pid == self._pid else 0, pid
        if event["event"] != "net":
            return 0
        before, self._known = self._known, int(event[self.key])
        return self._known - before if self._known >= before else self._known


def grown(events: Iterable[Event], key: str) -> Iterator[tuple[float, int]]:
    """(time, how much more) of a counter in a node's `net` events (`Meter`)."""
    meter = Meter(key)
    for event in events:
        if more := meter.more(event):
            yield event["time"], more
