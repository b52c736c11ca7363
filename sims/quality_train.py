"""One run of one method, from the synchronous start to the held-out loss: the explicit loop of `farflung bench quality`.

All peers are in this process. They share the outer parameters where all would have the same bits (everywhere but in
eager updates and meetings of two, where each peer's are its own), and the functions that move them are those that a node runs.

Evaluated are the outer parameters after the final flush: the mean over peers where they differ, the worker's own where
there are no rounds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from farflung.sims.batches import batch_of
from farflung.sims.check import machine
from farflung.sims.quality_exchange import Averager, Traffic, check_finite, late_mean
from farflung.sims.quality_meetings import Meetings, Trained
from farflung.sims.quality_methods import Inner, Method, Outer, Pairs
from farflung.sims.quality_resume import Keeper, State
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_worker import Worker
from farflung.training.data import Dataset
from farflung.training.errors import NonFinite
from farflung.training.fragments import Fragment, cut
from farflung.training.late import eager, mix_, rebase_
from farflung.training.order import SampleOrder
from farflung.training.rules import OuterRule, Sgd, advance_, empty_buffers
from farflung.training.schedule import Schedule
from farflung.training.sources import open_dataset
from farflung.training.streaming import Exchange
from farflung.training.tokenizer import ByteTokenizer

Progress = Callable[[int, float], None]
"""Told the step that is done and its loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run came to."""

    tune_loss: float | None
    """Nats per byte on the part that settings are chosen by; None when it diverged."""
    eval_loss: float | None
    """On the part that is reported."""
    bits_per_param_per_step: float
    """Sent and received by one peer after the synchronous start, per parameter and step."""
    peak_bits_per_step: float
    """The same in the busiest step, per parameter; an exchange has its delay to travel in, at least one step. The last
    step aside: nothing has to hide behind training any more."""
    cosine: float | None
    """Between two peers' pseudo-gradients, mean over the second half of the exchanges."""
    residual: float | None
    """Norm of what error feedback still holds at the end, in norms of the last pseudo-gradient."""
    machine: str
    """On which it ran, in words."""


def corpus(tier: Tier) -> Dataset:
    """The tier's data set."""
    return _corpus(tier.data, tier.model.seq_len)


@lru_cache(maxsize=1)
def _corpus(spec: str, seq_len: int) -> Dataset:
    return open_dataset(spec, ByteTokenizer(), seq_len)


def content_hash(tier: Tier) -> str:
    """Of its data set: the text of Python's library is another one with each of its versions."""
    return corpus(tier).content_hash


def train(
    method: Method,
    tier: Tier,
    *,
    lr: float,
    seed: int,
    progress: Progress = lambda step, loss: None,
    keeper: Keeper | None = None,  # goes on from what it has, and is offered the state after each step
) -> Outcome:
    """Run it. Raises DataError; ValueError, OSError for the keeper's file."""
    data = corpus(tier)
    order = SampleOrder(num_samples=data.num_samples, seed=seed)
    schedule = Schedule(peak=lr, warmup_steps=tier.rise_steps, total_steps=tier.steps)
    count = tier.peers if method.outer is not None else 1
    try:
        kept = None if keeper is None else keeper.load()
        if kept is None:
            warm = _warm_start(
                tier, "adamw" if method.inner == "gradient" else method.inner, tier.warm_lr(method, lr), seed
            )
            workers = [warm.copy(method.inner) for _ in range(count)]
        else:
            workers = [Worker(tier, method.inner, seed=seed) for _ in range(count)]
            for worker, own in zip(workers, kept["workers"], strict=True):
                worker.load(own)
        rounds = rounds_of(method, workers, last=tier.steps - tier.warm_steps)
        if rounds is not None and kept is not None:
            rounds.load(kept["rounds"])
        for step in range(tier.warm_steps if kept is None else kept["step"], tier.steps):
            batch = batch_of(data, order, step, tier.batch)
            shares = [batch] if method.whole_batch else batch.tensor_split(tier.peers)
            rate = schedule.at(step)
            losses = [
                worker.step(share, step=step, lr=rate) for worker, share in zip(workers, shares[:count], strict=True)
            ]
            if rounds is not None:
                rounds.after(step + 1 - tier.warm_steps, outer_lr=rate if method.inner == "gradient" else None)
            progress(step + 1, sum(losses) / count)
            if keeper is not None and step + 1 < tier.steps:
                keeper.offer(partial(_state, step + 1, workers, rounds))
    except NonFinite:
        return diverged(tier)
    params = workers[0].flat.cpu() if rounds is None else rounds.params()
    windows = torch.from_numpy(data.heldout(tier.heldout))
    half = len(windows) // 2
    tune_loss, eval_loss = (workers[0].evaluate(params, part) for part in (windows[:half], windows[half:]))
    return finished(method, tier, tune_loss, eval_loss, rounds)


