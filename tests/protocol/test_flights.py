"""Microbatches in flight: every one lands and counts once, whoever dies, and whatever is lost, repeated or late."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.protocol.pipeline_lab import PATIENCE, WINDOW, Happens, PipelineLab

from farflung.protocol.droppable import Droppable
from farflung.protocol.errors import Refused
from farflung.protocol.flights import MOST_DOUBTS, Effect, Flights, Tell
from farflung.protocol.messages import GiveUp, Passage, Said
from farflung.protocol.route import DROPPED, OPEN, Leg, Route, following, live_hops, place, position, preceding
from farflung.protocol.visit import Work

STAGES = ((0,), (1, 2), (3, 4), (5, 6))


def route(*peers: int) -> Route:
    return tuple(Leg(stage, peer) for stage, peer in enumerate(peers))


def columns(count: int) -> list[list[tuple[int, Route]]]:
    """Lanes of one microbatch, by turns on the upper and the lower peers."""
    return [[(number, route(0, *(stage[number % 2] for stage in STAGES[1:])))] for number in range(count)]


def early_death(victim: int) -> Happens:
    """A peer dies when the first microbatch comes to hop 1."""

    def happens(lab: PipelineLab, peer: int, work: Work, now: str) -> None:
        if work == Work(0, 1, False):
            lab.kill(victim)

    return happens


def check(lab: PipelineLab) -> None:
    """What must hold after every run."""
    flights, counted = lab.flights, lab.counted()
    assert max(map(len, counted.values()), default=0) <= 1, "counted by two peers that count"
    gone = lab.dead | flights.lost
    assert lab.loss or lab.lease_s < math.inf or flights.lost <= lab.dead, "a living peer was given up for lost"
    assert all(lab.droppable.allows(taken, loss_at_home=lab.loss_at_home) for taken in flights.routes.values())
    for microbatch in flights.losses:
        taken = flights.routes[microbatch]
        hops = [*live_hops(taken), len(taken)]
        for hop in hops:
            by = counted.get((microbatch, hop), [])
            everywhere = [p for p, desk in lab.desks.items() if (microbatch, hop) in desk.counted.get(0, ())]
            assert by or set(everywhere) & gone, f"microbatch {microbatch} landed without hop {hop}"
    for peer, desk in lab.desks.items():
        if peer not in gone and not lab.loss:
            assert desk.num_visits == 0 or flights.cut or lab.notes


def test_without_faults_everything_counts_where_it_was_planned() -> None:
    lanes = columns(6)
    lab = PipelineLab(1, STAGES, lanes)
    lab.run()
    check(lab)
    assert lab.flights.losses == dict.fromkeys(range(6), 1.0) and not lab.notes
    for ((microbatch, taken),) in lanes:
        assert lab.flights.routes[microbatch] == taken
        by = {hop: lab.counted()[microbatch, hop] for hop in range(5)}
        assert by == {hop: [taken[hop].peer] for hop in range(4)} | {4: [0]}


def moments() -> list[tuple[str, Work, str, int]]:
    """(name, work, when, peer): the moments of the table at which the peer of hop 2 dies on microbatch 0."""
    forward, backward = Work(0, 2, False), Work(0, 2, True)
    return [
        ("before its forward", Work(0, 1, False), "started", 3),
        ("in its forward", forward, "started", 3),
        ("after its forward", forward, "finished", 3),
        ("while the next one computes", Work(0, 3, False), "started", 3),
        ("between forward and backward", Work(0, 4, False), "started", 3),
        ("in the backward after it", Work(0, 3, True), "started", 3),
        ("in its backward", backward, "started", 3),
        ("after its backward", backward, "finished", 3),
        ("when all is over", Work(0, 1, True), "started", 3),
    ]


@pytest.mark.parametrize("loss_at_home", [True, False])
@pytest.mark.parametrize("moment", moments(), ids=lambda moment: moment[0])
def test_a_peer_dies_at_each_moment(moment: tuple[str, Work, str, int], loss_at_home: bool) -> None:
    _, when, what, victim = moment
    for seed in range(20):

        def happens(lab: PipelineLab, peer: int, work: Work, now: str) -> None:
            if work == when and now == what:
                lab.kill(victim)

        lab = PipelineLab(seed, STAGES, columns(6), loss_at_home=loss_at_home, happens=happens)
        lab.run()
        assert victim in lab.dead
        check(lab)
        assert sorted(lab.flights.losses) == list(range(6)) and not lab.flights.cut
        last = lab.counted()
        for microbatch in (1, 3, 5):  # they do not pass there
            assert lab.flights.routes[microbatch] == columns(6)[microbatch][0][1]
            assert all((microbatch, hop) in last for hop in range(5))


def test_the_last_peer_of_a_stage_is_dropped_from_the_route_or_ends_the_flight() -> None:
    stages = ((0,), (1,), (2,), (3,))
    lanes = [[(number, route(0, 1, 2, 3))] for number in range(3)]

    lab = PipelineLab(3, stages, lanes, happens=early_death(2), droppable=Droppable(fewest=3))
    lab.run()
    check(lab)
    assert len(lab.flights.losses) == 3
    assert all(taken[2].peer == DROPPED for taken in lab.flights.routes.values())
    assert not any(hop == 2 for _, hop in lab.counted())
    lab = PipelineLab(3, stages, lanes, happens=early_death(2))
    lab.run()
    check(lab)
    assert sorted(lab.flights.cut) == [0, 1, 2] and "nobody is left" in lab.flights.cut[0]


def test_who_is_late_leaves_the_hop_out_and_who_has_not_begun_goes_to_the_replacement() -> None:
    """Two lanes of two microbatches go through the peer of stage 2 that dies when the first of them comes to stage 1."""
    lanes = [[(2 * lane + turn, route(0, 1, 3, 5)) for turn in range(2)] for lane in range(2)]

    lab = PipelineLab(7, STAGES, lanes, happens=early_death(3), droppable=Droppable(fewest=3))
    lab.run()
    check(lab)
    assert len(lab.flights.losses) == 4
    went = {microbatch: taken[2].peer for microbatch, taken in lab.flights.routes.items()}
    assert went == {0: DROPPED, 2: DROPPED, 1: 4, 3: 4}


def test_a_route_loses_no_more_hops_than_it_may() -> None:
    """All peers of stages 1 and 2 die: with one hop less the flights go on, with two they are cut short."""
    stages = ((0,), (1,), (2,), (3,))
    lanes = [
        [(0, (Leg(0, 0), Leg(1, 1), Leg(3, 3)))],
        [(1, (Leg(0, 0), Leg(2, 2), Leg(3, 3)))],
        [(2, (Leg(0, 0), Leg(1, 1), Leg(2, 2)))],
    ]

    def kill_both(lab: PipelineLab, peer: int, work: Work, now: str) -> None:
        for victim in (1, 2):
            lab.kill(victim)

    lab = PipelineLab(3, stages, lanes, happens=kill_both, droppable=Droppable(fewest=2))
    lab.run()
    check(lab)
    assert sorted(lab.flights.losses) == [0, 1] and lab.flights.cut.keys() == {2}
    assert sorted(note.microbatch for note in lab.notes if note.what == "dropped") == [0, 1, 2]
    lab = PipelineLab(3, stages, lanes, happens=kill_both, droppable=Droppable(fewest=2, max_jump=2))
    lab.run()
    check(lab)
    assert not lab.flights.losses  # from stage 0 to stage 3 is too far


def test_a_slow_peer_is_asked_and_not_replaced_while_it_holds_the_flight() -> None:
    lab = PipelineLab(5, STAGES, columns(2))
    lab.slow[3] = 60.0  # five times the patience
    lab.run()
    check(lab)
    assert not lab.flights.lost
    assert not lab.flights.cut
    lab = PipelineLab(5, STAGES, columns(2))
    lab.slow[3] = 10_000.0  # that is wedged
    lab.run()
    check(lab)
    assert lab.flights.losses.keys() == {0, 1}
    assert lab.counted()[0, 2] == [4]


def test_a_hop_is_dropped_when_the_only_peer_that_could_do_it_gives_it_up() -> None:
    lanes = [[(number, route(0, 1, 2, 3))] for number in range(2)]
    lab = PipelineLab(5, ((0,), (1,), (2,), (3,)), lanes, droppable=Droppable(fewest=3))
    lab.slow[2] = 10_000.0
    lab.run()
    check(lab)
    assert lab.flights.losses.keys() == {0, 1} and not lab.flights.lost
    assert all(taken[2].peer == DROPPED for taken in lab.flights.routes.values())
    assert not any(hop == 2 for _, hop in lab.counted())


def test_a_takeover_goes_by_speed() -> None:
    """Of two peers that could do a lost one's hop the quick one gets the first two of three, for it is done with both before the other with one."""
    stages = ((0,), (1, 2, 3))
    lanes = [[(number, route(0, 1))] for number in range(3)]

    def first_dies(lab: PipelineLab, peer: int, work: Work, now: str) -> None:
        if peer == 1:
            lab.kill(1)

    lab = PipelineLab(4, stages, lanes, happens=first_dies, visit_s={1: 1.0, 2: 2.5, 3: 1.0})
    lab.run()
    check(lab)
    assert sorted(taken[1].peer for taken in lab.flights.routes.values()) == [2, 3, 3]


