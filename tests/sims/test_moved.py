"""Calls that go through a part of the model are priced by that part."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farflung.compression import unreduced
from farflung.compression.registry import parse_codec
from farflung.protocol.chain import PartResult, RoundResult
from farflung.sims import clock
from farflung.sims.churn import make_schedule
from farflung.sims.moved import LearnersDoor, share_of
from farflung.sims.scenario import Scenario, parse_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import simulate
from farflung.sims.toy import ToyLearner
from farflung.training.errors import NothingOffered
from farflung.training.rules import Nesterov

SCENARIO = """
about = "Three fragments in turn."
mode = "cost"
method = "none"
duration_s = 60.0
[manifest.model]
preset = "tiny"
[manifest.swarm]
batch_tokens = 512
inner_steps = 6
fragments = 3
total_steps = 1000
min_round_s = 2.0
[[peers]]
name = "lab"
count = 2
tokens_per_s = 1024.0
up_mbit = 100.0
down_mbit = 100.0
"""


def test_what_a_call_is_given_says_what_it_goes_through() -> None:
    parts = (
        PartResult(b"a" * 32, 20, 30, b"d" * 32),
        PartResult(b"b" * 32, 30, 60, b""),
        PartResult(b"c" * 32, 60, 70, b"d" * 32),
    )
    result = RoundResult(b"p" * 32, (), parts, 0)
    mean = torch.zeros(5)
    coded = parse_codec("int8").encode(torch.zeros(10))
    both = unreduced.pack(10, [(coded, 0.5), (coded, 0.5)])
    for name, args, share in (
        ("offer", (20, 70), 0.5),
        ("offered_gradient", (0, 25), 0.25),
        ("apply", ([(0, 5, mean), (10, 15, mean)],), 0.1),
        ("decode", (result, {0: coded, 2: both}), 0.3),  # of both two are decoded
        ("chunk_digests", (), 1.0),
        ("save_vote", (object(),), 1.0),
    ):
        assert share_of(name, args, 100) == pytest.approx(share), name


def test_a_call_takes_what_its_share_does() -> None:
    learner = ToyLearner(8, Nesterov())
    door = LearnersDoor(lambda name, share: 1.0 + 40.0 * share, learner.num_parameters)

    async def main() -> tuple[float, float]:
        began = asyncio.get_running_loop().time()
        await door.run(learner.offer, 2, 4)
        then = asyncio.get_running_loop().time()
        await door.run(learner.offered_gradient, 2, 3)
        return then - began, asyncio.get_running_loop().time() - then

    assert clock.run(main()) == pytest.approx((11.0, 6.0))


def test_what_could_not_be_taken_changes_no_book() -> None:
    """A plan of the round before may be late: what is in flight is what was sent, and not what was offered since."""
    learner = ToyLearner(8, Nesterov())
    learner.train([1], 0)
    learner.offer(0, 4)
    delta = learner.offered_gradient(0, 4)
    learner.train([2], 1)
    learner.offer(0, 4)
    with pytest.raises(NothingOffered):
        learner.offered_gradient(4, 8)
    learner.apply([(0, 4, delta)], contributed=True)
    assert learner.strayed() < 1e-6 and learner.trained == [2]


def scenario(fragments: int) -> Scenario:
    return parse_scenario(SCENARIO.replace("fragments = 3", f"fragments = {fragments}"), name="moved")


@pytest.mark.parametrize("fragments", [1, 3])
def test_nodes_pay_for_what_a_round_moves(fragments: int) -> None:
    made = scenario(fragments)
    plan = prepare(made, 0, make_schedule(made, 0, Path())).plan
    shares: dict[str, set[float]] = {}

    def seconds(peer: int, name: str, share: float) -> float:
        shares.setdefault(name, set()).add(share)
        return plan.outfit.seconds(peer, name, share)

    report = simulate(replace(plan, outfit=replace(plan.outfit, seconds=seconds)))
    assert report.violations == [] and report.rounds > 6
    for name in ("offer", "offered_gradient", "apply"):
        assert shares[name] and all(share == pytest.approx(1 / fragments, rel=0.2) for share in shares[name]), name
    once = {share for share in shares["decode"] if share == pytest.approx(1 / fragments, rel=0.2)}
    twice = shares["decode"] - once
    assert once and twice and all(share == pytest.approx(2 / fragments, rel=0.2) for share in twice), (
        "while two peers are alone"
    )
    assert shares["chunk_digests"] == {1.0}
    whole, quarter, none = (plan.outfit.seconds(0, "offer", share) for share in (1.0, 0.25, 0.0))
    assert quarter - none == pytest.approx((whole - none) / 4) and whole > none
