"""A peer that holds the whole model: inner steps on batches of its own, and the outer state.

The order of a round, with H inner steps:

    for step in ...: replica.train_step(tokens, step)      # the live ("local") parameters move
    delta = replica.pseudo_gradient()                      # outer - local, remembered as in flight
    ... the swarm averages; training may go on meanwhile ...
    replica.apply([(start, stop, mean), ...], contributed=True)

Local progress is never thrown away silently: when the outer parameters move, the local ones follow,
as `farflung.training.coupled` says in full.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farflung.training.errors import NoRoom, NotEnoughMemory
from farflung.training.inner import InnerConfig, StepReport, backward_pass, gradients, precision, take_step
from farflung.training.memory import MemoryForecast, choose_microbatch, even_microbatches, forecast, free_bytes
from farflung.training.microbatch import Microbatch
from farflung.training.model import ModelConfig, keeps_scores, next_token_loss
from farflung.training.model_state import ModelState
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import let_go, no_room
from farflung.training.probe import largest_that_fits
from farflung.training.rules import OuterRule
from farflung.training.runtime import Runtime


class Replica(ModelState):
    """See the module. Not for several threads at once."""

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        outer: OuterRule,
        *,
        seed: int,  # of the initial parameters, the same for all peers of a swarm
        runtime: Runtime | None = None,  # CPU in fp32 when not given
        mix: float | None = None,  # see `training.coupled`
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
        order: Sequence[str] | None = None,  # of the flat vector, see `flat.Layout`
    ) -> None:
        super().__init__(model, inner, outer, seed=seed, runtime=runtime, mix=mix, chunk_bytes=chunk_bytes, order=order)
        self._microbatch = Microbatch(self.runtime.microbatch)
        self._has_fitted = False
        """Whether passes have had room here."""

    def train_step(
        self,
        tokens: Tensor | npt.NDArray[np.int64],  # int64 [batch, seq_len + 1]
        global_step: int,  # of the run, for the learning rate
    ) -> StepReport:
        """One inner step. Raises NonFinite with nothing changed, and so NoRoom from passes where earlier ones have fitted; from the first ones NotEnoughMemory, for
        they may need more than there is; from the optimiser's step NotEnoughMemory with some parameters moved (`out_of_memory`): then this replica is of no
        use any more."""
        tokens = torch.as_tensor(tokens)
        try:
            with no_room("a batch", self.device):
                tokens = tokens.to(self.device)
            was_lowered = self._microbatch.is_lowered
            found = self._gradients(tokens, global_step)
            if was_lowered or self._microbatch.is_lowered:
                self._check_room_for_step()
        except NotEnoughMemory as lack:
            self.model.zero_grad()  # who has taken the device may have their room as well
            raise (NoRoom if self._has_fitted else NotEnoughMemory)(str(lack)) from lack
        self._has_fitted = True
        report = take_step(
            self.optimizer, self.inner_config, found, global_step=global_step, tokens=tokens[:, 1:].numel()
        )
        return replace(report, microbatch=self._microbatch.size)

    def _gradients(self, tokens: Tensor, global_step: int) -> tuple[float, float]:
        """As `inner.gradients`, with the microbatch that fits. Raises NonFinite and NotEnoughMemory."""
        sizes = even_microbatches(tokens.shape[0])
        if self._microbatch.size is None:
            self._microbatch.found(self._choose_microbatch(tokens))
        size: int | None = self._microbatch.to_try(sizes)
        while size is not None:
            try:
                found = gradients(
                    self.model,
                    self.inner_config,
                    tokens,
                    global_step=global_step,
                    microbatch=size,
                    autocast=self.runtime.autocast,
                )
            except NotEnoughMemory as error:  # somebody else took memory since the trials
                size, lack = self._microbatch.lacks(size, sizes), str(error)
            else:
                self._microbatch.fits(size)
                return found
            let_go()
        raise NotEnoughMemory(lack)

    def _check_room_for_step(self) -> None:
        """What trials had found for it beside the passes need not be there any more. Raises NoRoom, while nothing has moved and it can be waited for."""
        if not self._is_tried:
            return
        needs = self._forecast()
        try:
            with no_room("the optimiser's step", self.device):
                _ = self._ballast(self._missing_state(needs)), self._ballast(needs.step_bytes)
        except NoRoom:
            self._microbatch.lacked()
            raise

    def evaluate(
        self,
        heldout: Tensor | npt.NDArray[np.int64],  # int64 [k, seq_len + 1]
    ) -> float:
        """Mean loss of the outer parameters in nats per token. Raises NotEnoughMemory.

        As many sequences at a time as training takes, which needs more memory for them, or fewer where there is no room for that now; one before it is known.
        """
        tokens = torch.as_tensor(heldout)
        sizes = [self._microbatch.size or 1]
        if self.runtime.microbatch is None:
            sizes += [size for size in even_microbatches(tokens.shape[0]) if size < sizes[0]]
        with no_room("an evaluation", self.device), self.outer_parameters():
            for size in sizes:
                try:
                    return self._total_loss(tokens, size) / tokens.shape[0]
                except NotEnoughMemory as error:
                    lack = str(error)
                let_go()
        raise NotEnoughMemory(lack)

    @torch.no_grad()
    def _total_loss(self, tokens: Tensor, microbatch: int) -> float:
        """Of the parameters in the model, summed over the sequences. Raises NotEnoughMemory."""
        total = 0.0
        with no_room(f"an evaluation of {microbatch} sequences at a time", self.device):
            for piece in torch.split(tokens, microbatch):
                piece = piece.to(self.device)
                with precision(self.device, self.runtime.autocast):
                    logits = self.model(piece[:, :-1])
                total += float(next_token_loss(logits, piece[:, 1:])) * piece.shape[0]
        return total

    @property
    def _is_tried(self) -> bool:
        """Whether what fits is found by trial: on CUDA, whose allocator raises an error in good time; by forecast where the memory is the system's, which would
        rather swap, or end the process."""
        return self.device.type == "cuda"

    def _choose_microbatch(self, tokens: Tensor) -> int:
        """Raises NotEnoughMemory where not even one sequence fits."""
        if self._is_tried:
            return largest_that_fits(even_microbatches(tokens.shape[0]), lambda size: self._trial(tokens[:size]))
        fits = self._fitting_now(tokens)
        # what is free now is not free for steps alone: rounds beside them will take some of it, which only a plan knows
        return fits if self.runtime.max_microbatch is None else min(fits, self.runtime.max_microbatch)

    def _fitting_now(self, tokens: Tensor) -> int:
        """By forecast, with what is free and as if there were no rounds. Raises NotEnoughMemory."""
        needs = self._forecast()
        left = free_bytes(self.device, self.runtime.memory_bytes) - needs.gradient_bytes - needs.cast_bytes
        left -= 0 if self.optimizer.steps else needs.optimizer_bytes + needs.offloaded_bytes
        return choose_microbatch(
            self.model.config,
            tokens.shape[0],
            left,
            self.runtime.compute_bytes,
            checkpoint_layers=self.runtime.save.checkpoint_layers,
            scores=keeps_scores(self.device.type),
        )

    def _trial(self, tokens: Tensor) -> None:
        """The passes of a step on these tokens and then, in the place of the optimiser's step, as much memory as that is forecast to take; beside
        all that will lie there. Raises torch.OutOfMemoryError."""
        needs = self._forecast()
        ballast = [self._ballast(self._missing_state(needs))]
        try:
            for _ in range(2):  # the second finds the gradients of the first in its way, as later microbatches do
                backward_pass(self.model, tokens, self.inner_config.z_loss, 1.0, self.runtime.autocast)
            ballast.append(self._ballast(needs.step_bytes))
        finally:
            ballast.clear()
            self.optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _missing_state(self, needs: MemoryForecast) -> int:
        """Bytes of the optimiser's state that its first step will make."""
        return max(0, needs.optimizer_bytes - self.optimizer.device_bytes())

    def _ballast(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _forecast(self) -> MemoryForecast:
        spec = parse_optimizer(self.inner_config.optimizer)
        return forecast(
            self.model.config,
            spec,
            self.runtime.save,
            compute_bytes=self.runtime.compute_bytes,
            scores=keeps_scores(self.device.type),
        )
