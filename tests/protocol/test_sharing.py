"""Rounds go without whom they gain by leaving out, and with everybody else."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.keys import PeerId
from farflung.protocol.sharing import Contender, Link, leave_out, seconds_of, shares_of

NBYTES = 1e6
LAP_S = 8.0


def ids(number: int) -> list[PeerId]:
    return [bytes([i]) * 32 for i in range(1, number + 1)]


def link(up: float, down: float = 0.0) -> Link:
    return Link(up_bytes_per_s=up, down_bytes_per_s=down)


def swarm(ups: list[float], *, speed: float = 1000.0, laps: int = 1) -> dict[PeerId, Contender]:
    """Those with less than 1 MB/s have so many laps to bring."""
    return {
        peer: Contender(link=link(up), tokens_per_s=speed, laps=laps if up < 1e6 else 1)
        for peer, up in zip(ids(len(ups)), ups, strict=True)
    }


def seconds(links: dict[PeerId, Link], num_members: int, below: float = math.inf) -> float:
    shares = shares_of(links, num_members)
    return seconds_of(links, shares, num_members, NBYTES, below_bytes_per_s=below)


def tokens_per_s(some: dict[PeerId, Contender], num_members: int, hidden_s: float) -> float:
    """What all who contribute bring, over the time from round to round."""
    stands = max(0.0, seconds({p: one.link for p, one in some.items()}, num_members) - hidden_s)
    return sum(one.tokens_per_s * one.laps * LAP_S for one in some.values()) / (LAP_S + stands)


def test_shares_let_links_finish_together_and_say_when() -> None:
    def linked(ups: list[float]) -> dict[PeerId, Link]:
        return {p: link(up) for p, up in zip(ids(len(ups)), ups, strict=True)}

    assert list(shares_of(linked([1e5, 1e5]), 2).values()) == pytest.approx([0.5, 0.5])
    assert seconds(linked([1e5, 1e5]), 2) == pytest.approx(5.0)
    thin = linked([1e6, 1e6, 1e6, 1e5])
    assert list(shares_of(thin, 4).values())[3] == pytest.approx(0.0, abs=0.05)
    assert seconds(thin, 4) == seconds(thin, 4, below=5e5) == pytest.approx(10.0, rel=0.05)
    assert seconds(thin, 4, below=5e4) == 0.0, "all are faster"
    assert seconds(linked([0.0, 0.0]), 2) == 0.0, "nobody knows"
    assert seconds({ids(2)[0]: link(1e6, 1e4), ids(2)[1]: link(1e6)}, 2) > 1.0, "a narrow downlink"


@given(
    st.lists(st.sampled_from([0.0, 1e3, 1e4, 5e4, 1e5, 1.4e5, 1e6]), max_size=7),
    st.lists(st.sampled_from([0.0, 10.0, 1000.0, 3000.0]), min_size=7, max_size=7),
    st.lists(st.integers(1, 9), min_size=7, max_size=7),
    st.sampled_from([0.0, 5.0, 100.0]),
)
def test_who_is_left_out_is_slower_than_most_and_known_to_be(
    ups: list[float], speeds: list[float], laps: list[int], hidden_s: float
) -> None:
    known = {
        peer: Contender(link=link(up), tokens_per_s=speed, laps=brings)
        for peer, up, speed, brings in zip(ids(len(ups)), ups, speeds, laps, strict=False)
    }
    out, why = leave_out(known, NBYTES, lap_s=LAP_S, hidden_s=hidden_s)
    assert bool(out) == bool(why) and 2 * len(out) <= len(known)
    rates = sorted(one.link.up_bytes_per_s for one in known.values() if one.link.up_bytes_per_s > 0.0)
    for peer in out:
        assert known[peer].tokens_per_s > 0.0
        assert 0.0 < known[peer].link.up_bytes_per_s < rates[len(rates) // 2]
    if known and seconds({p: one.link for p, one in known.items()}, len(known)) <= hidden_s:
        assert not out, "training hides it"


@pytest.mark.parametrize("hidden_s", [0.0, 3.0])
@pytest.mark.parametrize("ups", [[1e6, 1e6, 1e6, 1e5], [1e6, 1e6, 1e6, 5e4, 1e5], [1e6] * 5 + [2e5] * 2, [1e6] * 4])
@pytest.mark.parametrize("laps", [1, 2, 3, 9])
def test_the_swarm_trains_most_tokens_with_the_choice(ups: list[float], laps: int, hidden_s: float) -> None:
    known = swarm(ups, laps=laps)
    slow = [peer for peer, one in known.items() if one.link.up_bytes_per_s < 1e6]

    def worth(out: frozenset[PeerId]) -> float:
        return tokens_per_s({p: one for p, one in known.items() if p not in out}, len(known), hidden_s)

    out, _ = leave_out(known, NBYTES, lap_s=LAP_S, hidden_s=hidden_s)
    others = [frozenset(some) for number in range(len(slow) + 1) for some in combinations(slow, number)]
    assert worth(out) == max(worth(some) for some in others)


def test_a_link_that_lacks_a_little_comes_with_more_and_one_that_lacks_much_never() -> None:
    def out(up: float, laps: int) -> bool:
        known = swarm([1e6] * 4 + [up], laps=laps)
        return ids(5)[4] in leave_out(known, NBYTES, lap_s=LAP_S, hidden_s=7.0)[0]

    assert [out(1e5, laps) for laps in (1, 2, 3)] == [True, False, False], (
        "3 s of 10 are not hidden: 1.5 laps of a peer"
    )
    assert [out(1e4, laps) for laps in (1, 2, 3)] == [True, True, True]
    assert not out(7e5, 1) and not out(1.5e5, 1)


def test_while_nobody_knows_how_long_a_lap_is_nobody_is_left_out() -> None:
    assert leave_out(swarm([1e6] * 3 + [1.0]), NBYTES, lap_s=0.0, hidden_s=0.0) == (frozenset(), "")


def test_the_reason_has_names_and_figures() -> None:
    out, why = leave_out(swarm([1e6] * 3 + [1e4]), NBYTES, lap_s=LAP_S, hidden_s=0.0)
    assert out == {ids(4)[3]}
    assert why == "without 040404040404: sending takes 100 s, and all train 2,667 tokens per second instead of 296"
    assert (
        "and 2 more: sending takes 100 s"
        in leave_out(swarm([1e6] * 7 + [1e4] * 6), NBYTES, lap_s=LAP_S, hidden_s=0.0)[1]
    )
