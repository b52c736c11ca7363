"""Newcomers that give each other the chunks of the outer state that they have: only what is known to be right, at the version that it is."""

import asyncio
from typing import Any

import pytest
from tests.node.applying import Applying, expected, founded, hold, round_after
from tests.node.donors import Serving, newcomer
from tests.node.lab import NUMEL, Lab, Node, in_lab
from tests.protocol.bus import beat

from farflung.node import framing, statesync
from farflung.node.donor import Donor
from farflung.node.statesync import VERSION_BYTES, Download, Sources
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.headers import ChunkRequest, PiecesRequest
from farflung.sims.links import LinkModel


class Newcomer:
    """A node that downloads, and gives what it has."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sync, self.download, self.arrived, self._note = newcomer(node)
        self.errors: list[RemoteError] = []
        self.admits = True
        never = asyncio.Event()
        donor = Donor(node.network, node.learner, lambda: 0, never, lambda: self.download)
        donor.serve(self.errors.append, lambda peer: self.admits, within_s=600.0)

    async def take(self, index: int, version: int, data: bytes) -> None:
        """A chunk that is right."""
        await self._note(index, version, data)
        self.download.good.add(index)

    async def fetch(self, *donors: Node, fellows: tuple["Newcomer", ...] = ()) -> None:
        sources = Sources([one.id for one in donors], [one.node.id for one in fellows])
        await self.sync.fetch_from(lambda: sources, self.download, self.take)

    def holds(self, *indices: int, of: Serving, version: int = 5) -> None:
        """Chunks that it has already, and knows to be right."""
        for index in indices:
            self.node.learner.outer.load_chunk(index, of.node.learner.outer.chunk_bytes(index))
            self.download.have[index] = version
            self.download.good.add(index)


async def chunk_of(asker: Node, giver: Node, index: int) -> tuple[int, bytes | None]:
    """What it answers."""
    stream = await asker.network.open_stream(giver.id, "chunk")
    try:
        await framing.write_header(stream, ChunkRequest(index))
        version = int.from_bytes(await framing.read_exactly(stream, VERSION_BYTES), "big")
        return version, await framing.read_blob(stream, 1 << 20)
    finally:
        await stream.close()


def test_of_two_that_come_at_once_neither_needs_all_of_the_donor() -> None:
    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)
        slow = LinkModel(latency_s=0.01, up_bytes_per_s=120.0, down_bytes_per_s=1e6)
        lab.hub.set_link(first.id, slow)
        async with asyncio.TaskGroup() as group:
            group.create_task(a.fetch(first, fellows=(b,)))
            group.create_task(b.fetch(first, fellows=(a,)))
        for one, other in ((a, b), (b, a)):
            assert one.node.learner.outer.digest() == donor.digest and one.download.complete
            assert set(one.download.source.values()) == {first.id, other.node.id}
            assert not one.errors and not one.node.errors
        whole = 8 * NUMEL
        assert lab.hub.delivered_bytes[first.id] < 1.7 * whole, "not twice the state"

    in_lab(3, main)


def test_all_that_a_fellow_has_is_taken_where_there_is_no_donor() -> None:
    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)
        b.holds(1, 3, of=donor)
        await a.fetch(fellows=(b,))
        assert a.download.have == {1: 5, 3: 5} and a.download.source == {1: b.node.id, 3: b.node.id}

    in_lab(3, main)


def test_what_nobody_has_vouched_for_is_not_given() -> None:
    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)
        b.holds(0, 1, of=donor)
        b.download.good.discard(1)
        assert await chunk_of(a.node, b.node, 1) == (0, None)
        assert await chunk_of(a.node, b.node, 2) == (0, None), "not here"
        version, data = await chunk_of(a.node, b.node, 0)
        assert version == 5 and data == donor.node.learner.outer.chunk_bytes(0)
        await a.fetch(fellows=(b,))
        assert a.download.have == {0: 5} and not a.node.errors, "nor asked for"

    in_lab(3, main)


def test_while_chunks_are_brought_to_another_version_none_is_given() -> None:
    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)
        b.holds(0, of=donor)
        b.download.rolling = True
        assert await chunk_of(a.node, b.node, 0) == (0, None)
        await a.fetch(fellows=(b,))
        assert not a.download.have and not a.node.errors and not a.download.distrusted, "no offence"
        b.download.rolling, b.download.have[0] = False, 6
        assert (await chunk_of(a.node, b.node, 0))[0] == 6

    in_lab(3, main)


def test_what_was_dropped_is_not_given() -> None:
    download = Download(10, have={3: 1, 9: 2, 0: 2}, good={3, 9})
    assert download.good_bits() == bytes([0b00010000, 0b01000000])
    download.keep(2)
    assert download.have == {9: 2, 0: 2} and download.good == {9}
    download.drop(9)
    assert download.good_version(9) is None and download.good_bits() == bytes(2)


@pytest.mark.parametrize("answer", [b"", bytes(2), bytes(64)])
def test_a_fellow_that_talks_nonsense_is_named_and_not_asked_again(answer: bytes) -> None:
    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)

        async def serve(stream: Any) -> None:
            await framing.read_header(stream, PiecesRequest)
            await framing.write_blob(stream, answer)

        b.node.network.serve("pieces", framing.guarded(serve, b.node.refused, within_s=600.0))
        await a.fetch(first, fellows=(b,))
        assert a.node.learner.outer.digest() == donor.digest
        assert len(a.download.good_bits()) == 1, "or one of the answers would be right"
        assert a.download.distrusted == {b.node.id} and {error.peer for error in a.node.errors} == {b.node.id}

    in_lab(3, main)


def test_who_was_not_admitted_is_told_nothing() -> None:
    async def main(lab: Lab) -> None:
        a, b = (Newcomer(node) for node in lab.nodes)
        b.admits = False
        await a.fetch(fellows=(b,))
        assert [(type(error), error.peer) for error in b.errors] == [(Refused, a.node.id)]

    in_lab(2, main)


def test_a_donor_that_is_there_later_helps_too() -> None:
    async def main(lab: Lab) -> None:
        me, slow, late = lab.nodes
        donor = Serving(slow)
        Serving(late)
        lab.hub.set_link(slow.id, LinkModel(latency_s=0.01, up_bytes_per_s=100.0, down_bytes_per_s=1e6))
        sync, download, _, note = newcomer(me)
        looks = iter([Sources([slow.id]), *[Sources([slow.id, late.id])] * 1000])
        await sync.fetch_from(lambda: next(looks), download, note)
        assert me.learner.outer.digest() == donor.digest
        assert set(download.source.values()) == {slow.id, late.id}

    in_lab(3, main)


@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.5, 3.0, 10.5])
def test_a_download_that_nobody_serves_can_be_cancelled_and_ends_by_itself(seconds: float) -> None:
    async def main(lab: Lab) -> None:
        me, gone, silent = lab.nodes
        silent.network.serve("pieces", framing.guarded(_never, silent.refused, within_s=600.0))
        sync, download, _, note = newcomer(me)
        look = lambda: Sources([gone.id], [silent.id])  # noqa: E731
        fetching = lab.group.create_task(sync.fetch_from(look, download, note))
        await asyncio.sleep(seconds)
        cancelled = fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled() == cancelled
        await sync.fetch_from(look, download, note)
        assert not download.have

    in_lab(3, main)


async def _never(stream: Any) -> None:
    await framing.read_header(stream, PiecesRequest)
    await asyncio.sleep(1e3)


@pytest.mark.parametrize("alone", [False, True])
def test_a_quorums_list_says_which_chunks_are_good_where_there_is_somebody_to_give_them_to(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statesync, "CHUNK_S", 1e3)

    async def main(lab: Lab) -> None:
        one, two, new = (Applying(lab, n) for n in lab.nodes[:3])
        if not alone:
            new.member.membership.heard(lab.nodes[3].id, lab.hub.now(), beat(state="joining", digest=b""))
        history = await founded(one, two)
        history.append(round_after(history[-1].commit))
        for old in (one, two):
            await hold(old.node, 1)
            await old.take(history[-1])
            new.hears(old)
        lab.hub.set_link(one.node.id, LinkModel(latency_s=0.01, up_bytes_per_s=200.0, down_bytes_per_s=1e6))
        lab.hub.set_link(two.node.id, LinkModel(latency_s=0.01, up_bytes_per_s=200.0, down_bytes_per_s=1e6))
        new.node.learner.outer.params.zero_()
        new.member.history.replace(history[-2].commit, ())
        seen: list[tuple[int, int]] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(1.0)
                if (download := new.applier._catchup.under_way) is not None and download.have:
                    seen.append((len(download.have), len(download.good)))

        watching = lab.group.create_task(watch())
        await new.take(history[-1])
        watching.cancel()
        assert new.digest == expected(1)
        assert any(good for _, good in seen) != alone and all(good <= have for have, good in seen)
        assert new.applier._catchup.under_way is None

    in_lab(4, main)


def test_a_fellow_that_has_all_by_now_is_asked_as_a_donor() -> None:
    async def main(lab: Lab) -> None:
        me, slow, other = lab.nodes
        donor, fellow = Serving(slow), Newcomer(other)
        lab.hub.set_link(slow.id, LinkModel(latency_s=0.01, up_bytes_per_s=50.0, down_bytes_per_s=1e6))
        sync, download, _, note = newcomer(me)
        looks = iter([Sources([slow.id], [other.id]), *[Sources([slow.id, other.id])] * 1000])

        def look() -> Sources:
            sources = next(looks)
            if other.id in sources.donors:
                fellow.holds(*range(download.num_chunks), of=donor)
            return sources

        await sync.fetch_from(look, download, note)
        assert me.learner.outer.digest() == donor.digest
        assert list(download.source.values()).count(other.id) > download.num_chunks // 2

    in_lab(3, main)


def test_a_chunk_of_a_slow_fellow_is_waited_for_where_there_is_no_donor() -> None:
    """For longer than until the next look."""

    async def main(lab: Lab) -> None:
        first, *others = lab.nodes
        donor = Serving(first)
        a, b = (Newcomer(node) for node in others)
        b.holds(*range(b.download.num_chunks), of=donor)
        chunk = len(first.learner.outer.chunk_bytes(0))
        slow = LinkModel(latency_s=0.01, up_bytes_per_s=chunk / (3 * statesync.LOOK_AGAIN_S), down_bytes_per_s=1e6)
        lab.hub.set_link(b.node.id, slow)
        await a.fetch(fellows=(b,))
        assert a.download.complete

    in_lab(3, main)


@pytest.mark.parametrize("version", [0, 13])
def test_garbage_of_a_version_that_cannot_be_checked_does_not_keep_a_download_from_its_end(version: int) -> None:
    """Too old to be brought forward, or of a round that never comes; and quicker at hand than what the slow donor gives."""

    async def main(lab: Lab) -> None:
        one, new, liar = Applying(lab, lab.nodes[0]), Applying(lab, lab.nodes[1]), lab.nodes[2]
        history = await founded(one)
        for number in range(1, 13):
            history.append(round_after(history[-1].commit))
            await hold(one.node, number)
            await one.take(history[-1])
        lab.hub.set_link(one.node.id, LinkModel(latency_s=0.01, up_bytes_per_s=300.0, down_bytes_per_s=1e6))
        outer, given = liar.learner.outer, []

        async def pieces(stream: Any) -> None:
            await framing.read_header(stream, PiecesRequest)
            await framing.write_blob(stream, b"\xff" * ((outer.num_chunks + 7) // 8))

        async def chunk(stream: Any) -> None:
            while True:
                request = await framing.read_header(stream, ChunkRequest)
                given.append(request.index)
                await stream.write(version.to_bytes(VERSION_BYTES, "big"))
                await framing.write_blob(stream, bytes(len(outer.chunk_bytes(request.index))))

        for kind, serve in (("pieces", pieces), ("chunk", chunk)):
            liar.network.serve(kind, framing.guarded(serve, liar.refused, within_s=600.0))
        new.node.learner.outer.params.zero_()
        new.member.history.replace(None, history)

        async def hear() -> None:
            while True:
                new.hears(one)
                new.member.membership.heard(liar.id, lab.hub.now(), beat(state="joining", digest=b""))
                await asyncio.sleep(1.0)

        hearing = lab.group.create_task(hear())
        async with asyncio.timeout(300.0):
            assert await new.applier._catchup.download(12) == 12
        hearing.cancel()
        assert given and new.digest == expected(12)

    in_lab(3, main)


def test_whoever_has_no_state_and_downloads_none_says_so() -> None:
    async def main(lab: Lab) -> None:
        a, b = lab.nodes
        steady = asyncio.Event()
        steady.set()
        Donor(b.network, b.learner, lambda: -1, steady).serve(b.refused, lambda peer: True, within_s=600.0)
        assert await chunk_of(a, b, 0) == (0, None) and not b.errors

    in_lab(2, main)
