"""What error feedback is worth, as curves: on a quadratic whose optimum is known, and on a small language model.

**The quadratic.** K = 4 peers, n = 512; peer i has f_i(x) = 1/2 sum_j a_j (x_j - b_ij)^2 with a_j from 0.1 to 1 in equal
ratios, shuffled, and b_ij = b_j + 0.3 z_ij with b, z standard normal: peers agree on the whole and differ in detail, so at
the optimum their gradients are not zero, only the mean of them is. All start at 0 and send x_i = step_t * grad f_i,
step_t = 0.5 / (1 + t / 100) (EF21 sends the gradient). A curve is (f - f*) / (f(0) - f*) after each round.

**The downlink.** The same quadratic with exact contributions; the mean is coded by the owners of four quarters, who
change places every fifth round. What is to become of an owner's residual: none, dropped with the ownership, or kept?

**The model.** The smallest preset on the embedded corpus; two replicas, H = 10 AdamW steps a round with a rate that falls to 0,
outer step = plain average, norms in fp32. A curve is the held-out loss of the outer parameters in nats per token, before the first
and after each round. *Warm*: one peer has trained by itself before, and the rate is a moderate one. *Cold*: from random weights at a high rate. In
the first rounds the peers' steps are so large that what arrives a round late is old; feedback that starts later is shown beside.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.compression.aggregate import accumulate
from farflung.compression.codec import Codec
from farflung.compression.feedback import Ef21, Ef21Receiver, ErrorFeedback, Feedback
from farflung.compression.fp32 import Fp32
from farflung.compression.policy import FlatCodec, Policy, Rule, uniform
from farflung.training.data import Dataset, Tokens
from farflung.training.inner import InnerConfig
from farflung.training.order import SampleOrder
from farflung.training.presets import preset
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

PEERS = 4
DIM = 512
SPREAD = 0.3
"""Of the peers' optima, in those of the coordinates."""
STEP, HALF_STEP = 0.5, 100
"""The first step, and the round at which it is halved."""

PARTS = 4
TURN_ROUNDS = 5
"""Rounds for which an owner keeps its part."""

REPLICAS = 2
INNER_STEPS = 10
BATCH = 4
SEQ_LEN = 64
WARM_STEPS = 200
ROUNDS = 16
WARM_RATE, RATE, COLD_RATE = 6e-3, 2e-3, 6e-3
"""Peak learning rates of the warm-up, and of the rounds after it and without it."""
LATE_ROUNDS = 4
"""After so many rounds feedback starts, where it starts late."""
HELDOUT = 128
"""Sequences of an evaluation."""

