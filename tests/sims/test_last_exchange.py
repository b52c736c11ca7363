"""The last round of a run: what peers have kept arrives in it, by a codec of its own and as the plain mean. By whole nodes under virtual time."""

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from farflung.compression.codec import Codec
from farflung.compression.registry import parse_codec
from farflung.node.exchange import Exchange
from farflung.node.trainer import Pace
from farflung.protocol.lap import Laps
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.chaos import OUTER, Wire, run_schedule
from farflung.sims.faults import Fault, Kill, Schedule, Start
from farflung.sims.swarm import Swarm
from farflung.sims.toy import ToyLearner
from farflung.training.coupled import Update
from farflung.training.rules import OuterRule, Sgd

NUMEL = 640
ROUNDS = 13
PEERS = 3
COARSE = parse_codec("topk(chunk=64,k=2)")
FINE = parse_codec("int8(block=64)")


class Ending:
    """What a run came to."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        """Of each peer, the largest element of what its codec never let through."""
        self.digests: set[bytes] = set()
        self.rules: dict[int, set[OuterRule]] = {}
        """By version that a step led to, of all peers."""
        self.locals: list[Tensor] = []
        """Of each that contributed to the last round, the parameters before it."""
        self.averaged = 0
        """Peers that took the last round, as the mean, with its means."""
        self.outer = torch.zeros(NUMEL)


def run(
    last: Codec | None, uplink: str, monkeypatch: pytest.MonkeyPatch, *faults: Fault, downlink: str = "residual"
) -> Ending:
    """The judge finds nothing, whatever the way."""
    ending = Ending()
    apply = ToyLearner.apply
    taken: dict[int, int] = {}

    def watched(self: ToyLearner, updates: Sequence[Update], **how: object) -> None:
        taken[id(self)] = number = taken.get(id(self), 0) + 1
        ending.rules.setdefault(number, set()).add(self.outer.rule)
        ending.averaged += self.outer.rule == Sgd(lr=1.0)
        if number == ROUNDS and how["contributed"]:
            assert self.sent is not None
            ending.locals.append(self.sent.values.clone())
        apply(self, updates, **how)  # type: ignore[arg-type]

    async def look(swarm: Swarm) -> None:
        while len(swarm.peers) < PEERS or any(
            p.applier.version < ROUNDS or not p.applier.idle for p in swarm.peers.values()
        ):
            await asyncio.sleep(0.5)
        for learner in swarm.learners.values():
            outer = learner.coupled.outer
            ending.kept.append(float((outer.params - learner.coupled.parameters[0]).abs().max()))
            ending.digests.add(outer.digest())
            ending.outer = outer.params.clone()

    wire = Wire(
        codec=COARSE,
        feedback=FeedbackSpec(uplink=uplink, downlink=downlink),
        last=last,
        numel=NUMEL,
        fragments=2,
        pace=Pace(laps=Laps.fixed(4), samples_per_step=2, tokens_per_sample=8, total_steps=4 * ROUNDS),
        step_s=(1.0,) * PEERS,
    )
    starts = [Start(at=0.1 * peer, peer=peer) for peer in range(PEERS)]
    schedule = Schedule(num_peers=PEERS, duration_s=150.0, faults=(*starts, *faults))
    with monkeypatch.context() as patch:
        patch.setattr(ToyLearner, "apply", watched)
        report = run_schedule(5, schedule, look, wire)
    assert report.violations == [] and report.rounds == ROUNDS
    assert len(ending.digests) == 1
    return ending


def test_nothing_much_is_kept_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fine, coarse = (run(last, "kept", monkeypatch) for last in (FINE, None))
    assert max(fine.kept) < 0.05 * min(coarse.kept), "what the usual codec leaves out of it is never told to anybody"
    for ending in (fine, coarse):
        assert ending.rules.pop(ROUNDS) == {Sgd(lr=1.0)}
        assert set().union(*ending.rules.values()) == {OUTER}


def test_it_ends_at_the_mean_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `sims.quality_train.Rounds` ends: no momentum, and the learning rate is 1."""
    ending = run(FINE, "kept", monkeypatch, downlink="none")
    assert len(ending.locals) == PEERS
    mean = torch.stack(ending.locals).mean(dim=0)
    apart = (torch.stack(ending.locals) - mean).abs().max()
    assert (ending.outer - mean).abs().max() < 0.02 * apart, "what int8 leaves out"


def test_without_kept_progress_it_is_a_round_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = run(None, "residual", monkeypatch)
    assert set().union(*ending.rules.values()) == {OUTER}


def test_who_was_away_takes_the_last_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the last rounds, and back when they are over: it replays them with means of others."""
    ending = run(FINE, "kept", monkeypatch, Kill(at=46.0, peer=2), Start(at=80.0, peer=2))
    assert ending.averaged == PEERS


def test_a_plan_names_the_codec_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[int, str, str]] = []
    expect = Exchange.expect

    def expected(self: Exchange, plan_id: bytes, plan: object) -> None:
        named.append((plan.height, plan.uplink, plan.downlink))  # type: ignore[attr-defined]
        expect(self, plan_id, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Exchange, "expect", expected)
    run(FINE, "kept", monkeypatch)
    heights = {height for height, *_ in named}
    assert {(up, down) for height, up, down in named if height == max(heights)} == {(FINE.spec, FINE.spec)}
    assert {(up, down) for height, up, down in named if height < max(heights)} == {(COARSE.spec, COARSE.spec)}
