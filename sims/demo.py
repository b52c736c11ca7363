"""`farflung demo`: a swarm of real nodes on this machine, one of them killed in the middle of a round, and a report.

The story: four nodes start; a fifth joins late; one is killed with SIGKILL the moment it begins to send its contribution
into a round; another, with a new identity, takes its place. Beside them two workers train alone, each for as many steps
as a peer does (the better one counts); at the end everything is compared from the nodes' own event files.

How many rounds are planned follows from a short measurement of a training step; the clock ends the run when the machine
turns out slower. The method is `default` (`training.methods`): a third of the model moves every ten steps, at one and a half
bits a parameter to the owners of parts and two and a half back, while training goes on.
"""

import asyncio
import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.console import Console
from rich.live import Live

from farflung.node import daemon
from farflung.node.events import Event, read_events
from farflung.node.options import CreatedSwarm, CreateOptions, ExportOptions
from farflung.node.recipe import Recipe, read_recipe
from farflung.node.storage import FileStorage
from farflung.protocol.errors import ConfigError, LocalError
from farflung.protocol.manifest import open_manifest
from farflung.sims.demonodes import DemoNode, NodeFailed, now
from farflung.sims.demoview import DemoView
from farflung.sims.facts import (
    Incident,
    PeerFacts,
    RunFacts,
    SoloPoint,
    What,
    event_files,
    load_events,
    save_run,
)
from farflung.sims.last_ledger import last_ledger
from farflung.sims.outputs import check_outputs
from farflung.sims.report import report_folder
from farflung.sims.solo import best_run, train_alone
from farflung.sims.told_to_end import run_until_told
from farflung.training.model import Decoder
from farflung.training.sample import Sampling, sample_text
from farflung.training.tokenizer import ByteTokenizer

NAME = "demo"
FIRST_NODES = 4
MOST_NODES = FIRST_NODES + 1
"""At one time: the fifth joins, and the sixth replaces the one that is killed."""

SEQ_LEN = 128
BATCH = 8
"""Sequences of one inner step of one peer."""

INNER_STEPS = 10
"""Between two rounds."""

FRAGMENTS = 3
"""As many rounds until all of the model has moved."""

MIN_ROUNDS = 55
"""Below this a worker alone is about as good: the plan is kept, and on a slow machine the clock ends the run."""

MAX_ROUNDS = 80
START_S = 25.0
"""From the start of four processes to the first round, for the plan."""

END_S = 40.0
"""For goodbyes, the end of the solo runs, report and export."""

UP_S = 120.0
"""From the start of the processes until three nodes train, at most: many times what it takes."""

FINISH_S = 10.0
"""How long nodes may take to end by themselves when the run is complete; one that was still joining never would."""

GONE_S = 10.0
"""From the end of the last process until all of them are accounted for."""

SOLO_S = 60.0
"""How long the workers that train alone may take when the nodes are gone: they have the processors to themselves then, and little left to do."""

LEAST_TRAINING_S = 60.0
"""Whatever `--minutes` says: the story needs this long."""

UP_MBPS = 1.5
"""Uplink of each node, megabit/s: a round takes a fraction of a second, a newcomer's download some ten seconds."""

ROUND_S = 1.2
"""A round's votes and evaluation, for the plan; what hides behind training counts where five nodes share two processors."""

SHARE_OF_TIME = 0.8
"""Of the time allowed that is planned for; the rest is for machines that become slower on the way."""

LATE_JOIN_AT = 0.15
KILL_AT = 0.4
"""Shares of the rounds, or of the time for training, whichever is reached first."""

SOLO_LOOKS = 3
"""Rounds' worth of steps between two evaluations of a worker alone."""

DRAW_S = 0.25
MARK = ".farflung-demo"
"""The first file of a demo's folder: without it nothing there is removed, whatever it is called."""

MARKED = "Made by `farflung demo`, which removes all that is here when it is run again.\n"

FOLDERS = (MARK, "nodes", "model", "run.json", "report.html", "report.json", "demo.toml")
"""What the demo writes; what it removes of an earlier demo."""

TOML = f"""\
[model]
preset = "tiny"
seq_len = {SEQ_LEN}

[data]
spec = "python"

[inner]
lr = 0.02
warmup_steps = 40

[swarm]
inner_steps = {FRAGMENTS * INNER_STEPS}
fragments = {FRAGMENTS}
batch_tokens = {BATCH * SEQ_LEN}
min_contributors = 3
lease_rounds = 2
min_round_s = 5.0
max_round_s = 60.0
"""

PROMPT, SAMPLES = "def ", 3


class DemoStuck(LocalError):
    """Something that the demo waits for did not come in its time; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When what must be over; unix seconds."""

    rounds: int
    """Planned."""
    training_until: float
    """The nodes are asked to leave then, finished or not."""
    step_s: float
    """One training step on a free core."""


