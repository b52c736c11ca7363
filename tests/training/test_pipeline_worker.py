"""What one peer of a pipeline computes, in which order its operations come, and the bytes of its boundaries."""

import pytest
import torch

from farflung.compression.codec import CodecError
from farflung.training.errors import Overflow
from farflung.training.model import Decoder, ModelConfig
from farflung.training.pipeline_boundary import Boundary, decode_targets, encode_targets
from farflung.training.pipeline_machine import Worklist
from farflung.training.pipeline_plan import BadPlan, Kind, Op, Policy
from farflung.training.pipeline_worker import HEAD, Accumulated, Worker, mean_gradients, together

CONFIG = ModelConfig(vocab_size=32, dim=16, num_layers=3, num_heads=2, num_kv_heads=2, ffn_dim=24, seq_len=8)


def worker(*held: int, head: bool = False) -> Worker:
    return Worker(Decoder(CONFIG, seed=3), (1, 1, 1), held, head=head)


def test_a_worker_holds_its_stages_only() -> None:
    one = worker(1)
    assert one.stages == [1] and not one.has_head
    with pytest.raises(KeyError):
        one.forward(0, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(BadPlan):
        Worker(Decoder(CONFIG, seed=3), (1, 1), (0,), head=False)


def test_a_tied_table_has_two_sums_and_one_mean() -> None:
    home = worker(0, head=True)
    tokens = torch.arange(8).view(1, 8)
    once, sums = Accumulated(), Accumulated()
    for into, times in ((once, 1), (sums, 2)):
        for _ in range(times):
            x = home.forward(0, tokens)
            _, gradient = home.loss(x, tokens, into)
            assert home.backward(0, tokens, gradient, into) is None
    assert sums.visits == {0: 2, HEAD: 2}
    table = "model.embed_tokens.weight"
    assert {part for part, name in sums.sums if name == table} == {0, HEAD}
    means, wanted = mean_gradients([sums]), mean_gradients([once])
    for name, mean in means.items():
        torch.testing.assert_close(mean, wanted[name])
    # a peer whose visits of one stage are lost leaves the other sums as they are
    assert set(mean_gradients([once, Accumulated()])) == set(wanted)
    # what was summed up apart is the same together, and stays as it was
    both = together([once, sums])
    assert both.visits == {0: 3, HEAD: 3} and once.visits == {0: 1, HEAD: 1} and sums.visits == {0: 2, HEAD: 2}
    for key, total in both.sums.items():
        torch.testing.assert_close(total, 3.0 * once.sums[key])
        torch.testing.assert_close(sums.sums[key], 2.0 * once.sums[key])


def test_an_overflow_adds_nothing() -> None:
    one, into = worker(1), Accumulated()
    x = torch.full((1, 4, 16), 1.0)
    with pytest.raises(Overflow, match="stage 1"):
        one.backward(1, x, torch.full((1, 4, 16), torch.inf), into)
    assert not into.sums and not into.visits


def test_a_gradient_whose_norm_is_infinite_is_an_overflow_though_each_element_is_finite() -> None:
    """A step would come to no number, and so would that of every stage that it is handed on to."""
    home, into = worker(0, 1, head=True), Accumulated()
    tokens = torch.arange(8).view(1, 8)
    x = home.forward(0, tokens)
    huge = torch.full_like(x, 1e22)
    found = torch.autograd.grad(home.run(1, x), [p for p in home._parts[1].parameters()], huge)
    assert all(bool(one.isfinite().all()) for one in found)
    for stage, its in ((1, x), (0, tokens)):
        with pytest.raises(Overflow, match=f"stage {stage}"):
            home.backward(stage, its, huge, into)
    assert not into.sums and not into.visits
    home.backward(1, x, torch.full_like(x, 1e12), into)
    assert into.visits == {1: 1}, "whose norm is a number, and may be clipped"


def test_slots_belong_to_visits() -> None:
    worklist = Worklist(Policy.BACKWARD, slots=1)
    first, second = Op(Kind.F, 0, 1), Op(Kind.F, 1, 1)
    worklist.arrive(first, 0.0, 0)
    worklist.arrive(second, 1.0, 1)
    assert worklist.start() == first and worklist.start() is None
    worklist.arrive(first, 2.0, 0)  # once more: it has a slot
    assert worklist.start() == first and worklist.start() is None
    worklist.arrive(Op(Kind.B, 0, 1), 3.0, 0)
    assert worklist.start() == Op(Kind.B, 0, 1)
    worklist.finish(Op(Kind.B, 0, 1))
    assert worklist.start() == second
    worklist.forget(1)
    worklist.arrive(Op(Kind.F, 2, 1), 4.0, 0)
    assert worklist.start() == Op(Kind.F, 2, 1)


def test_what_a_lost_peer_had_waits_for_none_of_our_slots() -> None:
    worklist = Worklist(Policy.BACKWARD, 1, guest=lambda microbatch, hop: microbatch >= 2)
    for microbatch in range(4):
        worklist.arrive(Op(Kind.F, microbatch, 1), float(microbatch), microbatch)
    assert [worklist.start(), worklist.start(), worklist.start()] == [Op(Kind.F, 0, 1), Op(Kind.F, 2, 1), None]
    for guest, then in ((2, 3), (0, 1)):  # each brings one of its own
        worklist.arrive(Op(Kind.B, guest, 1), 4.0, guest)
        assert worklist.start() == Op(Kind.B, guest, 1)
        worklist.finish(Op(Kind.B, guest, 1))
        assert worklist.start() == Op(Kind.F, then, 1) and worklist.start() is None


def test_a_program_takes_what_it_does_not_list_and_leaves_out_what_is_over() -> None:
    program = [Op(Kind.F, 0, 1), Op(Kind.F, 1, 1), Op(Kind.B, 1, 1)]
    worklist = Worklist(Policy.PROGRAM, 4, program)
    worklist.arrive(program[1], 0.0, 1)
    assert worklist.start() is None  # the program has another one first
    taken_over = Op(Kind.B, 7, 1)
    worklist.arrive(taken_over, 1.0, 2)
    assert worklist.start() == taken_over
    worklist.forget(0)
    assert worklist.start() == program[1]
    worklist.arrive(program[1], 2.0, 1)  # once more
    assert worklist.start() == program[1]


@pytest.mark.parametrize("spec", ["fp32", "tokenint8(width=16)", "rotint4(width=16,block=16)"])
def test_boundaries_come_back(spec: str) -> None:
    boundary = Boundary.parse(spec, 16)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    payload = boundary.encode(x)
    assert len(payload) <= boundary.max_nbytes(8)
    back = boundary.decode(payload, 2, 4, device=torch.device("cpu"))
    torch.testing.assert_close(back, x, rtol=0.0, atol=0.0 if spec == "fp32" else 0.5)
    with pytest.raises(CodecError):
        boundary.decode(payload, 2, 5, device=torch.device("cpu"))
    with pytest.raises(CodecError):
        boundary.encode(x / 0.0)


def test_boundaries_are_for_the_models_width() -> None:
    with pytest.raises(ValueError, match="width=16"):
        Boundary.parse("tokenint8(width=32)", 16)
    with pytest.raises(ValueError, match="unknown codec"):
        Boundary.parse("int8", 16)


def test_targets_come_back_if_they_exist() -> None:
    targets = torch.arange(8).view(2, 4)
    assert torch.equal(decode_targets(encode_targets(targets), 2, 4, 8), targets)
    with pytest.raises(CodecError, match="vocabulary of 7"):
        decode_targets(encode_targets(targets), 2, 4, 7)
