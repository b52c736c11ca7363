"""What `farflung bench pipeline` measures on running processes: steps against the simulation, training to a loss, codecs, and losses of peers.

- *measured*: seconds from the beginning of a step at the first data node until the microbatches of the last one are home; the median of the steps but for the
  first, in which connections are dialled. *simulated*: `pipeline_simulate` of the same plan, from uplinks, distances and seconds of operations alone.
- *learning*: what the exchange of gradients among the two peers of each stage and the inner step add to a step.
- *to the target*: steps, and all their seconds with learning, until the held-out loss of the whole model is at the target, linearly between two
  evaluations, for which the clock stands still.
- *utilisation* of a peer: seconds in operations, as long as they are rehearsed to take, over the step.
- *bytes*: what the kernel says was acknowledged on the TLS connections of all peers, encryption and headers included, without what goes over libp2p (control);
  over the tokens of all messages. A boundary is crossed once each way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import fmean, median

import torch
from torch import Tensor

from farflung.protocol.route import live_hops
from farflung.sims.batches import batch_of
from farflung.sims.bench_workers import BenchError
from farflung.sims.pipeline_task import BenchTask
from farflung.sims.stage_group import Death, StageGroup, StepSeen
from farflung.training.data import Dataset
from farflung.training.model import Decoder, next_token_loss
from farflung.training.order import SampleOrder
from farflung.training.pipeline_plan import Hop, Kind, Op, Plan
from farflung.training.pipeline_simulate import Timeline, simulate
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

EVAL_EVERY = 3
"""Steps between two evaluations."""

WINDOWS = 192
"""Held-out windows of each."""

MOMENTS: Mapping[str, Callable[[int, int, int], Death]] = {
    "before its first forward": lambda peer, lane, hop: Death(rank=peer, before=Op(Kind.F, lane, hop)),
    "between forward and backward": lambda peer, lane, hop: Death(rank=peer, before=Op(Kind.B, lane, hop)),
    "after a backward": lambda peer, lane, hop: Death(rank=peer, after=Op(Kind.B, lane, hop)),
}
"""Of a step, for a peer that lane `lane` visits at hop `hop`: the first microbatch of a lane has its number."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFigures:
    """One plan; see the module."""

    plan: str
    codec: str
    simulated_s: float
    measured_s: float
    steps: int
    """That were measured, the first one not counted."""
    bytes_per_token_and_boundary: float
    utilisation: tuple[float, ...]
    """Measured, by peer."""
    utilisation_simulated: tuple[float, ...]
    late_percent: float
    """Operations for which this machine was too slow."""
    learning_s: float | None = None
    steps_to_target: float | None = None
    seconds_to_target: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """(seconds, held-out loss)"""
    computed: bool = False
    """To the target: not trained, but the steps of the other full plan, whose gradients are the same, times our seconds."""

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeathFigures:
    """A peer was killed in a step."""

    plan: str
    peer: int
    stage: int
    moment: str
    seconds: float
    times_normal: float
    rerouted: int
    """Microbatches that got another peer, or left the hop out."""
    shortened: int
    """Those of them that left it out."""
    cut: int
    """Microbatches of living data nodes that did not come home."""
    void: int
    """Microbatches of a data node that was killed: they count nowhere."""
    simulated_without_s: float | None
    """A step in which the other peer of the stage does everything from the beginning: what losing half of a stage costs by itself. None
    for a data node, whose microbatches nobody takes over."""


