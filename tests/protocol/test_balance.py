"""Who moves to another stage, why, and when: the pure decision and the memory beside it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.pipeline_says import says

from farflung.protocol.balance import KEEP, REST_STEPS, SETTLED_STEPS, Move, Scene, decide, neediest, wrong
from farflung.protocol.balancer import ALARM_BEATS, ARRIVE_S, ASIDE_S, OBEY_S, RESEND_S, UNHEARD_S, Balancer
from farflung.protocol.pipeline_messages import Load, Present
from farflung.protocol.types import LEAST_RATE

BEAT_S = 2.0
STEP = 1000
FOUNDER = bytes([0]) * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def serves(stage: int, *, stages: int = 3, visits: float = 4.0, seconds: float = 1.0, **changes: Any) -> Present:
    """A peer that computes for so many seconds in a step."""
    fits = tuple(other for other in range(stages) if other != stage)
    return says(stage, load=Load(visits, seconds, 0.0), fits=fits, **changes)


def swarm_of(*counts: int, seconds: tuple[float, ...] | None = None) -> dict[bytes, Present]:
    """So many peers of each stage; the first is the founder. `seconds`: work of each stage for one step, shared by its peers."""
    said: dict[bytes, Present] = {}
    for stage, count in enumerate(counts):
        for _ in range(count):
            work = 12.0 if seconds is None else seconds[stage]
            said[key(len(said))] = serves(stage, stages=len(counts), visits=12.0 / count, seconds=work / count)
    return said


def scene(said: dict[bytes, Present], **changes: Any) -> Scene:
    stages = 1 + max(one.stage for one in said.values())
    alone = [s for s in range(stages) if sum(one.stage == s and one.trains for one in said.values()) == 1]
    return Scene(
        **{
            "said": said,
            "weights": tuple(
                sum(one.load.computing_s for one in said.values() if one.stage == s) or 1.0 for s in range(stages)
            ),
            "state_bytes": (1_000_000,) * stages,
            "founder": FOUNDER,
            "step": STEP,
            "steps_left": 1000,
            "alarm": frozenset(alone),
            **changes,
        }
    )


def moved(said: dict[bytes, Present], move: Move, step: int = STEP) -> dict[bytes, Present]:
    """The swarm after a move; work is shared again by speed, which is the same for all."""
    mover = msgspec.structs.replace(
        said[move.peer],
        stage=move.to,
        wants=-1,
        since=step,
        fits=tuple({*said[move.peer].fits, move.stage} - {move.to}),
    )
    after = said | {move.peer: mover}
    work = {
        stage: [
            sum(getattr(one.load, name) for one in said.values() if one.stage == stage)
            for name in ("visits", "computing_s")
        ]
        for stage in (move.stage, move.to)
    }
    for stage, (visits, seconds) in work.items():
        mates = [peer for peer, one in after.items() if one.stage == stage]
        for peer in mates:
            load = Load(visits / len(mates), seconds / len(mates), 0.0)
            after[peer] = msgspec.structs.replace(after[peer], load=load)
    return after


def play(said: dict[bytes, Present], most: int = 100, **changes: Any) -> list[Move]:
    """Moves until nobody wants to, each after everybody has rested."""
    moves: list[Move] = []
    step = STEP
    while (move := decide(scene(said, step=step, **changes))) is not None:
        moves.append(move)
        assert len(moves) <= most, "no end to it"
        said = moved(said, move, step)
        step += REST_STEPS
    return moves


# ---- the decision --------------------------------------------------------------------------------------------------


def test_two_stages_of_one_peer_gain_one_each() -> None:
    moves = play(swarm_of(4, 1, 1))
    assert [(m.stage, m.to, m.urgent) for m in moves] == [(0, 1, True), (0, 2, True)]
    assert FOUNDER not in {m.peer for m in moves}
    assert moves[0].reason == "stage 1 has one peer only, stage 0 has 4"


def test_the_last_replica_comes_before_load_and_is_helped_by_the_stage_with_most_peers() -> None:
    move = decide(scene(swarm_of(3, 5, 4, 1, seconds=(1.0, 50.0, 1.0, 1.0))))
    assert move is not None and (move.stage, move.to) == (1, 3)


def test_the_alarm_must_stand() -> None:
    assert decide(scene(swarm_of(3, 1), alarm=frozenset())) is None
    assert decide(scene(swarm_of(3, 1))) is not None


def test_a_stage_of_two_gives_nobody() -> None:
    assert decide(scene(swarm_of(2, 1, 2))) is None


def test_by_load_a_stage_keeps_three_and_the_longest_stage_gets_one() -> None:
    assert decide(scene(swarm_of(2, 3, seconds=(60.0, 6.0)))) is None
    move = decide(scene(swarm_of(2, 4, seconds=(60.0, 6.0))))
    assert move is not None and (move.stage, move.to, move.urgent) == (1, 0, False)
    assert move.reason == "stage 0 needs 30 s for a step and stage 1 1.5 s; after it 20 s"


def test_two_equally_poor_stages_are_both_helped() -> None:
    """One move does not make the step shorter, two do."""
    moves = play(swarm_of(8, 3, 3, seconds=(60.0, 60.0, 60.0)))
    assert [(m.stage, m.to) for m in moves][:2] == [(0, 1), (0, 2)]


def test_gain_must_pay_for_the_move() -> None:
    said = swarm_of(3, 5, seconds=(60.0, 30.0))
    assert decide(scene(said)) is not None
    assert decide(scene(said, steps_left=SETTLED_STEPS - 1)) is None
    assert decide(scene(said, state_bytes=(10**12,) * 2)) is None  # days of download
    quick = {peer: msgspec.structs.replace(one, up_bytes_per_s=1e12) for peer, one in said.items()}
    assert decide(scene(quick, state_bytes=(10**12,) * 2)) is not None
    assert decide(scene(swarm_of(3, 5, seconds=(0.06, 0.03)))) is None  # milliseconds a step
    assert decide(scene(swarm_of(6, 6, seconds=(60.0, 56.0)))) is None  # not by MARGIN


def test_a_peer_that_is_bound_by_its_uplink_is_as_slow_anywhere() -> None:
    said = swarm_of(2, 6, seconds=(60.0, 30.0))
    weights = (1.0, 4.0)
    assert decide(scene(said, weights=weights)) is not None  # a fourth of the computing there
    sends = {
        p: msgspec.structs.replace(one, load=Load(2.0, 5.0, 60.0)) if one.stage else one for p, one in said.items()
    }
    assert decide(scene(sends, weights=weights)) is None  # for those that stay would need even longer


def test_who_had_nothing_to_do_is_the_first_to_go() -> None:
    said = swarm_of(2, 6, seconds=(60.0, 30.0))
    said[key(5)] = msgspec.structs.replace(said[key(5)], load=Load(0.0, 0.0, 0.0), forward_s=0.2)
    said[key(6)] = msgspec.structs.replace(said[key(6)], load=Load(0.0, 0.0, 0.0), forward_s=9.0)
    move = decide(scene(said))
    assert move is not None and move.peer != key(6)
    assert decide(scene(said, aside=frozenset(said) - {key(6)})) is None  # it would bring nothing


@pytest.mark.parametrize(
    "changed",
    [
        {"wants": 0},  # it moves
        {"trains": False},  # it is on its way in
        {"since": STEP - SETTLED_STEPS + 1},
    ],
)
def test_by_load_nobody_moves_while_others_come_and_go(changed: dict[str, Any]) -> None:
    said = swarm_of(2, 6, seconds=(60.0, 30.0))
    assert decide(scene(said)) is not None
    one = key(7)
    assert (
        decide(scene(said | {one: msgspec.structs.replace(said[one], **{"since": STEP - SETTLED_STEPS} | changed)}))
        is None
    )


def test_a_last_replica_waits_for_nobody_but_for_whom_comes_to_it() -> None:
    said = swarm_of(4, 1, 1)
    coming = msgspec.structs.replace(says(-1), wants=1)
    move = decide(scene(said | {key(9): coming}))
    assert move is not None and move.to == 2
    stuck = serves(1, trains=False, since=STEP - 500)
    move = decide(scene(said | {key(9): stuck}))
    assert move is not None and move.to == 1


def test_a_lost_stage_is_another_matter() -> None:
    said = {peer: one for peer, one in swarm_of(4, 1, 1).items() if one.stage != 1}
    assert decide(scene(said, weights=(2.0, 2.0, 2.0))) is None


def test_whoever_is_asked_looks_for_itself() -> None:
    said = swarm_of(4, 1, 1)
    right = scene(said)
    assert wrong(right, key(1), 1, urgent=True) == ""
    assert "founder" in wrong(right, FOUNDER, 1, urgent=True)
    assert "no way" in wrong(right, key(1), 0, urgent=True)
    assert "no way" in wrong(right, key(1), 3, urgent=True)
    assert "would be left with 2 peers" in wrong(scene(swarm_of(3, 1, 1)), key(1), 1, urgent=False)
    assert "would be left with 1 peers" in wrong(scene(swarm_of(2, 1, 1)), key(1), 1, urgent=True)
    assert "stage 1 has 2 peers" in wrong(scene(swarm_of(4, 2, 1)), key(1), 1, urgent=True)
    tied = said | {key(1): msgspec.structs.replace(said[key(1)], fits=())}
    assert "cannot serve" in wrong(scene(tied), key(1), 1, urgent=True)
    fresh = said | {key(1): msgspec.structs.replace(said[key(1)], since=STEP - REST_STEPS + 1)}
    assert "stays for" in wrong(scene(fresh), key(1), 1, urgent=False)
    # of two who move at once, the one with the smaller key does
    both = {
        peer: msgspec.structs.replace(one, wants=1) if peer in (key(1), key(2)) else one
        for peer, one in swarm_of(6, 1).items()
    }
    assert wrong(scene(both), key(1), 1, urgent=True) == ""
    assert wrong(scene(both), key(2), 1, urgent=True) == "another peer moves"


peers = st.builds(
    lambda stage, visits, computing, sending, forward, rate, since, fits, wants, trains: says(
        stage, load=Load(visits, computing, sending), forward_s=forward, up_bytes_per_s=rate, since=since, fits=tuple(fits),
        wants=wants, trains=trains,
    ),
    st.integers(0, 3), st.floats(0, 64), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 100), st.just(0.0) | st.floats(LEAST_RATE, 1e9), st.sampled_from([0, 0, 0, STEP]),
    st.sets(st.integers(0, 5), max_size=4), st.sampled_from([-1] * 9 + [1]), st.sampled_from([True] * 9 + [False]),
)  # fmt: skip


@given(st.lists(peers, min_size=1, max_size=14), st.randoms(use_true_random=False))
def test_any_scene_has_one_answer_that_is_allowed(described: list[Present], random: Any) -> None:
    said = {key(number): one for number, one in enumerate(described)}
    here = scene(said, weights=(2.0, 1.0, 3.0, 2.0), state_bytes=(1000,) * 4)
    move = decide(here)
    mixed = list(said.items())
    random.shuffle(mixed)
    assert decide(scene(dict(mixed), weights=(2.0, 1.0, 3.0, 2.0), state_bytes=(1000,) * 4)) == move
    if move is None:
        return
    counts = [len(replicas) for replicas in here.staff]
    assert wrong(here, move.peer, move.to, urgent=move.urgent) == ""
    assert move.peer != FOUNDER and said[move.peer].stage == move.stage != move.to and move.to in said[move.peer].fits
    assert counts[move.stage] > (2 if move.urgent else KEEP) and (counts[move.to] == 1 if move.urgent else True)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 1e3)), min_size=2, max_size=5))
def test_it_comes_to_rest_and_no_step_becomes_longer_by_load(stages: list[tuple[int, float]]) -> None:
    counts, seconds = zip(*stages, strict=True)
    first = swarm_of(*counts, seconds=seconds)
    said, moves = first, play(first, most=2 * len(first))
    for move in moves:
        before, said = longest(said), moved(said, move)
        assert move.urgent or longest(said) <= before
    # nobody goes back to where it was
    stays = [(peer, one.stage) for peer, one in first.items()] + [(move.peer, move.to) for move in moves]
    assert len(set(stays)) == len(stays)


def longest(said: dict[bytes, Present]) -> float:
    """Seconds of the stage that takes longest, all its peers being alike."""
    return max(one.load.computing_s for one in said.values())


# ---- the memory ----------------------------------------------------------------------------------------------------


def test_the_alarm_needs_time_and_ends_at_once() -> None:
    balancer, stands = Balancer(BEAT_S), ALARM_BEATS * BEAT_S
    assert not balancer.watch([2, 1], 0.0) and not balancer.watch([2, 1], stands - 1.0)
    assert balancer.watch([2, 1], stands) and balancer.alarm == {1: 1}
    assert balancer.watch([2, 0], stands + 1.0) and balancer.alarm == {1: 0}
    assert balancer.watch([2, 2], stands + 2.0) and balancer.alarm == {}
    assert not balancer.watch([2, 1], stands + 3.0)


def alarmed(*replicas: int) -> Balancer:
    """A memory in which the alarm stands."""
    balancer = Balancer(BEAT_S)
    balancer.watch(replicas, -ALARM_BEATS * BEAT_S)
    balancer.watch(replicas, 0.0)
    return balancer


def test_an_order_is_repeated_until_it_is_obeyed_and_nobody_else_is_asked() -> None:
    said = swarm_of(4, 1, 1)
    balancer = alarmed(4, 1, 1)
    move = balancer.order(scene(said), 0.0)
    assert move is not None and move.to == 1
    assert balancer.order(scene(said), RESEND_S / 2) is None
    assert balancer.order(scene(said), RESEND_S) == move
    going = said | {move.peer: msgspec.structs.replace(said[move.peer], wants=1)}
    assert balancer.order(scene(going), 5.0) is None
    gone = {peer: one for peer, one in said.items() if peer != move.peer}
    assert balancer.order(scene(gone), UNHEARD_S) is None  # it builds its learner
    there = gone | {move.peer: serves(1, trains=False, since=STEP)}
    assert balancer.order(scene(there), UNHEARD_S + 1.0) is None
    settled = gone | {move.peer: serves(1, since=STEP)}
    following = balancer.order(scene(settled), UNHEARD_S + 2.0)
    assert following is not None and following.to == 2 and following.peer != move.peer


def test_who_does_not_go_is_put_aside_for_a_while() -> None:
    said = {peer: one for peer, one in swarm_of(4, 1).items() if peer not in (key(2), key(3))} | {key(9): serves(0)}
    balancer = alarmed(3, 1)
    first = balancer.order(scene(said), 0.0)
    assert first is not None and balancer.order(scene(said), OBEY_S - 1.0) == first
    other = balancer.order(scene(said), OBEY_S)
    assert other is not None and {first.peer, other.peer} == {key(1), key(9)}
    assert balancer.order(scene(said), 2 * OBEY_S) is None  # there are no others
    assert balancer.order(scene(said), OBEY_S + ASIDE_S) == first


def test_who_dies_on_its_way_is_replaced() -> None:
    said = swarm_of(5, 1)
    balancer = alarmed(5, 1)
    first = balancer.order(scene(said), 0.0)
    assert first is not None
    gone = {peer: one for peer, one in said.items() if peer != first.peer}
    assert balancer.order(scene(gone), UNHEARD_S - 1.0) is None
    other = balancer.order(scene(gone), UNHEARD_S)
    assert other is not None and other.peer != first.peer
    stuck = said | {other.peer: serves(1, trains=False, since=0)}
    assert balancer.order(scene(stuck), UNHEARD_S + ARRIVE_S - 1.0) is None
    assert balancer.order(scene(stuck), UNHEARD_S + ARRIVE_S) is not None


# ---- where newcomers go --------------------------------------------------------------------------------------------

NEWCOMERS = [bytes([200 + number]) * 32 for number in range(40)]


def test_a_newcomer_takes_the_stage_that_is_slowest_for_its_work() -> None:
    """Not the one with the fewest peers: two of stage 2 are quick enough for theirs."""
    said = swarm_of(4, 4, 2, seconds=(12.0, 24.0, 6.0))  # 3, 6 and 3 seconds a step
    assert {neediest(scene(said), [4, 4, 2], {0, 1, 2}, me) for me in NEWCOMERS} == {1}
    slow = said | {key(n): msgspec.structs.replace(said[key(n)], load=Load(3.0, 12.0, 0.0)) for n in range(4)}
    assert {neediest(scene(slow), [4, 4, 2], {0, 1, 2}, me) for me in NEWCOMERS} == {0}  # its peers are slower now
    assert {neediest(scene(said), [4, 4, 2], {2}, me) for me in NEWCOMERS} == {2}  # what fits comes before


def test_others_that_are_on_the_way_count() -> None:
    said = swarm_of(4, 4, 2, seconds=(16.0, 24.0, 6.0))  # 4, 6 and 3 seconds a step
    assert neediest(scene(said), [4, 4, 2], {0, 1, 2}, NEWCOMERS[0]) == 1
    assert neediest(scene(said), [4, 8, 2], {0, 1, 2}, NEWCOMERS[0]) == 0  # 3 seconds, with four more of them


@pytest.mark.parametrize("counts", [[3, 3, 1], [3, 3, 0]])
def test_a_stage_that_would_be_lost_with_a_peer_comes_before_load(counts: list[int]) -> None:
    said = swarm_of(*counts, seconds=(3.0, 30.0, 0.1))
    one = Scene(said=said, weights=(1.0,) * 3, state_bytes=(0,) * 3, founder=FOUNDER, step=STEP, steps_left=0)
    assert {neediest(one, counts, {0, 1, 2}, me) for me in NEWCOMERS} == {2}
    assert {neediest(one, counts, {0, 1}, me) for me in NEWCOMERS} == {1}


def test_while_costs_are_unknown_the_fewest_peers_decide() -> None:
    said = swarm_of(3, 4, 2, seconds=(12.0, 24.0, 6.0))
    for number in range(7, 9):  # of stage 2 nobody has done a step
        said[key(number)] = msgspec.structs.replace(said[key(number)], load=Load(0.0, 0.0, 0.0))
    assert {neediest(scene(said), [3, 4, 2], {0, 1, 2}, me) for me in NEWCOMERS} == {2}
    assert {neediest(scene(said), [3, 4, 2], {0, 1}, me) for me in NEWCOMERS} == {1}  # of these all is known
    nobody = Scene(said={}, weights=(1.0,) * 3, state_bytes=(0,) * 3, founder=FOUNDER, step=0, steps_left=0)
    assert neediest(nobody, [2, 1, 3], {0, 1, 2}, NEWCOMERS[0]) == 1
    assert neediest(nobody, [2, 1, 3], {0, 2}, NEWCOMERS[0]) == 0


def test_newcomers_of_the_same_moment_spread_over_equal_stages_and_stay() -> None:
    """Equal by count, or by times as far as those are measured."""
    nobody = Scene(said={}, weights=(1.0,) * 3, state_bytes=(0,) * 3, founder=FOUNDER, step=0, steps_left=0)
    about = scene(swarm_of(3, 3, 3, seconds=(12.0, 12.5, 11.5)))
    for one, counts in ((nobody, [1, 1, 1]), (about, [3, 3, 3])):
        taken = [neediest(one, counts, {0, 1, 2}, me) for me in NEWCOMERS]
        assert all(taken.count(stage) >= 7 for stage in range(3))
        assert taken == [neediest(one, counts, {2, 1, 0}, me) for me in NEWCOMERS]
        assert all(neediest(one, counts, {0, 1, 2}, me, wanted) == wanted for me in NEWCOMERS for wanted in range(3))
