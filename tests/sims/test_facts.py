"""What the nodes' files say of a run."""

from pathlib import Path
from typing import Any

import msgspec
from tests.sims.sound_logs import PEERS, A, B, sound

from farflung.node.events import Event
from farflung.sims.facts import Incident, infer_run, load_events
from farflung.sims.logs import all_of
from farflung.sims.summary import summarise, violations


def event(at: float, kind: str, peer: str = A, **fields: Any) -> Event:
    return {"time": at, "event": kind, "swarm": "s", "peer": peer, "height": 0, "version": 0, "step": 0, **fields}


def write(folder: Path, events: list[Event]) -> Path:
    file = folder / events[0]["peer"][:4] / "events.jsonl"
    file.parent.mkdir()
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in events))
    return file


def test_a_clock_that_is_set_back_breaks_nothing(tmp_path: Path) -> None:
    """At any line, by more than a round takes."""
    for first in range(1, len(sound()[A])):
        logs = sound()
        for one in logs[A][first:]:
            one["time"] -= 14.0
        (folder := tmp_path / str(first)).mkdir()
        read = load_events([write(folder, events) for events in logs.values()])
        assert read[A] == logs[A], "in the order of its file"
        assert violations(summarise(read, infer_run(read))) == [], f"from line {first} on"


def test_of_all_peers_together_each_keeps_its_order() -> None:
    logs = {A: [event(at, "step") for at in (1.0, 5.0, 3.0, 6.0)], B: [event(at, "step", B) for at in (2.0, 4.0, 5.5)]}
    assert [one["time"] for one in all_of(logs, "step")] == [1.0, 2.0, 4.0, 5.0, 3.0, 5.5, 6.0]


def test_who_was_killed_and_came_back_is_told_by_its_log() -> None:
    """As whoever runs the nodes writes it down."""
    logs = sound()
    done = [one for one in infer_run(logs).timeline if one.what != "start"]
    assert done == [Incident(time=41.0, what="kill", peer=B), Incident(time=49.0, what="join", peer=B)]
    figures = summarise(logs, infer_run(logs))
    assert (figures["peers_killed"], figures["peers_joined"], figures["peers"]) == (1, 1, len(PEERS))


def test_who_said_goodbye_was_not_killed() -> None:
    """What a process says before its node is up is of no other process."""
    began = [event(1.0, "kernels"), event(2.0, "stage.anew"), event(3.0, "node.start"), event(4.0, "step")]
    again = [one | {"time": 10.0 + one["time"]} for one in began]
    for goodbye in ("node.stop", "node.failed"):
        events = [*began, event(5.0, goodbye), *again]
        assert [one.what for one in infer_run({A: events}).timeline] == ["start"]
    killed = infer_run({A: [*began, *again]}).timeline
    assert [(one.what, one.time) for one in killed] == [("start", 1.0), ("kill", 4.0), ("join", 11.0)]
    last = infer_run({A: [*began, event(5.0, "node.failed")], B: [event(90.0, "net", B)]}).timeline
    assert "kill" not in [one.what for one in last]
