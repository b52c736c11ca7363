"""Whole nodes under virtual time whose contributions and means have different codecs, neither of them int8."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from farflung.compression import unreduced
from farflung.compression.aggregate import Contribution
from farflung.compression.codec import Codec, Payload
from farflung.compression.policy import uniform
from farflung.compression.registry import codec_of, parse_codec
from farflung.compression.unreduced import is_unreduced
from farflung.node.exchange import Exchange
from farflung.node.means import MeanStore
from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.simulation import simulate

NUMEL = 40_000
PEERS = 3


def bits(codec: Codec) -> float:
    return 8 * codec.expected_nbytes(NUMEL) / NUMEL


def test_rounds_use_the_codec_of_each_way_and_log_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = parse_codec("deadzone(bits=1.0)"), parse_codec("int4(block=32)")
    seen: Counter[tuple[str, str]] = Counter()
    store, put = Exchange._store_contribution, MeanStore.put

    def contributed(self: Exchange, *of: Any) -> None:
        seen["up", codec_of(of[-1]).spec] += 1
        store(self, *of)

    async def mean(self: MeanStore, plan: bytes, part: int, payload: Payload, **how: Any) -> bytes:
        seen["down", "as sent" if is_unreduced(payload) else codec_of(payload).spec] += 1
        return await put(self, plan, part, payload, **how)

    monkeypatch.setattr(Exchange, "_store_contribution", contributed)
    monkeypatch.setattr(MeanStore, "put", mean)
    starts = tuple(Start(at=0.5 * peer, peer=peer) for peer in range(PEERS))
    plan = toy_plan(
        5,
        Schedule(num_peers=PEERS, duration_s=60.0, faults=starts),
        Wire(codec=up, numel=NUMEL, step_s=(0.8, 1.1, 1.6)),
        calm_s=0.0,
    )
    outfit, terms = plan.outfit, plan.outfit.terms
    settings = replace(terms.settings, downlink=down.spec, align=down.block)
    terms = replace(terms, settings=settings, downlink=uniform(down, NUMEL))
    report = simulate(replace(plan, outfit=replace(outfit, terms=terms)), keep=True)
    assert report.violations == [] and report.rounds > 5, "equal bits, one history"
    assert seen.keys() == {("up", up.spec), ("down", down.spec), ("down", "as sent")}, "while there are two of them"

    logged = [json.loads(line[line.index("{") :]) for line in report.events if " round.commit " in line]
    made = [event for event in logged if event["contributed"]]
    full = [event for event in made if len(event["contributors"]) == PEERS]
    assert len(full) > 10
    for event in full:
        assert event["down_bits"] == pytest.approx(bits(down), rel=0.05)
    for event in made:
        assert 0.5 * bits(up) < event["up_bits"] < 1.5 * bits(up)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_judge_knows_what_two_peers_must_have_made_of_coarse_contributions(
    monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Means that nobody has coded once more, and that weigh one contribution less than was agreed."""
    pack = unreduced.pack
    packed: list[int] = []

    def light(numel: int, contributions: Sequence[Contribution]) -> memoryview:
        packed.append(len(contributions))
        (first, weight), *rest = contributions
        return pack(numel, [(first, weight / 2 if wrong else weight), *rest])

    monkeypatch.setattr(unreduced, "pack", light)
    starts = tuple(Start(at=0.5 * peer, peer=peer) for peer in range(2))
    wire = Wire(codec=parse_codec("deadzone(bits=1.0)"), numel=NUMEL, step_s=(0.8, 1.1))
    report = simulate(toy_plan(5, Schedule(num_peers=2, duration_s=60.0, faults=starts), wire, calm_s=0.0), keep=True)
    assert packed.count(2) > 10, "all parts, and both owners"
    off = [violation for violation in report.violations if violation.startswith("invariant 4: the mean of round")]
    assert off if wrong else report.violations == []
