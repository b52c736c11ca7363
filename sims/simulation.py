"""One simulation from beginning to end: a swarm, what goes wrong, the judge over it, and the log of all that happened (`trail`)."""

import asyncio
import random
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch

from farflung.compression import kernels
from farflung.node.events import Event, Meter
from farflung.node.paths import resolve_paths
from farflung.protocol.keys import PeerId
from farflung.sims import clock
from farflung.sims.facts import LedgerFacts
from farflung.sims.fault_playing import play
from farflung.sims.faults import Fault, Schedule
from farflung.sims.harm import Harm
from farflung.sims.hub import Backbone, MemoryHub
from farflung.sims.judge import OUTSIDE_S, Judge
from farflung.sims.last_ledger import COMMITS, Applied, ledger_of
from farflung.sims.links import LinkModel
from farflung.sims.logs import Chain, chain_of, stage_of
from farflung.sims.nat import Nat
from farflung.sims.pipeline_recoveries import Recovered
from farflung.sims.roll_call import RollCall
from farflung.sims.swarm import START_UNIX_S, Labour, Outfit, Swarm, verdict
from farflung.sims.trail import Sink, Trail

CRASH_LINES = 4
"""Entries of a crash's traceback that are logged, the innermost last."""

LOOK_S = 2.0
"""Between two looks of the judge at what nodes hold."""

MANY_LOOKS = 10_000
"""In one simulation: where it is so long, looks are further apart."""

Meddler = Callable[[Swarm], Awaitable[None]]
"""What a test does to a swarm beside the schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that a simulation depends on."""

    seed: int
    """Draws what the network does."""
    schedule: Schedule
    outfit: Outfit
    links: Callable[[int], LinkModel] | None = None
    """Access link by peer; all have the default when not given."""
    backbone: Backbone | None = None
    """What lies between the access links; nothing when not given."""
    nats: Callable[[int], Nat] | None = None
    """The router in front of each peer; none has one when not given."""
    calm_s: float = 0.0
    """Length of the calm stretch at the end of the schedule; 0: something may go wrong until the end, and whether the swarm lives is not judged."""
    known_means: bool = True
    """See `judge.Judge`."""
    stop_when_broken: bool = False


@dataclass(slots=True)
class Report:
    """What a simulation did."""

    seed: int
    num_peers: int
    schedule: list[str]
    commits: int = 0
    rounds: int = 0
    contributed: int = 0
    """Contributions that rounds counted: of a pipeline those of all stages, as `missed` and `sent_bytes` are, with which it is compared."""
    missed: int = 0
    """Contributions that missed their round."""
    repairs: int = 0
    dropped_steps: int = 0
    tokens: int = 0
    members: int = 0
    """In the newest view."""
    sent_bytes: int = 0
    """Encoded contributions and means that nodes sent for committed rounds."""
    net_bytes: int = 0
    """All that nodes sent, as their `net` events have it: bulk and control messages, without what the DHT and encryption add."""
    losses: list[tuple[float, int, float]] = field(default_factory=list)
    """Held-out: seconds, tokens of the swarm, nats per token."""
    round_seconds: list[float] = field(default_factory=list)
    """From the plan until all members held all means, as the proposer saw it, by round; of a pipeline, as `rounds` are, those of stage 0."""
    labour: list[Labour] = field(default_factory=list)
    """By peer."""
    recoveries: list[Recovered] = field(default_factory=list)
    """Of stages of a pipeline that were begun anew."""
    faults: list[Fault] = field(default_factory=list)
    """Of the schedule, those that something came of, as far as it went."""
    ledger: LedgerFacts | None = None
    """Who has which sample in hand at the end; None until then."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual, of all of it."""
    broken_at: float | None = None
    """Seconds from the beginning to the first violation."""
    log_sha256: str = ""
    events: list[str] = field(default_factory=list)
    """The log, when it was kept."""
    _meters: dict[str, Meter] = field(default_factory=dict)
    """Of what is sent, by public key."""
    _timed: set[tuple[Chain, int]] = field(default_factory=set)
    """Heights in `round_seconds`."""
    applied: Applied = field(default_factory=Applied)
    """Commits that nodes have told of."""

    def note(self, at: float, event: Event) -> None:
        """Count what a node says, in the order of time; `at` is seconds from the beginning."""
        self.net_bytes += self._meters.setdefault(event["peer"], Meter("sent_bytes")).more(event)
        if event["event"] in COMMITS:
            self.applied.note(event)
        match event["event"]:
            case "round.commit":
                self.sent_bytes += int(event["sent_bytes"])
                self.contributed += bool(event["contributed"])
                place = chain_of(event), int(event["round"])
                if stage_of(event) == 0 and place not in self._timed:
                    self._timed.add(place)
                    self.round_seconds.append(float(event["seconds"]))
            case "round.missed":
                self.missed += 1
            case "state.repair":
                self.repairs += 1
            case "progress.dropped":
                self.dropped_steps += int(event["steps"])
            case "outer.eval" if event["loss"] is not None:
                self.losses.append((at, int(event["tokens"]), float(event["loss"])))


