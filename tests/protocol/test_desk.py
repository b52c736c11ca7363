"""One stage peer's rules for requests that come again, late, or for another version of a route."""

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from farflung.protocol.desk import Answer, Desk, Effect, Forget, Later, Ready, Report, Send
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Again, GiveUp, Said
from farflung.protocol.route import DROPPED, OPEN, Leg, Route, with_peer
from farflung.protocol.visit import Work

WINDOW = b"w" * 32
STAGES = ((0,), (1, 2), (3, 4), (5, 6))
ROUTE: Route = (Leg(0, 0), Leg(1, 1), Leg(2, 3), Leg(3, 5))
SHORTER = with_peer(ROUTE, 1, DROPPED)
FORWARD, BACKWARD = Work(0, 2, False), Work(0, 2, True)


def desk(**changes: Any) -> Desk:
    """Peer 3's, which has stage 2."""
    settings: dict[str, Any] = {"me": 3, "loss_at_home": True, "most_waiting": 2, "lease_s": 100.0, **changes}
    return Desk(window=WINDOW, stages=STAGES, **settings)


def parcel(*, backward: bool = False, version: int = 0, route: Route = ROUTE, microbatch: int = 0) -> ParcelHeader:
    return ParcelHeader(WINDOW, microbatch, 2, backward, 5, version, route, 1, 1, math.nan, False, 4)


def said(effects: list[Effect]) -> list[Said]:
    return [effect.passage.said for effect in effects if isinstance(effect, Report)]


