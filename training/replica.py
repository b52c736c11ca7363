"""One peer's whole training state: the live model on its device, the inner optimiser, and the outer state.

The order of a round, with H inner steps:

    for step in ...: replica.train_step(tokens, step)      # the live ("local") parameters move
    delta = replica.pseudo_gradient()                      # outer - local, remembered as in flight
    ... the swarm averages; training may go on meanwhile ...
    replica.apply([(start, stop, mean), ...], contributed=True)

Local progress is never thrown away silently: when the outer parameters move, the local ones follow,
as `farflung.training.coupled` says in full.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farflung.training.checkpoint import Fact, read_state, write_state
from farflung.training.coupled import Coupled
from farflung.training.errors import DamagedCheckpoint, NotEnoughMemory
from farflung.training.flat import flatten, host_buffer, unflatten
from farflung.training.inner import InnerConfig, StepReport, backward_pass, make_optimizer, precision, train_step
from farflung.training.inner_optimizer import PREFIX
from farflung.training.memory import (
    PLAIN,
    MemoryForecast,
    MemoryOptions,
    choose_microbatch,
    even_microbatches,
    forecast,
    free_bytes,
)
from farflung.training.model import Decoder, ModelConfig, everything, next_token_loss
from farflung.training.optimizers import parse_optimizer
from farflung.training.outer import OuterConfig
from farflung.training.probe import largest_that_fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """How this peer computes; its own choice, and never part of what a swarm agrees on."""

    device: str = "cpu"
    """As torch names it: cpu, cuda, cuda:1, mps."""
    autocast: torch.dtype | None = None
    """Precision of the matrix products; None is fp32. Parameters and moments are fp32 in any case."""
    microbatch: int | None = None
    """Sequences at a time; None takes what the memory allows, found at the first step and lowered when it gets short."""
    save: MemoryOptions = PLAIN
    """What memory is saved with; the gradients and, but for 8 bits, the parameters are the same to the bit."""
    memory_bytes: int | None = None
    """Most memory of the device that this process shall use; None is all there is."""
    compile: bool = False
    """Compile the model with torch.compile: a minute of waiting, then faster steps on GPUs."""

    def __post_init__(self) -> None:
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError("microbatch must be at least 1")

    @property
    def compute_bytes(self) -> int:
        """Of one number in a matrix product."""
        return 4 if self.autocast is None else self.autocast.itemsize

    @classmethod
    def best(cls, device: str) -> "Runtime":
        """bf16 on GPUs that compute in it, fp32 elsewhere."""
        on_cuda = torch.device(device).type == "cuda"
        has_bf16 = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        return cls(device=device, autocast=torch.bfloat16 if has_bf16 else None)


class Replica(Coupled):
    """See the module. Not for several threads at once."""

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        outer: OuterConfig,
        *,
        seed: int,  # of the initial parameters, the same for all peers of a swarm
        runtime: Runtime | None = None,  # CPU in fp32 when not given
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
        held: Callable[[str], bool] = everything,  # what of the model this peer has, see `Decoder`
    ) -> None:
        self.runtime = Runtime() if runtime is None else runtime
        device = torch.device(self.runtime.device)
        self.model = Decoder(model, seed=seed, held=held).to(device)
        self.model.model.checkpoint_layers = self.runtime.save.checkpoint_layers
        super().__init__(self.model, outer, device=device, chunk_bytes=chunk_bytes)
        self.inner_config = inner
        self.optimizer = make_optimizer(self.model, inner, self.runtime.save.inner_state)
        self._forward = torch.compile(self.model) if self.runtime.compile else self.model
        self._microbatch = self.runtime.microbatch

    def train_step(
        self,
        tokens: Tensor | npt.NDArray[np.int64],  # int64 [batch, seq_len + 1]
        global_step: int,  # of the run, for the learning rate
    ) -> StepReport:
        """One inner step. Raises NonFinite or NotEnoughMemory, with nothing changed."""
        tokens = torch.as_tensor(tokens).to(self.device)
        if self._microbatch is None:
            self._microbatch = self._choose_microbatch(tokens)
        while True:
            try:
                return train_step(
                    self.model,
                    self._forward,
                    self.optimizer,
                    self.inner_config,
                    tokens,
                    global_step=global_step,
                    microbatch=self._microbatch,
                    autocast=self.runtime.autocast,
                )
            except NotEnoughMemory:  # somebody else took memory since the trials
                smaller = [size for size in even_microbatches(tokens.shape[0]) if size < self._microbatch]
                if self.runtime.microbatch is not None or not smaller:
                    raise
                self._microbatch = smaller[0]
            torch.cuda.empty_cache()

    @contextmanager
    def outer_parameters(self) -> Iterator[Decoder]:
        """The model with the outer parameters in it; at the end the local ones come back, to the bit."""
        local = flatten(self.layout, self.parameters, host_buffer(self.num_parameters, self.device))
        unflatten(self.layout, self.outer.params, self.parameters)
        try:
            yield self.model
        finally:
            unflatten(self.layout, local, self.parameters)

    def evaluate(
        self,
        heldout: Tensor | npt.NDArray[np.int64],  # int64 [k, seq_len + 1]
        batch: int = 16,  # sequences at a time
    ) -> float:
        """Mean loss of the outer parameters in nats per token."""
        tokens = torch.as_tensor(heldout)
        total = 0.0
        with self.outer_parameters() as model, torch.no_grad():
            for piece in torch.split(tokens, batch):
                piece = piece.to(self.device)
                with precision(self.device, self.runtime.autocast):
                    logits = model(piece[:, :-1])
                total += float(next_token_loss(logits, piece[:, 1:])) * piece.shape[0]
        return total / tokens.shape[0]

    def save(self, folder: Path) -> None:
        """Write the whole state, with what is in flight, in place of an earlier one. Raises OSError."""
        tensors = {
            "outer.params": self.outer.params,
            "outer.momentum": self.outer.momentum,
            "local": flatten(self.layout, self.parameters, torch.empty(self.num_parameters)),
        }
        if self.sent is not None:
            tensors["sent"] = self.sent
        tensors |= self.optimizer.tensors()
        facts: dict[str, Fact] = {
            "inner_steps": self.optimizer.steps,
            "inner_optimizer": parse_optimizer(self.inner_config.optimizer).name,
        }
        write_state(folder, tensors, facts)

    def load(self, folder: Path) -> None:
        """Bring back what `save` wrote for a model of this shape; training then goes on with the same bits.

        Raises DamagedCheckpoint, with nothing changed, when it is missing, altered or of another model.
        """
        tensors, facts = read_state(folder)
        inner = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
        wrong = [t for t in tensors.values() if t.shape != (self.num_parameters,) or t.dtype != torch.float32]
        match facts:
            case {"inner_steps": int(inner_steps), "inner_optimizer": str(name)} if not wrong:
                pass
            case _:
                raise DamagedCheckpoint(f"{folder} does not hold the tensors of this model")
        if set(tensors) - {"sent"} != {"outer.params", "outer.momentum", "local"}:
            raise DamagedCheckpoint(f"{folder} does not hold the tensors of this model")
        if name != (ours := parse_optimizer(self.inner_config.optimizer).name):
            raise DamagedCheckpoint(f"{folder} is of a run with the inner optimizer {name}, and this one's is {ours}")
        self.optimizer.load(inner, inner_steps)
        self.outer.params.copy_(tensors["outer.params"])
        self.outer.momentum.copy_(tensors["outer.momentum"])
        unflatten(self.layout, tensors["local"], self.parameters)
        self.sent, self.offered = tensors.get("sent"), None

    def _choose_microbatch(self, tokens: Tensor) -> int:
        """By trial where running out of memory is an error that can be caught, by forecast elsewhere."""
        if self.device.type == "cuda":
            return largest_that_fits(even_microbatches(tokens.shape[0]), lambda size: self._trial(tokens[:size]))
        needs = self._forecast()
        left = free_bytes(self.device, self.runtime.memory_bytes) - needs.gradient_bytes - needs.cast_bytes
        left -= 0 if self.optimizer.steps else needs.optimizer_bytes + needs.offloaded_bytes
        return choose_microbatch(
            self.model.config,
            tokens.shape[0],
            left,
            self.runtime.compute_bytes,
            checkpoint_layers=self.runtime.save.checkpoint_layers,
        )

    def _trial(self, tokens: Tensor) -> None:
        """The passes of a step on these tokens, beside all that will lie in memory then. Raises torch.OutOfMemoryError."""
        ballast = torch.empty(self._missing_state(), dtype=torch.uint8, device=self.device)
        try:
            for _ in range(2):  # the second finds the gradients of the first in its way, as later microbatches do
                backward_pass(self._forward, tokens, self.inner_config.z_loss, 1.0, self.runtime.autocast)
        finally:
            del ballast
            self.optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _missing_state(self) -> int:
        """Bytes of inner state that the first step will make on the device."""
        return 0 if self.optimizer.steps else self._forecast().optimizer_bytes

    def _forecast(self) -> MemoryForecast:
        spec = parse_optimizer(self.inner_config.optimizer)
        return forecast(self.model.config, spec, self.runtime.save, compute_bytes=self.runtime.compute_bytes)
