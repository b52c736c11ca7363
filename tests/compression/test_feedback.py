"""Error feedback: nothing is lost and nothing counted twice, whatever rounds fail and whatever parts they leave out."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.compression.codec import Codec, CodecError
from farflung.compression.deadzone import DeadZone
from farflung.compression.feedback import Ef21, Ef21Receiver, ErrorFeedback, Feedback, Slice
from farflung.compression.fp32 import Fp32
from farflung.compression.int8 import Int8
from farflung.compression.policy import parse_policy, uniform
from farflung.compression.sign import Sign
from farflung.compression.topk import TopK
from farflung.training.checkpoint import read_state, write_state

NUMEL = 300
SIGN, TOPK = Sign(block=64), TopK(chunk=64, k=2)
"""The biased ones."""
WHOLE: list[Slice] = [(0, NUMEL)]
MAKERS: list[Callable[[Codec], Feedback]] = [
    lambda codec: ErrorFeedback(uniform(codec, NUMEL), decay=0.9),
    lambda codec: Ef21(uniform(codec, NUMEL), scale=1.5),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vector(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---- the recurrences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [SIGN, TOPK, Int8(), DeadZone(bits=0.5)], ids=lambda c: c.name)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_ef14_is_the_digests_recurrence(codec: Codec, decay: float) -> None:
    feedback = ErrorFeedback(uniform(codec, NUMEL), decay=decay, cap=math.inf)
    e = torch.zeros(NUMEL)
    for number in range(5):
        x = vector(number)
        p = x + e * decay
        feedback.begin(b"round")
        payload = feedback.encode_(x.clone(), 0)
        assert bytes(payload) == bytes(codec.encode(p))
        e = p - codec.decode(payload, NUMEL)
        feedback.commit(b"round", WHOLE)
        assert same_bits(feedback.memory, e)


@pytest.mark.parametrize("weights", [(0.25, 0.25, 0.25, 0.25), (0.01, 0.01, 0.01, 0.97)])
def test_ef21_receivers_hold_the_weighted_mean_of_what_senders_hold(weights: tuple[float, ...]) -> None:
    codec = TOPK
    flat = uniform(codec, NUMEL)
    senders = [Ef21(flat, scale=1.0 / (len(weights) * w)) for w in weights]
    receiver = Ef21Receiver(NUMEL)
    for _ in range(200):
        change = torch.zeros(NUMEL)
        for i, (sender, weight) in enumerate(zip(senders, weights, strict=True)):
            sender.begin(b"round")
            payload = sender.encode_(vector(i), 0)  # the same again and again, so that the estimates arrive
            codec.decode_add_(payload, change, weight)
            sender.commit(b"round", WHOLE)
        estimate = receiver.add_(change, 0)
        held = torch.stack([sender.memory * w for sender, w in zip(senders, weights, strict=True)]).sum(dim=0)
        torch.testing.assert_close(estimate, held, atol=1e-5, rtol=1e-5)
    exact = torch.stack([vector(i) for i in range(len(weights))]).mean(dim=0)
    torch.testing.assert_close(receiver.estimate, exact, atol=1e-4, rtol=1e-4)


def test_the_residual_is_capped() -> None:
    feedback = ErrorFeedback(uniform(TOPK, NUMEL), cap=2.0)
    for number in range(30):
        feedback.begin(b"round")
        feedback.encode_(torch.ones(NUMEL), 0)
        feedback.commit(b"round", WHOLE)
        assert float(feedback.memory.norm()) <= 2.0 * NUMEL**0.5 * 1.0001, number
    assert float(feedback.memory.norm()) == pytest.approx(2.0 * NUMEL**0.5, rel=1e-3)


def test_absence_fades_the_residual() -> None:
    feedback = ErrorFeedback(uniform(Fp32(), NUMEL), decay=0.5)
    feedback.memory.fill_(8.0)
    feedback.age(3)
    assert feedback.memory.eq(1.0).all()
    feedback.age(2, [(0, 16), (32, 40)])
    assert feedback.memory[:16].eq(0.25).all() and feedback.memory[16:32].eq(1.0).all()
    assert feedback.memory[32:40].eq(0.25).all() and feedback.memory[40:].eq(1.0).all()
    feedback.age(0.5)
    assert feedback.memory[40:].eq(0.5**0.5).all()


# ---- rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("end", ["rollback", "begin", "commit nothing", "commit another"])
def test_a_failed_round_changes_nothing(make: Callable[[Codec], Feedback], end: str) -> None:
    feedback, twin = make(SIGN), make(SIGN)
    for number in range(3):
        for one in (feedback, twin):
            one.begin(b"good")
            one.encode_(vector(number), 0)
            one.commit(b"good", WHOLE)
        feedback.begin(b"bad")
        feedback.encode_(vector(number + 100), 0)
        match end:
            case "rollback":
                feedback.rollback()
            case "begin":
                feedback.begin(b"next")
            case "commit nothing":
                feedback.commit(b"bad", [])
            case "commit another":
                feedback.commit(b"another", [])
        assert same_bits(feedback.memory, twin.memory)
        assert feedback.state()["parts"].numel() == 0
    first, second = (one.encode_(vector(7), 0) for one in (feedback, twin))
    assert bytes(first) == bytes(second)


@pytest.mark.parametrize("make", MAKERS)
def test_only_counted_parts_commit(make: Callable[[Codec], Feedback]) -> None:
    feedback, whole = make(SIGN), make(SIGN)
    for one in (feedback, whole):
        one.begin(b"first")
        for start, stop in ((0, 128), (128, NUMEL)):
            one.encode_(vector(1)[start:stop].clone(), start)
    feedback.commit(b"first", [(128, NUMEL)])
    whole.commit(b"first", [(0, 128), (128, NUMEL)])
    assert feedback.memory[:128].eq(0).all() and same_bits(feedback.memory[128:], whole.memory[128:])


@pytest.mark.parametrize("make", MAKERS)
def test_a_part_that_is_encoded_again_takes_the_place_of_what_was_pending(make: Callable[[Codec], Feedback]) -> None:
    once, again = make(Sign(block=32)), make(Sign(block=32))
    for feedback in (once, again):
        feedback.begin(b"round")
        feedback.encode_(vector(1, 100), 0)
    again.encode_(vector(2, 100), 100)
    assert again.encode_(vector(3, 100), 100) == once.encode_(vector(3, 100), 100)
    for feedback in (once, again):
        feedback.commit(b"round", [(0, 100), (100, 200)])
    assert torch.equal(once.memory, again.memory) and once.memory[100:200].any()
    if isinstance(once, ErrorFeedback) and isinstance(again, ErrorFeedback):
        assert once.left_out == again.left_out


def test_what_a_crash_made_unknown() -> None:
    """The round counted a part whose encoding was not saved: EF14 gives its residual up, EF21 cannot go on."""
    residual = ErrorFeedback(uniform(SIGN, NUMEL))
    residual.memory.fill_(1.0)
    residual.commit(b"before the crash", [(0, 100)])
    assert residual.memory[:100].eq(0).all() and residual.memory[100:].eq(1).all()
    estimate = Ef21(uniform(SIGN, NUMEL))
    estimate.begin(b"round")
    estimate.encode_(vector(1, 100), 0)
    with pytest.raises(ValueError, match=r"\[100, 300\)"):
        estimate.commit(b"round", [(0, 100), (100, 300)])
    assert estimate.memory.eq(0).all()


@pytest.mark.parametrize("make", MAKERS)
def test_wrong_arguments_are_the_callers_fault(make: Callable[[Codec], Feedback]) -> None:
    feedback = make(Fp32())
    feedback.begin(b"round")
    feedback.encode_(vector(0, 100), 100)
    for numel, start in ((99, 100), (101, 99), (1, 199), (150, 0), (300, 0)):
        with pytest.raises(ValueError, match="overlaps"):
            feedback.encode_(vector(0, numel), start)
    for numel, start in ((101, 200), (1, 300), (0, 5), (10, -10)):
        with pytest.raises(ValueError, match="no slice"):
            feedback.encode_(vector(0, numel), start)
    with pytest.raises(ValueError, match="contiguous fp32"):
        feedback.encode_(vector(0, 100)[::2], 0)
    bad = vector(0, 50)
    bad[7] = float("nan")
    with pytest.raises(CodecError, match="finite"):
        feedback.encode_(bad, 0)
    feedback.encode_(vector(0, 50), 0)  # nothing is pending of what could not be encoded
    for wrong in ({"decay": 1.1}, {"decay": -0.1}, {"cap": 0.0}, {"cap": float("nan")}, {"decay": float("nan")}):
        with pytest.raises(ValueError, match="decay must"):
            ErrorFeedback(uniform(Fp32(), 1), **wrong)
    with pytest.raises(ValueError, match="scale must"):
        Ef21(uniform(Fp32(), 1), scale=0.0)


# ---- nothing is lost ------------------------------------------------------------------------------------------


class Peer:
    """Its progress stays with it until a round counts it, as `training.coupled` has it."""

    def __init__(self, codec: Codec, numel: int, *, feeds_back: bool = True) -> None:
        self.flat = uniform(codec, numel)
        self.feedback = ErrorFeedback(self.flat, cap=math.inf)
        self.feeds_back = feeds_back
        self.progress = torch.zeros(numel, dtype=torch.float64)
        """That no round has counted."""
        self.delivered = torch.zeros(numel, dtype=torch.float64)

    def round(self, step: Tensor, cuts: list[int], counts: Callable[[], bool]) -> None:
        """Train, encode part by part; `counts` says of each part whether the round takes it."""
        self.progress += step
        delta = self.progress.float()
        self.feedback.begin(b"round")
        counted: list[Slice] = []
        for start, stop in pairwise([0, *cuts, self.flat.numel]):
            codec = self.flat.part(start, stop)
            x = delta[start:stop]
            payload = self.feedback.encode_(x, start) if self.feeds_back else codec.encode(x)
            if counts():
                counted.append((start, stop))
                self.delivered[start:stop] += codec.decode(payload, stop - start)
                self.progress[start:stop] = 0.0
        self.feedback.commit(b"round", counted if self.feeds_back else [])


def misfortune(seed: int) -> Callable[[], Callable[[], bool]]:
    """Call it for a round: of all rounds 30 % fail, and of the others one part in ten is left out."""
    chance = random.Random(seed)

    def new_round() -> Callable[[], bool]:
        fails = chance.random() < 0.3
        return lambda: not fails and chance.random() < 0.9

    return new_round


@settings(deadline=None, max_examples=40)
@given(
    codec=st.sampled_from([SIGN, TOPK, Int8(block=16), DeadZone(bits=0.5)]),
    cuts=st.lists(st.sets(st.integers(1, NUMEL - 1), max_size=4), max_size=12),
    seed=st.integers(0, 999),
)
def test_what_was_delivered_and_what_is_kept_are_all_there_was(codec: Codec, cuts: list[set[int]], seed: int) -> None:
    peer, new_round = Peer(codec, NUMEL), misfortune(seed)
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for number, where in enumerate(cuts):
        total += vector(number)
        peer.round(vector(number), sorted(where), new_round())
    kept = peer.feedback.memory + peer.progress
    torch.testing.assert_close(peer.delivered + kept, total, atol=1e-4, rtol=1e-5)


def bias(codec: Codec, *, feeds_back: bool) -> tuple[float, float]:
    """Of what arrives a round against what there was, in rounds 50 to 100 of 16 peers, each with failures of its own.

    Returns the largest z-score of the mean error among the elements, and its norm relative to the drift's.
    """
    peers, rounds, numel = 16, 100, 64
    drift = vector(1, numel) * torch.logspace(-1, 0, numel)
    errors = torch.empty(peers, numel, dtype=torch.float64)
    for number in range(peers):
        noise = torch.Generator().manual_seed(number)
        peer, new_round = Peer(codec, numel, feeds_back=feeds_back), misfortune(number)
        balance = torch.zeros(numel, dtype=torch.float64)
        for k in range(rounds):
            step = drift + torch.randn(numel, generator=noise)
            if k == rounds // 2:  # by now there is as much in the residual as there will ever be
                balance = -peer.delivered
            if k >= rounds // 2:
                balance -= step
            peer.round(step, [32], new_round())
        errors[number] = (balance + peer.delivered) / (rounds // 2)
    mean = errors.mean(dim=0)
    z = mean / (errors.std(dim=0) / peers**0.5)
    return float(z.abs().max()), float(mean.norm() / drift.norm())


@pytest.mark.parametrize("codec", [SIGN, TopK(chunk=64, k=8)], ids=lambda c: c.name)
def test_failed_rounds_leave_no_bias(codec: Codec) -> None:
    """64 elements: the largest of as many z-scores of 16 samples is below 5.5 with probability 0.99."""
    z, error = bias(codec, feeds_back=True)
    assert z < 5.5 and error < 0.06, (z, error)
    z, error = bias(codec, feeds_back=False)
    assert z > 20 and error > 0.3, (z, error)


# ---- bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_it_is_saved_and_goes_on_with_the_same_bits(make: Callable[[Codec], Feedback], tmp_path: Path) -> None:
    """In the middle of a round, too: what is pending is part of the state."""
    feedback, restored = make(SIGN), make(SIGN)
    feedback.begin(b"first")
    feedback.encode_(vector(1), 0)
    feedback.commit(b"first", WHOLE)
    feedback.begin(b"second" * 6)
    for start, stop in ((0, 128), (128, 200)):
        feedback.encode_(vector(2)[start:stop].clone(), start)
    write_state(tmp_path, feedback.state(), {})
    restored.load(read_state(tmp_path)[0])
    for one in (feedback, restored):
        one.encode_(vector(2)[200:].clone(), 200)
        one.commit(b"second" * 6, [(0, 128), (200, NUMEL)])
    assert same_bits(feedback.memory, restored.memory)
    feedback.rollback()
    write_state(tmp_path, feedback.state(), {})
    restored.load(read_state(tmp_path)[0])
    assert same_bits(feedback.memory, restored.memory)


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_of_something_else_is_refused(make: Callable[[Codec], Feedback]) -> None:
    feedback = make(Fp32())
    feedback.begin(b"round")
    feedback.encode_(vector(1, 100), 100)
    good, before = feedback.state(), feedback.memory.clone()
    wrong: list[dict[str, Tensor]] = [
        {},
        {name: tensor for name, tensor in good.items() if name != "round"},
        {**good, "memory": vector(1, NUMEL - 1)},
        {**good, "memory": vector(1).double()},
        {**good, "pending": vector(1, 99)},
        {**good, "parts": torch.tensor([[250, 350]])},
        {**good, "parts": torch.tensor([[200, 100]])},
        {**good, "parts": torch.tensor([0, 100])},
    ]
    for state in wrong:
        with pytest.raises(ValueError, match="state of error feedback"):
            feedback.load(state)
        assert same_bits(feedback.memory, before) and feedback.state()["parts"].tolist() == [[100, 200]]


def test_the_same_bits_for_every_thread_count() -> None:
    numel = (1 << 18) + 70_001
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        feedback = ErrorFeedback(uniform(Int8(), numel), decay=0.9, cap=1e-3)  # so small that it is at work
        for number in range(2):
            feedback.begin(b"round")
            payload = bytes(feedback.encode_(vector(number, numel), 0))
            feedback.commit(b"round", [(0, numel)])
        results.append((payload, feedback.memory))
    assert all(payload == results[0][0] and same_bits(memory, results[0][1]) for payload, memory in results[1:])


def test_a_policys_exact_tensors_leave_no_residual() -> None:
    flat = parse_policy("1d:fp32,int8(block=16)").resolve([("matrix", (16, 16)), ("norm", (44,))])
    feedback = ErrorFeedback(flat)
    feedback.begin(b"round")
    x = vector(1)
    payload = feedback.encode_(x.clone(), 0)
    feedback.commit(b"round", WHOLE)
    assert feedback.memory[256:].eq(0).all() and feedback.memory[:256].count_nonzero() > 200
    torch.testing.assert_close(flat.part(0, NUMEL).decode(payload, NUMEL) + feedback.memory, x)


def test_what_is_owed_outlives_a_round_that_has_nothing_to_send() -> None:
    feedback = ErrorFeedback(uniform(TOPK, NUMEL))
    x = vector(1)
    sent = torch.zeros(NUMEL)
    for number, now in enumerate([x, torch.zeros(NUMEL), torch.zeros(NUMEL)]):
        feedback.begin(bytes([number]))
        payload = feedback.encode_(now.clone(), 0)
        feedback.commit(bytes([number]), WHOLE)
        sent += feedback.codec.part(0, NUMEL).decode(payload, NUMEL)
        torch.testing.assert_close(sent + feedback.memory, x)
    assert feedback.memory.count_nonzero() > 0
