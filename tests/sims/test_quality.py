"""`farflung bench quality`: its loop against the outer path that swarms have, and its byte counts."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.sims.quality_toy import ADAMW, LR, TOY, toy_corpus

from farflung.compression.registry import codec_of, parse_codec
from farflung.sims import quality_train
from farflung.sims.batches import batch_of
from farflung.sims.quality_exchange import Averager
from farflung.sims.quality_methods import METHODS, Method, Outer, Pairs, Wire, by_names, with_interval
from farflung.sims.quality_train import rounds_of, train
from farflung.sims.quality_worker import Worker
from farflung.training.errors import NonFinite
from farflung.training.flat import Slot
from farflung.training.fragments import cut
from farflung.training.gossip import Gossip, pairs
from farflung.training.inner import InnerConfig
from farflung.training.optimizers import TABLES
from farflung.training.order import SampleOrder
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov, Sgd
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.streaming import Timetable


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from toy_corpus(monkeypatch)


def outer_params(method: Method, **changes: int) -> torch.Tensor:
    """What the bench's loop comes to."""
    found: list[torch.Tensor] = []
    tier = replace(TOY, **changes)  # type: ignore[arg-type]
    evaluate = Worker.evaluate

    def keep(self: Worker, params: torch.Tensor, windows: torch.Tensor) -> float:
        found.append(params.clone())
        return evaluate(self, params, windows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "evaluate", keep)
        train(method, tier, lr=LR, seed=0)
    return found[0]


def rounds(interval: int, *, lr: float = 0.7, momentum: float = 0.9, **settings: object) -> Method:
    table = Timetable(interval=interval)
    outer = Outer(timetable=table, rule=Nesterov(lr=lr, momentum=momentum), **settings)  # type: ignore[arg-type]
    return Method(name="rounds", inner="adamw", outer=outer)


class Walker:
    """A worker every step of which moves each of its parameters by a thousandth."""

    def __init__(self) -> None:
        slot = Slot(name="layer.weight", shape=torch.Size((4, 4)), start=0)
        self.layout = SimpleNamespace(slots=[slot], num_parameters=16)
        self.flat, self.device = torch.zeros(16), torch.device("cpu")


def walked(method: Method, steps: int) -> torch.Tensor:
    """What two of them come to."""
    walkers = [Walker(), Walker()]
    ran = rounds_of(method, walkers, last=steps)  # type: ignore[arg-type]
    assert ran is not None
    for step in range(1, steps + 1):
        for walker in walkers:
            walker.flat -= 1e-3
        ran.after(step)
    return ran.params()


@pytest.mark.parametrize("interval", [30, 100])
@pytest.mark.parametrize("name", ["averaging", "co2", "eager"])
def test_all_progress_arrives_once(name: str, interval: int) -> None:
    """In 540 steps, of which 100 are no divisor; with averaging in the place of rules that have momentum."""
    (method,) = by_names(name)
    method = with_interval(replace(method, outer=replace(method.outer, rule=Sgd(lr=1.0), wire=Wire())), interval)
    assert walked(method, 540) == pytest.approx(-0.54, abs=1e-4)


def test_a_whole_round_late_ends_with_the_mean_and_no_momentum_of_it() -> None:
    (method,) = by_names("co2")
    assert walked(method, 60) == pytest.approx(-0.06, abs=1e-6), (
        "two intervals, of which none is applied before the end"
    )


def test_a_run_whose_exchange_is_no_number_has_diverged() -> None:
    (method,) = by_names("diloco")
    walkers = [Walker(), Walker()]
    ran = rounds_of(method, walkers, last=60)  # type: ignore[arg-type]
    assert ran is not None
    walkers[1].flat[3] = float("inf")
    with pytest.raises(NonFinite):
        ran.after(30)