def simulate(plan: Plan, *, sink: Sink | None = None, keep: bool = False, meddler: Meddler | None = None) -> Report:
    """Run a plan. `keep` keeps the log in the report, `sink` sees it as it grows."""
    torch.set_num_threads(1)
    kernels.prepare(resolve_paths().cache / "kernels")  # the same bits as PyTorch's, a sixth of the time
    report = Report(plan.seed, plan.schedule.num_peers, plan.schedule.describe().splitlines())
    run = _Run(plan, report, sink, keep)
    try:
        clock.run(run.run(meddler), start=START_UNIX_S)
    except clock.ClockError as error:
        run.stood_still(error)
    run.conclude()
    return report


class _Run:
    """The moving parts of a simulation."""

    def __init__(self, plan: Plan, report: Report, sink: Sink | None, keep: bool) -> None:
        self._plan = plan
        self._report = report
        self._trail = Trail(keep, sink, report.events)
        self._judge = Judge(broken=self._broken, known_means=plan.known_means)
        self._is_broken = asyncio.Event()
        self._roll_call: RollCall
        self._harm: Harm
        self._now = 0.0
        """Seconds from the beginning when something was logged last."""

    async def run(self, meddler: Meddler | None) -> None:
        plan, report, judge = self._plan, self._report, self._judge
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(
            loop,
            random.Random(f"{plan.seed}/network"),
            LinkModel(),
            backbone=plan.backbone,
            on_message=judge.on_message,
            routers_seed=f"{plan.seed}/nat",
        )
        hub.on_delivery = self._on_delivery
        async with asyncio.TaskGroup() as group:
            swarm = judge.swarm = Swarm(
                plan.outfit, hub, group, self._on_event, judge.on_gradient, judge.on_meeting, self._on_crash
            )
            self._roll_call = RollCall(swarm, judge, alike=plan.links is None)
            self._harm = Harm(swarm, judge.violate)
            if plan.links is not None:
                for index, peer in enumerate(swarm.ids):
                    hub.set_link(peer, plan.links(index))
            if plan.nats is not None:
                for index, peer in enumerate(swarm.ids):
                    hub.set_nat(peer, plan.nats(index))
            helpers = [group.create_task(work) for work in (self._watch(), self._calm_down(), swarm.look_around())]
            if meddler is not None:
                helpers.append(group.create_task(_meddle(meddler, swarm)))
            story = group.create_task(self._story(swarm))
            until = [story]
            if plan.stop_when_broken:
                until.append(group.create_task(_wait(self._is_broken)))
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            for task in [*helpers, *until]:
                task.cancel()
            judge.look(everybody=True)
            self._harm.look()
            report.seconds = self._trail.now
            for peer in hub.running():
                hub.resume(peer)  # whoever is stopped cannot end
            for task in swarm.tasks.values():
                task.cancel()

    def stood_still(self, error: clock.ClockError) -> None:
        """The clock cannot go on, for what the nodes did."""
        self._report.seconds = self._now
        self._note_broken(*verdict(error), self._now)

    def conclude(self) -> None:
        """Work out the report."""
        report, judge = self._report, self._judge
        report.commits = max((max(one.history, default=0) for one in judge.groups.values()), default=0)
        report.rounds = judge.rounds
        report.tokens, report.members = judge.tokens, judge.members
        report.labour = judge.swarm.labour
        commits = [commit for group in judge.groups.values() for commit in group.history.values()]
        report.ledger = ledger_of({0: commits}, report.applied)
        report.log_sha256 = self._trail.sha256

    async def _story(self, swarm: Swarm) -> None:
        """The schedule, and the judgement on how the swarm has come out of it."""
        plan, judge = self._plan, self._judge
        await play(plan.schedule, swarm.hub, swarm.ids, swarm, self._on_fault)
        if not plan.calm_s:
            return
        before = judge.versions()
        judge.calm = self._roll_call.has_begun
        await asyncio.sleep(plan.calm_s / 3)
        judge.look()
        after = judge.versions()
        stands = any(after[name] == version for name, version in before.items() if name in after)
        if stands or (swarm.expected and not before and not judge.rounds):
            judge.violate(0, "no round in the calm stretch")
        judge.check_end()
        self._roll_call.end()

    async def _calm_down(self) -> None:
        """Some time after the last thing has gone wrong all must be well, where there is so much time left, and messages are not lost all the time."""
        plan = self._plan
        since_s = plan.schedule.calm_from + plan.calm_s / 3
        if plan.calm_s and plan.schedule.duration_s >= since_s and not self._is_lossy():
            await asyncio.sleep(since_s)
            self._roll_call.begin()

    def _is_lossy(self) -> bool:
        """Whether a message may be lost: twice, and it can cost a part, and nothing has to have gone wrong besides."""
        links = self._plan.links
        return links is not None and any(links(peer).drop for peer in range(self._plan.schedule.num_peers))

    async def _watch(self) -> None:
        every_s = min(max(LOOK_S, self._plan.schedule.duration_s / MANY_LOOKS), OUTSIDE_S / 2)
        while True:
            await asyncio.sleep(every_s)
            self._judge.look()
            self._roll_call.look()
            if self._plan.calm_s:
                self._judge.look_who_is_well()

    # ---- the log -----------------------------------------------------------------------------------------------

    def _on_delivery(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        self._judge.on_delivery(sender, receiver, data)
        self._harm.arrives(sender, receiver, data)

    def _on_event(self, index: int, event: Event) -> None:
        self._now = self._trail.now
        self._trail.event(index, event)
        self._report.note(self._now, event)
        self._judge.on_event(index, event)
        self._harm.on_event(index, event)
        if event["event"] == "round.missed":
            self._roll_call.missed(index)

    def _on_fault(self, line: str, fault: Fault | None) -> None:
        self._trail.log(None, "fault", {"what": line})
        if fault is not None:
            self._report.faults.append(fault)

    def _on_crash(self, index: int, error: Exception) -> None:
        trace = traceback.format_exception(error)
        self._trail.log(index, "crash", {"traceback": [line.strip() for line in trace[-CRASH_LINES:]]})
        self._judge.violate(8, f"peer {index} crashed: {type(error).__name__}: {error}")

    def _broken(self, which: int, detail: str) -> None:
        self._note_broken(which, detail, self._trail.now)

    def _note_broken(self, which: int, detail: str, at: float) -> None:
        self._report.violations.append(f"invariant {which}: {detail}")
        if self._report.broken_at is None:
            self._report.broken_at = at
        self._trail.log_at(at, None, "invariant.broken", {"which": which, "detail": detail})
        self._is_broken.set()


async def _meddle(meddler: Meddler, swarm: Swarm) -> None:
    await meddler(swarm)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
