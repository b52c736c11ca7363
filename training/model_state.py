"""What training needs of the model that one peer holds, the whole or a stage of it: the live parameters on their device,
the inner optimiser, and the outer state; saved and loaded together.

Whoever takes the inner steps builds on it: `replica` computes the gradients itself, `stage_replica` gets them from the pipeline.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from farflung.training.checkpoint import Fact, read_state, write_state
from farflung.training.coupled import Coupled, Offered
from farflung.training.errors import DamagedCheckpoint
from farflung.training.flat import flatten, host_buffer, unflatten
from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.inner_optimizer import PREFIX
from farflung.training.model import Decoder, ModelConfig, everything
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import no_room
from farflung.training.rules import OuterRule
from farflung.training.runtime import Runtime

SENT_FROM = "sent_from"
"""In a saved state's facts: the element at which begins what was in flight."""


def save_fresh(folder: Path, params: Tensor, inner: InnerConfig) -> None:
    """What `ModelState.save` writes of a model with these parameters, fp32 [n], before its first step; without room for one in memory. Raises OSError."""
    tensors = {"outer.params": params, "outer.momentum": torch.zeros_like(params), "local": params.clone()}
    write_state(folder, tensors, _facts(0, inner))


def _facts(inner_steps: int, inner: InnerConfig) -> dict[str, Fact]:
    return {"inner_steps": inner_steps, "inner_optimizer": parse_optimizer(inner.optimizer).name}


class ModelState(Coupled):
    """See the module. Not for several threads at once."""

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        outer: OuterRule,
        *,
        seed: int,  # of the initial parameters of the whole model, the same for all peers of a swarm
        runtime: Runtime | None = None,  # CPU in fp32 when not given
        mix: float | None = None,  # see `training.coupled`
        chunk_bytes: int = 1 << 20,  # of one chunk of outer state
        order: Sequence[str] | None = None,  # of the flat vector, see `flat.Layout`
        held: Callable[[str], bool] = everything,  # what of the model this peer has, see `Decoder`
    ) -> None:
        self.runtime = Runtime() if runtime is None else runtime
        device = torch.device(self.runtime.device)
        with no_room("the model", device):
            self.model = Decoder(model, seed=seed, held=held).to(device)
        self.model.model.checkpoint_layers = self.runtime.save.checkpoint_layers
        if self.runtime.compile:
            for layer in self.model.model.layers:  # one layer's code serves them all; a whole model took minutes
                layer.compile()
        super().__init__(self.model, outer, device=device, mix=mix, chunk_bytes=chunk_bytes, order=order)
        self.inner_config = inner
        self.optimizer = make_optimizer(self.model, inner, self.runtime.save.inner_state)

    @contextmanager
    def outer_parameters(self) -> Iterator[Decoder]:
        """The model with the outer parameters in it; at the end the local ones come back, to the bit."""
        local = flatten(self.layout, self.parameters, host_buffer(self.num_parameters, self.device))
        unflatten(self.layout, self.outer.params, self.parameters)
        try:
            yield self.model
        finally:
            unflatten(self.layout, local, self.parameters)

    def save(self, folder: Path, more: Mapping[str, Fact] | None = None) -> None:
        """Write the whole state, with what is in flight and the facts in `more`, in place of an earlier one. Raises OSError."""
        tensors = {
            "outer.params": self.outer.params,
            "outer.momentum": self.outer.momentum,
            # beside a GPU the block that evaluations take, and torch keeps
            "local": flatten(self.layout, self.parameters, host_buffer(self.num_parameters, self.device)),
        }
        facts = {**(more or {}), **_facts(self.optimizer.steps, self.inner_config)}
        sent = self.sent  # as it is now: another thread may send something
        if sent is not None:
            tensors["sent"], facts[SENT_FROM] = sent.values, sent.start
        tensors |= self.optimizer.tensors()
        write_state(folder, tensors, facts)

    def load(self, folder: Path) -> Mapping[str, Fact]:
        """Bring back what `save` wrote for a model of this shape; training then goes on with the same bits. Returns all facts.

        Raises DamagedCheckpoint, with nothing changed, when it is missing, altered or of another model; NotEnoughMemory.
        """
        tensors, facts = read_state(folder)
        inner = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
        sent, sent_from = tensors.pop("sent", None), facts.get(SENT_FROM)
        wrong = [t for t in tensors.values() if t.shape != (self.num_parameters,) or t.dtype != torch.float32]
        if sent is not None and (sent.dim() != 1 or sent.dtype != torch.float32):
            wrong.append(sent)
        match facts:
            case {"inner_steps": int(inner_steps), "inner_optimizer": str(name)} if not wrong:
                pass
            case _:
                raise DamagedCheckpoint(f"{folder} does not hold the tensors of this model")
        match sent, sent_from:
            case None, None:
                in_flight = None
            case Tensor(), int(start) if 0 <= start < start + sent.numel() <= self.num_parameters:
                in_flight = Offered(start, start + sent.numel(), sent)
            case _:
                raise DamagedCheckpoint(f"{folder} does not hold what this model can have in flight")
        if set(tensors) != {"outer.params", "outer.momentum", "local"}:
            raise DamagedCheckpoint(f"{folder} does not hold the tensors of this model")
        if name != (ours := parse_optimizer(self.inner_config.optimizer).name):
            raise DamagedCheckpoint(f"{folder} is of a run with the inner optimizer {name}, and this one's is {ours}")
        with no_room("the state of the inner optimiser", self.device):
            self.optimizer.load(inner, inner_steps)
        self.outer.params.copy_(tensors["outer.params"])
        self.outer.momentum.copy_(tensors["outer.momentum"])
        unflatten(self.layout, tensors["local"], self.parameters)
        self.sent, self.offered = in_flight, None
        return facts
