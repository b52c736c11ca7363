"""Many runs of one tier at a time on a GPU: the workers of all of them are one batched model.

Alone, a model of half a million parameters keeps a GPU waiting for its next kernel, and processes that share the GPU wait for each other: on an H100 five of
them took 115 s for five runs of the tier nightly. As four fleets of 7 to 11 runs, 36 took 190 s, beside tests. Here a matrix product is one of all workers, [W, tokens, d] times [W, d, k], and so is every other
operation, so that a step of 64 workers has as many kernels as a step of one. Workers do not touch each other: each has its own
parameters, learning rate, tokens, and norm of gradients.

The mathematics is that of `training.model`, `training.muon` and torch's AdamW, written out for a further dimension; a test holds them together.
Rounds are `quality_train`'s own. Data-parallel training is done as what it is here: workers that average their gradients.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.sims.batches import batch_of
from farflung.sims.quality_meetings import Meetings
from farflung.sims.quality_methods import Inner, Method
from farflung.sims.quality_runs import Run
from farflung.sims.quality_tiers import Tier
from farflung.sims.quality_train import Outcome, Progress, Rounds, corpus, diverged, finished, rounds_of
from farflung.training.errors import NonFinite
from farflung.training.flat import Layout, Slot
from farflung.training.inner import InnerConfig
from farflung.training.model import Decoder, Rotary
from farflung.training.muon import ITERATIONS, MOMENTUM, RMS_OF_ADAMW, orthogonalise, products_dtype
from farflung.training.optimizers import TABLES
from farflung.training.order import SampleOrder
from farflung.training.presets import num_parameters
from farflung.training.schedule import Schedule

MOST_RUNS = 40
"""Of a fleet."""
MOST_SIZES = 64
"""Of fleets in one process, each of which is compiled for."""
MOST_PARAMETERS = 4_000_000
"""Of a model: larger ones keep a GPU busy one at a time."""
OF_A_LAYER = (
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Weights, as a layer takes them."""


def fits(method: Method, tier: Tier) -> bool:
    """Whether runs of this method are made in fleets."""
    small = num_parameters(tier.model) <= MOST_PARAMETERS and not tier.model.qk_norm
    return tier.device == "cuda" and not tier.bf16 and method.inner != "gradient" and small