class Feed:
    """Batches of the embedded corpus in the order of a seed, and held-out windows."""

    def __init__(self, task: BenchTask) -> None:
        self._task = task
        self._data: Dataset = open_dataset("python", ByteTokenizer(), task.model.seq_len)
        self._order = SampleOrder(num_samples=self._data.num_samples, seed=task.seed)
        self._held_out = torch.from_numpy(self._data.heldout(WINDOWS))

    def batches(self, step: int) -> Tensor:
        """Int64 [microbatches, batch, seq_len + 1]."""
        size = self._task.microbatches * self._task.batch
        return batch_of(self._data, self._order, step, size).view(self._task.microbatches, self._task.batch, -1)

    @torch.no_grad()
    def loss(self, parameters: dict[str, Tensor]) -> float:
        """Of the whole model on the held-out windows, nats per byte."""
        model = Decoder(self._task.model, seed=0)
        model.load_state_dict(parameters)
        return float(next_token_loss(model(self._held_out[:, :-1]), self._held_out[:, 1:]))


def time_plan(
    group: StageGroup, task: BenchTask, feed: Feed, name: str, plan: Plan, *, codec: str = "fp32", steps: int = 3
) -> tuple[PlanFigures, Timeline]:
    """Steps without learning, and when the last one did what."""
    group.enter(task.world(plan, codec=codec))
    seen = [group.step(plan, feed.batches(number)) for number in range(steps)]
    return _figures(task, name, plan, codec, seen), seen[-1].ran


def train(
    group: StageGroup, task: BenchTask, feed: Feed, name: str, plan: Plan, say: Say
) -> tuple[PlanFigures, Timeline]:
    """Steps until the held-out loss is at the target, and when the last one did what."""
    group.enter(task.world(plan, learns=True))
    curve = [(0.0, feed.loss(group.parameters()))]
    seen: list[StepSeen] = []
    while curve[-1][1] > task.target and len(seen) < task.most_steps:
        for _ in range(EVAL_EVERY):
            seen.append(group.step(plan, feed.batches(len(seen)), number=len(seen)))
        curve.append((sum(step.learnt_s for step in seen), feed.loss(group.parameters())))
        say(f"{name}: step {len(seen)}, held-out loss {curve[-1][1]:.3f}")
    steps = seconds = None
    if curve[-1][1] <= task.target:
        (before_s, before), (after_s, after) = curve[-2:]
        share = (before - task.target) / (before - after)
        steps = len(seen) - EVAL_EVERY * (1.0 - share)
        seconds = before_s + share * (after_s - before_s)
    found = replace(
        _figures(task, name, plan, "fp32", seen),
        learning_s=median(step.learnt_s - step.seconds for step in seen[1:]),
        steps_to_target=steps,
        seconds_to_target=seconds,
        curve=tuple(curve),
    )
    return found, seen[-1].ran


def computed(columns: PlanFigures, full: PlanFigures) -> PlanFigures:
    """Columns to the target: the same gradients as other full routes, in their own time."""
    if full.steps_to_target is None or full.learning_s is None:
        return columns
    seconds = full.steps_to_target * (columns.measured_s + full.learning_s)
    return replace(columns, steps_to_target=full.steps_to_target, seconds_to_target=seconds, computed=True)


