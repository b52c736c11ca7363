"""What attackers send that nobody may believe (invariant 8): each such message has to be refused, at once and by an error that names its carrier.

What is wrong with a message is found here anew, by what the envelope says and the signature. Nodes look at a message when it comes, so it was believed if nothing was refused when
the next one does. A message of a member in order, which attackers send as well, is nobody's harm.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from farflung.node.events import Event
from farflung.node.peer import Peer
from farflung.node.refusals import MOST, STRETCH_S
from farflung.protocol import messages
from farflung.protocol.envelope import Envelope
from farflung.protocol.errors import BadSignature, RemoteError
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, domain, verify
from farflung.protocol.limits import MAX_CONTROL_BYTES
from farflung.protocol.versions import SUPPORTED_VERSIONS
from farflung.sims.swarm import Swarm

HEARD = 512
"""Messages of attackers that are remembered of each receiver: of some minutes, and none lives for longer than one."""

_envelopes = msgspec.msgpack.Decoder(Envelope)


@dataclass(slots=True)
class Harm:
    """See the module. Peers are numbers."""

    swarm: Swarm
    violate: Callable[[int, str], None]
    _heard: dict[int, tuple[Peer | None, OrderedDict[bytes, None]]] = field(default_factory=dict)
    """By receiver, its node, and what that has heard: who is started again, or begins anew with another group, is another node, and remembers nothing."""
    _refused_at: defaultdict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=MOST)))
    """By receiver, when it told of its last refusals, seconds of the simulation's clock: of more in a minute it tells nothing."""
    _open: tuple[int, PeerId, str] | None = None
    """Who has got the last message, from whom, and what is wrong with it; None when nothing is, or it was refused."""

    def arrives(self, sender: PeerId, receiver: PeerId, data: bytes) -> None:
        """A message has come to its receiver, who has not looked at it yet."""
        self.look()
        if sender not in self.swarm.attackers or receiver in self.swarm.attackers:
            return
        index, now = self.swarm.numbers[receiver], self.swarm.hub.now()
        told = self._refused_at[index]
        if wrong := self._wrong(index, sender, data, self.swarm.hub.unix_time(receiver)):
            if len(told) < MOST or told[0] < now - STRETCH_S:
                self._open = index, sender, wrong

    def on_event(self, index: int, event: Event) -> None:
        """What a node says."""
        if event["event"] == "refused":
            self._refused_at[index].append(self.swarm.hub.now())
            if self._open is not None and self._open[:2] == (index, bytes.fromhex(event["of"])):
                self._open = None

    def look(self) -> None:
        """Whether the last message was refused, if it had to be."""
        if self._open is not None:
            index, sender, wrong = self._open
            self._open = None
            self.violate(8, f"peer {index} does not refuse what peer {self.swarm.numbers[sender]} sends: {wrong}")

    def _wrong(self, index: int, sender: PeerId, data: bytes, unix_time: float) -> str:
        """What is wrong with a message; empty when nothing is, or it is another's: that may come by many ways, and is dropped without a word."""
        if len(data) > MAX_CONTROL_BYTES:
            return "a message that is too long"
        signed, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        envelope = _envelopes.decode(signed)
        if envelope.sender != sender:
            return ""
        if envelope.version not in SUPPORTED_VERSIONS:
            return "a message of another version"
        if envelope.swarm != self.swarm.outfit.terms.settings.swarm:
            return "a message for another swarm"
        if envelope.expires_at <= unix_time:
            return "a message that has expired"
        try:
            verify(envelope.sender, signature, domain("envelope") + signed)
            messages.decode(envelope.body, peer=envelope.sender)
        except BadSignature:
            return "a message with a forged signature"
        except RemoteError:
            return "a message that is none"
        peer = self.swarm.peers.get(index)
        known = self._heard.get(index)
        heard = known[1] if known is not None and known[0] is peer else OrderedDict[bytes, None]()
        self._heard[index] = peer, heard
        if data in heard:
            return "a message that it has had before"
        heard[data] = None
        if len(heard) > HEARD:
            heard.popitem(last=False)
        return ""
