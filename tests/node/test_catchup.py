"""The whole outer state by download: newcomers, who was away for too long, jumps of the history, and repairs."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from tests.node.applying import (
    PACE,
    PARTS,
    RULES,
    SWARM,
    Applying,
    Settings,
    change,
    expected,
    founded,
    hold,
    mean_of,
    plan_of,
    round_after,
    train,
)
from tests.node.lab import CODEC, NUMEL, OUTER, Lab, in_lab, peer
from tests.protocol.bus import beat

from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.node.catchup import FOLLOWED_ROUNDS, VERSIONS_AHEAD
from farflung.node.disk import KEPT_ROUNDS
from farflung.node.network import PeerId
from farflung.node.statesync import Download
from farflung.protocol import chain
from farflung.protocol.chain import Certified, RoundResult
from farflung.protocol.effects import Repair
from farflung.protocol.headers import ChunkList
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.toy import ToyLearner
from farflung.training.errors import NothingOffered
from farflung.training.rules import Sgd


async def take_as_state(moved: Certified, late: Applying, *others: Applying) -> None:
    """A round that nobody remembers comes to `late` as the state that it has made."""
    for other in others:
        await hold(other.node, 1)
        await other.take(moved)
        other.node.disk.means.clear()
        late.hears(other)
    await late.take(moved)


async def newcomer(lab: Lab) -> tuple[Applying, Applying]:
    """One who has had a round, and one who knows of it and has nothing of its state."""
    one, new = (Applying(lab, n) for n in lab.nodes)
    history = await founded(one)
    history.append(round_after(history[-1].commit))
    await hold(one.node, 1)
    await one.take(history[-1])
    new.hears(one)
    new.node.learner.outer.params.zero_()
    new.member.history.replace(history[-2].commit, history[-1:])
    return one, new


def test_a_newcomer_downloads_the_state_that_a_quorum_announces() -> None:
    async def main(lab: Lab) -> None:
        one, two, new = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, two)
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
        new.node.exchange.expect(plan_of(1), lab.plan())
        await hold(new.node, 1, [0])
        await new.take(history[-1])
        assert plan_of(1) not in new.node.exchange._rounds and not new.node.means._undecided, "its transfers are over"
        assert new.applier.version == 1 and new.digest == expected(1)
        assert on_disk == [True], "kept before it is announced: who announces a state may get a vote"
        sync = new.named("state.sync")
        assert sync and sync[-1]["chunks_done"] == sync[-1]["chunks"]
        assert torch.equal(new.node.learner.parameters[0], new.node.learner.outer.params)

    in_lab(3, main)


@pytest.mark.parametrize("damaged", [0, 1])
def test_what_an_earlier_process_had_fetched_is_not_asked_for_again(damaged: int) -> None:
    """But for what its disk has damaged since."""

    async def main(lab: Lab) -> None:
        one, killed = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one)
        history.append(round_after(history[-1].commit))
        await hold(one.node, 1)
        await one.take(history[-1])
        disk, outer = killed.node.disk, killed.node.learner.outer
        save, some = disk.save_chunk, asyncio.Event()

        def save_chunk(index: int, version: int, data: bytes) -> None:
            save(index, version, data)
            if len(disk.chunks) == 2:
                some.set()

        disk.save_chunk = save_chunk  # type: ignore[method-assign]

        def download(process: Applying) -> asyncio.Task[int]:
            """Of a process that has nothing in memory."""
            outer.params.zero_()
            process.member.history.replace(None, history)
            process.hears(one)
            return lab.group.create_task(process.applier._catchup.download(1))

        downloading = download(killed)
        await some.wait()
        downloading.cancel()
        await asyncio.wait([downloading])
        kept = set(disk.chunks)
        assert 2 <= len(kept) < outer.num_chunks
        for chunk in sorted(kept)[:damaged]:
            disk.chunks[chunk] = disk.chunks[chunk][:-1]
            kept.remove(chunk)
        again = Applying(lab, killed.node)
        assert await download(again) == 1
        assert again.digest == expected(1)
        sizes = [len(outer.chunk_bytes(index)) for index in range(outer.num_chunks) if (index, 1) not in kept]
        assert again.named("state.sync")[-1]["bytes"] == sum(sizes)

    in_lab(2, main, up_bytes_per_s=5e3)


def test_means_that_cannot_be_had_do_not_hold_up_a_download() -> None:
    """They are asked for once for so many versions, and chunks are asked for again in between."""

    async def main(lab: Lab) -> None:
        one, new = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one)
        for _ in range(2 * FOLLOWED_ROUNDS):
            history.append(round_after(history[-1].commit))
        catchup, download, fetched = new.applier._catchup, Download(2, have={0: 0}), asyncio.Event()
        asked: list[tuple[int, bool]] = []

        async def in_vain(download: Download, version: int) -> None:
            asked.append((version, download.asking.is_set()))

        def at(version: int) -> None:
            """The swarm is there, as we know."""
            newest = next(index for index, one in enumerate(history) if one.commit.version == version)
            new.member.history.replace(history[newest - 1].commit, [history[newest]])

        catchup._roll_forward = in_vain  # type: ignore[method-assign]
        at(FOLLOWED_ROUNDS)
        following = lab.group.create_task(catchup._follow(download, fetched))
        await asyncio.sleep(30.0)
        assert asked == [(FOLLOWED_ROUNDS, False)] and download.asking.is_set()
        at(2 * FOLLOWED_ROUNDS - 1)
        await asyncio.sleep(30.0)
        assert len(asked) == 1, "not yet so many"
        at(2 * FOLLOWED_ROUNDS)
        await asyncio.sleep(30.0)
        assert asked[1:] == [(2 * FOLLOWED_ROUNDS, False)]
        fetched.set()
        await following

    in_lab(2, main)


def test_the_last_round_is_the_mean_for_who_applies_it_and_for_downloaded_chunks() -> None:
    """What is kept until then is too late for momentum (`Terms.rule`)."""

    async def main(lab: Lab) -> None:
        one, new = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, new)
        for _ in range(2):
            history.append(round_after(history[-1].commit))
            await hold(one.node, history[-1].commit.version)
            await hold(new.node, history[-1].commit.version)
        toy = ToyLearner(NUMEL, OUTER, chunk_bytes=800)
        for version, rule in ((1, OUTER), (2, Sgd(lr=1.0))):
            toy.outer.rule = rule
            for k, (start, stop) in enumerate(PARTS):
                toy.outer.advance_(start, stop, CODEC.decode(mean_of(version, k), stop - start))
        for node in (one, new):
            terms = node.applier._terms
            ending: Any = Settings(terms.settings.founder, dataclasses.replace(RULES, total_steps=2 * PACE.laps.least))
            terms = dataclasses.replace(terms, settings=ending, feedback=FeedbackSpec(uplink="kept"))
            node.applier._terms = node.applier._catchup._terms = terms

        await one.take(*history[-2:])
        assert one.node.learner.outer.digest() == toy.outer.digest()
        for certified in history[-2:]:
            new.member.history.append(certified)
        chunks = new.node.learner.outer.num_chunks
        download = Download(chunks, have=dict.fromkeys(range(chunks), 0))
        await new.applier._catchup._roll_forward(download, 2)
        assert set(download.have.values()) == {2}
        assert new.node.learner.outer.digest() == toy.outer.digest()

    in_lab(2, main)


def test_of_a_download_with_one_wrong_chunk_that_one_is_fetched_again_though_the_swarm_has_moved_on() -> None:
    """While older chunks were being brought forward, so that nobody could say any more which one it was."""

    async def main(lab: Lab) -> None:
        one, new = await newcomer(lab)
        catchup, outer = new.applier._catchup, new.node.learner.outer
        roll, wrong = catchup._roll_forward, [1]

        async def roll_forward(download: Download, version: int) -> None:
            await roll(download, version)
            if wrong:
                await asyncio.sleep(1.0)  # which it takes
                start, _ = outer.chunk_range(wrong.pop())
                outer.params[start] += 1.0
                one.applier.donor.remember(2, outer.chunk_digests())

        catchup._roll_forward = roll_forward  # type: ignore[method-assign]
        assert await catchup.download(1) == 1 and new.digest == expected(1) and not wrong
        assert new.named("state.sync")[-1]["bytes"] == 8 * NUMEL + len(outer.chunk_bytes(1))
        assert [error.peer for error in new.node.errors] == [one.node.id]

    in_lab(2, main)


def test_a_download_that_is_right_waits_for_no_list() -> None:
    """It was asked for first, and who did not answer held up every newcomer for a minute."""

    async def main(lab: Lab) -> None:
        one, new = await newcomer(lab)
        asked = list[PeerId]()

        async def never(donor: PeerId, digest: bytes) -> ChunkList:
            asked.append(donor)
            await asyncio.sleep(3600.0)
            raise AssertionError("it is to be let go")

        catchup = new.applier._catchup
        catchup._sync.list_chunks = never  # type: ignore[method-assign]
        async with asyncio.timeout(10.0):
            assert await catchup.download(1) == 1
        assert asked == [one.node.id] and new.digest == expected(1)

    in_lab(2, main)


def test_a_long_download_does_not_gather_the_means_of_all_its_rounds() -> None:
    """A newcomer on a slow link had those of a whole day in memory, and on its disk, beside a state that was as large."""

    async def main(lab: Lab) -> None:
        one, new = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, new)
        one.node.disk.means.clear()
        chunks = new.node.learner.outer.num_chunks
        download = Download(chunks, have=dict.fromkeys(range(chunks), 0))
        for version in range(1, 2 * KEPT_ROUNDS + 1):
            history.append(round_after(history[-1].commit))
            await hold(one.node, version)
            await one.take(history[-1])
            new.hears(one)
            new.member.history.append(history[-1])
            if version % FOLLOWED_ROUNDS == 0:
                await new.applier._catchup._roll_forward(download, version)
                assert set(download.have.values()) == {version} and not new.node.means._undecided
        assert new.node.learner.outer.digest() == expected(2 * KEPT_ROUNDS)
        assert {plan for plan, _ in new.node.disk.means} == {plan_of(KEPT_ROUNDS + k + 1) for k in range(KEPT_ROUNDS)}

    in_lab(2, main)


def test_a_member_that_is_too_far_behind_downloads_and_keeps_its_progress() -> None:
    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, two, late)
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
            late.hears(node)
        await late.take(*history[-2:])
        assert late.applier.version == 2 and late.digest == expected(2)
        assert late.lost == [0] and one.lost == [], "no vote while the state is being replaced"
        kept = late.node.learner.parameters[0] - late.node.learner.outer.params
        torch.testing.assert_close(kept, local, atol=1e-5, rtol=0)
        assert late.trainer.progress.steps == 2 and not late.named("progress.dropped")

    in_lab(3, main)


def test_who_is_ahead_of_the_history_that_we_know_is_not_asked_yet_and_not_accused() -> None:
    """Who comes back is told the history piece by piece, and took for liars all who were at its end meanwhile."""

    async def main(lab: Lab) -> None:
        one, late = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, late)
        for version in range(1, VERSIONS_AHEAD + 2):
            history.append(round_after(history[-1].commit))
            await hold(one.node, version)
            await one.take(history[-1])
        late.hears(one)
        catchup = late.applier._catchup
        download = lab.group.create_task(catchup.download(0))
        await asyncio.sleep(5.0)
        assert catchup.under_way is not None and not catchup.under_way.have and late.node.errors == []
        for certified in history[2:]:
            late.member.history.append(certified)
        async with asyncio.timeout(10.0):
            assert await download == VERSIONS_AHEAD + 1
        assert late.digest == expected(VERSIONS_AHEAD + 1) and late.node.errors == []

    in_lab(2, main)


def test_who_says_that_it_is_far_ahead_does_not_keep_the_only_donor_distrusted() -> None:
    """Who it is that has given something wrong, or of a version that never came, is asked again where there is nobody else."""

    async def main(lab: Lab) -> None:
        one, late, liar = (Applying(lab, n) for n in lab.nodes)
        await founded(one, late)
        late.hears(one)
        now = asyncio.get_running_loop().time()
        late.member.membership.heard(liar.node.id, now, beat(height=1, version=1 << 40, digest=b"?" * 32))
        download = Download(late.node.learner.outer.num_chunks, distrusted={one.node.id})
        late.applier._catchup._download = download
        async with asyncio.timeout(10.0):
            assert await late.applier._catchup.download(0) == 0
        assert set(download.source.values()) == {one.node.id} and late.node.errors == []

    in_lab(3, main)


def test_a_jump_over_a_round_onto_a_change_of_view_downloads_the_state() -> None:
    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        history = await founded(one, two, late)
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
        history = await founded(one, two, late)
        first = history[-1].commit.ledger.window(late.node.id)[0][0]
        train(late, *range(first, first + 8))  # half of it is counted, half is progress since
        late.node.learner.offer()
        late.node.learner.offered_gradient(0, NUMEL)
        late.node.exchange.in_flight = plan_of(1)
        late.node.learner.sent_samples = late.node.learner.trained[:4]
        moved = round_after(history[-1].commit)
        await take_as_state(moved, late, one, two)
        assert late.applier.version == 1 and late.lost == [0]
        assert late.trainer.progress.trained == ((first + 4, first + 8),) and late.trainer.progress.steps == 2
        assert late.node.learner.trained == list(range(first + 4, first + 8))

    in_lab(3, main)


def test_of_a_round_that_came_with_a_downloaded_state_the_rest_of_what_was_told_stays() -> None:
    """As where it is applied: the node knows what its codec has left out, and nobody else does."""

    async def main(lab: Lab) -> None:
        one, two, late = (Applying(lab, n) for n in lab.nodes)
        sparse = uniform(parse_codec("topk(chunk=64,k=8,bits=2)"), NUMEL)
        late.node.encode_with(sparse, uniform(CODEC, NUMEL), FeedbackSpec(uplink="kept"))
        late.applier._residuals = late.node.residuals
        history = await founded(one, two, late)
        first = history[-1].commit.ledger.window(late.node.id)[0][0]
        train(late, *range(first, first + 4))
        late.node.learner.offer()
        delta = late.node.learner.offered_gradient(0, NUMEL)
        late.node.exchange.in_flight = plan_of(1)
        for start, stop in PARTS:
            late.node.residuals.encode_contribution(plan_of(1), delta[start:stop].clone(), start)
        moved = round_after(history[-1].commit)
        assert moved.commit.round is not None
        told = late.node.residuals.told(moved.commit.round)
        assert told is not None
        rest = delta - torch.cat([told[start] for start, _ in PARTS])
        assert 0.1 * delta.norm() < rest.norm() < 0.99 * delta.norm()
        await take_as_state(moved, late, one, two)
        assert late.applier.version == 1 and late.lost == [0]
        kept = late.node.learner.outer.params - late.node.learner.parameters[0]
        torch.testing.assert_close(kept, rest, atol=1e-5, rtol=0)
        assert not late.trainer.progress.trained, "its samples count"

    in_lab(3, main)


@pytest.mark.parametrize("planned", [False, True])
def test_a_minority_repairs_the_chunks_in_which_it_differs(planned: bool) -> None:
    """What it has offered is taken back, unless a round is under way that will be over."""

    async def main(lab: Lab) -> None:
        one, two, wrong = (Applying(lab, n) for n in lab.nodes)
        await founded(one, two, wrong)
        good = wrong.digest
        train(wrong, *range(*wrong.trainer.window[0])[:4])
        local = wrong.node.learner.parameters[0] - wrong.node.learner.outer.params
        wrong.node.learner.outer.params[250] += 1.0
        wrong.node.learner.parameters[0][250] += 1.0
        assert wrong.digest != good
        wrong.node.learner.offer()
        wrong.trainer._offering = True
        wrong.member.attendance.part = object() if planned else None
        wrong.applier.push(Repair(0, one.said[-1][2], (one.node.id, two.node.id)))
        await wrong.idle()
        assert wrong.trainer._offering == planned
        with pytest.raises(NothingOffered):
            wrong.node.learner.offered_gradient(0, NUMEL)
        assert wrong.digest == good and wrong.said[-1] == (1, 0, good)
        assert [e["chunks"] for e in wrong.named("state.repair")] == [1]
        kept = wrong.node.learner.parameters[0] - wrong.node.learner.outer.params
        torch.testing.assert_close(kept, local, atol=1e-5, rtol=0)

    in_lab(3, main)


@pytest.mark.parametrize("obstacle", ["another version", "another digest", "nobody there"])
def test_a_repair_that_cannot_be_done_changes_nothing(obstacle: str) -> None:
    async def main(lab: Lab) -> None:
        one, wrong = (Applying(lab, n) for n in lab.nodes)
        await founded(one, wrong)
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
