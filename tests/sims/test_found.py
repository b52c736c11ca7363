"""What `farflung sim fuzz` has found, made small, and what was mended since: each scenario of `found/` broke an invariant, by its `about`, and breaks none. And a seed of `make soak`."""

from pathlib import Path

import pytest

from farflung.sims.chaos import run_brisk
from farflung.sims.fuzzing import play
from farflung.sims.scenario import load_scenario

FOUND = sorted((Path(__file__).parent / "found").glob("*.toml"))


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_what_was_found_is_mended(file: Path) -> None:
    assert play(load_scenario(file))[1].violations == []


def test_a_group_may_be_met_at_a_state_that_it_has_long_left_behind() -> None:
    """By a peer that comes back and goes through old rounds (brisk seed 447): the judge remembers where everybody was."""
    assert run_brisk(447, keep=False).violations == []
