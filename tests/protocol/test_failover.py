"""Rounds on a bus: who dies when, what is lost on the way, and that it all ends in one history.

`Bus.decided` judges every commit that any member applies: it must follow from its parent, carry a quorum of votes, and be the only one of
its height.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from msgspec import structs
from tests.protocol.bus import LATENCY_S, TICK_S, Bus, Letter, Node, beat, rounds, sent, settled, until_phase

from farflung.protocol import patience
from farflung.protocol.chain import Commit
from farflung.protocol.effects import Reduce, SaveVote, Send
from farflung.protocol.messages import (
    Accepted,
    Collected,
    Committed,
    Cut,
    Fetch,
    Heartbeat,
    Held,
    Message,
    Plan,
    Promise,
    Propose,
    Voted,
)
from farflung.protocol.proposer import Phase
from farflung.protocol.saved_vote import SavedVote

TWO_WAVES = 0.0
"""Seconds that every round takes to send."""

# ---- owners die -----------------------------------------------------------------------------------------------


def round_with_victim(bus: Bus, phase: Phase, harm: Callable[[Node], None]) -> tuple[int, Commit]:
    """Harm an owner that does not lead, in the given phase of a round, and run until the next round is committed."""
    settled(bus)
    leader = until_phase(bus, phase)
    victim = next(i for i in sorted(bus.nodes) if i != leader)
    top = max(bus.commits)
    harm(bus.nodes[victim])
    rest = [i for i in bus.nodes if i != victim]
    assert bus.run(
        60.0, lambda: all(bus.nodes[i].height > top and bus.nodes[i].member.attendance.part is None for i in rest)
    )
    return victim, next(c for c in rounds(bus) if c.height > top)


def test_a_plan_that_is_lost_on_its_way_to_who_only_receives_costs_a_repetition() -> None:
    bus = settled(Bus(4, max_round_s=60.0, min_round_s=60.0))
    idle = next(i for i in bus.nodes if i != bus.turn(0))
    bus.nodes[idle].contributes = False
    bus.nodes[idle].member.membership.state = "paused"
    bus.run(2.0)
    top, lost = max(bus.commits), 0

    def policy(letter: Letter) -> Sequence[float]:
        nonlocal lost
        if (
            isinstance(letter.message, Plan)
            and letter.receiver == idle
            and letter.message.height == top + 1
            and not lost
        ):
            lost += 1
            return ()
        return (LATENCY_S,)

    bus.policy = policy
    assert bus.reach(top + 1, seconds=200.0)
    commit = bus.commits[top + 1]
    assert lost == 1 and commit.round is not None and len(commit.round.contributors) == 3
    # no more than a quarter of the deadline, after which it is told where to fetch the means
    assert bus.ids[idle] in commit.view and commit.round.seconds_ms < 18_000


def test_an_owner_dies_before_the_cut() -> None:
    bus = Bus(4)
    victim, commit = round_with_victim(bus, Phase.SCATTER, lambda n: bus.kill(n.index))
    assert commit.round is not None
    dead = [part for part in commit.round.parts if part.owner == bus.ids[victim]]
    assert all(not part.digest for part in dead), "left out for everybody alike"
    assert bus.ids[victim] not in commit.view
    assert len(commit.view) == 3


@pytest.mark.parametrize("waves", [1, 2])
def test_an_owner_never_serves(waves: int) -> None:
    bus = Bus(4, waves_from_s=TWO_WAVES if waves == 2 else math.inf)

    def harm(node: Node) -> None:
        node.reduces = False

    victim, commit = round_with_victim(bus, Phase.SCATTER, harm)
    assert commit.round is not None
    assert [p.owner for p in commit.round.parts if not p.digest] == [bus.ids[victim]] * waves
    assert len(commit.view) == 4 and len(commit.round.contributors) == 4, "it costs its part only"


@pytest.mark.parametrize("waves", [1, 2])
def test_an_owner_dies_after_serving_one(waves: int) -> None:
    bus = Bus(4, waves_from_s=TWO_WAVES if waves == 2 else math.inf)
    transfer = bus.transfer

    def harm(node: Node) -> None:
        served: list[bytes] = []

        def first_only(source: Node, to: bytes, deliver: Callable[[Node], None]) -> None:
            if source is node and any(isinstance(e, Reduce) for at, e in node.effects if at == bus.now):
                if served and to != served[0]:
                    return
                served.append(to)
                if len(served) == waves:
                    bus.later(0.2, node, lambda: bus.kill(node.index))
            transfer(source, to, deliver)

        bus.transfer = first_only  # type: ignore[method-assign]

    victim, commit = round_with_victim(bus, Phase.SCATTER, harm)
    assert commit.round is not None
    assert all(part.digest for part in commit.round.parts), "the others fetched it from the one"
    assert bus.ids[victim] in {c.peer for c in commit.round.contributors}, "it contributed before it died"
    assert sum(isinstance(letter.message, Fetch) for letter in bus.letters) >= 2


def test_the_samples_of_the_dead_are_handed_on() -> None:
    bus = Bus(3)
    _, commit = round_with_victim(bus, Phase.SCATTER, lambda n: bus.kill(n.index))
    version = commit.version
    assert bus.run(120.0, lambda: bus.commits[max(bus.commits)].version > version + bus.settings.rules.lease)
    newest = bus.commits[max(bus.commits)].ledger
    assert not newest.suspended
    waiting = sum(b - a for h in newest.held for a, b in h.intervals) + sum(b - a for a, b in newest.free)
    counted = sum(c.samples for commit in rounds(bus) for c in commit.round.contributors)  # type: ignore[union-attr]
    assert waiting + counted == newest.cursor


# ---- proposers die --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*Phase])
@pytest.mark.parametrize("num", [3, 4])
def test_a_proposer_dies(phase: Phase, num: int) -> None:
    bus = settled(Bus(num))
    leader = until_phase(bus, phase)
    top = max(bus.commits)
    bus.kill(leader)
    assert bus.reach(top + 2)
    newest = bus.commits[max(bus.commits)]
    assert bus.ids[leader] not in newest.view
    assert any(letter.message.ballot == 1 for letter in sent(bus, Propose) if letter.message.commit.height == top + 1)
    assert not bus.refused


@pytest.mark.parametrize("phase", [*Phase])
def test_a_proposer_dies_and_comes_back_at_once(phase: Phase) -> None:
    """Before anybody noticed: nobody may wait for what the dead process had begun."""
    bus = settled(Bus(3))
    leader = until_phase(bus, phase)
    top = max(bus.commits)
    bus.kill(leader)
    bus.start(leader)
    assert bus.reach(top + 3, seconds=90.0)
    assert bus.run(30.0, lambda: len(bus.commits[max(bus.commits)].view) == 3)


def test_a_single_member_dies_after_voting_for_itself() -> None:
    bus = Bus(1)
    assert bus.run(20.0, lambda: bus.disks[0].vote is not None)
    bus.policy = lambda letter: ()
    bus.kill(0)
    bus.disks[0].history = bus.disks[0].history[:1]  # the vote was on disk, the commit was not
    bus.disks[0].vote = SavedVote(1, 0, bus.disks[0].vote.accepted if bus.disks[0].vote else None)
    height = max(bus.commits)
    bus.start(0)
    assert bus.reach(height + 2)


def test_a_minoritys_value_is_finished_by_the_next_proposer() -> None:
    """Two of five voted, one of them leads next: it may not propose anything else, for all it knows it was decided."""
    bus = settled(Bus(5))
    first, second = bus.turn(0), bus.turn(1)
    proposed: list[Commit] = []

    def policy(letter: Letter) -> Sequence[float]:
        message = letter.message
        if isinstance(message, Propose) and message.ballot == 0:
            proposed.append(message.commit)
            return (LATENCY_S,) if letter.receiver == second else ()
        if isinstance(message, Voted) and message.ballot == 0:
            return ()
        return (LATENCY_S,)

    top = max(bus.commits)
    bus.policy = policy
    assert bus.run(30.0, lambda: bool(proposed))
    bus.run(2 * LATENCY_S)
    bus.kill(first)
    assert bus.reach(top + 1)
    assert bus.commits[top + 1] == proposed[0]
    finished = [x for x in sent(bus, Propose) if x.message.ballot > 0 and x.message.commit.height == top + 1]
    assert finished and all(x.message.commit == proposed[0] for x in finished)


def test_what_may_have_been_decided_is_decided_again_though_nobody_heard() -> None:
    """All voted, every certificate was lost, and the proposer, the only one who knew, is gone."""
    bus = settled(Bus(4))
    leader = bus.turn(0)
    top = max(bus.commits)
    bus.policy = lambda letter: (
        () if isinstance(letter.message, Committed) and letter.sender == leader else (LATENCY_S,)
    )
    assert bus.run(30.0, lambda: top + 1 in bus.commits)
    decided = bus.commits[top + 1]
    bus.kill(leader)
    rest = [i for i in range(4) if i != leader]
    assert all(bus.nodes[i].height == top for i in rest)
    assert bus.reach(top + 1, who=rest)
    known = next(c.commit for c in bus.nodes[rest[0]].member.history if c.commit.height == top + 1)
    assert known == decided


def test_its_own_vote_is_on_disk_before_anybody_hears_of_a_proposal() -> None:
    bus = settled(Bus(4))
    leader = until_phase(bus, Phase.HELD)
    node = bus.nodes[leader]
    height = node.height + 1
    bus.reach(height)
    effects = [e for _, e in node.effects]
    proposals = [i for i, e in enumerate(effects) if isinstance(e, Send) and isinstance(e.message, Propose)
                 and e.message.commit.height == height]  # fmt: skip
    votes = [
        i for i, e in enumerate(effects) if isinstance(e, SaveVote) and e.vote.height == height and e.vote.accepted
    ]
    assert votes and proposals and votes[0] < proposals[0]


def test_votes_are_on_disk_before_they_are_sent() -> None:
    bus = settled(Bus(4))
    for node in bus.nodes.values():
        saved: set[tuple[int, int, Commit]] = set()
        promised = {(0, 0)}
        for _, effect in node.effects:
            if isinstance(effect, SaveVote):
                vote = effect.vote
                promised.add((vote.height, vote.ballot))
                if vote.accepted is not None:
                    saved.add((vote.height, vote.accepted.ballot, vote.accepted.commit))
            elif isinstance(effect, Send) and isinstance(effect.message, Voted):
                voted = effect.message
                assert (voted.height, voted.ballot) in {(h, b) for h, b, _ in saved}
            elif isinstance(effect, Send) and isinstance(effect.message, Promise) and effect.message.ballot:
                assert (effect.message.height, effect.message.ballot) in promised


# ---- messages go wrong ----------------------------------------------------------------------------------------


def noisy(seed: int, drop: float, double: float, late_s: float) -> Callable[[Letter], Sequence[float]]:
    rng = random.Random(seed)

    def policy(letter: Letter) -> Sequence[float]:
        lost, twice, first, second = rng.random() < drop, rng.random() < double, rng.random(), rng.random()
        delays = [LATENCY_S + late_s * first, LATENCY_S + 3 * late_s * second]
        return () if lost else delays[: 1 + twice]

    return policy


@pytest.mark.parametrize("seed", range(6))
def test_lost_doubled_and_overtaken_messages(seed: int) -> None:
    bus = Bus(3 + seed % 3, waves_from_s=TWO_WAVES if seed % 2 else math.inf)
    bus.policy = noisy(seed, drop=0.15, double=0.3, late_s=0.4)
    assert bus.reach(8, seconds=240.0)
    assert {type(error).__name__ for *_, error in bus.refused} <= {"Refused"}


@pytest.mark.parametrize("kind", [Promise, Plan, Collected, Cut, Held, Propose, Voted, Committed])
def test_the_first_of_a_kind_is_always_lost(kind: type[Message]) -> None:  # type: ignore[valid-type]
    """Everything that matters is repeated until it is acted on."""
    bus = Bus(3)
    seen: set[tuple[int, int, int]] = set()

    def policy(letter: Letter) -> Sequence[float]:
        if isinstance(letter.message, kind):
            height = max(bus.commits)
            key = (letter.sender, letter.receiver, height)
            if key not in seen:
                seen.add(key)
                return ()
        return (LATENCY_S,)

    bus.policy = policy
    assert bus.reach(5, seconds=120.0) and seen
    assert bus.run(30.0, lambda: len(bus.commits[max(bus.commits)].view) == 3)


@pytest.mark.parametrize("seed", range(8))
def test_kills_restarts_and_noise(seed: int) -> None:
    """Members die and come back from their disks in the middle of everything; the judge looks at every commit."""
    rng = random.Random(seed)
    bus = Bus(3 + seed % 3, waves_from_s=TWO_WAVES if seed % 2 else math.inf)
    bus.policy = noisy(seed + 100, drop=0.1, double=0.1, late_s=0.2)
    everybody = list(bus.nodes)
    for _ in range(8):
        victim = rng.choice(everybody)
        bus.run(rng.uniform(0.05, 4.0))
        if victim in bus.nodes:
            bus.kill(victim)
        bus.run(rng.uniform(0.05, 12.0))
        bus.start(victim)
    bus.policy = lambda letter: (LATENCY_S,)
    top = max(bus.commits)
    assert bus.reach(top + 3, seconds=120.0)
    assert bus.run(60.0, lambda: len(bus.commits[max(bus.commits)].view) == len(everybody))


def test_two_sides() -> None:
    """Three of five go on, two stand; after the cut has healed all five are members again, with one history."""
    bus = settled(Bus(5))
    side = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    top = max(bus.commits)
    bus.policy = lambda letter: (LATENCY_S,) if side[letter.sender] == side[letter.receiver] else ()
    transfer = bus.transfer
    bus.transfer = lambda source, to, deliver: (  # type: ignore[method-assign]
        transfer(source, to, deliver) if side[source.index] == side[bus.index(to)] else None
    )
    bus.run(60.0)
    assert min(bus.nodes[i].height for i in (0, 1, 2)) > top + 3
    assert max(bus.nodes[i].height for i in (3, 4)) <= top + 1
    assert any("no quorum" in reason for reason in bus.nodes[3].missed), "and they train on by themselves"
    bus.policy = lambda letter: (LATENCY_S,)
    bus.transfer = transfer  # type: ignore[method-assign]
    assert bus.run(60.0, lambda: len(bus.commits[max(bus.commits)].view) == 5)
    assert bus.reach(max(bus.commits))


def test_a_round_may_take_as_long_as_both_its_deadlines_allow() -> None:
    """Each phase just fits; together they take longer than a ready member waits for a proposer that plans nothing."""
    bus = Bus(3)
    bus.transfer_s = bus.settings.max_round_s - 0.5
    assert bus.reach(4, seconds=120.0)
    assert not any(n.member.consensus.ballot or n.notes("ballot") for n in bus.nodes.values())


def test_a_proposer_whose_messages_go_nowhere_is_left() -> None:
    """Its heartbeats arrive, so it lives; its plans do not."""
    bus = settled(Bus(3))
    leader, top = bus.turn(0), max(bus.commits)
    bus.policy = lambda letter: (
        () if letter.sender == leader and not isinstance(letter.message, Heartbeat) else (LATENCY_S,)
    )
    rest = [i for i in bus.nodes if i != leader]
    assert bus.reach(top + 2, who=rest, seconds=90.0)


def test_a_graceful_leave_is_let_go_at_once() -> None:
    bus = settled(Bus(3))
    who = next(i for i in bus.nodes if i != bus.turn(0))
    leave(bus, who)
    began = bus.now
    assert bus.run(20.0, lambda: bus.ids[who] not in bus.commits[max(bus.commits)].view)
    commit = bus.commits[max(bus.commits)]
    assert bus.now - began < 5.0 and commit.left == (bus.ids[who],)
    assert not commit.ledger.suspended, "its samples are free at once"


def leave(bus: Bus, who: int) -> None:
    node = bus.nodes[who]
    node.member.membership.leave(bus.now)
    node.contributes = False
    node.do(node.member.withdraw(bus.now))
    node.do(node.member.leave("asked to"))


def test_all_but_one_may_leave_at_once() -> None:
    bus = settled(Bus(4))
    for who in (1, 2, 3):
        leave(bus, who)
    assert bus.run(30.0, lambda: bus.commits[max(bus.commits)].view == (bus.ids[0],))
    for who in (1, 2, 3):
        bus.kill(who)
    top = max(bus.commits)
    assert bus.reach(top + 2), "and the last one goes on"


def needed(bus: Bus, *who: int) -> list[bool]:
    return [patience.is_needed(bus.nodes[i].member.consensus, bus.now + TICK_S) for i in who]


def test_who_leaves_is_needed_where_those_who_stay_decide_nothing_alone() -> None:
    bus = settled(Bus(2))
    first, other = (bus.index(p) for p in bus.commits[max(bus.commits)].view)
    assert needed(bus, first, other) == [True, False], "half with the first key is a quorum, the other half is none"
    bus = settled(Bus(3, removal_s=60.0))
    assert needed(bus, 0, 1, 2) == [False] * 3, "any two decide"
    bus.kill(2)
    assert bus.run(30.0, lambda: not any(bus.nodes[i].member.membership.alive(bus.ids[2]) for i in (0, 1)))
    assert len(bus.commits[max(bus.commits)].view) == 3 and needed(bus, 0, 1) == [True, True]


def test_who_leaves_is_needed_where_what_it_voted_for_leaves_out_who_decides_without_it() -> None:
    """Brisk seed 9924: of three it went, for the other two decide without it; then a round was decided that it had voted for, whose view had one of them only."""
    bus = settled(Bus(3, removal_s=60.0))
    head = bus.commits[max(bus.commits)]
    goes, stays, third = (bus.index(p) for p in head.view)
    acceptor = bus.nodes[goes].member.consensus.acceptor
    acceptor.accepted = Accepted(0, structs.replace(head, height=head.height + 1, view=head.view[:2]))
    assert needed(bus, goes, stays, third) == [True, False, False]
    acceptor.accepted = Accepted(0, structs.replace(head, height=head.height + 1, view=head.view[1:]))
    assert needed(bus, goes) == [False], "where it is to be let go"


def test_who_leaves_is_needed_by_nobody_where_all_leave() -> None:
    bus = settled(Bus(2))
    leave(bus, 0)
    leave(bus, 1)
    bus.run(1.0)
    assert needed(bus, 0, 1) == [False, False]


def test_who_decides_alone_is_needed_by_who_is_on_its_way_in() -> None:
    bus = settled(Bus(1))
    assert needed(bus, 0) == [False]
    newcomer = bus.ids[0][:-1] + bytes([bus.ids[0][-1] ^ 1])
    member = bus.nodes[0].member
    member.membership.heard(newcomer, bus.now, beat(state="joining"))
    assert needed(bus, 0) == [True]
    member.membership.heard(newcomer, bus.now, beat(state="leaving"))
    assert needed(bus, 0) == [False]


def test_who_is_not_heard_yet_is_not_gone() -> None:
    """Brisk seed 3623: it had just come back with the half that decides, was asked to leave before it had heard from the other, and took itself for alone."""
    bus = settled(Bus(2))
    first, other = (bus.index(p) for p in bus.commits[max(bus.commits)].view)
    bus.kill(first)
    bus.kill(other)
    node = bus.start(first)
    deciding, view = node.member.consensus, node.member.head.commit.view
    assert patience.not_gone(deciding, view, bus.now) == [bus.ids[other]] and needed(bus, first) == [True]
    bus.run(60.0)
    assert patience.not_gone(deciding, view, bus.now) == [] and needed(bus, first) == [False]


@pytest.mark.parametrize("wait_s", [0.0, 0.7, 1.5, 3.0, 6.0])
@pytest.mark.parametrize(("dead", "goes"), list(permutations(range(3), 2)))
def test_who_leaves_as_another_has_died_leaves_somebody_who_can_decide(dead: int, goes: int, wait_s: float) -> None:
    """Before anybody can know that it has: in a round, or between two."""
    bus = settled(Bus(3, removal_s=60.0))
    bus.kill(dead)
    bus.run(wait_s, lambda: False)
    leave(bus, goes)
    last_one_goes_on(bus, goes, 3 - dead - goes)


@pytest.mark.parametrize("goes", [1, 2])
def test_a_round_that_ends_as_somebody_has_died_lets_nobody_go(goes: int) -> None:
    bus = settled(Bus(3, removal_s=60.0))
    until_phase(bus, Phase.HELD)
    leave(bus, goes)
    bus.run(0.1, lambda: False)
    bus.kill(0)
    last_one_goes_on(bus, goes, 3 - goes)


def last_one_goes_on(bus: Bus, goes: int, stays: int) -> None:
    """The other leaves when it is needed no more."""
    assert bus.run(60.0, lambda: not needed(bus, goes)[0])
    bus.run(8.0, lambda: bus.ids[goes] not in bus.nodes[stays].member.head.commit.view)
    bus.kill(goes)
    assert bus.reach(max(bus.commits) + 2, who=[stays], seconds=90.0)