def test_open_legs_go_where_least_was_given() -> None:
    lanes = [[(2 * lane + turn, route(0, OPEN, OPEN, OPEN)) for turn in range(2)] for lane in range(4)]
    lab = PipelineLab(7, STAGES, lanes, most_waiting=1)
    lab.run()
    check(lab)
    assert len(lab.flights.losses) == 8
    for hop in (1, 2, 3):
        given = [taken[hop].peer for taken in lab.flights.routes.values()]
        assert {given.count(peer) >= 2 for peer in STAGES[hop]} == {True}


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    loss=st.sampled_from([0.0, 0.05, 0.2]),
    deaths=st.integers(0, 3),
    loss_at_home=st.booleans(),
    dynamic=st.booleans(),
    drop=st.booleans(),
    full=st.sampled_from([0.0, 0.3, 0.9]),
    fails=st.sampled_from([0.0, 0.3, 0.9]),
    lease_s=st.sampled_from([math.inf, math.inf, 40.0, 15.0, 4.0]),
)
@example(
    seed=3847871410,
    loss=0.0,
    deaths=0,
    loss_at_home=False,
    dynamic=True,
    drop=False,
    full=0.9,
    fails=0.0,
    lease_s=math.inf,
)  # no room for the gradient of a loss that counts there
@example(
    seed=769753, loss=0.2, deaths=2, loss_at_home=True, dynamic=True, drop=False, full=0.0, fails=0.0, lease_s=math.inf
)  # two ways that meet at a peer
@example(
    seed=688, loss=0.2, deaths=0, loss_at_home=True, dynamic=True, drop=True, full=0.0, fails=0.0, lease_s=math.inf
)  # another input comes while an output is on its way
@example(
    seed=2168617104, loss=0.2, deaths=0, loss_at_home=False, dynamic=False, drop=False, full=0.0, fails=0.0, lease_s=4.0
)  # the lease of a loss that counts runs out, and its hop is done elsewhere
@example(
    seed=3795284828, loss=0.2, deaths=0, loss_at_home=True, dynamic=True, drop=False, full=0.0, fails=0.0, lease_s=15.0
)  # an input comes again when its lease has run out and another peer has the hop
@example(
    seed=2045505353, loss=0.2, deaths=1, loss_at_home=True, dynamic=True, drop=True, full=0.1, fails=0.0, lease_s=4.0
)  # nobody takes an open leg, and whoever could send it has let it go
def test_whatever_happens(
    seed: int,
    loss: float,
    deaths: int,
    loss_at_home: bool,
    dynamic: bool,
    drop: bool,
    full: float,
    fails: float,
    lease_s: float,
) -> None:
    rng = random.Random(seed)
    stages, peer = [[0]], 1
    for _ in range(rng.randint(1, 4)):
        size = rng.randint(1, 3)
        stages.append(list(range(peer, peer + size)))
        peer += size
    lanes, number = [], 0
    for _ in range(rng.randint(1, 5)):
        lane = []
        for _ in range(rng.randint(1, 3)):
            way = list(range(1, len(stages)))
            if drop:  # as where routes skip
                way = sorted(rng.sample(way, rng.randint(1, len(way))))
            legs = (Leg(stage, OPEN if dynamic and loss_at_home else rng.choice(stages[stage])) for stage in way)
            lane.append((number, (Leg(0, 0), *legs)))
            number += 1
        lanes.append(lane)
    moments = sorted(rng.sample(range(1, 40 * number), min(deaths, 40 * number - 1)))
    victims = [rng.randrange(1, peer) for _ in moments]
    seen = 0

    def happens(lab: PipelineLab, at: int, work: Work, now: str) -> None:
        nonlocal seen
        seen += 1
        if moments and seen == moments[0]:
            moments.pop(0)
            lab.kill(victims.pop(0))

    speeds = random.Random(seed + 1)
    known = [one for one in range(peer) if speeds.random() < 0.5]
    lab = PipelineLab(
        seed,
        stages,
        lanes,
        loss_at_home=loss_at_home,
        loss=loss,
        most_waiting=rng.choice((1, 2, 64)),
        droppable=Droppable(fewest=2) if drop else Droppable(),
        visit_s={one: speeds.choice((0.5, 1.0, 10.0)) for one in known},
        happens=happens,
        lease_s=lease_s,
    )
    lab.full, lab.fails = full, fails
    lab.run()
    check(lab)
    assert len(lab.flights.losses) + len(lab.flights.cut) == number
    if not lab.dead and not loss and not full and not fails and lease_s == math.inf:
        assert not lab.notes and len(lab.counted()) == sum(len(way) + 1 for lane in lanes for _, way in lane)


