"""Parcels overtake the answers of those before them, and each is told once what became of it."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.node import framing
from farflung.node.courier import ACTIVATION, IDLE_S, Courier, Parcel
from farflung.node.network import Stream
from farflung.node.parcel_rate import ParcelRate
from farflung.protocol.desk import Answer
from farflung.protocol.errors import Malformed, NetworkError, RemoteError
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.route import Leg
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.streams import MemoryStream

US, THEM = b"u" * 32, b"t" * 32
WAY_S = 0.1
PAYLOAD = b"x" * 1000
NO_ANSWER = 77
Receive = Callable[[ParcelHeader], int | None]
"""What is answered; None breaks the stream instead."""


@dataclass
class Lab:
    """What each parcel was told, and what the other side has seen."""

    told: dict[int, list[Answer | None]] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    refused: list[RemoteError] = field(default_factory=list)
    rate: ParcelRate = field(default_factory=ParcelRate)
    took_s: float = 0.0
    idle_s: float = 0.0
    """From the last answer until the courier ended by itself."""


def header(microbatch: int, *, asks: bool, nbytes: int) -> ParcelHeader:
    return ParcelHeader(
        window=b"w" * 32,
        microbatch=microbatch,
        hop=1,
        backward=False,
        until=1,
        version=0,
        route=(Leg(0, 0), Leg(1, 1)),
        batch=1,
        length=1,
        loss=torch.nan,
        asks=asks,
        nbytes=nbytes,
    )


def carry(
    count: int,
    receive: Receive,
    *,
    asking: frozenset[int] = frozenset(),
    payload: bytes = PAYLOAD,
    up_bytes_per_s: float = 1e9,
    ahead_s: float = 0.0,  # from when the courier runs until they are there
    early: bool = False,  # a peer that is asked says at once that it has it all
    rate: ParcelRate | None = None,  # None: a new one
) -> Lab:
    """So many parcels, all there at once, to a peer that does this with each."""
    lab = Lab(rate=rate or ParcelRate())

    async def serve(stream: Stream) -> None:
        while True:
            one = await framing.read_header(stream, ParcelHeader)
            answer = receive(one)
            if answer is None:
                raise NetworkError("broken off")
            if one.asks:
                await stream.write(bytes([answer] * (2 if early else 1)))
                if answer is not Answer.TAKEN:
                    continue
            await framing.drain(stream, one.nbytes)
            lab.seen.append(one.microbatch)
            if not early:
                await stream.write(bytes([answer]))

    async def run() -> Lab:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(
            loop,
            random.Random(0),
            LinkModel(latency_s=WAY_S / 2, jitter_s=0.0, up_bytes_per_s=up_bytes_per_s, kept_s=60.0),
        )
        ours, theirs = MemoryNetwork(hub, US), MemoryNetwork(hub, THEM)
        theirs.serve(ACTIVATION, framing.guarded(serve, lambda error: None, within_s=600.0))
        courier = Courier(
            ours, THEM, ACTIVATION, rate=lab.rate, trip_s=lambda peer: 2 * WAY_S, refused=lab.refused.append
        )
        everybody = asyncio.Event()

        def done(microbatch: int) -> Callable[[Answer | None], None]:
            def tell(answer: Answer | None) -> None:
                lab.told.setdefault(microbatch, []).append(answer)
                if len(lab.told) == count:
                    everybody.set()

            return tell

        async with asyncio.TaskGroup() as group:
            group.create_task(courier.run())
            await asyncio.sleep(ahead_s)
            begun = loop.time()
            for number in range(count):
                one = header(number, asks=number in asking, nbytes=len(payload))
                courier.carry(Parcel(one, payload, b"", lambda: True, done(number)))
            await everybody.wait()
            ended = loop.time()
        lab.took_s, lab.idle_s = ended - begun, loop.time() - ended
        return lab

    return clock.run(run())


class Showing(MemoryNetwork):
    """Shows the streams that it opens."""

    def __init__(self, hub: MemoryHub, peer: bytes) -> None:
        super().__init__(hub, peer)
        self.opened: list[MemoryStream] = []

    async def open_stream(self, peer: bytes, kind: str) -> MemoryStream:
        self.opened.append(await super().open_stream(peer, kind))
        return self.opened[-1]


def taken(_: ParcelHeader) -> Answer:
    return Answer.TAKEN


def test_a_parcel_does_not_wait_for_the_answer_to_the_one_before() -> None:
    one, eight = carry(1, taken), carry(8, taken)
    assert eight.told == {number: [Answer.TAKEN] for number in range(8)}
    assert eight.seen == list(range(8))
    assert eight.took_s - one.took_s < WAY_S  # and not fourteen ways more


def test_a_stream_that_is_open_ahead_spares_the_first_parcel_the_dialling() -> None:
    cold, warm = carry(1, taken), carry(1, taken, ahead_s=10.0)
    assert warm.told == cold.told and abs(warm.took_s - 2 * WAY_S) < 0.01 < cold.took_s - warm.took_s


def test_a_stream_that_breaks_while_nobody_needs_it_ends_the_courier() -> None:
    """So that the next parcel gets another one, and is not given up for a stream of a process that is long gone."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(latency_s=WAY_S / 2))
        ours, theirs = MemoryNetwork(hub, US), MemoryNetwork(hub, THEM)

        async def serve(stream: Stream) -> None:
            await asyncio.sleep(10.0)
            raise NetworkError("gone")

        theirs.serve(ACTIVATION, framing.guarded(serve, lambda error: None, within_s=600.0))
        courier = Courier(
            ours, THEM, ACTIVATION, rate=ParcelRate(), trip_s=lambda peer: 0.0, refused=lambda error: None
        )
        await courier.run()
        assert 10.0 < loop.time() < 12.0

    clock.run(main())