def fleets(runs: Sequence[Run], jobs: int = 1) -> list[list[Run]]:
    """Runs that may be trained together, in one fleet for each of so many processes where that can be: as even as they come, `MOST_RUNS` at most."""
    kinds: dict[tuple[Tier, Inner], list[Run]] = {}
    for run in runs:
        kinds.setdefault((run.tier, run.method.inner), []).append(run)

    def pieces(most: int) -> list[int]:
        return [-(-len(some) // most) for some in kinds.values()]

    most = next((size for size in range(1, MOST_RUNS) if sum(pieces(size)) <= jobs), MOST_RUNS)
    return [
        list(some[index * len(some) // count : (index + 1) * len(some) // count])
        for some, count in zip(kinds.values(), pieces(most), strict=True)
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker of a fleet, as rounds see it."""

    flat: Tensor
    """fp32 [n]: a row of the fleet's."""
    layout: Layout

    @property
    def device(self) -> torch.device:
        return self.flat.device


class Fleet:
    """Workers with a row of everything each; see the module."""

    def __init__(
        self,
        tier: Tier,
        inner: Inner,
        seeds: Sequence[int],  # of each worker's initial parameters
        *,
        compiled: bool | None = None,  # None: on a GPU
    ) -> None:
        self.tier, self.inner = tier, inner
        self.config = InnerConfig(schedule=Schedule(peak=1.0, kind="constant"))
        models = {seed: Decoder(tier.model, seed=seed) for seed in set(seeds)}
        self.layout = Layout(models[seeds[0]])
        flats = {seed: torch.cat([p.detach().view(-1) for p in model.parameters()]) for seed, model in models.items()}
        self.flat = torch.stack([flats[seed] for seed in seeds]).to(tier.device)
        """fp32 [W, n]."""
        self._rotary = Rotary(tier.model).to(tier.device)
        self._sizes = [slot.shape.numel() for slot in self.layout.slots]
        self._first, self._second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self._steps = 0
        decays = torch.tensor([len(slot.shape) >= 2 for slot in self.layout.slots], device=tier.device)
        hidden = torch.tensor([inner == "muon" and _is_hidden(slot) for slot in self.layout.slots], device=tier.device)
        sizes = torch.tensor(self._sizes, device=tier.device)
        self._decay = self.config.weight_decay * decays.float().repeat_interleave(sizes)  # [n]
        self._hidden = hidden.repeat_interleave(sizes)  # [n]: what Muon moves
        self._by_shape: dict[torch.Size, list[Slot]] = {}
        for slot in self.layout.slots:
            if inner == "muon" and _is_hidden(slot):
                self._by_shape.setdefault(slot.shape, []).append(slot)
        self._layer: Callable[..., Tensor] = self._plain_layer
        self._move: Callable[[Tensor, Tensor, Tensor, Tensor], None] = self._adamw
        if self.flat.is_cuda if compiled is None else compiled:
            torch._dynamo.config.recompile_limit = MOST_SIZES
            self._layer = torch.compile(self._plain_layer, dynamic=False)
            self._move = torch.compile(self._adamw, dynamic=False)

    def workers(self) -> list[FleetWorker]:
        """The workers."""
        return [FleetWorker(flat, self.layout) for flat in self.flat]

    def step(
        self,
        tokens: Tensor,  # int64 [W, batch, seq_len + 1], on the fleet's device
        lrs: Tensor,  # fp32 [W]
        averaged: Tensor,  # bool [W / M, M]: workers of a run that train as one, on the mean of their gradients
    ) -> tuple[Tensor, Tensor]:  # [W] each: losses before the step, and norms of gradients before clipping
        """One inner step of all workers."""
        losses, gradients = self._gradients(self.flat, tokens)
        with torch.no_grad():
            of_runs = gradients.view(*averaged.shape, -1)
            gradients = torch.where(averaged[..., None], of_runs.mean(dim=1, keepdim=True), of_runs).flatten(0, 1)
            norms = gradients.norm(dim=1)
            gradients *= (self.config.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)[:, None]
            self._steps += 1
            beta1, beta2 = self.config.betas
            bias = torch.tensor([1 - beta1**self._steps, 1 - beta2**self._steps], device=self.flat.device)
            if self.inner == "muon":
                updates = self._muon(gradients)
            self._move(gradients, lrs[:, None], bias, ~self._hidden)
            if self.inner == "muon":
                self._move_hidden(updates, lrs)
        return losses, norms

    def evaluate(
        self,
        params: Tensor,  # fp32 [R, n], on the fleet's device
        windows: Tensor,  # int64 [k, seq_len + 1], CPU
    ) -> Tensor:  # float64 [R], CPU
        """Mean loss in nats per token of each of these models."""
        total = torch.zeros(len(params), dtype=torch.float64)
        with torch.no_grad():
            for piece in torch.split(windows, self.tier.microbatch):
                here = piece.to(params.device).expand(len(params), *piece.shape)
                total += self._losses(params, here, self._plain_layer).double().cpu() * len(piece)
        return total / len(windows)

    def _gradients(self, flat: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        leaf = flat.detach().requires_grad_()
        total = torch.zeros(len(flat), device=flat.device)
        for piece in torch.split(tokens, self.tier.microbatch, dim=1):
            losses = self._losses(leaf, piece, self._layer)
            share = piece.shape[1] / tokens.shape[1]
            (losses.sum() * share).backward()  # type: ignore[no-untyped-call]
            total += losses.detach() * share
        assert leaf.grad is not None
        return total, leaf.grad

    def _losses(self, flat: Tensor, tokens: Tensor, layer: Callable[..., Tensor]) -> Tensor:  # [W]
        """As `Decoder` and `next_token_loss`, for [W, n] parameters and [W, B, T + 1] tokens."""
        shape = self.tier.model
        parts = torch.split(flat, self._sizes, dim=1)
        p = {s.name: part.view(-1, *s.shape) for s, part in zip(self.layout.slots, parts, strict=True)}
        inputs, targets = tokens[:, :, :-1], tokens[:, :, 1:]
        table = p["model.embed_tokens.weight"]  # [W, V, D]
        offsets = torch.arange(len(flat), device=flat.device)[:, None, None] * table.shape[1]
        x = F.embedding(inputs + offsets, table.reshape(-1, table.shape[2]))  # [W, B, T, D]
        for number in range(shape.num_layers):
            x = layer(x, *(p[f"model.layers.{number}.{name}.weight"] for name in OF_A_LAYER))
        x = _norm(x.flatten(1, 2), p["model.norm.weight"], shape.norm_eps)
        logits = torch.bmm(x, p.get("lm_head.weight", table).mT)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), reduction="none")
        return losses.view(len(flat), -1).mean(dim=1)

    def _plain_layer(
        self,
        x: Tensor,  # [W, B, T, D]
        *weights: Tensor,  # `OF_A_LAYER`, [W, ...] each
    ) -> Tensor:
        before, wq, wk, wv, wo, between, gate, up, down = weights
        W, B, T, _ = x.shape
        shape = self.tier.model
        groups = shape.num_heads // shape.num_kv_heads

        def heads(y: Tensor) -> Tensor:  # [W * B, heads, T, E]
            return y.view(W * B, T, -1, shape.head_dim).transpose(1, 2)

        x = x.flatten(1, 2)
        y = _norm(x, before, shape.norm_eps)
        q, k, v = (heads(torch.bmm(y, weight.mT)) for weight in (wq, wk, wv))
        q, k = self._rotary(q), self._rotary(k)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.bmm(y.transpose(1, 2).reshape(W, B * T, -1), wo.mT)
        y = _norm(x, between, shape.norm_eps)
        x = x + torch.bmm(F.silu(torch.bmm(y, gate.mT)) * torch.bmm(y, up.mT), down.mT)
        return x.view(W, B, T, -1)

    def _adamw(self, gradients: Tensor, lrs: Tensor, bias: Tensor, moved: Tensor) -> None:
        """torch's AdamW, of the elements that it moves."""
        beta1, beta2 = self.config.betas
        self._first.copy_(torch.where(moved, self._first.lerp(gradients, 1 - beta1), self._first))
        self._second.copy_(torch.where(moved, self._second * beta2 + gradients * gradients * (1 - beta2), self._second))
        decayed = self.flat * (1 - lrs * self._decay)
        scale = (self._second / bias[1]).sqrt() + self.config.eps
        self.flat.copy_(torch.where(moved, decayed - lrs * (self._first / bias[0]) / scale, self.flat))

    def _muon(self, gradients: Tensor) -> dict[torch.Size, Tensor]:
        """Orthogonal updates [W, k, rows, columns] of the matrices of each shape; momentum lies where AdamW has its first moment."""
        lerped = self._first.lerp(gradients, 1 - MOMENTUM)
        self._first.copy_(torch.where(self._hidden, lerped, self._first))
        ahead = gradients.lerp(self._first, MOMENTUM)
        dtype = products_dtype(ahead.device)
        return {
            shape: orthogonalise(torch.stack([self._of(ahead, slot) for slot in slots], dim=1), ITERATIONS, dtype)
            for shape, slots in self._by_shape.items()
        }

    def _move_hidden(self, updates: dict[torch.Size, Tensor], lrs: Tensor) -> None:
        rates = lrs[:, None, None]
        for shape, slots in self._by_shape.items():
            scale = RMS_OF_ADAMW * max(shape) ** 0.5
            for slot, update in zip(slots, updates[shape].unbind(dim=1), strict=True):
                weight = self._of(self.flat, slot)
                weight.mul_(1 - rates * self.config.weight_decay).sub_(rates * scale * update.to(weight.dtype))

    def _of(self, flat: Tensor, slot: Slot) -> Tensor:  # [W, rows, columns]
        return flat[:, slot.start : slot.stop].view(-1, *slot.shape)


def train_fleet(
    runs: Sequence[Run],  # of one tier and inner optimiser
    progress: Progress = lambda step, loss: None,
) -> list[tuple[Outcome, float]]:  # with seconds, of which each has its share
    """What `quality_train.train` makes of each, side by side. Raises DataError."""
    started = time.monotonic()
    tier, inner = runs[0].tier, runs[0].method.inner
    peers, device = tier.peers, torch.device(tier.device)
    data = corpus(tier)
    fleet = Fleet(tier, inner, [run.seed for run in runs for _ in range(peers)])
    each = fleet.workers()
    workers = [each[index * peers : (index + 1) * peers] for index in range(len(runs))]
    orders = {run.seed: SampleOrder(num_samples=data.num_samples, seed=run.seed) for run in runs}
    schedules = [Schedule(peak=run.lr, warmup_steps=tier.rise_steps, total_steps=tier.steps) for run in runs]
    whole = torch.tensor([run.method.whole_batch for run in runs], device=device)
    averaged = torch.ones(len(runs), peers, dtype=torch.bool, device=device)
    rounds: list[Rounds | Meetings | None] = [None] * len(runs)
    sound = [True] * len(runs)
    idle = torch.zeros(
        len(runs), peers, dtype=torch.bool
    )  # workers that a run has no use for: there is a row all the same
    for step in range(tier.steps):
        if step == tier.warm_steps:
            averaged = whole[:, None].expand(-1, peers)
            idle[:, 1:] = torch.tensor([run.method.outer is None and not run.method.whole_batch for run in runs])[
                :, None
            ]
            last = tier.steps - tier.warm_steps
            rounds = [rounds_of(run.method, some, last=last) for run, some in zip(runs, workers, strict=True)]
        batches = {seed: batch_of(data, order, step, tier.batch) for seed, order in orders.items()}
        tokens = torch.stack([share for run in runs for share in batches[run.seed].tensor_split(peers)])
        lrs = torch.tensor([schedule.at(step) for schedule in schedules]).repeat_interleave(peers)
        losses, norms = fleet.step(tokens.to(device, non_blocking=True), lrs.to(device), averaged)
        told = torch.stack([losses, norms]).cpu().view(2, len(runs), peers)
        finite = (told.isfinite() | idle).all(dim=2).all(dim=0).tolist()
        sound = [was and still for was, still in zip(sound, finite, strict=True)]
        for number, one in enumerate(rounds):
            if one is not None and sound[number]:
                try:
                    one.after(step + 1 - tier.warm_steps)
                except NonFinite:
                    sound[number] = False
        progress(step + 1, float(told[0][~idle].nanmean()))
    ends = [some[0].flat.cpu() if one is None else one.params() for some, one in zip(workers, rounds, strict=True)]
    windows = torch.from_numpy(data.heldout(tier.heldout))
    half = len(windows) // 2
    tuned, shown = (
        fleet.evaluate(torch.stack(ends).to(device), part).tolist() for part in (windows[:half], windows[half:])
    )
    seconds = (time.monotonic() - started) / len(runs)
    return [
        (finished(run.method, tier, tune, show, one) if still else diverged(tier), seconds)
        for run, tune, show, one, still in zip(runs, tuned, shown, rounds, sound, strict=True)
    ]


def _norm(
    x: Tensor,  # [W, k, D]
    weight: Tensor,  # [W, D]
    eps: float,
) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight[:, None, :]


def _is_hidden(slot: Slot) -> bool:
    """Whether Muon moves it."""
    return len(slot.shape) == 2 and not slot.name.startswith(TABLES)