def test_one_fragment_without_delay_is_plain_diloco_to_the_bit() -> None:
    """The reference is `Replica`, the path of live swarms: H = 4, three rounds after the start."""
    schedule = Schedule(peak=LR, warmup_steps=TOY.rise_steps, total_steps=TOY.steps)
    data, order = quality_train.corpus(TOY), SampleOrder(num_samples=249, seed=0)
    assert data.num_samples == 249
    replicas = [
        Replica(
            TOY.model, InnerConfig(schedule=schedule), Nesterov(lr=0.7, momentum=0.9), seed=0,
            runtime=Runtime(microbatch=4),
        )
        for _ in range(2)
    ]  # fmt: skip
    for step in range(TOY.warm_steps):
        for replica in replicas:
            replica.train_step(batch_of(data, order, step, TOY.batch), step)
    for replica in replicas:
        replica.pseudo_gradient()
        assert replica.sent is not None
        replica.outer.params.copy_(replica.sent.values)
        replica.discard_progress()
    for step in range(TOY.warm_steps, TOY.steps):
        for replica, share in zip(replicas, batch_of(data, order, step, TOY.batch).tensor_split(2), strict=True):
            replica.train_step(share, step)
        if (step + 1 - TOY.warm_steps) % 4 == 0:
            deltas = [replica.pseudo_gradient() for replica in replicas]
            mean = torch.zeros_like(deltas[0])
            for delta in deltas:
                mean = mean + delta * 0.5
            for replica in replicas:
                replica.apply([(0, replica.num_parameters, mean)], contributed=True)
    assert torch.equal(outer_params(rounds(4)), replicas[0].outer.params)


def test_one_peer_one_step_averaging_is_the_plain_loop() -> None:
    """To the last bits: theta - (theta - local) is local only up to a rounding."""
    plain = Method(name="plain", inner="adamw", whole_batch=True)
    alone = replace(rounds(1), whole_batch=True)
    assert isinstance(alone.outer, Outer)
    alone = replace(alone, outer=replace(alone.outer, rule=Sgd(lr=1.0)))
    torch.testing.assert_close(outer_params(alone, peers=1), outer_params(plain, peers=1), rtol=2e-5, atol=2e-7)


def test_rebasing_without_delay_is_taking_the_outer_parameters() -> None:
    assert torch.equal(outer_params(rounds(4, mixing=None)), outer_params(rounds(4)))


def test_keeping_all_of_the_local_parameters_leaves_peers_alone_until_the_end() -> None:
    def kept(alpha: float) -> torch.Tensor:
        method = rounds(6, lr=1.0, momentum=0.0, mixing=alpha)
        return outer_params(method)

    assert not torch.equal(kept(1.0), kept(0.0))


def last_locals(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """(outer parameters at the end, mean of both peers' local parameters after the last step)."""
    seen: list[torch.Tensor] = []
    step = Worker.step

    def remember(self: Worker, tokens: torch.Tensor, **settings: Any) -> float:
        loss = step(self, tokens, **settings)
        seen.append(self.flat.clone())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "step", remember)
        params = outer_params(method)
    return params, (seen[-1] + seen[-2]) / 2


def test_the_final_flush_leaves_no_progress_behind() -> None:
    """Twelve steps in rounds of five: with outer averaging the end is the mean of the peers."""
    method = rounds(5, lr=1.0, momentum=0.0, mixing=None)
    params, mean = last_locals(method)
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-6)
    assert isinstance(method.outer, Outer)
    table = Timetable(interval=5, fragments=2, delay=2)
    params, mean = last_locals(replace(method, outer=replace(method.outer, timetable=table)))
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-6)


def test_eager_updates_of_one_peer_are_not_late() -> None:
    method = rounds(4)
    assert isinstance(method.outer, Outer)
    eager = replace(method, outer=replace(method.outer, eager=True))
    torch.testing.assert_close(outer_params(eager, peers=1), outer_params(method, peers=1), rtol=1e-4, atol=1e-6)