WAY = route(0, 1, 3, 5)


def in_flight(at_hop: int, *, backward: bool = False, way: Route = WAY) -> Flights:
    """One microbatch, which peer 1 or 5 has and hands on to peer 3; its data node has just heard so."""
    flights = Flights(
        window=WINDOW,
        home=0,
        stages=STAGES,
        lanes=[[(0, way)]],
        loss_at_home=True,
        patience=PATIENCE,
        droppable=Droppable(),
    )
    flights.begin(0.0)
    for hop in range(at_hop):
        say(flights, hop, Said.PASSED, 0.0)
    if backward:
        say(flights, 4, Said.PASSED, 0.0, backward=True)
    return flights


def say(flights: Flights, hop: int, said: Said, now: float, *, backward: bool = False) -> list[Effect]:
    peer = 0 if hop == len(WAY) else WAY[hop].peer
    return flights.heard(peer, Passage(WINDOW, 0, hop, backward, said, 0, WAY, 1.0), now)


def test_who_lacked_something_may_have_it_by_now_and_is_asked_to_give_it_up() -> None:
    """Its word was late. Were another to do the hop at once, it would count twice."""
    flights = in_flight(4, backward=True)
    order = GiveUp(WINDOW, 0, 3, False, 0, WAY)
    assert say(flights, 3, Said.MISSING, 1.0) == [Tell(5, order)]
    assert say(flights, 3, Said.PASSED, 2.0, backward=True) == [] and flights._flights[0].route == WAY