def ring_bits(peers: int) -> float:
    """Bits per parameter that a bf16 ring all-reduce sends and receives at each peer: 2 (M - 1)/M * 16, twice."""
    return 2 * 2 * 16 * (peers - 1) / peers


class Rounds:
    """The outer side of a run: measures, averages, and moves outer and local parameters after each step."""

    def __init__(self, outer: Outer, workers: Sequence[Trained], *, last: int) -> None:
        self._outer, self._workers, self._last = outer, workers, last
        layout = workers[0].layout
        self._fragments = cut(layout.slots, outer.timetable.fragments, outer.pattern)
        self._averagers = [Averager(outer.wire, part, layout.slots, len(workers)) for part in self._fragments]
        states = len(workers) if outer.eager else 1
        self._params = [workers[0].flat.cpu().clone() for _ in range(states)]
        self._buffers = [empty_buffers(outer.rule, params) for params in self._params]
        self._in_flight: dict[Exchange, _Sent] = {}
        self._late = [_Late.none(part, len(workers)) for part in self._fragments]
        self.traffic = Traffic(layout.num_parameters, last)
        self._cosines: list[float] = []
        self._last_norm = [0.0] * len(self._fragments)

    def after(
        self,
        step: int,  # steps done since the rounds began, from 1
        *,
        outer_lr: float | None = None,  # in the place of the rule's own
    ) -> None:
        """Do what is due after this step."""
        rule: OuterRule = self._outer.rule if outer_lr is None else replace(self._outer.rule, lr=outer_lr)
        if step == self._last and (self._outer.kept or self._restarts):
            # what was kept back, or is a whole round late, arrives now, too late for momentum: the end is the peers' mean
            rule = Sgd(lr=1.0)
        actions = self._outer.timetable.after(step, self._last)
        for exchange in actions.sends:
            self._in_flight[exchange] = self._send(exchange.fragment, step)
        fresh: dict[Exchange, _Sent] = {}
        if self._restarts:
            fresh = {exchange: self._send(exchange.fragment, step) for exchange in actions.flush}
            for exchange in actions.sends:
                self._restart(exchange.fragment)
        for exchange in actions.applies:
            self._apply(exchange.fragment, self._in_flight.pop(exchange), rule, step)
        for exchange in actions.flush:
            self._apply(exchange.fragment, fresh.get(exchange) or self._send(exchange.fragment, step), rule, step)

    def state(self) -> State:
        """Everything that `after` changes, as it is kept and not copied; before the last step."""
        return {
            "params": self._params,
            "buffers": [list(buffers) for buffers in self._buffers],
            "in_flight": [
                (one.fragment, one.version, sent.references, sent.deltas, sent.mean)
                for one, sent in self._in_flight.items()
            ],
            "late": [(late.mean, late.deltas) for late in self._late],
            "step_bytes": self.traffic.step_bytes,
            "cosines": self._cosines,
            "last_norm": self._last_norm,
            "averagers": [averager.state() for averager in self._averagers],
        }

    def load(self, state: State) -> None:
        """Go on from what `state` gave."""
        self._params = state["params"]
        self._buffers = [tuple(buffers) for buffers in state["buffers"]]
        self._in_flight = {Exchange(p, version): _Sent(*sent) for p, version, *sent in state["in_flight"]}
        self._late = [_Late(*late) for late in state["late"]]
        self.traffic.step_bytes = state["step_bytes"]
        self._cosines, self._last_norm = state["cosines"], state["last_norm"]
        for averager, own in zip(self._averagers, state["averagers"], strict=True):
            averager.load(own)

    def params(self) -> Tensor:
        """The outer parameters, fp32 [n]; of peers that differ, their mean."""
        return torch.stack(self._params).mean(dim=0)

    @property
    def delay(self) -> int:
        """Steps that an exchange may take: in eager updates until the next one."""
        table = self._outer.timetable
        return table.interval if self._outer.eager else table.delay

    @property
    def _restarts(self) -> bool:
        """Whether every interval begins at the outer parameters, the first one too, though what was sent at its beginning is only applied at its end (CO2: x <- x_old).
        What peers have trained since is then not yet in anything that is in flight, and is measured before that is applied."""
        table = self._outer.timetable
        return table.delay == table.interval and self._outer.mixing == 0.0 and not self._outer.eager

    def _restart(self, p: int) -> None:
        part = self._fragments[p]
        for m, worker in enumerate(self._workers):
            part.put_(worker.flat, part.take(self._params[m % len(self._params)]).to(worker.device))

    def cosine(self) -> float | None:
        """See `Outcome.cosine`."""
        return late_mean(self._cosines)

    def residual(self) -> float | None:
        """See `Outcome.residual`."""
        held = sum(averager.residual_norm() ** 2 for averager in self._averagers) ** 0.5
        norm = sum(norm**2 for norm in self._last_norm) ** 0.5
        return held / norm if held and norm else None

    def _send(self, p: int, step: int) -> "_Sent":
        part = self._fragments[p]
        locals_ = [part.take(worker.flat).cpu() for worker in self._workers]
        outers = [part.take(self._params[m % len(self._params)]) for m in range(len(locals_))]
        deltas = [outer - local for outer, local in zip(outers, locals_, strict=True)]
        check_finite(deltas, step)
        averaged = self._averagers[p].mean(deltas, final=step == self._last)
        self.traffic.step_bytes[step - 1] += averaged.nbytes
        if len(deltas) > 1:
            self._cosines.append(float(torch.cosine_similarity(deltas[0], deltas[1], dim=0)))
        self._last_norm[p] = float(deltas[0].norm())
        if self._outer.kept:
            locals_ = [own + self._outer.kept * rest for own, rest in zip(locals_, averaged.residuals, strict=True)]
        return _Sent(locals_, deltas, averaged.mean)

    def _apply(self, p: int, sent: "_Sent", rule: OuterRule, step: int) -> None:
        part = self._fragments[p]
        for m, (params, buffers) in enumerate(zip(self._params, self._buffers, strict=True)):
            update = self._late[p].update(m, sent, last=step == self._last) if self._outer.eager else sent.mean
            advance_(rule, params, buffers[: rule.num_buffers], part, update)
        self._late[p] = _Late(sent.mean, sent.deltas)
        for m, worker in enumerate(self._workers):
            local = part.take(worker.flat)
            outer = part.take(self._params[m % len(self._params)]).to(worker.device)
            if self._outer.mixing is None:
                rebase_(local, outer, sent.references[m].to(worker.device))
            else:
                mix_(local, outer, self._outer.mixing)
            part.put_(worker.flat, local)


