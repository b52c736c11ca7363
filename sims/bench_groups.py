"""`farflung bench groups`: what it costs that a large swarm is several groups, and what their meetings are worth (`node/meetings.py`).

The same peers train under virtual time with real mathematics, by the method `default`, from the same weights on the same samples, for as many steps each time:

- `one group` of all: the reference.
- `meeting`: groups of a third of them at most, which meet in every round of a fragment, as swarms do that say nothing else.
- `meeting in every fourth`: in every fourth round of a fragment.
- `never meeting`: groups that have nothing in common any more but their beginning.

Losses are of the last outer parameters on held-out windows: the mean over the groups, and that of the mean of their parameters. How far groups are apart is the mean length of the
difference between one's parameters and that mean, in percent of the length of the mean.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from farflung.node.events import Event
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.limits import MAX_GROUP_PEERS
from farflung.sims.bench_workers import BenchError
from farflung.sims.churn import make_schedule
from farflung.sims.churn_swarms import Evaluation, unwatched
from farflung.sims.churn_swarms import Progress as Say
from farflung.sims.scenario import SHIPPED, PeerClass, Scenario
from farflung.sims.scenario_plan import key_seeds, prepare, read_scenario
from farflung.sims.simulation import simulate
from farflung.sims.swarm import Swarm
from farflung.training.methods import DEFAULT

WINDOWS = 256
"""Held out."""

JOINED_S = 20.0
"""Until all peers are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all swarms train, and for how long."""

    peers: int = 12
    steps: int = 600
    """Of each peer, of a second each."""
    batch_tokens: int = 512
    """Of a step."""
    preset: str = "tiny"
    seq_len: int = 128
    lr: float = 0.02
    link_mbit: float = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How a swarm is divided."""

    name: str
    parts: int
    """No group has more peers than so manieth part of all."""
    meet_every: int = 1


