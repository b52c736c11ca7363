"""The model that the benchmarks train, and its training without a node."""

import argparse

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from farflung.sims.bench_node import OUTER
from farflung.training import presets
from farflung.training.corpus import python_documents
from farflung.training.data import TokenWindows, text_dataset
from farflung.training.inner import InnerConfig
from farflung.training.order import SampleOrder
from farflung.training.replica import Replica
from farflung.training.schedule import Schedule
from farflung.training.tokenizer import ByteTokenizer

SCHEDULE = Schedule(peak=1e-3, warmup_steps=100, total_steps=10_000)


def make_training(
    arguments: argparse.Namespace, schedule: Schedule = SCHEDULE
) -> tuple[Replica, TokenWindows, SampleOrder]:
    """Model, data and order: the same for nodes and bare loops."""
    tokenizer = ByteTokenizer()
    config = presets.preset(arguments.preset, vocab_size=tokenizer.vocab_size)
    dataset = text_dataset(python_documents(), tokenizer, config.seq_len)
    inner = InnerConfig(schedule=schedule)
    replica = Replica(config, inner, OUTER, seed=0)
    return replica, dataset, SampleOrder(num_samples=dataset.num_samples, seed=0, in_order=dataset.in_order)


class BareLoop:
    """What anybody would write in PyTorch; a step is `gradients` and then `update`."""

    def __init__(self, replica: Replica, dataset: TokenWindows, order: SampleOrder) -> None:
        self._model, self._inner = replica.model, replica.inner_config
        self._dataset, self._order = dataset, order
        self.parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": self._inner.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=self._inner.schedule.peak, betas=self._inner.betas, eps=self._inner.eps, fused=True
        )

    def gradients(self, first: int, batch: int) -> Tensor:
        """Leave the gradients of `batch` samples from number `first` on in the parameters; returns the loss, a scalar."""
        tokens = torch.from_numpy(np.stack([self._dataset.tokens(self._order.index(first + i)) for i in range(batch)]))
        loss = cross_entropy(self._model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self, step: int) -> None:
        """Clip the gradients, take the step, and forget them."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._inner.schedule.at(step)
        torch.nn.utils.clip_grad_norm_(self.parameters, self._inner.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
