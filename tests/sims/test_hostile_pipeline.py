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
from farflung.protocol.pipeline_messages import SwarmMessage
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
