"""Live parameters and the outer state they belong to: how a round moves both.

Local progress is never thrown away silently. Whenever the outer parameters move, the local ones are moved to

    local = new outer + (local - reference)                     (`late.rebase_`)

where the reference is what the local parameters would be without the progress that still has to be reported: the local
parameters at the time of sending, if what was sent has been counted (or what they would have been with no more progress
than the codec let through); the old outer ones, if not. What is offered or in flight is a copy of local parameters, of those elements only that a
round moves, and moves in the same way.

With mixing (Streaming DiLoCo) those who contributed move elsewhere: local and offered parameters alike go to alpha of themselves and 1 - alpha of the
new outer ones (`late.mix_`), so that a share of what was trained since sending is given up for being nearer to the others. Whoever did not
contribute moves as above all the same, or a missed round would cost it progress.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.training.errors import NothingOffered
from farflung.training.flat import Layout, flatten, host_buffer, synchronize, unflatten
from farflung.training.late import mix_, rebase_
from farflung.training.out_of_memory import half_made, is_lack
from farflung.training.outer import OuterState
from farflung.training.rules import OuterRule

Slice = tuple[int, int]
"""Elements [start, stop) of the flat vector."""

Update = tuple[int, int, Tensor]
"""(start, stop, mean): the mean pseudo-gradient, fp32 [stop - start] on the CPU, of elements [start, stop)."""


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """Local parameters of elements [start, stop) as they were when they were offered."""

    start: int
    stop: int
    buffer: Tensor
    """fp32, CPU, of at least stop - start elements: those come first, and what follows is nothing."""

    @property
    def values(self) -> Tensor:
        """fp32 [stop - start]."""
        return self.buffer[: self.stop - self.start]

    def holds(self, start: int, stop: int) -> bool:
        """Whether elements [start, stop) are all among them."""
        return self.start <= start and stop <= self.stop

    def of(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), which it holds; without a copy."""
        return self.buffer[start - self.start : stop - self.start]

    def meeting(self, start: int, stop: int) -> Slice | None:
        """Those of elements [start, stop) that are among them."""
        low, high = max(start, self.start), min(stop, self.stop)
        return (low, high) if low < high else None

    def clone(self) -> "Offered":
        """With memory of its own."""
        return Offered(self.start, self.stop, self.values.clone())


