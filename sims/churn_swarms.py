"""The swarms of `farflung bench churn`, and one of them played: real nodes, real mathematics, virtual time.

All train the same model by the method `default` from the same weights on the same samples, with one learning rate after its warm-up, so that tokens
are all that losses depend on. Losses are of outer parameters on held-out windows, and are no part of what nodes do there.

*Utilisation* is of a machine: the seconds in inner steps of whoever had it, of those between the first round that as many took part in as there are
machines and the last one. While a newcomer fetches its state, its machine trains nothing.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.node.events import Event
from farflung.protocol.keys import Ed25519Signer
from farflung.sims.bench_workers import BenchError
from farflung.sims.churn import make_schedule
from farflung.sims.happenings import Happening
from farflung.sims.scenario import SHIPPED, PeerClass, Scenario
from farflung.sims.scenario_plan import key_seeds, prepare, read_scenario
from farflung.sims.simulation import Plan, simulate
from farflung.sims.swarm import Swarm
from farflung.training.flat import Layout, unflatten
from farflung.training.methods import DEFAULT
from farflung.training.model import Decoder, ModelConfig, next_token_loss

SPEEDS = (1.0, 0.7, 0.4, 0.2)
LINKS_MBIT_S = (2.0, 5.0, 2.0, 1.0)
"""Up and down, machine by machine: a tenth of what `bench unequal` has, for a fifth of its parameters."""

LATENCY_MS = 25.0
"""Of each link and direction: 100 ms from a peer to another and back."""

REPLACED_SHARE, PER_STEPS = 0.2, 100
"""So much of the peers goes and comes in so many steps of the fastest."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all swarms train, and for how long."""

    preset: str = "tiny"
    seq_len: int = 128
    batch_tokens: int = 1024
    """Of one step."""
    steps: int = 400
    """Of a peer of speed 1."""
    step_s: float = 1.0
    """At speed 1, virtual."""
    lr: float = 0.02
    warmup_steps: int = 92
    """Of all peers together: every swarm's rate has risen after as many tokens, however many of them it has in a step of its fastest."""
    every_rounds: int = 2
    """Between two evaluations."""
    windows: int = 256
    """Held out."""

    @property
    def duration_s(self) -> float:
        return self.steps * self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnSwarm:
    """Who trains, and what happens."""

    name: str
    speeds: tuple[float, ...] = SPEEDS
    waits: bool = False
    """Everybody makes H steps, and rounds wait for the slowest."""
    replaced: bool = False

    @property
    def pace(self) -> float:
        """Steps of all peers together in one of its fastest."""
        return len(self.speeds) if self.waits else sum(self.speeds) / max(self.speeds)

    @property
    def inner_steps(self) -> int:
        """H, of its fastest: rounds come after as many tokens as those of unequal peers do with the method's own, for more of them for the same tokens are another advantage than
        equal peers. Who waits makes the method's own, for that is what is compared."""
        if self.waits:
            return DEFAULT.inner_steps
        turns = DEFAULT.inner_steps * UNEQUAL.pace / self.pace / DEFAULT.fragments
        return max(1, round(turns)) * DEFAULT.fragments


