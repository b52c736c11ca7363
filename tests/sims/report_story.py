"""A run that never happened, with every kind of event that a report reads."""

import json
import math
import random
from pathlib import Path
from typing import Any

from farflung.sims.facts import Incident, LedgerFacts, PeerFacts, RunFacts, SoloPoint, save_run

START = 1_700_000_000.0
STEP_TOKENS = 2048
STEP_SAMPLES = 4
INNER_STEPS = 20
ROUND_S = 12.0
ROUNDS = 20
KEYS = [bytes([17 * number] * 32).hex() for number in range(1, 7)]
REASON = "the plan's deadline passed 1.8 s before the last part arrived at node 3"


class Writer:
    """Events of one peer, with the context that every event carries."""

    def __init__(self, peer: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self.context: dict[str, Any] = {"swarm": "demo", "peer": peer, "height": 0, "version": 0, "step": 0}

    def __call__(self, at: float, event: str, **fields: Any) -> None:
        self.lines.append({"time": round(START + at, 3), "event": event, **self.context, **fields})


def join_at(first: int) -> float:
    """Seconds at which a newcomer that waits through round `first` starts."""
    return first * ROUND_S - 3.5


def write_run(folder: Path) -> RunFacts:
    """Four nodes from the start, one joins late, one is killed in a round, another one takes its place."""
    rng = random.Random(1)
    writers = [Writer(key) for key in KEYS]
    present_from = [0, 0, 0, 0, 5, 12]
    kill_round, killed = 10, 1
    for number, first in enumerate(present_from):
        at = join_at(first) if first else 0.4 * number
        writer = writers[number]
        writer(at, "node.start", pid=100 + number, device="cpu", agent="farflung 0.1.0", resumed=False)
        writer(at, "node.state", state="joining", reason="asking 3 peers for the manifest")
        if first:
            for done in (3, 9):
                writer(at + done / 3, "state.sync", chunks_done=done, chunks=9, donors=2, bytes=done << 20)
    cursor, sent = 0, [0] * 6
    kept: dict[int, list[list[int]]] = {n: [] for n in range(6)}  # trained, and not counted yet
    for height in range(1, ROUNDS + 1):
        begin = (height - 1) * ROUND_S + 3
        alive = [
            n for n, first in enumerate(present_from) if height > first and not (n == killed and height > kill_round)
        ]
        dead_now = {killed} if height == kill_round else set()
        missing = {3} if height in (7, 15) else set()
        contributors = [n for n in alive if n not in missing | dead_now]
        fresh = {n: cursor + place * INNER_STEPS * STEP_SAMPLES for place, n in enumerate(alive)}
        cursor += len(alive) * INNER_STEPS * STEP_SAMPLES
        for n in alive:
            kept[n].append([fresh[n], fresh[n] + INNER_STEPS * STEP_SAMPLES])
        samples = {KEYS[n]: kept[n] for n in contributors}
        tokens = {KEYS[n]: len(kept[n]) * INNER_STEPS * STEP_TOKENS for n in contributors}
        kept |= {n: [] for n in contributors}
        took = 1.6 + rng.random() * 0.7 + (2.4 if dead_now else 0) + (0.9 if missing else 0)
        for n in alive:
            writer, pace = writers[n], 1.0 + 0.1 * n
            writer(begin, "node.state", state="training", reason="")
            for step in range(INNER_STEPS):
                at = begin + (step + 1) / INNER_STEPS * 4.0 * pace
                writer.context["step"] = (height - 1) * INNER_STEPS + step + 1
                loss = 1.9 + 3.6 * math.exp(-writer.context["step"] / 90) + rng.gauss(0, 0.09)
                writer(
                    at,
                    "step",
                    loss=loss,
                    tokens=STEP_TOKENS,
                    samples=[[fresh[n] + step * STEP_SAMPLES, fresh[n] + (step + 1) * STEP_SAMPLES]],
                    tokens_per_s=10240 / pace,
                    grad_norm=0.8,
                    lr=1e-3,
                    seconds=0.9 * 4.0 * pace / INNER_STEPS,
                )
            ready = begin + 4.0 * pace
            plan = begin + 6.0
            writer(plan, "round.plan", round=height, members=[KEYS[m] for m in alive])
            writer(ready, "node.state", state="ready", reason="")
            if n not in missing:
                writer(plan, "node.state", state="round", reason="")
                writer(plan, "round.scatter", round=height, bytes=1 << 20)
            if n in dead_now:
                continue
            if n not in missing:
                writer(plan + 0.3, "span", what="encode", round=height, seconds=0.3)
                writer(plan + 0.8, "span", what="scatter", round=height, seconds=0.8)
            writer(plan + 1.0, "round.cut", round=height)
            writer(plan + 1.1, "span", what="reduce", round=height, seconds=0.1)
            writer(plan + 1.3, "round.held", round=height)
            writer(plan + took - 0.01, "span", what="apply", round=height, seconds=0.05)
            sent[n] += int(3.1e6 + rng.random() * 4e5)
            writer.context |= {"height": height, "version": height}
            if n in missing:
                writer(plan + took, "round.missed", round=height, reason=REASON)
            writer(
                plan + took,
                "round.commit",
                round=height,
                contributors=tokens,
                view=[KEYS[m] for m in contributors],
                parts_left_out=0,
                seconds=took - 0.05 * n,
                sent_bytes=sent[n],
                received_bytes=sent[n],
                up_bits=8.125 if n in contributors else 0.0,
                down_bits=8.125,
                owed=0.61 if n in contributors else None,
                delay_steps=4 if n in contributors else None,
                contributed=n in contributors,
                samples=samples,
                digest=f"{height:064x}",
            )
            writer(plan + took, "net", sent_bytes=sent[n], received_bytes=sent[n], peers=len(alive) - 1)
            if n == contributors[-1]:
                outer = 1.95 + 3.5 * math.exp(-height * INNER_STEPS / 80)
                heard = {"samples": 64, "tokens": cursor * 512, "seconds": 0.25}
                writer(plan + took + 0.3, "outer.eval", loss=outer, few_loss=None, **heard)
            elif n == contributors[0] and height % 4 == 0:
                heard = {"samples": 8, "tokens": cursor * 512, "seconds": 0.03}
                writer(plan + took + 0.1, "outer.eval", loss=None, few_loss=2.5 - height / 100, **heard)
    end = (ROUNDS * ROUND_S) + 4
    for n, writer in enumerate(writers):
        if n != killed:
            writer(end - 2, "node.state", state="finished", reason="all steps are done")
            writer(end, "node.stop", reason="the run is done")
        target = folder / f"node-{n}" / "events.jsonl"
        target.parent.mkdir(parents=True)
        target.write_text("".join(json.dumps(line) + "\n" for line in writer.lines))
    roles = ["founder", "member", "member", "member", "joined late", "replacement"]
    kill_at = START + (kill_round - 1) * ROUND_S + 3 + 6.4
    timeline = [Incident(time=START + 0.4 * n, what="start", peer=KEYS[n]) for n in range(4)]
    timeline += [Incident(time=START + join_at(present_from[n]), what="join", peer=KEYS[n]) for n in (4, 5)]
    timeline.append(Incident(time=kill_at, what="kill", peer=KEYS[killed]))
    run = RunFacts(
        name="demo",
        started=START,
        ended=START + end,
        peers=[PeerFacts(peer=key, name=f"node {n + 1}", role=roles[n]) for n, key in enumerate(KEYS)],
        timeline=sorted(timeline, key=lambda incident: incident.time),
        solo_loss=[
            SoloPoint(
                step=step,
                tokens=step * STEP_TOKENS,
                seconds=step * 0.22,
                loss=2.35 + 3.2 * math.exp(-step / 70),
            )
            for step in range(0, ROUNDS * INNER_STEPS + 1, 20)
        ],
        ddp_bytes_per_peer=int(ROUNDS * INNER_STEPS * 2 * 4.2e6),
        ledger=LedgerFacts(
            cursor=cursor + 160,
            held={KEYS[0]: [(cursor, cursor + 80)]},
            free=[(cursor + 80, cursor + 160)],
            suspended={KEYS[killed]: [(start, stop) for start, stop in kept[killed]]},
        ),
        description="micro preset (1.05 M parameters), bytes, text of the Python installation; 2 CPU cores",
        samples=[
            'def parse(self, value):\n    """Return the value as a string <str>."""\n    return self._read(value)'
        ],
    )
    save_run(folder / "run.json", run)
    return run
