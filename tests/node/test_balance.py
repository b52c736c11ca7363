"""A peer that is asked to move to another stage: what it says, what it waits for, and when it stays after all."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.protocol.pipeline_says import says

from farflung.node.balance import AGAIN_S, SHARE, URGENT_S, Balance, stage_bytes
from farflung.node.diary import Spent
from farflung.node.events import Event, EventLog
from farflung.node.network import PeerId
from farflung.node.stage_recipe import stage_recipe
from farflung.protocol.appointment import appoint
from farflung.protocol.balancer import ALARM_BEATS
from farflung.protocol.errors import ConfigError, Refused
from farflung.protocol.pipeline_messages import Load, MoveOrder, Present, SwarmMessage
from farflung.protocol.roll import Roll
from farflung.sims import clock
from farflung.sims.pipeline_small import recipe, signers
from farflung.training.pipeline_slice import stage_weights

SIGNERS = signers(6)
FOUNDER, ME, *OTHERS, LAST = [signer.peer_id for signer in SIGNERS]
RECIPE = recipe(stages=2, total_steps=1000)
ORDER = MoveOrder(0, 1, True, "stage 1 has one peer only")


class Me:
    """What the rest of the node would be; it implements `stage_self.Self` and `balance.Part`."""

    def __init__(self, group: asyncio.TaskGroup, prepare: Callable[[int], Awaitable[None]]) -> None:
        self.me = self
        self.step = 100
        self.leads = self.finished = False
        self.idle = self.trains = self.unsent = True
        self.free, self.in_step = True, False
        self.holds = (0, b"")
        self.up_bytes_per_s = 1e6
        self.said: list[Present] = []
        self.told: list[tuple[PeerId, SwarmMessage]] = []
        self.gone: list[tuple[int, str]] = []
        self.events: list[Event] = []
        self.begin_task = self._begin_task(group)
        self.roll = Roll(RECIPE.swarm, FOUNDER, ME, 2, 2.0)
        self.roll.appointments[1] = appoint(SIGNERS[0], RECIPE.swarm, 1, LAST)
        for peer in (FOUNDER, *OTHERS):
            self.hear(peer, 0)
        self.hear(LAST, 1)
        log = EventLog(None, swarm="test", peer="me")
        log.subscribe(self.events.append)
        self.balance = Balance(
            self,
            roll=self.roll,
            recipe=stage_recipe(RECIPE, 0),
            log=log,
            fits=frozenset({1}),
            prepare=prepare,
        )

    @staticmethod
    def _begin_task(group: asyncio.TaskGroup) -> Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]:
        return lambda work, name: group.create_task(work, name=name)

    def hear(self, peer: PeerId, stage: int, **changes: Any) -> None:
        self.roll.heard(peer, says(stage, fits=(1 - stage,), **changes), asyncio.get_running_loop().time())

    def present(self) -> Present:
        balance = self.balance
        return says(
            0,
            wants=balance.to,
            trains=self.trains,
            since=balance.since,
            load=balance.load,
            fits=tuple(sorted(balance.fits)),
        )

    def announce(self) -> None:
        self.said.append(self.present())

    def tell(self, to: PeerId, message: SwarmMessage) -> None:
        self.told.append((to, message))

    def go(self, stage: int, reason: str) -> None:
        self.gone.append((stage, reason))

    def wake(self) -> None: ...

    def met(self, peer: PeerId) -> None: ...

    def happened(self, what: str) -> list[Event]:
        return [event for event in self.events if event["event"] == what]

    async def live(self, seconds: float, *, silent: frozenset[PeerId] = frozenset()) -> None:
        """Look four times a second; everybody but the `silent` goes on saying what it said."""
        for _ in range(round(4 * seconds)):
            for peer in self.roll.known:
                if peer not in silent and (said := self.roll.present(peer)) is not None:
                    self.roll.heard(peer, said, asyncio.get_running_loop().time())
            self.balance.look()
            await asyncio.sleep(0.25)

    def ask(self, order: MoveOrder = ORDER, sender: PeerId = FOUNDER) -> None:
        self.balance.asked(sender, order, asyncio.get_running_loop().time())


async def at_once(stage: int) -> None:
    pass


def played(story: Callable[[Me], Awaitable[None]], prepare: Callable[[int], Awaitable[None]] = at_once) -> Me:
    async def main() -> Me:
        async with asyncio.TaskGroup() as group:
            me = Me(group, prepare)
            await story(me)
        return me

    return clock.run(main())


def test_it_says_so_waits_for_a_round_and_goes() -> None:
    async def story(me: Me) -> None:
        me.ask()
        assert me.balance.to == 1 and me.said[-1].wants == 1
        await me.live(60.0)
        assert not me.balance.stands and not me.gone
        me.unsent, me.idle = False, False  # a round has counted it; a step is under way
        assert me.balance.stands
        await me.live(5.0)
        assert not me.gone
        me.idle = True
        await me.live(0.25)

    me = played(story)
    assert me.gone == [(1, "moves to stage 1")] and len(me.happened("stage.move")) == 1


def test_it_does_not_go_before_everybody_has_heard_it() -> None:
    async def story(me: Me) -> None:
        me.unsent = False
        me.ask()
        await me.live(AGAIN_S - 0.5)
        assert not me.gone
        await me.live(1.0)
        assert me.gone

    played(story)


def test_a_last_replica_does_not_wait_for_ever() -> None:
    async def story(me: Me) -> None:
        me.ask()
        await me.live(URGENT_S - 1.0)
        assert not me.gone
        await me.live(2.0)
        assert me.gone

    played(story)


def test_it_stays_when_the_last_replica_is_not_alone_any_more() -> None:
    async def story(me: Me) -> None:
        me.ask()
        await me.live(10.0)
        me.hear(OTHERS[2], 1)
        await me.live(5.0)
        assert me.balance.to == -1 and me.said[-1].wants == -1
        me.unsent = False
        await me.live(10.0)

    me = played(story)
    assert not me.gone and me.happened("stage.stay")[0]["reason"] == "stage 1 has 2 peers"


def test_it_stays_when_its_own_stage_loses_others() -> None:
    async def story(me: Me) -> None:
        me.ask()
        await me.live(20.0, silent=frozenset(OTHERS))
        assert me.balance.to == -1

    assert "would be left with 1 peers" in played(story).happened("stage.stay")[0]["reason"]


def test_of_two_who_are_asked_at_once_one_goes() -> None:
    for other in OTHERS:

        async def story(me: Me, other: PeerId = other) -> None:
            me.ask()
            me.hear(other, 0, wants=1)
            await me.live(5.0)
            assert (me.balance.to == 1) == (other > ME)

        played(story)


def test_a_machine_that_cannot_get_ready_stays_and_says_that_it_does_not_fit() -> None:
    async def no_data(stage: int) -> None:
        await asyncio.sleep(3.0)
        raise ConfigError(f"there is no data for stage {stage}")

    async def story(me: Me) -> None:
        me.unsent = False
        me.ask()
        await me.live(2.5)
        assert me.balance.to == 1 and not me.balance.stands
        await me.live(10.0)
        assert me.balance.to == -1 and me.said[-1].fits == ()
        me.ask()
        assert me.balance.to == -1

    me = played(story, no_data)
    assert not me.gone
    assert [event["reason"] for event in me.happened("stage.stay")] == [
        "there is no data for stage 1",
        "this machine cannot serve stage 1, or was told to serve stage 0",
    ]


def test_who_may_ask() -> None:
    async def story(me: Me) -> None:
        with pytest.raises(Refused, match="no data node"):
            me.ask(sender=LAST)
        me.ask(MoveOrder(1, 0, True, "for somebody of another stage"))
        assert me.balance.to == -1
        del me.roll.appointments[1]
        me.ask()
        assert me.balance.to == -1 and "began the chain" in me.happened("stage.stay")[0]["reason"]

    played(story)


def test_the_coordinator_asks_when_the_alarm_stands() -> None:
    async def story(me: Me) -> None:
        me.leads = True
        await me.live(ALARM_BEATS * 2.0)
        assert not me.told
        await me.live(3.0)
        assert me.balance.alarm == {1: 1} and len(me.told) >= 1

    me = played(story)
    peer, order = me.told[0]
    assert peer in (ME, *OTHERS) and order == MoveOrder(0, 1, True, "stage 1 has one peer only, stage 0 has 5")
    assert me.happened("stage.alarm")[0]["replicas"] == {"1": 1}


def test_what_steps_cost_is_an_exponential_mean() -> None:
    async def story(me: Me) -> None:
        me.balance.spent(Spent(visits=4, computing_s=2.0, sent_bytes=500_000))
        assert me.balance.load == Load(4.0, 2.0, 0.5)
        me.balance.spent(Spent(visits=8, computing_s=2.0, sent_bytes=0))
        assert me.balance.load == Load(4.0 + 4.0 * SHARE, 2.0, 0.5 - 0.5 * SHARE)

    played(story)


def test_weights_are_products_and_bytes_are_outer_state() -> None:
    model = RECIPE.model
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24
    assert stage_weights(model, (1, 3)) == (layer + 256 * 16, 3 * layer)
    assert stage_bytes(model, (1, 3))[1] == 8 * 3 * (layer + 2 * 16)
