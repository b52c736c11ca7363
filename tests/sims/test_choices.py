"""Choices by name: each is drawn for itself, is played again, and is taken back without touching others; and the smallest are found that still do."""

from collections.abc import Mapping

from farflung.sims.choices import Choices
from farflung.sims.shrinking import Shrinker


def draw(choices: Choices, *, more: bool = False) -> list[int]:
    if more:
        choices.pick("another", "abc")
    return [choices.below(f"number/{n}", 100) for n in range(20) if choices.chance(f"number/{n}?", 0.5)]


def test_a_seed_draws_the_same_whatever_else_is_drawn() -> None:
    first = Choices(3)
    assert draw(first) == draw(Choices(3)) == draw(Choices(3), more=True) != draw(Choices(4))
    assert draw(Choices(3, first.taken)) == draw(Choices(3))


def test_what_is_not_fixed_is_the_simplest_and_limits_hold() -> None:
    assert draw(Choices(3, {})) == []
    assert draw(Choices(3, {"number/7?": 1, "number/7": 500, "unknown": 9})) == [99]
    fixed = Choices(3, {"number/7?": 1, "number/9": 5})
    draw(fixed)
    assert fixed.taken == {"number/7?": 1}, "what nobody asks for is no choice"


def test_seeds_differ_in_what_they_like() -> None:
    def kinds(seed: int) -> set[str]:
        choices = Choices(seed)
        return {choices.pick(f"happening/{n}/what", "abcdefgh") for n in range(40)}

    found = [kinds(seed) for seed in range(30)]
    assert set.union(*found) == set("abcdefgh") and min(map(len, found)) < 4
    shares = [sum(Choices(seed).chance(f"{n}") for n in range(1)) for seed in range(400)]
    assert 80 < sum(shares) < 200, "about a third"


def test_the_smallest_is_found_that_still_comes_out() -> None:
    tries = []

    def attempt(fixed: Mapping[str, int]) -> Mapping[str, int] | None:
        choices = Choices(3, fixed)
        tries.append(dict(fixed))
        return choices.taken if sum(number > 10 for number in draw(choices)) >= 2 else None

    whole = Choices(3)
    assert sum(number > 10 for number in draw(whole)) > 4
    smallest = Shrinker(attempt, max_tries=300).shrink(whole.taken)
    assert draw(Choices(3, smallest)) == [11, 11]
    assert len(tries) < 100 and len({tuple(sorted(one.items())) for one in tries}) == len(tries), "none twice"
    few = Shrinker(attempt, max_tries=3).shrink(whole.taken)
    assert sum(smallest.values()) < sum(few.values()) < sum(whole.taken.values())
