"""Commits enter the learner one after another: from means that are held, fetched or on disk, and else by download."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.node.lab import CODEC, NUMEL, OUTER, Lab, Node, in_lab, peer, sha
from tests.protocol.bus import beat

from farflung.node.apply import Applier
from farflung.node.catchup import Catchup
from farflung.node.events import EventLog
from farflung.node.replica_trainer import ReplicaTrainer
from farflung.node.statesync import Donor, StateSync
from farflung.node.trainer import Host, Pace, Progress
from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Contribution, PartResult, RoundResult, Rules
from farflung.protocol.effects import Repair
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.lap import Laps
from farflung.protocol.membership import Membership
from farflung.sims.toy import ToyLearner

SWARM = b"w" * 32
RULES = Rules(ahead=12, lease=3, max_group=8, cuts=(0, NUMEL), laps=Laps.fixed(2), total_steps=198, tokens_per_sample=1)
PARTS = ((0, 304), (304, NUMEL))
PACE = Pace(laps=Laps.fixed(2), samples_per_step=2, tokens_per_sample=1, total_steps=198)


@dataclass
class Settings:
    founder: PeerId
    rules: Rules = RULES


@dataclass
class Member:
    """What an applier asks of its member."""

    me: PeerId
    settings: Settings
    membership: Membership
    history: History = field(default_factory=History)

    @property
    def head(self) -> Certified:
        return self.history.head


class Applying:
    """A node's applier and what it said; the node is also a donor."""

    def __init__(self, lab: Lab, node: Node, *, checkpoint_s: float = 1e9) -> None:
        self.node = node
        self.events: list[dict[str, Any]] = []
        self.said: list[tuple[int, int, bytes]] = []
        self.lost: list[int] = []
        """Versions from which a download began."""
        self.member = Member(node.id, Settings(peer(0)), Membership(node.id, 1.0))
        log = EventLog(None, swarm="test", peer=str(node.number), clock=lambda: 0.0)
        log.subscribe(self.events.append)
        host = Host(may_train=lambda: False, is_due=lambda step_s: False, set_ready=lambda ready: None, withdraw=lambda: None, up_bytes_per_s=lambda: 0.0)  # fmt: skip
        self.trainer = ReplicaTrainer(node.id, node.learner, node.doors.learner, log, PACE, host)
        member: Any = self.member
        catchup = Catchup(
            sync=StateSync(node.network, node.learner, node.refused), member=member, exchange=node.exchange,
            learner=node.learner, doors=node.doors, storage=node.disk, log=log, outer=OUTER,
        )  # fmt: skip
        self.applier = Applier(
            member=member, exchange=node.exchange, means=node.means, residuals=node.residuals, catchup=catchup, trainer=self.trainer,
            learner=node.learner, doors=node.doors, storage=node.disk, log=log, checkpoint_s=checkpoint_s, evaluate=lambda: node.doors.learner.run(node.learner.evaluate),
            all_evaluate_last=False,
            applied=lambda *where: self.said.append(where),
            lost_state=lambda: self.lost.append(self.applier.version),
        )  # fmt: skip
        self.applier.donor = Donor(node.network, node.learner, lambda: self.applier.version, self.applier.steady)
        self.applier.donor.serve(node.refused, lambda peer: True, within_s=600.0)
        self.task = lab.group.create_task(self.applier.run())

    async def start(self, history: Sequence[Certified]) -> None:
        await self.applier.restore(list(history))
        self.member.history.replace(None, history)
        await self.applier.resume(list(history))
        await self.idle()

    async def take(self, *commits: Certified) -> None:
        for certified in commits:
            self.member.history.append(certified)
            self.applier.push(certified)
        await self.idle()

    async def idle(self) -> None:
        async with asyncio.timeout(300.0):
            while not self.applier.idle:
                await asyncio.sleep(0.05)

    def hears(self, other: "Applying") -> None:
        """The other's heartbeat."""
        height, version, digest = other.said[-1]
        heartbeat = beat(height=height, version=version, digest=digest)
        self.member.membership.heard(other.node.id, asyncio.get_running_loop().time(), heartbeat)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    @property
    def digest(self) -> bytes:
        return self.node.learner.outer.digest()


def genesis() -> Certified:
    return Certified(chain.genesis(peer(0), RULES), 0, ())


def change(parent: Commit, *who: int) -> Certified:
    """A change of view."""
    view = tuple(peer(n) for n in who)
    return Certified(chain.successor(SWARM, parent, RULES, view=view, left=(), result=None), 0, ())


def mean_of(version: int, part: int) -> bytes:
    start, stop = PARTS[part]
    return bytes(CODEC.encode(torch.sin(torch.arange(start, stop) * 0.1 * (version + 1)) * 0.01))


