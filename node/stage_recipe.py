"""From the recipe of a swarm to that of one of its stages: a chain of its own over the stage's slice of the parameters.

All of `recipe` holds with the stage in the place of the model: its outer state, fragments and codecs are those of the slice, its settings are
bound to the stage's life (`protocol.lives`), and its chain is founded by whoever that names.

The ledger of stage 0 hands out samples, as in a replica swarm. In the other stages nobody has samples: there it hands out *tickets*, one for each
sample that passes through a peer, and only how many of them a contribution claims means anything: its weight. So the weight of a contribution
is the number of tokens that its gradients came from, in every stage, by the same rules.
"""

import math
from dataclasses import dataclass, replace

from farflung.compression.policy import parse_policy
from farflung.node.disk import needed_bytes
from farflung.node.machine import fit_memory
from farflung.node.recipe import Recipe, last_codec
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_step import MOST_WAITING, Service
from farflung.node.terms import Terms
from farflung.protocol.accord import FEWEST
from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import CHUNK_BYTES
from farflung.protocol.lives import Life, group_of
from farflung.protocol.manifest_sections import PipelineSpec
from farflung.protocol.settings import Settings
from farflung.training.data import Dataset
from farflung.training.memory import Beside, MemoryOptions, forecast
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.order import SampleOrder
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_rules import Rules
from farflung.training.pipeline_slice import StageSlice, num_ends
from farflung.training.runtime import Runtime
from farflung.training.stage_replica import StageReplica

HOMES = 2
"""Data nodes whose microbatches a plan brings to one peer, which sums up apart for each and forecasts memory for it: the fewest that outlive the loss of one."""

OPEN_HOMES = 4
"""The same where whoever sends chooses the peer: then all data nodes of a step may come to it."""

ROOM = 2
"""Shadows of the largest stage that a peer has memory for: four bytes a parameter each (`shadows`)."""

MOST_HOLDERS = 2
"""Of our own stage's shadow, for whom we remember what they have, as much each: one, and one that takes it over."""

