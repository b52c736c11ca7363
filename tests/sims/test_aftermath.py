"""What only logs show counts where thousands of simulations are searched: a round that leaves a part out for nobody's sake, when anything might go wrong."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from farflung.protocol import planning, proposer
from farflung.protocol.planning import Result
from farflung.sims.chaos import Wire, run_plan, toy_plan
from farflung.sims.choices import Choices
from farflung.sims.failure import kind_of, replay
from farflung.sims.faults import Schedule, Start
from farflung.sims.fuzzing import make_small, play, write_found
from farflung.sims.scenario_drawing import draw_scenario
from farflung.sims.scenario_toml import write_scenario
from farflung.sims.simulation import simulate

SAID = "invariant 3, a dead member costs its own contribution only: round "


@pytest.fixture
def leaves_a_part_out(monkeypatch: pytest.MonkeyPatch) -> None:
    conclude = planning.conclude

    def one_less(view: Sequence[bytes], held: Mapping[bytes, Sequence[bytes]], num_parts: int) -> Result | None:
        result = conclude(view, held, num_parts)
        if result is None or sum(map(bool, result.digests)) < 2:
            return result
        return dataclasses.replace(result, digests=(b"", *result.digests[1:]))

    monkeypatch.setattr(proposer, "conclude", one_less)


@pytest.mark.usefixtures("leaves_a_part_out")
def test_a_soak_counts_what_only_logs_show() -> None:
    starts = tuple(Start(at=0.5 * peer, peer=peer) for peer in range(3))
    schedule = Schedule(num_peers=3, duration_s=40.0, faults=starts)
    plan = toy_plan(3, schedule, Wire(step_s=(0.7, 1.0, 1.3)), calm_s=0.0)
    assert simulate(plan).violations == []
    report = run_plan(plan, keep=False)
    assert report.violations[0].startswith(SAID) and report.broken_at is None


@pytest.mark.usefixtures("leaves_a_part_out")
def test_fuzz_finds_and_makes_small_what_only_logs_show(tmp_path: Path) -> None:
    choices = Choices(4)
    drawn = draw_scenario(4, choices)
    _, report = play(drawn)
    assert report.num_peers == 3 and report.violations[0].startswith(SAID)
    small = make_small(4, choices.taken, report, max_tries=4)
    assert len(write_scenario(small)) < len(write_scenario(drawn))
    found = write_found(tmp_path, small)
    assert kind_of(found.violations[0]) == kind_of(report.violations[0])
    failure, again = replay(tmp_path)
    assert failure.violations == found.violations and again.log_sha256 == failure.log_sha256
