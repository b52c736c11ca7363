"""Control messages that are bound to something: the swarm, or the group of one stage's chain. Sealed when sent, checked when opened.

A peer of a pipeline has two: one for its stage's chain, and one for the swarm, which knows other messages (`protocol.pipeline_messages`).
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from farflung.node.network import Network, PeerId
from farflung.protocol import messages
from farflung.protocol.envelope import Envelope, Opened, Opener, seal
from farflung.protocol.errors import Malformed
from farflung.protocol.keys import Signer
from farflung.protocol.limits import MAX_FORWARD_BYTES
from farflung.protocol.messages import Forward, PipelineMessage
from farflung.protocol.pipeline_messages import SwarmMessage
from farflung.protocol.replay import first_seq

MESSAGE_LIFE_S = 60.0
"""How long a control message is valid: longer than any queue or path, shorter than MAX_MESSAGE_LIFE_S."""

BROADCAST_S = 0.5
"""Sends of one message object to several peers within this time are one broadcast."""

M = TypeVar("M", bound=Struct)
T = TypeVar("T", bound=Struct, covariant=True)

Post = Callable[[PeerId, PipelineMessage], None]
"""Sends one message of a pipeline, best effort."""


class Decode(Protocol[T]):
    """Of one kind of mail."""

    def __call__(self, body: bytes, /, *, peer: PeerId | None) -> T:
        """Raises RemoteError naming `peer`."""


class SealedMail(Generic[M]):
    """See the module."""

    def __init__(self, network: Network, signer: Signer, bound_to: bytes, decode: Decode[M]) -> None:
        """`bound_to`: hash of the swarm's manifest, or of a stage's group."""
        self._network = network
        self._signer = signer
        self._bound_to = bound_to
        self._decode = decode
        self._opener = Opener(bound_to)
        self._seq = first_seq(network.unix_time())
        self._last: M | None = None
        self._last_sealed = b""
        self._last_at = 0.0
        self._last_to: set[PeerId] = set()

    def open(self, sender: PeerId, data: bytes, check: Callable[[PeerId, M], None] | None = None) -> M:
        """What came from `sender`. Raises RemoteError naming it; so does `check` where it may not be here, before it takes a place among those whose numbers are
        remembered: keys cost nothing, and places are few. None: whoever can send it may."""
        now = self._network.unix_time()
        envelope = self._opener.check(data, now, sender)
        message = self.read(envelope, sender)
        if check is not None:
            check(sender, message)
        self._opener.count(envelope, now, sender)
        return message

    def read(self, envelope: Envelope | Opened, blame: PeerId) -> M:
        """The message of an envelope that has been checked. Raises RemoteError naming `blame`."""
        message = self._decode(envelope.body, peer=blame)
        if messages.tag(message) != envelope.kind:
            raise Malformed(f"a message of kind {envelope.kind} that holds another", peer=blame)
        return message

    def send(self, to: PeerId, message: M, via: PeerId | None = None) -> None:
        """Best effort, at once; `via`: by way of another, who is asked to pass it on. One signature serves all receivers of a broadcast; a repetition is sealed
        anew, for its number must be new and its life begins now."""
        sealed = self._sealed(to, message)
        if via is None or len(sealed) > MAX_FORWARD_BYTES:
            self._network.send(to, sealed)
        else:
            self._network.send(via, self._seal(Forward(to, sealed)))

    def _sealed(self, to: PeerId, message: M) -> bytes:
        now = self._network.unix_time()
        broadcast = message is self._last and to not in self._last_to and 0.0 <= now - self._last_at <= BROADCAST_S
        if not broadcast:
            self._last_sealed = self._seal(message)
            self._last, self._last_at, self._last_to = message, now, set()
        self._last_to.add(to)
        return self._last_sealed

    def _seal(self, message: Struct) -> bytes:
        self._seq += 1
        expires_at = self._network.unix_time() + MESSAGE_LIFE_S
        body = messages.encode(message)
        return seal(self._signer, self._bound_to, messages.tag(message), self._seq, expires_at, body)


PipelineMail = SealedMail[PipelineMessage | SwarmMessage]
"""Of the peers of all stages, bound to the swarm."""