def addressed(effects: list[Effect]) -> list[int]:
    return [effect.peer for effect in effects if isinstance(effect, Tell)]


@pytest.mark.parametrize(("holder", "backward"), [(1, False), (3, True)])
def test_a_holder_that_sends_to_nobody_is_not_waited_for(holder: int, backward: bool) -> None:
    """It says that all is well, for to it the link is only slow."""
    flights = in_flight(holder if not backward else 4, backward=backward)
    who, now = WAY[holder].peer, PATIENCE.leg_s
    assert addressed(flights.tick(now)) == [who, 3]
    say(flights, holder, Said.HOLDING, now, backward=backward)
    for _ in range(MOST_DOUBTS - 1):
        now += PATIENCE.answer_s
        assert flights.next_due() == now
        assert addressed(flights.tick(now))[-1] == 3 and not flights.lost
        say(flights, holder, Said.HOLDING, now, backward=backward)
    now += PATIENCE.answer_s
    effects = flights.tick(now)
    assert flights.lost == {3} and who in addressed(effects)  # which sends it to another
    assert flights._flights[0].route[2].peer == 4


def test_a_peer_that_answers_is_there_whatever_it_lacks() -> None:
    flights = in_flight(1, backward=False)
    flights.tick(PATIENCE.leg_s)
    say(flights, 1, Said.HOLDING, PATIENCE.leg_s)
    assert say(flights, 2, Said.MISSING, PATIENCE.leg_s) == []
    assert flights.next_due() == 2 * PATIENCE.leg_s
    flights.tick(2 * PATIENCE.leg_s)
    assert not flights.lost


