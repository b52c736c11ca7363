"""A data node's step: its microbatches go along the routes of a plan and come home, whoever dies on the way.

`protocol/flights.py` decides; this module hears what peers say, keeps its deadlines, and carries out its effects through the stage server
that runs here. At the end it tells every peer whether what it has accumulated counts.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.node.pipeline_mail import Post
from farflung.node.pipeline_step import Step
from farflung.node.stage_server import StageServer
from farflung.protocol.errors import NetworkError, RemoteError
from farflung.protocol.flights import Droppable, Effect, Flights, Note, Patience, Start, Tell
from farflung.protocol.messages import Passage
from farflung.protocol.route import Route
from farflung.training.pipeline_worker import Batch


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
    """Peers whose accumulated gradients do not count."""
    notes: tuple[Note, ...]
    """What was decided on the way, and why."""
    visits: dict[int, int] = field(default_factory=dict)
    """By peer: our (microbatch, hop) that count there, losses included."""


class Driver:
    """One step of one data node."""

    def __init__(
        self,
        *,
        server: StageServer,
        post: Post,
        step: Step,
        home: int,  # our place in the plan
        batches: Mapping[int, Batch],  # of our microbatches
        patience: Patience,
        droppable: Droppable | None = None,
    ) -> None:
        lanes: dict[int, list[tuple[int, Route]]] = {}
        for microbatch, (lane, route) in enumerate(zip(step.lanes, step.routes, strict=True)):
            if route[0].peer == home:
                lanes.setdefault(lane, []).append((microbatch, route))
        self._server = server
        self._post = post
        self._step = step
        self._home = home
        self._batches = batches
        self._flights = Flights(
            window=step.window,
            home=home,
            stages=step.plan.stages,
            lanes=list(lanes.values()),
            loss_at_home=step.plan.loss_at_home,
            patience=patience,
            droppable=droppable,
        )
        self._heard: asyncio.Queue[tuple[int, Passage | None]] = asyncio.Queue()
        self._notes: list[Note] = []

    def listen(self, place: int, passage: Passage) -> None:
        """The listener to open the step with."""
        self._heard.put_nowait((place, passage))

    def lost(self, place: int) -> None:
        """Whoever watches the peers says that one is dead."""
        self._heard.put_nowait((place, None))

    async def run(self) -> Outcome:
        """Carry out the step, which is open here."""
        self._do(self._flights.begin(self._now()))
        while not self._flights.done:
            try:
                async with asyncio.timeout_at(self._flights.next_due()):
                    place, passage = await self._heard.get()
            except TimeoutError:
                self._do(self._flights.tick(self._now()))
                continue
            if passage is None:
                self._do(self._flights.lose(place, "it is dead", self._now()))
            else:
                self._do(self._flights.heard(place, passage, self._now()))
        visits = await self._settle()
        return Outcome(
            losses=self._flights.losses,
            cut=self._flights.cut,
            routes=self._flights.routes,
            lost=frozenset(self._flights.lost),
            notes=tuple(self._notes),
            visits=visits,
        )

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

    async def _settle(self) -> dict[int, int]:
        """Visits that count, by peer. Who cannot be told never counts: a peer waits for every data node's word."""
        visits: dict[int, int] = {}

        async def tell(place: int) -> None:
            counts = place not in self._flights.lost
            try:
                told = await self._server.settle(self._step, place, counts=counts)
            except (NetworkError, RemoteError) as error:
                if counts:
                    self._flights.lost.add(place)
                    self._notes.append(Note("lost", place, -1, str(error)))
            else:
                if counts:
                    visits[place] = told

        async with asyncio.TaskGroup() as group:
            for place in sorted({peer for stage in self._step.plan.stages for peer in stage}):
                group.create_task(tell(place), name="the end of a step")
        return visits

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
