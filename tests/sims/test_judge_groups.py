"""What the judge finds, and what it does not, in a swarm of several groups: by commits made by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from farflung.node.events import Event
from farflung.protocol.chain import Commit, Contribution, Half, RoundResult, Rules
from farflung.protocol.lap import Laps
from farflung.protocol.ledger import Holding, Ledger, Share
from farflung.protocol.limits import MAX_DIVISIONS
from farflung.sims.chronicle import Chronicle
from farflung.sims.faults import Fault, Kill, Leave, Start
from farflung.sims.from_events import fill_report
from farflung.sims.judge import Judge
from farflung.sims.roll_call import RollCall
from farflung.sims.simulation import Report
from farflung.sims.steps import KEPT_GRADIENTS, Steps
from farflung.training.outer import OuterState
from farflung.training.rules import Sgd

ME, OTHER = b"m" * 32, b"o" * 32
GROUP = b"g" * 32
TOTAL_STEPS = 500
RULES = Rules(
    ahead=12,
    lease=3,
    max_group=64,
    cuts=(0, 4),
    laps=Laps.fixed(1),
    total_steps=TOTAL_STEPS,
    tokens_per_sample=1,
    divides=True,
)


def commit(height: int, *, steps: int = 0, **changed: Any) -> Commit:
    known: dict[str, Any] = {"view": (ME,), "ledger": Ledger()}
    return Commit(
        height=height, parent=b"", version=height, tokens=0, steps=steps, lap=1, width=1, left=(), **(known | changed)
    )


def node(head: Commit) -> Any:
    """That runs, and knows a history up to here."""
    member = SimpleNamespace(
        head=SimpleNamespace(commit=head), group=head.group, history=[], started=True, in_view=ME in head.view
    )
    return SimpleNamespace(member=member, applier=SimpleNamespace(height=head.height), state_reason="waits")


def judged(*heads: Commit, min_contributors: int = 1, **rules: Any) -> tuple[Judge, list[str]]:
    """A judge over nodes with these heads, and what it finds."""
    found: list[str] = []
    judge = Judge(broken=lambda which, detail: found.append(f"{which}: {detail}"))
    settings = SimpleNamespace(rules=replace(RULES, **rules), min_contributors=min_contributors)
    swarm: Any = SimpleNamespace(
        peers={number: node(head) for number, head in enumerate(heads)},
        expected=set(range(len(heads))),
        ids=[ME, OTHER],
        numbers={ME: 0, OTHER: 1},
        attackers=frozenset(),
        hub=SimpleNamespace(now=lambda: 100.0),
        outfit=SimpleNamespace(terms=SimpleNamespace(settings=settings)),
    )
    judge.swarm = swarm
    return judge, found


# ---- who waits for a place -----------------------------------------------------------------------------------------

SHARED_OUT = Ledger(shares=tuple(Share(0, 1 << number, 0) for number in range(MAX_DIVISIONS)))


@pytest.mark.parametrize(
    ("view", "ledger", "steps", "rules", "well"),
    [
        ((OTHER,) * 4, Ledger(), 0, {"max_group": 4}, False),
        ((OTHER,) * 4, Ledger(), 0, {"max_group": 4, "divides": False}, True),
        ((OTHER,) * 4, Ledger(), 0, {"max_group": 4, "min_contributors": 3}, True),
        ((OTHER,) * 3, Ledger(), 0, {"max_group": 4, "min_contributors": 3}, False),
        ((OTHER,), Ledger(), 0, {"max_group": 1}, True),
        ((OTHER,) * 4, SHARED_OUT, 0, {"max_group": 4}, True),
        ((OTHER,) * 4, Ledger(), TOTAL_STEPS, {"max_group": 4}, True),
    ],
    ids=["divides", "must not", "halves too small", "has a place", "one alone", "divided too often", "complete"],
)
def test_who_waits_is_left_behind_where_there_is_a_place_or_the_group_becomes_two(
    view: tuple[bytes, ...], ledger: Ledger, steps: int, rules: dict[str, Any], well: bool
) -> None:
    judge, found = judged(commit(9, view=view, ledger=ledger, steps=steps), **rules)
    judge.check_end()
    assert (found == []) == well


# ---- samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [b"", GROUP], ids=["the first one", "another"])
def test_whoever_gives_up_what_it_has_trained_is_asked_by_the_ledgers_of_its_own_group(group: bytes) -> None:
    """It still holds what it trained; in the other group nobody has ever heard of that."""
    mine = Ledger(2048, (Holding(ME, ((1024, 1034),)),))
    theirs = Ledger(2000, (Holding(OTHER, ((0, 10),)),))
    judge, found = judged(commit(7, group=group, ledger=mine))
    others = {height: commit(height, view=(OTHER,), ledger=theirs) for height in range(3, 9)}
    own = {height: commit(height, group=group, ledger=mine) for height in range(3, 9)}
    judge.groups = {b"": Chronicle(history=own)}
    if group:
        first = Chronicle(history=others)
        judge.groups = {b"": first, GROUP: Chronicle(before=first, since=own[3], history=own)}
    judge.swarm.peers[0].applier.height = 5
    trained: Any = SimpleNamespace(trained=[1024, 1025])
    judge.swarm.learners = {0: trained}
    judge._check_dropped(0)
    assert found == ["2: peer 0 gave up 2 samples that it had trained and nobody else has"]


# ---- outer steps ---------------------------------------------------------------------------------------------------

ROUND = RoundResult(b"p" * 32, (), (), 0)
"""That has left all parts out: it moves nothing."""


@pytest.mark.parametrize("late", [False, True])
def test_the_first_step_of_a_new_group_begins_where_the_other_stood(late: bool) -> None:
    """`late`: the other has taken steps since. A group that divides once more before its first round stands where it began."""
    half = Half((OTHER,), Ledger())
    first = Chronicle(history={3: commit(3), 4: msgspec.structs.replace(commit(4, half=half), version=3)})
    first.came_to(3, torch.full((4,), 3.0), torch.zeros(4))
    if late:
        first.came_to(4, torch.full((4,), 4.0), torch.zeros(4))
    since = msgspec.structs.replace(commit(4, group=GROUP, half=half), version=3)
    second = Chronicle(before=first, since=since, history={4: since, 5: msgspec.structs.replace(since, height=5)})
    third = Chronicle(before=second, since=second.history[5], history={5: second.history[5]})
    third.history[6] = msgspec.structs.replace(commit(6, round=ROUND), version=4)
    stood = third.stood()
    assert stood is not None and stood[0] == 3 and stood[1].tolist() == [3.0] * 4
    outer = OuterState(torch.full((4,), 3.5))
    found: list[str] = []
    rule: Any = SimpleNamespace(outfit=SimpleNamespace(terms=SimpleNamespace(rule=lambda commit: Sgd(lr=1.0))))
    steps = Steps(lambda which, detail: found.append(f"{which}: {detail}"), known_means=False)
    steps.check(rule, third, outer, version=4, height=6)
    assert found[-1] == "2: version 4 has other parameters than 3 where its round moved nothing"


# ---- the end of the run --------------------------------------------------------------------------------------------


def two_groups(first: Commit, other: Commit) -> tuple[Judge, list[str]]:
    """Peer 0 is of the first group, peer 1 of the other; the judge has looked at both."""
    judge, found = judged(first, other)
    judge.groups[GROUP] = Chronicle(before=judge.groups[b""], since=commit(0, group=GROUP))
    for head in (first, other):
        judge.groups[head.group].history[head.height] = head
    judge.look_at_histories()
    return judge, found


@pytest.mark.parametrize(
    ("first", "other", "says"),
    [(TOTAL_STEPS, 300, [1]), (450, TOTAL_STEPS, [0]), (TOTAL_STEPS, TOTAL_STEPS, []), (450, 450, [0, 1])],
)
def test_who_ends_by_itself_is_missed_unless_its_own_group_has_completed_the_run(
    first: int, other: int, says: list[int]
) -> None:
    judge, found = two_groups(commit(50, steps=first), commit(40, steps=other, group=GROUP))
    ended: Any = SimpleNamespace(done=lambda: True)
    judge.swarm.tasks = {0: ended, 1: ended}
    judge.swarm.peers = {}
    RollCall(judge.swarm, judge, alike=True).look()
    assert found == [f"0: peer {index} has ended by itself" for index in says]


def test_a_straggler_of_a_group_that_has_finished_does_not_make_it_stand() -> None:
    before = [commit(49, steps=490)] * 3 + [commit(30, group=GROUP), commit(31, group=GROUP)]
    assert judged(*before)[0].versions() == {b"": 49, GROUP: 31}
    after = [commit(50, steps=TOTAL_STEPS), commit(49, steps=490), commit(30, group=GROUP), commit(32, group=GROUP)]
    assert judged(*after)[0].versions() == {GROUP: 32}


# ---- who is a member -----------------------------------------------------------------------------------------------


def test_members_are_peers_that_run_by_the_newest_view_of_their_own_group() -> None:
    both = (ME, OTHER)
    judge, _ = two_groups(commit(50, view=both), commit(40, view=both, group=GROUP))
    assert judge.members == 2
    judge.swarm.expected = {0}  # the other group has died out: its last view still names two
    judge.swarm.peers = {}
    assert judge.members == 1
    judge.groups[b""].history[51] = commit(51, view=(OTHER,))
    assert judge.members == 0


def test_logs_tell_the_same_members() -> None:
    me, other = ME.hex(), OTHER.hex()

    def says(peer: str, at: float, height: int, view: list[str], group: str) -> Event:
        return {"time": at, "event": "view.commit", "peer": peer, "height": height, "version": 0, "view": view, "group": group, "received_bytes": 0, "sent_bytes": 0}  # fmt: skip

    events = {me: [says(me, 1.0, 1, [me, other], ""), says(me, 2.0, 2, [me], "")], other: [says(other, 1.0, 1, [me, other], ""), says(other, 2.0, 2, [other], "ab")]}  # fmt: skip

    def members(*faults: Fault) -> int:
        report = Report(0, 2, [])
        fill_report(report, [me, other], [1.0, 1.0], events, [(fault.at, fault) for fault in faults], 0.0, 20.0)
        return report.members

    starts = Start(at=0.0, peer=0), Start(at=0.0, peer=1)
    assert members(*starts) == 2
    assert members(*starts, Kill(at=5.0, peer=1)) == 1, "the group that it was of has died out"
    assert members(*starts, Kill(at=5.0, peer=1), Start(at=6.0, peer=1)) == 2
    assert members(*starts, Leave(at=5.0, peer=0)) == 1


# ---- what contributors sent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counted", "attacks", "finds"),
    [((0, 2), False, False), ((2, 4), False, False), ((100, 102), False, True), ((100, 102), True, False)],
    ids=["long ago", "remembered", "never sent", "of an attacker"],
)
def test_who_contributes_other_samples_than_count_is_found_but_for_attackers_and_what_is_forgotten(
    counted: tuple[int, int], attacks: bool, finds: bool
) -> None:
    found: list[str] = []
    steps = Steps(lambda which, detail: found.append(f"{which}: {detail}"), known_means=True)
    for number in (0, *range(4, 4 + 2 * (KEPT_GRADIENTS - 1), 2), 2):
        steps.contributes(0, (number, number + 1), torch.zeros(4))
    before = commit(5, ledger=Ledger(200, (Holding(ME, (counted,)),)))
    round_ = RoundResult(b"p" * 32, (Contribution(ME, 16, 2, 0),), (), 0)
    swarm: Any = SimpleNamespace(ids=[ME], numbers={ME: 0}, attackers={ME} if attacks else set())
    assert (steps._shares(swarm, commit(6, round=round_), before) is None) == (counted != (2, 4))
    assert found == (["6: peer 0 contributed other samples than commit 6 counts"] if finds else [])
