"""Control messages of a pipeline, signed and opened like all others, and bound to the swarm: its stages' own are bound to their groups."""

from collections.abc import Callable

from farflung.node.network import Network, PeerId
from farflung.protocol.envelope import Opener, seal
from farflung.protocol.errors import Malformed, Refused, RemoteError
from farflung.protocol.keys import Signer
from farflung.protocol.messages import PipelineMessage
from farflung.protocol.pipeline_messages import SwarmMessage, decode, encode, tag
from farflung.protocol.replay import first_seq

MESSAGE_LIFE_S = 60.0
"""Long enough for any path; what is older is repeated anyway."""

Post = Callable[[PeerId, PipelineMessage], None]
"""Sends one message, best effort."""


class PipelineMail:
    """Seals what is sent and opens what comes, over the network's control messages."""

    def __init__(
        self, network: Network, signer: Signer, swarm: bytes, *, refused: Callable[[RemoteError], None]
    ) -> None:
        self._network = network
        self._signer = signer
        self._swarm = swarm
        self._opener = Opener(swarm)
        self._seq = first_seq(network.unix_time())
        self._refused = refused

    def on_message(self, handler: Callable[[PeerId, PipelineMessage], None]) -> None:
        """For a stage peer by itself: this mail is all that it gets. RemoteErrors that the handler raises are reported as refusals."""

        def receive(sender: PeerId, data: bytes) -> None:
            try:
                message = self.open(sender, data)
                if not isinstance(message, PipelineMessage):
                    raise Refused("a message about a swarm to a stage peer that is in none", peer=sender)
                handler(sender, message)
            except RemoteError as error:
                self._refused(error)

        self._network.on_message(receive)

    def open(self, sender: PeerId, data: bytes) -> PipelineMessage | SwarmMessage:
        """What came from `sender`. Raises RemoteError naming it."""
        opened = self._opener.open(data, self._network.unix_time(), sender)
        message = decode(opened.body, peer=sender)
        if tag(message) != opened.kind:
            raise Malformed(f"a message of kind {opened.kind} that holds another", peer=sender)
        return message

    def send(self, peer: PeerId, message: PipelineMessage | SwarmMessage) -> None:
        """Best effort, at once."""
        self._seq += 1
        expires_at = self._network.unix_time() + MESSAGE_LIFE_S
        self._network.send(peer, seal(self._signer, self._swarm, tag(message), self._seq, expires_at, encode(message)))
