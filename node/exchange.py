"""The butterfly all-reduce over the engine's streams: contributions to owners, means to everybody, and who has what.

Encode once, scatter parts, the owner reduces in the order of keys (`compression.aggregate`), and everybody, the owner included, later
decodes the same bytes. A mean of which nobody lacks more than one contribution is not reduced (`compression.unreduced`): of two members each hears what the other has sent. Which transfers are due is decided by `protocol/`; this module moves the bytes and tells what has arrived.
Everything that a stream may bring is checked against the accepted plan before memory is taken for it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from farflung.compression import unreduced
from farflung.compression.aggregate import reduce_part
from farflung.compression.codec import CodecError, Payload
from farflung.compression.policy import FlatCodec
from farflung.compression.unreduced import MeanCodec, MeanPolicy
from farflung.node import framing
from farflung.node.delivery import ACK, KIND, Delivery
from farflung.node.door import Doors
from farflung.node.downlink import Downlink
from farflung.node.fetching import TRANSFER_S, Fetcher, FetchNews, check_payload, part_codec, rotated
from farflung.node.learner import Learner
from farflung.node.means import MeanStore
from farflung.node.meetings import Meetings
from farflung.node.network import Network, PeerId, Stream, StreamHandler
from farflung.node.residuals import Residuals
from farflung.node.rounds import Round, Rounds, Traffic
from farflung.node.uplink import Uplink
from farflung.protocol.chain import RoundResult
from farflung.protocol.errors import Malformed, NetworkError, Refused
from farflung.protocol.headers import ContributionHeader, MeanHeader
from farflung.protocol.messages import Part, Plan
from farflung.training.coupled import Update
from farflung.training.errors import NothingOffered

T = TypeVar("T")

ENCODE_ELEMENTS = 1 << 21
"""Parts are encoded so many elements at a time: a millisecond or two, so that sending begins soon and doors are rarely used."""

MOST_STREAMS = 8
"""From one peer at a time: one that hangs and its repetition, of a plan and of some that came to nothing before it."""


class News(FetchNews, Protocol):
    """Whom the exchange tells."""

    def contribution_arrived(self, plan_id: bytes, part: int, peer: PeerId) -> None: ...

    def mean_held(self, plan_id: bytes, part: int, digest: bytes, *, early: bool = False) -> None: ...

    def span(self, what: str, round_: int) -> AbstractContextManager[None]:
        """What is done inside took time, for whoever looks where it went."""
        ...


class Exchange:
    """Transfers of all current rounds, and the means of recent ones."""

    def __init__(
        self,
        network: Network,
        doors: Doors,
        learner: Learner,
        means: MeanStore,
        *,
        uplink: FlatCodec,
        downlink: FlatCodec,
        last: FlatCodec | None = None,  # of both in the last round of the run
        fast_bytes_per_s: float,  # of links
        residuals: Residuals,
        meetings: Meetings,
        news: News,
    ) -> None:
        self._network = network
        self._doors = doors
        self._learner = learner
        self._means = means
        self._uplink = uplink
        self._downlink = downlink
        self._last = last
        self._residuals = residuals
        self._meetings = meetings
        self._news = news
        self._rounds = Rounds()
        self._heights: dict[bytes, int] = {}
        """Plans not known to be over."""
        self._incoming: Counter[PeerId] = Counter()
        """Streams that bring transfers at the moment."""
        self._group: asyncio.TaskGroup
        self.fetcher = Fetcher(
            network,
            doors.side,
            means,
            fast_bytes_per_s=fast_bytes_per_s,
            news=news,
            received=self._count_received,
        )
        self._decoded = torch.empty(0, dtype=torch.float32)
        self.in_flight = b""
        """Plan to which the learner's last pseudo-gradient went."""
        self._taken_back = 0
        """How often there was nothing in flight any more, whatever may have been on its way there."""
        self.sending = Uplink(network.delivered_bytes, fast_bytes_per_s)
        self.receiving = Downlink(network.received_bytes, fast_bytes_per_s)

    def serve(self) -> None:
        """Accept transfers."""
        self._network.serve(KIND, self._guard(self._serve_transfers))
        self.fetcher.serve()
        self._meetings.serve()

    # ---- what the node asks for --------------------------------------------------------------------------------

    def expect(self, plan_id: bytes, plan: Plan) -> None:
        """A plan was accepted: transfers that name it are welcome."""
        self._rounds.begin(plan_id, plan)
        self._residuals.expect(plan_id, self.uplink_of(plan), self._means_of(plan).down)
        self._heights[plan_id] = plan.height

    def start(self, plan_id: bytes, work: Coroutine[None, None, None], group: asyncio.TaskGroup) -> None:
        """Run a part of a round's work as a task that ends with the round."""
        self._group = group
        round_ = self._rounds.get(plan_id)
        if round_ is None:
            work.close()
        else:
            self._spawn(round_, work)

    def forget(self, plan_id: bytes) -> Traffic:
        """The plan is over, committed or not: end its transfers, free its bytes. Returns what was moved for it.

        Whoever still lacks a mean of a committed plan fetches it.
        """
        round_ = self._rounds.get(plan_id)
        if round_ is not None and len({owner for owner, _ in round_.unsent}) > 1:
            self.sending.give_up()
        elif round_ is not None and not round_.sent_bytes:
            self.sending.stay_idle()
        return self._rounds.end(plan_id)

    async def decided(self, height: int, plan_id: bytes) -> None:
        """Commit `height` is applied; of its plans, `plan_id` (empty: none) was it. What is held of the others is not needed."""
        over = [plan for plan, at in self._heights.items() if at <= height]
        for plan in over:
            del self._heights[plan]
            self._residuals.forget(plan)
            if plan != plan_id:
                self.forget(plan)
                await self._means.discard(plan)

    def meet(self, plan_id: bytes, group: asyncio.TaskGroup) -> None:
        """Ask another group how it stands in our parts, if it is time to; their means wait for that."""
        round_ = self._rounds.get(plan_id)
        if round_ is None or not self._meetings.is_due:
            return
        self._group = group
        for k, part in enumerate(round_.plan.parts):
            if part.owner == self._network.peer_id and k not in round_.meetings:
                round_.meetings[k] = self._spawn(round_, self._meetings.term(plan_id, round_.plan, k))

    def take_back(self) -> None:
        """The learner has nothing in flight any more, though a round may count what was sent."""
        self.in_flight = b""
        self._taken_back += 1

    async def contribute(self, plan_id: bytes) -> None:
        """Encode our pseudo-gradient part by part, and send each part to its owner while the next is being encoded."""
        round_ = self._rounds.get(plan_id)
        if round_ is None:
            return
        with self._news.span("scatter", round_.plan.height):
            with self._news.span("encode", round_.plan.height):
                sending = await self._encode_and_send(plan_id, round_)
            await asyncio.gather(*sending)

    async def _encode_and_send(self, plan_id: bytes, round_: Round) -> list[asyncio.Task[None]]:
        """All parts are encoded; the tasks that send them."""
        parts = round_.plan.parts
        if self._residuals.keeps_contributions:
            await self._doors.side.run(self._residuals.begin, plan_id)
        # Beside training, or everybody would wait for the step of the slowest: of what this reads, only commits change anything.
        first, last = parts[0].start, parts[-1].stop
        before = self._taken_back
        try:
            delta = await self._doors.side.run(self._learner.offered_gradient, first, last)
        except NothingOffered:  # our state was repaired meanwhile: the others cut us off
            return []
        if self._taken_back != before:  # meanwhile, and it is not in flight for the learner: the same
            return []
        self.in_flight = plan_id
        sending: list[asyncio.Task[None]] = []
        for batch in _batches(
            _sending_order(parts, self._network.peer_id), [part.stop - part.start for part in parts], ENCODE_ELEMENTS
        ):
            pieces = [(parts[k].start, delta[parts[k].start - first : parts[k].stop - first]) for k in batch]
            payloads = await self._doors.side.run(self._encode, plan_id, pieces)
            for k, payload in zip(batch, payloads, strict=True):
                part = parts[k]
                round_.encoded_bytes += len(payload)
                round_.encoded_numel += part.stop - part.start
                if part.owner == self._network.peer_id:
                    self._store_contribution(plan_id, round_, k, part.owner, payload)
                else:
                    round_.own[k] = payload
                    header = ContributionHeader(plan_id, k, len(payload))
                    sending.append(self._spawn(round_, self._send(round_, part.owner, header, payload)))
        round_.owed = self._residuals.owed
        return sending

    def _encode(self, plan_id: bytes, pieces: Sequence[tuple[int, torch.Tensor]]) -> list[memoryview]:
        return [self._residuals.encode_contribution(plan_id, piece, start) for start, piece in pieces]

    async def reduce(
        self, plan_id: bytes, part: int, weights: Sequence[tuple[PeerId, float]], *, early: bool = False
    ) -> None:
        """Make the mean of one of our parts of contributions in the order given, keep it, and send it to every other member.

        After an `early` mean there may be another one, of fewer contributions.
        """
        round_ = self._rounds.get(plan_id)
        if round_ is None:
            return
        payloads = round_.contributions.get(part, {})
        if any(peer not in payloads for peer, _ in weights):
            return  # the plan was dropped and taken up again: they are not here any more
        bounds = round_.plan.parts[part]
        numel = bounds.stop - bounds.start
        met = None if part not in round_.meetings else await asyncio.shield(round_.meetings[part])
        contributions = [(payloads[peer], weight) for peer, weight in weights]
        others = rotated(round_.plan.members, self._network.peer_id)
        places = {peer: place for place, (peer, _) in enumerate(weights)}
        lacked = max((len(weights) - (peer in places) for peer in others), default=0)
        means = part_codec(self._means_of(round_.plan), bounds)
        stays = met is None and means.leaves_unreduced(lacked, numel)
        try:
            with self._news.span("reduce", round_.plan.height):
                if stays:
                    payload = await self._doors.side.run(
                        self._residuals.pack_mean, plan_id, bounds.start, numel, contributions
                    )
                else:
                    payload = await self._doors.side.run(
                        reduce_part,
                        numel,
                        contributions,
                        part_codec(self.uplink_of(round_.plan), bounds),
                        lambda mean: self._residuals.encode_mean(
                            plan_id, mean if met is None else mean.add_(met), bounds.start
                        ),
                    )
        except CodecError as error:
            await self._name_unfit(part, round_.plan, [(peer, payloads[peer]) for peer, _ in weights], error)
            return
        if not early:
            round_.contributions.pop(part, None)
        del payloads, contributions  # their memory is not needed while the mean is sent
        with self._news.span("spread", round_.plan.height):
            sending = []
            for peer in others:
                lacks = places.get(peer) if stays else None
                sent = payload if lacks is None else await self._doors.side.run(unreduced.without, payload, lacks)
                header = MeanHeader(plan_id, part, len(sent), early, lacks)
                sending.append(self._spawn(round_, self._send(round_, peer, header, sent)))
            digest = await self._means.put(plan_id, part, payload, early=early)  # while it is sent
            self._news.mean_held(plan_id, part, digest, early=early)
            await asyncio.gather(*sending)

    async def _name_unfit(
        self, part: int, plan: Plan, contributions: Sequence[tuple[PeerId, Payload]], error: CodecError
    ) -> None:
        """Say whose contributions have no place in a mean, or why else there is none. The round leaves the part for the next one: who counts is the same for
        all parts, and no owner decides it. A mean that is left unreduced holds whatever contributions may.
        """
        bounds = plan.parts[part]
        codecs = part_codec(self._means_of(plan), bounds)
        named = False
        for peer, payload in contributions:
            reason = await self._doors.side.run(_unfit, payload, bounds.stop - bounds.start, codecs)
            if reason is not None:
                self._news.refused(Refused(f"a contribution to part {part} that no mean can hold: {reason}", peer=peer))
                named = True
        if not named:
            self._news.refused(Malformed(f"contributions to part {part}, of which no mean can be made: {error}"))

    async def confirm(self, plan_id: bytes) -> None:
        """Nothing of this plan is reduced again: contributions that have been are not needed any more."""
        round_ = self._rounds.get(plan_id)
        if round_ is not None:
            round_.contributions.clear()

    async def fetch_due(self, plan_id: bytes, part: int, digest: bytes, holders: Sequence[PeerId]) -> None:
        """Fetch a mean that the current round still lacks, unless that is under way: proposers repeat what they say."""
        round_ = self._rounds.get(plan_id)
        if round_ is not None and not self.fetcher.seeks(plan_id, part, digest, holders):
            with self._news.span("fetch", round_.plan.height):
                await self.fetcher.fetch(
                    plan_id, part, digest, holders, round_.plan.parts[part], self._means_of(round_.plan)
                )

    async def collect(
        self, result: RoundResult, holders: Sequence[PeerId], *, last: bool, attempts: int = 1
    ) -> dict[int, Payload] | None:
        """What `Fetcher.collect` says. `last`: the round is the last one of the run."""
        return await self.fetcher.collect(result, holders, self._means_codec(last=last), attempts=attempts)

    async def rolled(self, result: RoundResult) -> None:
        """Downloaded state has been brought over a committed round with what `collect` got, as far as that was possible."""
        await self._means.pass_by(result.plan)

    def decode(self, result: RoundResult, means: dict[int, Payload], *, last: bool) -> list[Update]:
        """The updates of a committed round, good until the next call: they lie where those of the last round did, for to get so much fresh memory from the
        system takes six times as long as to decode. Raises CodecError. Blocks: call through the door.
        """
        codec = self._means_codec(last=last)
        kept = [(k, part) for k, part in enumerate(result.parts) if part.digest]
        numel = sum(part.stop - part.start for _, part in kept)
        if numel > len(self._decoded):
            self._decoded = torch.empty(numel, dtype=torch.float32)
        updates: list[Update] = []
        at = 0
        for k, part in kept:
            mean = self._decoded[at : at + part.stop - part.start]
            part_codec(codec, part).decode(means[k], len(mean), out=mean)
            updates.append((part.start, part.stop, mean))
            at += len(mean)
        return updates

    # ---- moving bytes ------------------------------------------------------------------------------------------

    async def _send(
        self, round_: Round, peer: PeerId, header: ContributionHeader | MeanHeader, payload: Payload
    ) -> None:
        if peer not in round_.deliveries:
            delivery = round_.deliveries[peer] = Delivery(self._network, peer, self._news.unreachable)
            self._spawn(round_, delivery.run())
        if isinstance(header, ContributionHeader):
            round_.unsent.add((peer, header.part))
        try:
            with self.sending.transfer(len(payload)):
                await round_.deliveries[peer].deliver(header, payload)
            round_.sent_bytes += len(payload)
        except NetworkError:
            pass  # the cut goes without our contribution; whoever lacks the mean fetches it
        finally:
            round_.unsent.discard((peer, header.part))

    async def _serve_transfers(self, stream: Stream) -> None:
        """What a peer sends of one round, until it ends the stream."""
        if self._incoming[stream.peer] >= MOST_STREAMS:
            raise Refused(f"more than {MOST_STREAMS} streams of transfers at a time", peer=stream.peer)
        self._incoming[stream.peer] += 1  # a broken connection may be noticed by its sender first
        try:
            while True:
                header: ContributionHeader | MeanHeader = await framing.read_header(
                    stream, ContributionHeader, MeanHeader
                )
                round_ = await self._rounds.expected(header.plan, stream.peer)
                part = round_.part(header.part, stream.peer)
                if isinstance(header, ContributionHeader):
                    await self._take_contribution(stream, header, round_, part)
                else:
                    await self._take_mean(stream, header, round_, part)
        finally:
            self._incoming[stream.peer] -= 1
            if not self._incoming[stream.peer]:
                del self._incoming[stream.peer]

    async def _take_contribution(self, stream: Stream, header: ContributionHeader, round_: Round, part: Part) -> None:
        if part.owner != self._network.peer_id or all(c.peer != stream.peer for c in round_.plan.contributors):
            raise Refused("a contribution that the plan does not send here", peer=stream.peer)
        if header.nbytes > part_codec(self.uplink_of(round_.plan), part).max_nbytes(part.stop - part.start):
            raise Refused(f"a contribution of {header.nbytes} bytes to part {header.part}", peer=stream.peer)
        if stream.peer in round_.contributions.get(header.part, {}):  # sent again, since our answer was lost
            await framing.drain(stream, header.nbytes)
            self._rounds.check(header.plan, round_, stream.peer)
            await stream.write(ACK, overhead=len(ACK))
            return
        with self.receiving.transfer(header.nbytes):
            payload = await framing.read_payload(stream, header.nbytes)
        try:
            await check_payload(
                self._doors.side, part_codec(self.uplink_of(round_.plan), part), payload, part.stop - part.start
            )
        except CodecError as error:
            raise Malformed(f"a contribution to part {header.part}: {error}", peer=stream.peer) from error
        self._rounds.check(header.plan, round_, stream.peer)
        round_.received_bytes += header.nbytes
        self._store_contribution(header.plan, round_, header.part, stream.peer, payload)
        await stream.write(ACK, overhead=len(ACK))

    async def _take_mean(self, stream: Stream, header: MeanHeader, round_: Round, part: Part) -> None:
        if part.owner != stream.peer:
            raise Refused("a mean from somebody who does not own the part", peer=stream.peer)
        codec, numel = part_codec(self._means_of(round_.plan), part), part.stop - part.start
        if header.nbytes > codec.max_nbytes(numel):
            raise Refused(f"a mean of {header.nbytes} bytes for part {header.part}", peer=stream.peer)
        with self.receiving.transfer(header.nbytes):
            payload = await framing.read_payload(stream, header.nbytes)
        self._rounds.check(header.plan, round_, stream.peer)
        round_.received_bytes += header.nbytes
        if header.lacks is not None and header.part not in round_.own:
            # We were started again meanwhile: the mean is fetched when it is missed.
            await stream.write(ACK, overhead=len(ACK))
            return

        def take(payload: Payload) -> Payload:
            if header.lacks is not None:
                payload = unreduced.put_back(payload, header.lacks, round_.own[header.part])
            codec.check(payload, numel)
            return payload

        try:
            digest = await self._means.put(
                header.plan,
                header.part,
                payload,
                early=header.early,
                take=take,
            )
        except CodecError as error:
            raise Malformed(f"a mean of part {header.part}: {error}", peer=stream.peer) from error
        self._news.mean_held(header.plan, header.part, digest, early=header.early)
        await stream.write(ACK, overhead=len(ACK))

    def _count_received(self, plan_id: bytes, nbytes: int) -> None:
        if (round_ := self._rounds.get(plan_id)) is not None:
            round_.received_bytes += nbytes

    def _guard(self, handler: Callable[[Stream], Awaitable[None]]) -> StreamHandler:
        return framing.guarded(handler, self._news.refused, within_s=TRANSFER_S)

    # ---- which codec -------------------------------------------------------------------------------------------

    def uplink_of(self, plan: Plan) -> FlatCodec:
        """Of contributions. A plan that was accepted names the codecs that its round must have."""
        return self._last if self._last is not None and plan.uplink == self._last.spec else self._uplink

    def _means_of(self, plan: Plan) -> MeanPolicy:
        """Of means, as `uplink_of`."""
        last = self._last is not None and plan.downlink == self._last.spec
        return MeanPolicy(self.uplink_of(plan), self._means_codec(last=last).down)

    def _means_codec(self, *, last: bool) -> MeanPolicy:
        """Of means that were committed."""
        if last and self._last is not None:
            return MeanPolicy(self._last, self._last)
        return MeanPolicy(self._uplink, self._downlink)

    # ---- small things ------------------------------------------------------------------------------------------

    def _store_contribution(self, plan_id: bytes, round_: Round, part: int, peer: PeerId, payload: Payload) -> None:
        if self._rounds.get(plan_id) is round_ and peer not in round_.contributions.setdefault(part, {}):
            round_.contributions[part][peer] = payload
            self._news.contribution_arrived(plan_id, part, peer)

    def _spawn(self, round_: Round, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = self._group.create_task(work)
        round_.tasks.add(task)
        task.add_done_callback(round_.tasks.discard)
        return task


def _unfit(payload: Payload, numel: int, codecs: MeanCodec) -> str | None:
    """Why a contribution could not be the mean, if it were the only one, coded once more; None when it could."""
    try:
        codecs.down.encode(codecs.up.decode(payload, numel))
    except CodecError as error:
        return str(error)
    return None


def _sending_order(parts: Sequence[Part], me: PeerId) -> list[int]:
    """The parts, one wave after the other; in each, every contributor begins with another owner, and ends with itself."""
    waves: Counter[PeerId] = Counter()
    keys: list[tuple[int, bool, PeerId]] = []
    for part in parts:
        keys.append((waves[part.owner], part.owner <= me, part.owner))
        waves[part.owner] += 1
    return sorted(range(len(parts)), key=keys.__getitem__)


def _batches(order: Iterable[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """`order` in runs whose `sizes` add up to at most `most`; one that is larger is a run of its own."""
    batch: list[int] = []
    filled = 0
    for k in order:
        if batch and filled + sizes[k] > most:
            yield batch
            batch, filled = [], 0
        batch.append(k)
        filled += sizes[k]
    if batch:
        yield batch
