"""Rounds on a bus when nobody dies: their order, who is waited for, and what a proposer does after a plan that failed."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.protocol.bus import LAP, LATENCY_S, Bus, Letter, rounds, sent, settled, until_phase

from farflung.protocol.effects import Apply, Note, Reduce, Send
from farflung.protocol.messages import (
    Abort,
    Collected,
    Committed,
    Cut,
    Plan,
    Promise,
    Propose,
)
from farflung.protocol.proposer import MAX_PAUSE_S, Phase
from farflung.protocol.settings import RESEND_S


def test_only_owners_say_who_has_sent_what_and_only_of_contributors() -> None:
    bus = Bus(3, outsiders=1)
    leader = bus.nodes[until_phase(bus, Phase.SCATTER)].member
    proposer = leader.consensus.proposer
    assert proposer is not None and proposer.plan is not None
    outsider, (owner, *_) = bus.ids[3], sorted({part.owner for part in proposer.plan.parts} - {leader.me})
    for sender in (outsider, owner):
        proposer.on_collected(sender, Collected(proposer.plan_id, (outsider, owner)))
    assert outsider not in proposer.collected and proposer.collected[owner] == {owner}


# ---- the good case --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8])
def test_a_round_with_everybody(num: int) -> None:
    bus = Bus(num)
    height = max(bus.commits) + 1
    assert bus.reach(height)
    commit = bus.commits[height]
    assert commit.round is not None
    assert [c.peer for c in commit.round.contributors] == list(commit.view) == bus.ids
    assert all(part.digest for part in commit.round.parts)
    assert commit.tokens == 800 * num and commit.version == 1
    assert all(n.contributed == 1 and not n.missed for n in bus.nodes.values())
    assert not bus.refused


def test_the_order_of_a_round() -> None:
    bus = Bus(3)
    bus.reach(2)
    first = {kind: min(letter.at for letter in sent(bus, kind)) for kind in (Promise, Plan, Propose, Committed)}
    assert first[Promise] <= first[Plan] < first[Propose] < first[Committed]
    assert not sent(bus, Abort)


def test_nobody_waits_for_the_disk_of_the_one_who_has_the_certificate() -> None:
    bus = Bus(4)
    assert bus.reach(9)
    leaders = 0
    for node in bus.nodes.values():
        applied: set[int] = set()
        told: Counter[int] = Counter()
        for _, effect in node.effects:
            match effect:
                case Apply(certified):
                    applied.add(certified.commit.height)
                    leaders += told[certified.commit.height] == 3
                case Send(_, Committed(certified)):
                    assert certified.commit.height not in applied, (
                        "an effect is carried out when those before it are on disk"
                    )
                    told[certified.commit.height] += 1
    assert leaders == max(bus.commits) - 1, "of each height but the genesis and that of the one who was alone"


@pytest.mark.parametrize("kind", [Plan, Propose, Committed])
def test_one_signature_serves_all_who_are_sent_the_same(kind: type) -> None:
    bus = Bus(4)
    assert bus.reach(9)
    for node in bus.nodes.values():
        told = [e.message for _, e in node.effects if isinstance(e, Send) and isinstance(e.message, kind)]
        assert told and len({id(m) for m in told}) == len({m for m in told}), "mail signs each object"


def test_slow_links_have_two_waves() -> None:
    bus = settled(Bus(4, waves_from_s=0.0))
    top = max(bus.commits)
    assert bus.reach(top + 1)
    result = bus.commits[top + 1].round
    assert result is not None and [p.owner for p in result.parts] == 2 * sorted(bus.ids)
    first, second = result.parts[:4], result.parts[4:]
    assert first[-1].stop == second[0].start and all(part.digest for part in result.parts)
    reduced = [
        e for n in bus.nodes.values() for _, e in n.effects if isinstance(e, Reduce) and e.plan_id == result.plan
    ]
    assert len(reduced) == 8 and all(e.early for e in reduced), "nobody waited for the cut"


def test_rounds_go_on_and_every_member_leads() -> None:
    bus = Bus(4)
    assert bus.reach(24, seconds=300.0)
    assert {letter.sender for letter in sent(bus, Plan)} == {0, 1, 2, 3}
    assert all(c.round is not None and len(c.round.contributors) == 4 for h, c in bus.commits.items() if h > 1)


def test_the_same_bus_gives_the_same_history() -> None:
    first, second = Bus(4), Bus(4)
    first.reach(8)
    second.reach(8)
    assert first.commits == second.commits and len(first.letters) == len(second.letters)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("cut_after_s", [LATENCY_S, math.inf])
def test_a_cut_that_overtakes_its_plan_or_is_lost_costs_a_repetition_however_short_rounds_are(
    idle: int, cut_after_s: float
) -> None:
    """Of two members one contributes, and owns all parts: it sends the plan and the cut in one moment."""
    bus = settled(Bus(2, min_round_s=1.0))
    assert bus.reach(max(bus.commits) + 6)
    bus.nodes[idle].contributes = False
    bus.nodes[idle].member.membership.state = "paused"
    bus.run(5.0)
    top, cuts = max(bus.commits), Counter[bytes]()

    def policy(letter: Letter) -> Sequence[float]:
        if isinstance(letter.message, Cut):
            cuts[letter.message.plan] += 1
            return (cut_after_s,) if cuts[letter.message.plan] == 1 else (LATENCY_S,)
        return (2 * LATENCY_S,) if isinstance(letter.message, Plan) else (LATENCY_S,)

    bus.policy = policy
    assert bus.reach(top + 4)
    plans = [letter.message for letter in sent(bus, Plan) if isinstance(letter.message, Plan)]
    assert min(plan.gather_s for plan in plans if plan.height > top) < RESEND_S and not sent(bus, Abort)
    assert all(len(bus.commits[height].view) == 2 for height in range(top, top + 5))


def test_slow_members_are_waited_for_and_then_not() -> None:
    bus = settled(Bus(4))
    slow = next(i for i in bus.nodes if i != bus.turn(0))
    bus.nodes[slow].trains_s = 1e6
    top = max(bus.commits)
    assert bus.reach(top + 2)
    late = [c for c in rounds(bus) if c.height > top and bus.ids[slow] not in {x.peer for x in c.round.contributors}]
    assert late and bus.ids[slow] in late[0].view, "it receives, and stays"
    assert "without waiting longer" in next(
        p.message.reason for p in sent(bus, Plan) if p.message.height == late[0].height
    )


def with_a_thin_link(speed: float, **changes: Any) -> tuple[Bus, int]:
    """Four members, of which one, who does not plan the next round, needs 1.1 s to send what the others send in 1 ms; each trains so many tokens in a
    second, and 800 in a lap."""
    bus = Bus(4, step_tokens=100, **changes)
    for node in bus.nodes.values():
        node.says, node.keeps = {"tokens_per_s": speed, "up_bytes_per_s": 1e6}, True
    settled(bus)
    thin = next(i for i in bus.nodes if i not in (bus.turn(0), bus.turn(0, max(bus.commits) + 2)))
    bus.nodes[thin].says["up_bytes_per_s"] = 1e3
    bus.run(2.0)
    return bus, thin


def test_rounds_go_without_a_link_that_is_not_worth_waiting_for() -> None:
    bus, thin = with_a_thin_link(speed=2000.0)
    top = max(bus.commits) + 2
    before = bus.nodes[thin].contributed
    assert bus.reach(top + 6)
    later = [c for c in rounds(bus) if c.height > top]
    assert all(len(c.round.contributors) == 3 for c in later if c.round) and later[-1].view == tuple(bus.ids)
    assert bus.nodes[thin].contributed == before
    assert f"without {bus.ids[thin].hex()[:12]}: sending takes 1.1 s" in bus.nodes[thin].missed[-1]
    reasons = {p.message.reason for p in sent(bus, Plan) if p.message.height > top}
    assert all(reason.startswith("3 of 4 members are ready; without") for reason in reasons), (
        "nobody waits for it either"
    )


def test_a_link_that_lacks_a_little_comes_into_every_third_round_with_what_it_has_trained_since() -> None:
    bus, thin = with_a_thin_link(speed=500.0)  # a lap takes 1.6 s
    top = max(bus.commits) + 2
    assert bus.reach(top + 9)
    later = [c.round for c in rounds(bus) if c.height > top and c.round]
    brought = [next((x.tokens for x in r.contributors if x.peer == bus.ids[thin]), 0) for r in later]
    first = brought.index(2400)
    assert brought[first : first + 7] == [2400, 0, 0, 2400, 0, 0, 2400]
    assert all(len(r.contributors) >= 3 for r in later)


def test_a_thin_link_is_not_left_out_where_it_is_needed() -> None:
    bus, thin = with_a_thin_link(speed=2000.0, min_contributors=4)
    assert bus.reach(max(bus.commits) + 3), "as many must contribute"
    for state in ("waiting", "training"):  # some that hang say for ever that they train
        bus, thin = with_a_thin_link(speed=2000.0)
        for i, node in bus.nodes.items():
            if i != thin:
                node.contributes, node.says["state"] = False, state
                node.member.membership.state = state
        bus.run(20.0)
        before = bus.nodes[thin].contributed
        bus.run(60.0)
        assert bus.nodes[thin].contributed > before, "no other has anything"


def test_the_last_round_is_not_made_without_a_thin_link() -> None:
    bus, thin = with_a_thin_link(speed=2000.0, total_steps=8 * LAP)
    assert bus.run(300.0, lambda: max(bus.commits) > 1 and bus.settings.rules.finished(bus.commits[max(bus.commits)]))
    last = rounds(bus)[-1].round
    assert last is not None and bus.ids[thin] in {c.peer for c in last.contributors}
    assert any(len(c.round.contributors) == 3 for c in rounds(bus) if c.round)


def test_links_that_become_slower_than_all_rounds_before_end_no_swarm() -> None:
    bus = Bus(3)
    assert bus.reach(5)
    bus.transfer_s = 1.5 * bus.settings.min_round_s
    assert bus.reach(max(bus.commits) + 2), "a plan that failed for want of time is made again with more"
    assert sorted({p.message.scatter_s for p in sent(bus, Plan)}) == [2.0, 4.0, 8.0]


def test_without_enough_contributors_there_is_no_round() -> None:
    bus = Bus(3, min_contributors=3)
    bus.nodes[2].contributes = False
    assert not bus.reach(2, seconds=40.0)
    assert "2 of at least 3 contributors are ready" in {n.member.reason for n in bus.nodes.values()}
    bus.nodes[2].contributes = True
    assert bus.reach(2)


def test_a_finished_run_plans_nothing_more() -> None:
    bus = Bus(3, outsiders=1, total_steps=2 * LAP, start=False)
    for i in range(3):
        bus.start(i)
    assert bus.run(40.0, lambda: max(c.version for c in bus.commits.values()) == 2)
    plans = len(sent(bus, Plan))
    bus.run(20.0)
    assert max(c.version for c in bus.commits.values()) == 2 and len(sent(bus, Plan)) == plans
    bus.start(3)
    assert bus.run(20.0, lambda: len(bus.commits[max(bus.commits)].view) == 4), "but newcomers are let in"


def test_newcomers_cost_one_commit() -> None:
    bus = Bus(2, outsiders=4, start=False)
    for i in range(2):
        bus.start(i)
        bus.nodes[i].contributes = False
    bus.run(3.0)
    for i in range(2, 6):
        bus.start(i)
        bus.nodes[i].contributes = False
    assert bus.run(20.0, lambda: len(bus.commits[max(bus.commits)].view) == 6)
    assert max(bus.commits) == 2


def test_plans_that_fail_again_and_again_are_made_less_and_less_often() -> None:
    bus = settled(Bus(3))
    consensus = bus.nodes[until_phase(bus, Phase.SCATTER)].member.consensus
    made = consensus.proposer
    assert made is not None
    plan, pauses = made.plan, []
    for attempt in range(1, 9):
        made.plan, made.attempt = plan, attempt
        made._abort("nothing arrived", consensus, 100.0)
        pauses.append(max(0.0, made.retry_at - 100.0))
    assert pauses == [0.0, *(RESEND_S * 2**k for k in range(5)), MAX_PAUSE_S, MAX_PAUSE_S]
    made.retry_at = 1e9
    assert made.step(consensus, 200.0) == [] and made.phase is Phase.GATHER
    assert "again after a pause: nothing arrived" in made.reason


def test_no_word_that_comes_after_a_cut_changes_what_it_was_made_from() -> None:
    bus = Bus(3)
    proposer = bus.nodes[until_phase(bus, Phase.HELD)].member.consensus.proposer
    assert proposer is not None
    before = dict(proposer.collected)
    proposer.on_collected(bus.ids[0], Collected(proposer.plan_id, ()))
    assert proposer.collected == before and before


def test_an_earlier_word_of_what_an_owner_holds_may_come_later() -> None:
    """The network turned two reports round, and a contribution was thrown away that every owner held."""
    bus = Bus(3)
    proposer = bus.nodes[until_phase(bus, Phase.SCATTER)].member.consensus.proposer
    assert proposer is not None
    owner, other, third = bus.ids
    for peers in ((owner, other, third), (owner,), (owner, other)):
        proposer.on_collected(owner, Collected(proposer.plan_id, peers))
    assert proposer.collected[owner] == {owner, other, third}


def test_an_aborted_round_is_tried_again() -> None:
    bus = settled(Bus(3))
    top = max(bus.commits)
    transfer = bus.transfer
    bus.transfer = lambda source, to, deliver: None  # type: ignore[method-assign]
    assert bus.run(60.0, lambda: bool(sent(bus, Abort)) or any(n.member.consensus.ballot for n in bus.nodes.values()))
    bus.transfer = transfer  # type: ignore[method-assign]
    assert bus.reach(top + 1)
    aborts = [e for n in bus.nodes.values() for _, e in n.effects if isinstance(e, Note) and e.event == "round.abort"]
    assert aborts and all(a.fields["reason"] for a in aborts)