def test_meetings_of_two_are_the_published_formula() -> None:
    """Four peers, rounds of five steps of twelve, against the digest's 2.6 written out, with theta - phi and not phi - theta."""
    method = Method(name="pairs", inner="adamw", outer=Pairs(timetable=Timetable(interval=5), rule=Gossip()))
    tier = replace(TOY, peers=4)
    warm = Worker(TOY, "adamw", seed=0)
    schedule = Schedule(peak=LR, warmup_steps=TOY.rise_steps, total_steps=TOY.steps)
    data, order = quality_train.corpus(TOY), SampleOrder(num_samples=249, seed=0)
    for step in range(TOY.warm_steps):
        warm.step(batch_of(data, order, step, TOY.batch), step=step, lr=schedule.at(step))
    workers = [warm.copy("adamw") for _ in range(4)]
    phi = [warm.flat.clone() for _ in workers]
    momenta = [torch.zeros_like(warm.flat) for _ in workers]
    met = 0
    for step in range(TOY.warm_steps, TOY.steps):
        shares = batch_of(data, order, step, TOY.batch).tensor_split(4)
        for worker, share in zip(workers, shares, strict=True):
            worker.step(share, step=step, lr=schedule.at(step))
        done = step + 1 - TOY.warm_steps
        if done % 5 == 0 or done == TOY.steps - TOY.warm_steps:
            for group in pairs([bytes((0, 0, 0, m)) for m in range(4)], met.to_bytes(8, "big")):
                a, b = (member[-1] for member in group)
                progress = (workers[a].flat - phi[a] + workers[b].flat - phi[b]) / 2
                middle = (phi[a] + phi[b]) / 2
                for m in (a, b):
                    momenta[m] = 0.5 * momenta[m] + 0.7 * progress + 0.7 * (middle - phi[m])
                    phi[m] = phi[m] + momenta[m]
                    workers[m].flat.copy_(phi[m])
            met += 1
    assert met == 3 and not torch.equal(phi[0], phi[1])
    found = outer_params(method, peers=4)
    torch.testing.assert_close(found, torch.stack(phi).mean(dim=0), rtol=1e-4, atol=1e-6)
    bits = 8 * 4 * (3 * 2 * 2 + 2 * 2 * 3 / 4) / 12  # of three meetings and the mean at the end, in twelve steps
    assert train(method, tier, lr=LR, seed=0).bits_per_param_per_step == pytest.approx(bits)
    with pytest.raises(ValueError, match="whole model"):
        Pairs(timetable=Timetable(interval=5, fragments=2), rule=Gossip())


def test_an_eager_exchange_may_take_until_the_next() -> None:
    method = rounds(4)
    assert isinstance(method.outer, Outer)
    late = train(replace(method, outer=replace(method.outer, eager=True)), TOY, lr=LR, seed=0)
    at_once = train(method, TOY, lr=LR, seed=0)
    assert late.peak_bits_per_step == pytest.approx(at_once.peak_bits_per_step / 4)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_of_the_table_learns_and_is_the_same_twice(method: Method) -> None:
    outcome = train(method, TOY, lr=TOY.lrs(method)[-1], seed=0)
    again = train(method, TOY, lr=TOY.lrs(method)[-1], seed=0)
    assert outcome == again
    assert outcome.eval_loss is not None and outcome.eval_loss < 3.6 and outcome.tune_loss != outcome.eval_loss
    assert (outcome.bits_per_param_per_step > 0) == (method.outer is not None or method.whole_batch)


def test_a_run_that_diverges_is_an_outcome() -> None:
    outcome = train(replace(ADAMW, inner="muon"), TOY, lr=1e30, seed=0)
    assert outcome.eval_loss is None and outcome.tune_loss is None


# ---- bytes -------------------------------------------------------------------------------------------------------


def averager(wire: Wire, peers: int) -> tuple[Averager, int]:
    slots = Worker(TOY, "adamw", seed=0).layout.slots
    fragment = cut(slots, 1)[0]
    return Averager(wire, fragment, slots, peers), fragment.numel


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("topology", ["gather", "butterfly"])
def test_exact_codecs_give_the_mean_and_the_traffic_of_the_formulas(peers: int, topology: str) -> None:
    exchange, numel = averager(Wire(topology=topology), peers)  # type: ignore[arg-type]
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(m)) for m in range(peers)]
    averaged = exchange.mean(deltas)
    torch.testing.assert_close(averaged.mean, torch.stack(deltas).mean(dim=0))
    assert not any(residual.any() for residual in averaged.residuals)
    header = 32
    whole = 4 * numel + header
    entries = 2 * (header + 2 * 16) if peers == 2 else 0  # around the contributions of an unreduced mean
    both_ways = 4 * (peers - 1) * (4 * numel / peers + header) + entries
    assert averaged.nbytes == pytest.approx(2 * (peers - 1) * whole if topology == "gather" else both_ways)


@pytest.mark.parametrize("fragments", [1, 3])
def test_merged_radially_tensors_keep_their_lengths_and_tables_have_the_mean(fragments: int) -> None:
    """Cuts go through tensors: what is in a fragment of one is merged by itself."""
    slots = Worker(TOY, "adamw", seed=0).layout.slots
    numel = slots[-1].stop
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(m)) for m in range(3)]
    merged, plain = torch.empty(numel), torch.stack(deltas).mean(dim=0)
    fragments_of = cut(slots, fragments)
    for part in fragments_of:
        found = Averager(Wire(topology="radial"), part, slots, 3).mean([part.take(delta) for delta in deltas])
        assert not any(residual.any() for residual in found.residuals)
        part.put_(merged, found.mean)
    tables = 0
    for slot in slots:
        mine, mean = merged[slot.start : slot.stop], plain[slot.start : slot.stop]
        if slot.name.startswith(TABLES):
            torch.testing.assert_close(mine, mean)
            tables += 1
        elif any(low <= slot.start and slot.stop <= high for part in fragments_of for low, high in part.slices):
            length = sum(float(delta[slot.start : slot.stop].norm()) for delta in deltas) / 3
            assert float(mine.norm()) == pytest.approx(length, rel=1e-4)
            assert float(mine.norm()) > 1.3 * float(mean.norm())
            assert float(torch.cosine_similarity(mine, mean, dim=0)) > 0.9
    assert tables > 0


