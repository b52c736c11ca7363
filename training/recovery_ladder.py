"""How a lost stage comes back: one pure decision, by expected cost, with its reason.

What there is to recover from is a list of offers; each says who would send how many bytes over which link. An offer
is tried, and if somebody who takes part in it dies on the way, the next one is. With a its duration, weighted by how
much of the pipeline stands still, p the chance that the try succeeds and s what the recovered stage then lags behind
(`recovery_costs`), all in seconds, trying in the order of

    a / p + s

costs least in expectation (exchange two neighbours in any other order). So usually the rungs come in the order of the
digest's 5.5: live replica, replica behind, shadow, twin, fitted mean, mean, interpolation, random; what the new peer's
own disk has of an earlier life is as good as a replica that is as old, and need not be sent. But the order is a result
and not a rule: over a slow link a shadow of a large stage may cost more than the neighbour mean of near neighbours, and
an old one more than a twin (Unicron argues for costs; digest, 3.17). An offer whose weights would be older than
`MOST_STEPS_BEHIND` is not used.

A live replica serves while another peer of its stage is made; what lies on a disk does not. Without one, routes leave
the stage out until it serves again, unless it is the first one, which is never skipped, or the routes' rules have no
room for it; then everybody waits, and fast rungs gain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from farflung.training.errors import Unrecoverable
from farflung.training.recovery_checkfree import CheckFree, Copy, rule, twin_of
from farflung.training.recovery_costs import SKIP_TAX, Rung, Setbacks, per_second

MOST_STEPS_BEHIND = 10_000
"""An older copy is of another time of the training; what the setback per step says was measured up to 200."""

PATIENT_S = 60.0
"""That each try has at least: where steps take milliseconds a neighbour mean soon costs less than any copy, but links are not known so well."""

OWN_SAID = "what this machine's disk has of an earlier life of the stage"
"""For people, of the founder's own offer."""


