"""Messages that many simulated nodes receive are decoded once.

What is decoded never changes, so nodes of one process can share it. Commits go to all members and stay in their histories and on their disks, in a group of
64 as one object instead of 64. Nothing that a node does depends on it.
"""

from collections import OrderedDict

from farflung.node.network import PeerId
from farflung.protocol.messages import Message, decode

WORTH_BYTES = 512
"""Of a message that is shared: greetings are shorter, and there is always a newer one."""

MOST_KEPT = 1024
"""Messages for which others are expected; most receivers hear of a commit within seconds."""


class SharedDecode:
    """`node.sealed_mail.Decode` of the nodes of one simulation."""

    def __init__(self) -> None:
        self._decoded: OrderedDict[bytes, Message] = OrderedDict()

    def __call__(self, body: bytes, /, *, peer: PeerId | None) -> Message:
        """Raises Malformed or LimitExceeded naming `peer`."""
        if len(body) < WORTH_BYTES:
            return decode(body, peer=peer)
        if (known := self._decoded.get(body)) is not None:
            self._decoded.move_to_end(body)
            return known
        message = self._decoded[body] = decode(body, peer=peer)
        if len(self._decoded) > MOST_KEPT:
            self._decoded.popitem(last=False)
        return message
