"""Error feedback: what a lossy codec leaves out of one round is kept, and added to what is sent in the next.

Below about 2 bits per parameter codecs are biased: without feedback, top-k never sends small elements and a sign moves
all of them alike. The compression digest (sections 0 and 1.5) has, for a small model, an excess loss of 0.016 without
and 0.001 with feedback at 0.97 bits. A codec here is contractive: |C(x) - x|^2 <= (1 - alpha) |x|^2 with 0 < alpha <= 1.

**EF14** (`ErrorFeedback`; Seide et al. 2014, Karimireddy et al. 2019, decay as in SparseLoCo). The sender keeps the
residual e [n], the receiver nothing:

    p = decay * e + x;   send C(p);   e <- p - C(p)

The sum of all that was sent is the sum of all x, less the one residual that is left (decay = 1). This is the one for
pseudo-gradients. Decay below 1 forgets, which helps at rates below 0.6 bits, where e is much older than x (digest
section 3.4: 0.95). The residual is scaled down to `cap` times the norm of x (digest: 3 to 10), so that nothing can
blow it up.

**EF21** (`Ef21`, `Ef21Receiver`; Richtarik et al. 2021). Both ends keep an estimate, and only its change is sent:

    sender i:  c = C(scale * x - g_i);   send c;   g_i <- g_i + c
    receiver:  g <- g + sum_i w_i * decoded(c_i),  used in the place of sum_i w_i * scale_i * x_i;  it needs no g_i

With w_i = 1/n and scale = 1 this is EF21; with w_i = L_i / sum L and scale = 1 / (n w_i) it is EF21-W ("Error Feedback
Reloaded", 2024; L_i are smoothness constants). Gradient descent converges without a floor for steps up to
1 / (L + L' * xi), xi = (1 + sqrt(1 - alpha)) / alpha - 1, where L' is the root mean square of the L_i for EF21 and
their mean for EF21-W. It is for signals that change slowly between fixed ends: of successive pseudo-gradients with
cosine 0.45 nothing is gained by sending the difference. Members of a swarm come and go, and each must be known to the
receivers for ever: an absent member's g_i stays in g, weights cannot follow tokens, and an error of the downlink stays
in g unless its sender feeds it back.

Two phases. What a round makes of e or g is *pending* until the round's fate is known:

    feedback.begin(round);  payload = feedback.encode_(x, start)  for each part;  then
    feedback.commit(round, counted parts)   or   feedback.rollback()

A rollback leaves e and g as they were before the round. That loses nothing, and counts nothing twice, because in
farflung x itself comes back: progress that no round has counted is still in the next pseudo-gradient
(`training.coupled`). (Where x is made anew for each round, e <- p would be right.) The same holds for each part that a
committed round left out. Parts may be cut anew in each round.

At the owner of a part (`aggregate`), x is the mean and e what the downlink lost. Ownership moves from round to round;
the residual does *not*: it stays with the peer that made it, which adds it when it next encodes these elements. What
the swarm has not been told then is at most one residual per peer. Dropping it with the ownership would be simpler, but
loses some of the mean at every move, and with a biased codec always the same. `farflung bench feedback`, a quadratic with
a 1-bit downlink whose four owners change places every fifth round, distance to the optimum after 300 rounds: 8.9e-3
without feedback, 4.8e-4 dropped, 3.4e-5 kept; half-way, 1.8e-3 kept is behind 1.2e-3 dropped, as residuals wait for
their owner's turn. A downlink of 4 bits and more needs no feedback (digest section 2).

Memory: 4 bytes per element for e or g. An owner's e costs that only for the parts that it has owned, for pages that were
never written are not there. Pending: 4 bytes per element that was encoded, until the round is over; it is the
memory of x, taken over.

None of this touches bits that peers must agree on, except `Ef21Receiver`, whose `g` is outer state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from farflung.compression import codec as codecs
from farflung.compression.policy import FlatCodec

Slice = tuple[int, int]
"""Elements [start, stop) of the flat vector."""

_ROW = 1 << 10
"""Elements of one partial sum of a norm: torch splits longer sums by threads, which would show in the last bits."""


class Feedback(ABC):
    """One vector of memory, encoding that depends on it, and rounds that change it or do not. Not for several threads at once."""

    def __init__(self, codec: FlatCodec) -> None:
        self.codec = codec
        self.memory = torch.zeros(codec.numel, dtype=torch.float32)
        """e or g [n], of committed rounds."""
        self._round = b""
        self._pending: dict[Slice, Tensor] = {}
        """What the memory of a part becomes if the round counts it."""

    @property
    def round(self) -> bytes:
        """The round that has begun and not ended; empty when there is none."""
        return self._round

    def begin(self, round_id: bytes) -> None:
        """A round begins; what is pending of an earlier one is given up, as by `rollback`."""
        self._round = round_id
        self._pending = {}

    @abstractmethod
    def encode_(
        self,
        x: Tensor,  # fp32 [k], contiguous, on the CPU: elements [start, start + k) of the vector
        start: int,
    ) -> memoryview:
        """The payload of these elements in the current round, a payload of `codec.part(start, start + k)`.

        `x` is taken over: it becomes what is pending, and must be left alone until the round is over. The same part once more takes the
        place of what was pending of it. Raises CodecError when it cannot be encoded (then it is spoilt, and nothing is pending of it),
        ValueError when the slice does not fit the vector or overlaps another one of this round.
        """

    def commit(
        self,
        round_id: bytes,
        counted: Iterable[Slice],  # the parts whose contributions the round counted, as they were encoded
    ) -> None:
        """The round counted these parts, and of this round no others. Nothing is pending afterwards."""
        parts = list(counted)
        pending = self._pending if round_id == self._round else {}
        for start, stop in parts:
            if (start, stop) not in pending:
                self._lose(start, stop)
        for start, stop in parts:
            if (start, stop) in pending:
                self.memory[start:stop] = pending[start, stop]
        self.rollback()

    def rollback(self) -> None:
        """The round counted nothing: the memory is what it was before."""
        self.begin(b"")

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors for safetensors; `load` takes them back with the same bits."""
        return {
            "memory": self.memory,
            "round": torch.tensor(list(self._round), dtype=torch.uint8),
            "parts": torch.tensor(list(self._pending), dtype=torch.int64).view(-1, 2),
            "pending": torch.cat([torch.empty(0), *self._pending.values()]),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave. Raises ValueError, with nothing changed, when it is not of this vector."""
        expected = {"memory": torch.float32, "round": torch.uint8, "parts": torch.int64, "pending": torch.float32}
        types = {name: tensor.dtype for name, tensor in state.items()}
        if types != expected or state["parts"].shape[1:] != (2,):
            raise ValueError(f"the state of error feedback has the tensors {', '.join(expected)}")
        parts: list[Slice] = [(int(start), int(stop)) for start, stop in state["parts"].tolist()]
        lengths = [stop - start for start, stop in parts]
        sound = all(0 <= start < stop <= self.codec.numel for start, stop in parts)
        if state["memory"].shape != self.memory.shape or not sound or state["pending"].shape != (sum(lengths),):
            raise ValueError(f"not the state of error feedback for {self.codec.numel} elements")
        self.memory.copy_(state["memory"])
        self._round = bytes(state["round"].tolist())
        self._pending = dict(zip(parts, torch.split(state["pending"], lengths), strict=True))

    def _open(self, x: Tensor, start: int) -> Slice:
        """The part that `x` is, of which nothing is pending any more. Raises ValueError."""
        part = start, start + x.numel()
        codecs.check_target(x, x.numel(), "x")
        if any(start < stop and first < part[1] for first, stop in self._pending if (first, stop) != part):
            raise ValueError(f"part {part} overlaps another part of the same round")
        self._pending.pop(part, None)
        return part

    @abstractmethod
    def _lose(self, start: int, stop: int) -> None:
        """A round counted elements [start, stop), and what that makes of the memory is not known any more."""


class ErrorFeedback(Feedback):
    """EF14; its memory is the residual e."""

    def __init__(
        self,
        codec: FlatCodec,
        *,
        decay: float = 1.0,  # of the residual from round to round, in [0, 1]
        cap: float = 10.0,  # largest norm of a part's residual, in norms of what was to be sent; inf for no cap
    ) -> None:
        if not 0.0 <= decay <= 1.0 or not cap > 0.0:
            raise ValueError(f"decay must lie in [0, 1] and cap be positive, not {decay} and {cap}")
        super().__init__(codec)
        self.decay = decay
        self.cap = cap
        self._squares: dict[Slice, tuple[float, float]] = {}
        """Of the current round's parts: norms of x and of what is pending, squared."""

    @property
    def left_out(self) -> float:
        """The norm of what is pending, in norms of x: what the current round leaves out; 0 before anything is encoded in it."""
        wanted, left_out = (math.fsum(squares) for squares in zip((0.0, 0.0), *self._squares.values(), strict=True))
        return math.sqrt(left_out / wanted) if wanted > 0.0 else 0.0

    def begin(self, round_id: bytes) -> None:
        """See `Feedback.begin`."""
        super().begin(round_id)
        self._squares = {}

    def encode_(self, x: Tensor, start: int) -> memoryview:
        """See `Feedback.encode_`."""
        part = self._open(x, start)
        self._squares.pop(part, None)
        codec = self.codec.part(*part)
        wanted = _norm(x)
        limit = self.cap * wanted if wanted > 0.0 else math.inf  # where nothing is to be sent, what is owed cannot grow
        _add_scaled_(x, self.memory[start : part[1]], self.decay)
        payload = codec.encode(x)
        codec.decode_add_(payload, x, -1.0)
        norm = _norm(x)
        if norm > limit:
            x.mul_(limit / norm)
        self._pending[part] = x
        self._squares[part] = wanted**2, min(norm, limit) ** 2
        return payload

    def age(
        self,
        rounds: float,  # need not be whole where not all of them moved all the elements
        parts: Iterable[Slice] | None = None,  # that they moved; None: everything
    ) -> None:
        """So many rounds went by without this peer: what it still owes fades with them, as it would have with its own."""
        if rounds > 0 and self.decay < 1.0:
            for start, stop in [(0, self.codec.numel)] if parts is None else parts:
                self.memory[start:stop].mul_(self.decay**rounds)

    def _lose(self, start: int, stop: int) -> None:
        """After a crash: what is in the memory was sent, and what was left out then is lost."""
        self.memory[start:stop] = 0.0


class Ef21(Feedback):
    """One sender's end of EF21 and EF21-W; its memory is the estimate g_i."""

    def __init__(
        self,
        codec: FlatCodec,
        *,
        scale: float = 1.0,  # 1 / (n w_i) for EF21-W
    ) -> None:
        if not (math.isfinite(scale) and scale > 0.0):
            raise ValueError(f"scale must be positive, not {scale}")
        super().__init__(codec)
        self.scale = scale

    def encode_(self, x: Tensor, start: int) -> memoryview:
        """See `Feedback.encode_`."""
        part = self._open(x, start)
        codec, estimate = self.codec.part(*part), self.memory[start : part[1]]
        x.mul_(self.scale).sub_(estimate)
        payload = codec.encode(x)
        codec.decode(payload, x.numel(), out=x)
        self._pending[part] = x.add_(estimate)
        return payload

    def _lose(self, start: int, stop: int) -> None:
        """Raises ValueError: the receivers have added what the sender does not know, and the two must begin anew."""
        raise ValueError(f"a round counted elements [{start}, {stop}), which are not pending here")


class Ef21Receiver:
    """The other end: the weighted mean of all senders' estimates. Outer state, where several peers hold it."""

    def __init__(self, numel: int) -> None:
        self.estimate = torch.zeros(numel, dtype=torch.float32)
        """g [n]."""

    def add_(
        self,
        change: Tensor,  # fp32 [k]: the decoded weighted mean of a committed round
        start: int,
    ) -> Tensor:
        """Take in a part, and return a copy of its estimate: what stands for the mean of x."""
        return self.estimate[start : start + change.numel()].add_(change).clone()


def _add_scaled_(x: Tensor, other: Tensor, factor: float) -> None:
    """x += fp32(factor * other), with one chunk of scratch; multiply and add round separately, on every machine."""
    scratch = torch.empty(min(x.numel(), codecs.CPU_CHUNK), dtype=torch.float32)
    for start, stop in codecs.chunks(x.numel(), 1):
        part = scratch[: stop - start]
        torch.mul(other[start:stop], factor, out=part)
        x[start:stop].add_(part)


def _norm(x: Tensor) -> float:
    """The Euclidean norm, the same bits for every thread count."""
    whole = x.numel() - x.numel() % _ROW
    squares = float(torch.linalg.vector_norm(x[whole:])) ** 2
    for start, stop in codecs.chunks(whole, _ROW):
        rows = torch.linalg.vector_norm(x[start:stop].view(-1, _ROW), dim=1)
        squares += math.fsum(rows.double().square_().tolist())
    return math.sqrt(squares)
