"""Making a drawing smaller: choices (`choices`) are taken back or lowered as long as what they are for still comes out.

Smaller is what has fewer choices that are not 0, and of two with as many the one with the lower numbers. First many are taken back at once, half of them, then a
quarter, down to each alone (Zeller and Hildebrandt's ddmin, TSE 2002), and then each is lowered by halving; until nothing more works, or as often as
one is willing to try. Takes no sets and no clock: the same choices and the same answers make the same result.
"""

from collections.abc import Callable, Mapping

Try = Callable[[Mapping[str, int]], Mapping[str, int] | None]
"""Draws with these choices and tries that out: the choices that were really asked for when it still comes out, None when it does not."""


class Shrinker:
    """Makes one drawing smaller."""

    def __init__(self, attempt: Try, *, max_tries: int) -> None:
        self._attempt = attempt
        self._left = max_tries
        self._tried: set[tuple[tuple[str, int], ...]] = set()

    def shrink(self, choices: Mapping[str, int]) -> dict[str, int]:
        """The smallest that was found; `choices` themselves come out."""
        best = dict(choices)
        before = None
        while before != best and self._left:
            before = dict(best)
            best = self._take_back(best)
            best = self._lower(best)
        return best

    def _take_back(self, best: dict[str, int]) -> dict[str, int]:
        size = max(1, len(best) // 2)
        while True:
            start = 0
            while start < len(best):
                names = list(best)[start : start + size]
                fewer = {name: value for name, value in best.items() if name not in names}
                found = self._try(fewer, best)
                if found is None:
                    start += size
                else:
                    best = found
            if size == 1:
                return best
            size = max(1, size // 2)

    def _lower(self, best: dict[str, int]) -> dict[str, int]:
        for name in list(best):
            low = 0  # does not come out
            while name in best and best[name] - low > 1:
                middle = (low + best[name]) // 2
                found = self._try(best | {name: middle}, best)
                if found is None:
                    low = middle
                else:
                    best = found
        return best

    def _try(self, choices: Mapping[str, int], best: Mapping[str, int]) -> dict[str, int] | None:
        key = tuple(sorted(choices.items()))
        if not self._left or key in self._tried:
            return None
        self._tried.add(key)
        self._left -= 1
        found = self._attempt(choices)
        return None if found is None or _size(found) >= _size(best) else dict(found)


def _size(choices: Mapping[str, int]) -> tuple[int, int]:
    return len(choices), sum(choices.values())