class Meanwhile(StrEnum):
    """What routes do until the new peer serves."""

    SERVED = "the replica serves meanwhile"
    ROUTED_AROUND = "routes leave the stage out meanwhile"
    WAITING = "everybody waits meanwhile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One way to get the stage."""

    rung: Rung
    holders: tuple[str, ...] = ()
    """Who sends; any one of several replicas will do, of a mean's two neighbours both must."""
    nbytes: int = 0
    """To the new peer, from all of them."""
    bytes_s: float = math.inf
    """At which they arrive there."""
    steps_behind: int = 0
    """How old the copy is, in inner steps; 0 for what is made of other stages."""
    compute_s: float = 0.0
    """Before the stage serves, besides the transfer: a fit."""

    def __post_init__(self) -> None:
        if self.rung in (Rung.REPLICA, Rung.BEHIND) and not self.holders:
            raise ValueError(f"somebody has a {self.rung}")
        if self.rung is Rung.OWN and (self.holders or self.nbytes):
            raise ValueError("what is on one's own disk nobody sends")
        if self.nbytes < 0 or self.steps_behind < 0 or self.compute_s < 0 or not self.bytes_s > 0:
            raise ValueError("bytes, age and time of an offer are not negative, and its link has a speed")

    @property
    def duration_s(self) -> float:
        """Of a try."""
        return self.nbytes / self.bytes_s + self.compute_s

    @property
    def needed(self) -> int:
        """Peers that must survive it, the new one among them."""
        return 1 + min(1, len(self.holders)) if self.rung.is_exact else 1 + len(self.holders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What happened, and what the swarm has measured."""

    stage: int
    iteration_s: float
    failures_per_hour: float
    """Measured chance that a given peer is lost within an hour, in [0, 1)."""
    may_skip: bool
    """Routes can leave the stage out meanwhile."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.failures_per_hour < 1.0 or self.iteration_s <= 0:
            raise ValueError("failures_per_hour is in [0, 1) and iteration_s positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """An offer and what it is expected to cost."""

    offer: Offer
    setback_iterations: float
    survives: float
    """Chance that a try succeeds."""
    cost_s: float
    """Expected: tries until one succeeds, and the setback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The decision."""

    order: tuple[Priced, ...]
    """What to try, one after the other; the last one needs nobody."""
    expected_s: float
    """Of the whole ladder: each rung's try, and the next one's cost if it fails."""
    stands_still: float
    """Share of the pipeline that does meanwhile: a second of waiting costs so many."""
    why: str
    """For people: what comes first and next, what the whole is expected to cost, by which figures, and what routes do meanwhile."""

    @property
    def first(self) -> Offer:
        """What to do now."""
        return self.order[0].offer

    def patience_s(self, number: int, waited_s: float) -> float:
        """How long the try of offer `number` may take, so long after the first one: until as much has been lost by waiting as the next offer is expected to
        cost, and `PATIENT_S` at least. So links that turn out slow cost at most twice what would have been best, but for that."""
        if number + 1 == len(self.order) or self.stands_still == 0.0:
            return math.inf
        return max(PATIENT_S, self.order[number + 1].cost_s / self.stands_still - waited_s)


def decide(loss: Loss, offers: Sequence[Offer], setbacks: Setbacks | None = None) -> Recovery:
    """What to try in which order. A random stage is always the last resort and need not be offered."""
    setbacks = setbacks or Setbacks()
    usable = [offer for offer in offers if offer.steps_behind <= MOST_STEPS_BEHIND and offer.rung is not Rung.RANDOM]
    served = any(offer.rung is Rung.REPLICA for offer in usable)
    stands_still = 0.0 if served else SKIP_TAX if loss.may_skip else 1.0
    priced = [_price(loss, offer, stands_still, setbacks) for offer in usable]
    ranks = {rung: number for number, rung in enumerate(Rung)}
    priced.sort(key=lambda one: (one.cost_s, ranks[one.offer.rung], one.offer.holders))
    last = _price(loss, Offer(rung=Rung.RANDOM), stands_still, setbacks)
    order = [one for one in priced if one.cost_s <= last.cost_s] + [last]
    expected = 0.0
    for one in reversed(order):
        setback_s = one.setback_iterations * loss.iteration_s
        tried = stands_still * one.offer.duration_s
        expected = tried + one.survives * setback_s + (1.0 - one.survives) * expected
    meanwhile = Meanwhile.SERVED if served else Meanwhile.ROUTED_AROUND if loss.may_skip else Meanwhile.WAITING
    return Recovery(
        order=tuple(order),
        expected_s=expected,
        stands_still=stands_still,
        why=_why(loss, order, expected, meanwhile),
    )


def rebuilt(
    stage: int,
    num_stages: int,
    lost: frozenset[int],  # stages without any peer, `stage` among them
    peer_of: Sequence[str],  # by stage: who would send its weights; of lost stages nobody is asked
    *,
    weights_nbytes: Sequence[int],  # by stage, of what comes to have its weights
    bytes_s: Sequence[float],  # by stage, at which its weights arrive here
    swaps: bool,  # CheckFree+'s order is on, so that end stages have twins
    boundary_nbytes: int | None = None,  # of cached activations on both sides; None: there are none
    fit_s: float = 0.0,
    rule_only: bool = False,  # what CheckFree has no rule for, nobody offers
) -> list[Offer]:
    """The offers that other stages can make: twin or mean, fitted if activations are there, and interpolation for adjacent losses."""

    def offer(rung: Rung, stages: Sequence[int], more_nbytes: int = 0, compute_s: float = 0.0) -> Offer:
        """Of the weights of these, which come one after the other."""
        nbytes = sum(weights_nbytes[other] for other in stages)
        seconds = sum(weights_nbytes[other] / bytes_s[other] for other in stages)
        return Offer(
            rung=rung,
            holders=tuple(peer_of[other] for other in stages),
            nbytes=nbytes + more_nbytes,
            bytes_s=nbytes / seconds if seconds else math.inf,
            compute_s=compute_s,
        )

    found: list[Offer] = []
    try:
        how = rule(CheckFree(plus=swaps), stage, num_stages, lost)
    except Unrecoverable:
        how = None
    if isinstance(how, Copy):
        rung = Rung.TWIN if swaps and twin_of(stage, num_stages) == how.of else Rung.INTERPOLATION
        found.append(offer(rung, [how.of]))
    elif how is not None:
        both = [how.before, how.after]
        found.append(offer(Rung.MEAN, both))
        if boundary_nbytes is not None:
            found.append(offer(Rung.FITTED, both, boundary_nbytes, fit_s))
    nearest = [
        max((other for other in range(stage) if other not in lost), default=None),
        min((other for other in range(stage + 1, num_stages) if other not in lost), default=None),
    ]
    there = [other for other in nearest if other is not None]
    if how is None and there and not rule_only:
        found.append(offer(Rung.INTERPOLATION, there))
    return found


def _price(loss: Loss, offer: Offer, stands_still: float, setbacks: Setbacks) -> Priced:
    survives = math.exp(-offer.needed * per_second(loss.failures_per_hour) * offer.duration_s)
    setback = setbacks.iterations(
        offer.rung, stage=loss.stage, steps_behind=offer.steps_behind, failures_per_hour=loss.failures_per_hour
    )
    # a try that has no chance at all is endless, not an error
    tries = stands_still * offer.duration_s / survives if survives > 0 else math.inf
    return Priced(offer=offer, setback_iterations=setback, survives=survives, cost_s=tries + setback * loss.iteration_s)


def _why(loss: Loss, order: Sequence[Priced], expected_s: float, meanwhile: Meanwhile) -> str:
    chosen = order[0]
    offer = chosen.offer
    said = f"stage {loss.stage}: {OWN_SAID if offer.rung is Rung.OWN else offer.rung}"
    if offer.holders:
        said += f" from {' and '.join(offer.holders)}"
    if offer.steps_behind:
        said += f", {offer.steps_behind} steps old"
    if offer.nbytes:
        said += f", {offer.nbytes / 1e6:.3g} MB in {offer.nbytes / offer.bytes_s:.3g} s"
    said += f", expected to cost {chosen.cost_s:.3g} s ({chosen.setback_iterations:.3g} iterations behind)"
    if len(order) > 1:
        said += f"; next {order[1].offer.rung}, {order[1].cost_s:.3g} s; whatever fails, {expected_s:.3g} s in all"
    said += f"; reckoned with {100 * loss.failures_per_hour:.3g} % failures per peer and hour and {loss.iteration_s:.3g} s per iteration"
    return f"{said}; {meanwhile}"