def deaths(
    group: StageGroup, task: BenchTask, feed: Feed, one: PlanFigures, plan: Plan, say: Say
) -> list[DeathFigures]:
    """A peer in the middle of the first lane is killed at three moments of a step, and each other peer beside data nodes at one of them, by turns; then it
    comes back."""
    first: dict[int, tuple[int, int]] = {}
    """By peer, the (lane, hop) at which it is visited first."""
    for lane, one_lane in enumerate(plan.lanes):
        for hop, (_, peer) in list(enumerate(one_lane.route))[1:]:
            assert peer is not None, "searched routes name their peers"
            first.setdefault(peer, (lane, hop))
    middle = plan.lanes[0].route[len(plan.lanes[0].route) // 2].peer
    others = cycle(MOMENTS)
    moments = [
        (peer, moment)
        for peer in sorted(first, key=lambda peer: (peer != middle, peer))
        for moment in (MOMENTS if peer == middle else [next(others)])
    ]
    group.enter(task.world(plan))
    found = []
    for peer, moment in moments:
        lane, hop = first[peer]
        without_s = simulate(_without(plan, peer), task.costs("fp32")).makespan_s
        found.append(_die(group, feed, one, plan, moment, MOMENTS[moment](peer, lane, hop), without_s, say))
    return found


def data_node_death(
    group: StageGroup, task: BenchTask, feed: Feed, one: PlanFigures, plan: Plan, say: Say
) -> DeathFigures:
    """The data node of the last lane is killed when the first of its microbatches has come to its loss; the others' go on."""
    lane = len(plan.lanes) - 1
    home = plan.lanes[lane].route[0].peer
    assert home is not None, "routes begin at a data node"
    group.enter(task.world(plan))
    death = Death(rank=home, before=Op(Kind.LOSS, lane, 0))
    return _die(group, feed, one, plan, "a data node, before its first loss", death, None, say)


def _die(
    group: StageGroup,
    feed: Feed,
    one: PlanFigures,
    plan: Plan,
    moment: str,
    death: Death,
    without_s: float | None,
    say: Say,
) -> DeathFigures:
    """A step with a death; afterwards the peer is back."""
    say(f"{one.plan}: peer {death.rank} dies, {moment}")
    group.step(plan, feed.batches(0))  # whoever came back is dialled
    seen = group.step(plan, feed.batches(1), death=death)
    if not seen.lost <= {death.rank}:
        raise BenchError(f"peer {death.rank} was killed, and {sorted(seen.lost)} were lost")
    schedule = plan.schedule()
    void = sum(plan.lanes[lane].route[0].peer == death.rank for lane, _ in schedule)
    group.revive(death.rank)
    return DeathFigures(
        plan=one.plan,
        peer=death.rank,
        stage=next(stage for stage, peers in enumerate(plan.stages) if death.rank in peers),
        moment=moment,
        seconds=seen.seconds,
        times_normal=seen.seconds / one.measured_s,
        rerouted=sum(route != _planned(plan, m) for m, route in seen.routes.items()),
        shortened=sum(len(live_hops(route)) < len(route) for route in seen.routes.values()),
        cut=len(seen.cut),
        void=void,
        simulated_without_s=without_s,
    )


def _without(plan: Plan, lost: int) -> Plan:
    """The same routes, in which its mate stands in for a peer, with as many slots again for what that one had (`Worklist`)."""
    mate = {stage: next(peer for peer in peers if peer != lost) for stage, peers in enumerate(plan.stages)}
    mates = {mate[stage] for stage, peers in enumerate(plan.stages) if lost in peers}
    slots = tuple(2 * own if peer in mates else own for peer, own in enumerate(plan.slots))

    def hop_of(hop: Hop) -> Hop:
        return Hop(hop.stage, mate[hop.stage]) if hop.peer == lost else hop

    lanes = tuple(replace(lane, route=tuple(map(hop_of, lane.route))) for lane in plan.lanes)
    return replace(plan, lanes=lanes, slots=slots)


def _planned(plan: Plan, microbatch: int) -> tuple[tuple[int, int | None], ...]:
    lane, _ = plan.schedule()[microbatch]
    return tuple((hop.stage, hop.peer) for hop in plan.lanes[lane].route)


def _figures(task: BenchTask, name: str, plan: Plan, codec: str, seen: Sequence[StepSeen]) -> PlanFigures:
    simulated = simulate(plan, task.costs(codec))
    counted = seen[1:]
    operations = len(simulated.ran) * len(counted)
    tokens = len(simulated.sent) * task.tokens
    return PlanFigures(
        plan=name,
        codec=codec,
        simulated_s=simulated.makespan_s,
        measured_s=median(step.seconds for step in counted),
        steps=len(counted),
        bytes_per_token_and_boundary=2 * median(step.sent_bytes for step in counted) / tokens,
        utilisation=tuple(fmean(step.busy_s[peer] / step.seconds for step in counted) for peer in range(task.peers)),
        utilisation_simulated=tuple(simulated.busy()),
        late_percent=100.0 * sum(step.late for step in counted) / operations,
    )
