"""Control messages that are bound to something: the swarm, or the group of one stage's chain. Sealed when sent, checked when opened.

A peer of a pipeline has two: one for its stage's chain, and one for the swarm, which knows other messages (`protocol.pipeline_messages`).
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from farflung.node.allowance import Allowance
from farflung.node.network import Network, PeerId
from farflung.protocol import messages
from farflung.protocol.envelope import Opened, Opener, said_by, seal
from farflung.protocol.errors import Malformed, Replayed
from farflung.protocol.keys import Signer
from farflung.protocol.limits import MAX_FORWARD_BYTES
from farflung.protocol.messages import Forward, Goodbye, Heartbeat, PipelineMessage, Promise
from farflung.protocol.pipeline_messages import SwarmMessage
from farflung.protocol.replay import first_seq

MESSAGE_LIFE_S = 60.0
"""How long a control message is valid: longer than any queue or path, shorter than MAX_MESSAGE_LIFE_S."""

BROADCAST_S = 0.5
"""Sends of one message object to several peers within this time are one broadcast."""

IN_ORDER = frozenset(kind.__struct_config__.tag for kind in (Heartbeat, Goodbye, Promise))
"""Kinds of messages of which only the newest says how its author stands; ways by others differ in length."""

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
        self._detours = Opener(bound_to)
        self._last_of: dict[PeerId, int] = {}
        """By author, the newest number of what came by way of others and is in order."""
        self._allowance = Allowance()
        self._seq = first_seq(network.unix_time())
        self._last: M | None = None
        self._last_sealed = b""
        self._last_at = 0.0
        self._last_to: set[PeerId] = set()

    def open(self, sender: PeerId, data: bytes) -> M:
        """What came from `sender`. Raises RemoteError naming it."""
        opened = self._opener.open(data, self._network.unix_time(), sender)
        return self._read(opened, sender)

    def open_from(self, carrier: PeerId, data: bytes, *, admits: Callable[[PeerId], bool]) -> tuple[PeerId, M] | None:
        """Who says it, and what: what came from `carrier`, be it what another one asked it to pass on. None: of whom we know nothing, or by way of whom.

        Detours have a replay guard of their own: a message may come both ways, and so count twice, and who is faster than its author must not keep that from being
        heard. Of what tells how an author stands now nothing counts that is older than what has come.
        Raises RemoteError naming the carrier.
        """
        author = said_by(data, carrier)
        if author == carrier:
            return author, self.open(carrier, data)
        if not admits(carrier) or not admits(author):
            return None
        try:
            opened = self._detours.open(data, self._network.unix_time(), carrier, relayed=True)
        except Replayed:
            return None  # it has come by way of another
        if opened.kind in IN_ORDER:
            if opened.seq < self._last_of.get(author, 0):
                return None
            self._last_of[author] = opened.seq
        return author, self._read(opened, author)

    def _read(self, opened: Opened, carrier: PeerId) -> M:
        message = self._decode(opened.body, peer=carrier)
        if messages.tag(message) != opened.kind:
            raise Malformed(f"a message of kind {opened.kind} that holds another", peer=carrier)
        return message

    def send(self, to: PeerId, message: M, via: PeerId | None = None) -> None:
        """Best effort, at once; `via`: by way of another, who is asked to pass it on. One signature serves all receivers of a broadcast; a repetition is sealed
        anew, for its number must be new and its life begins now."""
        sealed = self._sealed(to, message)
        if via is None or len(sealed) > MAX_FORWARD_BYTES:
            self._network.send(to, sealed)
        else:
            self._network.send(via, self._seal(Forward(to, sealed)))

    def pass_on(self, author: PeerId, to: PeerId, sealed: bytes, now: float) -> None:
        """Send what `author` has sealed, unless it is too much (`now`: seconds, monotonic). Best effort, at once. Raises RemoteError naming the author, when it is
        not such a message."""
        if self._allowance.takes(author, to, len(sealed), now):
            self._opener.check(sealed, self._network.unix_time(), author)
            self._network.send(to, sealed)

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
