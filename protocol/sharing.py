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

from collections.abc import Mapping
from dataclasses import dataclass

from farflung.protocol import partition
from farflung.protocol.keys import PeerId, short


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Who reduces how much of a round."""

    fractions: Mapping[PeerId, float]
    """Of the vector, by owner; they sum to 1."""
    seconds: float
    """That the slowest known link takes for one half of the butterfly; 0 when none is known."""
    slow_s: float
    """The same of links that are not fast (`Settings.fast_bytes_per_s`)."""


def share_out(
    links: Mapping[PeerId, Link],  # of the contributors
    num_members: int,  # who get the mean
    nbytes: float,  # of the whole vector, encoded
    fast_bytes_per_s: float,
) -> Share:
    """Shares by which all links finish together, as far as they are known."""
    owners = list(links)
    ups = partition.levelled([links[p].up_bytes_per_s for p in owners])
    downs = partition.narrow([links[p].down_bytes_per_s for p in owners], ups, num_members)
    shares = dict(zip(owners, partition.fractions(ups, num_members, downs), strict=True))
    rates = {p: link.up_bytes_per_s for p, link in links.items() if link.up_bytes_per_s > 0.0}
    slow = {p: rate for p, rate in rates.items() if rate < fast_bytes_per_s}
    narrow = {p: rate for p, rate in zip(owners, downs, strict=True) if rate > 0.0}
    into_s = _transfer_seconds(nbytes, shares, narrow, len(owners))
    return Share(
        fractions=shares,
        seconds=max(into_s, _transfer_seconds(nbytes, shares, rates, num_members)),
        slow_s=max(into_s, _transfer_seconds(nbytes, shares, slow, num_members)),
    )


def leave_out(
    contenders: Mapping[PeerId, Contender],  # who could contribute
    nbytes: float,  # of the whole vector, encoded
    *,
    lap_s: float,  # from round to round, while nobody stands
    hidden_s: float,  # of a round, behind training
) -> tuple[frozenset[PeerId], str]:
    """Those without whom the swarm trains more, and a sentence that says why; empty, when there is nobody."""
    rates = partition.levelled([one.link.up_bytes_per_s for one in contenders.values()])
    ups = dict(zip(contenders, rates, strict=True))
    typical = sorted(rates)[len(rates) // 2] if rates else 0.0
    slowest = [
        p
        for p in sorted(ups, key=lambda p: (ups[p], p))
        if ups[p] < typical and contenders[p].link.up_bytes_per_s > 0.0 and contenders[p].tokens_per_s > 0.0
    ]
    if not slowest or lap_s <= 0.0:
        return frozenset(), ""

    def tokens_per_s(number: int) -> float:
        """Without so many."""
        out = set(slowest[:number])
        rest = {p: one for p, one in contenders.items() if p not in out}
        share = share_out({p: one.link for p, one in rest.items()}, len(contenders), nbytes, fast_bytes_per_s=0.0)
        speed = sum(one.tokens_per_s * (one.laps if p in slowest else 1) for p, one in rest.items())
        return speed * lap_s / (lap_s + max(0.0, share.seconds - hidden_s))

    speeds = [tokens_per_s(number) for number in range(len(slowest) + 1)]
    number = speeds.index(max(speeds))
    if number == 0:
        return frozenset(), ""
    names = ", ".join(short(p) for p in slowest[:number][:4]) + (f" and {number - 4} more" if number > 4 else "")
    sending_s = nbytes / contenders[slowest[0]].link.up_bytes_per_s
    why = f"without {names}: sending takes {sending_s:.3g} s, and all train {speeds[number]:,.0f} tokens per second instead of {speeds[0]:,.0f}"
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
