"""Pseudo-gradients to means, through real codecs, and the traffic that takes: payload bytes as they would be sent.

Per peer and exchange, with payloads of b bytes, M peers, everything sent and received:

    gather, radial   every peer sends its payload to every other one                 2 (M - 1) b
    butterfly        the fragment has M parts; a peer sends the parts of which it is not the owner, receives and averages
                     its own part, sends the mean to everybody and receives the others'  2 (M - 1)/M (b_up + b_down)

What is counted are the real payloads of this exchange, headers included, averaged over the peers; a byte counts once
where it is sent and once where it is received. Everybody, owners included, uses the decoded mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate as accumulated
from itertools import pairwise

import torch
from torch import Tensor

from farflung.compression import unreduced
from farflung.compression.aggregate import Contribution, accumulate, reduce_part
from farflung.compression.feedback import ErrorFeedback, Slice
from farflung.compression.policy import FlatCodec, parse_policy
from farflung.compression.unreduced import MeanCodec
from farflung.sims.quality_methods import Wire
from farflung.sims.quality_resume import State
from farflung.training.errors import NonFinite
from farflung.training.flat import Slot
from farflung.training.fragments import ALIGN, Fragment
from farflung.training.merge import radial_mean
from farflung.training.optimizers import TABLES

_ROUND = b"a round"


@dataclass(frozen=True, slots=True)
class Averaged:
    """What an exchange came to."""

    mean: Tensor
    """As all peers decode it."""
    residuals: list[Tensor]
    """What is missing of each peer: its pseudo-gradient, and what it still held back before, less its payload."""
    nbytes: float
    """That a peer sent and received, on average."""


class Traffic:
    """Bytes by step, from the beginning of the rounds to the last step."""

    def __init__(self, numel: int, steps: int) -> None:
        self._numel = numel
        self.step_bytes = [0.0] * steps
        """That a peer sent and received, on average."""

    def mean_bits(self) -> float:
        """Per parameter and step."""
        return 8 * sum(self.step_bytes) / self._numel / len(self.step_bytes)

    def peak_bits(self, delay: int = 0) -> float:
        """Of the busiest step but the last, per parameter; its bytes may take `delay` steps, or one."""
        busiest = max(self.step_bytes[:-1], default=0.0) or self.step_bytes[-1]
        return 8 * busiest / self._numel / max(delay, 1)


def late_mean(values: Sequence[float]) -> float | None:
    """Of their second half; None where there are none."""
    later = values[len(values) // 2 :]
    return sum(later) / len(later) if later else None


def check_finite(deltas: Sequence[Tensor], step: int) -> None:
    """Raise NonFinite when a pseudo-gradient is no number: of such no codec makes bytes, and the run has diverged."""
    if not all(bool(delta.isfinite().all()) for delta in deltas):
        raise NonFinite(global_step=step, loss=math.nan)


class Averager:
    """The exchanges of one fragment, with the error feedback of all peers."""

    def __init__(self, wire: Wire, fragment: Fragment, slots: Sequence[Slot], peers: int) -> None:
        self._wire, self._peers, self._numel = wire, peers, fragment.numel
        shapes = fragment.shapes(slots)
        self._tensors = _tensors(shapes)
        specs = (wire.up, wire.down, wire.last or wire.up)
        self._up, self._down, self._last = (parse_policy(spec).resolve(shapes) for spec in specs)
        self._senders = _feedbacks(self._up, wire.feedback, wire.cap, peers)
        self._owners = _feedbacks(self._down, wire.down_feedback, wire.cap, peers)

    def mean(
        self,
        deltas: Sequence[Tensor],  # fp32 [fragment.numel] of each peer, CPU; left as they are
        *,
        final: bool = False,
    ) -> Averaged:
        """Exchange them; in the final flush with that codec, where there is one."""
        if final and self._wire.last is not None:
            for feedback in (*self._senders, *self._owners):
                feedback.codec = self._last
            self._up = self._down = self._last
        return self._butterfly(deltas) if self._wire.topology == "butterfly" else self._gather(deltas)

    def residual_norm(self) -> float:
        """Root mean square over the peers of the norms of what error feedback still holds; 0 without."""
        squares = [float(sender.memory.norm()) ** 2 for sender in self._senders]
        return (sum(squares) / len(squares)) ** 0.5 if squares else 0.0

    def state(self) -> State:
        """What error feedback holds, as it is kept and not copied; before the final flush."""
        return {"senders": [one.state() for one in self._senders], "owners": [one.state() for one in self._owners]}

    def load(self, state: State) -> None:
        """Go on from what `state` gave."""
        for mine, kept in ((self._senders, state["senders"]), (self._owners, state["owners"])):
            for feedback, one in zip(mine, kept, strict=True):
                feedback.load(one)

    def _gather(self, deltas: Sequence[Tensor]) -> Averaged:
        payloads = [self._encode(peer, delta, 0, self._numel) for peer, delta in enumerate(deltas)]
        self._commit([(0, self._numel)])
        codec = self._up.part(0, self._numel)
        mean = accumulate(self._numel, [(payload, 1 / self._peers) for payload in payloads], codec)
        sent = sum(len(payload) for payload in payloads) * (self._peers - 1)
        counted = [codec.decode(payload, self._numel) for payload in payloads]
        if self._wire.topology == "radial":
            for start, stop in self._tensors:
                mean[start:stop] = radial_mean([own[start:stop] for own in counted], [1 / self._peers] * self._peers)
        return Averaged(mean, self._residuals(deltas, counted), 2 * sent / self._peers)

    def _butterfly(self, deltas: Sequence[Tensor]) -> Averaged:
        mean = torch.empty(self._numel)
        counted = [torch.empty(self._numel) for _ in deltas]
        sent = 0
        parts = self._parts()
        for owner, (start, stop) in enumerate(parts):
            up, down = self._up.part(start, stop), self._down.part(start, stop)
            payloads = [self._encode(peer, delta, start, stop) for peer, delta in enumerate(deltas)]
            for own, coded in zip(counted, payloads, strict=True):
                up.decode(coded, stop - start, out=own[start:stop])
            contributions = [(payload, 1 / self._peers) for payload in payloads]
            of_means = MeanCodec(up, down)
            others = [peer for peer in range(self._peers) if peer != owner]
            if of_means.leaves_unreduced(self._peers - 1, stop - start):
                payload = unreduced.pack(stop - start, contributions)
                sent += sum(len(unreduced.without(payload, peer)) for peer in others)
            else:
                payload = self._reduce(owner, (start, stop), contributions, of_means)
                sent += len(payload) * len(others)
            of_means.decode(payload, stop - start, out=mean[start:stop])
            sent += sum(len(payloads[peer]) for peer in others)
        self._commit(parts)
        return Averaged(mean, self._residuals(deltas, counted), 2 * sent / self._peers)

    def _reduce(self, owner: int, part: Slice, contributions: Sequence[Contribution], codecs: MeanCodec) -> memoryview:
        """The mean, coded once more, with what its owner owes of it."""
        start, stop = part
        if not self._owners:
            return reduce_part(stop - start, contributions, codecs.up, codecs.down.encode)
        feedback = self._owners[owner]
        feedback.begin(_ROUND)
        payload = reduce_part(stop - start, contributions, codecs.up, partial(feedback.encode_, start=start))
        feedback.commit(_ROUND, [part])
        return payload

    def _residuals(self, deltas: Sequence[Tensor], counted: Sequence[Tensor]) -> list[Tensor]:
        if self._senders:
            return [sender.memory.clone() for sender in self._senders]
        return [delta - own for delta, own in zip(deltas, counted, strict=True)]

    def _parts(self) -> list[tuple[int, int]]:
        """One for each peer that has any, about equal."""
        align = ALIGN if self._numel >= ALIGN * self._peers else 1
        bounds = [index * self._numel // self._peers // align * align for index in range(self._peers)]
        return list(zip(bounds, [*bounds[1:], self._numel], strict=True))

    def _encode(self, peer: int, delta: Tensor, start: int, stop: int) -> memoryview:
        if not self._senders:
            return self._up.part(start, stop).encode(delta[start:stop])
        sender = self._senders[peer]
        if start == 0:
            sender.begin(_ROUND)
        return sender.encode_(delta[start:stop].clone(), start)

    def _commit(self, parts: Sequence[tuple[int, int]]) -> None:
        for sender in self._senders:
            sender.commit(_ROUND, parts)


def _tensors(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Where those stand in the fragment that RDA merges: all but the tables of tokens."""
    ends = list(accumulated((math.prod(shape) for _, shape in shapes), initial=0))
    return [place for (name, _), place in zip(shapes, pairwise(ends), strict=True) if not name.startswith(TABLES)]


def _feedbacks(codec: FlatCodec, decay: float | None, cap: float, peers: int) -> list[ErrorFeedback]:
    return [] if decay is None else [ErrorFeedback(codec, decay=decay, cap=cap) for _ in range(peers)]
