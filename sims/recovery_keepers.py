"""What a method keeps while all is well, and what it makes of that when stages are lost.

A keeper sees the survivors' state and what peers that live hold for others, nothing else. Its bytes are payloads of
the codecs that a swarm would use, shadows' as the method says, and `WEIGHTS` for the exact copies of embedding, norm
and head that CheckFree's stages send their neighbours in each step, and for what its new peers are made of.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farflung.compression.hashing import random_seed
from farflung.compression.registry import parse_activation_codec, parse_codec
from farflung.sims.recovery_methods import NODES_OWN, Method
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.recovery_tiers import Tier
from farflung.training.errors import Unrecoverable
from farflung.training.recovery_checkfree import made, rule
from farflung.training.recovery_fit import Fit
from farflung.training.recovery_rules import drawn, interpolated

WEIGHTS = parse_codec("fp32")
BOUNDARY = "tokenint8(width={width})"
SOURCES = {"mean": 2, "fitted mean": 2, "copy": 1, "interpolation": 2, "random": 0}
"""Stages whose weights a new peer gets."""


@dataclass(kw_only=True, slots=True)
class Sent:
    """Bytes beside the pipeline's own."""

    kept: int = 0
    """To keep copies fresh."""
    recovered: int = 0
    """To new peers, from copies."""


class Keeper(Protocol):
    """See the module."""

    sent: Sent
    rungs: Counter[str]
    """How often a stage came back by what."""

    def after_step(self, pipeline: Pipeline, step: int) -> None:
        """Keep what is needed of the state after step `step`, from 1."""

    def recover(self, pipeline: Pipeline, lost: frozenset[int], step: int) -> None:
        """Replace the stages `lost`, which are lost already, before step `step`, from 0."""

    def close(self) -> None:
        """The run is over."""


def pipeline_nbytes(tier: Tier) -> int:
    """What all peers of a tier send in a step: outputs to the next hop, the last one to the data node, and gradients back, as
    8-bit integers (`BOUNDARY`, the safe choice)."""
    codec = parse_activation_codec(BOUNDARY.format(width=tier.model.dim))
    message = codec.max_nbytes(tier.sequences * tier.model.seq_len * tier.model.dim)
    return 2 * (tier.stages + tier.safe_ends) * tier.microbatches * message


class Neighbours:
    """All but ours: nothing is kept but the ends, by the data node's neighbours."""

    def __init__(self, method: Method, pipeline: Pipeline, *, seed: int) -> None:
        self._method, self._seed = method, seed
        self.sent, self.rungs = Sent(), Counter[str]()
        self._ends = pipeline.ends.flat.clone()

    def after_step(self, pipeline: Pipeline, step: int) -> None:
        """The ends' exact copy, every step, where they may be lost."""
        if not self._method.fails or pipeline.tier.safe_ends:
            return
        self._ends = pipeline.ends.flat.clone()
        self.sent.kept += WEIGHTS.max_nbytes(self._ends.numel())

    def recover(self, pipeline: Pipeline, lost: frozenset[int], step: int) -> None:
        """By the method's rule; anew where that fails."""
        survivors = {stage: vector.clone() for stage, vector in pipeline.survivors(lost).items()}
        norms = {stage: pipeline.stages[stage].norm for stage in survivors}
        for stage in sorted(lost):
            try:
                vector, rung = self._made(pipeline, stage, lost, survivors, norms, step)
            except Unrecoverable:
                vector, rung = self._drawn(pipeline, stage, step), "random"
            pipeline.replace(stage, vector, bump=rung != "random", rises=self._method.kind in NODES_OWN)
            if rung == "fitted mean":
                pipeline.fit(stage, Fit())
            self.rungs[rung] += 1
            self.sent.recovered += SOURCES[rung] * WEIGHTS.max_nbytes(vector.numel())
            if stage == 0 and not pipeline.tier.safe_ends:
                pipeline.replace_ends(self._ends)
                self.sent.recovered += WEIGHTS.max_nbytes(self._ends.numel())

    def close(self) -> None:
        """Nothing runs."""

    def _made(
        self,
        pipeline: Pipeline,
        stage: int,
        lost: frozenset[int],
        survivors: dict[int, Tensor],
        norms: dict[int, float | None],
        step: int,
    ) -> tuple[Tensor, str]:
        if self._method.kind == "random":
            return self._drawn(pipeline, stage, step), "random"
        if self._method.kind == "copy":
            nearest = stage - 1 if stage else 1
            if nearest in lost:
                return interpolated(survivors, stage), "interpolation"
            return survivors[nearest].clone(), "copy"
        if self._method.kind == "interpolation":
            return interpolated(survivors, stage), "interpolation"
        how = rule(self._method.checkfree, stage, len(pipeline.stages), lost)
        rung = "fitted mean" if self._method.kind == "fitted" else type(how).__name__.lower()
        return made(how, survivors, norms), rung

    def _drawn(self, pipeline: Pipeline, stage: int, step: int) -> Tensor:
        return drawn(pipeline.tier.model, pipeline.tier.layers, random_seed(self._seed, stage, step))
