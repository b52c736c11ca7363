"""One node of a swarm: events in, decisions by `protocol.member`, effects out, over any engine and any clock.

    messages ─▶ Member ─▶ effects ─▶ Executor ─▶ messages, transfers, votes on disk
                   ▲                    └─▶ commits ─▶ apply loop ─▶ learner ─▶ training loop ─▶ ready ─┐
                   └──────────────────────────────────────────────────────────────────────────────────┘

`Member` is only touched from the event loop, between awaits, so its state is consistent whenever anything looks. Shutdown order: training
stops, goodbye goes out, the place is saved, transfers are cancelled, the network is closed by whoever made it.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterator

from torch import Tensor

from farflung.node.apply import Applier, Evaluate, Keep
from farflung.node.catchup import Catchup
from farflung.node.departure import Departure
from farflung.node.detours import Detours
from farflung.node.donor import Donor
from farflung.node.exchange import Exchange
from farflung.node.executor import Executor
from farflung.node.facilities import Facilities
from farflung.node.fetching import TRANSFER_S
from farflung.node.learner import Learner
from farflung.node.means import MeanStore
from farflung.node.peer_meetings import meetings_of
from farflung.node.peer_rows import Rows, chain_rows
from farflung.node.refusals import Refusals
from farflung.node.residuals import Residuals
from farflung.node.rest import Rest
from farflung.node.sealed_mail import SealedMail
from farflung.node.serving import Left, Serving
from farflung.node.statesync import StateSync
from farflung.node.terms import Terms
from farflung.node.trainer import Host, Trainer
from farflung.node.utterance import Utterance
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.effects import Effect
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.protocol.member import Member
from farflung.protocol.membership import Membership
from farflung.protocol.messages import Forward, Heartbeat, Part, Ready
from farflung.protocol.neighbours import Found
from farflung.protocol.types import as_text

TICK_S = 0.25
"""Between two looks at deadlines while a round or the like is under way; otherwise heartbeats and suspicions decide, seconds apart."""

STANDING = ("joining", "waiting")
"""States in which a node does nothing until somebody else does."""

ENDING = ("leaving", "finished")

LINGER_S = 20.0
"""How long a node that has finished serves those who have not."""

AGENT = "farflung/0.1.0"
"""What this software calls itself."""


class Peer:
    """See the module. `run` is the whole life of the node."""

    def __init__(
        self,
        terms: Terms,
        facilities: Facilities,
        learner: Learner,
        *,
        make_trainer: Callable[[Host], Trainer],
        evaluate: Evaluate,
        evaluates_few: bool = True,  # see `Applier`
        all_evaluate_last: bool = False,
        initial_is_genesis: bool = True,
    ) -> None:
        network, signer, doors = facilities.network, facilities.signer, facilities.doors
        storage, log, settings = facilities.storage, facilities.log, terms.settings
        self.network = network
        self.log = log
        self.settings = settings
        self.facts = facilities.facts
        self._refusals = Refusals(log)
        self.member = Member(settings, signer, Membership(signer.peer_id, settings.heartbeat_s), self._vitals)
        self._means = MeanStore(storage, doors.side)
        self.residuals = Residuals(
            signer.peer_id,
            uplink=terms.uplink,
            downlink=terms.downlink,
            spec=terms.feedback,
            version=lambda: self.applier.version,
            fragments=settings.rules.num_fragments,
        )
        meetings = meetings_of(
            terms,
            facilities,
            learner,
            self.member,
            version=lambda: self.applier.version,
            steady=lambda: self.applier.steady,
            met=lambda plan_id, part, term: self.witness_meeting(plan_id, part, term),
            refused=self.refused,
        )
        self.exchange = Exchange(
            network,
            doors,
            learner,
            self._means,
            uplink=terms.uplink,
            downlink=terms.downlink,
            last=terms.last,
            fast_bytes_per_s=settings.fast_bytes_per_s,
            residuals=self.residuals,
            meetings=meetings,
            news=self,
        )
        self.trainer = make_trainer(
            Host(
                may_train=lambda: self._may_train(),
                awaits_means=lambda: self._awaits_means(),
                is_due=lambda step_s: self.member.is_due(step_s, self._now()),
                moves=lambda: self.settings.rules.span(self.member.head.commit),
                others_train=lambda: self.member.membership.others_train(self.member.head.commit.view),
                set_ready=self._ready,
                withdraw=lambda: self._do(self.member.withdraw(self._now())),
                give_up=lambda reason: self.applier.give_up(reason),
                up_bytes_per_s=lambda: self.exchange.sending.bytes_per_s,
                down_bytes_per_s=lambda: self.exchange.receiving.bytes_per_s,
            )
        )
        catchup = Catchup(
            sync=StateSync(network, learner, self.refused),
            member=self.member,
            exchange=self.exchange,
            learner=learner,
            doors=doors,
            storage=storage,
            log=log,
            terms=terms,
        )
        self.applier = Applier(
            terms=terms,
            member=self.member,
            exchange=self.exchange,
            means=self._means,
            residuals=self.residuals,
            catchup=catchup,
            trainer=self.trainer,
            learner=learner,
            doors=doors,
            storage=storage,
            log=log,
            checkpoint_s=facilities.checkpoint_s,
            evaluate=evaluate,
            evaluates_few=evaluates_few,
            all_evaluate_last=all_evaluate_last,
            initial_is_genesis=initial_is_genesis,
            applied=self._applied,
            lost_state=self._lost_state,
        )
        self._donor = Donor(
            network, learner, lambda: self.applier.version, self.applier.steady, lambda: catchup.under_way
        )
        self.applier.donor = self._donor
        self._journal = doors.journal.run
        self._storage = storage
        self._held = facilities.held
        self._mail = SealedMail(network, signer, settings.swarm, facilities.decode)
        self._detours = Detours(network, self._mail, settings.swarm, self.member.admitted, self.member.check_admitted)
        self._exit_when_done = facilities.exit_when_done
        self._net_every_s = facilities.net_every_s
        self._executor = Executor(
            member=self.member,
            mail=self._mail,
            exchange=self.exchange,
            means=self._means,
            applier=self.applier,
            trainer=self.trainer,
            storage=storage,
            journal=doors.journal,
            log=log,
            refused=self.refused,
        )
        self._stop = asyncio.Event()
        self._let_go = asyncio.Event()
        self.departure = Departure(self.member)
        self._cut_off: Exception | None = None
        self._net_at = 0.0
        self.rest = Rest(self._due_at)
        self.witness_meeting: Callable[[bytes, Part, Tensor], None] = lambda plan_id, part, term: None
        """Is shown what meetings add to means."""
        self.stop_reason = self.state_reason = ""
        self.moves_to: int | None = None  # of a pipeline, the stage for which it leaves its own
        self._waited_for: bytes | None = None
        self._utterance = Utterance()
        self._linger_until = 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- life --------------------------------------------------------------------------------------------------

    async def run(self, *, anchor: Commit | None, history: list[Certified], known: Found) -> Left:
        """Live in the swarm until it is done or `stop` is called.

        `history` is the genesis (founder), what was saved (restart), or empty (newcomer); `known` are peers to talk to first.
        """
        held, self._held = self._held, None
        resumed = await self.applier.restore(history, held)
        self.log.emit(
            "node.start",
            pid=self.facts.pid,
            device=self.facts.device,
            agent=AGENT,
            resumed=resumed,
            region=self.facts.domains.region,
        )
        try:
            async with asyncio.TaskGroup() as group:
                votes = await self._journal(self._storage.load_votes)
                for plan in filter(None, (vote.plan for vote in votes)):
                    self._means.protect(plan)
                self.member.recall(votes)
                if history:
                    self._do(self.member.begin(anchor, history, self._now()))
                    await self.applier.resume(history)
                self.network.on_message(self._on_message)
                self.exchange.serve()
                self._donor.serve(self.refused, self.admitted, within_s=TRANSFER_S)
                applying, training = group.create_task(self.applier.run()), group.create_task(self.trainer.run())
                self._begin(group)
                if held is not None:
                    group.create_task(self._keep_held(), name="first checkpoint")
                self.found(known)
                await self._stop.wait()
                await self._leave(applying, training)
                raise _Ended
        except* _Ended:
            pass
        if self._cut_off is not None and not self.stop_reason:
            raise self._cut_off
        self.log.emit("node.stop", reason=self.stop_reason, member=self.member.in_view and not self._is_complete())
        if self._waited_for is not None:
            await self._journal(self._storage.clear)
            return Left(self.stop_reason, avoids=self.member.waiting.avoids | {self._waited_for})
        return Left(self.stop_reason)

    def _begin(self, group: asyncio.TaskGroup) -> None:
        """What goes on beside applying and training."""
        group.create_task(self._executor.run(group))
        group.create_task(self._tick())
        group.create_task(self.applier.pursuit.watch())

    async def _keep_held(self) -> None:
        """What we began with is on no disk yet. It goes there once it computes, and not before: nobody need wait for a disk."""
        await self.trainer.has_stepped.wait()
        self.applier.push(Keep())

    def admitted(self, peer: PeerId) -> bool:
        """Whether a peer has shown that it may be here."""
        return self.member.admitted(peer)

    def heard(self) -> Iterator[tuple[PeerId, tuple[str, ...], float]]:
        """Peers that tell where they are: key, addresses, when we last heard them (our clock)."""
        for who, entry in self.member.membership.peers.items():
            if entry.heartbeat is not None and entry.heartbeat.addresses:
                yield who, entry.heartbeat.addresses, entry.heard_at

    def others(self, view: Collection[PeerId], now: float) -> Rows:
        """What we know of the others, for people; `view`: who may vote."""
        return chain_rows(self.member.membership, view, now)

    @property
    def num_alive(self) -> int:
        """Other peers that we hear."""
        return len(self.member.membership.live(self.member.membership.known()))

    @property
    def serving(self) -> Serving | None:
        """None where every peer holds the whole model."""
        return None

    @property
    def leaving(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self, reason: str) -> None:
        """Leave cleanly: finish the step, say goodbye, save. For good, if a person says so while we go to another group."""
        self._waited_for = None
        self.stop_reason = self.stop_reason or reason
        self._stop.set()

    def cut_off(self, error: Exception) -> None:
        """The network has ended: save, and end as well. `run` raises `error` then, unless it was told to `stop`."""
        self._cut_off, self.departure.alone = error, True
        self._stop.set()

    async def _leave(self, applying: asyncio.Task[None], training: asyncio.Task[None]) -> None:
        """Finish what is being computed, wait to be let go, so that the others are not left short of a vote, and save."""
        self.departure.begin(self._now())
        self.member.membership.leave(self._now())
        self._do(self.member.withdraw(self._now()))
        self.trainer.finish()
        self._do(self.member.leave(self.stop_reason))
        await self._let_go.wait()
        self.applier.finish()
        await self.departure.work_done(self.applier, self.trainer, applying, training, self._say_leaving)
        if self.applier.steady.is_set() and self._waited_for is None:
            await (self.applier.save_place() if self.moves_to is None else self.applier.checkpoint())

    def _say_leaving(self, reason: str) -> None:
        self.log.emit("node.state", state="leaving", reason=reason)

    def _watch_end(self, now: float) -> None:
        """When the run is complete: serve those who are behind for a moment, then leave. When we wait for a group in vain, and there are others: at once."""
        if self.member.waits_in_vain(now) and not self._is_complete() and not self._stop.is_set():
            self.stop(f"{self.member.waiting.why}, and it goes to another one")
            self._waited_for = self.member.group
        if not self._is_complete() or not self.applier.idle or not self._exit_when_done:
            return
        self._linger_until = self._linger_until or now + LINGER_S
        if now >= self._linger_until or not self._somebody_is_behind():
            self.stop("the run is complete")

    def _is_complete(self) -> bool:
        return self.trainer.finished

    def _somebody_is_behind(self) -> bool:
        return self.member.any_behind(self.trainer.version)

    # ---- what comes in -----------------------------------------------------------------------------------------

    def _on_message(self, carrier: PeerId, data: bytes) -> None:
        try:
            opened = self._detours.open(carrier, data)
            if opened is None:
                return
            sender, message = opened
            effects = self.member.receive(sender, message, self._now(), via=None if sender == carrier else carrier)
            if isinstance(message, Heartbeat):
                self.network.add_addresses(sender, list(message.addresses))
        except RemoteError as error:
            self.refused(error)
            return
        self._do(effects)
        if isinstance(message, Forward) and self.member.passes_on(message):
            self._pass_on(sender, message)

    def _pass_on(self, author: PeerId, message: Forward) -> None:
        """At once: no order with what we say ourselves binds it."""
        try:
            self._detours.pass_on(author, message, self._now())
        except RemoteError as error:
            self.refused(error)

    def contribution_arrived(self, plan_id: bytes, part: int, peer: PeerId) -> None:
        self._do(self.member.contribution_arrived(plan_id, part, peer, self._now()))

    def mean_held(self, plan_id: bytes, part: int, digest: bytes, *, early: bool = False) -> None:
        self._do(self.member.mean_held(plan_id, part, digest, self._now(), early=early))

    def uplink_of(self, peer: PeerId) -> float:
        """Bytes/s, by its own word; 0 when that is not known."""
        beat = self.member.membership.heartbeat(peer)
        return 0.0 if beat is None else beat.up_bytes_per_s

    def hears(self, peer: PeerId) -> bool:
        """False for one that only others hear."""
        return not self.member.membership.unheard(peer)

    def unreachable(self, peer: PeerId, reason: str) -> None:
        self.log.emit("peer.unreachable", of=peer.hex(), reason=reason)
        self._do(self.member.unreachable(peer, reason, self._now()))

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer."""
        self._do(self.member.discovered([peer], self._now()))

    def found(self, peers: Found) -> None:
        """Records tell of peers."""
        self._do(self.member.found(peers, self._now()))

    def refused(self, error: RemoteError) -> None:
        """A peer broke a rule; nothing of ours has changed."""
        self._refusals(error)

    def span(self, what: str, round_: int) -> contextlib.AbstractContextManager[None]:
        return self.log.span(what, round_)

    def _ready(self, ready: Ready) -> None:
        self._do(self.member.set_ready(ready, self._now()))

    def _applied(self, height: int, version: int, digest: bytes) -> None:
        self._do(self.member.applied(height, version, digest, self._now()))
        self.trainer.wake()

    def _lost_state(self) -> None:
        self._do(self.member.lost_state(self._now()))

    def _may_train(self) -> bool:
        return self.member.in_view and self.applier.height == self.member.head.commit.height and not self._is_complete()

    def _awaits_means(self) -> bool:
        """Whether nothing but the means of the newest round keeps us from training, and there is more to train after it."""
        if not self.member.in_view:
            return False
        head = self.member.head.commit
        return self.applier.preparing == head.height and not self.settings.rules.finished(head)

    async def _tick(self) -> None:
        self._net_at = self._now()
        while True:
            self._do(self.member.tick(now := self._now()))
            self._update_state()
            self.exchange.sending.sample(now)
            self.exchange.receiving.sample(now)
            self.network.pace(self.exchange.sending.pace_bytes_per_s)
            if self.departure.is_over(now):
                self._let_go.set()
            self._watch_end(now)
            if now >= self._net_at:
                self._net_at = max(self._net_at + self._net_every_s, now)  # the machine may have slept
                sent, received = self.network.sent_bytes(), self.network.received_bytes()
                self.log.emit("net", sent_bytes=sent, received_bytes=received, peers=self.num_alive)
            await self.rest.sleep(TICK_S)

    def _due_at(self) -> float:
        """When to look at deadlines: at once while anything is under way, or we are about to leave."""
        if self.member.busy or self._stop.is_set() or self._is_complete():
            return -math.inf
        return min(self.member.look_at(), self._net_at)

    def _do(self, effects: list[Effect]) -> None:
        if effects:
            self._executor.push(effects)
        self.rest.reconsider(look=bool(effects))

    # ---- what is said of us ------------------------------------------------------------------------------------

    def _vitals(self) -> Heartbeat:
        loss = self.trainer.loss
        return Heartbeat(
            height=0,
            ballot=0,
            version=0,
            digest=b"",
            state="",
            step=self.trainer.global_step,
            tokens_per_s=self.trainer.tokens_per_s,
            up_bytes_per_s=self.exchange.sending.bytes_per_s,
            down_bytes_per_s=self.exchange.receiving.bytes_per_s,
            loss=loss if math.isfinite(loss) else 0.0,
            device=as_text(self.facts.device),
            admission=self.facts.admission,
            addresses=tuple(self.network.addresses()[:MAX_ADDRESSES]),
            every_s=0.0,
            ready_in_s=self.trainer.ready_in_s(round_planned=self.member.attendance.part is not None),
        )

    def _update_state(self) -> None:
        state, self.state_reason = self._state()
        trouble = "" if state in ENDING else self.network.clock_trouble()
        self.state_reason = "; ".join(filter(None, (trouble, self.state_reason)))
        stands = self._stands(state) or bool(trouble)
        changed = state != self.member.membership.state
        if self._utterance.is_due(self.state_reason, changed=changed, stands=stands, now=self._now()):
            self.member.membership.state = state
            self.log.emit("node.state", state=state, reason=self.state_reason)

    def _stands(self, state: str) -> bool:
        """Whether it does nothing until somebody else does: why is said again when that changes."""
        return state in STANDING

    def _state(self) -> tuple[str, str]:
        member, attendance = self.member, self.member.attendance
        if self._stop.is_set():
            return "leaving", self.stop_reason or "the network has ended"
        if not member.in_view:
            return "joining", member.reason if self.applier.idle else self.applier.pursuit.said
        if not member.standing.holds(member.me):
            return "joining", member.reason
        if self._is_complete():
            return "finished", "the run is complete"
        if attendance.part is not None and attendance.ready is not None:
            return "round", f"round {attendance.part.plan.height}"
        if self.trainer.hindrance.reason:
            return "waiting", self.trainer.hindrance.reason
        offers = attendance.ready is not None
        if self.applier.idle and self.trainer.out_of_samples and not (offers and member.consensus.has_quorum):
            return "waiting", f"the samples handed out are used up until a round is committed; {member.reason}"
        return "ready" if offers else "training", member.reason


class _Ended(Exception):
    """Ends the task group of a node that leaves."""
