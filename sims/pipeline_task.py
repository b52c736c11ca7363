"""What `farflung bench pipeline` trains, on which network, and by which plans.

Twelve volunteers (`pipeline_networks.volunteers`) hold six stages of one layer, two peers each. Three plans carry the same twelve microbatches:

    full columns   every microbatch goes through all stages of its column (DT-FM's assignment and matchings)
    full routed    every microbatch goes through all stages, by searched routes
    skipping       every microbatch leaves two of the six stages out, by searched routes: SkipPipe's third

No peer holds more than three microbatches at a time, so six lanes run in all plans. Routes that skip need fewer slots, so beside the data nodes
peers have only two then: with three, routes could leave the slow stages out altogether, and these would learn nothing (SkipPipe's CC-d).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from farflung.sims.pipeline_model import LR, OPTIMIZER, model_of
from farflung.sims.pipeline_networks import Network, volunteers
from farflung.sims.stage_group import Far
from farflung.sims.stage_peer import Pace, World, key_of
from farflung.training.inner import InnerConfig
from farflung.training.model import ModelConfig
from farflung.training.pipeline_assignment import assign, columns
from farflung.training.pipeline_boundary import Boundary
from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_plan import Hop, Lane, Plan
from farflung.training.pipeline_routes import Routes, Task
from farflung.training.pipeline_rules import Rules, validate
from farflung.training.pipeline_search import Search, improve
from farflung.training.schedule import Schedule

COLUMNS, FULL, SKIPPING = "full columns", "full routed", "skipping"

BACKWARD, LOSS = 2.5, 0.5
"""Over a forward: a backward that computes its forward again; head and loss, both ways."""

MODEL = model_of(6)

_ASSIGNING = 10_000
_FULL_HOT = 0.05
"""As in `pipeline_compare`."""


@dataclass(frozen=True)
class BenchTask:
    """The defaults are the bench; tests take less."""

    seed: int = 0
    """Of the network, of the search, of the weights, and of the order of the samples."""
    model: ModelConfig = MODEL
    """One layer in each stage."""
    peers: int = 12
    batch: int = 8
    """Sequences of a microbatch."""
    microbatches: int = 12
    """Of a step."""
    visits: int = 4
    """Of a route that skips."""
    slots: int = 3
    layer_s: float = 0.04
    """What a forward takes at medium speed."""
    proposals: int = 100_000
    """Of each search."""
    target: float = 2.7
    """Held-out loss of the whole model, nats per byte, that training goes on to."""
    most_steps: int = 60
    """Then it ends all the same."""
    optimizer: str = OPTIMIZER
    lr: float = LR

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.batch * self.model.seq_len

    @cached_property
    def network(self) -> Network:
        """With messages of one byte, so that its rates can be read off."""
        return volunteers(self.peers, seed=self.seed, message_bytes=1.0, layer_s=self.layer_s)

    @property
    def up_bytes_per_s(self) -> tuple[float, ...]:
        """By peer."""
        return tuple(1.0 / row[0] for row in self.network.transmit_s)

    @cached_property
    def latency_s(self) -> tuple[tuple[float, ...], ...]:
        """From peer to peer, one way."""
        return tuple(
            tuple(0.0 if a == b else one for b, one in enumerate(row)) for a, row in enumerate(self.network.latency_s)
        )

    @property
    def far(self) -> Far:
        return Far(latency_s=self.latency_s, up_bytes_per_s=self.up_bytes_per_s)

    def costs(self, codec: str) -> Costs:
        """What a step should take: nothing in it is measured."""
        message_bytes = Boundary.parse(codec, self.model.dim).max_nbytes(self.tokens)
        return Costs(
            forward_s=(self.network.layer_s,) * self.model.num_layers,
            latency_s=self.latency_s,
            transmit_s=tuple((message_bytes / rate,) * self.peers for rate in self.up_bytes_per_s),
            backward=BACKWARD,
            loss=LOSS,
        )

    def plans(self) -> Mapping[str, Plan]:
        """By name: see the module."""
        costs, stages = self.costs("fp32"), self.model.num_layers
        groups = assign(costs, [self.peers // stages] * stages, proposals=_ASSIGNING, seed=self.seed)
        names = tuple(key_of(rank) for rank in range(self.peers))
        slots = (self.slots,) * self.peers
        whole = Task(
            peers=names, costs=costs, slots=slots, rules=Rules(visits=stages), num_microbatches=self.microbatches
        )
        free = Routes(whole, groups, random.Random(self.seed), near=True)
        improve(free, Search(proposals=self.proposals, seed=self.seed, hot=_FULL_HOT))
        lanes = self.slots * len(groups[0])
        others = -(-lanes * (self.visits - 1) // ((stages - 1) * len(groups[0])))
        tight = tuple(self.slots if peer in groups[0] else others for peer in range(self.peers))
        part = Routes(
            replace(whole, slots=tight, rules=Rules(visits=self.visits)), groups, random.Random(self.seed), near=True
        )
        improve(part, Search(proposals=self.proposals, seed=self.seed))
        found = {COLUMNS: self._columns(costs, groups, names, slots), FULL: free.plan(), SKIPPING: part.plan()}
        for plan in found.values():
            validate(plan)
        return found

    def _columns(self, costs: Costs, groups: list[list[int]], names: tuple[str, ...], slots: tuple[int, ...]) -> Plan:
        chains = columns(costs, groups)
        lanes = self.slots * len(chains)
        each, more = divmod(self.microbatches, lanes)
        routes = [
            tuple(Hop(stage, peer) for stage, peer in enumerate(chains[lane % len(chains)])) for lane in range(lanes)
        ]
        return Plan(
            peers=names,
            stages=tuple(map(tuple, groups)),
            lanes=tuple(Lane(route=route, microbatches=each + (lane < more)) for lane, route in enumerate(routes)),
            slots=slots,
        )

    def world(self, plan: Plan, *, codec: str = "fp32", learns: bool = False) -> World:
        """The stages of a plan, rehearsed at the speeds of the network."""
        schedule = Schedule(peak=self.lr, warmup_steps=5, kind="constant")
        inner = InnerConfig(schedule=schedule, optimizer=self.optimizer, weight_decay=0.0)
        return World(
            model=self.model,
            seed=self.seed,
            layers=(1,) * self.model.num_layers,
            stages=plan.stages,
            batch=self.batch,
            codec=codec,
            pace=Pace(forward_s=self.costs(codec).forward_s, backward=BACKWARD, loss=LOSS),
            inner=inner if learns else None,
        )
