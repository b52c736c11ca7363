"""Which means a judge compares, and that it does."""

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


KEPT = FeedbackSpec(uplink="kept")


@pytest.mark.parametrize(
    ("codec", "feedback"),
    [
        ("fp32", None),
        ("int8(block=32)", None),
        ("deadzone(bits=1.5)", KEPT),
        ("trellis(bits=0.9)", KEPT),
        *further(
            ("bf16", None), ("fp16", None), ("bf16+zstd", None), ("int4(block=32)", None), ("deadzone(bits=0.6)", KEPT)
        ),
    ],
)
def test_a_contribution_that_counts_twice_is_seen_whatever_codec_carries_it(
    codec: str, feedback: FeedbackSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulate(plan(codec, feedback)).violations == []
    reduce = Participation._reduce

    def twice(self: Participation, part: int, contributors: frozenset[bytes], *, early: bool) -> Reduce:
        asked = reduce(self, part, contributors, early=early)
        return replace(asked, weights=(*asked.weights, asked.weights[0]))

    monkeypatch.setattr(Participation, "_reduce", twice)
    (said, *_) = simulate(plan(codec, feedback)).violations
    assert said.startswith("invariant 4: the mean of round")


def test_means_are_not_compared_where_something_is_added_that_was_left_out_before() -> None:
    assert plan("int4(block=32)", KEPT, last="fp32").known_means
    assert not plan("fp32", FeedbackSpec(uplink="residual")).known_means
    assert not plan("fp32", FeedbackSpec(uplink="kept", downlink="residual")).known_means