@dataclass(slots=True)
class Story:
    """What happens, and what the view shows of it."""

    nodes: list[DemoNode] = field(default_factory=list)
    timeline: list[Incident] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    outer_losses: list[float] = field(default_factory=list)
    phase: str = "measuring this machine"
    rounds: int = 0
    version: int = 0
    began: float = field(default_factory=now)
    victim: DemoNode | None = None
    """Killed as soon as it scatters."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every event of a node."""
    steps_done: int = 0
    """Steps that a peer had done when the swarm ended; 0 before."""
    killed_in: int = 0
    """The round in which it was killed; 0 before."""

    @property
    def progress(self) -> str:
        return f"{self.phase} · round {self.version} of {self.rounds}" if self.rounds else self.phase

    def tell(self, line: str) -> None:
        self.news.append(f"{time.strftime('%H:%M:%S')} {line}")

    def happened(self, what: What, node: DemoNode) -> None:
        self.timeline.append(Incident(time=now(), what=what, peer=node.peer))


def run_demo(out: Path, *, minutes: float, quiet: bool) -> dict[str, Any]:
    """Run the whole demo into the folder `out`; returns the figures of `summary.summarise`. Blocks.

    Raises ConfigError (the folder holds something else), NodeFailed (a node ended that should not), SoloFailed (a worker that trains alone
    did), DemoStuck (something took far longer than it may); SystemExit when told to end, with all nodes gone.
    """
    _clear(out)
    story = Story()
    view = DemoView(story, None if quiet else Console())
    run_until_told(_with_view(_play(out.absolute(), minutes, story), view))
    figures = report_folder(out)
    text = (out / "model" / "sample.txt").read_text(encoding="utf-8")
    view.finish(figures, str(out / "report.html"), str(out / "model"), text)
    return figures


async def _with_view(work: Any, view: DemoView) -> None:
    with _live(view) as draw:
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(work)
            while not playing.done():
                view.update(draw)
                await asyncio.wait([playing], timeout=DRAW_S)
            view.update(draw)


@contextmanager
def _live(view: DemoView) -> Iterator[Any]:
    if not view.is_live:
        yield None
        return
    with Live(view.render(), auto_refresh=False) as live:
        yield lambda panel: live.update(panel, refresh=True)


# ---- the story -----------------------------------------------------------------------------------------------------


async def _play(out: Path, minutes: float, story: Story) -> None:
    budget = await asyncio.to_thread(_plan, story.began, minutes)
    story.rounds = budget.rounds
    story.tell(f"a training step takes {1000 * budget.step_s:.0f} ms on one core: {budget.rounds} rounds planned")
    home = out / "nodes" / "node-1"
    made = await asyncio.to_thread(_found, out, home, budget.rounds)
    invitation = made.invitation
    recipe = read_recipe(open_manifest(made.manifest.read_bytes(), swarm=None, peer=None))
    for number in range(1, FIRST_NODES + 1):
        _add_node(story, out, made, number, "founder" if number == 1 else "from the start")
    story.phase = "starting four nodes"
    async with asyncio.TaskGroup() as tasks:
        running = []
        for node in story.nodes:
            story.happened("start", node)
            swarm = made.name if node.role == "founder" else invitation
            running.append(tasks.create_task(node.run([swarm, *_flags()])))
        if not await _until(story, lambda: sum(n.status.step > 0 for n in story.nodes) >= 3, by=now() + UP_S):
            raise DemoStuck(f"three nodes do not train {UP_S:g} s after they were started: {_states(story)}")
        # Beside the swarm, for its nodes leave the cores idle while they wait for each other's bytes.
        every = SOLO_LOOKS * INNER_STEPS
        solo: list[list[SoloPoint]] = [[], []]
        alone = tasks.create_task(train_alone(made.manifest, recipe, every, lambda: story.steps_done, into=solo))
        story.phase = "training"
        began = now()
        until = max(budget.training_until, began + LEAST_TRAINING_S)  # processes may have taken long to come up
        span = until - began

        def reached(share: float) -> bool:
            return story.version >= share * budget.rounds or now() >= began + share * span or _finished(story)

        # What the clock does not bring about by then does not happen; `_check_kill` says so.
        await _until(story, lambda: reached(LATE_JOIN_AT), by=until)
        running.append(tasks.create_task(_join(story, _add_node(story, out, made, 5, "joined late"), invitation)))
        await _until(story, lambda: reached(KILL_AT) and _may_die(story) is not None, by=until)
        story.victim = _may_die(story)
        await _until(story, lambda: story.killed_in > 0 or _finished(story), by=until)
        running.append(tasks.create_task(_join(story, _add_node(story, out, made, 6, "replacement"), invitation)))
        await _until(story, lambda: _finished(story), by=until)
        story.phase = "the nodes say goodbye"
        if _finished(story):
            await asyncio.wait(running, timeout=FINISH_S)
        else:
            story.tell("the time is up: the nodes are asked to leave")
        async with asyncio.TaskGroup() as goodbyes:
            for node in story.nodes:
                goodbyes.create_task(node.end())
        _, left = await asyncio.wait(running, timeout=GONE_S)
        if left:
            raise DemoStuck(f"{GONE_S:g} s after the last node was ended some are still followed: {_states(story)}")
        story.steps_done = story.version * INNER_STEPS
        story.phase = "two workers that train alone, for comparison, finish"
        _, left = await asyncio.wait([alone], timeout=SOLO_S)
        if left:
            raise DemoStuck(
                f"the workers that train alone do not come to their end in {SOLO_S:g} s: {_solo_told(story, solo)}"
            )
    _check_kill(story)
    story.phase = "writing report and model"
    await asyncio.to_thread(_conclude, out, story, recipe, made, best_run(solo, story.steps_done))