def plan_of(version: int) -> bytes:
    return bytes([version]) * 32


def round_after(parent: Commit, *, samples: int = 4, kept: Sequence[int] = (0, 1)) -> Certified:
    """A round to which the whole view contributed, with means that follow from its version."""
    version = parent.version + 1
    parts = tuple(
        PartResult(parent.view[0], a, b, sha(mean_of(version, k)) if k in kept else b"")
        for k, (a, b) in enumerate(PARTS)
    )
    contributors = tuple(Contribution(p, samples, samples, 1000) for p in parent.view)
    result = RoundResult(plan=plan_of(version), contributors=contributors, parts=parts, seconds_ms=10)
    return Certified(chain.successor(SWARM, parent, RULES, view=parent.view, left=(), result=result), 0, ())


async def hold(node: Node, version: int, parts: Sequence[int] = (0, 1)) -> None:
    for k in parts:
        await node.means.put(plan_of(version), k, mean_of(version, k))


def expected(versions: int, kept: Sequence[int] = (0, 1)) -> bytes:
    """The digest of the outer state after so many rounds, computed by itself."""
    toy = ToyLearner(NUMEL, OUTER, chunk_bytes=800)
    for version in range(1, versions + 1):
        for k in kept:
            start, stop = PARTS[k]
            toy.outer.step_(start, stop, CODEC.decode(mean_of(version, k), stop - start), OUTER.lr, OUTER.momentum)
    return toy.outer.digest()


def train(one: Applying, *numbers: int) -> None:
    """Local progress on these samples, which must be consecutive."""
    for first in range(0, len(numbers), PACE.samples_per_step):
        one.node.learner.train(numbers[first : first + PACE.samples_per_step], 0)
    one.trainer.progress = Progress(((numbers[0], numbers[-1] + 1),), len(numbers) // PACE.samples_per_step, 0.0)


# ---- where it begins ------------------------------------------------------------------------------------------


def test_the_founder_begins_with_the_fresh_state() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        assert (one.applier.height, one.applier.version) == (0, 0)
        assert one.said == [(0, 0, one.digest)] and one.trainer.window == ((0, 24),)

    in_lab(1, main)


def test_nobody_else_does() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[1])
        assert not await one.applier.restore([genesis()])
        assert one.applier.version == -1

    in_lab(2, main)


# ---- one commit after another ---------------------------------------------------------------------------------


def test_rounds_move_the_state_and_everybody_is_told() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        first = round_after(genesis().commit)
        second = round_after(first.commit)
        for version in (1, 2):
            await hold(one.node, version)
        await one.take(first, second)
        assert [(h, v) for h, v, _ in one.said] == [(0, 0), (1, 1), (2, 2)]
        assert one.said[-1][2] == one.digest == expected(2)
        assert [e["round"] for e in one.named("round.commit")] == [1, 2]
        assert one.node.means.needed() == {plan_of(1), plan_of(2)}
        assert one.trainer.window == one.member.head.commit.ledger.window(one.node.id)

    in_lab(1, main)


def test_a_change_of_view_moves_nothing_but_the_window() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        before = one.digest
        await one.take(change(genesis().commit, 0, 1))
        assert one.said[-1] == (1, 0, before) and one.digest == before
        assert [e["reason"] for e in one.named("view.commit")] == ["2 members"]

    in_lab(2, main)


def test_a_part_that_was_left_out_does_not_move() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        await hold(one.node, 1, [1])
        await one.take(round_after(genesis().commit, kept=[1]))
        assert one.digest == expected(1, kept=[1])
        assert one.named("round.commit")[0]["parts_left_out"] == 1

    in_lab(1, main)


def test_what_is_not_here_is_fetched_from_members() -> None:
    async def main(lab: Lab) -> None:
        one, other = (Applying(lab, n) for n in lab.nodes)
        both = change(genesis().commit, 0, 1)
        await one.start([genesis(), both])
        other.member.settings.founder = other.node.id  # it holds the fresh state, too
        await other.start([genesis()])
        other.said.append((1, 0, b"d" * 32))
        one.hears(other)
        await hold(one.node, 1, [0])
        await hold(other.node, 1)
        await one.take(round_after(both.commit))
        assert one.digest == expected(1) and not one.node.errors

    in_lab(2, main)


def test_the_same_commit_twice_counts_once() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        first = round_after(genesis().commit)
        await hold(one.node, 1)
        await one.take(first)
        one.applier.push(first)
        await one.idle()
        assert one.digest == expected(1) and one.applier.version == 1

    in_lab(1, main)


