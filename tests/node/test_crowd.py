"""Whom a donor serves first when more ask than it can serve, and who asks again."""

import asyncio
from contextlib import suppress

import pytest
from tests.node.donors import Serving, newcomer
from tests.node.lab import NUMEL, Lab, Node, in_lab

from farflung.node import framing
from farflung.node.donor import SERVED_AT_ONCE, TURN_S
from farflung.node.network import Stream
from farflung.node.statesync import ATTEMPTS, CHUNK_S, STREAMS_PER_DONOR, VERSION_BYTES
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ChunkRequest


def test_of_a_crowd_the_first_are_through_long_before_the_last() -> None:
    """So that they can help: served by turns, all would be through at the end."""

    async def main(lab: Lab) -> None:
        donor, *crowd = lab.nodes
        Serving(donor)
        loop = asyncio.get_running_loop()
        done: list[float] = []

        async def join(node: Node) -> None:
            sync, download, _, note = newcomer(node)
            while not download.complete:
                await sync.fetch(download, [donor.id], note)
            done.append(loop.time())

        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for node in crowd:
                group.create_task(join(node))
        first, last = done[0] - began, done[-1] - began
        assert first < 0.4 * last and last == pytest.approx(len(crowd) * 8 * NUMEL / 2e3, rel=0.2)

    in_lab(13, main, up_bytes_per_s=2e3)


class Asking:
    """Asks for one chunk after another, over another stream when it had to wait for too long."""

    def __init__(self, lab: Lab, node: Node, donor: Node) -> None:
        self.chunks = 0
        self.task = lab.group.create_task(self._ask(node, donor))

    async def _ask(self, node: Node, donor: Node) -> None:
        while True:
            stream = await node.network.open_stream(donor.id, "chunk")
            with suppress(NetworkError):
                while True:
                    await framing.write_header(stream, ChunkRequest(0))
                    await framing.read_exactly(stream, VERSION_BYTES)
                    assert await framing.read_blob(stream, 1 << 20) is not None
                    self.chunks += 1


def test_who_comes_later_waits_until_the_turn_of_the_first_is_over() -> None:
    async def main(lab: Lab) -> None:
        donor, early, late = lab.nodes
        serving = Serving(donor)
        first = [Asking(lab, early, donor) for _ in range(2 * SERVED_AT_ONCE)]
        await asyncio.sleep(5.0)
        second = [Asking(lab, late, donor) for _ in range(2)]
        before = sum(one.chunks for one in first)
        await asyncio.sleep(TURN_S - 10.0)
        assert sum(one.chunks for one in first) > before and sum(one.chunks for one in second) == 0
        await asyncio.sleep(CHUNK_S)
        assert all(one.chunks > 0 for one in (*first, *second)), "nobody had to give up"
        for one in (*first, *second):
            one.task.cancel()
        assert serving.errors == []

    in_lab(3, main, up_bytes_per_s=2e3)


def test_who_does_not_come_back_asks_again_while_chunks_come_and_a_few_times_in_vain() -> None:
    async def main(lab: Lab) -> None:
        me, donor = lab.nodes
        served = 0

        async def serve(stream: Stream) -> None:
            """One chunk a stream, and none from the fourth on."""
            nonlocal served
            request = await framing.read_header(stream, ChunkRequest)
            served += 1
            if served < 4:
                await stream.write((5).to_bytes(VERSION_BYTES, "big"))
                await framing.write_blob(stream, donor.learner.outer.chunk_bytes(request.index))

        donor.network.serve("chunk", serve)
        sync, download, arrived, note = newcomer(me)
        await sync.fetch_all(download, [donor.id], note)
        assert len(arrived) == 3 and not download.complete
        asked_again = served - 3
        assert STREAMS_PER_DONOR * ATTEMPTS <= asked_again <= STREAMS_PER_DONOR * (ATTEMPTS + 2)
        Serving(donor)
        await sync.fetch_all(download, [donor.id], note)
        assert download.complete

    in_lab(2, main)
