"""How a round is shared out: who reduces how much, how long sending takes, and whom a round does without.

All of it follows from what members say of their links. Part owners' shares are such that all links finish together (`partition`). But one
link may be so slow that, whatever the shares are, its contribution alone takes longer than all the rest. What training hides of that costs
nobody anything; for what is left of it all others stand. So a round is made of those members with whom the swarm trains most:

    tokens that they bring  /  (time of a lap  +  what sending takes beyond what is hidden)

A member brings what it trains in a lap, and a slow one what it has trained since a round last counted it, as far as its samples (`window_rounds`) and
the last rounds (`settings.RECENT_ROUNDS`) tell: a link that lacks a little comes into every second round or third, with as much more to weigh. One that lacks so much that all its
samples are not worth the wait never does: its peer is told so, and stands once they are used up, and not the others. Only links clearly slower
than the typical one are looked at, and nobody whose link or speed is not known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from farflung.protocol import partition
from farflung.protocol.keys import PeerId, names_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What is known of a member's link."""

    up_bytes_per_s: float
    """0: not known, as for the others."""
    down_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A member that trains, and its link."""

    link: Link
    tokens_per_s: float
    """0: not known."""
    laps: int
    """That it has to bring when the next round is due: 1 when the last round counted it."""


def shares_of(
    links: Mapping[PeerId, Link],  # of the contributors
    num_members: int,  # who get the mean
) -> dict[PeerId, float]:
    """Of the vector, for each owner, such that all links finish together as far as they are known; they sum to 1."""
    ups, downs = _ups_and_downs(links, num_members)
    return dict(zip(links, partition.fractions(ups, num_members, downs), strict=True))


def seconds_of(
    links: Mapping[PeerId, Link],  # of the contributors
    shares: Mapping[PeerId, float],
    num_members: int,
    nbytes: float,  # of the whole vector, encoded
    *,
    below_bytes_per_s: float = math.inf,  # of uplinks: others are left aside
) -> float:
    """That the slowest known link takes for one half of the butterfly; 0 when none is known."""
    _, downs = _ups_and_downs(links, num_members)
    narrow = {p: rate for p, rate in zip(links, downs, strict=True) if rate > 0.0}
    rates = {p: link.up_bytes_per_s for p, link in links.items() if 0.0 < link.up_bytes_per_s < below_bytes_per_s}
    into_s = _transfer_seconds(nbytes, shares, narrow, len(links))
    return max(into_s, _transfer_seconds(nbytes, shares, rates, num_members))


def _ups_and_downs(links: Mapping[PeerId, Link], num_members: int) -> tuple[list[float], list[float]]:
    """Bytes/s that count: uplinks with the unknown ones and the usual noise levelled, downlinks where they are narrow."""
    ups = partition.levelled([link.up_bytes_per_s for link in links.values()])
    return ups, partition.narrow([link.down_bytes_per_s for link in links.values()], ups, num_members)


def leave_out(
    contenders: Mapping[PeerId, Contender],  # who could contribute
    nbytes: float,  # of the whole vector, encoded
    *,
    lap_s: float,  # from round to round, while nobody stands
    hidden_s: float,  # of a round, behind training
) -> tuple[frozenset[PeerId], str]:
    """Those without whom the swarm trains more, and a sentence that says why; empty, when there is nobody."""
    rates = {p: one.link.up_bytes_per_s for p, one in contenders.items()}
    slow = partition.slow(list(rates.values()))
    slowest = sorted(
        (p for p, is_slow in zip(contenders, slow, strict=True) if is_slow and contenders[p].tokens_per_s > 0.0),
        key=lambda p: (rates[p], p),
    )
    if not slowest or lap_s <= 0.0:
        return frozenset(), ""

    def tokens_per_s(number: int) -> float:
        """Without so many."""
        out = set(slowest[:number])
        rest = {p: one for p, one in contenders.items() if p not in out}
        links = {p: one.link for p, one in rest.items()}
        sending_s = seconds_of(links, shares_of(links, len(contenders)), len(contenders), nbytes)
        speed = sum(one.tokens_per_s * (one.laps if p in slowest else 1) for p, one in rest.items())
        return speed * lap_s / (lap_s + max(0.0, sending_s - hidden_s))

    speeds = [tokens_per_s(number) for number in range(len(slowest) + 1)]
    number = speeds.index(max(speeds))
    if number == 0:
        return frozenset(), ""
    sending_s = nbytes / rates[slowest[0]]
    why = f"without {names_of(slowest[:number])}: sending takes {sending_s:.3g} s, and all train {speeds[number]:,.0f} tokens per second instead of {speeds[0]:,.0f}"
    return frozenset(slowest[:number]), why


def _transfer_seconds(
    nbytes: float,  # of the whole vector
    shares: Mapping[PeerId, float],  # of it, that each owner reduces
    bytes_per_s: Mapping[PeerId, float],  # of the links that are known
    num_others: int,  # with whom an owner shares its part, itself included: who gets its means, or sends it contributions
) -> float:
    """Seconds the slowest of these uplinks, or of these downlinks, needs for one half of the butterfly; 0 for none."""
    slowest = 0.0
    for owner, rate in bytes_per_s.items():
        mine = shares.get(owner, 0.0)
        slowest = max(slowest, max(1.0 - mine, mine * (num_others - 1)) * nbytes / rate)
    return slowest
