"""Who begins a stage anew that is lost, as its proposer decides."""

from typing import Any

from tests.protocol.pipeline_says import LATE, SWARM, A, B, C, D, hear, of_three, says

from farflung.protocol.lives import Life
from farflung.protocol.lost import begins, outlook
from farflung.protocol.roll import Roll

TIED = says(0)
"""Of a proposer whose machine stays where it is."""


def test_the_proposer_looks_for_a_quorum_and_for_half_of_the_others() -> None:
    first, second = sorted((A, B))
    gone = says(0, lost=(1,))
    for me, others, view, decides in (
        (first, {second: says(0)}, (first, second), True),  # half of the view, with its first
        (second, {first: says(0)}, (first, second), False),
        (second, {first: gone}, (first, second), True),
        (first, {second: gone, D: says(2, life=1, digest=b"d" * 32)}, (first, second), False),
        (first, {second: gone, D: says(2, life=1, digest=b"d" * 32, lost=(1,))}, (first, second), True),
    ):
        roll = of_three(me)
        for peer, said in others.items():
            roll.heard(peer, said, LATE)
        newcomer = b"n" * 32
        roll.heard(newcomer, says(-1, wants=1, fits=(1,)), LATE)
        if D not in others:
            roll._shown[2] = LATE
        assert begins(roll, view, TIED, LATE) == ({1: newcomer} if decides else {})


def test_who_begins_a_stage_anew() -> None:
    E, F, G = (bytes([number]) * 32 for number in (5, 6, 7))
    roll = of_three()
    data: dict[str, Any] = {"fits": (1,), "lost": (1,)}
    for peer in (D, E, F):
        roll.heard(peer, says(2, life=1, digest=b"d" * 32, **data), LATE)
    [chosen] = begins(roll, (A,), TIED, LATE).values()
    assert chosen in (D, E, F)  # of the stage with most
    roll.renew([Life(1, 2, chosen)], LATE)
    later = 2 * LATE + 1
    for peer in (D, E, F):
        roll.heard(peer, says(2, life=1, digest=b"d" * 32, **data), later)
    [next_one] = begins(roll, (A,), TIED, later).values()
    assert next_one in {D, E, F} - {chosen}  # it did not come to it the last time
    assert begins(roll, (A,), TIED, later) == {1: next_one}
    for peer in {D, E, F} - {chosen}:  # a person has tied these to their stage
        roll.heard(peer, says(2, life=1, digest=b"d" * 32, lost=(1,)), later)
    assert begins(roll, (A,), TIED, later) == {1: chosen}
    roll.heard(C, says(-1, wants=2, fits=(1, 2)), later)
    roll.heard(G, says(-1, wants=2, fits=(2,)), later)
    assert begins(roll, (A,), TIED, later) == {1: C}  # whoever waits outside comes first


def test_a_holder_without_a_quorum_does_not_count_as_one_while_it_says_so() -> None:
    held: dict[str, Any] = {"life": 1, "digest": b"c" * 32}
    roll = of_three()
    roll._shown[2] = 3 * LATE
    hear(roll, 1.0, C=says(1, **held))
    hear(roll, 20.0, C=says(1, lost=(1,), **held))
    assert roll.lost(1.0 + LATE - 0.2, held=0) == () and roll.lost(1.0 + LATE, held=0) == (1,)
    assert (
        roll.serving(1, 20.0) == [C] and roll.holders(1, 20.0) is not None
    )  # steps, shadows and evaluations go on with it
    hear(roll, 1.0 + LATE, D=says(1, **held))  # one that is back from the other side, or has one again
    assert roll.lost(1.0 + LATE, held=0) == ()


def test_who_still_has_the_state_begins_the_next_life() -> None:
    """The newest version, then the smallest key; not one of an older life, nor one that only downloads, and before all who have nothing."""
    E, F, G = (bytes([number]) * 32 for number in (5, 6, 7))
    stranded: dict[str, Any] = {"life": 1, "digest": b"c" * 32, "lost": (1,)}
    roll = of_three()
    roll._shown[2] = LATE
    peers = {
        B: says(-1, wants=1, fits=(1,), version=9),
        C: says(1, version=9, **stranded | {"life": 0}),
        D: says(1, version=9, **stranded | {"digest": b""}),
        E: says(1, version=6, **stranded),
        F: says(1, version=7, **stranded),
        G: says(1, version=7, **stranded),
    }
    for peer, said in peers.items():
        roll.heard(peer, said, LATE)
    assert begins(roll, (A,), TIED, LATE) == {1: F}
    roll.forget(F)
    assert begins(roll, (A,), TIED, LATE) == {1: G}
    roll.forget(G)
    assert begins(roll, (A,), TIED, LATE) == {1: E}


