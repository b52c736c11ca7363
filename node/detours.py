"""Control messages by way of others: taking what members pass on to us, and passing on what they ask us to.

A message may come both ways, directly and by a detour, and counts twice then: each way has a replay guard of its own, for who is faster than an author must
not keep it from being heard itself.
"""

from collections.abc import Callable

from farflung.node.allowance import Allowance
from farflung.node.network import Network, PeerId
from farflung.node.sealed_mail import SealedMail
from farflung.protocol.envelope import Opener, said_by
from farflung.protocol.errors import Replayed
from farflung.protocol.messages import Forward, Goodbye, Heartbeat, Message, Promise

IN_ORDER = frozenset(kind.__struct_config__.tag for kind in (Heartbeat, Goodbye, Promise))
"""Kinds of messages of which only the newest says how its author stands; ways by others differ in length."""


class Detours:
    """See the module."""

    def __init__(
        self,
        network: Network,
        mail: SealedMail[Message],
        bound_to: bytes,
        admits: Callable[[PeerId], bool],
        check: Callable[[PeerId, Message], None] | None = None,
    ) -> None:
        """`mail`: what comes directly; `bound_to`: as its; `admits`: whether somebody may be here; `check`: raises RemoteError where a peer may not say
        what it does."""
        self._network = network
        self._mail = mail
        self._admits = admits
        self._check = check
        self._opener = Opener(bound_to)
        self._allowance = Allowance()
        self._newest: dict[PeerId, int] = {}
        """By author, the number of the newest message that came by way of another and is in order."""

    def open(self, carrier: PeerId, data: bytes) -> tuple[PeerId, Message] | None:
        """Who says it, and what: what came from `carrier`, be it its own word or what somebody asked it to pass on. None: of whom we know nothing, or by way of
        whom; what has come by another way; and of what is in order, what is older than what has come. Raises RemoteError naming the carrier, or the author once
        that is proven."""
        author = said_by(data, carrier)
        if author == carrier:
            return author, self._mail.open(carrier, data, self._check)
        if not self._admits(carrier) or not self._admits(author):
            return None
        try:
            opened = self._opener.open(data, self._network.unix_time(), carrier, relayed=True)
        except Replayed:
            return None
        if opened.kind in IN_ORDER:
            if opened.seq < self._newest.get(author, 0):
                return None
            if author not in self._newest:  # of those who are gone none is kept: peers come and go for months
                self._newest = {peer: seq for peer, seq in self._newest.items() if self._admits(peer)}
            self._newest[author] = opened.seq
        return author, self._mail.read(opened, author)

    def pass_on(self, author: PeerId, message: Forward, now: float) -> None:
        """Send what `author` has sealed, unless it is too much (`now`: seconds, monotonic). Best effort, at once. Raises RemoteError naming the author, when it is
        not its message."""
        if self._allowance.takes(author, message.to, len(message.sealed), now):
            self._opener.check(message.sealed, self._network.unix_time(), author)
            self._network.send(message.to, message.sealed)
