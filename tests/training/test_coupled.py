"""What a round does not move is not copied for it, and whatever is copied the bits are the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.training import coupled as module
from farflung.training.coupled import Coupled, Offered
from farflung.training.errors import DamagedCheckpoint, NothingOffered
from farflung.training.rules import Nesterov

N = 60
FRAGMENTS = ((0, 25), (25, 41), (41, N))
EVERYTHING = (0, N)
RULE = Nesterov(lr=0.4, momentum=0.9)


class Matrices(torch.nn.Module):
    """Fragments begin and end within parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("first", (4, 5)), ("second", (10,)), ("third", (5, 6))):
            values = torch.linspace(-1.0, 1.0, shape[0] * (shape[1] if len(shape) > 1 else 1))
            self.register_parameter(name, torch.nn.Parameter(values.view(shape)))


def peer(mix: float | None = None) -> Coupled:
    return Coupled(Matrices(), RULE, device=torch.device("cpu"), mix=mix)


def random(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).mul_(0.01)


def train(one: Coupled, seed: int) -> None:
    move = random(seed)
    for low, high, local in one.layout.pieces(one.parameters):
        local.sub_(move[low:high])


def local(one: Coupled) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in one.parameters])


def wholly(one: Coupled, start: int, stop: int) -> None:
    one.offer()


def in_part(one: Coupled, start: int, stop: int) -> None:
    one.offer(start, stop)


def test_what_a_round_moves_is_copied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_buffer", lambda n, device: torch.full((n,), 7.0))
    one = peer()
    train(one, 1)
    for start, stop in (*FRAGMENTS, EVERYTHING, FRAGMENTS[1]):
        one.offer(start, stop)
        assert one.offered is not None and (one.offered.start, one.offered.stop) == (start, stop)
        assert torch.equal(one.offered.values, local(one)[start:stop])
        if (start, stop) == FRAGMENTS[0]:
            untouched = one.offered.buffer[stop - start :]
            assert len(untouched) == N - stop + start and untouched.eq(7.0).all()


def test_a_buffer_is_used_again() -> None:
    """Page-locked memory takes long to get: two are enough, of which one is in flight while the other is written."""
    one = peer()
    buffers = set()
    for round_ in range(9):
        start, stop = FRAGMENTS[round_ % 3]
        train(one, round_)
        one.offer(start, stop)
        delta = one.offered_gradient(start, stop)
        one.offer(start, stop)  # the round was given up, and is committed after all
        for offered in (one.sent, one.offered):
            assert offered is not None
            buffers.add(offered.buffer.data_ptr())
        one.apply([(start, stop, delta)], contributed=True)
    assert len(buffers) == 2


@pytest.mark.parametrize("mix", [None, 0.0, 0.5])
def test_the_same_bits_as_with_a_copy_of_everything(mix: float | None) -> None:
    """Rounds that count us and rounds that do not, offers that are taken back and made anew, what a codec left out, and the last round."""
    seen = []
    offers: tuple[Callable[[Coupled, int, int], None], ...] = (wholly, in_part)
    for offer in offers:
        one, bits = peer(mix), []
        for round_ in range(48):
            start, stop = EVERYTHING if round_ == 47 else FRAGMENTS[round_ % 3]
            train(one, round_)
            offer(one, start, stop)
            kind = round_ // 3 % 8
            delta = one.offered_gradient(start, stop) if kind != 1 else random(round_, stop - start)
            bits.append(delta)
            train(one, 100 + round_)
            if kind in (2, 3):  # in flight behind what is offered
                offer(one, start, stop)
                train(one, 200 + round_)
            told = {start: delta * 0.5} if kind in (3, 4) and mix is None else None
            middle = (start + stop) // 2
            updates = [(start, middle, delta[: middle - start]), (middle, stop, delta[middle - start :])]
            if kind == 5:
                updates = updates[1:]  # a part was left out for everybody alike
            if told is not None:
                updates = [(start, stop, delta)]
            one.apply(updates, contributed=kind not in (1, 6, 7), told=told)
            bits += [local(one), one.outer.params.clone(), one.outer.momentum.clone()]
            if one.offered is not None:
                bits.append(one.offered_gradient(start, stop))
            if kind == 7:
                previous = one.outer.params.clone()
                one.outer.params[start:stop] += random(300 + round_, stop - start)
                offer(one, start, stop)
                one.offered_gradient(start, stop)
                one.adopt_outer(previous, counted=[(start, middle)])
                bits.append(local(one))
        seen.append(bits)
    assert len(seen[0]) == len(seen[1]) and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_what_is_offered_moves_with_the_part_of_a_round_that_meets_it() -> None:
    one = peer()
    train(one, 1)
    one.offer(20, 30)
    one.offered_gradient(20, 30)
    one.offer(20, 30)  # nothing is trained meanwhile, so both stay what the parameters are
    one.apply([(10, 25, random(2, 15))], contributed=False)
    one.apply([(40, 50, random(3, 10))], contributed=False)
    assert one.offered is not None and torch.equal(one.offered.values, local(one)[20:30])
    assert one.sent is not None and one.sent is not one.offered and torch.equal(one.sent.values, one.offered.values)


