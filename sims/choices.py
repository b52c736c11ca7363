"""Choices by name: what a drawing is made of, so that it can be drawn from a seed, played again, and made smaller.

A drawing asks for numbers below a limit, each by a name such as `happening/3/what`, and 0 always means the simplest. A choice that is not fixed is
drawn from a generator of its own, made of the seed and its name. So nothing that is drawn depends on what was drawn before it: one more option
changes no other choice of any seed, and a choice that is taken back leaves all others as they were. That is why there are names: in a plain sequence of
choices, as Hypothesis has it, what follows an omitted one would mean something else.

A seed is bold or timid, and likes some options more than others, whatever they are for (swarm testing: Groce, Zhang, Eide, Chen and Regehr, ISSTA 2012).
With everything possible in all of them, seeds would be all alike, and much would hide behind something that happens always.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

TIMID, BOLD = 0.1, 0.6
"""Share of what may be otherwise that is, in seeds; uniform between these."""

LIKED = 0.6
"""Share of options that a seed likes; when it draws none of those it draws from all."""


class Choices:
    """Numbers for one drawing, from `seed`; or those of `fixed` and, where it has none, 0."""

    def __init__(self, seed: int, fixed: Mapping[str, int] | None = None) -> None:
        self._seed = seed
        self._fixed = fixed
        self._boldness = random.Random(f"{seed}/boldness").uniform(TIMID, BOLD)
        self.taken: dict[str, int] = {}
        """What was asked for and was not 0, in the order in which it was asked for."""

    def below(self, name: str, limit: int) -> int:
        """A number from 0 to limit - 1."""
        return self._take(name, limit, lambda rng: rng.randrange(limit))

    def chance(self, name: str, share: float | None = None) -> bool:
        """Whether something is so; `share`: how often, by default as often as the seed is bold."""
        odds = self._boldness if share is None else share
        return bool(self._take(name, 2, lambda rng: int(rng.random() < odds)))

    def pick(self, name: str, options: Sequence[T]) -> T:
        """One of the options, of which the first is the simplest."""
        liked = [
            n for n in range(len(options)) if random.Random(f"{self._seed}/likes/{_kind(name)}/{n}").random() < LIKED
        ]
        return options[self._take(name, len(options), lambda rng: rng.choice(liked or range(len(options))))]

    def maybe(self, name: str, options: Sequence[T]) -> T:
        """The first option, or another one as often as the seed is bold."""
        return self.pick(name, options) if self.chance(f"{name}?") else options[0]

    def _take(self, name: str, limit: int, draw: Callable[[random.Random], int]) -> int:
        assert name not in self.taken, f"asked for twice: {name}"
        if self._fixed is None:
            value = draw(random.Random(f"{self._seed}/{name}"))
        else:
            value = min(self._fixed.get(name, 0), limit - 1)
        if value:
            self.taken[name] = value
        return value


def _kind(name: str) -> str:
    """A name without its numbers: what one happening likes all of them like."""
    return "".join(letter for letter in name if not letter.isdigit())