def _may_die(story: Story) -> DemoNode | None:
    """One of the first, not the founder, that has come into the rounds: one may be late, and its state is on its way while the others train."""
    return next((node for node in story.nodes[1:FIRST_NODES] if node.status.version > 1), None)


def _states(story: Story) -> str:
    """What every node is at, for an error."""
    said = []
    for node in story.nodes:
        gone = "killed" if node.killed else "ended" if node.ended else node.status.state
        said.append(f"{node.name} {gone}, step {node.status.step}")
    return "; ".join(said)


def _solo_told(story: Story, solo: list[list[SoloPoint]]) -> str:
    steps = ", ".join(str(points[-1].step if points else 0) for points in solo)
    return f"they are at steps {steps} of {story.steps_done}"


def _finished(story: Story) -> bool:
    return 0 < story.rounds <= story.version


async def _join(story: Story, node: DemoNode, invitation: str) -> None:
    story.happened("join", node)
    story.tell(f"{node.name} starts and will join the running swarm")
    await node.run([invitation, *_flags()])


def _add_node(story: Story, out: Path, made: CreatedSwarm, number: int, role: str) -> DemoNode:
    home = out / "nodes" / f"node-{number}"
    home.mkdir(parents=True, exist_ok=True)
    node = DemoNode(name=f"node {number}", role=role, home=home, swarm_hash=made.hash_hex, swarm_name=made.name)
    node.on_event = lambda who, event: _on_event(story, who, event)
    story.nodes.append(node)
    return node


def _on_event(story: Story, node: DemoNode, event: Event) -> None:
    story.changed.set()
    if event["event"] == "round.scatter" and node is story.victim and not node.killed:
        node.kill()
        story.killed_in = event["round"]
        story.happened("kill", node)
        story.tell(f"{node.name} killed with SIGKILL in the middle of round {event['round']}")
    elif event["event"] == "round.commit":
        story.version = max(story.version, event["version"])
    elif event["event"] == "outer.eval" and event["loss"] is not None:
        story.outer_losses.append(event["loss"])
    elif event["event"] == "round.missed":
        story.tell(f"{node.name} missed round {event['round']}: {event['reason']}")
    elif event["event"] == "node.state" and event["state"] == "training" and node.status.tokens == 0:
        story.tell(f"{node.name} ({node.role}) trains")
    elif event["event"] == "invariant.broken":
        story.tell(f"INVARIANT {event['which']} BROKEN on {node.name}: {event['detail']}")


def _check_kill(story: Story) -> None:
    """The victim's own log must show that it died in the middle of the round: scattered, and never saw its commit."""
    if story.victim is None or not story.killed_in:
        raise NodeFailed("the run was over before a node could be killed: give the demo more --minutes")
    events = list(read_events(story.victim.swarm.events))
    scattered = [e["round"] for e in events if e["event"] == "round.scatter"]
    seen = [e["round"] for e in events if e["event"] in ("round.commit", "round.missed")]
    if not scattered or scattered[-1] != story.killed_in or story.killed_in in seen:
        raise NodeFailed(f"{story.victim.name} was not in the middle of round {story.killed_in} when it was killed")


async def _until(story: Story, condition: Callable[[], bool], *, by: float) -> bool:
    """Wait for something that an event or the clock brings about, until `by` (unix seconds) at most; whether it came."""
    while not condition():
        if now() >= by:
            return False
        story.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAW_S):
                await story.changed.wait()
    return True


# ---- before --------------------------------------------------------------------------------------------------------


