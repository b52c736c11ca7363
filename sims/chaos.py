"""Swarms of real nodes under seeded misfortune, in virtual time, with every invariant of the design checked.

One seed draws 3 to 24 peers and a schedule of joins, leaves, kills, pauses, partitions, lost, doubled and late messages. The nodes are
`farflung.node.peer.Peer`, their network is `farflung.sims.network`, their disks survive kills. Run by hand:

    python -m farflung.sims.chaos --seeds 500          # `make soak`
    python -m farflung.sims.chaos --seed 17 --events   # one schedule, with its log
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from farflung.compression import kernels
from farflung.compression.codec import Codec
from farflung.compression.int8 import Int8
from farflung.compression.policy import uniform
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.paths import resolve_paths
from farflung.node.peer import Facts, Peer
from farflung.node.storage import newest_history
from farflung.node.trainer import Pace
from farflung.protocol import chain, ledger
from farflung.protocol.chain import Certified, Rules, Vote
from farflung.protocol.keys import Ed25519Signer, short
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.sims import clock, faults
from farflung.sims.faults import Schedule, draw_schedule, play
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryHub, MemoryNetwork
from farflung.sims.toy import MemoryStorage, ToyLearner, VirtualDoor
from farflung.training.outer import OuterConfig

NUMEL = 1500
BLOCK = 32
INNER_STEPS = 4
SAMPLES_PER_STEP = 2
OUTER = OuterConfig(lr=0.7, momentum=0.5)
START_UNIX_S = 1.7e9
CHURN_S = 300.0
CALM_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How a swarm encodes, in both directions."""

    codec: Codec = field(default_factory=lambda: Int8(block=BLOCK))
    feedback: FeedbackSpec = field(default_factory=FeedbackSpec)
    numel: int = NUMEL
    checkpoint_s: float = 60.0
    min_contributors: int = 1


INT8 = Wire()


