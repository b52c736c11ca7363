"""Peers that are not part of a pipeline yet hear from members only."""

import asyncio
import math
import random

from tests.protocol.pipeline_says import says

from farflung.node.entrance import ASK_S, UNANSWERED, Entrance
from farflung.node.outside import Outside
from farflung.node.sealed_mail import PipelineMail
from farflung.node.shadows import Shelf
from farflung.protocol import pipeline_messages
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.pipeline_messages import UNKNOWN, Present
from farflung.protocol.roll import Roll
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork

SWARM = b"s" * 32
NEWCOMER, MEMBER, STRANGER, FOUNDER = (Ed25519Signer(bytes([i]) * 32) for i in range(1, 5))


def test_who_gets_no_answer_by_its_wrong_clock_is_told_once_while_it_is_wrong() -> None:
    """It asked for ever. What it is told has a count and a rounded time in it, and was told again with each that changed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hub = MemoryHub(loop, random.Random(0), LinkModel())
        network = MemoryNetwork(hub, NEWCOMER.peer_id)
        said: list[str] = []
        right_at = math.inf
        text = "this machine's clock is {:.0f} s ahead of those of 4 peers: set it"
        network.clock_trouble = lambda: "" if loop.time() >= right_at else text.format(loop.time())  # type: ignore[method-assign]
        outside = Outside(
            network=network,
            mail=PipelineMail(network, NEWCOMER, SWARM, pipeline_messages.decode),
            roll=Roll(SWARM, FOUNDER.peer_id, NEWCOMER.peer_id, 2, 2.0),
            shelf=Shelf(),
            admission=b"",
            domains=UNKNOWN,
            admits=lambda peer, token: True,
            refused=lambda error: None,
        )
        entrance = Entrance(outside, {0, 1}, spent=lambda life: False, say=said.append)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(entrance.run())
            # Once in a while somebody answers.
            for _ in range(9):
                await asyncio.sleep((UNANSWERED - 1) * ASK_S)
                entrance._heard(says(-1))
            assert said == []
            await asyncio.sleep(30.0)
            assert len(said) == 1 and said[0].startswith("nobody answers: this machine's clock is 4")
            right_at = loop.time()
            await asyncio.sleep(2 * ASK_S)
            right_at = math.inf
            await asyncio.sleep(30.0)
            assert len(said) == 2
            running.cancel()

    clock.run(main())


def test_strangers_are_refused_and_known_of_nowhere() -> None:
    async def main() -> None:
        hub = MemoryHub(asyncio.get_running_loop(), random.Random(0), LinkModel())
        networks = {one.peer_id: MemoryNetwork(hub, one.peer_id) for one in (NEWCOMER, MEMBER, STRANGER, FOUNDER)}
        refused: list[RemoteError] = []
        heard: list[Present] = []
        roll = Roll(SWARM, FOUNDER.peer_id, NEWCOMER.peer_id, 2, 2.0)
        network = networks[NEWCOMER.peer_id]
        outside = Outside(
            network=network,
            mail=PipelineMail(network, NEWCOMER, SWARM, pipeline_messages.decode),
            roll=roll,
            shelf=Shelf(),
            admission=b"",
            domains=UNKNOWN,
            admits=lambda peer, token: token == peer[:8] or peer == FOUNDER.peer_id,
            refused=refused.append,
        )
        outside.listen(heard.append)
        for signer, token in ((MEMBER, MEMBER.peer_id[:8]), (STRANGER, b""), (FOUNDER, b"")):
            mail = PipelineMail(networks[signer.peer_id], signer, SWARM, pipeline_messages.decode)
            mail.send(NEWCOMER.peer_id, says(0, admission=token))
        await asyncio.sleep(5.0)
        assert sorted(roll.known) == sorted((MEMBER.peer_id, FOUNDER.peer_id)) and len(heard) == 2
        assert [(type(error), error.peer) for error in refused] == [(Refused, STRANGER.peer_id)]

    clock.run(main())