def _clear(out: Path) -> None:
    """Make room: an earlier demo's files go, anybody else's are respected."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no folder; give another one with --out")
    check_outputs(folders=[out])
    found = list(out.iterdir())
    strangers = [child.name for child in found if child.name not in FOLDERS]
    if strangers:
        raise ConfigError(f"{out} holds {strangers[0]}, which is no demo's; give another folder with --out")
    if found and not (out / MARK).is_file():
        raise ConfigError(
            f"{out} was not made by a demo, for it has no {MARK}; empty it, or give another folder with --out"
        )
    for child in found:
        if child.name != MARK:
            shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    (out / MARK).write_text(MARKED, encoding="utf-8")
    (out / "nodes").mkdir()


def _plan(began: float, minutes: float) -> Budget:
    """Measure a training step, and fit rounds, the solo runs and the report into the time."""
    from farflung.training.inner import InnerConfig
    from farflung.training.presets import preset
    from farflung.training.replica import Replica
    from farflung.training.rules import Nesterov
    from farflung.training.schedule import Schedule

    torch.set_num_threads(1)
    model = preset("tiny", vocab_size=ByteTokenizer.vocab_size, seq_len=SEQ_LEN)
    replica = Replica(model, InnerConfig(schedule=Schedule(peak=1e-3, kind="constant")), Nesterov(), seed=0)
    tokens = torch.randint(0, 256, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    replica.train_step(tokens, 0)
    times: list[float] = []
    until = time.monotonic() + 2.0
    while time.monotonic() < until or len(times) < 5:
        at = time.monotonic()
        replica.train_step(tokens, 0)
        times.append(time.monotonic() - at)
    step_s = statistics.median(times)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    round_s = ROUND_S + INNER_STEPS * step_s * max(1.0, MOST_NODES / cores)
    solo_s = INNER_STEPS * step_s * 2.0 / cores
    training_s = SHARE_OF_TIME * 60.0 * minutes - (now() - began) - START_S - END_S
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(training_s / (round_s + solo_s))))
    latest = max(began + 60.0 * minutes - END_S, now() + START_S + LEAST_TRAINING_S)
    return Budget(rounds=rounds, training_until=latest, step_s=step_s)


def _found(out: Path, home: Path, rounds: int) -> CreatedSwarm:
    """Found the swarm in node 1's folder."""
    (out / "demo.toml").write_text(TOML, encoding="utf-8")
    return daemon.create(
        CreateOptions(
            name=NAME,
            config=out / "demo.toml",
            method="default",
            steps=rounds * INNER_STEPS,
            local=True,
            home=home,
        )
    )


def _flags() -> list[str]:
    return ["--local", "--device", "cpu", "--threads", "1", "--no-live", "--up-mbps", str(UP_MBPS)]


# ---- after ---------------------------------------------------------------------------------------------------------


def _conclude(out: Path, story: Story, recipe: Recipe, made: CreatedSwarm, solo: list[SoloPoint]) -> None:
    """Export the model, let it write, and write down what no node knows."""
    survivors = [node for node in story.nodes if not node.killed]
    best = max(survivors, key=lambda node: (_saved_version(node), -story.nodes.index(node)))
    daemon.export(ExportOptions(swarm=made.hash_hex, folder=out / "model", home=best.home))
    samples = _samples(out / "model", recipe)
    (out / "model" / "sample.txt").write_text("\n\n".join(samples) + "\n", encoding="utf-8")
    numel = recipe.num_parameters
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    run = RunFacts(
        name=made.name,
        started=story.began,
        ended=now(),
        peers=[PeerFacts(peer=node.peer, name=node.name, role=node.role) for node in story.nodes],
        timeline=story.timeline,
        solo_loss=solo,
        ddp_bytes_per_peer=int(2 * (FIRST_NODES - 1) / FIRST_NODES * 4 * numel * story.steps_done),
        exits={node.peer: node.exit_status for node in survivors if node.exit_status is not None},
        ledger=last_ledger([node.swarm for node in survivors], load_events(event_files(out / "nodes"))),
        description=(
            f"{numel / 1e6:.1f} M parameters on the text of Python's standard library, {BATCH} x {SEQ_LEN} tokens a step and "
            f"peer, a round every {INNER_STEPS} steps in {recipe.uplink.spec}, {UP_MBPS:g} Mbit/s up each; all nodes on one "
            f"machine with {cores} cores. Data-parallel: ring all-reduce of fp32 gradients among {FIRST_NODES}, each step."
        ),
        samples=samples,
    )
    save_run(out / "run.json", run)


def _saved_version(node: DemoNode) -> int:
    saved = FileStorage(node.swarm.checkpoint).saved_learner()
    return -1 if saved is None else saved[1].version


def _samples(folder: Path, recipe: Recipe) -> list[str]:
    """What the exported model writes; more than one, since it may end a text after a line."""
    model = Decoder(recipe.model, seed=0)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return [
        PROMPT + sample_text(model, ByteTokenizer(), PROMPT, Sampling(max_tokens=120, temperature=0.6, seed=seed))
        for seed in range(SAMPLES)
    ]
