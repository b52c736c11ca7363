"""A pipeline without replicas, in one process: stages with optimisers of their own, each of which can be lost for real.

A microbatch goes through the stages in the order it is given. Gradients are means over the microbatches, clipped
stage by stage; their norms before clipping are averaged over the steps, as CheckFree weighs by them. Losing a stage
overwrites all of its parameters with NaN and drops its optimiser and its norm, so a recovery that used anything of
what was lost would end in `NonFinite`. The peer of stage 0 is the data node: with it go the embedding, the final norm
and the head, the *ends*, unless somebody has a copy, or the tier keeps them safe.
"""

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from farflung.sims.recovery_tiers import Tier
from farflung.training.errors import NonFinite
from farflung.training.flat import Layout
from farflung.training.inner import InnerConfig, make_optimizer
from farflung.training.model import Decoder, next_token_loss
from farflung.training.recovery_checkfree import CheckFree, lr_factor, order, smoothed
from farflung.training.recovery_fit import Fit, fit_
from farflung.training.recovery_rise import risen
from farflung.training.schedule import Schedule

MAX_NORM = 1.0
"""Of a stage's gradient."""


class Part:
    """Some modules whose parameters are views of one flat vector, and their optimiser."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self.modules = modules
        self.layout = Layout(modules)
        self.parameters = list(modules.parameters())
        self.flat = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        for parameter, view in zip(self.parameters, self.layout.views(self.flat).values(), strict=True):
            parameter.data = view
        self.renew()

    def renew(self) -> None:
        """Begin with fresh moments; nobody has raised the learning rate."""
        config = InnerConfig(schedule=Schedule(peak=1.0, kind="constant"), betas=(0.9, 0.999), weight_decay=0.0)
        self.optimizer = make_optimizer(self.modules, config)
        self.norm: float | None = None
        """Moving average, before clipping; None before the first step."""
        self.steps_since_bump: int | None = None
        self.rises = False
        """Its learning rate does, over the first steps with these moments."""

    def lose(self) -> None:
        """Forget everything."""
        self.flat.fill_(math.nan)
        self.renew()

    def step(self, lr: float, checkfree: CheckFree) -> float:
        """Clip and step. Returns the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, MAX_NORM))
        self.norm = smoothed(checkfree, self.norm, norm)
        since = self.optimizer.steps if self.rises else None
        self.optimizer.step(lr * lr_factor(checkfree, self.steps_since_bump) * risen(since))
        self.optimizer.zero_grad()
        if self.steps_since_bump is not None:
            self.steps_since_bump += 1
        return norm