def test_what_a_codec_left_out_stays_where_the_round_came_with_a_downloaded_state() -> None:
    one = peer()
    train(one, 1)
    one.offer()
    delta = one.offered_gradient(*EVERYTHING)
    train(one, 2)
    since, previous = random(2), one.outer.params.clone()
    one.outer.params.add_(random(3))
    told = {0: delta[:25] * 0.25}
    one.adopt_outer(previous, counted=FRAGMENTS[:2], told=told)
    owed = delta.clone()
    owed[:25] -= told[0]
    owed[25:41] = 0.0  # of these it is not known what was left out: all of it counts
    torch.testing.assert_close(one.outer.params - local(one), owed + since, rtol=0, atol=1e-6)


def test_what_was_not_offered_is_not_in_flight() -> None:
    one = peer()
    train(one, 1)
    one.offer(*FRAGMENTS[1])
    for start, stop in (FRAGMENTS[0], (24, 41), (25, 42), EVERYTHING):
        with pytest.raises(NothingOffered, match=rf"\[{start}, {stop}\) are asked for, and \[25, 41\) were offered"):
            one.offered_gradient(start, stop)
    assert one.sent is None
    one.offered_gradient(*FRAGMENTS[1])
    before, outer = local(one), one.outer.digest()
    for start, stop in (FRAGMENTS[0], (24, 41), (25, 42)):
        with pytest.raises(ValueError, match=r"\[25, 41\) is in flight"):
            one.apply([(start, stop, torch.zeros(stop - start))], contributed=True)
        with pytest.raises(ValueError, match=r"\[25, 41\) is in flight"):
            one.adopt_outer(one.outer.params.clone(), counted=[(start, stop)])
    assert torch.equal(local(one), before) and one.outer.digest() == outer
    assert one.sent is not None and one.sent is one.offered
    one.apply([(30, 40, torch.zeros(10))], contributed=True)
    assert one.sent is None and one.offered is None


def test_what_is_in_flight_is_the_same_from_disk(make_replica: Any, batch: Any, tmp_path: Path) -> None:
    replica, restored = make_replica(), make_replica()
    n = replica.num_parameters
    start, stop = n // 3, 2 * n // 3
    replica.train_step(batch(0), 0)
    replica.offer(start, stop)
    delta = replica.offered_gradient(start, stop)
    replica.train_step(batch(1), 1)
    replica.save(tmp_path)
    restored.load(tmp_path)
    assert restored.sent is not None and len(restored.sent.values) == stop - start
    for each in (replica, restored):
        each.apply([(start, stop, delta)], contributed=True)
        each.train_step(batch(2), 2)
        each.offer()  # what came from the disk has no room for that
    assert replica.outer.digest() == restored.outer.digest()
    assert torch.equal(replica.offered.values, restored.offered.values) and len(replica.offered.values) == n


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_in_flight_that_says_not_where_it_lies_is_damage(
    whole: bool, make_replica: Any, batch: Any, tmp_path: Path
) -> None:
    replica, restored = make_replica(), make_replica()
    start, stop = (0, replica.num_parameters) if whole else (10, 20)
    replica.offer(start, stop)
    replica.offered_gradient(start, stop)
    replica.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["facts"].pop("sent_from") == start
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match="in flight"):
        restored.load(tmp_path)
    replica.discard_progress()
    replica.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    state["facts"]["sent_from"] = 10  # and nothing that lies there
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match="in flight"):
        restored.load(tmp_path)
    assert restored.sent is None


@pytest.mark.parametrize("sent_from", [-1, 1, "0", 0.5])
def test_what_cannot_be_in_flight_is_damage(
    sent_from: float | str, make_replica: Any, batch: Any, tmp_path: Path
) -> None:
    replica = make_replica()
    replica.pseudo_gradient()
    replica.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    state["facts"]["sent_from"] = sent_from
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match=r"does not h"):
        replica.load(tmp_path)


def test_nothing_is_offered_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are taken in another thread, which would take half of this offer and half of the last one; nor does anything stand where it was not written."""
    one = peer()
    one.offer(0, 9)  # not sent, so its buffer is used again
    seen = []

    def write(*arguments: Any) -> None:
        seen.append(one.offered)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "flatten", write)
    with pytest.raises(RuntimeError):
        one.offer(9, 20)
    assert seen == [None] and one.offered is None


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (6, 5), (0, N + 1), (N, N + 1)])
def test_only_elements_that_there_are_can_be_offered(start: int, stop: int) -> None:
    one = peer()
    one.offer(3, 7)
    before = one.offered
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) of a model that has {N}"):
        one.offer(start, stop)
    assert one.offered is before


def test_a_copy_of_what_was_offered_has_memory_of_its_own() -> None:
    offered = Offered(3, 5, torch.arange(9.0))
    other = offered.clone()
    other.values.zero_()
    assert offered.values.tolist() == [0.0, 1.0] and offered.of(4, 5).tolist() == [1.0] and len(other.buffer) == 2
    assert offered.meeting(0, 4) == (3, 4) and offered.meeting(5, 9) is None and offered.meeting(0, 3) is None
