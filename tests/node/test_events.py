"""The event file: its lines, its torn last line, and its subscribers."""

import asyncio
import errno
import json
import re
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from farflung.node import events
from farflung.node.events import Event, EventLog, LastLife, grown, kept_events, last_life, read_events
from farflung.node.status import NodeStatus
from farflung.protocol.errors import ConfigError


def make_log(path: Path | None) -> EventLog:
    return EventLog(path, swarm="s", peer="aa", clock=lambda: 12.3456)


def test_lines_carry_the_context(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    with make_log(path) as log:
        log.emit("node.start", pid=1)
        log.bind(height=3, version=2, step=40)
        log.emit("step", loss=float("nan"), tokens=8)
        assert len(path.read_text().splitlines()) == 2  # written at once, not at the end
    first, second = read_events(path)
    known = {"time": 12.346, "swarm": "s", "peer": "aa"}
    assert first == known | {"event": "node.start", "height": 0, "version": 0, "step": 0, "pid": 1}
    assert second["height"] == 3 and second["step"] == 40
    assert second["loss"] is None


def test_what_is_empty_of_the_context_is_not_written(tmp_path: Path) -> None:
    with make_log(path := tmp_path / "events.jsonl") as log:
        log.bind(group="")
        log.emit("node.start")
        log.bind(group="ab", height=3)
        log.emit("node.start")
        log.bind(group="", height=4)
        log.emit("node.start")
    assert [event.get("group") for event in read_events(path)] == [None, "ab", None]


def test_a_span_is_written_when_it_is_over_however_it_ends() -> None:
    seen: list[Event] = []
    times = iter([5.0, 7.5, 7.5, 8.0, 8.25, 8.25])
    log = EventLog(None, swarm="s", peer="aa", clock=lambda: next(times))
    log.subscribe(seen.append)
    with log.span("encode", 3):
        assert seen == []
    with pytest.raises(KeyError), log.span("reduce", 3):
        raise KeyError
    assert [(e["time"], e["event"], e["what"], e["round"], e["seconds"]) for e in seen] == [
        (7.5, "span", "encode", 3, 2.5),
        (8.25, "span", "reduce", 3, 0.25),
    ]


def test_two_logs_do_not_mix(tmp_path: Path) -> None:
    with make_log(tmp_path / "a") as a, EventLog(tmp_path / "b", swarm="t", peer="bb") as b:
        a.bind(step=5)
        b.emit("node.start")
    assert next(read_events(tmp_path / "b"))["step"] == 0
    assert list(read_events(tmp_path / "a")) == []


def test_a_torn_last_line_is_forgiven_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with make_log(path) as log:
        log.emit("one")
        log.emit("two", long="x" * 10_000)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [event["event"] for event in read_events(path)] == ["one"]
    with make_log(path) as log:
        log.emit("three")
    assert [event["event"] for event in read_events(path)] == ["one", "three"]
    path.write_bytes(whole[:20])
    with make_log(path):
        assert path.read_bytes() == b""


WHOLE = b'{"event": "a", "time": 1, "swarm": "s", "peer": "aa", "height": 0, "version": 0, "step": 0}\n'


@pytest.mark.parametrize(
    "bad",
    [
        b'{"event": "x"',
        b"[]",
        b'{"time": 1}',
        b"\xff",
        b'{"event": "x"}',
        WHOLE.replace(b": 1,", b": null,"),
        WHOLE.replace(b'"aa"', b"7"),
    ],
)
def test_any_other_damage_is_an_error_with_its_place(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(WHOLE + bad.rstrip(b"\n") + b"\n" + WHOLE)
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 2.*take the line out"):
        list(read_events(path))
    with pytest.raises(ConfigError, match=r"events\.jsonl, among the last lines.*take the line out"):
        last_life(path)


def test_how_the_last_node_ended_is_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    assert last_life(path) is None
    path.write_bytes(b"")
    assert last_life(path) is None
    path.write_bytes(WHOLE[:-1])
    assert last_life(path) is None
    monkeypatch.setattr(events, "TAIL_BYTES", 5 * len(WHOLE))
    later = WHOLE.replace(b'"time": 1', b'"time": 9')
    start, stop = (WHOLE.replace(b'"a"', name) for name in (b'"node.start"', b'"node.stop"'))
    for torn in (b"", WHOLE[:30]):
        for written, at, is_stopped in (
            (stop, 1, True),
            (stop + start + later, 9, False),
            (stop + later, 1, True),  # a start that failed before there was a node
            (stop + 50 * WHOLE + later, 9, False),
            (start + 50 * WHOLE + stop, 1, True),
        ):
            path.write_bytes(written + torn)
            assert last_life(path) == LastLife(at, json.loads(stop) if is_stopped else None)
    events.older_events(path).write_bytes(stop)
    path.write_bytes(b"")
    assert last_life(path) == LastLife(1, json.loads(stop))


class FullDisk:
    """A file of a disk with room for `room` bytes."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.room = 1 << 30

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def truncate(self, size: int) -> int:
        return self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_loses_lines_and_says_how_many_once_there_is_room(tmp_path: Path) -> None:
    now, heard, status, path = [12.3456], [], NodeStatus(swarm="s", peer="aa"), tmp_path / "events.jsonl"
    log = EventLog(path, swarm="s", peer="aa", clock=lambda: now[0])
    log.subscribe(heard.append)
    log.subscribe(status.apply)
    disk = log._lines._file = FullDisk(log._lines._file)
    log.emit("one", number=0)
    disk.room = 20  # the next line is torn
    for number in (1, 2, 3):
        log.emit("step.off", number=number)
    assert [event["event"] for event in heard] == ["one", "log.full", "step.off", "step.off", "step.off"]
    assert status.lines_unwritten == 3 and status.log_full == heard[1]["reason"]
    assert heard[1]["reason"].endswith(f"free space in {tmp_path}") and "No space left" in heard[1]["reason"]
    assert [event["event"] for event in read_events(path)] == ["one"], "a reader forgives the torn line"
    now[0] += events.TELL_AGAIN_S
    log.emit("one", number=3)
    assert (heard[5]["event"], heard[5]["count"], heard[6]["event"]) == ("log.full", 3, "one")
    disk.room = 1 << 30
    log.emit("two", number=4)
    log.emit("two", number=5)
    assert [event["event"] for event in heard[7:]] == ["log.unwritten", "two", "two"]
    assert not status.log_full and status.lines_unwritten == 4
    written = list(read_events(path))
    assert [event["event"] for event in written] == ["one", "log.unwritten", "two", "two"]
    assert (written[1]["count"], written[1]["since"]) == (4, 12.346)
    log.close()


def test_a_log_whose_older_part_was_moved_goes_on_once_another_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LOG_BYTES", 1000)
    path, usual = tmp_path / "events.jsonl", Path.open

    def refused(path: Path, mode: str = "r", **how: Any) -> Any:
        if mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(path, mode, **how)

    with make_log(path) as log:
        with monkeypatch.context() as full:
            full.setattr(Path, "open", refused)
            for number in range(15):
                log.emit("one", number=number)
        log.emit("one", number=15)
    told = list(kept_events(path))
    lost = next(event["count"] for event in told if event["event"] == "log.unwritten")
    assert [event["number"] for event in told if "number" in event] == [*range(15 - lost), 15] and lost > 1


def test_subscribers_hear_until_they_leave() -> None:
    log = make_log(None)
    heard: list[Event] = []
    leave = log.subscribe(heard.append)
    log.emit("one")
    leave()
    log.emit("two")
    assert [event["event"] for event in heard] == ["one"]
    assert json.dumps(heard[0])


def test_a_slow_follower_loses_the_oldest_and_is_told() -> None:
    log = make_log(None)

    async def follow() -> list[Event]:
        with log.follow(max_waiting=2) as events:
            for number in range(5):
                log.emit(f"e{number}")
            return [await anext(events) for _ in range(3)]

    skipped, first, second = asyncio.run(follow())
    assert (skipped["event"], skipped["count"]) == ("log.skipped", 3)
    assert (first["event"], second["event"]) == ("e3", "e4")
    log.emit("nobody listens any more")


def test_every_event_is_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "events.md").read_text()
    told = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.]+)`", line)}
    sources = [*(root / "node").glob("*.py"), *(root / "protocol").glob("*.py")]
    emitted = {
        name for file in sources for name in re.findall(r'(?:\bemit|\bNote)\(\s*"([a-z]+\.[a-z]+)"', file.read_text())
    }
    assert {"pipeline.step", "round.commit", "stage.founded"} <= emitted
    assert emitted <= told


def test_every_span_is_in_the_docs() -> None:
    root = Path(__file__).parents[2]
    sources = "".join(file.read_text() for file in (root / "node").glob("*.py"))
    (row,) = [line for line in (root / "docs" / "events.md").read_text().splitlines() if line.startswith("| `span` ")]
    spans = set(re.findall(r'\.span\("(\w+)"', sources))
    assert {"decode", "fetch"} <= spans <= set(re.findall(r"`(\w+)`", row))


def test_counters_count_on_over_moves_and_from_nothing_in_a_new_process() -> None:
    def started(pid: int) -> dict[str, Any]:
        return {"time": 0.0, "event": "node.start", "pid": pid}

    def sent(at: float, nbytes: int) -> dict[str, Any]:
        return {"time": at, "event": "net", "sent_bytes": nbytes}

    moved = [started(7), sent(1.0, 100), sent(2.0, 100), started(7), sent(3.0, 150)]
    assert list(grown(moved, "sent_bytes")) == [(1.0, 100), (3.0, 50)]
    again = [*moved, started(8), sent(4.0, 400)]  # more than the process before had sent
    assert list(grown(again, "sent_bytes"))[2:] == [(4.0, 400)]
    simulated = [started(0), sent(1.0, 100), started(0), sent(2.0, 30)]
    assert sum(more for _, more in grown(simulated, "sent_bytes")) == 130


def test_a_full_file_becomes_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LOG_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    for first in (0, 10):  # once more by another process
        with make_log(path) as log:
            for step in range(first, first + 10):
                log.emit("step", loss=1.0, number=step)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["events.jsonl", "events.older.jsonl"]
    kept = [event["number"] for event in kept_events(path)]
    assert kept == list(range(20))[-len(kept) :] and len(kept) > len(list(read_events(path))) > 0