# ---- local progress -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_a_round_counted_is_no_progress_any_more(in_flight: bool) -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 0, 1, 2, 3)
        if in_flight:  # else: it was sent by a process that was killed since
            one.node.learner.pseudo_gradient()
            one.node.exchange.in_flight = plan_of(1)
            train(one, 0, 1, 2, 3, 4, 5)
            one.node.learner.trained = [0, 1, 2, 3, 4, 5]
        await hold(one.node, 1)
        await one.take(round_after(genesis().commit, samples=4))
        kept = [4, 5] if in_flight else []
        assert one.node.learner.trained == kept
        assert one.trainer.progress.trained == (((4, 6),) if in_flight else ())
        dropped = [e["reason"] for e in one.named("progress.dropped")]
        assert dropped == ([] if in_flight else ["a round counted it before this node was restarted"])

    in_lab(1, main)


def test_progress_on_samples_of_others_is_dropped_with_a_reason() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        train(one, 100, 101)
        await one.take(change(genesis().commit, 0, 1))
        assert one.node.learner.trained == [] and one.trainer.progress == Progress()
        assert [e["reason"] for e in one.named("progress.dropped")] == ["its samples were handed to others"]

    in_lab(2, main)


# ---- restarts -------------------------------------------------------------------------------------------------


def restarted(lab: Lab, old: Applying) -> Applying:
    """A new process on the same disk."""
    old.task.cancel()
    lab.hub.kill(old.node.id)
    node = Node(lab, old.node.number)
    node.disk = old.node.disk
    node.means._storage = old.node.disk
    return Applying(lab, node)


def test_a_restart_replays_from_its_own_disk() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        history = [genesis()]
        await one.start(history)
        for version in (1, 2, 3):
            history.append(round_after(history[-1].commit))
            await hold(one.node, version)
            await one.take(history[-1])
            if version == 1:
                await one.applier.save_place()
        again = restarted(lab, one)
        await again.start(history)
        assert again.applier.version == 3 and again.digest == one.digest == expected(3)
        assert [v for _, v, _ in again.said] == [1, 2, 3]

    in_lab(1, main)


def test_a_restart_before_the_first_checkpoint() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        first = round_after(genesis().commit)
        await one.start([genesis()])
        await hold(one.node, 1)
        await one.take(first)
        again = restarted(lab, one)
        await again.start([genesis(), first])
        assert again.digest == expected(1)

    in_lab(1, main)


def test_a_checkpoint_when_due() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0], checkpoint_s=0.0)
        await one.start([genesis()])
        await hold(one.node, 1)
        await one.take(round_after(genesis().commit))
        assert one.node.disk.learner is not None
        place = one.node.disk.learner[1]
        assert (place.height, place.version) == (1, 1)

    in_lab(1, main)


# ---- whole state ----------------------------------------------------------------------------------------------


def test_a_newcomer_downloads_the_state_that_a_quorum_announces() -> None:
    async def main(lab: Lab) -> None:
        one, two, new = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1)]
        for old in (one, two):
            old.member.settings.founder = old.node.id  # both hold the fresh state
            await old.start(history)
        history.append(round_after(history[-1].commit))
        for old in (one, two):
            await hold(old.node, 1)
            await old.take(history[-1])
            new.hears(old)
        new.node.learner.outer.params.zero_()
        new.member.history.replace(history[-2].commit, ())
        on_disk: list[bool] = []
        said = new.applier._applied
        new.applier._applied = lambda *where: (on_disk.append(new.node.disk.learner is not None), said(*where))[1]
        await new.take(history[-1])
        assert new.applier.version == 1 and new.digest == expected(1)
        assert on_disk == [True], "kept before it is announced: who announces a state may get a vote"
        sync = new.named("state.sync")
        assert sync and sync[-1]["chunks_done"] == sync[-1]["chunks"]
        assert torch.equal(new.node.learner.parameters[0], new.node.learner.outer.params)

    in_lab(3, main)


def test_a_member_that_is_too_far_behind_downloads_and_keeps_its_progress() -> None:
    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1, 2)]
        for node in (one, two, late):
            node.member.settings.founder = node.node.id
            await node.start(history)
        window = history[-1].commit.ledger.window(late.node.id)
        train(late, *range(window[0][0], window[0][0] + 4))
        local = late.node.learner.parameters[0] - late.node.learner.outer.params
        for version in (1, 2):
            full = round_after(history[-1].commit)
            assert full.commit.round is not None
            less = RoundResult(
                plan=full.commit.round.plan, seconds_ms=1, parts=full.commit.round.parts,
                contributors=tuple(c for c in full.commit.round.contributors if c.peer != late.node.id),
            )  # fmt: skip
            view = tuple(peer(n) for n in (0, 1, 2))
            history.append(
                Certified(chain.successor(SWARM, history[-1].commit, RULES, view=view, left=(), result=less), 0, ())
            )
            for node in (one, two):
                await hold(node.node, version)
                await node.take(history[-1])
        for node in (one, two):
            node.node.disk.means.clear()  # nobody remembers the first round
            node.node.means._committed.clear()
            late.hears(node)
        await late.take(*history[-2:])
        assert late.applier.version == 2 and late.digest == expected(2)
        assert late.lost == [0] and one.lost == [], "no vote while the state is being replaced"
        kept = late.node.learner.parameters[0] - late.node.learner.outer.params
        torch.testing.assert_close(kept, local, atol=1e-5, rtol=0)
        assert late.trainer.progress.steps == 2 and not late.named("progress.dropped")

    in_lab(3, main)