@pytest.mark.parametrize("serves_again", [False, True])
def test_a_stream_may_break_in_the_moment_in_which_a_parcel_comes(serves_again: bool) -> None:
    """Which then goes over another stream, if there is one."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(latency_s=WAY_S / 2))
        ours = Showing(hub, US)

        async def serve(stream: Stream) -> None:
            one = await framing.read_header(stream, ParcelHeader)
            await framing.drain(stream, one.nbytes)
            await stream.write(bytes([Answer.TAKEN]))

        def start() -> None:
            MemoryNetwork(hub, THEM).serve(ACTIVATION, framing.guarded(serve, lambda error: None, within_s=600.0))

        courier = Courier(
            ours, THEM, ACTIVATION, rate=ParcelRate(), trip_s=lambda peer: 0.0, refused=lambda error: None
        )
        told: list[Answer | None] = []

        async def break_and_carry() -> None:
            await asyncio.sleep(5.0)
            hub.kill(THEM)
            if serves_again:
                start()
            ours.opened[-1].fail("gone")
            courier.carry(Parcel(header(0, asks=False, nbytes=len(PAYLOAD)), PAYLOAD, b"", lambda: True, told.append))

        start()
        async with asyncio.TaskGroup() as group:
            group.create_task(break_and_carry())
            group.create_task(courier.run())
        assert told == [Answer.TAKEN if serves_again else None]

    clock.run(main())


def test_one_that_asks_is_sent_when_it_is_wanted() -> None:
    lab = carry(5, lambda one: Answer.BUSY if one.microbatch == 3 else Answer.TAKEN, asking=frozenset({1, 3}))
    assert lab.told == {number: [Answer.BUSY if number == 3 else Answer.TAKEN] for number in range(5)}
    assert lab.seen == [0, 1, 2, 4]


def test_it_ends_when_nobody_has_needed_it_for_long() -> None:
    assert abs(carry(3, taken).idle_s - IDLE_S) < 1.0


@settings(max_examples=40)
@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.frozensets(st.integers(0, 7)))
def test_a_stream_that_breaks_takes_nobody_else_with_it(count: int, poison: set[int], asking: frozenset[int]) -> None:
    lab = carry(count, lambda one: None if one.microbatch in poison else Answer.TAKEN, asking=asking)
    assert lab.told == {number: [None if number in poison else Answer.TAKEN] for number in range(count)}


@settings(max_examples=40)
@given(st.integers(1, 8), st.sets(st.integers(1, 30)))
def test_what_had_no_answer_is_sent_again(count: int, breaks: set[int]) -> None:
    calls = 0

    def receive(_: ParcelHeader) -> Answer | None:
        nonlocal calls
        calls += 1
        return None if calls in breaks and calls - 1 not in breaks else Answer.TAKEN

    lab = carry(count, receive)
    assert all(len(told) == 1 for told in lab.told.values()) and len(lab.told) == count
    given_up = {number for number, told in lab.told.items() if told == [None]}
    assert given_up <= ({0} if 1 in breaks else set()), "only where a stream brought no answer at all"
    assert sorted(set(lab.seen)) == [number for number in range(count) if number not in given_up]


@pytest.mark.parametrize("asks", [False, True])
def test_an_answer_that_is_none_is_told_and_the_parcel_sent_again(asks: bool) -> None:
    answers = chain([NO_ANSWER], repeat(Answer.TAKEN))
    lab = carry(3, lambda _: next(answers), asking=frozenset({0}) if asks else frozenset())
    assert lab.told == {0: [None], 1: [Answer.TAKEN], 2: [Answer.TAKEN]}, "given up, for its stream brought no answer"
    [error] = lab.refused
    assert isinstance(error, Malformed) and error.peer == THEM and str(NO_ANSWER) in str(error)


@pytest.mark.parametrize("asking", [frozenset(), frozenset({0, 3})])
def test_parcels_measure_the_uplink(asking: frozenset[int]) -> None:
    """200 kB behind 1 MB/s and 100 ms: whole parcels over their time would say half of it."""
    lab = carry(4, taken, payload=bytes(200_000), up_bytes_per_s=1e6, asking=asking)
    assert lab.rate.bytes_per_s == pytest.approx(1e6, rel=0.05)


def test_streams_that_break_measure_nothing() -> None:
    calls = iter([None, *[Answer.TAKEN] * 4])
    lab = carry(3, lambda _: next(calls), payload=bytes(200_000), up_bytes_per_s=1e6)
    assert lab.told[0] == [None] and lab.told[2] == [Answer.TAKEN]
    assert lab.rate.bytes_per_s == pytest.approx(1e6, rel=0.05)


def test_who_answers_before_it_has_anything_is_refused_and_stands_in_no_measurement() -> None:
    """What is begun when its answer is here already would be under way for ever."""
    lying = carry(2, taken, asking=frozenset({0, 1}), early=True)
    assert lying.told == {number: [None] for number in range(2)}
    assert [type(error) for error in lying.refused] == [Malformed] * 2
    honest = carry(4, taken, payload=bytes(200_000), up_bytes_per_s=1e6, rate=lying.rate)
    assert honest.rate.bytes_per_s == pytest.approx(1e6, rel=0.05)
