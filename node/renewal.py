"""A stage begins anew here: what it is made of, and the first commit of its new life.

    called by the swarm (`protocol/lives.py`) ──▶ who has what ──▶ the ladder: an order of tries ──▶ the first that succeeds
                                                                   ──▶ the chain's first commit ──▶ we serve

What is tried first is `training/recovery_ladder.py`'s decision, by expected cost: with the time of a step and the chance to lose a peer as the data nodes
have measured them, from a guess at first, and the links over which it would come (`offers`). Whoever was a member of an earlier life offers what it has of it
itself (`remains`): where the stage has only lost its quorum that is all of it, to the bit, and costs nothing. Other offers are shadows, here or at other
peers, and the stages around: the mean of the two neighbours' outer parameters, weighted by the norms of their gradients, the nearest stages where
neighbours are lost too, and at last new initial weights, which everybody can make. A neighbour that is lost too, but of which somebody has a copy, is
waited for, where it is worth it: it will be there in a moment, and is nearer than the next one; but by no stage 0, whose chain names the lives of all others.
One that was itself made of others a moment ago, and has taken no step, makes no difference: a mean with it is on the same line between the same survivors. Only stages of as many layers count, and of stage 0 only its layers.
Where the manifest says `pipeline.recovery = "checkfree"` or `"checkfree+"`, for comparison, the only offer is what that rule makes of the neighbours, or of a twin: no copy, no fit, no trial and no waiting. What a
member of the earlier life has in memory is not lost, and goes on in both cases.
Moments begin afresh with these, so the learning rate rises over the first steps (`recovery_rise`), and where the stage was made of others it is raised for a while (`recovery_checkfree`).

Peers before and after the stage remember what it was given last, and what it made of that (`imprints`). So before anybody computes with a stage that was made,
it is tried on those activations: where it does no better than none (`MISFIT_OF_NONE`), as when a shadow is none, the next offer's turn comes. And a mean, what was made of
one neighbour or further ones, and new weights are fitted to them.

Stage 0 has embedding, last norm and head besides, which no other stage resembles: they come from a copy of it, or from what we have of an earlier life, or are new
initial weights (`ends` in `stage.made`); by CheckFree's rule from the exact copies that stages beside it keep (`exact`). What went into it are tokens, which nobody but its peers had, so there is nothing to fit it on, and it is tried by the loss alone (`training/recovery_trial.py`). Its chain begins with the
lives that it inherits (`protocol/accord.py`), and with the ledger where we have that.

Meanwhile we say that we are at it, so that the stage is not found lost again; and if the data nodes begin yet another life because they did not hear us,
ours ends before it has begun.

No file is read for any of this but our own of that earlier life, and of what was made none is written: it is served from memory. On disk goes the chain's first
commit (`history.msgpack`), for whoever has founded a chain must not found it again with other bits, as later what it votes for (`vote`): promises, from which no
stage comes back. The state is saved as any peer's, for the first time when it has computed a step (`Peer`). A founder that is ended before that has a chain and no
state (`remains.spent`): its life is lost with it, and the next one begins.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from torch import Tensor

from farflung.node.borrowing import borrow
from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.exact import fetch_ends, fetch_layers
from farflung.node.imprints import Remembered, gather_pairs
from farflung.node.offers import arrives, fit_s, grad_norm, loss_of
from farflung.node.outside import Outside
from farflung.node.remains import Remains
from farflung.node.shadows import fetch, serve_shelf
from farflung.node.stage_learner import StageLearner
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.node.storage import Held, Place, Storage
from farflung.node.trying import LISTEN_S, Unmade, obtained
from farflung.protocol.chain import founded
from farflung.protocol.errors import LocalError, NetworkError
from farflung.protocol.keys import PeerId, Signer, short
from farflung.protocol.ledger import Ledger
from farflung.protocol.lives import Life
from farflung.protocol.pipeline_messages import Copy
from farflung.protocol.progress import newest_step
from farflung.training.errors import DamagedCheckpoint, NotEnoughMemory, Unrecoverable
from farflung.training.out_of_memory import let_go
from farflung.training.outer import BYTES_PER_ELEMENT
from farflung.training.pipeline_online import RATE_BYTES_PER_S
from farflung.training.pipeline_slice import layers_of, num_ends, with_ends, with_layers
from farflung.training.recovery_costs import Rung, Setbacks
from farflung.training.recovery_fit import MISFIT_OF_NONE
from farflung.training.recovery_ladder import Loss, Offer, Recovery, decide, rebuilt
from farflung.training.recovery_rules import interpolated, weighted_mean

T = TypeVar("T")

BY_RULE = "by CheckFree's rule alone, as the manifest says (where it has none, with new initial weights)"
"""For people."""


class Overtaken(Exception):
    """Another life of the stage was begun meanwhile."""


class Renewal:
    """See the module. `run` once, before there is a peer."""

    def __init__(
        self,
        outside: Outside,
        recipe: StageRecipe,
        life: Life,
        learner: StageLearner,
        remains: Remains | None,  # of earlier lives, on our disk
        survives: bool,  # we have served an earlier life of the stage until now, so that what is on our disk was in our memory too
        doors: Doors,
        log: EventLog,
    ) -> None:
        self._outside = outside
        self._roll = outside.roll
        self._recipe = recipe
        self._life = life
        self._learner = learner
        self._by_rule = recipe.pipeline.by_rule
        """Whether the manifest wants nothing but CheckFree, to which disks are no source."""
        self._remains = None if self._by_rule and not survives else remains
        self._doors = doors
        self._log = log
        self._sources: dict[str, PeerId] = {}
        """Who would send a shadow that was offered, by the name in the offer."""
        self._stages: dict[str, int] = {}
        """What those serve whose stages were offered, by the same: another peer of it will do."""
        self._lent: dict[int, Tensor] = {}
        """Layers of other stages that are here: a mean, fitted or not, needs the same."""
        self._remembered = Remembered()
        """What the lost stage was given, and made of it."""
        self._initial: Tensor
        """What the learner has had from the beginning; with copies of the ends where CheckFree's rule has some."""
        self._has_ends = False
        """Whether it has."""
        self._owed: dict[str, Tensor] = {}
        """What the codecs have left unsent of what we have made."""
        self._ledger: Ledger | None = None
        """Of samples, that our life of stage 0 goes on with; None where nobody has it any more, and in other stages."""

    async def run(self, signer: Signer, storage: Storage) -> Held:
        """Make the stage, and write its first commit. Returns what the learner has from then on. Raises Overtaken, and nothing was written then."""
        outside = self._outside
        serve_shelf(
            outside.network,
            outside.shelf,
            lambda peer: self._roll.present(peer) is not None,
            outside.refused,
            roll=self._roll,
            side=self._doors.side,
            log=self._log,
        )
        async with asyncio.TaskGroup() as group:
            saying = group.create_task(outside.make(self._life))
            await asyncio.sleep(LISTEN_S)
            rung = await self._make()
            lives = None if rung is None else await self._inherited()
            saying.cancel()
        if rung is None or lives is None:
            raise Overtaken
        if rung.bumps_lr:
            self._learner.made_of_others_at = self._step()
        if not rung.is_exact and not self._by_rule:
            self._learner.rises = True
        settings = self._recipe.settings(self._life)
        first = founded(settings.swarm, signer, settings.rules, lives=lives, ledger=self._ledger)
        await self._doors.journal.run(storage.append_commit, None, first)
        return Held(Place(0, self._life.since.version, (), 0, b""), self._owed)

    async def _inherited(self) -> tuple[Life, ...] | None:
        """The lives that ours begins with, of stage 0; of other stages none. None when ours does not count any more."""
        while self._counts():
            found = () if self._life.stage else self._roll.inherits(self._life, self._outside.now())
            if found is not None:
                return found
            await asyncio.sleep(LISTEN_S)  # those who called us are not heard
        return None

    # ---- making it ---------------------------------------------------------------------------------------------

    async def _make(self) -> Rung | None:
        """Try one offer after another; the last one needs nobody. None when our life counts no more."""
        self._initial = await self._doors.learner.run(self._learner.outer.params.clone)
        if not self._by_rule:
            self._remembered = await self._remember() if self._life.stage else Remembered()
            has_nothing = not self._own() and not self._shadows()
            if has_nothing and self._life.stage:  # for stage 0 all others wait: its chain names their lives
                await self._wait_for_neighbours()
        recovery = self._decide()
        self._log.emit(
            "stage.recovery",
            stage=self._life.stage,
            life=self._life.number,
            expected_s=round(recovery.expected_s, 3),
            reason=f"{BY_RULE}; {recovery.why}" if self._by_rule else recovery.why,
        )
        decided_at = self._outside.now()
        for number, priced in enumerate(recovery.order):
            if not self._counts():
                return None
            offer, began = priced.offer, self._outside.now()
            try:
                fetch_s = await self._try(offer, recovery.patience_s(number, began - decided_at))
                misfit = await self._tested(offer.rung)
            except Unmade as why:
                self._log.emit(
                    "stage.unmade",
                    stage=self._life.stage,
                    life=self._life.number,
                    rung=str(offer.rung),
                    reason=str(why),
                )
                continue
            self._log.emit(
                "stage.made",
                stage=self._life.stage,
                life=self._life.number,
                rung=str(offer.rung),
                holders=list(offer.holders),
                bytes=offer.nbytes,
                fetch_s=round(fetch_s, 3),
                seconds=round(self._outside.now() - began, 3),
                misfit=misfit,
                ends=self._ends(offer.rung),
            )
            return offer.rung
        raise AssertionError("the ladder ends with what needs nobody")

    def _ends(self, rung: Rung) -> str:
        """What has become of embedding, last norm and head, for people; empty where there are none."""
        if self._life.stage:
            return ""
        if rung.is_exact:
            return "kept"
        return "copied" if self._has_ends or rung is Rung.SHADOW else "new initial weights"

    async def _remember(self) -> Remembered:
        """What the neighbours of the lost stage know of it."""
        roll, now = self._roll, self._outside.now()
        return await gather_pairs(
            self._outside.network,
            [peer for peer in roll.known if roll.alive(peer, now) and self._stage_of(peer) >= 0],
            self._life.stage,
            self._recipe.service(self._learner).forward,
            self._recipe.whole.model.seq_len,
            reached=newest_step(roll, now),
            side=self._doors.side,
            refused=self._outside.refused,
        )

    async def _tested(self, rung: Rung) -> float | None:
        """The misfit of what we have made; None where nobody remembers anything of late, or there is no room to see. Raises Unmade where what others gave has nothing of the stage."""
        pairs = self._remembered.pairs
        if not pairs or not self._remembered.judges:
            return None
        boundary = self._recipe.service(self._learner).forward
        misfit = await self._where_there_is_room(self._learner.misfit, pairs, boundary)
        if misfit is None:
            return None
        if rung is not Rung.RANDOM and not rung.is_exact and misfit >= MISFIT_OF_NONE:
            self._outside.shelf.given.clear()  # we shall not go on from that
            raise Unmade(
                f"on what its neighbours remember its error is {misfit:.3g} times that of leaving the stage out"
            )
        return misfit

    async def _wait_for_neighbours(self) -> None:
        """Until those of the two stages beside ours that are lost and come back from a copy are there; no longer than they are worth."""
        stage = self._life.stage
        beside = [other for other in (stage - 1, stage + 1) if other < self._roll.stages and self._is_alike(other)]
        loss, costs = self._loss(), Setbacks()
        further, nearer = (
            costs.iterations(rung, stage=stage, steps_behind=0, failures_per_hour=loss.failures_per_hour)
            for rung in (Rung.INTERPOLATION, Rung.MEAN)
        )
        until = self._outside.now() + (further - nearer) * loss.iteration_s
        said: list[int] = []
        while (late := [other for other in beside if self._comes_back(other)]) and self._outside.now() < until:
            if not self._counts():
                return
            if late != said:
                why = f"stage {' and stage '.join(map(str, late))}, lost too, will be back from a copy: to be made of that is worth a while"
                self._log.emit("stage.waits", stage=stage, life=self._life.number, reason=why)
                said = late
            await asyncio.sleep(LISTEN_S)

    def _comes_back(self, stage: int) -> bool:
        """Whether nobody has a stage, and somebody a copy of it."""
        return self._roll.holders(stage, self._outside.now()) is None and bool(self._copies(stage))

    def _copies(self, stage: int) -> list[tuple[PeerId, Copy]]:
        """Of a stage, at peers that are heard."""
        roll, now = self._roll, self._outside.now()
        heard = [
            (peer, said) for peer in roll.known if roll.alive(peer, now) and (said := roll.present(peer)) is not None
        ]
        return [(peer, copy) for peer, said in heard for copy in said.shadows if copy.stage == stage]

    def _is_alike(self, stage: int) -> bool:
        """Whether it has as many layers."""
        return len(self._part(stage).part.layers) == len(self._recipe.part.layers)

    def _decide(self) -> Recovery:
        copies = [] if self._by_rule else self._shadows()
        return decide(self._loss(), [*self._own(), *copies, *self._offers()])

    def _loss(self) -> Loss:
        return loss_of(self._roll, self._recipe, self._outside.now())

    def _own(self) -> list[Offer]:
        """What we have of an earlier life."""
        if self._remains is None:
            return []
        behind = max(0, self._step() - self._remains.step)
        return [Offer(rung=Rung.OWN, steps_behind=behind)]

    def _shadows(self) -> list[Offer]:
        """Copies of the stage."""
        stage, step = self._life.stage, self._step()
        found = []
        mine = self._outside.shelf.shadows.get(stage)
        if mine is not None:
            found.append(Offer(rung=Rung.SHADOW, steps_behind=max(0, step - mine.step)))
        for peer, copy in self._copies(stage):
            self._sources[short(peer)] = peer
            found.append(
                Offer(
                    rung=Rung.SHADOW,
                    holders=(short(peer),),
                    nbytes=copy.nbytes,
                    bytes_s=self._rate(peer),
                    steps_behind=max(0, step - copy.step),
                )
            )
        return found

    def _offers(self) -> list[Offer]:
        now, stages = self._outside.now(), range(self._roll.stages)
        held = {stage: found for stage in stages if (found := self._roll.holders(stage, now)) is not None}
        ready = {stage for stage in held if stage != self._life.stage and self._is_alike(stage)}
        self._stages |= {short(held[stage][2][0]): stage for stage in ready}
        peer_of = [short(held[stage][2][0]) if stage in ready else "" for stage in stages]
        has_twin = self._recipe.pipeline.has_twins and self._life.stage > 0
        first = int(has_twin)  # of the stages that CheckFree+ knows of: the one with the data has no twin
        return rebuilt(
            self._life.stage - first,
            self._roll.stages - first,
            frozenset(stage - first for stage in stages[first:] if stage not in ready),
            peer_of[first:],
            weights_nbytes=[BYTES_PER_ELEMENT * self._part(stage).own.num_parameters for stage in stages[first:]],
            bytes_s=[self._rate(held[stage][2][0]) if stage in ready else RATE_BYTES_PER_S for stage in stages[first:]],
            swaps=has_twin,
            boundary_nbytes=0 if self._remembered.pairs else None,  # they are here already
            fit_s=fit_s(self._roll, self._recipe, self._remembered.pairs),
            rule_only=self._by_rule,
        )

    async def _try(self, offer: Offer, within_s: float) -> float:
        """Give the learner what an offer has. Seconds that fetching took. Raises Unmade where it could not be had, or not in so many seconds."""
        if offer.rung.is_exact:
            await self._go_on()
            return 0.0
        began = self._outside.now()
        until = began + within_s
        if self._by_rule and self._life.stage == 0 and not self._has_ends:
            await self._restore_ends(until)
        layers = self._initial
        if offer.rung is not Rung.RANDOM:
            layers = await self._had(lambda: self._layers(offer), lambda: self._is_there(offer), until)
        fetch_s = self._outside.now() - began
        await self._doors.learner.run(self._learner.begin_with, layers)
        if offer.rung.is_fitted and self._remembered.pairs:
            # without, it is what its rule made of it, and will be trained
            await self._where_there_is_room(self._learner.fit, self._remembered.pairs)
        return fetch_s

    async def _where_there_is_room(self, work: Callable[..., T], *arguments: object) -> T | None:
        """What it returns in the learner's thread; None where the device has no room for it, or nothing comes of it, and that is written down."""
        try:
            return await self._doors.learner.run(work, *arguments)
        except (NotEnoughMemory, Unrecoverable) as error:
            self._log.emit("stage.unfitted", stage=self._life.stage, life=self._life.number, reason=str(error))
        await self._doors.learner.run(let_go)
        return None

    async def _restore_ends(self, until: float) -> None:
        """To the exact copies that CheckFree has of them; initial ones remain where there are none."""
        outside, recipe, side = self._outside, self._recipe, self._doors.side

        def fetching() -> Awaitable[Tensor | None]:
            return fetch_ends(
                outside.network, side, recipe, self._roll, outside.shelf.ends, self._step(), outside.refused
            )

        try:
            ends = await self._had(fetching, lambda: True, until)
        except Unmade as why:
            self._log.emit("stage.unmade", stage=0, life=self._life.number, rung="embedding and head", reason=str(why))
            return
        if ends is not None:
            self._initial = await side.run(with_ends, recipe.whole.model, recipe.part, self._initial, ends)
            self._has_ends = True

    async def _go_on(self) -> None:
        """With what we have of an earlier life. Raises Unmade where that is damaged."""
        assert self._remains is not None, "nobody else offers moments"
        storage, run = self._remains.storage, self._doors.learner.run
        try:
            await run(storage.load_learner, self._learner)
        except (LocalError, DamagedCheckpoint) as error:
            raise Unmade(str(error)) from error
        try:
            self._owed = await run(storage.load_residuals)
        except DamagedCheckpoint as error:  # the state is worth more than what rounds have left out of it
            self._log.emit("progress.dropped", steps=0, reason=f"what rounds have left unsent is lost: {error}")
        await run(self._learner.begin_again)
        if self._life.stage == 0:
            self._ledger = self._remains.ledger(self._life.since)

    async def _had(self, fetching: Callable[[], Awaitable[T]], is_there: Callable[[], bool], until: float) -> T:
        """What is fetched of others. Raises Unmade."""
        refused = self._outside.refused
        return await obtained(fetching, is_there=is_there, counts=self._counts, refused=refused, until=until)

    def _is_there(self, offer: Offer) -> bool:
        """Whether those who made an offer are heard, or of each other stage anybody that serves it."""
        roll, now = self._roll, self._outside.now()
        if offer.rung is Rung.SHADOW:
            return all(roll.alive(self._sources[holder], now) for holder in offer.holders)
        return all(roll.holders(self._stages[holder], now) is not None for holder in offer.holders)

    async def _layers(self, offer: Offer) -> Tensor:
        """What an offer of a shadow's holder, or of other stages, gives. Raises NetworkError, and RemoteError for a shadow that is none."""
        if offer.rung is Rung.SHADOW:
            return await self._shadow([self._sources[holder] for holder in offer.holders])
        stages = [self._stages[holder] for holder in offer.holders]
        found = [await self._borrowed(stage) for stage in stages]
        if offer.rung in (Rung.MEAN, Rung.FITTED):
            norms = [grad_norm(self._roll, stage, self._outside.now()) for stage in stages]
            layers = weighted_mean(found[0], found[1], norms[0], norms[1])
        else:
            layers = interpolated(dict(zip(stages, found, strict=True)), self._life.stage)
        # embedding, last norm and head are in no other stage
        return with_layers(self._recipe.whole.model, self._recipe.part, self._initial, layers)

    async def _shadow(self, holders: list[PeerId]) -> Tensor:
        """Of the stage; our own where no holder is named."""
        outside, stage = self._outside, self._life.stage
        if not holders:
            return outside.shelf.shadows[stage].values
        numel = self._recipe.own.num_parameters
        shadow, _ = await fetch(outside.network, self._doors.side, holders[0], stage, numel, founds=True)
        outside.shelf.serve(stage)
        outside.shelf.give(holders[0], shadow)
        return shadow.values

    async def _borrowed(self, stage: int) -> Tensor:
        """The layers of another stage: of its outer parameters, or as it trains them by CheckFree's rule. Raises NetworkError."""
        held = self._roll.holders(stage, self._outside.now())
        if held is None:
            raise NetworkError(f"nobody of stage {stage} is heard")
        _, digest, holders = held
        recipe, outside = self._part(stage), self._outside
        if self._by_rule:  # as published: what they train now
            numel = recipe.own.num_parameters - (num_ends(recipe.whole.model) if stage == 0 else 0)
            return await fetch_layers(outside.network, self._doors.side, holders, numel, outside.refused)
        if stage in self._lent:
            return self._lent[stage]
        outer = await borrow(
            outside.network,
            holders,
            digest,
            recipe.own.num_parameters,
            side=self._doors.side,
            refused=outside.refused,
        )
        if outer is None:
            raise NetworkError(f"stage {stage} could not be had in one piece: the link broke, or it has gone on")
        self._lent[stage] = layers_of(recipe.whole.model, recipe.part, outer.params)
        return self._lent[stage]

    # ---- what is known -----------------------------------------------------------------------------------------

    def _counts(self) -> bool:
        """Whether the life that we begin is still the newest."""
        return self._roll.number(self._life.stage) <= self._life.number

    def _step(self) -> int:
        """Of the pipeline, the next one."""
        return newest_step(self._roll, self._outside.now())

    def _stage_of(self, peer: PeerId) -> int:
        said = self._roll.present(peer)
        return -1 if said is None else said.stage

    def _part(self, stage: int) -> StageRecipe:
        return stage_recipe(self._recipe.whole, stage)

    def _rate(self, peer: PeerId) -> float:
        return arrives(self._roll, self._outside.network.links(), peer)
