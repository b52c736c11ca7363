"""The microbatch as memory is taken and given back."""

from farflung.training.microbatch import RAISE_AFTER_S, Microbatch

SIZES = (8, 4, 3, 2, 1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_lack_lowers_it_at_once_and_minutes_without_one_raise_it_again() -> None:
    clock = Clock()
    microbatch = Microbatch(None, clock)
    microbatch.found(8)
    assert microbatch.to_try(SIZES) == 8 and not microbatch.is_lowered
    assert microbatch.lacks(8, SIZES) == 4 and microbatch.lacks(4, SIZES) == 3
    microbatch.fits(3)
    clock.now += RAISE_AFTER_S - 1.0
    assert microbatch.to_try(SIZES) == 3
    clock.now += 1.0
    for size in (4, 8):
        assert microbatch.to_try(SIZES) == size
        microbatch.fits(size)
        assert microbatch.is_lowered == (size < 8)
    assert microbatch.to_try(SIZES) == microbatch.size == 8, "never more than what trials have found"


def test_a_larger_one_that_does_not_fit_costs_one_try() -> None:
    clock = Clock()
    microbatch = Microbatch(None, clock)
    microbatch.found(4)
    microbatch.fits(microbatch.lacks(4, SIZES) or 0)
    clock.now += RAISE_AFTER_S
    assert microbatch.to_try(SIZES) == 4
    assert microbatch.lacks(4, SIZES) == 3 == microbatch.size
    microbatch.fits(3)
    assert microbatch.to_try(SIZES) == 3
    clock.now += RAISE_AFTER_S
    assert microbatch.to_try(SIZES) == 4


def test_when_not_even_the_smallest_fits_it_is_found_anew_and_what_fitted_before_is_not_forgotten() -> None:
    clock = Clock()
    microbatch = Microbatch(None, clock)
    microbatch.found(4)
    size: int | None = 4
    tried = []
    while size is not None:
        tried.append(size)
        size = microbatch.lacks(size, SIZES)
    assert tried == [4, 3, 2, 1] and microbatch.size is None
    microbatch.found(2)
    assert microbatch.to_try(SIZES) == 2
    clock.now += RAISE_AFTER_S
    assert microbatch.to_try(SIZES) == 3


def test_what_was_asked_for_is_kept() -> None:
    microbatch = Microbatch(3)
    assert microbatch.to_try(SIZES) == 3 and microbatch.lacks(3, SIZES) is None
    assert microbatch.size == microbatch.to_try(SIZES) == 3
