"""The check of the check: groups and their meetings that are broken on purpose, each caught by the judge.

As in `test_broken`, `CAUGHT` has the first seed of 0 to 199 that shows it. Run as a script this module looks for them anew:
`python tests/sims/test_broken_groups.py [NAME …]`.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.sims.breaking import Broken
from torch import Tensor

from farflung.node.meetings import Meetings
from farflung.node.residuals import Residuals
from farflung.protocol import ledger
from farflung.protocol.keys import PeerId
from farflung.protocol.ledger import Ledger
from farflung.protocol.messages import Plan
from farflung.sims.chaos import brisk_plan
from farflung.sims.simulation import simulate


def run(name: str, seed: int) -> list[str]:
    """A small swarm in groups of three at most, which meet in every round; something goes wrong every few seconds."""
    plan = brisk_plan(seed, churn_s=80.0, calm_s=10.0, fragments=1)
    terms = plan.outfit.terms
    rules = replace(terms.settings.rules, max_group=3, divides=True)
    terms = replace(terms, settings=replace(terms.settings, rules=rules), meet_every=1)
    plan = replace(plan, outfit=replace(plan.outfit, terms=terms), calm_s=0.0, stop_when_broken=True)
    return simulate(plan).violations


broken = Broken(run, neighbours=8)


@broken
def both_halves_hand_out_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = ledger.shared

    def wrong(whole: Ledger, goes: Collection[PeerId]) -> tuple[Ledger, Ledger]:
        stays, theirs = shared(whole, goes)
        return stays, msgspec.structs.replace(theirs, shares=stays.shares)

    monkeypatch.setattr(ledger, "shared", wrong)


@broken
def an_owner_moves_alone_towards_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    met = Meetings.term

    async def wrong(self: Meetings, plan_id: bytes, plan: Plan, k: int) -> Tensor | None:
        term = await met(self, plan_id, plan, k)
        if term is not None:
            self._learner.outer.params[plan.parts[k].start : plan.parts[k].stop] -= term
        return term

    monkeypatch.setattr(Meetings, "term", wrong)


@broken
def a_meeting_counts_for_each_contributor(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_mean = Residuals.encode_mean
    met = Meetings.term
    terms: dict[int, Tensor] = {}

    async def remember(self: Meetings, plan_id: bytes, plan: Plan, k: int) -> Tensor | None:
        term = await met(self, plan_id, plan, k)
        if term is not None:
            terms[plan.parts[k].start] = term
        return term

    def again(self: Residuals, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        return encode_mean(self, plan_id, x.add(terms.pop(start)) if start in terms else x, start)

    monkeypatch.setattr(Meetings, "term", remember)
    monkeypatch.setattr(Residuals, "encode_mean", again)


def adds(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """What meetings add to means is so many times what it should be."""
    difference = Meetings._difference

    def wrong(self: Meetings, *what: Any) -> Tensor | None:
        term = difference(self, *what)
        return None if term is None else term.mul_(times)

    monkeypatch.setattr(Meetings, "_difference", wrong)


@broken
def a_meeting_moves_away_from_the_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    adds(monkeypatch, -1.0)


@broken
def a_meeting_moves_thrice_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    adds(monkeypatch, 3.0)


CAUGHT: dict[str, tuple[int, int]] = {
    "both_halves_hand_out_the_same_samples": (0, 6),
    "an_owner_moves_alone_towards_another_group": (0, 2),
    "a_meeting_counts_for_each_contributor": (0, 4),
    "a_meeting_moves_away_from_the_other_group": (0, 4),
    "a_meeting_moves_thrice_as_far": (0, 4),
}
"""Name → first seed, and the invariant that it breaks."""


@pytest.mark.parametrize("name", broken)
def test_what_is_broken_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, which = CAUGHT[name]
    assert broken.first_violation(name, first, monkeypatch).startswith(f"invariant {which}:")


@pytest.mark.parametrize("seed", sorted({seed for seed, _ in CAUGHT.values()}))
def test_what_is_whole_passes(seed: int) -> None:
    assert run("", seed) == []


if __name__ == "__main__":
    broken.search()