def sent(effects: list[Effect]) -> list[Send]:
    """With -1 for a loss that is nan: with that in it a `Send` does not equal itself, from Python 3.13 on."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [replace(send, loss=-1.0) if math.isnan(send.loss) else send for send in sends]


def losses(effects: list[Effect]) -> list[float]:
    """As they are said, or sent on."""
    return [
        effect.passage.loss if isinstance(effect, Report) else effect.loss
        for effect in effects
        if isinstance(effect, (Report, Send))
    ]


def run(one: Desk, work: Work) -> list[Effect]:
    assert one.started(work)
    return one.finished(work, 0)


def test_a_visit_from_its_input_to_its_end() -> None:
    one = desk()
    assert one.take(parcel(), 0.0) == (Answer.TAKEN, [Ready(FORWARD)])
    (onward,) = sent(run(one, FORWARD))
    assert (onward.hop, onward.peer, onward.backward, onward.until) == (3, 5, False, 5)
    assert said(one.passed(onward)) == [Said.PASSED]
    assert one.take(parcel(backward=True), 0.0) == (Answer.TAKEN, [Ready(BACKWARD)])
    (back,) = sent(run(one, BACKWARD))
    assert (back.hop, back.peer, back.backward) == (1, 1, True)
    assert one.counted == {0: {(0, 2)}}
    for late in (parcel(), parcel(backward=True)):  # whatever comes now gets the gradient
        assert said(one.passed(back)) == [Said.PASSED]
        answer, effects = one.take(late, 0.0)
        assert answer is Answer.TAKEN and sent(effects) == [back] and said(effects) == [Said.HOLDING]
    assert one.on_landed([0]) == [Forget(0)] and one.num_visits == 0
    assert one.take(parcel(), 0.0) == (Answer.UNWANTED, [])
    assert one.counted == {0: {(0, 2)}}


def test_what_was_given_up_is_refused_until_a_later_version() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    effects = one.on_give_up(GiveUp(WINDOW, 0, 2, False, 0, ROUTE))
    assert said(effects) == [Said.GAVE_UP] and not one.started(FORWARD)
    for late in (parcel(), parcel(backward=True)):
        assert one.take(late, 0.0) == (Answer.UNWANTED, [])
    assert one.take(parcel(version=1), 0.0) == (Answer.TAKEN, [Ready(FORWARD)])


def test_what_there_is_no_room_for_is_given_up_unless_it_is_here_or_counts() -> None:
    one = desk()
    answer, effects = one.cannot(parcel(), 0.0)
    (effect,) = [effect for effect in effects if isinstance(effect, Report)]
    assert (effect.home, effect.passage.said, effect.passage.backward) == (0, Said.GAVE_UP, False)
    assert answer is Answer.UNWANTED
    assert one.take(parcel(), 0.0) == (Answer.UNWANTED, [])
    assert one.cannot(parcel(), 0.0) == (Answer.UNWANTED, [])  # it has been said
    one.take(parcel(version=1), 0.0)
    answer, effects = one.cannot(parcel(version=1), 0.0)
    assert answer is Answer.TAKEN and said(effects) == [Said.HOLDING]
    run(one, FORWARD)
    one.take(parcel(version=1, backward=True), 0.0)
    (back,) = sent(run(one, BACKWARD))
    one.passed(back)
    answer, effects = one.cannot(parcel(version=1, backward=True), 0.0)
    assert answer is Answer.TAKEN and sent(effects) == [back]


@pytest.mark.parametrize("made_up", [1, 10**6])
def test_a_version_that_its_data_node_never_named_does_not_keep_us_from_what_that_says(made_up: int) -> None:
    one, elsewhere = desk(), with_peer(ROUTE, 3, 6)
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    for _ in range(2):
        one.take(parcel(version=made_up, route=elsewhere), 0.0)
        assert {*said(one.on_again(Again(WINDOW, 0, 2, False, 5, 0, ROUTE), 0.0))} == {Said.HOLDING}
        (onward,) = sent(run(one, FORWARD))
        assert (onward.peer, onward.version) == (5, 0) and one.wants(onward)


def test_a_made_up_version_with_another_input_is_replaced_once_its_data_node_has_spoken() -> None:
    one = desk()
    one.take(parcel(version=10**6, route=SHORTER), 0.0)
    assert one.take(parcel(), 0.0) == (Answer.UNWANTED, [])
    (word,) = one.on_again(Again(WINDOW, 0, 2, False, 5, 0, ROUTE), 0.0)
    assert isinstance(word, Report) and (word.passage.said, word.passage.version) == (Said.MISSING, 0), (
        "it is listened to"
    )
    assert one.take(parcel(), 0.0)[0] is Answer.TAKEN


def test_an_order_that_comes_late_is_not_obeyed_any_more() -> None:
    one, newer = desk(), with_peer(ROUTE, 3, 6)
    one.take(parcel(), 0.0)
    one.on_again(Again(WINDOW, 0, 2, False, 5, 2, newer), 0.0)
    one.on_again(Again(WINDOW, 0, 2, False, 5, 1, ROUTE), 0.0)
    (onward,) = sent(run(one, FORWARD))
    assert (onward.peer, onward.version) == (6, 2)


def test_what_is_here_already_goes_the_newest_way_though_it_came_again_without_room() -> None:
    one, other = desk(), with_peer(ROUTE, 1, 2)
    one.take(parcel(backward=True), 0.0)
    assert one.cannot(parcel(backward=True, version=1, route=other), 0.0)[0] is Answer.TAKEN
    one.take(ParcelHeader(WINDOW, 0, 2, False, 2, 1, other, 1, 1, math.nan, False, 4), 0.0)
    (back,) = sent(run(one, BACKWARD))
    assert (back.hop, back.peer, back.version) == (1, 2, 1)


def test_what_there_is_no_room_for_does_not_end_a_later_version_of_it() -> None:
    one, other = desk(), with_peer(ROUTE, 1, 2)
    one.take(parcel(backward=True, version=1, route=other), 0.0)
    assert one.cannot(parcel(), 0.0) == (Answer.BUSY, [])
    assert one.take(parcel(version=1, route=other), 0.0)[0] is Answer.TAKEN
    assert one.started(FORWARD) and one.failed(FORWARD) == [Ready(BACKWARD)]


@pytest.mark.parametrize("backward", [False, True])
def test_what_fails_is_given_up(backward: bool) -> None:
    """Its data node hears so, and another peer may have it; it comes back under a later version only."""
    one = desk()
    one.take(parcel(), 0.0)
    if backward:
        run(one, FORWARD)
        one.take(parcel(backward=True), 0.0)
    work = BACKWARD if backward else FORWARD
    assert one.started(work)
    forgotten, report = one.failed(work)
    assert forgotten == Forget(0, 2) and isinstance(report, Report)
    assert (report.passage.said, report.passage.backward) == (Said.GAVE_UP, backward)
    assert one.num_visits == 0 and not one.counted and one.failed(work) == []
    assert one.take(parcel(), 0.0) == (Answer.UNWANTED, [])
    assert one.take(parcel(version=1), 0.0) == (Answer.TAKEN, [Ready(FORWARD)])


def test_what_fails_when_a_forward_is_repeated_costs_no_gradient_and_no_loss_that_came_of_the_first() -> None:
    """Else its data node had all of it done by another peer, and the loss would count twice."""
    one = desk()
    one.take(parcel(), 0.0)
    (onward,) = sent(run(one, FORWARD))
    one.passed(onward)
    assert one.take(parcel(), 0.0) == (Answer.TAKEN, [Ready(FORWARD)]) and one.started(FORWARD)
    assert one.take(parcel(backward=True), 0.0) == (Answer.TAKEN, [])
    assert one.failed(FORWARD) == [Ready(BACKWARD)]
    one, route, loss = desk(loss_at_home=False), ROUTE[:3], Work(0, 3, False)
    for hop in (2, 3):
        one.take(ParcelHeader(WINDOW, 0, hop, False, 4, 0, route, 1, 1, math.nan, False, 4), 0.0)
    (onward,) = sent(run(one, FORWARD))
    one.passed(onward)
    run(one, loss)
    one.take(parcel(route=route), 0.0)
    assert one.started(FORWARD) and one.failed(FORWARD) == []
    assert one.take(parcel(backward=True, route=route), 0.0) == (Answer.TAKEN, [Ready(BACKWARD)])


def test_what_failed_before_it_came_again_under_a_later_version_does_not_end_that() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    assert one.started(FORWARD)
    one.on_give_up(GiveUp(WINDOW, 0, 2, False, 0, ROUTE))
    one.take(parcel(version=1), 0.0)
    assert one.failed(FORWARD) == [] and one.started(FORWARD)


def test_a_loss_that_fails_at_the_last_hop_is_given_up_with_that_hop() -> None:
    one, route = desk(loss_at_home=False), ROUTE[:3]
    for hop in (2, 3):
        one.take(ParcelHeader(WINDOW, 0, hop, False, 4, 0, route, 1, 1, math.nan, False, 4), 0.0)
    run(one, FORWARD)
    assert one.started(Work(0, 3, False))
    (report,) = [effect for effect in one.failed(Work(0, 3, False)) if isinstance(effect, Report)]
    assert (report.passage.hop, report.passage.said) == (2, Said.GAVE_UP) and one.num_visits == 0


def test_the_last_hop_keeps_a_loss_that_counts_though_it_has_no_room_for_its_gradient() -> None:
    one = desk(loss_at_home=False)
    route = ROUTE[:3]
    for hop in (2, 3):
        one.take(ParcelHeader(WINDOW, 0, hop, False, 4, 0, route, 1, 1, math.nan, False, 4), 0.0)
    run(one, FORWARD)
    run(one, Work(0, 3, False))
    assert one.cannot(parcel(backward=True, route=route), 0.0) == (
        Answer.BUSY,
        [],
    )  # it waits: nobody else has the loss


def test_it_is_not_given_up_once_it_counts_or_is_about_to() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    assert one.started(BACKWARD)
    order = GiveUp(WINDOW, 0, 2, True, 0, ROUTE)
    assert said(one.on_give_up(order)) == [Said.HOLDING]
    (back,) = sent(one.finished(BACKWARD, 0))
    one.passed(back)
    effects = one.on_give_up(order)
    assert said(effects) == [Said.HOLDING] and sent(effects) == [back]


def test_the_last_hop_does_not_give_up_a_loss_that_counts() -> None:
    one = desk(loss_at_home=False)
    route = ROUTE[:3]
    loss = Work(0, 3, False)
    for hop in (2, 3):
        one.take(ParcelHeader(WINDOW, 0, hop, False, 4, 0, route, 1, 1, math.nan, False, 4), 0.0)
    run(one, FORWARD)
    order = GiveUp(WINDOW, 0, 2, True, 0, route)
    assert one.started(loss)
    assert said(one.on_give_up(order)) == [Said.HOLDING]
    one.finished(loss, 0, 1.5)
    assert said(one.on_give_up(order)) == [Said.HOLDING]
    assert one.counted == {0: {(0, 3)}}


@pytest.mark.parametrize("told", [0.01, math.nan])
def test_nobody_on_the_way_back_changes_a_loss_that_was_computed_here(told: float) -> None:
    """At home, or at the last hop: by it their steps are judged. Whoever did not compute one passes on what it was told, where anybody asks it."""
    home, last, other = desk(me=0), desk(loss_at_home=False), desk(loss_at_home=False)
    for one, hop, route in ((home, 0, ROUTE), (last, 2, ROUTE[:3])):
        for forward in (hop, len(route)):
            one.take(ParcelHeader(WINDOW, 0, forward, False, 5, 0, route, 1, 1, math.nan, False, 4), 0.0)
            assert one.started(Work(0, forward, False))
            effects = one.finished(Work(0, forward, False), 0, 9.5)
        assert [send.loss for send in sent(effects)] == [9.5]
        one.take(ParcelHeader(WINDOW, 0, hop, True, 0, 0, route, 1, 1, told, False, 4), 0.0)
        assert losses(run(one, Work(0, hop, True))) == [9.5]
    other.take(parcel(), 0.0)
    run(other, FORWARD)
    other.take(structs.replace(parcel(backward=True), loss=9.5), 0.0)
    assert losses(run(other, BACKWARD)) == [9.5]


def test_a_data_node_that_has_not_computed_a_loss_knows_none() -> None:
    home = desk(me=0)
    for backward in (False, True):
        home.take(ParcelHeader(WINDOW, 0, 0, backward, 5, 0, ROUTE, 1, 1, 0.01, False, 4), 0.0)
        effects = run(home, Work(0, 0, backward))
    assert math.isnan(*losses(effects))


def test_a_dropped_hop_changes_the_input() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    answer, effects = one.take(parcel(version=1, route=SHORTER), 0.0)
    assert (answer, effects) == (Answer.TAKEN, [Ready(FORWARD)])
    assert one.take(parcel(), 0.0) == (Answer.UNWANTED, [])  # the older one comes too late
    assert one.take(parcel(backward=True), 0.0) == (Answer.UNWANTED, [])  # and so does its gradient
    run(one, FORWARD)
    assert one.take(parcel(backward=True, version=1, route=SHORTER), 0.0) == (Answer.TAKEN, [Ready(BACKWARD)])
    (back,) = sent(run(one, BACKWARD))
    assert back.hop == 0


def test_a_counted_visit_keeps_its_way_back_until_the_data_node_changes_it() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    (back,) = sent(run(one, BACKWARD))
    one.passed(back)
    other = with_peer(ROUTE, 1, 2)
    _, effects = one.take(parcel(version=1, route=other), 0.0)
    assert [send.peer for send in sent(effects)] == [1]
    effects = one.on_again(Again(WINDOW, 0, 2, True, 0, 1, other), 0.0)
    assert [send.peer for send in sent(effects)] == [2] and said(effects) == [Said.HOLDING]


def test_a_gradient_that_is_on_its_way_is_not_sent_again_the_same_way() -> None:
    """Each question about it would add to what a slow uplink has to carry."""
    one, other = desk(), with_peer(ROUTE, 1, 2)
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    (back,) = sent(run(one, BACKWARD))
    again = Again(WINDOW, 0, 2, True, 0, 0, ROUTE)
    for effects in (
        one.on_again(again, 0.0),
        one.on_again(structs.replace(again, backward=False, until=5), 0.0),
        one.on_give_up(GiveUp(WINDOW, 0, 2, True, 0, ROUTE)),
        one.take(parcel(), 0.0)[1],
        one.take(parcel(backward=True), 0.0)[1],
    ):
        assert said(effects) == [Said.HOLDING] and not sent(effects)
    for ends in (one.unreachable, one.unwanted, one.passed):
        ends(back)
        assert sent(one.on_again(again, 0.0)) == [back]
    (newer,) = sent(one.on_again(structs.replace(again, version=1, route=other), 0.0))
    assert (newer.peer, newer.version) == (2, 1) and not one.wants(back)
    one.passed(back)  # it had left already, and says nothing of the newer one
    assert not sent(one.on_again(again, 0.0))
    one.passed(newer)
    assert sent(one.on_again(again, 0.0)) == [newer]


def test_input_and_gradient_of_a_takeover_wait_for_each_other() -> None:
    for first in (False, True):
        one = desk()
        only_kept = ParcelHeader(WINDOW, 0, 2, False, 2, 1, ROUTE, 1, 1, math.nan, False, 4)
        pair = [only_kept, parcel(backward=True, version=1)]
        assert one.take(pair[first], 0.0) == (Answer.TAKEN, [])
        assert one.take(pair[not first], 0.0) == (Answer.TAKEN, [Ready(BACKWARD)])


def test_open_legs_avoid_the_busy_and_wait_when_all_are() -> None:
    one = desk()
    one.take(parcel(route=with_peer(ROUTE, 3, OPEN)), 0.0)
    (onward,) = sent(run(one, FORWARD))
    assert onward.tried == frozenset()
    (second,) = one.busy(onward)
    assert isinstance(second, Send) and {onward.peer, second.peer} == {5, 6}
    (later,) = one.busy(second)
    assert isinstance(later, Later) and one.wants(later.send)
    (report,) = one.passed(second)
    assert isinstance(report, Report) and report.passage.route[3].peer == second.peer


def opened(one: Desk, microbatch: int) -> Send:
    """What is sent on of a microbatch whose next leg is open."""
    one.take(parcel(microbatch=microbatch, route=with_peer(ROUTE, 3, OPEN)), 0.0)
    (onward,) = sent(run(one, Work(microbatch, 2, backward=False)))
    return onward


def test_open_legs_go_by_speed() -> None:
    one = desk(most_waiting=64, visit_s={5: 3.0, 6: 1.0})
    given = [opened(one, microbatch).peer for microbatch in range(8)]
    assert (given.count(5), given.count(6)) == (2, 6)


def test_open_legs_avoid_whoever_is_away() -> None:
    one = desk(most_waiting=64)
    one.avoid(6)
    away = [opened(one, microbatch) for microbatch in range(4)]
    assert {send.peer for send in away} == {5}
    (later,) = one.busy(away[0])
    assert later == Later(replace(away[0], tried=frozenset()))  # for the other one would not answer
    one.avoid(5)
    assert {opened(one, microbatch).peer for microbatch in range(4, 10)} == {5, 6}  # nobody else is there
    one.passed(away[1])
    assert {opened(one, microbatch).peer for microbatch in range(10, 14)} == {5}  # which was


def test_too_many_forwards_are_refused_as_busy() -> None:
    one = desk()
    for microbatch in range(2):
        assert one.take(parcel(microbatch=microbatch), 0.0)[0] is Answer.TAKEN
    assert one.take(parcel(microbatch=2), 0.0) == (Answer.BUSY, [])
    assert one.answer(parcel(microbatch=1)) is Answer.TAKEN  # it is here already
    assert one.answer(parcel(microbatch=2, backward=True)) is Answer.TAKEN  # backwards never wait


@pytest.mark.parametrize("asked_at", [50.0, None])
def test_leases(asked_at: float | None) -> None:
    one = desk()
    one.take(parcel(), 0.0)
    if asked_at is not None:
        one.on_again(Again(WINDOW, 0, 2, False, 5, 0, ROUTE), asked_at)
        assert one.expire(101.0) == []
    assert one.expire(151.0) == [Forget(0)]
    assert one.num_visits == 0
    for microbatch in (0, 1):  # as if it had never come
        missing = one.on_again(Again(WINDOW, microbatch, 2, False, 5, 0, ROUTE), 151.0)
        assert said(missing) == [Said.MISSING]
    assert one.take(parcel(), 151.0) == (Answer.UNWANTED, [])  # its data node may have gone to another peer for it
    assert said(one.on_give_up(GiveUp(WINDOW, 0, 2, False, 0, ROUTE))) == [Said.GAVE_UP]
    assert one.take(parcel(version=1), 151.0) == (Answer.TAKEN, [Ready(FORWARD)])


def test_what_counts_is_remembered_when_its_lease_runs_out() -> None:
    """Whoever asks hears that its gradient is missing; it is neither counted again nor given up."""
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    (back,) = sent(run(one, BACKWARD))
    assert one.expire(101.0) == [Forget(0)] and one.num_visits == 0 and not one.wants(back)
    for version in (0, 1):
        for backward in (False, True):
            assert one.take(parcel(backward=backward, version=version), 101.0) == (Answer.UNWANTED, [])
            (word,) = one.on_again(Again(WINDOW, 0, 2, backward, 5, version, ROUTE), 101.0)
            assert isinstance(word, Report) and (word.passage.said, word.passage.backward) == (Said.MISSING, True)
            assert word.passage.version == version, "or its data node does not listen"
        assert said(one.on_give_up(GiveUp(WINDOW, 0, 2, False, version, ROUTE))) == [Said.MISSING]
    assert one.expire(900.0) == [] and one.on_landed([0]) == [Forget(0)]


def test_the_last_hop_is_not_done_elsewhere_when_the_lease_of_its_loss_runs_out() -> None:
    """Its loss counts here, and would there: that it lacks the input is no word for its data node then."""
    one, route = desk(loss_at_home=False), ROUTE[:3]
    for hop in (2, 3):
        one.take(ParcelHeader(WINDOW, 0, hop, False, 4, 0, route, 1, 1, math.nan, False, 4), 0.0)
    run(one, FORWARD)
    run(one, Work(0, 3, False))
    one.expire(101.0)
    (word,) = one.on_again(Again(WINDOW, 0, 2, False, 4, 0, route), 101.0)
    assert isinstance(word, Report) and (word.passage.said, word.passage.hop) == (Said.MISSING, 3)
    assert said(one.on_give_up(GiveUp(WINDOW, 0, 2, False, 0, route))) == [Said.MISSING]


def test_what_is_being_computed_is_kept_beyond_its_lease() -> None:
    one = desk()
    one.take(parcel(), 0.0)
    assert one.started(FORWARD) and one.expire(101.0) == []
    assert sent(one.finished(FORWARD, 0)) and one.expire(101.0) == [Forget(0)]


def test_the_way_back_is_that_of_the_loss() -> None:
    """Two ways of a microbatch meet here; the first one reached the loss."""
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(version=1, route=with_peer(ROUTE, 1, 2)), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    one.take(parcel(version=1, route=with_peer(ROUTE, 1, 2)), 0.0)
    (back,) = sent(run(one, BACKWARD))
    assert back.peer == 1


def test_nobody_is_busy_with_what_it_has_counted() -> None:
    """The same input, sent once more over a stream that broke: it need not be waited for."""
    one = desk()
    one.take(parcel(), 0.0)
    run(one, FORWARD)
    one.take(parcel(backward=True), 0.0)
    run(one, BACKWARD)
    for microbatch in (1, 2):
        assert one.take(parcel(microbatch=microbatch), 0.0)[0] is Answer.TAKEN
    assert one.answer(parcel(microbatch=3)) is Answer.BUSY
    assert one.answer(parcel()) is Answer.TAKEN
