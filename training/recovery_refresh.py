"""When shadows are refreshed: a pure decision by need, within a budget of bytes.

The budget is a share of what the pipeline sends anyway (activations and their gradients). It fills a bucket with
every step; a refresh takes its bytes out. Only the last-replica alarm may overdraw it; all other refreshes then wait
until the debt is paid. It is for a first copy of what one peer has and nobody else, and for a refresh, before all
others, of what has just come down to one peer: the copy was allowed to rest while there were several. Such a refresh
waits for debts, too, so a peer that comes and goes cannot overdraw the budget by more than a copy. What a new peer gets
when a stage is lost is not in the budget: it must get the stage from somebody, and a shadow is the smallest thing that
it can get.

Who is next: the copy that saves most iterations per byte. With f the chance that a peer is lost in a step,

    of a refresh         f**replicas * setback per step * age * age     it helps until the copy is as old again
    of a first copy      f**replicas * setback without a copy / f       it helps until its holder goes, 1 / f steps

where replicas are the live peers that train the piece. So what one peer has alone comes first, whatever the others'
age, and equal copies take turns. With a second replica and f = 0.003 a refresh is worth 300 times less, and waits until
the copy is `rest_steps` old (digest, 5.5: every outer step, or 50 inner steps at most).

Why stage 0 is to be fresher than others, see `recovery_costs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a swarm gives to shadows: settings of its manifest."""

    share: float = 0.02
    """Bytes of shadows per byte that the pipeline sends."""
    rest_steps: int = 50
    """A shadow of a stage with several replicas is refreshed when it is so old."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0 or self.rest_steps < 1:
            raise ValueError("share is in [0, 1] and rest_steps at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One copy as the schedule sees it."""

    piece: str
    """What it is of, a stage."""
    holder: str
    step: int | None
    """Inner step that it is of; None: the holder has nothing yet."""
    nbytes: int
    """Of its next refresh."""
    replicas: int
    """Live peers that train the piece, at least 1: without any there is nobody to send a refresh."""
    setback_per_step: float
    """Iterations that each step of its age costs when it is needed."""
    missing_setback: float
    """Iterations that a loss costs when nobody has a copy."""
    alarmed: bool = False
    """The piece has come down to its last replica, and the copy is of before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """A refresh to be sent now."""

    kept: Kept
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranked:
    kept: Kept
    age: int | None
    saved: float
    """Iterations per byte."""

    @property
    def alone(self) -> bool:
        """Nobody has it but one peer."""
        return self.kept.replicas == 1 and self.age is None

    @property
    def alarming(self) -> bool:
        """It has just become so that a single peer has what is fresher than this copy."""
        return self.kept.replicas == 1 and self.kept.alarmed


def filled(bucket_bytes: float, pipeline_bytes: int, kept: Sequence[Kept], budget: Budget) -> float:
    """The bucket after a step in which the pipeline sent so much. It holds a refresh of every copy at most."""
    return min(bucket_bytes + budget.share * pipeline_bytes, float(sum(one.nbytes for one in kept)))


def due(
    kept: Sequence[Kept],
    step: int,
    *,
    bucket_bytes: float,  # what the budget allows now; negative is debt
    loss_per_step: float,  # measured chance that a given peer is lost within a step, positive
    budget: Budget,
) -> tuple[list[Due], float]:
    """The refreshes to send now, in order, and what is left in the bucket. Deterministic."""
    found: list[Due] = []
    ranked = _ranked(kept, step, loss_per_step)
    waiting = False
    for one in sorted(ranked, key=lambda one: (not one.alarming, -one.saved, one.kept.piece, one.kept.holder)):
        if not one.alone:
            if one.age is not None and (one.age < 1 or (one.kept.replicas > 1 and one.age < budget.rest_steps)):
                continue
            # the neediest waits for its bytes; smaller ones do not overtake it for ever
            waiting = waiting or (0.0 if one.alarming else one.kept.nbytes) > bucket_bytes
            if waiting:
                continue
        bucket_bytes -= one.kept.nbytes
        found.append(Due(kept=one.kept, why=_why(one)))
    return found, bucket_bytes


def _ranked(kept: Sequence[Kept], step: int, loss_per_step: float) -> list[_Ranked]:
    """With what each saves."""
    ranked = []
    for one in kept:
        age = None if one.step is None else step - one.step
        steps_saved = one.missing_setback / loss_per_step if age is None else one.setback_per_step * age * age
        ranked.append(_Ranked(kept=one, age=age, saved=loss_per_step**one.replicas * steps_saved / one.nbytes))
    return ranked


def _why(one: _Ranked) -> str:
    to = f"{one.kept.piece} to {one.kept.holder}"
    if one.alone:
        return f"{to}: one peer has it alone and nobody a copy; at once, over budget if need be"
    if one.alarming:
        return (
            f"{to}: the copy is {one.age} steps old, and one peer is left that has it; at once, over budget if need be"
        )
    if one.age is None:
        return f"{to}: there is no copy there yet"
    return f"{to}: the copy is {one.age} steps old{', and one peer has it alone' if one.kept.replicas == 1 else ''}"
