"""The outer side of a run in which peers meet two by two (NoLoCo, `training.gossip`), in the place of rounds of all.

A peer sends the others of its group its pseudo-gradient and its outer parameters, both in fp32, and gets as much from each. After the last step all average
their outer parameters, in a butterfly, which the bytes of that step count.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from farflung.sims.quality_exchange import Traffic, check_finite, late_mean
from farflung.sims.quality_methods import Pairs
from farflung.sims.quality_resume import State
from farflung.training.flat import Layout
from farflung.training.gossip import pairs

FP32_BYTES = 4
VECTORS = 2
"""That travel, as long as the model each."""


class Trained(Protocol):
    """A worker, as rounds and meetings see it."""

    @property
    def flat(self) -> torch.Tensor:
        """Its parameters, fp32 [n] on its device; what is written there is trained on."""

    @property
    def layout(self) -> Layout:
        """Of these."""

    @property
    def device(self) -> torch.device:
        """Of these."""


class Meetings:
    """Stands where `quality_train.Rounds` does."""

    delay = 0
    """Steps that an exchange may take."""

    def __init__(self, outer: Pairs, workers: Sequence[Trained], *, last: int) -> None:
        self._outer, self._workers, self._last = outer, workers, last
        self._params = [workers[0].flat.cpu().clone() for _ in workers]
        self._momenta = [torch.zeros_like(params) for params in self._params]
        self._members = [number.to_bytes(4, "big") for number in range(len(workers))]
        self.traffic = Traffic(self._params[0].numel(), last)
        self._cosines: list[float] = []

    def after(
        self,
        step: int,  # steps done since the meetings began, from 1
        *,
        outer_lr: float | None = None,  # of no use here
    ) -> None:
        """Do what is due after this step."""
        actions = self._outer.timetable.after(step, self._last)
        for exchange in (*actions.sends, *actions.flush):
            for group in pairs(self._members, exchange.version.to_bytes(8, "big")):
                self._meet([self._members.index(member) for member in group], step)
        if step == self._last:
            peers = len(self._workers)
            self.traffic.step_bytes[step - 1] += 2 * 2 * FP32_BYTES * self._params[0].numel() * (peers - 1) / peers

    def params(self) -> torch.Tensor:
        """The mean of all outer parameters, fp32 [n]."""
        return torch.stack(self._params).mean(dim=0)

    def cosine(self) -> float | None:
        """Between two peers' pseudo-gradients who met, mean over the second half of the meetings."""
        return late_mean(self._cosines)

    def residual(self) -> float | None:
        """Nothing is held back."""
        return None

    def state(self) -> State:
        """Everything that `after` changes, as it is kept and not copied."""
        return {
            "params": self._params,
            "momenta": self._momenta,
            "step_bytes": self.traffic.step_bytes,
            "cosines": self._cosines,
        }

    def load(self, state: State) -> None:
        """Go on from what `state` gave."""
        self._params, self._momenta = state["params"], state["momenta"]
        self.traffic.step_bytes, self._cosines = state["step_bytes"], state["cosines"]

    def _meet(self, group: Sequence[int], step: int) -> None:
        outers = [self._params[m] for m in group]
        deltas = [outer - self._workers[m].flat.cpu() for m, outer in zip(group, outers, strict=True)]
        check_finite(deltas, step)
        mean_update, mean_params = torch.stack(deltas).mean(dim=0), torch.stack(outers).mean(dim=0)
        if len(group) > 1:
            self._cosines.append(float(torch.cosine_similarity(deltas[0], deltas[1], dim=0)))
        for m in group:
            moved = self._outer.rule.step(self._params[m], self._momenta[m], mean_update, mean_params)
            self._params[m], self._momenta[m] = moved
            self._workers[m].flat.copy_(self._params[m])
        sent = len(group) * (len(group) - 1) * VECTORS * FP32_BYTES * mean_params.numel()
        self.traffic.step_bytes[step - 1] += 2 * sent / len(self._workers)