def test_words_of_what_cannot_be_are_refused() -> None:
    lab = PipelineLab(1, STAGES, columns(1))
    lab.flights.begin(0.0)
    taken = columns(1)[0][0][1]
    with pytest.raises(Refused, match="none of ours"):
        lab.flights.heard(1, Passage(WINDOW, 9, 1, False, Said.PASSED, 0, taken, 0.0), 1.0)
    with pytest.raises(Refused, match="hop 2: its route is not that"):
        lab.flights.heard(1, Passage(WINDOW, 0, 2, False, Said.PASSED, 0, taken[:2], 0.0), 1.0)
    with pytest.raises(Refused, match="no such hop"):
        lab.flights.heard(1, Passage(WINDOW, 0, 5, False, Said.PASSED, 0, taken, 0.0), 1.0)
    with pytest.raises(Refused, match="does not hold"):
        lab.flights.heard(1, Passage(WINDOW, 0, 1, False, Said.PASSED, 0, route(0, 1, 5, 5), 0.0), 1.0)
    with pytest.raises(Refused, match="must not be left out"):
        lab.flights.heard(1, Passage(WINDOW, 0, 1, False, Said.PASSED, 0, route(0, 1, DROPPED, 5), 0.0), 1.0)
    for peers, match in (
        ((7, 1, 3, 5), "not that of the plan"),
        ((OPEN, 1, 3, 5), "not that of the plan"),
        ((DROPPED, 1, 3, 5), "not that of the plan"),
        ((0, 1, 3, OPEN), "must be bound"),
    ):
        with pytest.raises(Refused, match=match):
            lab.flights.heard(1, Passage(WINDOW, 0, 1, True, Said.PASSED, 0, route(*peers), 0.0), 1.0)
    assert lab.flights._flights[0].route == taken


def test_no_peer_makes_a_version_that_no_message_can_carry() -> None:
    """It says that the loss was reached another way, as it may, by the highest version that there can be."""
    flights = Flights(
        window=WINDOW, home=0, stages=STAGES, lanes=[[(0, route(0, 1, 3, 5))]], loss_at_home=True, patience=PATIENCE,
        droppable=Droppable(fewest=3),
    )  # fmt: skip
    flights.begin(0.0)
    taken = route(0, 1, DROPPED, 5)
    flights.heard(5, Passage(WINDOW, 0, 3, True, Said.PASSED, 1 << 62, taken, 1.0), 1.0)
    flight = flights._flights[0]
    assert (flight.route, flight.version) == (taken, 1)


def test_positions() -> None:
    way = route(0, 1, DROPPED, 5)
    assert live_hops(way) == [0, 1, 3]
    assert [following(way, hop) for hop in range(4)] == [1, 3, 3, 4]
    assert [preceding(way, hop) for hop in range(1, 5)] == [0, 1, 1, 3]
    for at in range(9):
        hop, backward = place(way, at)
        assert position(way, hop, backward=backward) == at


@pytest.mark.parametrize("told", [-5.0, 1e300, float("inf")])
def test_the_loss_is_what_was_computed_at_home(told: float) -> None:
    legs = route(0, 1, 3, 5)
    flights = Flights(
        window=WINDOW, home=0, stages=[list(peers) for peers in STAGES], lanes=[[(0, legs)]], loss_at_home=True,
        patience=PATIENCE, droppable=Droppable(),
    )  # fmt: skip
    flights.begin(0.0)

    def said(peer: int, hop: int, backward: bool, loss: float) -> None:
        flights.heard(peer, Passage(WINDOW, 0, hop, backward, Said.PASSED, 0, legs, loss), 1.0)

    for hop, leg in enumerate(legs):
        said(leg.peer, hop, False, float("nan"))
    said(0, 4, False, 2.5)
    for hop, leg in reversed([*enumerate(legs)][1:]):
        said(leg.peer, hop, True, told)
    said(0, 0, True, float("nan"))
    assert flights.done and flights.losses == {0: 2.5}


def test_who_lacks_whatever_it_is_sent_holds_nobody_up() -> None:
    """It says so again and again, sooner than anybody would lose patience: the step must not wait for it for ever."""
    legs = (Leg(0, 0), Leg(1, 1), Leg(2, 2))
    flights = Flights(
        window=WINDOW, home=0, stages=((0,), (1, 3), (2,)), lanes=[[(0, legs)]], loss_at_home=True, patience=PATIENCE,
        droppable=Droppable(),
    )  # fmt: skip
    flights.begin(0.0)
    flights.heard(0, Passage(WINDOW, 0, 0, False, Said.PASSED, 0, legs, float("nan")), 0.0)
    now = 0.0
    while not flights.done:
        now += 1.0
        flight = flights._flights[0]
        flights.heard(1, Passage(WINDOW, 0, 1, False, Said.MISSING, flight.version, flight.route, float("nan")), now)
        assert now < 60.0
    assert "lacks whatever it is sent" in flights.cut[0]
