"""From silence to a verdict: suspicion, a second opinion, death, and the ways back."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import bus

from farflung.protocol.effects import Effect, Note, Send
from farflung.protocol.membership import (
    ASK_AFTER,
    FORGET_AFTER_S,
    FULL_PACE,
    NUM_WITNESSES,
    SLOWEST_PACE,
    SUSPECT_AFTER,
    VERDICT_AFTER,
    Liveness,
    Membership,
)
from farflung.protocol.messages import Heartbeat, Opinion, Probe

ME, A, B, C, D, E = (bytes([i]) * 32 for i in range(6))
BEAT_S = 2.0
SUSPECT_S, ASK_S, VERDICT_S = SUSPECT_AFTER * BEAT_S, ASK_AFTER * BEAT_S, VERDICT_AFTER * BEAT_S


def beat(*, every_s: float = BEAT_S, **changes: Any) -> Heartbeat:
    return bus.beat(every_s=every_s, **changes)


@pytest.fixture
def members() -> Membership:
    """A, B, C were heard at second 0."""
    made = Membership(ME, BEAT_S)
    for peer in (A, B, C):
        made.heard(peer, 0.0, beat())
    return made


def quiet(members: Membership, target: bytes, start: float, stop: float, step: float = 0.25) -> list[Effect]:
    """Time passes; everybody but the target is heard."""
    effects: list[Effect] = []
    now = start
    while now <= stop:
        for peer in members.peers:
            if peer != target:
                effects += members.heard(peer, now)
        effects += members.tick(now)
        now += step
    return effects


def asked(members: Membership, target: bytes) -> bytes:
    """One of those who were asked about a peer."""
    [first, *_] = members.peers[target].asked or ()
    return first


def events(effects: list[Effect]) -> list[str]:
    return [e.event for e in effects if isinstance(e, Note)]


def liveness(members: Membership, peer: bytes) -> Liveness:
    return members.peers[peer].liveness


def test_silence_is_suspicious_and_suspects_still_count(members: Membership) -> None:
    assert not quiet(members, A, 0.25, SUSPECT_S)
    effects = quiet(members, A, SUSPECT_S + 0.25, SUSPECT_S + 0.25)
    assert events(effects) == ["peer.suspect"]
    assert liveness(members, A) is Liveness.SUSPECT and members.alive(A) and members.dead_for(A, 99.0) == 0.0


def test_others_are_asked_once_before_the_verdict(members: Membership) -> None:
    members.heard(D, 0.0, beat())
    members.heard(E, 0.0, beat())
    suspected = SUSPECT_S + 0.25
    effects = quiet(members, A, 0.25, suspected + VERDICT_S + 0.5)
    probes = [e for e in effects if isinstance(e, Send)]
    assert len(probes) == NUM_WITNESSES and all(e.message == Probe(A) and e.to != A for e in probes)
    assert events(effects) == ["peer.suspect", "peer.dead"]
    assert not members.alive(A)
    assert members.dead_for(A, suspected + VERDICT_S + 10.0) == pytest.approx(10.0, abs=0.5)


def test_a_verdict_takes_as_long_as_it_says(members: Membership) -> None:
    quiet(members, A, 0.25, SUSPECT_S + VERDICT_S)
    assert liveness(members, A) is Liveness.SUSPECT
    quiet(members, A, SUSPECT_S + VERDICT_S, SUSPECT_S + VERDICT_S + 0.75)
    assert liveness(members, A) is Liveness.DEAD


def test_by_the_word_of_others_it_lives(members: Membership) -> None:
    suspected = SUSPECT_S + 0.25
    quiet(members, A, 0.25, suspected + ASK_S + 0.25)
    members.opinion(asked(members, A), A, age_s=0.5, now=suspected + ASK_S + 0.5)
    assert events(members.tick(suspected + ASK_S + 0.75)) == ["peer.alive"]
    assert members.alive(A)


def test_old_news_of_others_do_not_help(members: Membership) -> None:
    suspected = SUSPECT_S + 0.25
    quiet(members, A, 0.25, suspected + ASK_S + 0.25)
    members.opinion(asked(members, A), A, age_s=ASK_S + 1.0, now=suspected + ASK_S + 0.5)
    assert events(quiet(members, A, suspected + ASK_S + 0.5, suspected + VERDICT_S + 0.5)) == ["peer.dead"]


def test_nobody_to_ask() -> None:
    alone = Membership(ME, BEAT_S)
    alone.heard(A, 0.0, beat())
    effects = quiet(alone, A, 0.25, SUSPECT_S + VERDICT_S + 1.0)
    assert events(effects) == ["peer.suspect", "peer.dead"] and not any(isinstance(e, Send) for e in effects)


def test_whom_others_hear_is_unheard_until_we_hear_it_ourselves(members: Membership) -> None:
    quiet(members, A, 0.25, SUSPECT_S + ASK_S + 0.5)
    assert not members.unheard(A), "perhaps nobody hears it"
    now = SUSPECT_S + ASK_S + 0.75
    members.opinion(E, A, 0.1, now)
    assert not members.unheard(A), "it was not asked"
    members.opinion(asked(members, A), A, 0.1, now)
    assert members.unheard(A) and not members.unheard(B) and not members.unheard(E) and not members.unheard(ME)
    quiet(members, A, now, now + SUSPECT_S + 0.5)
    assert members.unheard(A), "a new suspicion changes nothing about what others have said"
    members.heard(A, now + SUSPECT_S + 1.0)
    assert not members.unheard(A)


def test_a_member_never_heard_may_be_well() -> None:
    """A newcomer that does not reach a member had it removed."""
    members = Membership(ME, BEAT_S)
    members.heard(B, 0.0, beat())
    for peer in (A, C):
        members.discover(peer, 0.0)
    assert members.tick(ASK_S, keep=(A,)) == []
    assert members.tick(ASK_S + 0.5, keep=(A,)) == [Send(B, Probe(A))], "who is no member does not matter"
    assert members.tick(ASK_S + 0.75, keep=(A,)) == [], "once"
    members.opinion(asked(members, A), A, 0.5, ASK_S + 1.0)
    assert events(members.tick(ASK_S + 1.25, keep=(A,))) == ["peer.alive"]
    assert members.unheard(A) and members.dead_for(A, 1e6) == 0.0 < members.dead_for(C, 1e6)


def test_hearing_from_it_ends_everything_quietly(members: Membership) -> None:
    quiet(members, A, 0.25, SUSPECT_S + 0.5)
    assert events(members.heard(A, SUSPECT_S + 0.75)) == [], "a false alarm is not worth a line"
    assert liveness(members, A) is Liveness.ALIVE


def test_the_dead_come_back(members: Membership) -> None:
    quiet(members, A, 0.25, SUSPECT_S + VERDICT_S + 1.0)
    assert events(members.heard(A, 50.0)) == ["peer.alive"]
    assert members.alive(A) and members.dead_for(A, 60.0) == 0.0


def test_a_broken_connection_is_a_hint(members: Membership) -> None:
    effects = members.unreachable(A, 1.0, "connection reset")
    assert events(effects) == ["peer.suspect"] and members.alive(A)
    assert members.unreachable(A, 1.5, "again") == []
    effects = quiet(members, A, 1.25, 1.0 + VERDICT_S + 0.5)
    assert events(effects) == ["peer.dead"], "sooner than by silence alone"
    assert members.unreachable(D, 1.0, "never heard of") == []


def test_a_hint_does_not_kill_who_still_speaks(members: Membership) -> None:
    members.unreachable(A, 1.0, "connection reset")
    assert events(members.heard(A, 2.0)) == []
    assert events(quiet(members, A, 2.25, 2.0 + SUSPECT_S)) == []


def test_goodbye(members: Membership) -> None:
    """Whoever leaves stays a voter until it is let go, or falls silent: only then has it left."""
    assert members.goodbye(A, 5.0) == [] and members.goodbye(A, 5.5) == []
    assert members.leaves(A) and members.alive(A) and A in members.known()
    effects = quiet(members, A, 5.25, SUSPECT_S + VERDICT_S + 1.0)
    assert events(effects) == ["peer.suspect", "peer.left"]
    left_at = members.peers[A].since
    assert members.leaves(A) and not members.alive(A) and A not in members.known()
    assert members.dead_for(A, left_at + 10.0) == 10.0
    assert members.heard(A, left_at + 1.0) == [] and not members.alive(A), "stragglers do not bring it back"
    assert events(members.heard(A, left_at + 2.0, beat())) == ["peer.alive"] and not members.leaves(A)


def test_a_heartbeat_says_goodbye_too(members: Membership) -> None:
    members.heard(A, 1.0, beat(state="leaving"))
    assert members.leaves(A)
    members.heard(A, 2.0)
    assert members.leaves(A), "other messages say nothing about it"
    members.heard(A, 3.0, beat(state="training"))
    assert not members.leaves(A)


def test_answers_to_probes(members: Membership) -> None:
    assert members.answer(B, A, 3.0) == [Send(B, Opinion(A, 3.0))]
    assert members.answer(B, D, 3.0) == [], "nothing to say of a stranger"
    members.discover(D, 1.0)
    assert members.answer(B, D, 3.0) == [], "nor of somebody never heard"


def test_discovery() -> None:
    members = Membership(ME, BEAT_S)
    assert members.discover(A, 10.0) and not members.discover(A, 11.0) and not members.discover(ME, 11.0)
    assert not members.alive(A) and members.known() == [A]
    assert members.dead_for(A, 10.0 + SUSPECT_S + VERDICT_S) == 0.0, "it gets the time of a verdict"
    assert members.dead_for(A, 11.0 + SUSPECT_S + VERDICT_S) == pytest.approx(1.0)
    assert members.alive(ME) and members.live([ME, A]) == [ME]


@pytest.mark.parametrize("says_goodbye", [False, True])
def test_the_dead_and_the_departed_are_forgotten(members: Membership, says_goodbye: bool) -> None:
    if says_goodbye:
        members.goodbye(A, 0.1)
    quiet(members, A, 0.25, SUSPECT_S + VERDICT_S + 1.0)
    over_at = members.peers[A].since
    members.heard(C, over_at + FORGET_AFTER_S)
    members.tick(over_at + FORGET_AFTER_S)
    assert A in members.peers
    members.tick(over_at + FORGET_AFTER_S + 0.25)
    assert A not in members.peers and C in members.peers
    assert members.heartbeat(A) is None and not members.leaves(A)


def test_of_many_everybody_greets_more_slowly() -> None:
    members = Membership(ME, BEAT_S)
    paces = []
    for number in range(1, 200):
        members.heard(number.to_bytes(32), 0.0, beat())
        paces.append(members.beat_s)
    assert paces[FULL_PACE - 2] == BEAT_S < paces[FULL_PACE - 1], "we are one of them"
    assert paces[62] == BEAT_S * 64 / FULL_PACE and paces == sorted(paces) and max(paces) == SLOWEST_PACE * BEAT_S
    assert members.verdict_s == SLOWEST_PACE * (SUSPECT_S + VERDICT_S)


def test_it_names_the_moment_when_a_verdict_is_due(members: Membership) -> None:
    """Nobody has to look at it before, nor after each message."""
    members.heard(A, 0.0, beat(every_s=4 * BEAT_S))
    assert not events(members.tick(0.0)) and members.look_at == SUSPECT_S
    for peer in (B, C):
        members.heard(peer, 1.0, beat(every_s=8 * BEAT_S))
    members.tick(SUSPECT_S + 0.01)
    assert members.look_at == 4 * SUSPECT_S
    members.heard(B, 10.0, beat())
    assert members.look_at == 10.0 + SUSPECT_S, "it greets more often from now on"
    members.unreachable(C, 11.0, "the connection broke")
    members.tick(11.0)
    assert members.look_at == 10.0 + SUSPECT_S < 11.0 + 8 * ASK_S
    members.heard(B, 16.0, beat(every_s=8 * BEAT_S))
    members.tick(10.0 + SUSPECT_S + 0.01)
    assert members.look_at == 4 * SUSPECT_S
    members.heard(A, 20.0, beat(every_s=8 * BEAT_S))
    members.tick(4 * SUSPECT_S + 0.01)
    assert members.look_at == 11.0 + 8 * ASK_S, "of a suspect it asks others"
    assert any(isinstance(e, Send) and isinstance(e.message, Probe) for e in members.tick(11.0 + 8 * ASK_S + 0.01))
    assert members.look_at == 11.0 + 8 * VERDICT_S
    members.opinion(asked(members, C), C, 5.0, 35.0)
    assert members.look_at < 35.0, "an answer is looked at"


def test_a_dead_member_is_not_looked_at_again_and_again(members: Membership) -> None:
    quiet(members, A, 0.25, SUSPECT_S + VERDICT_S + 1.0)
    now = members.peers[A].since + 2 * FORGET_AFTER_S
    for peer in (B, C):
        members.heard(peer, now)
    members.tick(now, keep=(A,))
    assert A in members.peers and members.look_at == now + SUSPECT_S


def test_who_is_kept_no_more_is_forgotten_though_nobody_else_is_there() -> None:
    members = Membership(ME, BEAT_S)
    members.expect(A, 0.0)
    members.tick(FORGET_AFTER_S + 1.0, keep=(A,))
    assert A in members.peers
    members.tick(members.look_at + 0.1)
    assert A not in members.peers


def test_who_greets_slowly_is_suspected_later(members: Membership) -> None:
    members.heard(A, 0.0, beat(every_s=4 * BEAT_S))
    assert members.every_s(A) == 4 * BEAT_S and members.every_s(B) == members.every_s(E) == BEAT_S
    assert not events(quiet(members, A, 0.25, 4 * SUSPECT_S))
    assert events(quiet(members, A, 4 * SUSPECT_S + 0.25, 4 * (SUSPECT_S + VERDICT_S))) == ["peer.suspect"]
    assert events(quiet(members, A, 4 * (SUSPECT_S + VERDICT_S) + 0.25, 4 * (SUSPECT_S + VERDICT_S) + 1.0)) == [
        "peer.dead"
    ]


@pytest.mark.parametrize(("says", "counts"), [(1e-9, 1.0), (60.0, SLOWEST_PACE)])
def test_how_rarely_somebody_greets_is_bounded_whatever_it_says(
    says: float, counts: float, members: Membership
) -> None:
    members.heard(A, 0.0, beat(every_s=says))
    assert members.every_s(A) == counts * BEAT_S
    assert not events(quiet(members, A, 0.25, counts * SUSPECT_S))
    assert events(quiet(members, A, counts * SUSPECT_S + 0.25, counts * SUSPECT_S + 0.5)) == ["peer.suspect"]


def test_two_of_the_same_history_decide_the_same() -> None:
    def play() -> list[Any]:
        members = Membership(ME, BEAT_S)
        for peer in (C, A, E, B, D):
            members.heard(peer, 0.0, beat())
        return [members.unreachable(A, 1.0, "reset"), quiet(members, A, 1.25, 20.0), members.known()]

    assert play() == play()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["heard", "beat", "slow beat", "broken", "goodbye", "opinion", "discover", "nothing"]),
            st.sampled_from([A, B, C, D]),
            st.sampled_from([0.1, 1.0, 4.0, 8.0, 700.0]),
        ),
        max_size=40,
    )
)
def test_looking_only_when_somebody_is_due_misses_nothing(story: list[tuple[str, bytes, float]]) -> None:
    lazy, eager = Membership(ME, BEAT_S), Membership(ME, BEAT_S)
    now = 0.0
    for what, peer, passes in story:
        now += passes
        said: list[list[Effect]] = []
        for members in (lazy, eager):
            effects: list[Effect] = []
            match what:
                case "heard":
                    effects += members.heard(peer, now)
                case "beat":
                    effects += members.heard(peer, now, beat())
                case "slow beat":
                    effects += members.heard(peer, now, beat(every_s=4 * BEAT_S))
                case "broken":
                    effects += members.unreachable(peer, now, "reset")
                case "goodbye":
                    effects += members.goodbye(peer, now)
                case "opinion":
                    members.opinion(B, peer, 0.5, now)
                case "discover":
                    members.discover(peer, now)
            if members is eager:
                members._due = -math.inf
            said.append(effects + members.tick(now, keep=(A,)))
        assert said[0] == said[1]
        assert lazy.peers == eager.peers and lazy.news == eager.news
