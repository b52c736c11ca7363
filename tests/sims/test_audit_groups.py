"""What logs show where a group becomes two: whoever goes on in another group goes on from where it was."""

from typing import Any

import pytest

from farflung.node.events import Event
from farflung.sims.audit import check_misses, check_versions
from farflung.sims.facts import RunFacts
from farflung.sims.logs import Logs

A, B = "aa" * 32, "bb" * 32
GROUP = "99" * 32


def says(at: float, kind: str, height: int, version: int, group: str = "", **fields: Any) -> Event:
    event = {"time": at, "event": kind, "peer": A, "swarm": "s", "height": height, "version": version, "step": 0, **fields}  # fmt: skip
    return event | ({"group": group} if group else {})


def moves(at: float, height: int, version: int, group: str = "", by: str = A) -> Event:
    return says(at, "round.commit", height, version, group, round=height, contributors={by: 4}, samples={}, parts_left_out=0, view=[A, B], digest=f"d{version}", lap=1)  # fmt: skip


def logs(*events: Event) -> Logs:
    return Logs(run=RunFacts(name="s", started=0, ended=100, peers=[]), events={A: list(events)})


def divides(at: float, height: int, version: int, group: str) -> Event:
    return says(at, "view.commit", height, version, group, view=[A], reason="")


groups = pytest.mark.parametrize("group", ["", GROUP], ids=["one group", "two"])


@groups
def test_the_first_step_in_a_new_group_needs_a_commit_as_any_other(group: str) -> None:
    found = check_versions(
        logs(
            says(1, "node.start", 0, 0, device="cpu"), moves(2, 2, 1), says(3, "step", 2, 1), moves(4, 3, 2), says(5, "step", 3, 2),
            divides(6, 4, 2, group), says(7, "step", 4, 2, group), says(8, "step", 5, 3, group), says(9, "step", 5, 3, group),
            moves(10, 6, 4, group), says(11, "step", 6, 4, group), moves(12, 7, 5, group),
        )
    )  # fmt: skip
    (said,) = found.broken
    assert found.count == 4 and said.startswith("aaaaaaaaaaaa came from version 2 to 3") and "without a commit" in said


def test_rounds_of_the_time_before_a_division_may_be_applied_after_it_is_known() -> None:
    told = [says(4.0 + n, "peer.alive", 3 + n, 4 + n, GROUP, of=B) for n in range(3)]
    found = check_versions(
        logs(
            says(1, "node.start", 2, 3, device="cpu"), moves(2, 3, 4), says(3, "group.divided", 3, 4, GROUP, view=[A], other="", others=[B]),
            told[0], moves(4.5, 4, 5), told[1], moves(5.5, 5, 6), told[2],
            divides(9, 6, 6, GROUP), moves(10, 7, 7, GROUP), says(11, "step", 7, 7, GROUP),
        )
    )  # fmt: skip
    assert found.count > 0 and found.broken == []


@pytest.mark.parametrize("downloads", [False, True])
def test_back_goes_only_who_downloads_the_state_of_another_group(downloads: bool) -> None:
    download = [says(4, "span", 3, 5, what="download")] if downloads else []
    events = [says(1, "node.start", 2, 4), moves(2, 3, 5), says(3, "step", 3, 5), *download]
    for group, finds in (("", True), (GROUP, not downloads)):
        found = check_versions(logs(*events, says(5, "step", 2, 2, group), says(6, "step", 2, 2, group)))
        assert bool(found.broken) == finds


@groups
def test_what_was_sent_before_a_division_is_owed_after_it(group: str) -> None:
    """A round of the new group has to count it, or there must be a reason why it does not."""

    def found(by: str, *more: Event) -> list[str]:
        sent = says(3, "round.scatter", 4, 1, round=5, plan="p")
        start, division = says(1, "node.start", 1, 1, device="cpu"), divides(4, 5, 1, group)
        return check_misses(logs(start, sent, division, *more, moves(6, 6, 2, group, by=by))).broken

    assert found(A) == []
    assert found(B, says(5, "round.missed", 5, 1, group, round=6, reason="too late")) == []
    assert found(B) == ["aaaaaaaaaaaa sent a contribution to round 5, and nothing says what became of it"]


def test_a_round_that_the_other_group_had_counts_nothing_of_who_went() -> None:
    sent, division = says(3, "round.scatter", 4, 1, round=5, plan="p"), divides(4, 5, 1, GROUP)
    other = moves(5, 6, 2, by=B) | {"peer": B}
    both = logs(says(1, "node.start", 1, 1, device="cpu"), sent, division, moves(7, 8, 2, GROUP, by=A))
    both.events[B] = [says(1, "node.start", 1, 1) | {"peer": B}, other]  # type: ignore[index]
    assert check_misses(both).broken == []