def test_the_proposer_asks_the_same_of_a_stage_without_a_quorum() -> None:
    """What its survivors say is no more than the word of others: half of those is needed, and a quorum of the data nodes."""
    first, second = sorted((A, B))
    stranded = says(1, life=1, digest=b"c" * 32, lost=(1,))
    for view, others, decides in (
        ((first,), {}, True),
        ((first, second), {second: says(0)}, True),  # half of the view, with its first
        ((first, second, b"z" * 32), {second: says(0)}, False),
        ((first, second, b"z" * 32), {second: says(0, lost=(1,))}, True),
        ((first,), {D: says(2, life=1, digest=b"d" * 32)}, True),  # half: the survivor itself agrees
        ((first,), {D: says(2, life=1, digest=b"d" * 32), b"e" * 32: says(2, life=1, digest=b"d" * 32)}, False),
    ):
        roll = of_three(first)
        for peer, said in {**others, C: stranded}.items():
            roll.heard(peer, said, LATE)
        roll._shown[2] = LATE
        assert begins(roll, view, TIED, LATE) == ({1: C} if decides else {})


def test_of_those_who_wait_outside_one_with_an_old_state_comes_first() -> None:
    E, F = (bytes([number]) * 32 for number in (5, 6))
    roll = of_three()
    roll._shown[2] = LATE
    for peer, version in ((D, 0), (E, 4), (F, 3)):
        roll.heard(peer, says(-1, wants=1, fits=(1,), version=version), LATE)
    assert begins(roll, (A,), TIED, LATE) == {1: E}
    roll.heard(E, says(-1, wants=2, fits=(1, 2), version=4), LATE)  # that is of stage 2
    assert begins(roll, (A,), TIED, LATE) == {1: F}


def test_the_last_peer_of_a_stage_stays() -> None:
    roll = of_three()
    roll.heard(D, says(2, life=1, digest=b"d" * 32, lost=(1,), fits=(1,)), LATE)
    assert begins(roll, (A,), TIED, LATE) == {}


def test_the_proposer_begins_the_stage_itself_where_only_it_can() -> None:
    """It was never asked, and a swarm whose one spare peer proposed stood for good."""
    free = says(0, fits=(1,), lost=(1,))
    roll = of_three()
    roll.heard(B, says(0, lost=(1,)), LATE)
    roll.heard(D, says(2, life=1, digest=b"d" * 32, lost=(1,)), LATE)
    assert begins(roll, (A, B), free, LATE) == {1: A}
    assert begins(roll, (A, B), TIED, LATE) == {}
    assert begins(roll, (A,), free, LATE + 1) == {1: A}, "B is a data node as well"
    roll.forget(B)
    assert begins(roll, (A,), free, LATE + 1) == {}, "it is the last one"
    newcomer = b"n" * 32
    roll.heard(newcomer, says(-1, wants=1, fits=(1,)), LATE + 1)
    assert begins(roll, (A,), free, LATE + 1) == {1: newcomer}, "whoever waits outside comes first"


def test_two_lost_stages_do_not_call_the_same_peer_nor_empty_a_third() -> None:
    roll = Roll(SWARM, A, A, stages=4, heartbeat_s=2.0)
    roll.renew([Life(stage, 1, C) for stage in (1, 2, 3)], 0.0)
    roll.tick(0.0)
    for peer in (B, D):
        roll.heard(peer, says(3, life=1, digest=b"d" * 32, lost=(1, 2), fits=(1, 2)), LATE)
    found = begins(roll, (A,), TIED, LATE)
    assert list(found) == [1] and found[1] in (B, D)
    roll.renew([Life(1, 2, found[1])], LATE)
    assert begins(roll, (A,), TIED, LATE) == {}  # the other one is the last of stage 3 from now on


def test_people_are_told_whether_a_lost_stage_can_be_begun_anew() -> None:
    roll = Roll(SWARM, A, A, stages=4, heartbeat_s=2.0)
    assert outlook(roll, (2,)) == (
        "stage 2 is lost: begun anew as soon as a machine can take it; to add one, `farflung join` there"
    )
    assert outlook(roll, (1, 2)).startswith("stages 1 and 2 are lost: begun anew")  # stage 0 is among the other half
    assert outlook(roll, (0, 3)) == (
        "stages 0 and 3 are lost, as far as this node hears, and too few are left to begin them anew: see to this machine's link, or "
        "start a machine again that served stage 0 or 3"
    )
    assert outlook(roll, (1, 2, 3)).startswith("stages 1, 2 and 3 are lost, as far")
    two = Roll(SWARM, A, A, stages=2, heartbeat_s=2.0)
    assert "begun anew as soon" in outlook(two, (1,)) and "start a machine again" in outlook(two, (0,))
