"""What the ladder is told: the links of a founder, and who has the state of a stage."""

import math

import pytest
from tests.protocol.pipeline_says import says

from farflung.node.network import LinkStats
from farflung.node.offers import STEP_S, arrives, loss_of, replicas
from farflung.node.stage_recipe import StageRecipe, stage_recipe
from farflung.protocol.keys import PeerId, short
from farflung.protocol.roll import Roll
from farflung.sims.pipeline_small import recipe
from farflung.training.outer import BYTES_PER_ELEMENT
from farflung.training.pipeline_online import RATE_BYTES_PER_S
from farflung.training.recovery_costs import Rung
from farflung.training.recovery_ladder import decide

ME, A, B, C, D = (bytes([number]) * 32 for number in range(5))
NEW, OLD = b"n" * 32, b"o" * 32
NOW = 1.0


def roll_of(**said: object) -> Roll:
    roll = Roll(b"w" * 32, D, ME, stages=2, heartbeat_s=2.0)
    for name, present in said.items():
        roll.heard({"A": A, "B": B, "C": C, "D": D}[name], present, NOW)  # type: ignore[arg-type]
    return roll


def link(down: float) -> LinkStats:
    return LinkStats(carrier="tls", up_bytes_per_s=0.0, down_bytes_per_s=down, sent_bytes=0, received_bytes=0)


def of_stage_1() -> StageRecipe:
    return stage_recipe(recipe(), 1)


def test_bytes_come_as_fast_as_their_senders_uplink_gives() -> None:
    roll = roll_of(A=says(1, up_bytes_per_s=2e6), B=says(1))
    assert arrives(roll, {}, A) == 2e6
    assert arrives(roll, {}, B) == arrives(roll, {}, C) == RATE_BYTES_PER_S  # unknown, and never heard


@pytest.mark.parametrize(
    ("seen", "offered", "bound"),
    [
        (0.5e6, 2e6, 0.5e6),  # it could have sent four times as fast
        (0.5e6, 0.9e6, math.inf),  # by how far measurements are off
        (3e6, 2e6, math.inf),
        (0.0, 2e6, math.inf),  # nothing came yet
        (0.5e6, 0.0, math.inf),  # nobody knows what it can send
    ],
)
def test_no_faster_than_our_downlink_takes_where_it_has_been_seen_to_be_the_bound(
    seen: float, offered: float, bound: float
) -> None:
    roll = roll_of(A=says(1, up_bytes_per_s=5e6), B=says(1, up_bytes_per_s=offered))
    links: dict[PeerId, LinkStats] = {B: link(seen)}
    assert arrives(roll, links, A) == min(5e6, bound)
    links[C] = link(0.4e6)  # a slower one says nothing
    assert arrives(roll, links, A) == min(5e6, bound)


def test_replicas_of_the_newest_state_come_first_and_older_ones_are_caught_up_with() -> None:
    held = says(1, digest=NEW, version=7, up_bytes_per_s=1e6)
    roll = roll_of(A=held, B=held, C=says(1, digest=OLD, version=5, up_bytes_per_s=1e6), D=says(0, digest=OLD))
    live, behind = replicas(roll, of_stage_1(), {}, NOW)
    nbytes = BYTES_PER_ELEMENT * of_stage_1().own.num_parameters
    assert (live.rung, live.holders, live.nbytes) == (Rung.REPLICA, (short(A), short(B)), nbytes)
    assert live.bytes_s == 2e6 and live.steps_behind == 0  # chunks come from both
    assert (behind.rung, behind.holders, behind.steps_behind) == (Rung.BEHIND, (short(C),), 2 * 4)
    narrow = {A: link(0.25e6)}
    assert [offer.bytes_s for offer in replicas(roll, of_stage_1(), narrow, NOW)] == [0.25e6, 0.25e6]
    decided = decide(loss_of(roll, of_stage_1(), NOW), [behind, live])
    assert decided.first == live and decided.why.endswith("the replica serves meanwhile")
    assert f"live replica from {short(A)} and {short(B)}" in decided.why and "next replica behind" in decided.why


def test_another_state_of_the_same_version_is_no_replica() -> None:
    roll = roll_of(A=says(1, digest=NEW, version=7), B=says(1, digest=NEW, version=7), C=says(1, digest=OLD, version=7))
    assert [offer.holders for offer in replicas(roll, of_stage_1(), {}, NOW)] == [(short(A), short(B))]
    assert replicas(roll_of(A=says(1)), of_stage_1(), {}, NOW) == []  # it downloads itself


def test_what_is_measured_is_the_median_of_what_data_nodes_say() -> None:
    at = {"step_s": 3.0, "losses_per_hour": 0.2}
    roll = roll_of(A=says(0, **at), B=says(0, **{**at, "step_s": 5.0}), C=says(1, step_s=50.0))
    loss = loss_of(roll, of_stage_1(), NOW)
    assert (loss.stage, loss.iteration_s, loss.failures_per_hour, loss.may_skip) == (1, 4.0, 0.2, False)
    assert loss_of(roll_of(), of_stage_1(), NOW).iteration_s == STEP_S


def test_routes_leave_lost_stages_out_as_long_as_there_are_no_more_of_them_than_a_visit_may_skip() -> None:
    def may_skip(of: int, *lost: int) -> bool:
        whole = recipe(stages=5, layers=5, pipeline={"skip": 0.4})
        roll = Roll(whole.swarm, D, ME, stages=5, heartbeat_s=2.0)
        for stage in set(range(5)) - {of, *lost}:
            roll.heard(bytes([9, stage]) * 16, says(stage, digest=NEW), NOW)
        return loss_of(roll, stage_recipe(whole, of), NOW).may_skip

    assert may_skip(2) and may_skip(2, 3)
    assert not may_skip(2, 3, 4) and not may_skip(2, 0) and not may_skip(0)
