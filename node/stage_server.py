"""A peer of a pipeline: holds some stages, computes what others send for them, and sends the outcome on.

What to do with a request is decided by `protocol/desk.py`, in which order by the plan's policy (`training/pipeline_machine.Worklist`), what it computes
is `training/pipeline_worker.py`; this module has the streams, the tensors and the door to the model. The same code runs over the
real engine and, in simulations, over the in-memory network under a virtual clock.

Kept per visit: its input until the backward, and the encoded gradient of its input until the microbatch has landed. Gradients are summed up apart for each
data node of the plan, and what was summed up for one counts if that one has said so at the end of its step (`settle`), and not otherwise: it may have
given us up and had others do our part, which nobody else knows. So one that dies before it has told us takes what we did for it along, and nothing
counts twice. The price is memory: a gradient of the stage, 4 bytes a parameter, for each data node whose microbatches come by (at a data node, its own).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from farflung.compression.codec import CodecError, Payload
from farflung.node import framing
from farflung.node.courier import ACTIVATION, GRADIENT, REACH_S, SLOWEST_BYTES_PER_S, Courier, Parcel
from farflung.node.device_room import with_room
from farflung.node.diary import Diary
from farflung.node.door import Door
from farflung.node.imprints import Imprint, Imprints
from farflung.node.network import Network, PeerId, Stream
from farflung.node.parcel_rate import ParcelRate
from farflung.node.pipeline_step import Step
from farflung.node.sealed_mail import Post
from farflung.node.stage_step import Listener, OpenStep, Service, check_shape, opened, sum_up
from farflung.node.tether import SETTLE
from farflung.protocol.desk import Answer, Effect, Forget, Later, Ready, Report, Send
from farflung.protocol.errors import Malformed, Refused, RemoteError
from farflung.protocol.headers import ParcelHeader, Settled, SettleRequest
from farflung.protocol.messages import Again, Landed, Passage, PipelineMessage
from farflung.protocol.route import preceding
from farflung.protocol.visit import Work
from farflung.training.errors import NoRoom, Overflow
from farflung.training.out_of_memory import let_go, no_room
from farflung.training.pipeline_boundary import TARGET_BYTES, encode_targets
from farflung.training.pipeline_plan import BadPlan, Kind, Op
from farflung.training.pipeline_worker import Accumulated, Batch, Worker

BUSY_S = 0.2
"""Until a busy peer is asked again."""
MOST_SPARES = 64
"""Streams that a step opens for the case that a peer is lost. Beyond that they are dialled when they are needed."""
STEP_WAIT_S = 10.0
"""How long a parcel may be ahead of its step here."""
LEASE_LOOK_S = 150.0
"""How often we look for what nobody has asked for during its lease."""
MOST_STREAMS = 2
"""Of one kind from one peer: one, and one that died without telling."""
STREAM_S = 3600.0
"""Longest life of a stream; its sender opens another."""


class StageServer:
    """See the module. `serve` once, then `run` beside everything else; `open` a step before its parcels come."""

    def __init__(
        self,
        *,
        network: Network,
        post: Post,
        learner: Door,
        side: Door,
        worker: Worker,
        service: Service,
        trip_s: Callable[[PeerId], float],  # to a peer and back, as far as is known
        refused: Callable[[RemoteError], None],
        lacks: Callable[[NoRoom], None],  # told when something came to nothing for that
    ) -> None:
        self._network = network
        self._post = post
        self._learner = learner
        self._side = side
        self._worker = worker
        self._service = service
        self._trip_s = trip_s
        self._refused = refused
        self._lacks = lacks
        self._open: dict[bytes, OpenStep] = {}
        self._opened = asyncio.Condition()
        self._couriers: dict[tuple[PeerId, str], Courier] = {}
        self._streams = Counter[tuple[PeerId, str]]()
        self.rate = ParcelRate()
        """Of our uplink."""
        self.imprints = Imprints()
        """Of the stages before and after ours."""
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup

    def serve(self) -> None:
        """Accept parcels, and the end of steps."""
        handlers = {
            ACTIVATION: lambda stream: self._serve_parcels(stream, backward=False),
            GRADIENT: lambda stream: self._serve_parcels(stream, backward=True),
            SETTLE: self._serve_settle,
        }
        for kind, handler in handlers.items():
            self._network.serve(kind, framing.guarded(handler, self._refused, within_s=STREAM_S))

    async def run(self) -> None:
        """Compute, send and expire until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._compute_all(), name="stage work")
            group.create_task(self._expire_all(), name="leases")

    # ---- steps -----------------------------------------------------------------------------------------------------

    async def open(self, step: Step, listener: Listener | None = None) -> None:
        """Take part in a step; `listener` is our data node's. Raises BadPlan when it wants stages that we do not hold."""
        me = step.place.get(self._network.peer_id)
        if me is None:
            raise BadPlan("this peer is not in the plan")
        wanted = {stage for stage, peers in enumerate(step.plan.stages) if me in peers}
        if not wanted <= set(self._worker.stages):
            raise BadPlan(f"the plan has stages {sorted(wanted)} here, where {self._worker.stages} are held")
        self._open[step.window] = OpenStep.begin(step, me, self._service, listener)
        for place, backward in islice(sorted(step.spares(me)), MOST_SPARES):
            # Dialled before it is needed: a new connection takes three trips, at each hop of a microbatch that is late already.
            self._courier(step.keys[place], backward=backward)
        async with self._opened:
            self._opened.notify_all()

    async def settled(self, window: bytes) -> Accumulated:
        """What counts of a step, once each data node has settled it or is lost: what was summed up for those who have said that it counts."""
        open_ = self._open[window]
        await open_.settled.wait()
        # behind a backward that still runs for one of them: of a microbatch that it has cut short
        return await self._learner.run(
            sum_up, [open_.accumulated[home] for home in open_.counting], self._service.device
        )

    def counting(self, window: bytes) -> list[int]:
        """The data nodes whose microbatches count here in a step that is settled; places in its plan."""
        return self._open[window].counting

    def at_home(self, window: bytes) -> set[int]:
        """Microbatches of our own data node whose gradient has come back to stage 0, and is in its sums, whether or not they count as landed."""
        open_ = self._open[window]
        return {microbatch for microbatch, hop in open_.desk.counted.get(open_.me, ()) if hop == 0}

    def diary(self, window: bytes) -> Diary:
        """What we did in a step, which is open."""
        return self._open[window].diary

    def close(self, window: bytes) -> None:
        """Forget a step. Its sums go at once, whoever still looks at it: there has to be room for the inner step."""
        gone = self._open.pop(window, None)
        if gone is not None:
            gone.accumulated.clear()
            gone.desk.on_landed(
                range(len(gone.step.routes))
            )  # parcels that still wait for a slow link would only be refused

    def lost(self, peer: PeerId) -> None:
        """A data node is gone, or went on without us: its microbatches are void, and what was summed up for it does not count, unless it has told us
        that it does."""
        for open_ in self._open.values():
            place = open_.step.place.get(peer)
            if place in open_.step.homes:
                its = [number for number in range(len(open_.step.routes)) if open_.step.home(number) == place]
                self._do(open_, open_.desk.on_landed(its))
                open_.settle(place, counts=False)

    def avoid(self, window: bytes, place: int) -> None:
        """A peer of that step is silent: what we may send to anybody of its stage goes to others."""
        if (open_ := self._open.get(window)) is not None:
            open_.desk.avoid(place)

    def start(self, order: Again, batch: Batch) -> None:
        """Our data node's: begin a microbatch, or let stage 0 send it once more. Tokens and targets [B, T]."""
        open_ = self._open[order.window]
        if order.microbatch in open_.batches:
            self._do(open_, open_.desk.on_again(order, self._now()))
            return
        tokens, _ = open_.batches[order.microbatch] = batch
        open_.inputs[order.microbatch, 0] = (tokens, open_.travelling(batch))
        header = ParcelHeader(
            window=order.window,
            microbatch=order.microbatch,
            hop=0,
            backward=False,
            until=order.until,
            version=order.version,
            route=order.route,
            batch=tokens.shape[0],
            length=tokens.shape[1],
            loss=torch.nan,
            asks=False,
            nbytes=0,
        )
        self._do(open_, open_.desk.take(header, self._now())[1])

    def handle(self, sender: PeerId, message: PipelineMessage) -> None:
        """A control message. Raises Refused naming the sender; those of steps that are not open mean nothing."""
        open_ = self._open.get(message.window)
        if open_ is None:
            return
        place = open_.step.placed(sender)
        if isinstance(message, Passage):
            if open_.listener is None:
                raise Refused("word of a microbatch to somebody who is not its data node", peer=sender)
            open_.listener(place, message)
            return
        if isinstance(message, Landed):
            if any(open_.step.home(microbatch) != place for microbatch in message.microbatches):
                raise Refused("an order about a microbatch of another data node", peer=sender)
            effects = open_.desk.on_landed(message.microbatches)
        elif isinstance(message, Again):
            open_.step.check_order(message, sender, open_.me)
            effects = open_.desk.on_again(message, self._now())
        else:
            open_.step.check_order(message, sender, open_.me)
            effects = open_.desk.on_give_up(message)
        self._do(open_, effects)

    def settle(self, window: bytes, *, counts: bool) -> int:
        """Our own data node is done with a step; how many visits of its count here."""
        open_ = self._open[window]
        return open_.settle(open_.me, counts=counts)

    # ---- effects ---------------------------------------------------------------------------------------------------

    def _do(self, open_: OpenStep, effects: Sequence[Effect], output: Payload | None = None) -> None:
        """`output`: the encoded outcome of the forward whose effects these are."""
        for effect in effects:
            match effect:
                case Ready(work):
                    open_.worklist.arrive(open_.op(work), self._now(), open_.step.lanes[work.microbatch])
                    self._wake.set()
                case Send():
                    self._send(open_, effect, output)
                case Later(send):
                    self._group.create_task(self._send_later(open_, send, output), name="a busy peer")
                case Report(home, passage):
                    if home != open_.me:
                        self._post(open_.step.keys[home], passage)
                    elif open_.listener is not None:
                        open_.listener(home, passage)
                case Forget(microbatch, hop):
                    open_.forget(microbatch, hop)
                    self._wake.set()

    async def _send_later(self, open_: OpenStep, send: Send, output: Payload | None) -> None:
        await asyncio.sleep(BUSY_S)
        if open_.desk.wants(send):
            self._send(open_, send, output)

    def _send(self, open_: OpenStep, send: Send, output: Payload | None) -> None:
        key = (send.work.microbatch, send.work.hop)
        if not send.backward and key not in open_.inputs:
            return  # its gradient has come back while the other was busy: it has it already
        targets = b""
        if send.backward:
            payload, batch, length = open_.kept[key]
        else:
            assert output is not None
            payload = output
            x, its_targets = open_.inputs[key]
            batch, length = x.shape[:2]
            if its_targets is not None:
                targets = encode_targets(its_targets)
            if send.hop < len(send.route):
                name = open_.step.imprint_key(send.work.microbatch)
                self.imprints.keep(send.route[send.hop].stage, name, Imprint(batch, length, payload), output=False)
        header = ParcelHeader(
            window=open_.step.window,
            microbatch=send.work.microbatch,
            hop=send.hop,
            backward=send.backward,
            until=send.until,
            version=send.version,
            route=send.route,
            batch=batch,
            length=length,
            loss=send.loss,
            asks=send.tried is not None,
            nbytes=len(payload) + len(targets),
        )

        began = self._now()

        def done(answer: Answer | None) -> None:
            if answer is Answer.TAKEN:
                if send.peer != open_.me:
                    what = open_.op(Work(send.work.microbatch, send.hop, send.backward))
                    open_.diary.delivered(what, send.peer, began, self._now(), nbytes=header.nbytes)
                self._do(open_, open_.desk.passed(send))
            elif answer is Answer.BUSY:
                self._do(open_, open_.desk.busy(send), payload)
            else:
                self._do(open_, open_.desk.unreachable(send) if answer is None else open_.desk.unwanted(send))

        if send.peer == open_.me:
            self._group.create_task(self._hand_to_ourselves(open_, header, payload, targets, done), name="to ourselves")
            return
        courier = self._courier(open_.step.keys[send.peer], backward=send.backward)
        courier.carry(Parcel(header, payload, targets, lambda: open_.desk.wants(send), done))

    def _courier(self, peer: PeerId, *, backward: bool) -> Courier:
        kind = GRADIENT if backward else ACTIVATION
        courier = self._couriers.get((peer, kind))
        if courier is None:
            courier = self._couriers[peer, kind] = Courier(
                self._network, peer, kind, rate=self.rate, trip_s=self._trip_s, refused=self._refused
            )
            self._group.create_task(self._run_courier(peer, kind, courier), name=f"{kind}s to {peer.hex()[:12]}")
        return courier

    async def _run_courier(self, peer: PeerId, kind: str, courier: Courier) -> None:
        """There is no end to the peers that come and go, so it is forgotten; whoever is needed again gets another one."""
        await courier.run()
        del self._couriers[peer, kind]

    async def _hand_to_ourselves(
        self,
        open_: OpenStep,
        header: ParcelHeader,
        payload: Payload,
        targets: bytes,
        done: Callable[[Answer | None], None],
    ) -> None:
        done(await self._take(open_, header, payload, targets, self._network.peer_id))

    # ---- computing -------------------------------------------------------------------------------------------------

    async def _compute_all(self) -> None:
        while True:
            self._wake.clear()
            for open_ in list(self._open.values()):
                op = None if open_.settled.is_set() else open_.worklist.start()
                if op is not None:
                    await self._compute(open_, op)
                    break
            else:
                await self._wake.wait()

    async def _compute(self, open_: OpenStep, op: Op) -> None:
        work = open_.work(op)
        if not open_.desk.started(work):
            return
        key = (work.microbatch, work.hop)
        x, targets = open_.inputs[key]
        home = open_.step.home(work.microbatch)
        into = open_.accumulated[home]
        began, full = self._now(), False
        try:
            if op.kind is Kind.LOSS:
                if targets is None:
                    targets = open_.batches[work.microbatch][1]
                check_shape(targets, x)
                loss, output = await self._learner.run(self._loss, into, x, targets)
                effects = open_.desk.finished(work, home, loss)
                open_.counted(work, x, output, keep=bool(effects))
            elif op.kind is Kind.B:
                gradient = open_.gradients[key]
                check_shape(gradient, x)
                stage = open_.step.routes[work.microbatch][work.hop].stage
                output = await self._learner.run(self._backward, into, stage, x, gradient)
                effects = open_.desk.finished(work, home)
                open_.counted(work, x, output, keep=bool(effects))
            else:
                stage = open_.step.routes[work.microbatch][work.hop].stage
                output = await self._learner.run(self._forward, stage, x)
                effects = open_.desk.finished(work, home)
        except (Overflow, CodecError):
            output, effects = b"", open_.desk.failed(work)
        except NoRoom as error:
            self._lacks(error)
            output, effects, full = b"", open_.desk.failed(work), True
        if full:  # and not where the error is handled, which holds what the pass had got
            await self._learner.run(let_go)
        open_.diary.computed(op, began, self._now())
        open_.worklist.finish(op)
        self._do(open_, effects, output)

    def _forward(self, stage: int, x: Tensor) -> Payload:
        with no_room(f"a forward of {x.shape[0]} sequences through stage {stage}", self._service.device):
            # Tokens come from the CPU. On the loop their copy would wait for all that the device has been given to do.
            return self._service.forward.encode(self._worker.forward(stage, x.to(self._service.device)))

    def _loss(self, into: Accumulated, x: Tensor, targets: Tensor) -> tuple[float, Payload]:
        with no_room(f"the loss of {x.shape[0]} sequences", self._service.device):
            found = Accumulated()  # added only when all has come out well: what fails is done again, here or elsewhere
            loss, gradient = self._worker.loss(x, targets.to(x.device), found)
            payload = self._service.backward.encode(gradient)
            into.add(found)
            return loss, payload

    def _backward(self, into: Accumulated, stage: int, x: Tensor, gradient: Tensor) -> Payload:
        with no_room(f"a backward of {x.shape[0]} sequences through stage {stage}", self._service.device):
            found = Accumulated()
            of_input = self._worker.backward(stage, x.to(self._service.device), gradient, found)
            payload = b"" if of_input is None else self._service.backward.encode(of_input)
            into.add(found)
            return payload

    # ---- what comes in ---------------------------------------------------------------------------------------------

    async def _serve_parcels(self, stream: Stream, *, backward: bool) -> None:
        kind = (stream.peer, GRADIENT if backward else ACTIVATION)
        if self._streams[kind] >= MOST_STREAMS:
            raise Refused(f"more than {MOST_STREAMS} streams of {kind[1]}s", peer=stream.peer)
        self._streams[kind] += 1
        try:
            while True:
                header = await framing.read_header(stream, ParcelHeader)
                if header.backward != backward:
                    raise Refused(f"a parcel of the other direction among {kind[1]}s", peer=stream.peer)
                await self._serve_parcel(stream, header)
        finally:
            self._streams -= Counter([kind])  # keeps no zeros: there is no end to the peers that come and go

    async def _serve_parcel(self, stream: Stream, header: ParcelHeader) -> None:
        open_ = await self._await_step(header.window, stream.peer)
        targets_nbytes = TARGET_BYTES * header.batch * header.length if open_.carries_targets(header) else 0
        most = self._service.boundary(header).max_nbytes(open_.step.most_tokens) + TARGET_BYTES * open_.step.most_tokens
        open_.step.check(header, stream.peer, open_.me, most)
        if header.length > self._service.seq_len or header.nbytes < targets_nbytes:
            raise Refused(f"{header.nbytes} bytes for sequences of {header.length} tokens", peer=stream.peer)
        async with asyncio.timeout(REACH_S + header.nbytes / SLOWEST_BYTES_PER_S):
            answer = open_.desk.answer(header)
            if header.asks:
                await stream.write(bytes([answer]))
                if answer is not Answer.TAKEN:
                    return
            elif answer is not Answer.TAKEN:
                await framing.drain(stream, header.nbytes)
                await stream.write(bytes([answer]))
                return
            payload = await framing.read_payload(stream, header.nbytes - targets_nbytes)
            targets = await framing.read_exactly(stream, targets_nbytes)
        await stream.write(bytes([await self._take(open_, header, payload, targets, stream.peer)]))

    async def _take(
        self, open_: OpenStep, header: ParcelHeader, payload: Payload, targets: bytes, sender: PeerId
    ) -> Answer:
        def opening() -> Awaitable[tuple[Tensor, Tensor | None]]:
            return self._side.run(opened, self._service, header, payload, targets)

        try:
            found = await with_room(opening, lambda: self._learner.run(let_go), self._lacks)
        except CodecError as error:
            raise Malformed(f"microbatch {header.microbatch}, hop {header.hop}: {error}", peer=sender) from error
        if found is None:
            if header.asks or not 0 < header.hop < len(header.route):
                return Answer.BUSY  # its sender has others to go to; or nobody has, and it has to wait
            answer, effects = open_.desk.cannot(header, self._now())
            self._do(open_, effects)
            return answer
        x, its_targets = found
        answer, effects = open_.desk.take(header, self._now())
        key = (header.microbatch, header.hop)
        if answer is Answer.TAKEN and open_.desk.keeps(*key, backward=header.backward):
            if header.backward:
                open_.gradients[key] = x
            else:
                open_.inputs[key] = (x, its_targets)
                before = header.route[preceding(header.route, header.hop)].stage
                imprint = Imprint(header.batch, header.length, payload)
                self.imprints.keep(before, open_.step.imprint_key(header.microbatch), imprint, output=True)
        self._do(open_, effects)
        return answer

    async def _await_step(self, window: bytes, peer: PeerId) -> OpenStep:
        """A parcel may come before its step was opened here."""
        try:
            async with asyncio.timeout(STEP_WAIT_S), self._opened:
                await self._opened.wait_for(lambda: window in self._open)
        except TimeoutError as error:
            raise Refused("a parcel of a step that is not open here", peer=peer) from error
        return self._open[window]

    async def _serve_settle(self, stream: Stream) -> None:
        """Held by a data node during the whole step: the request comes at its end."""
        request = await framing.read_header(stream, SettleRequest)
        open_ = self._open.get(request.window)
        home = None if open_ is None else open_.step.place.get(stream.peer)
        if open_ is None or home not in open_.step.homes:
            raise Refused("the end of a step that is not open here, or not yours to end", peer=stream.peer)
        visits = open_.settle(home, counts=request.counts)
        await framing.write_header(stream, Settled(visits))

    # ---- small things ----------------------------------------------------------------------------------------------

    async def _expire_all(self) -> None:
        while True:
            await asyncio.sleep(LEASE_LOOK_S)
            for open_ in list(self._open.values()):
                self._do(open_, open_.desk.expire(self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