class Coupled:
    """A module's parameters, coupled to outer parameters and momentum. Not for several threads at once."""

    def __init__(
        self,
        module: nn.Module,  # on its device already
        outer: OuterRule,
        *,
        device: torch.device,
        mix: float | None = None,  # alpha in [0, 1], of contributors; None rebases
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
        order: Sequence[str] | None = None,  # of the flat vector, see `flat.Layout`
    ) -> None:
        self.device = device
        self.layout = Layout(module, order)
        self.parameters = self.layout.parameters(module)  # the live ones
        self.mix = mix
        params = flatten(self.layout, self.parameters, host_buffer(self.num_parameters, device))
        momentum = host_buffer(self.num_parameters, device).zero_()
        self.outer = OuterState(params, momentum, rule=outer, chunk_bytes=chunk_bytes)
        self.offered: Offered | None = None
        """Local parameters at the last `offer()`, until a round has counted them; the steps after it may go on."""
        self.sent: Offered | None = None
        """What was offered when the pseudo-gradient in flight was taken; the same as `offered` until the next offer."""
        self._spare: Tensor | None = None
        """A buffer for the next offer, fp32 [n]: page-locked memory takes long to get."""

    @property
    def num_parameters(self) -> int:
        return self.layout.num_parameters

    def offer(self, start: int = 0, stop: int | None = None) -> None:
        """Remember the local parameters of elements [start, stop) as they are, or all: the next pseudo-gradient of these is measured from here, whatever is
        trained meanwhile. Raises ValueError."""
        stop = self.num_parameters if stop is None else stop
        if not 0 <= start < stop <= self.num_parameters:
            raise ValueError(f"elements [{start}, {stop}) of a model that has {self.num_parameters}")
        if self.offered is None or self.offered is self.sent:  # what is in flight may still be counted
            buffer, self._spare = self._spare, None
        else:
            buffer = self.offered.buffer
        if buffer is None or buffer.numel() < self.num_parameters:  # as of a checkpoint, which has what was sent only
            # Of all elements, though most rounds move few: the last one moves all. What is not written takes no memory where it is not page-locked.
            buffer = host_buffer(self.num_parameters, self.device)
        self.offered = None  # what it lies in is written over
        flatten(self.layout, self.parameters, buffer[: stop - start], start)
        self.offered = Offered(start, stop, buffer)

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        """Outer minus offered parameters of elements [start, stop): fp32 [stop - start] on the CPU, the caller's to keep; in
        flight from now on. Raises NothingOffered, also where others were offered.
        """
        offered = self.offered  # as it is now: whoever gives it up meanwhile, in another thread, does not change it
        if offered is None:
            raise NothingOffered("no progress was offered")
        if not offered.holds(start, stop):
            raise NothingOffered(
                f"elements [{start}, {stop}) are asked for, and [{offered.start}, {offered.stop}) were offered"
            )
        self.sent = offered
        return self.outer.params[start:stop] - offered.of(start, stop)

    def pseudo_gradient(self) -> Tensor:
        """`offered_gradient` of all parameters as they are now."""
        self.offer()
        return self.offered_gradient(0, self.num_parameters)

    def apply(
        self,
        updates: Sequence[Update],
        *,
        contributed: bool,  # is the pseudo-gradient in flight part of these means?
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Take the outer step of one round on each slice, and move the local parameters after it.

        Where a codec left out much of what was contributed, `told` holds what it did send, fp32 [stop - start] by `start`.
        Only that much counts as reported then: the rest stays in the local parameters, and with it in the next
        pseudo-gradient.

        Elements in no slice keep everything, and their progress stays in the next pseudo-gradient; so
        does all progress of a peer that did not contribute. Raises ValueError, with nothing changed, when
        an update does not fit, when two overlap, when nothing of an update is in flight that could have contributed, or when a share of the
        local parameters would be mixed away that `told` says is to stay in them. Raises NotEnoughMemory when device and
        host have no room for a piece of it, with some slices moved.
        """
        if self.mix is not None and told is not None:
            raise ValueError("what a codec left out cannot stay in local parameters that are mixed")
        covered = 0
        for start, stop, mean in sorted(updates, key=lambda update: update[:2]):
            self.outer.check_update(start, stop, mean)
            if start < covered:
                raise ValueError(f"two updates of element {start} in one round")
            covered = stop
        sent = self._take_sent([(start, stop) for start, stop, _ in updates]) if contributed else None
        for start, stop, mean in updates:
            old = self.outer.params[start:stop].clone()
            self.outer.advance_(start, stop, mean)
            new = self.outer.params[start:stop]
            if sent is not None and self.mix is not None:
                self._mix(start, stop, self.mix)
                if self.offered is not None and (both := self.offered.meeting(start, stop)) is not None:
                    low, high = both
                    mix_(self.offered.of(low, high), self.outer.params[low:high], self.mix)
                continue  # nothing is in flight any more
            if sent is None:
                reference = old
            elif told is not None and start in told:
                reference = old - told[start]
            else:
                reference = sent.of(start, stop)
            self._rebase(start, stop, reference)
            _follow(self.offered, start, new, reference)
            if self.sent is not self.offered:  # in flight, behind what is offered; not counted
                _follow(self.sent, start, new, old)

    def adopt_outer(
        self,
        previous: Tensor | None,  # outer parameters [n] as they were before; None drops the local progress
        *,
        counted: Sequence[Slice] = (),  # where the new outer state counts the pseudo-gradient in flight
        told: Mapping[int, Tensor] | None = None,  # of these, as in `apply`
    ) -> None:
        """Go on from outer state that was downloaded into `self.outer`. Nothing is in flight afterwards. Raises ValueError, with
        nothing changed, when something is said to be counted that was not in flight; NotEnoughMemory as `apply` does.
        """
        sent = self._take_sent(counted) if counted else None
        self.sent = self.offered = None
        if previous is None:
            self.discard_progress()
            return
        reference = previous.clone() if sent is not None else previous
        if sent is not None:
            for start, stop in counted:
                if told is not None and start in told:
                    reference[start:stop] -= told[start]
                else:
                    reference[start:stop] = sent.of(start, stop)
        self._rebase(0, self.num_parameters, reference)

    def discard_progress(self) -> None:
        """Local parameters become the outer ones; nothing is in flight. The inner moments stay."""
        self.sent = self.offered = None
        unflatten(self.layout, self.outer.params, self.parameters)

    def _take_sent(self, counted: Sequence[Slice]) -> Offered:
        """What was sent, of which these slices count."""
        sent = self.sent
        if sent is None:
            raise ValueError("contributed, but no pseudo-gradient is in flight")
        for start, stop in counted:
            if not sent.holds(start, stop):
                raise ValueError(f"contributed [{start}, {stop}), but [{sent.start}, {sent.stop}) is in flight")
        self.sent = None
        if self.offered is sent:
            self.offered = None
        self._spare = sent.buffer
        return sent

    def _mix(self, start: int, stop: int, alpha: float) -> None:
        """Mix one slice of the live parameters with the outer ones."""
        host = self.outer.params.untyped_storage().data_ptr()

        def move(local: Tensor, outer: Tensor) -> None:
            is_copy = outer.untyped_storage().data_ptr() != host
            # Once local ones have moved nothing may lack room: a copy on the device is scaled where it lies.
            mix_(local, outer, alpha, scratch=outer if is_copy else None)

        self._move(start, stop, move, (self.outer.params[start:stop],))

    def _rebase(
        self,
        start: int,
        stop: int,
        reference: Tensor,  # fp32 [stop - start], CPU
    ) -> None:
        """Move one slice of the live parameters."""
        self._move(start, stop, rebase_, (self.outer.params[start:stop], reference))

    def _move(
        self,
        start: int,
        stop: int,
        move: Callable[..., None],  # moves its first argument by the others, elementwise
        by: Sequence[Tensor],  # fp32 [stop - start] each, CPU
    ) -> None:
        """Move one slice of the live parameters on their device; on the host, to the same bits, what that has no room for: whoever has filled it
        keeps a peer from training, but need not keep it from following the others."""
        with half_made("a round", self.device):
            for low, high, local in self.layout.pieces(self.parameters, start, stop):
                pieces = [tensor[low - start : high - start] for tensor in by]
                there = self._copies(pieces)
                if there is None:
                    here = local.cpu()
                    move(here, *pieces)
                    local.copy_(here)
                else:
                    move(local, *there)
        synchronize(self.device)

    def _copies(self, pieces: Sequence[Tensor]) -> list[Tensor] | None:
        """On the device; None where it has no room for them."""
        try:
            return [piece.to(self.device, non_blocking=True) for piece in pieces]
        except RuntimeError as error:
            if not is_lack(error):
                raise
        return None


def _follow(
    offered: Offered | None,
    start: int,
    outer: Tensor,  # fp32 [k], CPU: elements [start, start + k)
    reference: Tensor,  # same
) -> None:
    """Move what of a slice was offered, if anything, as the local parameters are."""
    if offered is not None and (both := offered.meeting(start, start + outer.numel())) is not None:
        low, high = both
        rebase_(offered.of(low, high), outer[low - start : high - start], reference[low - start : high - start])
