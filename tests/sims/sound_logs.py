"""A sound log of three peers, and ways to damage it."""

from collections.abc import Callable, Iterable
from typing import Any

from farflung.node.events import Event
from farflung.sims.facts import Incident, Interval, LedgerFacts, PeerFacts, RunFacts
from farflung.sims.summary import summarise

A, B, C = ("aa" * 32, "bb" * 32, "cc" * 32)
PEERS = {A: "node 1", B: "node 2", C: "node 3"}
STEP = 4
"""Samples of a step; a round has two."""

Logs = dict[str, list[Event]]


class Writer:
    """Events of one peer."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.events: list[Event] = []
        self.context = {"height": 0, "version": 0, "step": 0}

    def __call__(self, at: float, kind: str, **fields: Any) -> None:
        self.events.append({"time": at, "event": kind, "swarm": "s", "peer": self.peer, **self.context, **fields})


def commit(number: int, samples: dict[str, list[list[int]]], peer: str) -> dict[str, Any]:
    """The fields of a `round.commit`."""
    return {
        "round": number,
        "contributors": {who: 10 * sum(stop - start for start, stop in own) for who, own in samples.items()},
        "view": sorted(PEERS),
        "parts_left_out": 0,
        "seconds": 1.0,
        "sent_bytes": 1,
        "received_bytes": 1,
        "up_bits": 8.0,
        "down_bits": 8.0,
        "owed": None,
        "delay_steps": 2 if peer in samples else None,
        "contributed": peer in samples,
        "samples": samples,
        "digest": f"{number:064x}",
        "lap": 2,
    }


def sound() -> Logs:
    """Three rounds of all three peers; the third misses the second round, and says why; the second is killed in the last and starts again."""
    writers = {peer: Writer(peer) for peer in PEERS}
    for write in writers.values():
        write(0.0, "node.start", pid=1, device="cpu", agent="a", resumed=False)
    kept: dict[str, list[list[int]]] = {peer: [] for peer in PEERS}
    cursor = 0
    for number in (1, 2, 3):
        at = 10.0 * number
        for peer, write in writers.items():
            for step in range(2):
                write(at + step, "step", loss=1.0, tokens=40, samples=[[cursor, cursor + STEP]], seconds=1.0)
                kept[peer].append([cursor, cursor + STEP])
                cursor += STEP
            write(at + 2, "round.plan", round=number, members=sorted(PEERS), contributors=sorted(PEERS))
            write(at + 3, "round.scatter", round=number, bytes=9)
            write(at + 4, "round.held", round=number)
        late = {C} if number == 2 else set()
        samples = {peer: kept[peer] for peer in PEERS if peer not in late}
        for peer, write in writers.items():
            write.context |= {"height": number, "version": number}
            if peer in late:
                write(at + 5, "round.missed", round=number, reason="too late by 2 s")
            write(at + 5, "round.commit", **commit(number, samples, peer))
        for peer in samples:
            kept[peer] = []
    again = writers[B]  # trains, is killed, and trains the same again
    again(40.0, "step", loss=1.0, tokens=40, samples=[[cursor, cursor + STEP]], seconds=1.0)
    again(41.0, "round.scatter", round=4, bytes=9)
    again.context = {"height": 0, "version": 0, "step": 0}
    again(49.0, "kernels", native=True, reason="")
    again(50.0, "node.start", pid=2, device="cpu", agent="a", resumed=True)
    again.context = {"height": 3, "version": 3, "step": 6}
    again(51.0, "step", loss=1.0, tokens=40, samples=[[cursor, cursor + STEP]], seconds=1.0)
    for write in writers.values():
        write(60.0, "node.stop", reason="done")
    return {peer: write.events for peer, write in writers.items()}


LEDGER = LedgerFacts(cursor=80, held={B: [(72, 80)]})


def run_facts(**changed: Any) -> RunFacts:
    known: dict[str, Any] = {
        "name": "s",
        "started": 0.0,
        "ended": 60.0,
        "peers": [PeerFacts(peer=peer, name=name) for peer, name in PEERS.items()],
        "timeline": [Incident(time=42.0, what="kill", peer=B), Incident(time=50.0, what="join", peer=B)],
        "ledger": LEDGER,
        "exits": {A: 0, B: 0, C: 0},
    }
    return RunFacts(**(known | changed))


def figures(logs: Logs, **changed: Any) -> dict[str, Any]:
    return summarise(logs, run_facts(**changed))


def of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


Damage = Callable[[Logs], None]


def change(peer: str, kind: str, number: int, **fields: Any) -> Damage:
    """In a peer's event of that kind, counted from 0."""

    def damage(logs: Logs) -> None:
        of(logs[peer], kind)[number].update(fields)

    return damage


def remove(peer: str, kind: str, number: int) -> Damage:
    def damage(logs: Logs) -> None:
        logs[peer].remove(of(logs[peer], kind)[number])

    return damage


def step(at: float, *samples: Interval) -> Event:
    return {"time": at, "event": "step", "samples": [list(one) for one in samples]}
