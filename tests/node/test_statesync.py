"""Late join: chunks from several donors, at whatever version they are, rolled forward, verified, and asked for again elsewhere."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.node.donors import Serving, newcomer, step, update
from tests.node.lab import NUMEL, OUTER, Lab, Node, in_lab

from farflung.compression.digest import digest_of
from farflung.node import framing, statesync
from farflung.node.donor import SERVED_AT_ONCE
from farflung.node.network import Stream
from farflung.node.statesync import CHUNK_S, LATE_S, QUICK_S, Download
from farflung.protocol.errors import LimitExceeded, Malformed, NetworkError, Refused, RemoteError
from farflung.protocol.headers import ChunkList, ChunkListRequest, ChunkRequest
from farflung.protocol.messages import encode
from farflung.sims.links import LinkModel


def test_everything_comes_from_several_donors() -> None:
    async def main(lab: Lab) -> None:
        me, *others = lab.nodes
        donors = [Serving(n) for n in others]
        for n in others:
            step(n, 1)
        sync, download, arrived, note = newcomer(me)
        await sync.fetch(download, [n.id for n in others], note)
        assert me.learner.outer.digest() == donors[0].digest
        assert download.have == {i: 5 for i in range(download.num_chunks)}
        assert sorted(arrived) == sorted(download.have.items()), "each chunk is told once"
        assert set(download.source.values()) == {n.id for n in others}, "all helped"
        assert download.received_bytes == 8 * NUMEL

    in_lab(4, main, up_bytes_per_s=5e3)


@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.1, 0.14, 0.18, 1.0])
def test_a_cancel_at_the_end_of_a_download_is_obeyed(seconds: float) -> None:
    """A moment after the last chunk, when the streams are being closed, or just over: never does a cancel get lost."""

    async def main(lab: Lab) -> None:
        me, *others = lab.nodes
        for n in others:
            Serving(n)
        sync, download, _, note = newcomer(me)
        opened = me.network.open_stream

        async def open_stream(peer: bytes, kind: str) -> Stream:
            stream = await opened(peer, kind)
            close = stream.close

            async def close_slowly() -> None:
                await asyncio.sleep(0.05)
                await close()

            stream.close = close_slowly  # type: ignore[method-assign]
            return stream

        me.network.open_stream = open_stream  # type: ignore[method-assign]

        async def arrived(index: int, version: int, data: bytes) -> None:
            await note(index, version, data)
            if download.complete:
                complete.set()

        complete = asyncio.Event()
        fetching = lab.group.create_task(sync.fetch(download, [n.id for n in others], arrived))
        await complete.wait()
        await asyncio.sleep(seconds)
        cancelled = fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled() == cancelled

    in_lab(3, main)


def test_what_is_there_already_is_not_asked_for() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        Serving(other)
        sync, download, arrived, note = newcomer(me)
        download.have = {0: 4, 2: 5}
        await sync.fetch(download, [other.id], note)
        assert {i for i, _ in arrived} == set(range(download.num_chunks)) - {0, 2}
        assert download.have[0] == 4
        arrived.clear()
        await sync.fetch(download, [other.id], note)
        assert arrived == []

    in_lab(2, main)


def test_older_chunks_are_rolled_forward_to_the_same_bits() -> None:
    """The swarm commits two rounds in the middle of the download."""

    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        sync, download, _, note = newcomer(me)
        versions: list[int] = []

        async def arrived(index: int, version: int, data: bytes) -> None:
            await note(index, version, data)
            versions.append(version)
            if len(versions) in (2, 4):
                step(other, donor.version)
                donor.version += 1

        await sync.fetch(download, [other.id], arrived)
        assert {5, 7} <= set(versions) <= {5, 6, 7}
        own = lambda a, b, mean: me.learner.outer.step_(a, b, mean, OUTER.lr, OUTER.momentum)  # noqa: E731
        for version in (6, 7):
            mean = update(version - 1)
            parts = [(0, 208, mean[:208]), (208, NUMEL, mean[208:])]
            rolled = download.at(version - 1)
            sync.roll(rolled, parts, own)
            download.have |= dict.fromkeys(rolled, version)
        assert set(download.have.values()) == {7}
        assert me.learner.outer.digest() == donor.digest

    in_lab(2, main)


def test_a_part_that_was_left_out_does_not_move() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        sync, download, _, note = newcomer(me)
        await sync.fetch(download, [other.id], note)
        mean = update(1)[:208]
        other.learner.outer.step_(0, 208, mean, OUTER.lr, OUTER.momentum)
        own = lambda a, b, m: me.learner.outer.step_(a, b, m, OUTER.lr, OUTER.momentum)  # noqa: E731
        assert download.at(4) == [] and len(download.at(5)) == download.num_chunks
        sync.roll(download.at(5), [(0, 208, mean)], own)
        assert me.learner.outer.digest() == donor.digest

    in_lab(2, main)


# ---- bad donors -----------------------------------------------------------------------------------------------


def lie(node: Node, answer: Callable[[int], bytes | None], version: int = 5) -> None:
    """A donor with chunks of its own making."""

    async def serve(stream: Any) -> None:
        while True:
            request = await framing.read_header(stream, ChunkRequest)
            await stream.write(version.to_bytes(8, "big"))
            await framing.write_blob(stream, answer(request.index))

    node.network.serve("chunk", framing.guarded(serve, node.refused, within_s=600.0))


def test_a_bad_donors_chunks_are_detected_named_and_fetched_from_another() -> None:
    async def main(lab: Lab) -> None:
        me, good, bad = lab.nodes
        donor = Serving(good)
        step(bad, 99)
        lie(bad, bad.learner.outer.chunk_bytes)
        sync, download, _, note = newcomer(me)
        await sync.fetch(download, [good.id, bad.id], note)
        theirs = {i for i, who in download.source.items() if who == bad.id}
        assert theirs, "or this tests nothing"
        listing = await sync.list_chunks(good.id, donor.digest)
        sync.verify(download, me.learner.outer.chunk_digests(), listing)
        assert [(type(e), e.peer) for e in me.errors] == [(Refused, bad.id)] * len(theirs)
        assert set(download.have) == set(range(download.num_chunks)) - theirs
        await sync.fetch(download, [good.id], note)
        sync.verify(download, me.learner.outer.chunk_digests(), listing)
        assert download.complete
        assert me.learner.outer.digest() == donor.digest

    in_lab(3, main, up_bytes_per_s=5e3)


BAD_CHUNKS: dict[str, tuple[Callable[[int], bytes | None], type[RemoteError]]] = {
    "too short": (lambda i: b"x" * 16, Refused),
    "not finite": (lambda i: b"\xff" * 800, Refused),
    "above the limit": (lambda i: bytes((1 << 20) + 1), LimitExceeded),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunks_that_are_none_are_refused_at_once_and_others_deliver(name: str) -> None:
    answer, kind = BAD_CHUNKS[name]

    async def main(lab: Lab) -> None:
        me, good, bad = lab.nodes
        donor = Serving(good)
        lie(bad, answer)
        sync, download, _, note = newcomer(me)
        await sync.fetch(download, [bad.id, good.id], note)
        assert me.errors and {(type(e), e.peer) for e in me.errors} == {(kind, bad.id)}
        assert me.learner.outer.digest() == donor.digest
        assert set(download.source.values()) == {good.id} and download.distrusted == {bad.id}

    in_lab(3, main)


def test_without_a_good_donor_the_download_ends_unfinished() -> None:
    async def main(lab: Lab) -> None:
        me, bad, gone = lab.nodes
        lie(bad, lambda i: b"")
        lab.hub.kill(gone.id)
        sync, download, arrived, note = newcomer(me)
        await sync.fetch(download, [bad.id, gone.id], note)
        await sync.fetch(download, [], note)
        assert download.have == {} and arrived == []

    in_lab(3, main)


async def stall(stream: Stream) -> None:
    """What serves chunks, and never does."""
    await framing.read_header(stream, ChunkRequest)
    await asyncio.Event().wait()


def test_a_stalled_donor_does_not_stall_the_download() -> None:
    """What it was asked for is asked for again elsewhere when nothing else is left."""

    async def main(lab: Lab) -> None:
        me, good, slow = lab.nodes
        donor = Serving(good)

        slow.network.serve("chunk", stall)
        sync, download, arrived, note = newcomer(me)
        began = asyncio.get_running_loop().time()
        await sync.fetch(download, [slow.id, good.id], note)
        assert asyncio.get_running_loop().time() - began < CHUNK_S / 4
        assert me.learner.outer.digest() == donor.digest and len(arrived) == download.num_chunks

    in_lab(3, main)


def test_many_donors_do_not_share_a_slow_link_so_that_nothing_comes_in_time() -> None:
    """All chunks at once, and each of them twice, would take longer than any of them may."""

    async def main(lab: Lab) -> None:
        me, *others = lab.nodes
        lab.hub.set_link(me.id, LinkModel(down_bytes_per_s=90.0))
        for n in others:
            Serving(n)
        sync, download, _, note = newcomer(me)
        assert 2 * 8 * NUMEL / 90.0 > CHUNK_S
        await sync.fetch(download, [n.id for n in others], note)
        assert download.complete and me.learner.outer.digest() == others[0].learner.outer.digest()

    in_lab(8, main)


@pytest.mark.parametrize("num", [1, 3])
def test_a_slow_donor_serves_fewer_at_once_so_that_something_comes_in_time(num: int) -> None:
    """Of as many chunks as it sends at once over a quick link none was here within a minute, and all began anew, for ever."""

    async def main(lab: Lab) -> None:
        donor = Serving(lab.nodes[0])
        lab.hub.set_link(donor.node.id, LinkModel(up_bytes_per_s=25.0, window_bytes=64))
        downloads: list[Download] = []

        async def join(node: Node) -> None:
            sync, download, _, note = newcomer(node)
            downloads.append(download)
            while not download.complete:
                await sync.fetch(download, [donor.node.id], note)
                await asyncio.sleep(1.0)
            assert node.learner.outer.digest() == donor.digest

        async with asyncio.timeout(num * 600.0), asyncio.TaskGroup() as group:
            for node in lab.nodes[1:]:
                group.create_task(join(node))
        assert sum(download.received_bytes for download in downloads) == num * 8 * NUMEL
        assert donor.node.network.sent_bytes() < (num + 1) * 8 * NUMEL, "little was sent in vain"
        lab.hub.set_link(donor.node.id, LinkModel())
        for node in lab.nodes[1:]:
            await join(node)
        assert donor.donor._slots._number == SERVED_AT_ONCE, "for the link is quick now"

    in_lab(1 + num, main)


def test_nobody_is_asked_for_what_is_on_its_way() -> None:
    """Of the last chunks neither, though there are more donors than chunks: they would send them in vain."""

    async def main(lab: Lab) -> None:
        me, *others = lab.nodes
        for n in others:
            Serving(n)
        sync, download, _, note = newcomer(me)
        assert download.num_chunks < len(others)
        await sync.fetch(download, [n.id for n in others], note)
        assert download.complete
        sent = sum(lab.hub.delivered_bytes[n.id] for n in others)
        assert 8 * NUMEL < sent < 1.2 * 8 * NUMEL

    in_lab(12, main, up_bytes_per_s=5e3)


def test_a_chunk_is_late_soon_where_others_come_quickly() -> None:
    async def main(lab: Lab) -> None:
        me, good, slow = lab.nodes
        Serving(good)
        slow.network.serve("chunk", stall)
        sync, download, arrived, note = newcomer(me)
        began = asyncio.get_running_loop().time()
        await sync.fetch(download, [slow.id, good.id], note)
        took = asyncio.get_running_loop().time() - began
        assert download.complete and LATE_S <= took < QUICK_S / 4
        assert len(arrived) == download.num_chunks

    in_lab(3, main)


def test_what_was_given_back_while_nobody_waited_is_taken_at_once() -> None:
    async def main(lab: Lab) -> None:
        now = asyncio.get_running_loop().time
        work = statesync._Work(Download(1), newcomer(lab.nodes[0])[3], lab.nodes[0].id, now)
        assert work.take() == 0 and work.take() is None
        work.give_back(0)  # while the stream that has found nothing is being closed
        began = now()
        await work.wait()
        assert now() - began < LATE_S and work.take() == 0

    in_lab(1, main)


def test_where_none_has_come_yet_one_is_late_after_a_while() -> None:
    async def main(lab: Lab) -> None:
        me, good, slow = lab.nodes
        Serving(good)

        slow.network.serve("chunk", stall)
        sync, download, _, note = newcomer(me)
        missing = [0]
        download.have = {index: 5 for index in range(download.num_chunks) if index not in missing}
        began = asyncio.get_running_loop().time()
        await sync.fetch(download, [slow.id, good.id], note)
        assert download.complete and download.source == {0: good.id}
        assert QUICK_S <= asyncio.get_running_loop().time() - began < QUICK_S + 1.0

    in_lab(3, main)


def test_a_donor_that_dies_is_replaced() -> None:
    async def main(lab: Lab) -> None:
        me, good, dying = lab.nodes
        donor = Serving(good)
        Serving(dying)
        sync, download, arrived, note = newcomer(me)

        async def kill(index: int, version: int, data: bytes) -> None:
            await note(index, version, data)
            if download.source[index] == dying.id and dying.id in lab.hub.running():
                lab.hub.kill(dying.id)

        await sync.fetch(download, [dying.id, good.id], kill)
        assert dying.id not in lab.hub.running()
        assert me.learner.outer.digest() == donor.digest and len(arrived) == download.num_chunks

    in_lab(3, main)


# ---- the donor's side -----------------------------------------------------------------------------------------


def test_strangers_get_nothing() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        donor.admitted = False
        sync, download, arrived, note = newcomer(me)
        await sync.fetch(download, [other.id], note)
        with pytest.raises(NetworkError):
            await sync.list_chunks(other.id, donor.digest)
        assert not arrived and {e.peer for e in donor.errors} == {me.id}
        assert {type(e) for e in donor.errors} == {Refused}

    in_lab(2, main)


def test_no_such_chunk() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        stream = await me.network.open_stream(other.id, "chunk")
        await framing.write_header(stream, ChunkRequest(other.learner.outer.num_chunks))
        with pytest.raises(NetworkError):
            await framing.read_exactly(stream, 8)
        assert [(type(e), e.peer) for e in donor.errors] == [(Refused, me.id)]

    in_lab(2, main)


def test_nothing_is_served_while_the_state_changes() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        sync, download, arrived, note = newcomer(me)
        donor.steady.clear()

        async def change() -> None:
            await asyncio.sleep(5.0)
            assert arrived == []
            step(other, 1)
            donor.version = 6
            donor.steady.set()

        lab.group.create_task(change())
        await sync.fetch(download, [other.id], note)
        assert set(download.have.values()) == {6} and me.learner.outer.digest() == donor.digest

    in_lab(2, main)


# ---- lists ----------------------------------------------------------------------------------------------------


def test_lists_are_believed_by_their_digest_only() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        donor = Serving(other)
        sync, *_ = newcomer(me)
        listing = await sync.list_chunks(other.id, donor.digest)
        assert listing == ChunkList(5, tuple(other.learner.outer.chunk_digests()))
        with pytest.raises(NetworkError, match="not the one a quorum announced"):
            await sync.list_chunks(other.id, b"d" * 32)
        donor.version = 6  # applied, but the digests of it are still being computed
        with pytest.raises(NetworkError, match="between two versions"):
            await sync.list_chunks(other.id, donor.digest)

    in_lab(2, main)


def serve_list(node: Node, data: bytes) -> None:
    """A donor with a list of its own making."""

    async def serve(stream: Any) -> None:
        await framing.read_header(stream, ChunkListRequest)
        await framing.write_blob(stream, data)

    node.network.serve("chunks", serve)


def test_a_list_of_another_length_is_refused() -> None:
    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        digests = tuple(bytes([i]) * 32 for i in range(3))
        serve_list(other, encode(ChunkList(5, digests)))
        sync, *_ = newcomer(me)
        with pytest.raises(Refused, match="a list of 3 chunks") as caught:
            await sync.list_chunks(other.id, digest_of(b"".join(digests)))
        assert caught.value.peer == other.id

    in_lab(2, main)


NESTED = b"\x94\x44\x05\x90" + b"\x91" * (1 << 16)
"""A list of no chunks with one field more, nested deeper than any Python follows."""

DAMAGED = {
    "empty": b"",
    "no MessagePack": b"\xc1",
    "no tag": b"\x90",
    "another message": encode(ChunkRequest(1)),
    "torn": encode(ChunkList(5, (b"d" * 32,)))[:-1],
    "nested": NESTED,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statesync, "LIST_BYTES", len(NESTED))  # a large state's lists are as long

    async def main(lab: Lab) -> None:
        me, other = lab.nodes
        serve_list(other, DAMAGED[name])
        sync, *_ = newcomer(me)
        with pytest.raises(Malformed) as caught:
            await sync.list_chunks(other.id, b"d" * 32)
        assert caught.value.peer == other.id

    in_lab(2, main)
