"""The judge of a whole pipeline: what no chain of one stage shows. Each of those has a judge of its own (`judge`), and numbers of invariants are the same.

    1  same version, same bits     a stage that begins anew from a copy, or from what its founder has, begins with what it once was
    5  one history                 a life of a stage has one founder, that a commit of stage 0 names, and the next number, and from three stages on enough of them
                                   have acknowledged it; enough have called for one of stage 0, and an earlier one makes no rounds beside it for long. Nobody believes in
                                   another; no step is done with two lives of a stage; none begins while its stage was there for everybody
    6  each sample once            what a life of stage 0 has counted, as far as the next one can know, that does not hand out
    7  exactly-once accumulation   of all peers one counts each visit of a step, whoever that was to be by its plan, and one that holds its stage; and sums are
                                   of what was computed for the data nodes that they count for
    8  nothing unbounded           shadows within the budget, but for first copies of what one peer has alone; parameters are numbers

Like the other one it sees events and, every two seconds, what peers hold, and asks the code that it judges for none of it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.node.events import Event
from farflung.node.stage_job import Done, Job
from farflung.node.stage_peer import StagePeer
from farflung.node.stage_trainer import Steps
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import split
from farflung.protocol.lives import HOME_GONE_AFTER, LOST_AFTER, Life
from farflung.protocol.quorum import is_quorum
from farflung.sims.hub import MemoryHub
from farflung.sims.judge import Judge
from farflung.sims.learners import SimStageLearner
from farflung.training.pipeline_plan import Kind
from farflung.training.pipeline_worker import HEAD
from farflung.training.recovery_costs import Rung

COPY_ERROR = 0.3
"""Largest relative error of a shadow against what was trained around that time. One to begin a stage with has about 0.005, a first one to keep 0.1; a difference of two bits leaves up to a third of what has changed,
which is most of a model that learns to count when the copy before is 50 steps old. Another stage is off by 1 and more."""

OVER_BUDGET = "over budget"
"""What is said of a copy that may be."""

TOGETHER = 3
"""Stages of a pipeline in which they decide together."""

UNFORESEEN = 0.15
"""Share of a copy by which it may be larger than its codec foresaw: its size is known when it is coded. The next waits for that as well. Stages of these
simulations have some hundred parameters; 0.11 was seen."""


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """`stage_trainer.Steps` of a peer; `done` is told what came of each."""

    steps: Steps
    done: Callable[[Job, Done], None]

    @property
    def step(self) -> int:
        return self.steps.step

    @property
    def finished(self) -> bool:
        return self.steps.finished

    def take(self) -> Job | None:
        return self.steps.take()

    async def carry_out(self, job: Job, numbers: Sequence[int]) -> Done | None:
        done = await self.steps.carry_out(job, numbers)
        if done is not None:
            self.done(job, done)
        return done

    async def read(self, numbers: Sequence[int]) -> None:
        await self.steps.read(numbers)

    def changed(self) -> None:
        self.steps.changed()


@dataclass(slots=True)
class PipelineJudge:
    """See the module. Peers are numbers."""

    broken: Callable[[str], None]
    hub: MemoryHub
    ids: list[PeerId]
    peers: Mapping[int, StagePeer]
    """Those that serve."""
    chains: Mapping[Life, Judge]
    """Of all lives that have begun."""
    _verdicts: set[str] = field(default_factory=set)
    _decided: dict[tuple[int, int], Life] = field(default_factory=dict)
    """By stage and number, what stages have decided."""
    _decided_at: dict[int, float] = field(default_factory=dict)
    """By number, when a life of stage 0 was."""
    _voters: dict[Life, set[int]] = field(default_factory=dict)
    """By life, whose commits name, acknowledge or call it."""
    _read: dict[Life, int] = field(default_factory=dict)
    """By life, the height up to which its chain was read."""
    _there_since: dict[int, float] = field(default_factory=dict)
    """By stage, since when it was there for everybody, at every look."""
    _held: dict[int, list[Tensor]] = field(default_factory=dict)
    """By stage, the outer parameters of all its versions."""
    _trained: dict[int, list[Tensor]] = field(default_factory=dict)
    """By stage, what its peers trained, at every look."""
    _versions: set[tuple[Life, int]] = field(default_factory=set)
    _looked_at: dict[int, tuple[Life, int]] = field(default_factory=dict)
    """By peer, the version that was looked at."""
    _started: dict[int, float] = field(default_factory=dict)
    """By peer, when it was last."""
    _rungs: dict[int, Rung] = field(default_factory=dict)
    """By peer, how it last made a stage."""
    _steps: dict[int, Event] = field(default_factory=dict)
    """By peer, what it told of its last step."""
    _counted: dict[bytes, dict[tuple[Kind, int, int], int]] = field(default_factory=dict)
    """By step, and by operation, microbatch and hop, the peer that has counted it."""
    _lives: dict[tuple[bytes, int], int] = field(default_factory=dict)
    """By step and stage, the number of the life that serves in it."""
    _stages_ever: int = 0
    """Of the pipeline."""

    def violate(self, which: int, detail: str) -> None:
        said = f"invariant {which}: {detail}"
        if said not in self._verdicts:
            self._verdicts.add(said)
            self.broken(said)

    # ---- as it happens -----------------------------------------------------------------------------------------

    def on_event(self, index: int, event: Event) -> None:
        match event["event"]:
            case "node.start":
                self._started[index] = self.hub.now()
            case "pipeline.step":
                self._steps[index] = event
            case "stage.made":
                self._rungs[index] = Rung(event["rung"])
            case "stage.anew":
                self.read_lives()
            case "shadow":
                self._on_shadow(index, event)

    def on_version(self, life: Life, version: int, learner: SimStageLearner) -> None:
        """The outer state of a stage at this version."""
        if (life, version) not in self._versions:
            self._versions.add((life, version))
            self._held.setdefault(life.stage, []).append(learner.outer.params.clone())

    def on_made(self, index: int, life: Life, learner: SimStageLearner) -> None:
        """A peer has made the stage that it begins anew."""
        rung = self._rungs[index]
        held, made = self._held.get(life.stage, []), learner.outer.params
        if rung.is_exact and not any(torch.equal(one, made) for one in held):
            self.violate(1, f"peer {index} goes on with stage {life.stage}, but not as it ever was")
        trained = self._trained.get(life.stage, [])
        if rung is Rung.SHADOW and not any((one - made).norm() < COPY_ERROR * one.norm() for one in trained):
            self.violate(1, f"the copy of which peer {index} makes stage {life.stage} is of nothing that it ever was")
        self._held.setdefault(life.stage, []).append(made.clone())  # that life may be over before anybody looks

    def on_done(self, index: int, job: Job, done: Done) -> None:
        """A peer's part in a step is over, and this is what counts of it."""
        event, step, visits = self._steps[index], job.step, done.accumulated.visits
        homes = {step.place[bytes.fromhex(home)] for home in event["settled"]}
        ops = [(Kind(kind), microbatch, hop) for kind, microbatch, hop, _, _ in event["ops"]]
        ran = [op for op in ops if op[0] is not Kind.F and step.home(op[1]) in homes]
        computed = Counter(HEAD if kind is Kind.LOSS else peer_stage(job) for kind, _, _ in ran)
        if computed != visits:
            self.violate(7, f"peer {index} computed {dict(computed)} in step {job.number} and counts {dict(visits)}")
        counted = self._counted.setdefault(job.window, {})
        for kind, microbatch, hop in ran:
            if kind is Kind.B and step.routes[microbatch][hop].stage != peer_stage(job):
                self.violate(7, f"peer {index} counts hop {hop} of microbatch {microbatch}, which is of another stage")
        for op in ran:
            other = counted.setdefault(op, index)
            if other != index or ran.count(op) > 1:
                kind, microbatch, hop = op
                self.violate(7, f"peers {other} and {index} both count {kind} of microbatch {microbatch}, hop {hop}")

    def _on_shadow(self, index: int, event: Event) -> None:
        if index in self.peers and self.peers[index].pipeline.recipe.stage == event["stage"]:
            self.violate(8, f"peer {index} keeps a copy of its own stage")
        late = event["received_bytes"] > event["allowed_bytes"] + 1 + UNFORESEEN * event["bytes"]
        if late and OVER_BUDGET not in event["reason"]:
            said = f"{event['received_bytes']} bytes, allowed are {event['allowed_bytes']}"
            self.violate(8, f"peer {index} has had {said} of copies when it got one more of stage {event['stage']}")

    # ---- every two seconds -------------------------------------------------------------------------------------

    def look(self) -> None:
        now = self.hub.now()
        self.read_lives()
        for index, peer in sorted(self.peers.items()):
            for life in peer.pipeline.roll.renewed.values():
                if self._decided.get((life.stage, life.number)) != life:
                    self.violate(
                        5, f"peer {index} believes in life {life.number} of stage {life.stage}, which nobody decided"
                    )
            self._look_at_step(peer)
        for stage in range(self._first(), self._stages()):
            if not self._is_there(stage):
                self._there_since.pop(stage, None)
            else:
                self._there_since.setdefault(stage, now)

    def look_at_state(self, index: int, life: Life, learner: SimStageLearner) -> None:
        """What a peer trains with."""
        self._trained.setdefault(life.stage, []).append(learner.local_params())
        peer = self.peers[index]
        if not peer.applier.idle or peer.applier.version < 0:
            return
        if self._looked_at.get(index) == (life, peer.applier.version):
            return
        self._looked_at[index] = (life, peer.applier.version)
        if not math.isfinite(sum(float(one.sum()) for one in (learner.outer.params, *learner.replica.parameters))):
            self.violate(8, f"peer {index}: not all parameters of stage {life.stage} are numbers")
        self.on_version(life, peer.applier.version, learner)

    def _look_at_step(self, peer: StagePeer) -> None:
        job, life = peer.pipeline.work.job, peer.pipeline.life
        if job is not None and job.goes:
            number = self._lives.setdefault((job.window, life.stage), life.number)
            if number != life.number:
                self.violate(
                    5, f"step {job.number} is done with lives {number} and {life.number} of stage {life.stage}"
                )

    @property
    def home_histories(self) -> dict[int, list[Commit]]:
        """Commits of stage 0 by the number of its life."""
        found: dict[int, list[Commit]] = {}
        for life, judge in self.chains.items():
            if life.stage == 0:
                found.setdefault(life.number, []).extend(judge.history.values())
        return found

    def read_lives(self) -> None:
        """What stages have decided since we last looked; before somebody goes, too."""
        self._stages()
        for chain, judge in self.chains.items():
            judge.look_at_histories()
            before = self._read.get(chain, -1)
            for height in sorted(height for height in judge.history if height > before):
                self._read[chain] = height
                self._read_commit(chain, judge.history[height])
        for life in sorted(self._voters, key=lambda one: (one.stage, one.number)):
            if self._is_decided(life):
                known = self._decided.setdefault((life.stage, life.number), life)
                if known != life:
                    self.violate(5, f"life {life.number} of stage {life.stage} has two founders")

    def _read_commit(self, chain: Life, commit: Commit) -> None:
        """Votes count from the first commit that has them on."""
        for life in (*commit.lives, *(() if commit.call is None else (commit.call,))):
            voters = self._voters.setdefault(life, set())
            if chain.stage in voters or (chain.stage == life.stage == 0 and life != commit.call):
                continue  # a life of stage 0 lists itself
            voters.add(chain.stage)
            if self._is_decided(life) and (life.stage, life.number) not in self._decided:
                self._on_decided(life)
        if chain.stage == 0 and chain.number > 0 and commit.height == 0:
            self._check_inheritance(chain, commit)
        newer = [at for number, at in self._decided_at.items() if number > chain.number]
        if chain.stage == 0 and commit.round is not None and newer:
            begun = [self._started.get(self.ids.index(one.peer), 0.0) for one in commit.round.contributors]
            late_s = self.hub.now() - max([min(newer), *begun])  # who was just started has heard nobody yet
            if late_s > LOST_AFTER * self._heartbeat_s():
                self.violate(
                    5, f"life {chain.number} of stage 0 makes round {commit.version} {late_s:.0f} s after it ended"
                )

    def _is_decided(self, life: Life) -> bool:
        """Whether enough stages have said so."""
        voters, stages = self._voters.get(life, set()), self._stages_ever
        if stages < TOGETHER:
            return life.stage > 0 and 0 in voters
        if life.stage > 0 and 0 not in voters:
            return False
        return 2 * len(voters) > stages or (2 * len(voters) == stages and 0 in voters)

    def _check_inheritance(self, life: Life, genesis: Commit) -> None:
        """A later life of stage 0 hands out nothing that an earlier one had counted before the last round that it knows of."""
        ledger = genesis.ledger
        waiting = [*(one for entry in ledger.held for one in entry.intervals), *ledger.free, (ledger.cursor, math.inf)]
        for chain, judge in self.chains.items():
            if chain.stage != 0 or chain.number >= life.number:
                continue
            for height, commit in judge.history.items():
                before = judge.history.get(height - 1)
                if commit.round is None or before is None or commit.version >= life.since.version:
                    continue
                for one in commit.round.contributors:
                    for start, stop in split(before.ledger.window(one.peer), one.samples)[0]:
                        if any(begin < stop and start < end for begin, end in waiting):
                            said = f"samples {start} to {stop}, which life {chain.number} has counted"
                            self.violate(6, f"life {life.number} of stage 0 hands out {said}")

    def _on_decided(self, life: Life) -> None:
        self._decided[life.stage, life.number] = life
        if life.stage == 0:
            self._decided_at[life.number] = self.hub.now()
        elif life.number > 1 and (life.stage, life.number - 1) not in self._decided:
            self.violate(5, f"life {life.number} of stage {life.stage} follows none")
        since = self._there_since.pop(life.stage, None)
        silence_s = (LOST_AFTER if life.stage else HOME_GONE_AFTER) * self._heartbeat_s()
        # stage 0 goes on so by its own call, where some had called another before it was back
        itself = life.stage == 0 and 0 in self._voters[life]
        if since is not None and self.hub.now() - since > silence_s and not itself:
            self.violate(5, f"stage {life.stage} was begun anew though it was there for {self.hub.now() - since:.0f} s")

    def newest(self, stage: int) -> int:
        """Number of the life of a stage that was decided last."""
        return max((number for one, number in self._decided if one == stage), default=0)

    # ---- how things really are ---------------------------------------------------------------------------------

    def _stages(self) -> int:
        found = max((peer.pipeline.roll.stages for peer in self.peers.values()), default=0)
        self._stages_ever = max(self._stages_ever, found)
        return found

    def _first(self) -> int:
        """The first stage that may be begun anew."""
        return 0 if self._stages() >= TOGETHER else 1

    def _heartbeat_s(self) -> float:
        return max((peer.pipeline.roll.heartbeat_s for peer in self.peers.values()), default=0.0)

    def _is_there(self, stage: int) -> bool:
        """Whether somebody who has its state is heard by everybody, in a chain with a quorum."""
        if not self.hub.quiet:
            return False
        number = self.newest(stage)
        serving = [
            peer
            for index, peer in self.peers.items()
            if (peer.pipeline.life.stage, peer.pipeline.life.number) == (stage, number)
            if not self.hub.is_paused(self.ids[index]) and peer.member.started and not peer.leaving
        ]
        awake = [peer.member.me for peer in serving]
        return any(peer.holds[1] and is_quorum(peer.member.head.commit.view, awake) for peer in serving)


def peer_stage(job: Job) -> int:
    """The stage that a peer has in the plan of its job."""
    return next(stage for stage, places in enumerate(job.step.plan.stages) if job.place in places)
