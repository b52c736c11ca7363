"""What becomes of residuals: with each commit, over an absence, on disk, and before feedback starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.node.lab import peer
from torch import Tensor

from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.node.residuals import Residuals
from farflung.protocol.chain import Contribution, PartResult, RoundResult
from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.checkpoint import read_state, write_state
from farflung.training.errors import DamagedCheckpoint

NUMEL = 256
CODEC = parse_codec("sign(block=16)")
FLAT = uniform(CODEC, NUMEL)
ME, OTHER = peer(0), peer(1)
BOTH = FeedbackSpec(uplink="residual", downlink="residual", decay=0.5)
PARTS = ((ME, 0, 128), (OTHER, 128, 256))
PACKED = [(CODEC.encode(torch.ones(128)), 1.0)]


def vector(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def residuals(spec: FeedbackSpec = BOTH, version: int = 0) -> Residuals:
    return Residuals(ME, uplink=FLAT, downlink=FLAT, spec=spec, version=lambda: version, fragments=len(PARTS))


def plan(number: int) -> bytes:
    return bytes([number]) * 32


def result(number: int, *, counted: bool = True, kept: Sequence[bool] = (True, True)) -> RoundResult:
    contributors = tuple(Contribution(p, 1, 1, 1) for p in ((ME, OTHER) if counted else (OTHER,)))
    parts = tuple(PartResult(o, a, b, b"d" * 32 if k else b"") for (o, a, b), k in zip(PARTS, kept, strict=True))
    return RoundResult(plan=plan(number), contributors=contributors, parts=parts, seconds_ms=1)


def take_part(one: Residuals, number: int) -> None:
    """Contribute to a plan, and encode the mean of our part."""
    one.begin(plan(number))
    for _, start, stop in PARTS:
        one.encode_contribution(plan(number), vector(number)[start:stop].clone(), start)
    one.encode_mean(plan(number), vector(number + 100, 128), 0)


def memory(one: Residuals, way: str) -> Tensor:
    return one.state()[f"{way}.memory"].clone()


def left_out(x: Tensor) -> Tensor:
    return x - CODEC.decode(CODEC.encode(x), len(x))


def test_a_commit_keeps_what_it_counted_of_both_directions() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1, kept=(True, False)))
    assert torch.equal(memory(one, "up")[:128], left_out(vector(1)[:128])) and not memory(one, "up")[128:].any()
    assert torch.equal(memory(one, "down")[:128], left_out(vector(101, 128))) and not memory(one, "down")[128:].any()


def test_a_round_without_us_changes_nothing_but_what_fades() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1))
    up, down = memory(one, "up"), memory(one, "down")
    take_part(one, 2)
    one.settle(result(2, counted=False, kept=(False, True)))
    assert torch.equal(memory(one, "up")[128:], up[128:] * 0.5) and torch.equal(memory(one, "down"), down)
    assert torch.equal(memory(one, "up")[:128], up[:128]), "what it did not move"
    assert one.state()["up.parts"].numel() == one.state()["down.parts"].numel() == 0


def test_a_mean_of_ours_counts_whoever_contributed() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1, counted=False))
    assert not memory(one, "up").any() and memory(one, "down").any()


def test_what_we_owe_of_a_mean_that_is_not_reduced_waits() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1))
    owed = memory(one, "down")
    assert owed[:128].norm() > 0.0

    one.pack_mean(plan(2), 0, 128, PACKED)
    one.settle(result(2, counted=False))
    assert torch.equal(memory(one, "down"), owed)

    one.pack_mean(plan(3), 0, 128, PACKED)
    one.encode_mean(plan(3), torch.zeros(128), 0)  # there is a late contribution after all
    one.settle(result(3, counted=False))
    assert torch.equal(memory(one, "down")[:128], left_out(BOTH.decay * owed[:128]))

    one.settle(result(4, counted=False))  # of a node that was killed in between, and knows nothing of it
    assert not memory(one, "down")[:128].any()


def test_another_plan_gives_up_what_is_pending() -> None:
    one, twin = residuals(), residuals()
    take_part(one, 1)
    for each in (one, twin):
        take_part(each, 2)
        each.settle(result(2))
    assert torch.equal(memory(one, "up"), memory(twin, "up")) and torch.equal(memory(one, "down"), memory(twin, "down"))


def test_what_was_sent_before_a_kill_is_not_sent_again() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1))
    again = residuals()
    again.load(one.state())
    again.settle(result(2, kept=(True, False)))  # the round that it was killed in
    assert not memory(again, "up")[:128].any() and not memory(again, "down").any()
    assert torch.equal(memory(again, "up")[128:], memory(one, "up")[128:]), "what the round left out is still owed"


def test_an_absence_fades_the_uplink_by_the_rounds_that_went_by() -> None:
    one = residuals()
    take_part(one, 1)
    one.settle(result(1))
    up, down = memory(one, "up"), memory(one, "down")
    take_part(one, 2)
    one.catch_up([result(3, counted=False, kept=(False, True)), result(4, counted=False, kept=(False, True))], 6)
    expected = torch.cat([up[:128] * 0.5**2, up[128:] * 0.5 ** (2 + 2)])
    assert torch.equal(memory(one, "up"), expected), "four rounds that nobody tells of moved half of the vector each"
    assert torch.equal(memory(one, "down"), down)
    assert one.state()["up.parts"].numel() == 0


def test_the_rounds_that_counted_us_before_an_absence_count() -> None:
    one, twin = residuals(), residuals()
    for each in (one, twin):
        take_part(each, 1)
    one.catch_up([result(1), result(2, counted=False, kept=(False, True))], 4)
    twin.settle(result(1))
    expected = torch.cat([memory(twin, "up")[:128] * 0.5, memory(twin, "up")[128:] * 0.5**2])
    assert torch.equal(memory(one, "up"), expected)
    assert torch.equal(memory(one, "down"), memory(twin, "down"))


def test_who_is_absent_forgets_as_fast_as_who_takes_part() -> None:
    """Ten rounds of two fragments in turn: each meets five of them, whether there is anything to add to it or not."""
    sparse = uniform(parse_codec("topk(chunk=64,k=1,bits=2)"), NUMEL)

    def owing() -> Residuals:
        one = Residuals(ME, uplink=sparse, downlink=sparse, spec=BOTH, version=lambda: 0, fragments=len(PARTS))
        one.state()["up.memory"].fill_(1.0)
        return one

    present, absent, away = owing(), owing(), owing()
    for number in range(10):
        _, start, stop = PARTS[number % 2]
        kept = [part[1] == start for part in PARTS]
        present.begin(plan(number))
        present.encode_contribution(plan(number), torch.zeros(stop - start), start)
        present.settle(result(number, kept=kept))
        absent.settle(result(number, counted=False, kept=kept))
    away.catch_up([], 10)
    for each in (present, absent, away):
        for _, start, stop in PARTS:
            assert memory(each, "up")[start:stop].median() == 0.5**5, "of what was never sent"


@pytest.mark.parametrize("spec", [FeedbackSpec(), FeedbackSpec(uplink="residual", downlink="residual", after_rounds=4)])
def test_without_feedback_and_before_it_starts_the_codec_is_alone(spec: FeedbackSpec) -> None:
    one = residuals(spec, version=3)
    for number in (1, 2):
        x = vector(number)
        payload = one.encode_contribution(plan(number), x[:128], 0)
        assert bytes(payload) == bytes(CODEC.encode(vector(number)[:128])) and torch.equal(x, vector(number))
        one.settle(result(number))
        assert one.owed is None
    if spec.uplink == "residual":
        assert not memory(one, "up").any() and not memory(one, "down").any()
        assert one.state()["up.parts"].numel() == 0
    else:
        assert one.state() == {}


def test_what_was_sent_is_remembered_when_the_rest_is_to_stay() -> None:
    one = residuals(FeedbackSpec(uplink="kept"))
    for _, start, stop in PARTS:
        one.encode_contribution(plan(1), vector(1)[start:stop].clone(), start)
    told = one.told(result(1, kept=(False, True)))
    assert told is not None and told.keys() == {128}
    assert torch.equal(told[128], vector(1)[128:] - left_out(vector(1)[128:]))
    assert one.told(result(2)) is None and one.state() == {} and not one.keeps_contributions
    early = residuals(FeedbackSpec(uplink="kept", downlink="residual", after_rounds=5), version=4)
    for _, start, stop in PARTS:
        early.encode_contribution(plan(1), vector(1)[start:stop].clone(), start)
    assert early.told(result(1)) is not None, "only residuals wait"
    with pytest.raises(ConfigError, match=r"feedback.downlink = 'kept': must be one of none, residual"):
        FeedbackSpec(downlink="kept")


def test_what_is_left_out_is_told_in_norms_of_what_was_given() -> None:
    one = residuals()
    take_part(one, 1)
    expected = torch.cat([left_out(vector(1)[a:b]) for _, a, b in PARTS]).norm() / vector(1).norm()
    assert one.owed == pytest.approx(float(expected), rel=1e-5)


def test_it_comes_back_from_disk_bit_for_bit_in_the_middle_of_a_round(tmp_path: Path) -> None:
    one, again = residuals(), residuals()
    take_part(one, 1)
    one.settle(result(1))
    take_part(one, 2)
    write_state(tmp_path, one.state(), {})
    again.load(read_state(tmp_path)[0])
    for each in (one, again):
        each.settle(result(2))
    for name, tensor in one.state().items():
        assert torch.equal(tensor, again.state()[name]), name


def test_who_has_saved_none_owes_nothing() -> None:
    """A stage that was made of others has a checkpoint without any (`renewal`)."""
    fresh = residuals()
    fresh.load({})
    assert not memory(fresh, "up").any() and not memory(fresh, "down").any()


def test_residuals_of_another_swarm_are_refused() -> None:
    up_only = residuals(FeedbackSpec(uplink="residual"))
    with pytest.raises(DamagedCheckpoint, match=r"residuals of \['down', 'up'\] were saved, the manifest has \['up'\]"):
        up_only.load(residuals().state())
    shorter = Residuals(
        ME, uplink=uniform(CODEC, 32), downlink=uniform(CODEC, 32), spec=BOTH, version=lambda: 0, fragments=1
    )
    with pytest.raises(DamagedCheckpoint, match="not the state of error feedback for 32 elements"):
        shorter.load(residuals().state())
