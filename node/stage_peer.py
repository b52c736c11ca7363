"""A peer of a pipelined swarm: a `peer.Peer` of its stage's chain, and its part in the pipeline beside it.

The chain's messages are bound to the stage's group and go to the peer, all others are bound to the swarm and go to the pipeline. What the two have to
do with each other is here: when a peer is free for a step, when the run is over for its stage, and who is met.

Stage 0 counts the run: it is complete when its outer state has had all rounds. The other stages' chains have as many rounds if none of them
missed one, but nothing waits for it: they are done when the data nodes say that they are, and what they have trained has been offered once more.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator

from farflung.node.balance import Prepare
from farflung.node.departure import LET_GO_S
from farflung.node.evaluator import Extent
from farflung.node.exact import Exact, Mark
from farflung.node.facilities import Facilities
from farflung.node.network import PeerId
from farflung.node.offers import loss_of, replicas
from farflung.node.peer import Peer
from farflung.node.peer_rows import Rows, add_roll
from farflung.node.pipeline import Pipeline
from farflung.node.sealed_mail import PipelineMail
from farflung.node.serving import Left, Serving
from farflung.node.shadows import Shadows, Shelf, serve_shelf
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe
from farflung.node.stage_self import OUTSIDE
from farflung.node.stage_trainer import StageTrainer
from farflung.node.trainer import Host
from farflung.node.whole_model import KeepModel, WholeModel
from farflung.protocol.accord import Word
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.envelope import swarm_of
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.lives import Counters, Life, group_of
from farflung.protocol.lost import begins, outlook, says
from farflung.protocol.neighbours import Found
from farflung.protocol.pipeline_messages import Copy
from farflung.protocol.quorum import is_quorum
from farflung.protocol.roll import Roll
from farflung.training.errors import NoRoom
from farflung.training.recovery_ladder import decide

MOVER_LET_GO_S = 120.0
"""How long a peer that moves waits to be let go by its chain. Nobody waits for it as for a person's Ctrl-C; and a chain that loses another
member at the same time may have no quorum without it."""


class StagePeer(Peer):
    """See the module."""

    def __init__(
        self,
        recipe: StageRecipe,
        facilities: Facilities,
        learner: StageLearner,
        *,
        life: Life,  # of the stage
        roll: Roll,
        mail: PipelineMail,
        shelf: Shelf,  # shadows of other stages on this machine
        keep: Callable[[], None],  # writes the roll's appointments to disk
        owed: Collection[Life],  # of other stages, which this machine was called to begin, and has not begun
        fits: frozenset[int],  # other stages that this machine may move to
        prepare: Prepare,  # for one of them
        keep_model: KeepModel,
    ) -> None:
        network, doors, log, me = facilities.network, facilities.doors, facilities.log, facilities.signer.peer_id
        log.bind(stage=recipe.stage, life=life.number)
        terms = recipe.terms(life)
        self.pipeline = Pipeline(
            network=network,
            signer=facilities.signer,
            recipe=recipe,
            life=life,
            learner=learner,
            doors=doors,
            roll=roll,
            mail=mail,
            facts=facilities.facts,
            log=log,
            refused=self.refused,
            keep=keep,
            owed=owed,
            fits=fits,
            prepare=prepare,
        )
        self._stage_trainer: StageTrainer

        def make_trainer(host: Host) -> StageTrainer:
            self._stage_trainer = StageTrainer(me, learner, doors.learner, log, terms.pace, host, self.pipeline)
            return self._stage_trainer

        super().__init__(
            terms,
            facilities,
            learner,
            make_trainer=make_trainer,
            evaluate=self._evaluate,
            evaluates_few=False,  # what it costs is to get the other stages
            all_evaluate_last=True,
            initial_is_genesis=life.number == 0,
        )
        self._whole = WholeModel(
            network=network,
            roll=roll,
            recipe=recipe,
            learner=learner,
            doors=doors,
            refused=self.refused,
            version=lambda: self.applier.version,
            keep=keep_model,
        )
        self.pipeline.me = self
        self._stage_learner, self._shelf, self._doors = learner, shelf, doors
        service, pipeline = self.pipeline.work.service, recipe.pipeline
        tokens = recipe.tokens_per_microbatch
        message_bytes = service.forward.max_nbytes(tokens) + service.backward.max_nbytes(tokens)
        self._shadows = Shadows(
            network=network,
            roll=roll,
            recipe=recipe,
            learner=learner,
            doors=doors,
            shelf=shelf,
            log=log,
            refused=self.refused,
            present=self.pipeline.present,
            step=lambda: self.pipeline.step,
            trained=self._trained,
            step_bytes=pipeline.microbatches * pipeline.visits * message_bytes,
        )
        self._exact = Exact(
            network=network,
            roll=roll,
            recipe=recipe,
            learner=learner,
            doors=doors,
            shelf=shelf.ends,
            log=log,
            admitted=self.admitted,
            refused=self.refused,
            step=lambda: self.pipeline.step,
            mark=self._mark,
        )
        if recipe.stage == 0:
            self.member.consensus.begins = self._begins
        if roll.decides_together:
            self.member.consensus.says = self._says

    # ---- what the pipeline asks (`pipeline.Self`) --------------------------------------------------------------

    @property
    def trains(self) -> bool:
        return (
            not self.leaving
            and not self._has_all_rounds()
            and self.member.in_view
            and self.member.standing.holds(self.member.me)
        )

    @property
    def free(self) -> bool:
        return self.trains and self._stage_trainer.free and not self.pipeline.balance.stands

    @property
    def in_step(self) -> bool:
        return self._stage_trainer.in_step

    @property
    def unsent(self) -> bool:
        return self.trainer.progress.steps > self.trainer.pace.laps.delay_of(self.trainer.lap)

    @property
    def finished(self) -> bool:
        if self.pipeline.recipe.stage == 0:  # whose last evaluation needs the others
            return self._has_all_rounds() and self.applier.idle
        return self.pipeline.finished and self._stage_trainer.settled

    @property
    def holds(self) -> tuple[int, bytes]:
        return max(0, self.member.standing.applied_version), self.member.standing.digest

    @property
    def up_bytes_per_s(self) -> float:
        """By parcels and by rounds, each of which may have been held up by something else than the uplink."""
        return max(self.pipeline.work.server.rate.bytes_per_s, self.exchange.sending.bytes_per_s)

    @property
    def grad_norm(self) -> float:
        return self._stage_learner.layers_norm or 0.0

    @property
    def copies(self) -> tuple[Copy, ...]:
        return self._shelf.copies

    @property
    def chain(self) -> tuple[tuple[PeerId, ...], list[PeerId]] | None:
        if not self.member.started:
            return None
        view = self.member.head.commit.view
        return view, self.member.membership.live(view)

    @property
    def spared(self) -> bool:
        if not self.member.started:
            return False
        view, me = set(self.member.head.commit.view), self.member.me
        holders = set(self.member.standing.holders())
        return is_quorum(view, holders) and is_quorum(view - {me}, holders - {me})

    @property
    def caught_up(self) -> bool:
        return self.applier.idle or not self.holds[1]

    @property
    def word(self) -> Word:
        number = self.pipeline.life.number
        if not self.member.started:
            return Word(number)
        head = self.member.head.commit
        return Word(number, head.lives, head.call)

    @property
    def counted(self) -> Counters | None:
        if self.pipeline.recipe.stage != 0 or not self.member.started:
            return None
        head = self.member.head.commit
        window = self.settings.rules.ahead * head.lap * len(head.view)  # the next commit may hand out so many more
        return Counters(head.version, head.steps, head.tokens, head.ledger.cursor + window)

    def _begins(self, now: float) -> dict[int, PeerId]:
        """Stages to begin anew, for whoever proposes in the chain of stage 0."""
        roll, word = self.pipeline.roll, self.word
        roll.speak(0, word, now)  # what was just decided is not proposed again
        if (
            word.life < roll.number(0)
            or word.call is not None
            or any(life.number > roll.number(life.stage) for life in word.lives)
        ):
            return {}  # we are over, or about to be, or what was named last does not count yet
        return begins(roll, self.member.head.commit.view, self.pipeline.present(), now)

    def _says(self, now: float) -> Word | None:
        """What its chain is to say of lives, for whoever proposes in it."""
        roll, life = self.pipeline.roll, self.pipeline.life
        roll.speak(life.stage, self.word, now)
        if life.number < roll.number(life.stage):
            return None
        return says(roll, self.member.head.commit, self.pipeline.present(), now)

    def wake(self) -> None:
        self.trainer.wake()

    def lacks(self, error: NoRoom) -> None:
        self.trainer.hinder(error)

    def decide(self) -> None:
        self.rest.rouse()

    def met(self, peer: PeerId) -> None:
        super().discovered(peer)

    def go(self, stage: int, reason: str) -> None:
        if self.leaving and self.moves_to is None:
            return  # for good: its person has asked for it, and nobody may call it back
        self.stop(reason)
        self.moves_to = stage
        ended = stage in (OUTSIDE, self.pipeline.recipe.stage)  # our chain, for which nobody needs to wait
        self.departure.patience_s = LET_GO_S if ended else MOVER_LET_GO_S

    def stop(self, reason: str) -> None:
        """Leave cleanly, for good: also while it leaves for another stage."""
        self.moves_to, self.departure.patience_s = None, LET_GO_S
        super().stop(reason)

    async def run(self, *, anchor: Commit | None, history: list[Certified], known: Found) -> Left:
        left = await super().run(anchor=anchor, history=history, known=known)
        to = self.moves_to
        if to not in (None, OUTSIDE) and not self.departure.is_let_go:  # its chain may need its vote, or its word
            to = self.pipeline.recipe.stage
        return Left(left.reason, to)

    async def _evaluate(self, extent: Extent) -> float | None:
        """By data nodes only: others have no samples."""
        return await self._whole.evaluate() if self.pipeline.recipe.stage == 0 else None

    # ---- what others are told ----------------------------------------------------------------------------------

    @property
    def serving(self) -> Serving:
        layers = self.pipeline.recipe.part.layers
        return Serving(
            stage=self.pipeline.recipe.stage,
            layers=(layers.start, layers.stop),
            stage_peers=self.pipeline.counts(),
            forward_s=self.pipeline.forward_s,
        )

    @property
    def num_alive(self) -> int:
        return sum(self.pipeline.counts()) - 1

    def others(self, view: Collection[PeerId], now: float) -> Rows:
        """Peers of all stages."""
        rows = super().others(view, now)
        add_roll(rows, self.pipeline.roll, now)
        return rows

    def _state(self) -> tuple[str, str]:
        """Who has nothing that a round could count is not waited for by its chain, so it must not say that it trains."""
        state, reason = super()._state()
        if state == "training" and self.pipeline.leads:
            reason = self.pipeline.coordinator.reason
        stage, roll = self.pipeline.recipe.stage, self.pipeline.roll
        if state in ("training", "waiting") and self._misses_others:
            return state, outlook(roll, self.pipeline.told_lost)
        if self.pipeline.watch.stranded:
            who = "the data nodes begin" if stage else "the other stages begin"
            return state, f"{reason}; if that lasts, {who} the stage anew"
        if state == "training" and stage > 0 and not roll.serving(0, self._now()):
            remedy = "the other stages begin it anew" if roll.decides_together else "a data node must come back"
            return state, f"no data node is heard; if that lasts, {remedy}"
        if state == "training" and self._stage_trainer.idle:
            return "waiting", f"no microbatch came here for as many steps as make a round; {reason}"
        return state, reason

    @property
    def _misses_others(self) -> bool:
        """Whether other stages are lost, as we last told everybody."""
        return any(stage != self.pipeline.recipe.stage for stage in self.pipeline.told_lost)

    def _stands(self, state: str) -> bool:
        return super()._stands(state) or self._misses_others

    def heard(self) -> Iterator[tuple[PeerId, tuple[str, ...], float]]:
        """Peers of all stages."""
        for who, entry in self.pipeline.roll.entries.items():
            if entry.present is not None and entry.present.addresses:
                yield who, entry.present.addresses, entry.since

    # ---- where a peer of a stage differs -----------------------------------------------------------------------

    def found(self, peers: Found) -> None:
        for peer in peers:  # stages are not divided
            self.discovered(peer)

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer of any stage."""
        self.pipeline.discovered(peer)

    def admitted(self, peer: PeerId) -> bool:
        return self.pipeline.admitted(peer) or super().admitted(peer)

    def _begin(self, group: asyncio.TaskGroup) -> None:
        super()._begin(group)
        self.pipeline.begin(self._trained())
        group.create_task(self.pipeline.run(), name="pipeline")
        serve_shelf(
            self.network,
            self._shelf,
            self.admitted,
            self.refused,
            roll=self.pipeline.roll,
            side=self._doors.side,
            log=self.log,
            stage=self.pipeline.recipe.stage,
            own=self._shadows.own,
        )
        group.create_task(self._shadows.run(), name="shadows")
        if self.pipeline.recipe.pipeline.by_rule:
            self._exact.serve()
            group.create_task(self._exact.run(), name="exact")

    def _trained(self) -> int:
        """Steps of the run that our parameters have had."""
        return self.trainer.counted_steps + self.trainer.progress.steps

    def _mark(self) -> Mark | None:
        """Of our parameters, which change with rounds as well; None while we have none that count."""
        return (self._trained(), self.applier.version) if self.trains else None

    def _lost_state(self) -> None:
        super()._lost_state()
        self._say_source()

    def _say_source(self) -> None:
        """From whom our stage's state comes, as the ladder has it. While somebody serves the stage nothing costs less than what that peer has."""
        recipe, roll, now = self.pipeline.recipe, self.pipeline.roll, self._now()
        offers = replicas(roll, recipe, self.network.links(), now)
        if not offers:
            return  # they have just gone; the download says what comes of it
        decided = decide(loss_of(roll, recipe, now), offers)
        self.log.emit(
            "stage.join",
            stage=recipe.stage,
            life=self.pipeline.life.number,
            rung=str(decided.first.rung),
            holders=list(decided.first.holders),
            bytes=decided.first.nbytes,
            fetch_s=round(decided.first.duration_s, 3),
            expected_s=round(decided.expected_s, 3),
            reason=decided.why,
        )

    def _on_message(self, carrier: PeerId, data: bytes) -> None:
        try:
            bound_to = swarm_of(data, carrier)
        except RemoteError as error:
            self.refused(error)
            return
        if bound_to == self.settings.swarm:
            super()._on_message(carrier, data)
            self.pipeline.changed()
        elif bound_to == self.pipeline.roll.swarm:
            self.pipeline.receive(carrier, data)
        elif bound_to not in self._other_groups():
            self.refused(
                Refused("a message of another chain than ours, perhaps of a life of it that is over", peer=carrier)
            )

    def _other_groups(self) -> list[bytes]:
        """What the chains of other stages are bound to: their peers write to those who have left, until they have heard of it."""
        roll = self.pipeline.roll
        lives = [roll.life(stage) for stage in range(roll.stages) if stage != self.pipeline.recipe.stage]
        return [group_of(roll.swarm, life) for life in lives if life is not None]

    def _may_train(self) -> bool:
        return (
            self.member.in_view and self.applier.height == self.member.head.commit.height and not self._has_all_rounds()
        )

    def _is_complete(self) -> bool:
        return self.finished

    def _has_all_rounds(self) -> bool:
        """Of stage 0, after which there are no more steps."""
        return self.pipeline.recipe.stage == 0 and self.trainer.finished

    def _somebody_is_behind(self) -> bool:
        roll, now = self.pipeline.roll, asyncio.get_running_loop().time()
        others = [p for p in roll.known if roll.alive(p, now) and (said := roll.present(p)) and not said.finished]
        return bool(others) or super()._somebody_is_behind()
