"""Control messages of one chain: sealed for the swarm (or the stage's group) that the chain is bound to, and opened."""

from farflung.node.network import Network, PeerId
from farflung.protocol import messages
from farflung.protocol.envelope import Opener, seal
from farflung.protocol.errors import Malformed
from farflung.protocol.keys import Signer
from farflung.protocol.messages import Message
from farflung.protocol.replay import first_seq

MESSAGE_LIFE_S = 60.0
"""How long a control message is valid: longer than any queue, shorter than MAX_MESSAGE_LIFE_S."""

BROADCAST_S = 0.5
"""Sends of one message object within this time are one broadcast."""


class ChainMail:
    """See the module."""

    def __init__(self, network: Network, signer: Signer, swarm: bytes) -> None:
        self._network = network
        self._signer = signer
        self._swarm = swarm
        self._opener = Opener(swarm)
        self._seq = first_seq(network.unix_time())
        self._sealed: tuple[Message | None, float, bytes] = (None, 0.0, b"")

    def open(self, sender: PeerId, data: bytes) -> Message:
        """What came from `sender`. Raises RemoteError naming it."""
        opened = self._opener.open(data, self._network.unix_time(), sender)
        message = messages.decode(opened.body, peer=sender)
        if messages.tag(message) != opened.kind:
            raise Malformed(f"a message of kind {opened.kind} that holds another", peer=sender)
        return message

    def send(self, to: PeerId, message: Message, now: float) -> None:
        """Seal and hand to the network. One signature serves all receivers of a broadcast; a repetition is sealed anew, for its number
        must be new and its life begins now."""
        if self._sealed[0] is not message or now > self._sealed[1] + BROADCAST_S:
            self._seq += 1
            expires_at = self._network.unix_time() + MESSAGE_LIFE_S
            body = messages.encode(message)
            sealed = seal(self._signer, self._swarm, messages.tag(message), self._seq, expires_at, body)
            self._sealed = (message, now, sealed)
        self._network.send(to, self._sealed[2])