Sender = Callable[[FlatCodec], Feedback]
SENDERS: dict[str, Sender | None] = {
    "none": None,
    "ef14": ErrorFeedback,
    "ef14 decay 0.95": lambda codec: ErrorFeedback(codec, decay=0.95),
    "ef21": Ef21,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One run."""

    codec: str
    feedback: str
    values: tuple[float, ...]
    """After each round."""


# ---- the quadratic ---------------------------------------------------------------------------------------------


class Quadratic:
    """See the module."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.curvature = torch.logspace(-1, 0, DIM)[torch.randperm(DIM, generator=generator)]
        common = torch.randn(DIM, generator=generator)
        self.optima = common + SPREAD * torch.randn(PEERS, DIM, generator=generator)

    def gradient(self, peer: int, x: Tensor) -> Tensor:
        return self.curvature * (x - self.optima[peer])

    def gap(self, x: Tensor) -> float:
        """f(x) - f*, in that of x = 0."""
        best = self.optima.mean(dim=0)
        return float((self.curvature * (x - best).square()).sum() / (self.curvature * best.square()).sum())


def quadratic_curves(
    codecs: Sequence[Codec],
    *,
    rounds: int = 300,
    failing: float = 0.3,  # share of rounds that fail in the runs marked so
    seed: int = 0,
) -> list[Curve]:
    """Every codec with every kind of feedback, without failures and, for ef14, with them; the exact codec first."""
    quadratic = Quadratic(seed)
    curves = [_descend(quadratic, Fp32(), "none", rounds, 0.0, seed)]
    for codec in codecs:
        curves += [_descend(quadratic, codec, kind, rounds, 0.0, seed) for kind in SENDERS]
        curves.append(_descend(quadratic, codec, "ef14", rounds, failing, seed))
    return curves


def _descend(quadratic: Quadratic, codec: Codec, kind: str, rounds: int, failing: float, seed: int) -> Curve:
    chance = random.Random(seed)
    group = Group(uniform(codec, DIM), kind, PEERS)
    receiver = Ef21Receiver(DIM)
    x = torch.zeros(DIM)
    values: list[float] = []
    for t in range(rounds):
        step = STEP / (1 + t / HALF_STEP)
        scale = 1.0 if kind == "ef21" else step
        payloads = group.encode([scale * quadratic.gradient(peer, x) for peer in range(PEERS)])
        if chance.random() < failing:
            group.rollback()
        else:
            mean = group.commit(payloads)
            x = x - (step * receiver.add_(mean, 0) if kind == "ef21" else mean)
        values.append(quadratic.gap(x))
    label = f"{kind}, {failing:.0%} of rounds fail" if failing else kind
    return Curve(codec=codec.spec, feedback=label, values=tuple(values))


class Group:
    """Peers that send slices of the whole vector to one owner, each with its own feedback."""

    def __init__(self, codec: FlatCodec, kind: str, peers: int) -> None:
        make = SENDERS[kind]
        self._codec = codec.part(0, codec.numel)
        self._numel = codec.numel
        self._senders = [make(codec) for _ in range(peers)] if make is not None else []

    def encode(self, vectors: Sequence[Tensor]) -> list[memoryview]:
        """Each peer's payload; its vector is taken over."""
        if not self._senders:
            return [self._codec.encode(x) for x in vectors]
        for sender in self._senders:
            sender.begin(b"a round")
        return [sender.encode_(x, 0) for sender, x in zip(self._senders, vectors, strict=True)]

    def commit(self, payloads: Sequence[memoryview]) -> Tensor:
        """The mean of what was sent; the round counts it."""
        for sender in self._senders:
            sender.commit(b"a round", [(0, self._numel)])
        return accumulate(self._numel, [(payload, 1.0 / len(payloads)) for payload in payloads], self._codec)

    def rollback(self) -> None:
        """The round fails."""
        for sender in self._senders:
            sender.rollback()


def downlink_curves(codecs: Sequence[Codec], *, rounds: int = 300, seed: int = 0) -> list[Curve]:
    """Every codec as the downlink, with every fate of an owner's residual."""
    quadratic = Quadratic(seed)
    return [_share(quadratic, codec, fate, rounds) for codec in codecs for fate in ("none", "dropped", "kept")]


def _share(quadratic: Quadratic, codec: Codec, fate: str, rounds: int) -> Curve:
    flat = uniform(codec, DIM)
    size = DIM // PARTS
    owners = [ErrorFeedback(flat) for _ in range(PARTS)]
    x = torch.zeros(DIM)
    values: list[float] = []
    for t in range(rounds):
        gradients = [quadratic.gradient(peer, x) for peer in range(PEERS)]
        mean = torch.stack(gradients).mean(dim=0) * (STEP / (1 + t / HALF_STEP))
        for part in range(PARTS):
            start, stop = part * size, (part + 1) * size
            owner = owners[(part + t // TURN_ROUNDS) % PARTS]
            if fate == "none" or (fate == "dropped" and t % TURN_ROUNDS == 0):
                owner.memory.zero_()
            owner.begin(b"a round")
            payload = owner.encode_(mean[start:stop].clone(), start)
            owner.commit(b"a round", [(start, stop)])
            x[start:stop] -= flat.part(start, stop).decode(payload, size)
        values.append(quadratic.gap(x))
    return Curve(codec=codec.spec, feedback=fate, values=tuple(values))


# ---- the model -------------------------------------------------------------------------------------------------


def warm_curves(codecs: Sequence[Codec], *, rounds: int = ROUNDS) -> list[Curve]:
    """From a warm start: the exact codec, then every codec without and with feedback."""
    data = open_dataset("python", ByteTokenizer(), SEQ_LEN)
    task = _Task(data, rounds, RATE, _warm_up(_batches(data, WARM_STEPS, seed=1)))
    curves = [task.train(Fp32(), "none")]
    return curves + [task.train(codec, kind) for codec in codecs for kind in ("none", "ef14")]


def cold_curves(codecs: Sequence[Codec], *, rounds: int = ROUNDS, late: int = LATE_ROUNDS) -> list[Curve]:
    """From random weights: the exact codec, then every codec without feedback, with it, and with it after `late` rounds."""
    task = _Task(open_dataset("python", ByteTokenizer(), SEQ_LEN), rounds, COLD_RATE, None)
    curves = [task.train(Fp32(), "none")]
    for codec in codecs:
        curves += [task.train(codec, "none"), task.train(codec, "ef14"), task.train(codec, "ef14", starts=late)]
    return curves


def _batches(data: Dataset, steps: int, *, seed: int) -> Tokens:
    """[steps, REPLICAS, BATCH, SEQ_LEN + 1], spread over the corpus."""
    order = SampleOrder(num_samples=data.num_samples, seed=seed)
    samples = [data.tokens(order.index(k)) for k in range(steps * REPLICAS * BATCH)]
    return np.stack(samples).reshape(steps, REPLICAS, BATCH, SEQ_LEN + 1)


def _replica(schedule: Schedule) -> Replica:
    model, average = preset("tiny", seq_len=SEQ_LEN), Nesterov(lr=1.0, momentum=0.0)
    return Replica(model, InnerConfig(schedule=schedule), average, seed=1, runtime=Runtime(microbatch=BATCH))


def _warm_up(batches: Tokens) -> Tensor:
    """The parameters [n] that one peer comes to by itself."""
    replica = _replica(Schedule(peak=WARM_RATE, warmup_steps=20, total_steps=len(batches)))
    for step, batch in enumerate(batches):
        replica.train_step(batch.reshape(-1, SEQ_LEN + 1), step)
    return replica.outer.params - replica.pseudo_gradient()


class _Task:
    """The same batches, start and schedule for every codec."""

    def __init__(self, data: Dataset, rounds: int, rate: float, start: Tensor | None) -> None:
        self._batches = _batches(data, rounds * INNER_STEPS, seed=2)
        self._heldout = data.heldout(HELDOUT)
        self._schedule = Schedule(peak=rate, warmup_steps=INNER_STEPS, total_steps=len(self._batches), final_ratio=0.0)
        self._start = start
        """Parameters [n]; None for random ones."""

    def train(self, codec: Codec, kind: str, *, starts: int = 0) -> Curve:
        """One curve; feedback starts after so many rounds."""
        replicas = [_replica(self._schedule) for _ in range(REPLICAS)]
        for replica in replicas:
            if self._start is not None:
                replica.outer.params.copy_(self._start)
                replica.discard_progress()
        policy = Policy(rules=(Rule(selector="1d", codec=Fp32()),), default=codec)
        flat = policy.resolve((slot.name, slot.shape) for slot in replicas[0].layout.slots)
        plain, group = Group(flat, "none", REPLICAS), Group(flat, kind, REPLICAS)
        values = [replicas[0].evaluate(self._heldout)]
        for step, batch in enumerate(self._batches):
            for replica, tokens in zip(replicas, batch, strict=True):
                replica.train_step(tokens, step)
            if (step + 1) % INNER_STEPS == 0:
                peers = group if len(values) > starts else plain
                mean = peers.commit(peers.encode([replica.pseudo_gradient() for replica in replicas]))
                for replica in replicas:
                    replica.apply([(0, flat.numel, mean)], contributed=True)
                values.append(replicas[0].evaluate(self._heldout))
        label = f"{kind} after {starts} rounds" if starts else kind
        return Curve(codec=codec.spec, feedback=label, values=tuple(values))
