"""How far the run is, as one peer hears it: which step is the next one, and whether there will be no more.

A peer knows that itself from the steps that it was in, and from its chain. It hears the rest: a step goes on without whoever is busy, and who was started again has
missed some. Living peers of the newest lives are believed, and of these only those who train; what the dead have said is no news. So that one of three or more decides nothing by
its word:

    the next step    what half of the data nodes say at least: they count the steps, and where there are one or two of them they are believed, as in all else that they decide;
                     or half of the stages, of each by half of its peers, if at least two peers say so, where there are three or more: data nodes that were all started again have
                     missed what all others were in
    a step's number  whoever plans it may say what is the next step by that, and no more than anybody else that trains says: of most stages most peers may have been
                     busy for long, and must not be left out for good because they have not heard. Where nobody else knows of a step, as when all others were started
                     again, whoever does goes back to what they know once its plan was refused (`shared_step`)
    the end          half of the data nodes that train, or have made the last round. They go when they have; then what they were last heard to have counted (`hearsay`)

Everybody says what it believes and not only what it has done itself, so that who comes into a stage does not hold it back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_STEPS
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.roll import Roll


def newest_step(roll: Roll, now: float) -> int:
    """Number of the next step of the pipeline. See the module; never less than what we know ourselves."""
    return max(roll.own_step[1], _believed(roll, now))


def shared_step(roll: Roll, now: float) -> int:
    """The same, but no more than the others let us plan (`may_plan`), by what we hear them say. What somebody says is news only later, so it may be too little."""
    known = (said.step for _, said in _training(roll, now))
    return min(newest_step(roll, now), max(_believed(roll, now), *known, 0))


def _believed(roll: Roll, now: float) -> int:
    """What enough of all say, ourselves included, for everybody to go by it."""
    stage, own = roll.own_step
    by_stage = defaultdict[int, list[int]](list)
    if stage >= 0:
        by_stage[stage].append(own)
    for _, said in _training(roll, now):
        by_stage[said.stage].append(said.step)
    if not by_stage:
        return 0
    said_by_all = sorted(step for steps in by_stage.values() for step in steps)
    by_two = said_by_all[-2] if len(said_by_all) > 2 else said_by_all[-1]
    by_half = _half([_half(steps) for steps in by_stage.values()])
    by_homes = _half(by_stage[0]) if 0 in by_stage else 0
    return max(by_homes, min(by_half, by_two))


def may_plan(step: int, planner: PeerId, roll: Roll, now: float) -> bool:
    """Whether a plan of this peer may have this number."""
    known = (said.step for peer, said in _training(roll, now) if peer != planner)
    return step <= max(newest_step(roll, now), *known, 0)


def finished(
    roll: Roll,
    now: float,
    *,
    own: bool | None,  # whether we have made the last round; None: we are no data node that counts
    complete: Callable[[int], bool],  # whether no steps are left after so many that rounds have counted
) -> bool:
    """Whether there will be no more steps."""
    said = [one.finished for one in roll.counting(now)] + ([] if own is None else [own])
    return 2 * sum(said) >= len(said) if said else complete(roll.hearsay.counted.steps)


def _training(roll: Roll, now: float) -> Iterator[tuple[PeerId, Present]]:
    """Who trains, and what it says of a step that there can be."""
    for peer, entry in roll.entries.items():
        said = entry.present
        if said is None or not said.trains or said.step >= MAX_STEPS or not 0 <= said.stage < roll.stages:
            continue
        if said.life == roll.number(said.stage) and roll.alive(peer, now):
            yield peer, said


def _half(steps: Sequence[int]) -> int:
    """What half of them are at least."""
    return sorted(steps)[len(steps) // 2]