class Pipeline:
    """See the module."""

    def __init__(self, tier: Tier, checkfree: CheckFree, *, seed: int) -> None:
        self.tier, self.checkfree = tier, checkfree
        self.model = Decoder(tier.model, seed=seed)
        trunk = self.model.model
        tables = [trunk.embed_tokens, trunk.norm]
        self.ends = Part(nn.ModuleList(tables if self.model.lm_head is None else [*tables, self.model.lm_head]))
        layers, size = list(trunk.layers), tier.layers
        self.stages = [Part(nn.ModuleList(layers[s * size : (s + 1) * size])) for s in range(tier.stages)]
        self.boundaries: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By stage: the inputs and outputs of the last step, which its neighbours hold."""

    def copy(self) -> "Pipeline":
        """Another one in the same state."""
        other = Pipeline(self.tier, self.checkfree, seed=0)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            theirs.flat.copy_(mine.flat)
            state = {name: tensor.clone() for name, tensor in mine.optimizer.tensors().items()}
            theirs.optimizer.load(state, mine.optimizer.steps)
            theirs.norm, theirs.steps_since_bump, theirs.rises = mine.norm, mine.steps_since_bump, mine.rises
        other.boundaries = copy.copy(self.boundaries)
        return other

    @property
    def parts(self) -> list[Part]:
        """All stages, and the ends last."""
        return [*self.stages, self.ends]

    def step(
        self,
        tokens: Tensor,  # int64 [microbatches, sequences, seq_len + 1]
        *,
        step: int,  # of the run, for the message when it fails
        lr: float,
    ) -> float:
        """One step. Returns the mean loss before it. Raises NonFinite; the pipeline is then of no use."""
        total = 0.0
        self.boundaries = {stage: [] for stage in range(len(self.stages))}
        for number, piece in enumerate(tokens):
            visits = order(self.checkfree, len(self.stages), number)
            loss = next_token_loss(self._forward(piece[:, :-1], visits, keep=True), piece[:, 1:]) / len(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norms = [part.step(lr, self.checkfree) for part in self.parts]
        if not math.isfinite(total + sum(norms)):
            raise NonFinite(global_step=step, loss=total, grad_norm=max(norms))
        return total

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:  # int64 [k, seq_len + 1]
        """Mean loss in nats per token, with the stages in their order."""
        total = 0.0
        for piece in torch.split(windows, 64):
            logits = self._forward(piece[:, :-1], range(len(self.stages)), keep=False)
            total += float(next_token_loss(logits, piece[:, 1:])) * len(piece)
        return total / len(windows)

    def lose(self, lost: Iterable[int]) -> None:
        """The peers of these stages are gone, and what they kept of their neighbours' with them."""
        for stage in lost:
            self.stages[stage].lose()
            if self._has_ends(stage):
                self.ends.lose()

    def survivors(self, lost: Iterable[int]) -> dict[int, Tensor]:
        """The stages' vectors, fp32 [n], but for those that are lost."""
        gone = frozenset(lost)
        return {stage: part.flat for stage, part in enumerate(self.stages) if stage not in gone}

    def replace(self, stage: int, vector: Tensor, *, bump: bool, rises: bool = False) -> None:
        """Give a new peer these layers, fp32 [n], with fresh moments and, if so, a raised learning rate, or one that rises."""
        part = self.stages[stage]
        part.renew()
        part.flat.copy_(vector)
        part.steps_since_bump, part.rises = 0 if bump else None, rises

    def held_by(self, stage: int) -> Tensor:
        """What the peer of a stage has, fp32 [n], in the model's order: that of stage 0 the ends, too, unless they are safe."""
        if not self._has_ends(stage):
            return self.stages[stage].flat
        return torch.cat([parameter.detach().view(-1) for parameter in self._of_home()])

    def replace_all(self, stage: int, vector: Tensor, *, bump: bool, rises: bool) -> None:
        """As `replace`, by all that the peer of a stage has (`held_by`)."""
        if not self._has_ends(stage):
            self.replace(stage, vector, bump=bump, rises=rises)
            return
        for part in (self.stages[stage], self.ends):
            part.renew()
            part.rises = rises
        mine = self._of_home()
        for parameter, values in zip(mine, torch.split(vector, [one.numel() for one in mine]), strict=True):
            parameter.data.copy_(values.view_as(parameter))
        self.stages[stage].steps_since_bump = 0 if bump else None

    def _has_ends(self, stage: int) -> bool:
        return stage == 0 and not self.tier.safe_ends

    def _of_home(self) -> list[nn.Parameter]:
        mine = {id(parameter) for part in (self.stages[0], self.ends) for parameter in part.parameters}
        return [parameter for parameter in self.model.parameters() if id(parameter) in mine]

    def replace_ends(self, vector: Tensor) -> None:
        """Give a new data node its embedding, norm and head, with fresh moments."""
        self.ends.renew()
        self.ends.flat.copy_(vector)

    def fit(self, stage: int, config: Fit) -> tuple[float, float]:
        """Fit a stage that was replaced to its neighbours' last activations. Returns the error before and after."""
        part = self.stages[stage]
        return fit_(part.parameters, lambda x: self._stage(stage, x), self.boundaries[stage], config)

    def _forward(self, tokens: Tensor, visits: Sequence[int], *, keep: bool) -> Tensor:
        trunk = self.model.model
        x = trunk.embed_tokens(tokens)
        for stage in visits:
            output = self._stage(stage, x)
            if keep:
                self.boundaries[stage].append((x.detach(), output.detach()))
            x = output
        head = trunk.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return nn.functional.linear(trunk.norm(x), head.weight)

    def _stage(self, stage: int, x: Tensor) -> Tensor:
        for layer in self.stages[stage].modules:
            x = layer(x, self.model.model.rotary)
        return x