EQUAL = ChurnSwarm(name="equal", speeds=(sum(SPEEDS) / len(SPEEDS),) * len(SPEEDS))
UNEQUAL = ChurnSwarm(name="unequal")
WAITING = ChurnSwarm(name="unequal, waiting", waits=True)
REPLACED = ChurnSwarm(name="unequal, replaced", replaced=True)
SWARMS = (EQUAL, UNEQUAL, WAITING, REPLACED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a swarm did with one seed."""

    utilisation: tuple[float, ...]
    """Of each machine."""
    rounds: int
    missed: int
    """Contributions that came too late for their round."""
    dropped_steps: int
    """Whose progress came into no round."""
    curve: tuple[tuple[int, float], ...]
    """(tokens that rounds counted, held-out loss)."""


def scenario_of(swarm: ChurnSwarm, task: Task, seed: int) -> Scenario:
    """The same as a scenario file would say it."""
    sections: dict[str, dict[str, object]] = DEFAULT.sections(swarm.inner_steps, DEFAULT.fragments)
    manifest = sections | {
        "model": {"preset": task.preset, "seq_len": task.seq_len, "init_seed": seed},
        "data": {"order_seed": seed},
        # the rate stays where it is: `wsd` falls at the end, which no round of these swarms comes near
        "inner": sections["inner"]
        | {
            "lr": task.lr,
            "warmup_steps": round(task.warmup_steps / swarm.pace),
            "schedule": "wsd",
            "decay_fraction": 0.01,
        },
        "swarm": sections["swarm"]
        | {"batch_tokens": task.batch_tokens, "total_steps": 100 * task.steps, "min_round_s": 2.0, "max_round_s": 30.0},
    }
    first = [_machine(task, swarm.speeds, slot, name=f"first{slot}") for slot in range(len(swarm.speeds))]
    happenings: list[Happening] = []
    if swarm.replaced:
        for number, (slot, at) in enumerate(replacements(len(swarm.speeds), task, seed)):
            goes = next(one.name for one in reversed(first) if one.name.endswith(str(slot)))
            happenings.append(Happening(at=at, what="kill", peers=(goes,)))
            first.append(_machine(task, swarm.speeds, slot, name=f"next{number}on{slot}", at=at))
    return Scenario(
        about=f"Four machines as in `farflung bench churn`: {swarm.name}.",
        name=f"bench-churn-{seed}",
        mode="real",
        seed=seed,
        duration_s=task.duration_s,
        manifest=manifest,
        peers=tuple(first),
        happenings=tuple(happenings),
    )


def replacements(machines: int, task: Task, seed: int) -> list[tuple[int, float]]:
    """(machine, second): who goes, and a newcomer takes its place at once. By turns, from another machine with each seed."""
    every_s = PER_STEPS / (REPLACED_SHARE * machines) * task.step_s
    count = math.ceil(task.duration_s / every_s) - 1
    return [((seed + number) % machines, (number + 1) * every_s) for number in range(count)]


def play(swarm: ChurnSwarm, task: Task, seed: int, progress: Progress = lambda text: None) -> Played:
    """Simulate it. Raises BenchError when an invariant was broken or no round was committed, ConfigError."""
    scenario = scenario_of(swarm, task, seed)
    plan = unwatched(prepare(scenario, seed, make_schedule(scenario, seed, SHIPPED)).plan)
    if swarm.waits:
        plan = _waiting(plan, len(swarm.speeds))
    watch = _Watch(scenario, task, progress)
    report = simulate(plan, sink=lambda line, event: watch.take(event), meddler=watch.meet)
    if report.violations:
        raise BenchError(f"{swarm.name}, seed {seed}: {report.violations[0]}")
    return Played(
        utilisation=watch.utilisation(),
        rounds=len(watch.seconds),
        missed=report.missed,
        dropped_steps=report.dropped_steps,
        curve=tuple(watch.curve),
    )


def _machine(task: Task, speeds: tuple[float, ...], slot: int, *, name: str, at: float = 0.0) -> PeerClass:
    return PeerClass(
        name=name,
        count=1,
        tokens_per_s=speeds[slot] * task.batch_tokens / task.step_s,
        up_mbit=LINKS_MBIT_S[slot],
        down_mbit=LINKS_MBIT_S[slot],
        latency_ms=LATENCY_MS,
        join_s=(at, at),
    )


def unwatched(plan: Plan) -> Plan:
    """The same, and evaluating takes nodes no time: they bound that to 0.5 % of theirs, but in a short run the first is more."""
    seconds = plan.outfit.seconds

    def training_only(peer: int, name: str, share: float) -> float:
        return 0.0 if name.startswith("evaluate") else seconds(peer, name, share)

    return dataclasses.replace(plan, outfit=dataclasses.replace(plan.outfit, seconds=training_only))


def _waiting(plan: Plan, peers: int) -> Plan:
    """The same, and nobody offers before its H steps, and a round is of everybody; training overlaps as before."""
    terms = plan.outfit.terms
    rules = dataclasses.replace(terms.settings.rules, laps=dataclasses.replace(terms.settings.rules.laps, delay=0))
    settings = dataclasses.replace(
        terms.settings, rules=rules, min_contributors=peers, min_round_s=60.0, max_round_s=600.0
    )
    outfit = dataclasses.replace(plan.outfit, terms=dataclasses.replace(terms, settings=settings))
    return dataclasses.replace(plan, outfit=outfit)


class _Watch:
    """Looks at the first peer that has a round, and evaluates what it then holds."""

    def __init__(self, scenario: Scenario, task: Task, progress: Progress) -> None:
        recipe, dataset = read_scenario(scenario, Ed25519Signer(key_seeds(scenario, scenario.seed)[0]).peer_id)
        assert dataset is not None
        self._slots = [int(one.name[-1]) for one, _, _ in scenario.roster()]
        self._task, self._progress = task, progress
        self._evaluate = Evaluation(recipe.model, recipe.order, torch.from_numpy(dataset.heldout(task.windows)))
        self._swarm: Swarm | None = None
        self._machines = 1 + max(self._slots)
        self._began: tuple[float, list[float]] | None = None
        self._ended: tuple[float, list[float]] | None = None
        self._round = self._tokens = 0
        self.seconds: list[float] = []
        """When each round was first seen."""
        self.curve: list[tuple[int, float]] = []

    async def meet(self, swarm: Swarm) -> None:
        """A `simulation.Meddler` that does nothing but look."""
        self._swarm = swarm

    def take(self, event: Event) -> None:
        if event["event"] != "round.commit" or int(event["round"]) <= self._round:
            return
        assert self._swarm is not None, "nobody has a round before the swarm is there"
        # A height: some are of no round, and another peer's event of a round that was seen is of no other round.
        self._round = int(event["round"])
        self.seconds.append(float(event["time"]))
        self._tokens += sum(event["contributors"].values())
        at = self._swarm.hub.now()
        now = at, [labour.trained_by(at) for labour in self._swarm.labour]
        if self._began is None and len(event["contributors"]) == self._machines:
            self._began = now
        self._ended = now
        if len(self.seconds) % self._task.every_rounds == 0:
            outer = self._swarm.learners[event["peer"]].coupled.outer.params
            self.curve.append((self._tokens, self._evaluate(outer)))
            self._progress(f"{self._tokens:,} tokens, loss {self.curve[-1][1]:.3f}")

    def utilisation(self) -> tuple[float, ...]:
        """Of each machine. Raises BenchError when no round but the last was of as many."""
        if self._began is None or self._ended is None or self._ended[0] <= self._began[0]:
            raise BenchError("all machines were in one round at most; give the swarm more steps")
        trained = [0.0] * self._machines
        for slot, began, ended in zip(self._slots, self._began[1], self._ended[1], strict=True):
            trained[slot] += ended - began
        return tuple(seconds / (self._ended[0] - self._began[0]) for seconds in trained)


class Evaluation:
    """The mean held-out loss of any parameters, nats per token."""

    def __init__(
        self,
        config: ModelConfig,
        order: tuple[str, ...],  # of the flat vector
        windows: Tensor,  # int64 [k, seq_len + 1]
    ) -> None:
        self._model = Decoder(config, seed=0)
        self._layout = Layout(self._model, order)
        self._windows = windows

    def __call__(
        self,
        params: Tensor,  # fp32 [n]
    ) -> float:
        with torch.no_grad():
            unflatten(self._layout, params, self._layout.parameters(self._model))
            losses = [
                float(next_token_loss(self._model(part[:, :-1]), part[:, 1:])) * len(part)
                for part in torch.split(self._windows, 32)
            ]
        return sum(losses) / len(self._windows)
