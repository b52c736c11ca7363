"""How much of a model a call of its node goes through, by what it is given: of its fragments those that a round moves."""

from collections.abc import Callable, Sequence

from farflung.compression.unreduced import num_decoded
from farflung.protocol.chain import RoundResult
from farflung.sims.toy import VirtualDoor

Seconds = Callable[[str, float], float]
"""What a call takes, by the name of the function and the share of all parameters that it goes through."""


def share_of(name: str, args: Sequence[object], numel: int) -> float:
    """Of `numel` parameters; 1 for a call that is not told which: it goes through all of them, or through none."""
    match name, args:
        case "offer" | "offered_gradient", (int() as start, int() as stop):
            moved = stop - start
        case "apply", (updates, *_) if isinstance(updates, Sequence):
            moved = sum(stop - start for start, stop, _ in updates)
        case "decode", (RoundResult() as result, dict() as means, *_):
            moved = sum(num_decoded(mean) * (result.parts[k].stop - result.parts[k].start) for k, mean in means.items())
        case _:
            return 1.0
    return moved / numel


class LearnersDoor(VirtualDoor):
    """Of a node with a model of so many parameters."""

    def __init__(self, seconds: Seconds, numel: int) -> None:
        super().__init__(lambda name: seconds(name, 1.0))
        self._of_share = seconds
        self._numel = numel

    def _takes(self, name: str, args: Sequence[object]) -> float:
        return self._of_share(name, share_of(name, args, self._numel))
