"""Messages that many simulated nodes receive are decoded once.

What is decoded never changes, so nodes of one process can share it. Commits go to all members and stay in their histories and on their disks, in a group of
64 as one object instead of 64. Nothing that a node does depends on it.
"""

from collections import OrderedDict

from farflung.node.network import PeerId
from farflung.protocol.messages import Message, decode

LONG_BYTES = 512
"""Of a message that no greeting pushes out: these are shorter, and there is always a newer one."""

MOST_KEPT = 1024
"""Messages for which others are expected, as many short ones and as many long; most receivers hear of a greeting within a tenth of a second, and of a commit within seconds."""


class SharedDecode:
    """`node.sealed_mail.Decode` of the nodes of one simulation."""

    def __init__(self) -> None:
        self._short: OrderedDict[bytes, Message] = OrderedDict()
        self._long: OrderedDict[bytes, Message] = OrderedDict()

    def __call__(self, body: bytes, /, *, peer: PeerId | None) -> Message:
        """Raises Malformed or LimitExceeded naming `peer`."""
        decoded = self._short if len(body) < LONG_BYTES else self._long
        if (known := decoded.get(body)) is not None:
            decoded.move_to_end(body)
            return known
        message = decoded[body] = decode(body, peer=peer)
        if len(decoded) > MOST_KEPT:
            decoded.popitem(last=False)
        return message
