"""A peer of a pipeline that says anything, under virtual time: no other ends by it."""

import asyncio
import typing

import msgspec
import pytest
from tests.protocol.hostile import Liar
from tests.thorough import further

from farflung.node.sealed_mail import SealedMail
from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Message, PipelineMessage
from farflung.protocol.pipeline_messages import Present, StepPlan, SwarmMessage
from farflung.protocol.turns import TURN_S
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate

LIAR = 3


@pytest.mark.parametrize("seed", [*range(2), *further(*range(2, 40))])
def test_a_peer_that_says_anything_ends_no_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [signer.peer_id for signer in signers(5)]
    liar = Liar(seed, words=ids, numbers=range(6))
    honest = SealedMail.send
    told = 0

    def send(self: SealedMail[msgspec.Struct], to: PeerId, message: msgspec.Struct, via: PeerId | None = None) -> None:
        nonlocal told
        honest(self, to, message, via)
        if self._signer.peer_id != ids[LIAR]:
            return
        kind = Message if isinstance(message, typing.get_args(Message)) else PipelineMessage | SwarmMessage
        said = liar.spoil(message, kind) if told % 4 else liar.say(kind)
        told += 1
        if said is not None:
            self._network.send(to, self._seal(said))

    monkeypatch.setattr(SealedMail, "send", send)

    async def story(swarm: PipelineSwarm) -> None:
        swarm.hub.on_message = lambda sender, data: None  # nobody judges what a liar says
        for peer in range(4):
            swarm.start(peer)
        await asyncio.sleep(30.0)
        swarm.start(4)
        await asyncio.sleep(30.0)

    swarm = simulate(recipe(stages=2, total_steps=4000), Counting(), signers(5), story)
    assert told > 100 and swarm.losses()  # a peer that crashes ends the simulation


@pytest.mark.parametrize("liar", [3, 2])
def test_one_peer_does_not_say_how_far_the_run_is(liar: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three data nodes, or one of three peers of another stage, says that the run is at its end, and plans steps that are."""
    honest, stages, steps = SealedMail.send, dict[int, int](), list[int]()

    def send(self: SealedMail[msgspec.Struct], to: PeerId, message: msgspec.Struct, via: PeerId | None = None) -> None:
        if self._signer.peer_id == signers(6)[liar].peer_id and steps:
            match message:
                case Present():
                    message = msgspec.structs.replace(message, step=10**9, finished=True)
                case StepPlan():
                    message = msgspec.structs.replace(message, step=10**9)
        honest(self, to, message, via)

    monkeypatch.setattr(SealedMail, "send", send)

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(6):
            swarm.start(peer)
        await asyncio.sleep(20.0)
        others = {number: peer.pipeline for number, peer in swarm.peers.items() if number != liar}
        stages.update({number: peer.pipeline.recipe.stage for number, peer in swarm.peers.items()})
        steps.append(max(one.step for one in others.values()))
        await asyncio.sleep(TURN_S + 20.0)
        assert not any(one.finished for one in others.values())
        steps.extend(one.step for one in others.values())

    simulate(recipe(stages=2, total_steps=4000), Counting(), signers(6), story)
    assert sorted(stages.values()) == [0, 0, 0, 1, 1, 1]
    before, *after = steps
    assert 0 < before and all(before + 3 < step < 4000 for step in after), steps