@pytest.mark.parametrize("wire", [
    Wire(topology="gather", up="sign(block=128)", feedback=1.0),
    Wire(topology="butterfly", up="sign(block=128)", down="sign(block=128)", feedback=1.0, down_feedback=1.0),
])  # fmt: skip
def test_error_feedback_delivers_everything_in_the_end(wire: Wire) -> None:
    exchange, numel = averager(wire, 3)  # of two peers' means nothing is left out
    deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(m)) for m in range(3)]
    wanted = torch.stack(deltas).mean(dim=0)
    total = torch.zeros(numel)
    misses = []
    for round_ in range(1, 41):
        total += exchange.mean(deltas).mean
        misses.append(float((total / round_ - wanted).norm() / wanted.norm()))
    assert misses[-1] < misses[0] / 4


@pytest.mark.parametrize("topology", ["gather", "butterfly"])
@pytest.mark.parametrize("feedback", [None, 0.5])
def test_residuals_are_what_was_not_sent(topology: str, feedback: float | None) -> None:
    exchange, numel = averager(Wire(topology=topology, up="sign(block=128)", feedback=feedback), 2)  # type: ignore[arg-type]
    held = [torch.zeros(numel), torch.zeros(numel)]
    for round_ in range(3):
        deltas = [torch.randn(numel, generator=torch.Generator().manual_seed(2 * round_ + m)) for m in range(2)]
        averaged = exchange.mean(deltas)
        given = [delta + (feedback or 0.0) * rest for delta, rest in zip(deltas, held, strict=True)]
        held = averaged.residuals
        counted = [whole - rest for whole, rest in zip(given, held, strict=True)]
        torch.testing.assert_close(averaged.mean, (counted[0] + counted[1]) / 2, rtol=1e-4, atol=1e-5)


def test_what_is_kept_is_sent_later_without_any_memory() -> None:
    """With an exact last exchange all progress arrives, whatever the codec before it left out."""
    wire = Wire(topology="gather", up="sign(block=128)", last="fp32")
    params, mean = last_locals(rounds(4, lr=0.7, momentum=0.5, mixing=None, kept=1.0, wire=wire))
    torch.testing.assert_close(params, mean, rtol=1e-4, atol=1e-5)


def test_the_codec_of_the_last_exchange_is_for_that_alone() -> None:
    one = train(rounds(4, wire=Wire(topology="gather", up="int4(block=128)")), TOY, lr=LR, seed=0)
    other = train(rounds(4, wire=Wire(topology="gather", up="int4(block=128)", last="fp32")), TOY, lr=LR, seed=0)
    assert one.peak_bits_per_step == other.peak_bits_per_step == pytest.approx(2 * 4.125, rel=0.01)
    assert one.bits_per_param_per_step == pytest.approx(3 * 2 * 4.125 / 12, rel=0.01)
    assert other.bits_per_param_per_step == pytest.approx((2 * 2 * 4.125 + 2 * 32) / 12, rel=0.01)


def test_payloads_are_those_of_the_registry() -> None:
    exchange, numel = averager(Wire(topology="gather", up="int4(block=64)"), 2)
    payload = exchange._encode(0, torch.randn(numel), 0, numel)
    assert codec_of(payload) == parse_codec("int4(block=64)")


def test_bytes_per_step_are_those_of_all_exchanges() -> None:
    outcome = train(rounds(4), TOY, lr=LR, seed=0)
    numel = Worker(TOY, "adamw", seed=0).layout.num_parameters
    per_round = (
        2 * (4 * numel / 2 + 32) + 64
    ) * 2  # two parts up, two means down, unreduced, sent and received, over two peers
    assert outcome.bits_per_param_per_step == pytest.approx(8 * 3 * per_round / numel / 12)
    assert outcome.peak_bits_per_step == pytest.approx(8 * per_round / numel)