@dataclass(slots=True)
class Report:
    """What one seed did."""

    seed: int
    num_peers: int = 0
    faults: int = 0
    commits: int = 0
    rounds: int = 0
    missed: int = 0
    repairs: int = 0
    violations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)

    @property
    def log_digest(self) -> str:
        """sha256 over the whole event log: the same seed gives the same."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()


class Swarm:
    """The processes of one simulation, and the judge over what they do."""

    def __init__(
        self,
        seed: int,
        schedule: Schedule,
        hub: MemoryHub,
        group: asyncio.TaskGroup,
        report: Report,
        wire: Wire,
    ) -> None:
        num_peers = schedule.num_peers
        self.hub = hub
        self.report = report
        self.wire = wire
        self.signers = [Ed25519Signer(hashlib.sha256(f"{seed}/{i}".encode()).digest()) for i in range(num_peers)]
        self.ids = [s.peer_id for s in self.signers]
        self.disks = [MemoryStorage() for _ in self.signers]
        self.peers: dict[int, Peer] = {}
        self.learners: dict[int, ToyLearner] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.swarm = hashlib.sha256(f"swarm {seed}".encode()).digest()
        self._group = group
        self._delay_steps = seed % 2 * (INNER_STEPS - 1)
        """Every other seed trains on while rounds are under way."""
        self._speeds = [random.Random(f"{seed}/speed/{i}").uniform(0.6, 1.8) for i in range(num_peers)]
        self._digests: dict[int, str] = {}
        self.history: dict[int, chain.Commit] = {}
        self._seen: dict[int, dict[int, Certified]] = {}
        """By peer and height, what has been compared with `history`."""
        self.settings = Settings(
            swarm=self.swarm,
            founder=self.ids[schedule.founder],
            rules=Rules(
                window=3 * INNER_STEPS * SAMPLES_PER_STEP,
                lease=3,
                max_group=64,
                numel=wire.numel,
                tokens_per_sample=8,
            ),
            align=wire.codec.block,
            uplink=wire.codec.spec,
            downlink=wire.codec.spec,
            bytes_per_element=1.1,
            min_contributors=wire.min_contributors,
            total_rounds=1 << 40,
            min_round_s=3.0,
            max_round_s=30.0,
            removal_s=10.0,
            heartbeat_s=2.0,
            admits=lambda peer, token: True,
        )

    # ---- faults.Processes --------------------------------------------------------------------------------------

    def start(self, peer: int) -> None:
        task = self.tasks.get(peer)
        if task is not None and not task.done():
            return  # it is still saying goodbye; a second process would find its lock taken
        context = clock.process_context(self.ids[peer])
        self.tasks[peer] = self._group.create_task(self._live(peer), context=context, name=f"peer {peer}")

    def leave(self, peer: int) -> None:
        if peer in self.peers:
            self.peers[peer].stop("asked to leave")

    def kill(self, peer: int) -> None:
        self.peers.pop(peer, None)
        if peer in self.tasks:
            self.tasks[peer].cancel()

    async def _live(self, index: int) -> None:
        me = self.ids[index]
        network = MemoryNetwork(self.hub, me)
        log = EventLog(None, swarm="chaos", peer=short(me), clock=lambda: self.hub.loop.time())
        log.subscribe(lambda event: self._on_event(index, event))
        speed = self._speeds[index]
        learner = ToyLearner(self.wire.numel, OUTER)
        flat = uniform(self.wire.codec, self.wire.numel)
        doors = Doors(
            learner=VirtualDoor(lambda name: speed if name == "train" else 0.002),
            side=VirtualDoor(lambda name: 0.002),
            journal=VirtualDoor(lambda name: 0.002),
        )
        peer = Peer(
            network=network,
            signer=self.signers[index],
            settings=self.settings,
            pace=Pace(
                inner_steps=INNER_STEPS,
                delay_steps=self._delay_steps,
                samples_per_step=SAMPLES_PER_STEP,
                tokens_per_sample=8,
                total_rounds=self.settings.total_rounds,
            ),
            learner=learner,
            uplink=flat,
            downlink=flat,
            feedback=self.wire.feedback,
            outer_step=(OUTER.lr, OUTER.momentum),
            doors=doors,
            storage=self.disks[index],
            log=log,
            facts=Facts(device="toy", pid=0),
            checkpoint_s=self.wire.checkpoint_s,
            exit_when_done=False,
        )
        anchor, history = newest_history(self.disks[index].load_history())
        if self.ids[index] == self.settings.founder and not history:
            history = [self._genesis()]
            self.disks[index].append_commit(None, history[0])
        known = [p for p in self.hub.running() if p != me]
        self.peers[index] = peer
        self.learners[index] = learner
        try:
            await peer.run(anchor=anchor, history=history, known=known)
        finally:
            if self.peers.get(index) is peer:
                del self.peers[index]
            await network.close()

    def _genesis(self) -> Certified:
        founder = self.settings.founder
        commit = chain.genesis(founder, self.settings.rules)
        signed = chain.vote_bytes(self.swarm, 0, 0, chain.commit_hash(self.swarm, commit))
        return Certified(commit, 0, (Vote(founder, self.signers[self.ids.index(founder)].sign(signed)),))

    # ---- the judge ---------------------------------------------------------------------------------------------

    def violate(self, which: int, detail: str) -> None:
        self.report.violations.append(f"invariant {which}: {detail}")

    def _on_event(self, index: int, event: dict[str, object]) -> None:
        what = str(event["event"])
        shown = {k: v for k, v in event.items() if k not in ("swarm", "event", "peer", "time")}
        self.report.events.append(
            f"{float(str(event['time'])) - START_UNIX_S:9.3f} {index:2d} {what:15} {json.dumps(shown, sort_keys=True, default=str)}"
        )
        if what == "round.commit":
            self._check_round(index, event)
        elif what == "round.missed":
            self.report.missed += 1
            if not event.get("reason"):
                self.violate(9, f"peer {index} missed a round without a reason")
        elif what == "state.repair":
            self.report.repairs += 1
        elif what == "refused":
            if event["error"] not in ("Refused", "Replayed", "Stale"):
                self.violate(8, f"peer {index} refused an honest message: {event}")

    def _check_round(self, index: int, event: dict[str, object]) -> None:
        version, digest = int(str(event["version"])), str(event["digest"])
        if self._digests.setdefault(version, digest) != digest:
            self.violate(1, f"peer {index} holds other bytes at version {version}")

    def check_histories(self) -> None:
        """One history (invariant 5): whoever knows a commit of a height knows the same."""
        for index, peer in sorted(self.peers.items()):
            seen = self._seen.setdefault(index, {})
            for certified in peer.member.history:
                commit = certified.commit
                if seen.get(commit.height) is certified:
                    continue  # frozen, and compared when it was new
                seen[commit.height] = certified
                if self.history.setdefault(commit.height, commit) != commit:
                    self.violate(5, f"peer {index} has another commit {commit.height}")

    def check_samples(self) -> None:
        """Each sample is trained once (invariant 6), by the ledgers of all commits."""
        done: dict[int, int] = {}
        for height in sorted(self.history):
            commit = self.history[height]
            parent = self.history.get(height - 1)
            if commit.round is None or parent is None:
                continue
            for contribution in commit.round.contributors:
                taken, _ = ledger.split(parent.ledger.window(contribution.peer), contribution.samples)
                for number in _numbers(taken):
                    if number in done:
                        self.violate(6, f"sample {number} was counted in commits {done[number]} and {height}")
                    done[number] = height
        if not self.history or min(self.history) != 0:
            return
        newest = self.history[max(self.history)].ledger
        parts = [h.intervals for h in newest.held] + [newest.free] + [s.intervals for s in newest.suspended]
        waiting = [number for part in parts for number in _numbers(part)]
        if len(set(waiting)) != len(waiting) or set(waiting) & set(done):
            self.violate(6, "the ledger holds a sample twice")
        lost = set(range(newest.cursor)) - set(waiting) - set(done)
        if lost:
            self.violate(6, f"{len(lost)} samples were lost, e.g. {min(lost)}")

    def check_learners(self) -> None:
        """No commit, no outer step (2), and what a learner trained is what its place says (6)."""
        for index, peer in sorted(self.peers.items()):
            learner = self.learners[index]
            trainer = peer.trainer
            if not peer.applier.idle or not peer.applier.steady.is_set() or peer.applier.version < 0:
                continue
            digest = learner.outer.digest().hex()
            if self._digests.setdefault(peer.applier.version, digest) != digest:
                self.violate(2, f"peer {index}: the outer state is not that of version {peer.applier.version}")
            accounted = list(_numbers(trainer.progress.trained))
            ahead = len(learner.trained) - len(accounted)
            in_a_step = SAMPLES_PER_STEP if trainer.busy.locked() else 0  # trained, and accounted for when it is over
            if learner.trained[: len(accounted)] != accounted or ahead > in_a_step:
                self.violate(6, f"peer {index} trained other samples than it accounts for")

    def check_end(self) -> None:
        """After the calm stretch everybody who runs is a member, at the same height, and rounds go on."""
        heights = {
            index: peer.member.head.commit.height for index, peer in sorted(self.peers.items()) if peer.member.started
        }
        if not self.peers:
            return
        if len(heights) < len(self.peers):
            self.violate(0, f"peers {sorted(set(self.peers) - set(heights))} never learned the history")
        newest = max(heights.values(), default=0)
        for index, peer in sorted(self.peers.items()):
            if index in heights and (heights[index] < newest - 1 or not peer.member.in_view):
                self.violate(
                    0,
                    f"peer {index} is left behind: height {heights[index]} of {newest}, {peer.state_reason}",
                )


def _numbers(intervals: Iterable[tuple[int, int]]) -> Iterable[int]:
    return (number for start, stop in intervals for number in range(start, stop))


def run_seed(seed: int, *, churn_s: float = CHURN_S) -> Report:
    """Simulate one seed from beginning to end."""
    torch.set_num_threads(1)
    kernels.prepare(resolve_paths().cache / "kernels")  # the same bits as PyTorch's, a sixth of the time
    rng = random.Random(seed)
    num_peers = rng.randint(3, faults.MAX_PEERS)
    schedule = draw_schedule(rng, num_peers, churn_s + CALM_S, faults.ChurnModel(calm_s=CALM_S, min_rejoin_s=8.0))
    return run_schedule(seed, schedule)


Meddler = Callable[[Swarm], Awaitable[None]]
"""What a test does to a swarm beside the schedule."""


def run_schedule(seed: int, schedule: Schedule, meddler: Meddler | None = None, wire: Wire = INT8) -> Report:
    """Simulate a schedule; the seed draws keys, speeds and what the network does."""
    report = Report(seed, num_peers=schedule.num_peers, faults=len(schedule.faults))
    report.schedule = schedule.describe().splitlines()
    clock.run(_simulate(seed, schedule, report, meddler, wire), start=START_UNIX_S)
    return report


async def _simulate(seed: int, schedule: Schedule, report: Report, meddler: Meddler | None, wire: Wire) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, clock.VirtualLoop)
    link = LinkModel()
    hub = MemoryHub(loop, random.Random(f"{seed}/network"), link)
    async with asyncio.TaskGroup() as group:
        swarm = Swarm(seed, schedule, hub, group, report, wire)
        helpers = [group.create_task(_watch(swarm))]
        if meddler is not None:
            helpers.append(group.create_task(_meddle(meddler, swarm)))
        await play(schedule, hub, swarm.ids, swarm)
        calm_rounds = _rounds(swarm)
        await asyncio.sleep(CALM_S / 3)
        swarm.check_histories()
        if swarm.peers and _rounds(swarm) == calm_rounds:
            swarm.violate(0, "no round in the calm stretch")
        for helper in helpers:
            helper.cancel()
        swarm.check_end()
        swarm.check_learners()
        swarm.check_samples()
        report.commits = max(swarm.history, default=0)
        report.rounds = _rounds(swarm)
        for task in swarm.tasks.values():
            task.cancel()


async def _meddle(meddler: Meddler, swarm: Swarm) -> None:
    await meddler(swarm)


def _rounds(swarm: Swarm) -> int:
    return max((commit.version for commit in swarm.history.values()), default=0)


async def _watch(swarm: Swarm) -> None:
    while True:
        await asyncio.sleep(2.0)
        swarm.check_histories()
        swarm.check_learners()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="run seeds 0 to N-1")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--events", action="store_true", help="print the event log")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else list(range(args.seeds))
    failed = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        reports = map(run_seed, seeds) if len(seeds) == 1 else pool.map(run_seed, seeds)
        for report in reports:
            if args.events:
                sys.stdout.write("\n".join(report.schedule + report.events) + "\n")
            verdict = "ok" if not report.violations else "VIOLATED"
            sys.stdout.write(
                f"seed {report.seed:4d}: {report.num_peers:2d} peers, {report.faults:3d} faults, {report.commits:3d} commits,"
                f" {report.rounds:3d} rounds, {report.missed:3d} missed, {verdict}\n"
            )
            for violation in report.violations[:5]:
                sys.stdout.write(f"    {violation}\n")
            failed += bool(report.violations)
            sys.stdout.flush()
    sys.stdout.write(f"{len(seeds) - failed} passed, {failed} failed\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
