"""The ladder, the places of shadows and their schedule: pure decisions, each against what it must never do."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farflung.training.recovery_costs import SKIP_TAX, Rung, Setbacks, per_iteration, per_second
from farflung.training.recovery_ladder import PATIENT_S, Loss, Meanwhile, Offer, decide, rebuilt
from farflung.training.recovery_places import DOMAINS, Peer, Piece, fall_together, places
from farflung.training.recovery_refresh import Budget, Kept, due, filled

STAGE_BYTES = 333_000_000
LINK = 22e6
LOSS = Loss(stage=3, iteration_s=91.3, failures_per_hour=0.10, may_skip=True)
PEERS = [f"p{stage}" for stage in range(6)]


def copies() -> list[Offer]:
    whole = STAGE_BYTES * 3
    return [
        Offer(rung=Rung.SHADOW, holders=("p0",), nbytes=STAGE_BYTES // 4, bytes_s=LINK, steps_behind=10),
        Offer(rung=Rung.BEHIND, holders=("q3",), nbytes=whole, bytes_s=LINK, steps_behind=5),
        Offer(rung=Rung.REPLICA, holders=("r3", "s3"), nbytes=whole, bytes_s=20 * LINK),
    ]


def others(stage: int = 3, lost: frozenset[int] = frozenset({3}), *, swaps: bool = False) -> list[Offer]:
    return rebuilt(
        stage,
        6,
        lost,
        PEERS,
        weights_nbytes=[STAGE_BYTES] * 6,
        bytes_s=[LINK] * 6,
        swaps=swaps,
        boundary_nbytes=0,
        fit_s=0.0,
    )


def test_with_everything_there_the_rungs_come_in_the_digests_order() -> None:
    found = decide(LOSS, [*others(), *copies()])
    rungs = [one.offer.rung for one in found.order]
    assert rungs == [Rung.REPLICA, Rung.BEHIND, Rung.SHADOW, Rung.FITTED, Rung.MEAN, Rung.RANDOM]
    assert found.why == (
        "stage 3: live replica from r3 and s3, 999 MB in 2.27 s, expected to cost 0 s (0 iterations behind); next replica behind, "
        "22.8 s; whatever fails, 0.00304 s in all; reckoned with 10 % failures per peer and hour and 91.3 s per iteration; the replica serves meanwhile"
    )
    assert [one.offer.rung for one in decide(LOSS, [*others(), *copies()[:2]]).order] == rungs[1:]


def test_a_slow_link_puts_a_shadow_of_a_large_stage_behind_the_mean() -> None:
    slow = Offer(rung=Rung.SHADOW, holders=("p0",), nbytes=STAGE_BYTES // 4, bytes_s=1e4, steps_behind=10)
    order = [one.offer.rung for one in decide(LOSS, [slow, *others()]).order]
    assert order.index(Rung.MEAN) < order.index(Rung.SHADOW)


@pytest.mark.parametrize("may_skip", [False, True])
@pytest.mark.parametrize("iteration_s", [1.0, 91.3])
def test_a_try_is_waited_for_until_the_next_one_would_have_cost_as_much(iteration_s: float, may_skip: bool) -> None:
    """And never shorter than its link takes that is as fast as forecast, slow as that is."""
    loss = replace(LOSS, iteration_s=iteration_s, may_skip=may_skip)
    slow = Offer(rung=Rung.SHADOW, holders=("p0",), nbytes=STAGE_BYTES, bytes_s=1e6, steps_behind=10)
    found = decide(loss, [*others(), slow])
    stands_still = SKIP_TAX if may_skip else 1.0
    costs = [one.cost_s / stands_still for one in found.order[1:]]
    assert [found.patience_s(number, 0.0) for number in range(len(found.order))] == [
        *(max(PATIENT_S, cost) for cost in costs),
        math.inf,
    ]
    assert all(found.patience_s(number, 0.0) >= one.offer.duration_s for number, one in enumerate(found.order))
    assert found.patience_s(0, 10.0) == max(PATIENT_S, costs[0] - 10.0) and found.patience_s(0, 1e9) == PATIENT_S
    served = decide(loss, [*others(), *copies()])  # by a replica meanwhile
    assert all(served.patience_s(number, 1e9) == math.inf for number in range(len(served.order)))


def test_a_copy_of_another_time_is_not_used() -> None:
    old = Offer(rung=Rung.SHADOW, holders=("p0",), nbytes=1, bytes_s=LINK, steps_behind=10_001)
    assert [one.offer.rung for one in decide(LOSS, [old]).order] == [Rung.RANDOM]


def test_the_first_stage_is_never_routed_around() -> None:
    first = Loss(stage=0, iteration_s=91.3, failures_per_hour=0.10, may_skip=False)
    shadow = copies()[:1]
    found = decide(first, shadow)
    assert found.why.endswith(Meanwhile.WAITING) and decide(LOSS, shadow).why.endswith(Meanwhile.ROUTED_AROUND)
    assert found.order[0].cost_s > decide(LOSS, shadow).order[0].cost_s  # it is more sensitive, too


def test_what_is_on_ones_own_disk_is_served_by_nobody() -> None:
    """So others wait for it, and what else there is costs as much as without it."""
    waits = Loss(stage=3, iteration_s=91.3, failures_per_hour=0.10, may_skip=False)
    shadow = Offer(rung=Rung.SHADOW, holders=("p0",), nbytes=STAGE_BYTES // 4, bytes_s=LINK, steps_behind=10)
    for loss, meanwhile in ((LOSS, Meanwhile.ROUTED_AROUND), (waits, Meanwhile.WAITING)):
        for behind in (0, 5):
            own = Offer(rung=Rung.OWN, steps_behind=behind)
            found, without = decide(loss, [shadow, own, *others()]), decide(loss, [shadow, *others()])
            assert found.first is own and own.rung.is_exact and not own.rung.bumps_lr
            assert found.order[0].cost_s == pytest.approx(0.05 * behind * 91.3), "nothing is sent, nobody can fail"
            assert found.order[1:] == without.order
            assert found.why.startswith("stage 3: what this machine's disk has of an earlier life of the stage, ")
            assert found.why.endswith(meanwhile)
    both = decide(waits, [Offer(rung=Rung.OWN), *copies()])
    assert both.why.endswith(Meanwhile.SERVED) and both.order[0].offer.holders, "where a replica lives, it does serve"


@pytest.mark.parametrize(
    "offer", [{"rung": Rung.REPLICA}, {"rung": Rung.BEHIND}, {"rung": Rung.OWN, "holders": ("p0",)}], ids=str
)
def test_others_have_replicas_and_nobody_sends_what_is_here(offer: Any) -> None:
    with pytest.raises(ValueError, match=r"somebody has a|nobody sends"):
        Offer(**offer)


offers = st.lists(
    st.builds(
        Offer,
        rung=st.sampled_from([rung for rung in Rung if rung not in (Rung.OWN, Rung.RANDOM)]),
        holders=st.lists(st.sampled_from(PEERS), min_size=1, max_size=2, unique=True).map(tuple),
        nbytes=st.integers(0, 10**9),
        bytes_s=st.floats(1e5, 1e8),
        steps_behind=st.integers(0, 500),
    ),
    max_size=4,
)


def expected_of(loss: Loss, order: list[Offer], setbacks: Setbacks) -> float:
    """The expected cost of trying one after another, by its definition."""
    total, reached = 0.0, 1.0
    for offer in order:
        survives = math.exp(-offer.needed * per_second(loss.failures_per_hour) * offer.duration_s)
        setback = setbacks.iterations(
            offer.rung, stage=loss.stage, steps_behind=offer.steps_behind, failures_per_hour=loss.failures_per_hour
        )
        stands_still = 0.25 if loss.may_skip else 1.0
        if any(one.rung is Rung.REPLICA for one in order):
            stands_still = 0.0
        total += reached * (stands_still * offer.duration_s + survives * setback * loss.iteration_s)
        reached *= 1.0 - survives
    return total


@settings(max_examples=150, deadline=None)
@given(offers, st.floats(0.0, 0.9), st.booleans())
def test_no_order_is_cheaper(some: list[Offer], rate: float, may_skip: bool) -> None:
    loss = Loss(stage=2, iteration_s=60.0, failures_per_hour=rate, may_skip=may_skip)
    found = decide(loss, some)
    chosen = [one.offer for one in found.order]
    assert chosen[-1].rung is Rung.RANDOM
    assert found.expected_s == pytest.approx(expected_of(loss, chosen, Setbacks()))
    for order in itertools.permutations(chosen[:-1]):
        cost = expected_of(loss, [*order, chosen[-1]], Setbacks())
        assert found.expected_s <= cost * (1 + 1e-9) + 1e-9


@settings(max_examples=50, deadline=None)
@given(offers, st.floats(0.0, 0.9))
def test_the_decision_does_not_depend_on_the_order_of_offers(some: list[Offer], rate: float) -> None:
    loss = Loss(stage=2, iteration_s=60.0, failures_per_hour=rate, may_skip=True)
    forward, backward = decide(loss, some), decide(loss, some[::-1])
    assert forward.expected_s == pytest.approx(backward.expected_s)
    assert [one.cost_s for one in forward.order] == [one.cost_s for one in backward.order]


def test_what_other_stages_can_offer() -> None:
    assert [one.rung for one in others()] == [Rung.MEAN, Rung.FITTED]
    assert [one.rung for one in others(0, frozenset({0}))] == [Rung.INTERPOLATION]
    assert [one.rung for one in others(0, frozenset({0}), swaps=True)] == [Rung.TWIN]
    adjacent = others(2, frozenset({2, 3}))
    assert [one.rung for one in adjacent] == [Rung.INTERPOLATION] and adjacent[0].holders == ("p1", "p4")
    assert others(2, frozenset(range(6))) == []
    assert all(not set(one.holders) & {"p2", "p3"} for one in adjacent)


def test_weights_that_come_one_after_the_other_take_as_long_as_both_links_do() -> None:
    """And neither the size nor the link of another stage counts."""

    def mean(*bytes_s: float) -> Offer:
        sizes = [900, 100, 100, 100, 200, 100]
        [found] = rebuilt(3, 6, frozenset({3}), PEERS, weights_nbytes=sizes, bytes_s=bytes_s, swaps=False)
        return found

    slow, free = mean(9.0, 9.0, 50.0, 9.0, 10.0, 1.0), mean(*[math.inf] * 6)
    assert slow.rung is Rung.MEAN and slow.nbytes == free.nbytes == 300
    assert slow.duration_s == pytest.approx(100 / 50 + 200 / 10) and free.duration_s == 0.0


def test_the_first_stage_without_a_copy_costs_far_more_than_others() -> None:
    """As `farflung bench recovery` measured it. A copy of it is worth a long wait then, and the first one much."""
    costs = Setbacks()
    first, within, last = (costs.without_copy(stage, 0.10) for stage in (0, 3, 5))
    assert first == 34 * within == 34 * last and within == 31.0
    shadow = Offer(rung=Rung.SHADOW, holders=("p1",), nbytes=STAGE_BYTES, bytes_s=1e5, steps_behind=10)
    orders = [
        [one.offer.rung for one in decide(loss, [shadow, *others(loss.stage, frozenset({loss.stage}))]).order]
        for loss in (Loss(stage=stage, iteration_s=10.0, failures_per_hour=0.10, may_skip=False) for stage in (0, 5))
    ]
    assert orders[0][0] is Rung.SHADOW and orders[1][0] is not Rung.SHADOW


def test_setbacks_follow_the_published_points() -> None:
    mean = [
        Setbacks().iterations(Rung.MEAN, stage=3, steps_behind=0, failures_per_hour=rate)
        for rate in (0.01, 0.05, 0.075, 0.10, 0.16, 0.5)
    ]
    assert mean == [57.0, 57.0, 44.0, 31.0, 23.0, 23.0]


def test_failures_per_hour_and_iteration() -> None:
    assert per_iteration(0.10, 91.3) == pytest.approx(1 - 0.9 ** (91.3 / 3600))
    assert (1 - per_iteration(0.33, 60.0)) ** 60 == pytest.approx(0.67)


# Places.

REGIONS = ("a", "b", "c", "d", "a", "b")


def swarm(room: int = 100) -> list[Peer]:
    return [
        Peer(name=f"p{s}", stage=s, domains=(region, f"n{s}", f"o{s}"), room_bytes=room, uplink_bytes_s=1e6)
        for s, region in enumerate(REGIONS)
    ]


PIECES = [Piece(name=f"stage {s}", stage=s, nbytes=10) for s in range(6)]


def test_a_shadow_is_apart_from_its_stage_and_from_the_stages_beside_it() -> None:
    held, missing = places(swarm(), PIECES, 6)
    assert not missing and len(held) == 6
    for one in held:
        holder, stage = int(one.holder[1]), int(one.piece[-1])
        assert REGIONS[holder] != REGIONS[stage]
        assert (holder - stage) % 6 not in (0, 1, 5)
        assert "shares no region, network or owner" in one.why
    load = [sum(one.holder == f"p{s}" for one in held) for s in range(6)]
    assert max(load) <= 2


def test_any_region_can_go_and_every_stage_has_a_peer_or_a_shadow_left() -> None:
    held, _ = places(swarm(), PIECES, 6)
    for region in set(REGIONS):
        gone = {f"p{s}" for s, there in enumerate(REGIONS) if there == region}
        for stage, there in enumerate(REGIONS):
            if there == region:
                assert any(one.piece == f"stage {stage}" and one.holder not in gone for one in held)


def test_holders_stay_until_somebody_is_better_apart() -> None:
    held, _ = places(swarm(), PIECES, 6, current={"stage 3": ["p5"]})
    assert next(one for one in held if one.piece == "stage 3").holder == "p5"
    held, _ = places(swarm(), PIECES, 6, current={"stage 0": ["p4"]})  # of the same region
    assert next(one for one in held if one.piece == "stage 0").holder != "p4"


def test_a_piece_without_live_peers_keeps_what_copies_it_has() -> None:
    left = [peer for peer in swarm() if peer.stage != 2]
    held, missing = places(left, PIECES, 6, current={"stage 2": ["p5"]})
    assert next(one for one in held if one.piece == "stage 2").holder == "p5"
    held, missing = places(left, PIECES, 6)
    assert [one.split(" has")[0] for one in missing] == ["stage 2"]


def test_an_unknown_domain_counts_as_shared() -> None:
    unknown = Peer(name="x", stage=3, domains=("", "n9", "o9"), room_bytes=100, uplink_bytes_s=1e9)
    known = Peer(name="y", stage=3, domains=("c", "n8", "o8"), room_bytes=100, uplink_bytes_s=1.0)
    own = Peer(name="z", stage=0, domains=("a", "n7", "o7"), room_bytes=0, uplink_bytes_s=1.0)
    held, _ = places([unknown, known, own], PIECES[:1], 6)
    assert held[0].holder == "y"
    held, _ = places([unknown, own], PIECES[:1], 6)
    assert held[0].holder == "x" and "it shares perhaps the region with" in held[0].why


def test_a_region_weighs_more_than_a_network_and_an_owner() -> None:
    """And what is known to be shared more than what may be."""
    own = Peer(name="z", stage=0, domains=("a", "n", "o"), room_bytes=0, uplink_bytes_s=1.0)
    beside = {"room_bytes": 100, "uplink_bytes_s": 1.0, "stage": 2}
    elsewhere = Peer(name="y", domains=("b", "n", "o"), **beside)
    nowhere = Peer(name="x", domains=("", "m", "p"), **beside)
    there = Peer(name="w", domains=("a", "m", "p"), **beside)
    for expected, candidates in (("y", [there, nowhere, elsewhere]), ("x", [there, nowhere]), ("w", [there])):
        held, _ = places([own, *candidates], PIECES[:1], 4)
        assert held[0].holder == expected
    assert "it shares the region with" in held[0].why


def test_peers_of_one_owner_do_not_hold_each_others_shadows() -> None:
    peers = [
        Peer(name=f"p{s}", stage=s, domains=("", "", owner), room_bytes=100, uplink_bytes_s=1.0)
        for s, owner in enumerate(("ann", "bob", "ann", "bob", "cleo", "ann"))
    ]
    held, _ = places(peers, PIECES, 6)
    owner = {peer.name: peer.domains[2] for peer in peers}
    assert all(owner[one.holder] != owner[f"p{one.piece[-1]}"] for one in held)


def test_who_falls_together() -> None:
    def of(*regions: str) -> list[Peer]:
        return [Peer(name="p", stage=0, domains=(r, "", ""), room_bytes=1, uplink_bytes_s=1.0) for r in regions]

    assert fall_together(of("a", "a", "a"), of("a", "b", ""))
    assert not fall_together(of("a", "a", "b"), of("a", "b"))
    assert not fall_together(of("a", "a", ""), of("a", "b"))
    assert not fall_together(of("", "", ""), of("a", "b"))
    assert not fall_together(of("a", "a", "a"), of("a", "a", ""))  # nobody is known to be elsewhere


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=2), min_size=3, max_size=6))
@example(regions=[["a"], ["b"], ["b", "b"], ["c"], ["b"], ["b"]])  # the third would come too late
def test_no_stage_has_itself_and_its_shadow_in_one_region_where_that_is_avoidable(regions: list[list[str]]) -> None:
    """Each peer has room for two, as live ones do; what they cannot all avoid is worked out by trying."""
    peers = [
        Peer(name=f"p{stage}{n}", stage=stage, domains=(region, "", ""), room_bytes=20, uplink_bytes_s=1.0)
        for stage, there in enumerate(regions)
        for n, region in enumerate(there)
    ]
    pieces = [Piece(name=str(stage), stage=stage, nbytes=10) for stage in range(1, len(regions))]
    held, _ = places(peers, pieces, len(regions))
    where = {peer.name: peer.domains[0] for peer in peers}
    exposed = sum({*regions[int(one.piece)]} == {where[one.holder]} for one in held)
    assert exposed == fewest_exposed(peers, regions)


def fewest_exposed(peers: list[Peer], regions: list[list[str]]) -> int:
    """Stages that cannot have a shadow in another region than theirs: all others are matched with room, by augmenting paths."""
    slots = [(peer, number) for peer in peers for number in range(2)]
    taken: dict[tuple[str, int], int] = {}

    def place(stage: int, tried: set[tuple[str, int]]) -> bool:
        for peer, number in slots:
            slot = (peer.name, number)
            if peer.stage == stage or {*regions[stage]} == {peer.domains[0]} or slot in tried:
                continue
            tried.add(slot)
            if slot not in taken or place(taken[slot], tried):
                taken[slot] = stage
                return True
        return False

    return sum(not place(stage, set()) for stage in range(1, len(regions)))


def test_what_a_shadow_lacks_is_named() -> None:
    everybody = swarm(room=9)
    for peers, lacks in (
        (everybody, "nobody of another stage has 10 bytes left for one; more peers would have"),
        ([peer for peer in everybody if peer.stage == 0], "nobody of another stage is there to hold one"),
        ([peer for peer in everybody if peer.stage != 0], "nobody of it is there to give one"),
    ):
        assert places(peers, PIECES[:1], 6) == ([], [f"stage 0 has no place for a shadow: {lacks}"])


domain = st.sampled_from(["", *"abc"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.tuples(domain, domain, domain), st.integers(0, 40)), max_size=8))
def test_places_are_sound(some: list[tuple[int, tuple[str, str, str], int]]) -> None:
    peers = [
        Peer(name=f"p{n}", stage=stage, domains=domains, room_bytes=room, uplink_bytes_s=1.0)
        for n, (stage, domains, room) in enumerate(some)
    ]
    pieces = [Piece(name=f"stage {s}", stage=s, nbytes=10) for s in range(4)]
    held, missing = places(peers, pieces, 4)
    by_name = {peer.name: peer for peer in peers}
    for peer in peers:
        assert sum(10 for one in held if one.holder == peer.name) <= peer.room_bytes
    for one in held:
        assert by_name[one.holder].stage != int(one.piece[-1])
    assert len({(one.piece, one.holder) for one in held}) == len(held)
    for piece in pieces:
        count = sum(one.piece == piece.name for one in held)
        assert count == 1 or any(said.startswith(piece.name) for said in missing)
    assert len(DOMAINS) == 3


# Refreshes.


def kept(
    piece: str,
    step: int | None,
    *,
    holder: str = "h",
    replicas: int = 1,
    nbytes: int = 100,
    alarmed: bool = False,
    **more: float,
) -> Kept:
    settings = {"setback_per_step": 0.1, "missing_setback": 30.0} | more
    return Kept(piece=piece, holder=holder, step=step, nbytes=nbytes, replicas=replicas, alarmed=alarmed, **settings)


def names(some: list[Kept], step: int, bucket: float, rate: float = 0.003) -> tuple[list[str], float]:
    found, left = due(some, step, bucket_bytes=bucket, loss_per_step=rate, budget=Budget())
    return [one.kept.piece for one in found], left


def test_the_oldest_goes_first_and_equal_ones_take_turns() -> None:
    some = [kept("a", 7), kept("b", 3), kept("c", 5)]
    assert names(some, 10, 250.0) == (["b", "c"], 50.0)
    assert names(some, 10, 99.0) == ([], 99.0)


def test_the_neediest_waits_for_its_bytes() -> None:
    some = [kept("large", 0, nbytes=100, setback_per_step=100.0), kept("small", 9, nbytes=10)]
    assert names(some, 10, 50.0) == ([], 50.0)


def test_the_last_replica_alarm_is_over_budget() -> None:
    found, left = due([kept("a", None)], 10, bucket_bytes=-50.0, loss_per_step=0.003, budget=Budget())
    assert left == -150.0 and "over budget if need be" in found[0].why


def test_what_has_come_down_to_one_peer_is_refreshed_at_once() -> None:
    """Before what is needed more, and over budget; but not while there are debts."""
    some = [kept("fallen", 9, alarmed=True), kept("old", 0)]
    assert names(some, 10, 0.0) == (["fallen"], -100.0)
    assert names(some, 10, 250.0) == (["fallen", "old"], 50.0)
    assert names(some, 10, -1.0) == ([], -1.0)
    assert names([kept("old", 0)], 10, 0.0) == ([], 0.0)
    assert names([kept("fallen", 10, alarmed=True)], 10, 0.0) == ([], 0.0)  # there is nothing newer
    found, _ = due(some, 10, bucket_bytes=0.0, loss_per_step=0.003, budget=Budget())
    assert (
        found[0].why
        == "fallen to h: the copy is 1 steps old, and one peer is left that has it; at once, over budget if need be"
    )


def test_what_several_peers_train_waits_behind_what_one_has_alone() -> None:
    some = [kept("alone", 9), kept("shared", 0, replicas=2)]
    assert names(some, 60, 100.0)[0] == ["alone"]
    assert names([kept("shared", 0, replicas=2)], 49, 1e9)[0] == []
    assert names([kept("shared", 0, replicas=2)], 50, 1e9)[0] == ["shared"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(10, 5000), min_size=1, max_size=6),
    st.floats(1e-4, 0.05),
    st.sets(st.tuples(st.integers(0, 5), st.integers(1, 59))),
)
def test_refreshes_stay_within_their_share(
    traffic: int, sizes: list[int], rate: float, alarms: set[tuple[int, int]]
) -> None:
    """Over any run in which nothing is without a copy, bytes of refreshes are at most the share of the pipeline's bytes, and one copy more."""
    budget, bucket, sent = Budget(share=0.02), 0.0, 0
    steps = dict.fromkeys(range(len(sizes)), 0)
    for step in range(1, 60):
        some = [kept(f"s{n}", steps[n], nbytes=size, alarmed=(n, step) in alarms) for n, size in enumerate(sizes)]
        bucket = filled(bucket, traffic, some, budget)
        found, bucket = due(some, step, bucket_bytes=bucket, loss_per_step=rate, budget=budget)
        for one in found:
            steps[int(one.kept.piece[1:])] = step
            sent += one.kept.nbytes
        most = max(sizes) if alarms else 0
        assert bucket >= -most
        assert sent <= budget.share * traffic * step + most + 1e-6


def test_what_checkfree_has_no_rule_for_nobody_offers() -> None:
    """Of two neighbours that are lost together neither can be made; an end alone is a copy, another stage a mean."""

    def by_rule(stage: int, *lost: int) -> list[Rung]:
        offers = rebuilt(
            stage,
            6,
            frozenset(lost),
            PEERS,
            weights_nbytes=[STAGE_BYTES] * 6,
            bytes_s=[LINK] * 6,
            swaps=False,
            rule_only=True,
        )
        return [offer.rung for offer in offers]

    assert by_rule(2, 2) == [Rung.MEAN] and by_rule(5, 5) == [Rung.INTERPOLATION]
    assert by_rule(2, 2, 3) == by_rule(5, 4, 5) == []
