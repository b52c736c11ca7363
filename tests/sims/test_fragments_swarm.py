"""Fragments in turn (Streaming DiLoCo), by whole nodes under virtual time: whose turn it is, and that nothing stays behind in the end."""

import asyncio
import json

import pytest

from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.sims.chaos import Wire, run_schedule
from farflung.sims.faults import Schedule, Start
from farflung.sims.swarm import Swarm
from farflung.sims.toy import ToyLearner

NUMEL = 640
ROUNDS = 13
PEERS = 3


@pytest.mark.parametrize("fragments", [1, 3, 4])
def test_all_progress_is_counted_when_the_run_is_over(fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(laps=Laps.fixed(4), samples_per_step=2, tokens_per_sample=8, total_steps=4 * ROUNDS)
    wire = Wire(numel=NUMEL, fragments=fragments, pace=pace, step_s=(1.0,) * PEERS)
    left: list[float] = []
    copied: list[tuple[int, int]] = []
    offer = ToyLearner.offer

    def noted(self: ToyLearner, start: int, stop: int) -> None:
        copied.append((start, stop))
        offer(self, start, stop)

    monkeypatch.setattr(ToyLearner, "offer", noted)

    async def look(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or any(
            p.applier.version < ROUNDS or not p.applier.idle for p in swarm.peers.values()
        ):
            await asyncio.sleep(0.5)
        for learner in swarm.learners.values():
            left.append(float((learner.outer.params - learner.parameters[0]).abs().max()))

    starts = tuple(Start(at=0.1 * peer, peer=peer) for peer in range(PEERS))
    report = run_schedule(5, Schedule(num_peers=PEERS, duration_s=120.0, faults=starts), look, wire)
    assert report.violations == [] and report.rounds == ROUNDS
    assert left == [0.0] * PEERS
    spans = [span for number, span in enumerate(copied) if span not in copied[:number]]
    assert len(spans) == fragments + (fragments > 1) and copied[-1] == (0, NUMEL)
    assert sum(stop - start for start, stop in spans[:fragments]) == NUMEL, "of each fragment when its turn has come"
    commits = [json.loads(line[line.index("{") :]) for line in report.events if " round.commit " in line]
    parts = {event["round"]: event["sent_bytes"] for event in commits if event["contributed"]}
    assert len(parts) >= ROUNDS - 2
    typical, last = sorted(parts.values())[len(parts) // 2], parts[max(parts)]
    assert (last > 2 * typical) == (fragments > 1), "a fragment a round, and everything in the last"