@dataclass(frozen=True, slots=True)
class _Sent:
    """An exchange in flight."""

    references: list[Tensor]
    """What local parameters would be without the progress that still has to be reported."""
    deltas: list[Tensor]
    mean: Tensor


@dataclass(frozen=True, slots=True)
class _Late:
    """The exchange before, for eager updates."""

    mean: Tensor
    deltas: list[Tensor]

    @classmethod
    def none(cls, fragment: Fragment, peers: int) -> "_Late":
        zeros = torch.zeros(fragment.numel)
        return cls(zeros, [zeros] * peers)

    def update(self, peer: int, sent: _Sent, *, last: bool) -> Tensor:
        """The eager update; after the last step nothing comes later, so the whole mean is waited for."""
        weight = 1 / len(sent.deltas)
        if last:
            return eager(self.mean, torch.zeros_like(self.mean), self.deltas[peer], weight).add(sent.mean)
        return eager(self.mean, sent.deltas[peer], self.deltas[peer], weight)


def rounds_of(method: Method, workers: Sequence[Trained], *, last: int) -> Rounds | Meetings | None:
    """What follows a method's inner steps, of which there are `last`; None where nothing does."""
    match method.outer:
        case Outer():
            return Rounds(method.outer, workers, last=last)
        case Pairs():
            return Meetings(method.outer, workers, last=last)
    return None


def finished(
    method: Method, tier: Tier, tune_loss: float, eval_loss: float, rounds: Rounds | Meetings | None
) -> Outcome:
    """Of a run whose last step is done: what it came to, unless that is no number."""
    if not (math.isfinite(tune_loss) and math.isfinite(eval_loss)):
        return diverged(tier)
    alone = ring_bits(tier.peers) if method.whole_batch else 0.0
    return Outcome(
        tune_loss=tune_loss,
        eval_loss=eval_loss,
        bits_per_param_per_step=alone if rounds is None else rounds.traffic.mean_bits(),
        peak_bits_per_step=alone if rounds is None else rounds.traffic.peak_bits(rounds.delay),
        cosine=None if rounds is None else rounds.cosine(),
        residual=None if rounds is None else rounds.residual(),
        machine=machine(tier.device),
    )


def diverged(tier: Tier) -> Outcome:
    """Of a run that had no end."""
    return Outcome(
        tune_loss=None,
        eval_loss=None,
        bits_per_param_per_step=0.0,
        peak_bits_per_step=0.0,
        cosine=None,
        residual=None,
        machine=machine(tier.device),
    )


@lru_cache(maxsize=1)
def _warm_start(tier: Tier, inner: Inner, lr: float, seed: int) -> Worker:
    """One worker after the synchronous start; the same for all methods with this inner optimiser."""
    data = corpus(tier)
    order = SampleOrder(num_samples=data.num_samples, seed=seed)
    schedule = Schedule(peak=lr, warmup_steps=tier.rise_steps, total_steps=tier.steps)
    worker = Worker(tier, inner, seed=seed)
    for step in range(tier.warm_steps):
        worker.step(batch_of(data, order, step, tier.batch), step=step, lr=schedule.at(step))
    return worker


def _state(step: int, workers: Sequence[Worker], rounds: Rounds | Meetings | None) -> State:
    """Of a run that has done so many steps."""
    return {
        "step": step,
        "workers": [worker.state() for worker in workers],
        "rounds": None if rounds is None else rounds.state(),
    }
