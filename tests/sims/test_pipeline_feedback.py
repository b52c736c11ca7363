"""Fragments and error feedback in a swarm with a pipeline: those of each stage, over its own slice, and nothing of it is lost."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from tests.sims.pipeline_story import stage_of, until, until_done
from tests.sims.test_feedback_swarm import close, kept_parts
from torch import Tensor

from farflung.node.residuals import Residuals
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.training.flat import flatten

UP, DOWN = "int8(block=32)", "sign(block=32)"
"""Of two contributors a mean is coded once more only where that is shorter."""
ROUNDS = 5
LOOKED_AT = 4
Key = tuple[bytes, str, bytes]
"""(peer, direction, plan)."""


class Book:
    """What every peer's encoding has left out, by plan and start of the part; fp64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left_out: dict[Key, dict[int, Tensor]] = defaultdict(dict)
        encode = Residuals._encode

        def noted(residuals: Residuals, way: str, plan: bytes, x: Tensor, start: int) -> memoryview:
            before = x.double()
            payload = encode(residuals, way, plan, x, start)
            codec = residuals._codecs[way].part(start, start + x.numel())
            self.left_out[residuals._me, way, plan][start] = before - codec.decode(payload, x.numel()).double()
            return payload

        monkeypatch.setattr(Residuals, "_encode", noted)

    def owed(self, peer: bytes, way: str, rounds: list[Any], numel: int) -> Tensor:
        """By what rounds have counted."""
        total = torch.zeros(numel, dtype=torch.float64)
        for result in rounds:
            for start, stop in kept_parts(result, way, peer):
                total[start:stop] += self.left_out[peer, way, result.plan][start]
        return total


def test_each_stage_has_fragments_and_residuals_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(monkeypatch)
    seen: dict[int, int] = {}
    parts: dict[int, set[tuple[int, int]]] = defaultdict(set)

    def calm(swarm: PipelineSwarm) -> bool:
        return len(swarm.peers) == 4 and all(
            peer.applier.idle and peer.applier.version == LOOKED_AT for peer in swarm.peers.values()
        )

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: calm(swarm))
        for number, peer in swarm.peers.items():
            stage = stage_of(swarm, number)
            assert stage is not None
            history = sorted((c.commit for c in peer.member.history), key=lambda commit: commit.height)
            rounds = [commit.round for commit in history if commit.round is not None]
            seen[stage] = len(rounds)
            parts[stage] |= {(one.start, one.stop) for result in rounds for one in result.parts}
            numel = peer.pipeline.recipe.own.num_parameters
            for way in ("up", "down"):
                memory = peer.residuals.state()[f"{way}.memory"].double()
                assert memory.shape == (numel,) and memory.any()
                assert close(memory, book.owed(swarm.ids[number], way, rounds, numel)), (stage, way)
            cuts = peer.pipeline.recipe.own.cuts
            assert len(cuts) == 3 and {0, cuts[1], numel} == set(cuts)
            fragments = [{cuts[1] <= one.start for one in result.parts} for result in rounds]
            first = fragments[0]
            assert first in ({True}, {False}), "of one fragment"
            assert fragments == [{True, False} - first if number % 2 else first for number in range(LOOKED_AT)]
        await until_done(swarm, *range(4))

    own = recipe(
        total_steps=2 * ROUNDS,
        fragments=2,
        uplink_codec=UP,
        downlink_codec=DOWN,
        feedback=FeedbackSpec(uplink="residual", downlink="residual"),
    )
    swarm = simulate(own, Counting(), signers(4), story, known_means=False)
    assert not swarm.broken and seen == {0: LOOKED_AT, 1: LOOKED_AT}
    assert parts[0] != parts[1]
    assert swarm.rounds() == {0: ROUNDS, 1: ROUNDS} and {len(held) for held in swarm.digests().values()} <= {1}


def test_nothing_of_a_stage_stays_behind_when_the_run_is_over() -> None:
    """The last round moves all fragments, and exact codecs leave nothing out."""
    left: dict[int, float] = {}

    def look(swarm: PipelineSwarm) -> bool:
        for number, peer in swarm.peers.items():
            if peer.applier.version == ROUNDS and peer.applier.idle:
                coupled = swarm.learner(number).coupled
                local = flatten(coupled.layout, coupled.parameters, torch.empty(coupled.num_parameters))
                left[number] = float((coupled.outer.params - local).abs().max())
        return len(left) == 4

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: look(swarm))
        await until_done(swarm, *range(4))

    own = recipe(total_steps=2 * ROUNDS, fragments=2, uplink_codec="fp32", downlink_codec="fp32")
    swarm = simulate(own, Counting(), signers(4), story)
    assert not swarm.broken and swarm.rounds() == {0: ROUNDS, 1: ROUNDS}
    assert left == dict.fromkeys(range(4), 0.0)
