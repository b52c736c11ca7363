"""Which means a judge compares, and that it does: those of all codecs whose errors are small."""

from dataclasses import replace

import pytest
from tests.thorough import further

from farflung.compression.registry import parse_codec
from farflung.protocol.effects import Reduce
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.participation import Participation
from farflung.sims.chaos import Wire, toy_plan
from farflung.sims.faults import Schedule, Start
from farflung.sims.simulation import Plan, simulate


def plan(codec: str, feedback: FeedbackSpec | None = None, last: str = "") -> Plan:
    """Three peers and a few rounds."""
    wire = Wire(
        codec=parse_codec(codec),
        feedback=feedback or FeedbackSpec(),
        last=parse_codec(last) if last else None,
        step_s=(0.8, 1.1, 1.6),
    )
    starts = tuple(Start(at=0.5 * peer, peer=peer) for peer in range(3))
    return toy_plan(5, Schedule(num_peers=3, duration_s=60.0, faults=starts), wire, calm_s=0.0)


@pytest.mark.parametrize("codec", ["fp32", "int8(block=32)", *further("bf16", "fp16", "bf16+zstd")])
def test_a_contribution_that_counts_twice_is_seen_whatever_fine_codec_carries_it(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulate(plan(codec)).violations == []
    reduce = Participation._reduce

    def twice(self: Participation, part: int, contributors: frozenset[bytes], *, early: bool) -> Reduce:
        asked = reduce(self, part, contributors, early=early)
        return replace(asked, weights=(*asked.weights, asked.weights[0]))

    monkeypatch.setattr(Participation, "_reduce", twice)
    (said, *_) = simulate(plan(codec)).violations
    assert said.startswith("invariant 4: the mean of round")


def test_means_of_coarse_codecs_and_of_what_is_kept_back_are_not_compared() -> None:
    assert not plan("int4(block=32)").exact_means
    assert not plan("fp32", FeedbackSpec(uplink="residual")).exact_means
    assert not plan("fp32", last="int4(block=32)").exact_means and plan("int8(block=32)", last="fp32").exact_means
