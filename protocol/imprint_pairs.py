"""Which of the activations that its neighbours remember a lost stage is made by: pairs of an input and an output of one microbatch.

A neighbour keeps what it saw last, and for some that is of long ago: they were in no route to the stage since. What the stage did then is not what was lost. A good copy, one step old, had on
pairs of the run's first steps 6.4 times the error of leaving the stage out, and on those of its last steps 0.02 of it (docs/experiments.md). So the newest are chosen, and none that are far older
than what the run has reached beside them, though there be fewer than could be fetched.

What is far: a stage changes by its last steps beside all that it has had. After 600 steps a copy 50 steps old has a misfit of 0.2, one of 200 steps 0.4 (`training/recovery_fit.py`).

Where all are far older, whoever remembers the last steps is lost as well. The newest are chosen all the same, for what is made of other stages comes nearer to the lost one when it is fitted to what that once
did; but they judge nobody. A good copy that they refuse is lost for good, and a bad one that nobody refuses is found out by the loss, at which data nodes look for the first steps of each new life
(`training/recovery_trial.py`). The run may also have gone on without the stage, where routes may leave it out, and then its last pairs are right, however old: they look the same, so it is tried by the loss
alone then, too.

Numbers of steps are what neighbours say, and a wrong one does no harm:

* beyond what the run has reached it counts for nothing. It is no fault either: who says it may know of a step of which we have not heard;
* both halves of a pair must be of one step, so a wrong number meets no other half, and that pair is missing;
* who says that it has both halves may have made them up. Its pairs do not count while there is one of which two peers have a half each. Only of the second of two stages all are remembered by one peer, a data
  node: one that lies can take all places, as it could in any order of what peers say.

What the run has reached is what peers that train say, as for the numbers of steps (`progress.newest_step`). Where they say far too much, all pairs look old, and the trial by the loss is left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.protocol.headers import ImprintKey
from farflung.protocol.keys import PeerId

PAIRS = 4
"""As many as are chosen."""

FAR = 8
"""Far older is what lacks more than this part of the run's steps."""

NEAR_STEPS = 2
"""That are never too many to lack: the step in which a stage is lost may not have brought any whole pair."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Who has the input and the output of a microbatch."""

    key: ImprintKey
    before: PeerId
    after: PeerId


@dataclass(frozen=True, slots=True)
class Choice:
    """See `choose`."""

    pairs: tuple[Halves, ...]
    """The newest first."""
    judges: bool
    """Whether they may say what is no copy of the stage."""


def choose(
    inputs: Mapping[ImprintKey, Sequence[PeerId]],  # by microbatch, who says that it has what went into the stage
    outputs: Mapping[ImprintKey, Sequence[PeerId]],  # and what came out of it
    reached: int,  # the next step of the run
) -> Choice:
    """See the module."""
    whole = [_halves(key, inputs[key], outputs[key]) for key in inputs.keys() & outputs.keys() if key.step <= reached]
    whole = [pair for pair in whole if pair.before != pair.after] or whole
    near = [pair for pair in whole if not _is_far(pair.key.step, reached)]
    newest = max((pair.key.step for pair in whole), default=0)
    chosen = near or [pair for pair in whole if not _is_far(pair.key.step, newest)]
    chosen.sort(key=lambda pair: (-pair.key.step, pair.key))
    return Choice(tuple(chosen[:PAIRS]), judges=bool(near))


def _is_far(step: int, reached: int) -> bool:
    return reached - step > max(NEAR_STEPS, reached // FAR)


def _halves(key: ImprintKey, before: Sequence[PeerId], after: Sequence[PeerId]) -> Halves:
    """Of two peers, where there are two."""
    apart = ((one, other) for one in before for other in after if one != other)
    one, other = next(apart, (before[0], after[0]))
    return Halves(key, one, other)
