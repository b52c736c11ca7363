"""What a peer takes from others before they have shown that they may be here: nothing."""

import asyncio
import random
from typing import Any

from tests.node.applying import PACE
from tests.node.lab import CODEC, NUMEL, OUTER, doors
from tests.protocol.bus import beat, rules

from farflung.compression.policy import uniform
from farflung.node.events import EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.sealed_mail import SealedMail
from farflung.node.terms import Terms
from farflung.protocol import messages
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims import clock
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.toy import MemoryStorage, ToyLearner

ADDRESSES = ("tls://192.0.2.1:443",)


def test_the_addresses_of_whoever_is_not_invited_are_not_remembered() -> None:
    """There is room for so many, and those of members would have to give way."""
    us, stranger = Ed25519Signer(b"u" * 32), Ed25519Signer(b"s" * 32)
    events: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(latency_s=0.01, jitter_s=0.0, up_bytes_per_s=1e9))
        ours, theirs = (MemoryNetwork(hub, signer.peer_id) for signer in (us, stranger))
        flat = uniform(CODEC, NUMEL)
        terms = Terms(
            settings=rules(us.peer_id),
            pace=PACE,
            uplink=flat,
            downlink=flat,
            feedback=FeedbackSpec(),
            outer=OUTER,
        )
        log = EventLog(None, swarm="test", peer="us", clock=lambda: 0.0)
        log.subscribe(events.append)
        facilities = Facilities(
            network=ours,
            signer=us,
            doors=doors(),
            storage=MemoryStorage(),
            log=log,
            facts=Facts(device="toy", pid=0),
        )
        ours.on_message(ReplicaPeer(terms, facilities, ToyLearner(NUMEL, OUTER))._on_message)
        mail = SealedMail(theirs, stranger, terms.settings.swarm, messages.decode)
        for admission, known in ((b"uninvited", {}), (b"invited", {stranger.peer_id: list(ADDRESSES)})):
            mail.send(us.peer_id, beat(admission=admission, addresses=ADDRESSES))
            await asyncio.sleep(1.0)
            assert ours._addresses == known

    clock.run(main())
    assert [event["reason"] for event in events if event["event"] == "refused"] == ["no invitation to this swarm"]
