"""Control messages of a pipeline, signed and opened like all others; for a stage peer that is not part of a `Peer`."""

from collections.abc import Callable

from farflung.node.network import Network, PeerId
from farflung.protocol.envelope import Opener, seal
from farflung.protocol.errors import Malformed, RemoteError
from farflung.protocol.keys import Signer
from farflung.protocol.messages import PipelineMessage, decode_pipeline, encode, tag
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
        """Set the one handler. RemoteErrors that it raises are reported as refusals."""

        def receive(sender: PeerId, data: bytes) -> None:
            try:
                opened = self._opener.open(data, self._network.unix_time(), sender)
                message = decode_pipeline(opened.body, peer=sender)
                if tag(message) != opened.kind:
                    raise Malformed(f"a message of kind {opened.kind} that holds another", peer=sender)
                handler(sender, message)
            except RemoteError as error:
                self._refused(error)

        self._network.on_message(receive)

    def send(self, peer: PeerId, message: PipelineMessage) -> None:
        self._seq += 1
        expires_at = self._network.unix_time() + MESSAGE_LIFE_S
        self._network.send(peer, seal(self._signer, self._swarm, tag(message), self._seq, expires_at, encode(message)))
