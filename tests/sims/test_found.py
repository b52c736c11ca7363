"""What `farflung sim fuzz` has found, made small, and what was mended since: each scenario of `found/` broke an invariant, by its `about`, and breaks none."""

from pathlib import Path

import pytest

from farflung.sims.fuzzing import play
from farflung.sims.scenario import load_scenario

FOUND = sorted((Path(__file__).parent / "found").glob("*.toml"))


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_what_was_found_is_mended(file: Path) -> None:
    assert play(load_scenario(file))[1].violations == []
