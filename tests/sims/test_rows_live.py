"""Rows of `farflung bench quality` against what nodes train with (`training.coupled`), given the same inner steps: the same contributions, and means of parts that
their owners code once more."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.compression.aggregate import accumulate
from farflung.compression.policy import FlatCodec, parse_policy
from farflung.sims.quality_methods import METHODS, Outer, Wire
from farflung.sims.quality_train import Rounds
from farflung.training.coupled import Coupled
from farflung.training.flat import Layout, flatten
from farflung.training.fragments import ALIGN, cut
from farflung.training.rules import Nesterov, OuterRule, Sgd
from farflung.training.streaming import Timetable

PEERS = 3
TABLE = Timetable(interval=6, fragments=3, delay=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(16, 64, generator=generator)) for _ in range(3))


class RowWorker:
    """What `Rounds` moves."""

    def __init__(self) -> None:
        model = Model()
        self.layout = Layout(model)
        self.device = torch.device("cpu")
        self.flat = torch.empty(self.layout.num_parameters)
        flatten(self.layout, [parameter.detach() for parameter in model.parameters()], self.flat)


class LiveRounds:
    """Peers as nodes hold them, with the timetable of a row."""

    def __init__(self, rule: OuterRule, spec: str, *, mix: float | None, kept: bool, recoded: bool) -> None:
        """`recoded`: whether the means are coded, part by part."""
        self.peers = [Coupled(Model(), rule, device=torch.device("cpu"), mix=mix) for _ in range(PEERS)]
        self.codec = self.resolve(spec)
        self._kept, self._recoded = kept, recoded
        self._fragments = cut(self.peers[0].layout.slots, TABLE.fragments, "sequential")
        self._flights: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def resolve(self, spec: str) -> FlatCodec:
        return parse_policy(spec).resolve([(slot.name, slot.shape) for slot in self.peers[0].layout.slots])

    def locals(self) -> list[Tensor]:
        return [flatten(p.layout, p.parameters, torch.empty(p.num_parameters)) for p in self.peers]

    def move(self, peer: int, by: Tensor) -> None:
        for low, high, local in self.peers[peer].layout.pieces(self.peers[peer].parameters):
            local.sub_(by[low:high])

    def after(self, step: int) -> None:
        actions = TABLE.after(step)
        for exchange in actions.sends:
            self._flights[exchange.fragment] = self._send(exchange.fragment)
        for exchange in actions.applies:
            self._apply(exchange.fragment, *self._flights.pop(exchange.fragment))

    def flush(self, spec: str, rule: OuterRule) -> None:
        """The last round moves everything."""
        self.codec = self.resolve(spec)
        for p in range(TABLE.fragments):
            for peer in self.peers:
                peer.outer.rule = rule
            self._apply(p, *self._send(p))

    def _bounds(self, p: int) -> tuple[int, int]:
        [(start, stop)] = self._fragments[p].slices
        return start, stop

    def _send(self, p: int) -> tuple[Tensor, list[Tensor]]:
        start, stop = self._bounds(p)
        for peer in self.peers:
            peer.offer()
        mean, told = torch.empty(stop - start), [torch.empty(stop - start) for _ in self.peers]
        for low, high in self._parts(start, stop):
            codec, here = self.codec.part(low, high), slice(low - start, high - start)
            payloads = [codec.encode(peer.offered_gradient(low, high)) for peer in self.peers]
            mean[here] = accumulate(high - low, [(payload, 1 / PEERS) for payload in payloads], codec)
            if self._recoded:
                mean[here] = codec.decode(codec.encode(mean[here].clone()), high - low)
            for own, payload in zip(told, payloads, strict=True):
                own[here] = codec.decode(payload, high - low)
        return mean, told

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """One of each owner."""
        if not self._recoded:
            return [(start, stop)]
        bounds = [start + number * (stop - start) // PEERS // ALIGN * ALIGN for number in range(PEERS)]
        return list(pairwise([*bounds, stop]))

    def _apply(self, p: int, mean: Tensor, told: list[Tensor]) -> None:
        start, stop = self._bounds(p)
        for peer, own in zip(self.peers, told, strict=True):
            peer.apply([(start, stop, mean)], contributed=True, told={start: own} if self._kept else None)


def moves(steps: int) -> Iterator[list[Tensor]]:
    """What inner steps do, of each peer: partly the same."""
    generator = torch.Generator().manual_seed(7)
    numel = RowWorker().layout.num_parameters
    for _ in range(steps):
        common = torch.randn(numel, generator=generator)
        yield [(common + torch.randn(numel, generator=generator)).mul_(0.01) for _ in range(PEERS)]


def row(outer: Outer, last: int) -> tuple[Rounds, list[RowWorker]]:
    workers: list[Any] = [RowWorker() for _ in range(PEERS)]
    return Rounds(outer, workers, last=last), workers


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_row_of_streaming_to_the_bit(alpha: float) -> None:
    [method] = [method for method in METHODS if method.name == "streaming"]
    assert method.outer is not None and method.outer.mixing == 0.5
    rule, wire = method.outer.rule, method.outer.wire
    outer = Outer(timetable=TABLE, rule=rule, wire=wire, pattern="sequential", mixing=alpha)
    rounds, workers = row(outer, last=1000)
    live = LiveRounds(rule, wire.up, mix=alpha, kept=False, recoded=False)
    for step, by in enumerate(moves(40), start=1):
        for m, move in enumerate(by):
            workers[m].flat.sub_(move)
            live.move(m, move)
        rounds.after(step)
        live.after(step)
        for peer in live.peers:
            assert torch.equal(peer.outer.params, rounds.params())
        for worker, local in zip(workers, live.locals(), strict=True):
            assert torch.equal(worker.flat, local)


@pytest.mark.parametrize("last", ["fp32", "deadzone(bits=2.0)"])
def test_the_rows_of_ours_up_to_the_last_exchange(last: str) -> None:
    """To the last bits: a row keeps what was left out as local + (delta - sent), a node as outer - sent."""
    steps = 38  # nothing is in flight when the run ends, as in a swarm, where a round begins when the last is over
    rule, spec = Nesterov(lr=0.7, momentum=0.5), "topk(chunk=64,k=4)"
    wire = Wire(up=spec, down=spec, last=last)
    outer = Outer(timetable=TABLE, rule=rule, wire=wire, pattern="sequential", mixing=None, kept=1.0)
    rounds, workers = row(outer, last=steps)
    live = LiveRounds(rule, spec, mix=None, kept=True, recoded=True)
    for step, by in enumerate(moves(steps), start=1):
        for m, move in enumerate(by):
            workers[m].flat.sub_(move)
            live.move(m, move)
        rounds.after(step)
        if step < steps:
            live.after(step)
    before = torch.stack(live.locals())
    live.flush(last, Sgd(lr=1.0))
    ended = live.peers[0].outer.params
    torch.testing.assert_close(ended, rounds.params(), rtol=0, atol=1e-5)
    for worker, local in zip(workers, live.locals(), strict=True):
        torch.testing.assert_close(local, worker.flat, rtol=0, atol=1e-5)
    if last == "fp32":
        torch.testing.assert_close(ended, before.mean(dim=0), rtol=0, atol=1e-5)
