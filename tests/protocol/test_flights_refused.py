"""Microbatches whose hop was given up by a peer that those before and after it, or the data node, believe to have it."""

import math

import pytest
from tests.protocol.pipeline_lab import PATIENCE, WINDOW, PipelineLab
from tests.protocol.test_flights import STAGES, WAY, check, columns, in_flight

from farflung.protocol.desk import Report, Send
from farflung.protocol.flights import MOST_VERSIONS
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Passage, Said
from farflung.protocol.route import OPEN, Leg, with_peer
from farflung.protocol.visit import Work

FORWARD = Work(0, 1, False)


class FullLab(PipelineLab):
    """The parcel for hop 1 comes a second time when something else is begun, as over another stream, and what it makes peer 1 do again fails."""

    forwards = 0

    def again(self) -> None:
        header = ParcelHeader(WINDOW, 0, 1, False, 5, 0, WAY, 1, 1, math.nan, False, 4)
        self._at(1, self.desks[1].take(header, self.now)[1])

    def _computed(self, peer: int, work: Work) -> None:
        self.forwards += peer == 1 and work == FORWARD
        if self.forwards < 2 or peer != 1 or work != FORWARD:
            super()._computed(peer, work)
            return
        self._computing.discard(peer)
        self._at(peer, self.desks[peer].failed(work))
        self._compute(peer)


@pytest.mark.parametrize("loss_at_home", [True, False])
@pytest.mark.parametrize("when", [Work(0, 2, False), Work(0, 3, False), Work(0, 4, False), Work(0, 3, True)], ids=str)
def test_who_sends_a_gradient_to_a_peer_that_has_given_up_since_is_not_lost_for_that(
    when: Work, loss_at_home: bool
) -> None:
    def happens(lab: PipelineLab, peer: int, work: Work, now: str) -> None:
        if (work, now) == (when, "started"):
            lab._later(0.01, lab.again)

    lab = FullLab(1, STAGES, columns(1), loss_at_home=loss_at_home, happens=happens)
    assert columns(1)[0][0][1] == WAY
    lab.run()
    check(lab)
    assert lab.forwards == 2 and list(lab.flights.losses) == [0] and [note.what for note in lab.notes] == ["rebound"]
    assert {hop: lab.counted()[0, hop] for hop in (1, 2)} == {1: [2], 2: [3]}
    assert lab.now < 40.0


@pytest.mark.parametrize("backward", [False, True])
def test_nobody_is_lost_where_the_word_that_there_was_no_room_is(backward: bool) -> None:
    class Lost(PipelineLab):
        words = 0

        def _take(self, send: Send, header: ParcelHeader, tensor: tuple[int, ...]) -> object:
            if self.words or send.peer != 3 or send.backward != backward:
                return super()._take(send, header, tensor)
            answer, effects = self.desks[3].cannot(header, self.now)
            self.words += 1
            self._at(3, [effect for effect in effects if not isinstance(effect, Report)])
            return answer

    lab = Lost(1, STAGES, columns(1))
    lab.run()
    check(lab)
    assert lab.words == 1 and list(lab.flights.losses) == [0] and [note.what for note in lab.notes] == ["rebound"]
    assert lab.now < 40.0


def test_a_peer_that_its_sender_has_chosen_may_give_up_before_its_sender_tells_of_it() -> None:
    """Else its word, which comes once, would mean nothing, and deadlines had to find out."""
    planned = tuple(Leg(leg.stage, leg.peer if leg.stage == 0 else OPEN) for leg in WAY)
    flights = in_flight(0, way=planned)
    flights.heard(1, Passage(WINDOW, 0, 1, False, Said.GAVE_UP, 0, with_peer(planned, 1, 1), math.nan), 1.0)
    flight = flights._flights[0]
    assert (flight.version, flight.route[1].peer) == (1, 2)


def test_a_peer_that_gives_up_over_and_over_what_has_left_it_holds_up_no_step() -> None:
    flights, now = in_flight(3, backward=False), 0.0
    words = 0
    while not flights.done and words < 200:
        now, words = now + PATIENCE.answer_s / 2, words + 1
        flights.heard(1, Passage(WINDOW, 0, 1, False, Said.GAVE_UP, 0, WAY, math.nan), now)
        flights.tick(now)
    assert MOST_VERSIONS < words < 100, "nobody else says a word, and the step is over all the same"
