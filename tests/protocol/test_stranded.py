"""When a chain counts as one that has lost its quorum: only after long without one, and never for what a quorum hears."""

from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.keys import short
from farflung.protocol.lives import NO_QUORUM_AFTER, STARTING_S
from farflung.protocol.quorum import is_quorum
from farflung.protocol.stranded import Stranded

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
BEAT_S = 2.0
LONG_S = NO_QUORUM_AFTER * BEAT_S


def test_it_takes_long_and_ends_at_once() -> None:
    chain = Stranded(BEAT_S)
    chain.look((A, B), [A, B], 0.0, swarm_s=0.0)
    chain.look((A, B), [B], LONG_S, swarm_s=0.0)
    assert not chain.reason
    chain.look((A, B), [B], LONG_S + 0.1, swarm_s=0.0)
    assert chain.reason == f"no quorum: 1 of 2 members reachable; {short(A)} must come back"
    chain.look((A, B), [A, B], LONG_S + 1.0, swarm_s=0.0)
    assert not chain.reason
    chain.look((A, B), [B], 2 * LONG_S, swarm_s=0.0)  # the time begins anew
    assert not chain.reason


def test_the_first_of_two_goes_on_alone() -> None:
    chain = Stranded(BEAT_S)
    for now in (0.0, LONG_S, 3 * STARTING_S):
        chain.look((A, B), [A], now, swarm_s=0.0)
        assert not chain.reason


def test_one_that_was_just_started_with_nobody_waits_longer() -> None:
    chain = Stranded(BEAT_S)
    chain.look((A, B, C), [C], 100.0, swarm_s=0.0)
    chain.look((A, B, C), [C], 100.0 + STARTING_S, swarm_s=0.0)
    assert not chain.reason
    chain.look((A, B, C), [C], 100.1 + STARTING_S, swarm_s=0.0)
    assert "1 of 3 members reachable" in chain.reason
    assert STARTING_S > LONG_S


def test_one_that_was_just_started_into_a_running_swarm_waits_no_longer_than_others() -> None:
    """Be that known at its first look or later."""
    chain = Stranded(BEAT_S)
    chain.look((A, B, C), [C], 100.0, swarm_s=0.0)
    chain.look((A, B, C), [C], 100.0 + LONG_S, swarm_s=STARTING_S + BEAT_S)
    assert not chain.reason
    chain.look((A, B, C), [C], 100.1 + LONG_S, swarm_s=STARTING_S + BEAT_S)
    assert "1 of 3 members reachable" in chain.reason


@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.sets(st.sampled_from((A, B, C)))), max_size=40))
def test_nobody_is_stranded_within_that_time_of_a_quorum(looks: list[tuple[float, set[bytes]]]) -> None:
    chain, now, since = Stranded(BEAT_S), 0.0, 0.0
    chain.look((A, B, C), [A, B, C], now, swarm_s=0.0)
    for seconds, live in looks:
        now += seconds
        since = now if is_quorum((A, B, C), live) else since
        chain.look((A, B, C), sorted(live), now, swarm_s=0.0)
        assert bool(chain.reason) == (now > since + LONG_S)
