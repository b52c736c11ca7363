"""The microbatch by trial: the largest that does not run out of memory, found with real passes.

A forecast (`memory.py`) cannot know a driver's workspaces, fragmentation or what else runs on a card; a trial does: of passes, and of
room for the optimiser's step after them, which cannot be taken back when there is none. That step itself is not tried: what it takes follows from the
shapes (`memory.MemoryForecast.step_bytes`), and in copies of the parameters it would take more. A trial leaves nothing behind: gradients are dropped.
Only what `out_of_memory.is_lack` knows counts as "too large", so that a bug stays a bug. CPUs raise no such error (the system kills the process instead), so there the forecast decides.
"""

from collections.abc import Callable, Sequence

from farflung.training.errors import NotEnoughMemory
from farflung.training.out_of_memory import MAKE_ROOM, is_lack, let_go


def largest_that_fits(
    sizes: Sequence[int],  # descending
    trial: Callable[[int], None],  # runs one step with so many sequences; raises what `is_lack` knows
) -> int:
    """The largest size whose trial succeeds, if all smaller ones do. About log2(len(sizes)) trials.

    Raises NotEnoughMemory when even the smallest fails.
    """
    low, high = 0, len(sizes)  # sizes before `low` failed; sizes[high] succeeded
    while low < high:
        middle = (low + high) // 2
        if _succeeds(trial, sizes[middle]):
            high = middle
        else:
            low = middle + 1
    if low == len(sizes):
        raise NotEnoughMemory(
            f"the device runs out of memory with {sizes[-1]} sequence at a time: {MAKE_ROOM}, or join a swarm with a smaller model"
        )
    return sizes[low]


def _succeeds(trial: Callable[[int], None], size: int) -> bool:
    try:
        trial(size)
    except RuntimeError as error:
        if not is_lack(error):
            raise
    else:
        return True
    let_go()  # or the next has less room
    return False
