"""What one peer is sent of a round: order, repetition, and giving up, over the modelled network."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.node.lab import Lab, in_lab

from farflung.node import framing
from farflung.node.delivery import ACK, KIND, RETRY_S, SEND_ATTEMPTS, Delivery
from farflung.node.network import Stream
from farflung.protocol.errors import NetworkError
from farflung.protocol.headers import ContributionHeader, MeanHeader

PLAN = b"p" * 32
Header = ContributionHeader | MeanHeader


def contribution(part: int, payload: bytes) -> tuple[Header, bytes]:
    return ContributionHeader(PLAN, part, len(payload)), payload


def mean(part: int, payload: bytes) -> tuple[Header, bytes]:
    return MeanHeader(PLAN, part, len(payload)), payload


class Receiver:
    """Serves the streams of one node; `answers` decides what becomes of each transfer."""

    def __init__(self, lab: Lab, answers: Callable[["Receiver", Stream], Awaitable[None]] | None = None) -> None:
        self.streams = 0
        self.taken: list[tuple[Header, bytes]] = []
        self._answer = answers or Receiver.acknowledge
        lab.nodes[1].network.serve(KIND, self._serve)

    async def _serve(self, stream: Stream) -> None:
        self.streams += 1
        with pytest.raises(NetworkError):
            while True:
                header: Header = await framing.read_header(stream, ContributionHeader, MeanHeader)
                self.taken.append((header, bytes(await framing.read_payload(stream, header.nbytes))))
                await self._answer(self, stream)

    async def acknowledge(self, stream: Stream) -> None:
        await stream.write(ACK)


def delivery(lab: Lab, unreachable: list[str] | None = None) -> Delivery:
    said = [] if unreachable is None else unreachable
    made = Delivery(lab.nodes[0].network, lab.nodes[1].id, lambda peer, reason: said.append(reason))
    lab.group.create_task(made.run())
    return made


def test_contributions_go_before_means_and_each_in_the_order_it_came() -> None:
    async def main(lab: Lab) -> None:
        receiver, to = Receiver(lab), delivery(lab)
        sent = [mean(0, b"m" * 900), contribution(4, b"a" * 70_000), mean(1, b"n" * 5), contribution(2, b"b")]
        await asyncio.gather(*(to.deliver(*transfer) for transfer in sent))
        assert receiver.taken == [sent[1], sent[3], sent[0], sent[2]] and receiver.streams == 1
        await asyncio.sleep(60.0)
        await to.deliver(*sent[0])
        assert receiver.taken[4:] == [sent[0]] and receiver.streams == 1, "the round is not over"

    in_lab(2, main)


def test_void_means_are_not_sent_before_those_that_count() -> None:
    async def main(lab: Lab) -> None:
        receiver, to = Receiver(lab), delivery(lab)
        early = [(MeanHeader(PLAN, k, 9, early=True), b"void mean") for k in range(2)]
        sending = [lab.group.create_task(_outcome(to.deliver(*transfer))) for transfer in early]
        await asyncio.sleep(0.0)
        await to.deliver(*mean(1, b"mean"))
        await asyncio.gather(*sending)
        assert [type(task.result()) for task in sending] == [type(None), NetworkError]
        assert receiver.taken == [early[0], mean(1, b"mean")]

    in_lab(2, main)


async def _outcome(work: Awaitable[None]) -> Exception | None:
    try:
        await work
    except NetworkError as error:
        return error
    return None


def test_the_next_does_not_wait_for_an_answer_to_the_last() -> None:
    async def main(lab: Lab) -> None:
        going = asyncio.Event()

        async def later(self: Receiver, stream: Stream) -> None:
            if len(self.taken) == 3:
                going.set()
            if going.is_set():
                for _ in range(len(self.taken)):
                    await stream.write(ACK)

        Receiver(lab, later)
        to = delivery(lab)
        await asyncio.gather(*(to.deliver(*contribution(k, b"x" * 5000)) for k in range(3)))

    in_lab(2, main)


def test_what_was_not_answered_is_sent_again_over_another_stream() -> None:
    async def main(lab: Lab) -> None:
        async def once(self: Receiver, stream: Stream) -> None:
            if len(self.taken) == 2:
                await stream.close()
            else:
                await stream.write(ACK)

        reasons: list[str] = []
        receiver, to = Receiver(lab, once), delivery(lab, reasons)
        await asyncio.gather(*(to.deliver(*contribution(k, b"x" * 5000)) for k in range(3)))
        assert [header.part for header, _ in receiver.taken] == [0, 1, 1, 2]
        assert len(reasons) == 1 and receiver.streams == 2

    in_lab(2, main)


def test_a_stream_that_broke_unnoticed_costs_no_pause() -> None:
    """The peer was started again between the contributions and the means."""

    async def main(lab: Lab) -> None:
        async def one_each(self: Receiver, stream: Stream) -> None:
            await stream.write(ACK)
            await stream.close()

        reasons: list[str] = []
        receiver, to = Receiver(lab, one_each), delivery(lab, reasons)
        loop = asyncio.get_running_loop()
        for part in range(2 * SEND_ATTEMPTS):
            await asyncio.sleep(5.0)
            began = loop.time()
            await to.deliver(*contribution(part, b"x" * 5000))
            assert loop.time() - began < RETRY_S
        assert [header.part for header, _ in receiver.taken] == list(range(2 * SEND_ATTEMPTS)) and receiver.streams > 1

    in_lab(2, main)


def test_a_peer_that_takes_nothing_is_given_up_and_may_come_back() -> None:
    async def main(lab: Lab) -> None:
        async def cut(self: Receiver, stream: Stream) -> None:
            await stream.close()

        reasons: list[str] = []
        loop = asyncio.get_running_loop()
        receiver, to = Receiver(lab, cut), delivery(lab, reasons)
        began = loop.time()
        outcomes = await asyncio.gather(*(to.deliver(*contribution(k, b"x")) for k in range(2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NetworkError] * 2
        assert len(reasons) == receiver.streams == SEND_ATTEMPTS
        assert loop.time() - began >= (SEND_ATTEMPTS - 1) * RETRY_S
        receiver._answer = Receiver.acknowledge
        await to.deliver(*contribution(2, b"x"))

    in_lab(2, main)