ONE = Division(name="one group", parts=1)
DIVISIONS = (
    ONE,
    Division(name="meeting", parts=3),
    Division(name="meeting in every fourth", parts=3, meet_every=4),
    Division(name="never meeting", parts=3, meet_every=0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of a swarm, in one seed."""

    division: Division
    seed: int
    groups: tuple[int, ...]
    """Members of each at the end."""
    rounds: int
    """Of the group that had most."""
    met: int
    """Parts that groups have met in."""
    tokens: int
    loss: float
    """Of groups' parameters."""
    loss_of_mean: float
    """Of the mean of theirs."""
    apart_percent: float
    bytes_per_peer: int
    """All that nodes sent."""


def run_groups(*, seeds: int = 1, as_json: bool = False, task: Task | None = None) -> list[Row]:
    """Play all, show, and return the figures. Raises BenchError."""
    task = Task() if task is None else task
    console = Console(stderr=as_json)
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    # refreshed by hand: a thread that draws would take time from the one core that trains
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        bar = shown.add_task("starting", total=None)
        for seed in range(seeds):
            for division in DIVISIONS:

                def say(text: str, of: str = f"{division.name}, seed {seed}") -> None:
                    shown.update(bar, description=f"{of}: {text}", refresh=True)

                rows.append(play(division, task, seed, say))
                console.print(f"{division.name}, seed {seed}: {rows[-1].loss:.4f}", highlight=False)
    if as_json:
        sys.stdout.write(json.dumps([_figures(row, rows) for row in rows], indent=2) + "\n")
    else:
        _show(rows, task, console)
    return rows


def gap_percent(row: Row, rows: list[Row]) -> float:
    """Of the loss, to that of one group with the same seed."""
    (whole,) = (one.loss for one in rows if one.division == ONE and one.seed == row.seed)
    return 100.0 * (row.loss - whole) / whole


def play(division: Division, task: Task, seed: int, say: Say = lambda text: None) -> Row:
    """Simulate it. Raises BenchError when an invariant was broken or no round was committed."""
    scenario = scenario_of(division, task, seed)
    plan = unwatched(prepare(scenario, seed, make_schedule(scenario, seed, SHIPPED)).plan)
    watch = _Watch(say)
    report = simulate(plan, sink=lambda line, event: watch.take(event), meddler=watch.meet)
    if report.violations:
        raise BenchError(f"{division.name}, seed {seed}: {report.violations[0]}")
    last = watch.last()
    if not last:
        raise BenchError(f"{division.name}, seed {seed}: no round; give the swarm more steps")
    recipe, dataset = read_scenario(scenario, Ed25519Signer(key_seeds(scenario, seed)[0]).peer_id)
    assert dataset is not None
    evaluate = Evaluation(recipe.model, recipe.order, torch.from_numpy(dataset.heldout(WINDOWS)))
    params = torch.stack([one.params for one in last])
    middle = params.mean(dim=0)
    return Row(
        division=division,
        seed=seed,
        groups=tuple(sorted((one.members for one in last), reverse=True)),
        rounds=max(one.rounds for one in last),
        met=watch.met,
        tokens=report.tokens,
        loss=mean(evaluate(one) for one in params),
        loss_of_mean=evaluate(middle),
        apart_percent=100.0 * float((params - middle).norm(dim=1).mean() / middle.norm()),
        bytes_per_peer=report.net_bytes // task.peers,
    )


def scenario_of(division: Division, task: Task, seed: int) -> Scenario:
    """The same as a scenario file would say it."""
    sections: dict[str, dict[str, object]] = DEFAULT.sections(DEFAULT.inner_steps, DEFAULT.fragments)
    largest = MAX_GROUP_PEERS if division.parts == 1 else math.ceil(task.peers / division.parts)
    swarm = {
        "batch_tokens": task.batch_tokens,
        "total_steps": task.steps,
        "min_round_s": 2.0,
        "max_round_s": 30.0,
        "max_group": largest,
        "meet_every": division.meet_every,
    }
    inner = {"lr": task.lr, "warmup_steps": task.steps // 20}
    manifest = sections | {
        "model": {"preset": task.preset, "seq_len": task.seq_len, "init_seed": seed},
        "data": {"order_seed": seed},
        "inner": sections["inner"] | inner,
        "swarm": sections["swarm"] | swarm,
    }
    everybody = PeerClass(
        name="peer",
        count=task.peers,
        tokens_per_s=float(task.batch_tokens),
        up_mbit=task.link_mbit,
        down_mbit=task.link_mbit,
        latency_ms=12.5,
        join_s=(0.0, JOINED_S),
    )
    return Scenario(
        about=f"As in `farflung bench groups`: {division.name}.",
        name=f"bench-groups-{seed}",
        mode="real",
        seed=seed,
        duration_s=2.0 * task.steps,
        manifest=manifest,
        peers=(everybody,),
    )


@dataclass(kw_only=True, slots=True)
class _Group:
    """As its newest commit has it."""

    height: int = 0
    members: int = 0
    rounds: int = 0
    params: Tensor  # outer, fp32 [n]


class _Watch:
    """Keeps the newest outer parameters of each group."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._swarm: Swarm | None = None
        self._groups: dict[str, _Group] = {}
        self.met = 0

    async def meet(self, swarm: Swarm) -> None:
        """A `simulation.Meddler` that does nothing but look."""
        self._swarm = swarm

    def take(self, event: Event) -> None:
        self.met += event["event"] == "group.met"
        if event["event"] not in ("round.commit", "view.commit"):
            return
        assert self._swarm is not None, "nobody has a commit before the swarm is there"
        name = str(event.get("group", ""))
        outer = self._swarm.learners[event["peer"]].coupled.outer.params
        group = self._groups.setdefault(name, _Group(params=outer))
        if int(event["height"]) <= group.height:
            return
        group.height, group.members = int(event["height"]), len(event["view"])
        if event["event"] == "round.commit":
            group.params, group.rounds = outer.clone(), group.rounds + 1
            self._say(f"{event['time']:.0f} s, {len(self._groups)} groups")

    def last(self) -> list[_Group]:
        """Those that have had a round."""
        return [group for group in self._groups.values() if group.rounds]


def _figures(row: Row, rows: list[Row]) -> dict[str, Any]:
    return asdict(row) | {"gap_percent": gap_percent(row, rows)}


def _show(rows: list[Row], task: Task, console: Console) -> None:
    title = f"{task.peers} peers, {task.steps} steps of {task.batch_tokens} tokens each"
    table = Table(title=title, title_justify="left")
    for name in ("swarm", "groups", "loss", "gap %", "loss of mean", "apart %", "kB per peer"):
        table.add_column(name)
    for row in rows:
        sizes = " + ".join(map(str, row.groups))
        figures = (
            f"{row.loss:.4f}",
            f"{gap_percent(row, rows):+.2f}",
            f"{row.loss_of_mean:.4f}",
            f"{row.apart_percent:.2f}",
        )
        table.add_row(row.division.name, sizes, *figures, f"{row.bytes_per_peer / 1e3:,.0f}")
    console.print(table)