def test_a_jump_over_a_round_onto_a_change_of_view_downloads_the_state() -> None:
    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1, 2)]
        for node in (one, two, late):
            node.member.settings.founder = node.node.id
            await node.start(history)
        moved = round_after(history[-1].commit)
        smaller = change(moved.commit, 0, 1)
        for node in (one, two):
            await hold(node.node, 1)
            await node.take(moved, smaller)
            late.hears(node)
        late.member.history.replace(moved.commit, [smaller])
        late.applier.push(smaller)
        await late.idle()
        assert (late.applier.height, late.applier.version) == (3, 1) and late.digest == expected(1)

    in_lab(3, main)


def test_a_round_that_came_with_a_downloaded_state_is_counted_once() -> None:
    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1, 2)]
        for node in (one, two, late):
            node.member.settings.founder = node.node.id
            await node.start(history)
        first = history[-1].commit.ledger.window(late.node.id)[0][0]
        train(late, *range(first, first + 8))  # half of it is counted, half is progress since
        late.node.learner.offer()
        late.node.learner.offered_gradient(0, NUMEL)
        late.node.exchange.in_flight = plan_of(1)
        late.node.learner.sent_samples = late.node.learner.trained[:4]
        moved = round_after(history[-1].commit)
        for node in (one, two):
            await hold(node.node, 1)
            await node.take(moved)
            node.node.disk.means.clear()  # nobody remembers the round
            node.node.means._committed.clear()
            late.hears(node)
        await late.take(moved)
        assert late.applier.version == 1 and late.lost == [0]
        assert late.trainer.progress.trained == ((first + 4, first + 8),) and late.trainer.progress.steps == 2
        assert late.node.learner.trained == list(range(first + 4, first + 8))

    in_lab(3, main)


def test_a_minority_repairs_the_chunks_in_which_it_differs() -> None:
    async def main(lab: Lab) -> None:
        one, two, wrong = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1, 2)]
        for node in (one, two, wrong):
            node.member.settings.founder = node.node.id
            await node.start(history)
        good = wrong.digest
        train(wrong, *range(*wrong.trainer.window[0])[:4])
        local = wrong.node.learner.parameters[0] - wrong.node.learner.outer.params
        wrong.node.learner.outer.params[250] += 1.0
        wrong.node.learner.parameters[0][250] += 1.0
        assert wrong.digest != good
        wrong.applier.push(Repair(0, one.said[-1][2], (one.node.id, two.node.id)))
        await wrong.idle()
        assert wrong.digest == good and wrong.said[-1] == (1, 0, good)
        assert [e["chunks"] for e in wrong.named("state.repair")] == [1]
        kept = wrong.node.learner.parameters[0] - wrong.node.learner.outer.params
        torch.testing.assert_close(kept, local, atol=1e-5, rtol=0)

    in_lab(3, main)


@pytest.mark.parametrize("obstacle", ["another version", "another digest", "nobody there"])
def test_a_repair_that_cannot_be_done_changes_nothing(obstacle: str) -> None:
    async def main(lab: Lab) -> None:
        one, wrong = (Applying(lab, n) for n in lab.nodes)
        history = [genesis(), change(genesis().commit, 0, 1)]
        for node in (one, wrong):
            node.member.settings.founder = node.node.id
            await node.start(history)
        wrong.node.learner.outer.params[250] += 1.0
        before, said = wrong.digest, list(wrong.said)
        if obstacle == "nobody there":
            lab.hub.kill(one.node.id)
        version = 7 if obstacle == "another version" else 0
        digest = b"x" * 32 if obstacle == "another digest" else one.said[-1][2]
        wrong.applier.push(Repair(version, digest, (one.node.id,)))
        await wrong.idle()
        assert wrong.digest == before and wrong.said == said

    in_lab(2, main)


def test_finish_ends_it_between_two_commits() -> None:
    async def main(lab: Lab) -> None:
        one = Applying(lab, lab.nodes[0])
        await one.start([genesis()])
        await hold(one.node, 1)
        one.applier.finish()
        one.applier.push(round_after(genesis().commit))
        await asyncio.wait([one.task])
        assert one.task.done() and one.applier.version == 0

    in_lab(1, main)