NO_TABLE = 2
"""Rows of an embedding that is not there, for forecasts: the fewest that a model's shape may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecipe:
    """See the module."""

    whole: Recipe
    """Of the swarm."""
    own: Recipe
    """The same for the stage's parameters; its settings are not those of the stage's chain."""
    part: StageSlice

    @property
    def pipeline(self) -> PipelineSpec:
        return self.whole.manifest.pipeline

    @property
    def stage(self) -> int:
        return self.part.stage

    @property
    def samples_per_microbatch(self) -> int:
        return self.whole.manifest.samples_per_step // self.pipeline.microbatches

    @property
    def tokens_per_microbatch(self) -> int:
        return self.samples_per_microbatch * self.whole.model.seq_len

    def settings(self, life: Life) -> Settings:
        """Of the stage's chain in that life."""
        own = self.own.settings()
        stages = self.pipeline.stages
        rules = replace(
            own.rules,
            stages=stages if self.stage == 0 else 1,
            accord=stages if self.stage > 0 and stages >= FEWEST else 0,
            inherits=self.stage == 0 and life.number > 0,
            since=life.since,
        )
        return replace(own, swarm=group_of(self.whole.swarm, life), founder=life.founder, rules=rules)

    def terms(self, life: Life) -> Terms:
        """For a peer of that chain."""
        return replace(self.own.terms(), settings=self.settings(life))

    def rules(self) -> Rules:
        """That every plan of a step must keep: so many visits, in ascending order but for so many swaps of neighbours, no stage left out much more
        often than others, and no more data nodes to a peer than it has memory for."""
        pipeline = self.pipeline
        swaps = 2 if pipeline.has_twins else pipeline.swaps
        return Rules(
            visits=pipeline.visits,
            max_jump=pipeline.stages,
            max_swap=min(1, swaps),
            max_swaps=swaps,
            max_swap_sum=swaps,
            least_share=pipeline.least_visits,
            most_homes=self._homes,
        )

    def droppable(self) -> Droppable:
        """What a route that keeps these rules may lose when its peers do not do their hops."""
        return Droppable.of_routes(self.pipeline.visits, self.pipeline.stages, self.rules().max_jump)

    @property
    def beside(self) -> Beside:
        """What a peer of the stage holds in memory that a replica does not: residuals, and for shadows those that it may hold and those that others
        were given (`shadows`), or exact copies (`exact`); the sums of a step's gradients, apart for each data node; and in each slot an input and a gradient (`stage_server`): with inputs that wait for
        slots where routes are dynamic, else as many again for what a lost peer had in its own (`Worklist`)."""
        boundary_bytes = 4 * self.tokens_per_microbatch * self.whole.model.dim
        in_slot = 3 if self.pipeline.dynamic else 4 if self.stage else 2  # a data node takes over from nobody
        return Beside(
            copies=self.whole.manifest.feedback.directions + self._num_copies,
            sums=min(self._homes, self.pipeline.microbatches) if self.stage else 1,  # a data node has its own only
            kept_bytes=in_slot * self.pipeline.slots * boundary_bytes,
        )

    @property
    def _homes(self) -> int:
        """Whose microbatches a plan may bring to a peer."""
        return OPEN_HOMES if self.pipeline.dynamic else HOMES

    @property
    def _num_copies(self) -> int:
        """Of stages, in host memory, in vectors of our own size."""
        if not self.pipeline.by_rule:
            return (
                math.ceil(ROOM * self._largest / self.own.num_parameters) + MOST_HOLDERS if self.pipeline.shadows else 0
            )
        if self.stage in (
            0,
            1,
            self.pipeline.stages - 1,
        ):  # of the ends: the one that is kept, and the next one on its way
            return math.ceil(2 * num_ends(self.whole.model) / self.own.num_parameters)
        return 1  # of our layers, for who asks

    @property
    def _largest(self) -> int:
        """Parameters of the stage that has most."""
        model, sizes = self.whole.model, self.part.sizes
        slices = [StageSlice(sizes, stage) for stage in range(len(sizes))]
        return max(sum(math.prod(shape) for _, shape in one.shapes(model)) for one in slices)

    def shape(self) -> ModelConfig:
        """A model of about the memory that the stage takes."""
        model = self.whole.model
        rows = model.vocab_size if self.stage == 0 else NO_TABLE
        return replace(model, num_layers=len(self.part.layers), vocab_size=rows)

    def fit(self, runtime: Runtime, save_memory: str = "auto") -> Runtime:
        """How to hold the stage here, forecast before anything is allocated. Raises ConfigError when it does not fit."""
        inner, batch = self.whole.inner, self.samples_per_microbatch
        return fit_memory(self.shape(), inner, batch, runtime, save_memory, beside=self.beside, divisible=False)

    def disk_bytes(self, options: MemoryOptions) -> int:
        """About what a peer of the stage keeps on its disk."""
        needs = forecast(self.shape(), parse_optimizer(self.whole.inner.optimizer), options, beside=self.beside)
        return needed_bytes(needs.checkpoint_bytes, self.own.mean_bytes)

    def learner(self, dataset: Dataset | None, runtime: Runtime) -> StageLearner:
        """The stage on this machine; `dataset` at data nodes. Blocks."""
        manifest = self.whole.manifest
        replica = StageReplica(
            self.whole.model,
            self.part,
            self.whole.inner,
            self.whole.outer,
            seed=manifest.model.init_seed,
            runtime=runtime,
            mix=self.whole.mix,
            chunk_bytes=CHUNK_BYTES,
        )
        if dataset is None:
            return StageLearner(replica, None)
        order = SampleOrder(
            num_samples=manifest.data.num_samples, seed=manifest.data.order_seed, in_order=dataset.in_order
        )
        return StageLearner(replica, (dataset, order))

    def service(self, learner: StageLearner) -> Service:
        """How the stage is served to others."""
        model = self.whole.model
        return Service(
            forward=_boundary("forward_codec", self.pipeline.forward_codec, model.dim),
            backward=_boundary("backward_codec", self.pipeline.backward_codec, model.dim),
            vocab_size=model.vocab_size,
            seq_len=model.seq_len,
            device=learner.replica.device,
            # as many again as it may hold: beyond that it is full, and whoever sends has a choice
            most_waiting=self.pipeline.slots if self.pipeline.dynamic else MOST_WAITING,
        )


def stage_recipe(whole: Recipe, stage: int) -> StageRecipe:
    """What the swarm's recipe means for one stage. Raises ConfigError naming what this version does not know."""
    manifest = whole.manifest
    pipeline = manifest.pipeline
    if not 0 <= stage < pipeline.stages:
        raise ConfigError(f"swarm {manifest.name!r} has stages 0 to {pipeline.stages - 1}; there is no stage {stage}")
    part = StageSlice(pipeline.sizes(whole.model.num_layers), stage)
    tensors = tuple(part.shapes(whole.model))
    for key, spec in (("forward_codec", pipeline.forward_codec), ("backward_codec", pipeline.backward_codec)):
        _boundary(key, spec, whole.model.dim)
    own = replace(
        whole,
        tensors=tensors,
        uplink=parse_policy(manifest.uplink_codec).resolve(tensors),
        downlink=parse_policy(manifest.downlink_codec).resolve(tensors),
        last=last_codec(manifest, tensors),
    )
    return StageRecipe(whole=whole, own=own, part=part)


def _boundary(key: str, spec: str, width: int) -> Boundary:
    try:
        return Boundary.parse(spec, width)
    except ValueError as error:
        raise ConfigError(f"pipeline.{key} = {spec!r}: {error}") from error
