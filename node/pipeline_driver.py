"""A data node's step: its microbatches go along the routes of a plan and come home, whoever dies on the way.

`protocol/flights.py` decides; this module hears what peers say, keeps its deadlines, and carries out its effects through the stage server
that runs here. At the end it tells every peer whether what that one has accumulated for it counts: it does, but at those that it has lost, and where a stage
is on trial that its losses speak against, at the others (`training/recovery_trial.py`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from farflung.node.network import Network
from farflung.node.pipeline_step import Step
from farflung.node.sealed_mail import Post
from farflung.node.stage_server import StageServer
from farflung.node.tether import CLOSE_S, Tether
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.flights import Effect, Flights, Note, Start, Tell
from farflung.protocol.messages import Passage
from farflung.protocol.route import Route
from farflung.training.pipeline_worker import Batch
from farflung.training.recovery_trial import LossTrial, Tried, counting


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a data node's part of a step went."""

    losses: dict[int, float]
    """By microbatch, of those that came home."""
    cut: dict[int, str]
    """Those that did not, and why."""
    routes: dict[int, Route]
    """Where all of them went in the end."""
    lost: frozenset[int]
    """Peers whose gradients of our microbatches do not count."""
    notes: tuple[Note, ...]
    """What was decided on the way, and why."""
    seconds: float
    """Until the last of them was home."""
    visits: dict[int, int]
    """By peer: our (microbatch, hop) that count there, losses included."""
    tried: Sequence[Tried]
    """Stages that were on trial."""
    counts_here: bool
    """Whether that leaves our own gradients, and so our samples trained."""


class Driver:
    """One step of one data node."""

    def __init__(
        self,
        *,
        network: Network,
        server: StageServer,
        post: Post,
        step: Step,
        home: int,  # our place in the plan
        batches: Mapping[int, Batch],  # of our microbatches
        refused: Callable[[RemoteError], None],
        lives: Mapping[int, int],  # by stage, the life that serves in this step
        trial: LossTrial | None,  # None: stages that were begun anew have full weight at once
    ) -> None:
        lanes: dict[int, list[tuple[int, Route]]] = {}
        for microbatch, (lane, route) in enumerate(zip(step.lanes, step.routes, strict=True)):
            if route[0].peer == home:
                lanes.setdefault(lane, []).append((microbatch, route))
        self._network = network
        self._server = server
        self._post = post
        self._refused = refused
        self._step = step
        self._home = home
        self._batches = batches
        self._lives = lives
        self._trial = trial
        self._flights = Flights(
            window=step.window,
            home=home,
            stages=step.takers[home],
            lanes=list(lanes.values()),
            loss_at_home=step.plan.loss_at_home,
            patience=step.patience,
            droppable=step.droppable,
            visit_s=step.visit_s,
        )
        self._heard: asyncio.Queue[tuple[int, Passage | str]] = asyncio.Queue()
        self._notes: list[Note] = []

    def listen(self, place: int, passage: Passage) -> None:
        """The listener to open the step with."""
        self._heard.put_nowait((place, passage))

    def lost(self, place: int, reason: str) -> None:
        """Whoever watches the peers says that one is dead."""
        self._heard.put_nowait((place, reason))

    async def run(self) -> Outcome:
        """Carry out the step, which is open here."""
        others = sorted({peer for stage in self._step.plan.stages for peer in stage} - {self._home})
        tethers = {
            place: Tether(self._network, self._step.keys[place], self._step.window, partial(self.lost, place))
            for place in others
        }
        async with asyncio.TaskGroup() as group:
            holding = {place: group.create_task(tether.run(), name="tether") for place, tether in tethers.items()}
            began = self._now()
            await self._until_home()
            seconds = self._now() - began
            lost = frozenset(self._flights.lost)
            tried = self._try()
            stages = counting(tried, len(self._step.plan.stages))
            counted = {place for stage in stages for place in self._step.plan.stages[stage]}
            for place, tether in tethers.items():
                tether.settle(counts=place in counted - lost)
            # Whoever is lost and never told does not count either; but a data node may be waiting for our word, as we may for another's.
            others_lost = lost & holding.keys()
            if waiting := [holding[place] for place in others_lost & self._step.homes]:
                await asyncio.wait(waiting, timeout=CLOSE_S)
            for place in others_lost:
                holding[place].cancel()
        counts_here = self._home in counted
        visits = {self._home: self._server.settle(self._step.window, counts=counts_here)}
        visits |= {place: tether.visits for place, tether in tethers.items() if tether.visits is not None}
        untold = frozenset(tethers.keys() - visits.keys())
        return Outcome(
            losses=self._flights.losses,
            cut=self._flights.cut,
            routes=self._flights.routes,
            lost=lost | untold,
            notes=tuple(self._notes),
            seconds=seconds,
            visits={place: count for place, count in visits.items() if place not in lost},
            tried=tried,
            counts_here=counts_here,
        )

    def _try(self) -> list[Tried]:
        """What our losses say of stages that were begun anew."""
        if self._trial is None:
            return []
        routes = self._flights.routes
        visited = {microbatch: {leg.stage for leg in route} for microbatch, route in routes.items()}
        return self._trial.look(self._flights.losses, visited, self._lives)

    async def _until_home(self) -> None:
        self._do(self._flights.begin(self._now()))
        while not self._flights.done:
            try:
                async with asyncio.timeout_at(self._flights.next_due()):
                    place, said = await self._heard.get()
            except TimeoutError:
                self._do(self._flights.tick(self._now()))
                continue
            if isinstance(said, str):
                self._do(self._flights.lose(place, said, self._now()))
            else:
                self._hear(place, said)

    def _hear(self, place: int, passage: Passage) -> None:
        try:
            self._do(self._flights.heard(place, passage, self._now()))
        except Refused as error:
            self._refused(Refused(error.reason, peer=self._step.keys[place]))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(order):
                    self._server.start(order, self._batches[order.microbatch])
                case Tell(place, message):
                    if place == self._home:
                        self._server.handle(self._step.keys[place], message)
                    else:
                        self._post(self._step.keys[place], message)
                case Note():
                    self._notes.append(effect)
                    if effect.what == "lost":
                        self._server.avoid(self._step.window, effect.peer)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
