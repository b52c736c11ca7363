"""Members that do harm: what an attacker of a simulation does beside what an honest node does.

The attacker is admitted, and runs the node's own code, so that it trains, votes and is let into rounds. Between that code and the network sits this: it signs and numbers
what goes out anew, as the attacker's own key may, and now and then adds a message of its own, once in `EVERY` messages and one kind after another:

    forge        the message with another signature
    replay       a message of its own, and one that it got from somebody else, once more
    oversize     more bytes than a control message may have
    stale        the message, long expired, with a good signature
    garble       bytes that are no message, signed and numbered as if they were
    swarm        the message, sealed for another swarm
    version      the message, in an envelope of a protocol version that is yet to come
    equivocate   another vote at the same height and ballot, and a promise that forgets the vote
    noise        its pseudo-gradient back to front: of the right size, and of no use

What stands against them: signatures, numbers, expiry, and what an envelope is bound to (`protocol/envelope.py`), limits before memory (`protocol/wire.py`), one vote of a member per certificate (`protocol/chain.py`).
Against `noise` nothing but its weight: the mean is weighted by tokens, and nobody looks at what a member contributes. Nor is anything here about a *proposer* that lies: consensus is Paxos, which bears
members that die or fall silent, not ones that propose two values.
"""

import random
from collections import deque
from typing import Any, Literal

import msgspec

from farflung.protocol import chain, messages
from farflung.protocol.envelope import Envelope, seal
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId, Signer, domain
from farflung.protocol.limits import MAX_CONTROL_BYTES
from farflung.protocol.messages import Promise, Voted
from farflung.protocol.versions import SUPPORTED_VERSIONS
from farflung.sims.hub import MemoryHub
from farflung.sims.network import MemoryNetwork
from farflung.training.flat import unflatten

Attack = Literal["forge", "replay", "oversize", "stale", "garble", "swarm", "version", "equivocate", "noise"]

EVERY = 8
"""Messages between two of the attacker's own making."""

KEPT = 64
"""Messages remembered, to be sent again."""

LIFE_S = 60.0
LATE_S = 600.0

_envelopes = msgspec.msgpack.Decoder(Envelope)
_VOTED = int(Voted.__struct_config__.tag)  # type: ignore[arg-type]


class AttackingNetwork(MemoryNetwork):
    """The network of an attacker."""

    def __init__(self, hub: MemoryHub, signer: Signer, swarm: bytes, attacks: tuple[Attack, ...], seed: str) -> None:
        super().__init__(hub, signer.peer_id)
        self._signer = signer
        self._swarm = swarm
        self._attacks = [attack for attack in attacks if attack not in ("noise", "equivocate")]
        self._equivocates = "equivocate" in attacks
        self._rng = random.Random(seed)
        self._seq = int(hub.now() * 1000) << 20
        self._sent = 0
        self._own: deque[bytes] = deque(maxlen=KEPT)
        self._others: deque[bytes] = deque(maxlen=KEPT)

    def send(self, peer: PeerId, message: bytes) -> None:
        """What the node says, and sometimes more."""
        envelope = _envelopes.decode(message[:-SIGNATURE_BYTES])
        sealed = self._seal(envelope.kind, envelope.body)
        self._own.append(sealed)
        self._hub.post(self, peer, sealed)
        self._sent += 1
        if self._equivocates and envelope.kind == _VOTED:
            for lie in self._lies(messages.decode(envelope.body, peer=None)):
                self._hub.post(self, peer, self._seal(messages.tag(lie), messages.encode(lie)))
        if self._attacks and self._sent % EVERY == 0:
            attack = self._attacks[self._sent // EVERY % len(self._attacks)]
            for bad in self._make(attack, envelope, sealed):
                self._hub.post(self, peer, bad)

    def deliver(self, sender: PeerId, message: bytes) -> None:
        """As the node's own, and remembered."""
        self._others.append(message)
        super().deliver(sender, message)

    def _seal(self, kind: int, body: bytes, life_s: float = LIFE_S, *, swarm: bytes | None = None) -> bytes:
        self._seq += 1
        return seal(self._signer, swarm or self._swarm, kind, self._seq, self.unix_time() + life_s, body)

    def _make(self, attack: Attack, envelope: Envelope, sealed: bytes) -> list[bytes]:
        match attack:
            case "forge":
                return [sealed[:-1] + bytes([sealed[-1] ^ 1])]
            case "replay":
                return [self._rng.choice(kept) for kept in (self._own, self._others) if kept]
            case "oversize":
                return [bytes(MAX_CONTROL_BYTES + 1)]
            case "stale":
                return [self._seal(envelope.kind, envelope.body, -LATE_S)]
            case "garble":
                return [self._seal(envelope.kind, self._rng.randbytes(len(envelope.body)))]
            case "swarm":
                return [self._seal(envelope.kind, envelope.body, swarm=self._rng.randbytes(len(self._swarm)))]
            case "version":
                return [of_another_version(self._signer, sealed)]
            case _:
                raise AssertionError(f"{attack} is not a message")

    def _lies(self, voted: messages.Message) -> list[Voted | Promise]:
        assert isinstance(voted, Voted)
        other = self._rng.randbytes(32)
        signed = chain.vote_bytes(self._swarm, voted.height, voted.ballot, other)
        return [
            Voted(voted.height, voted.ballot, other, self._signer.sign(signed)),
            Promise(voted.height, voted.ballot, other, None, None),
        ]


def of_another_version(signer: Signer, sealed: bytes) -> bytes:
    """The same message by somebody who speaks the next version of the protocol, well signed."""
    envelope = _envelopes.decode(sealed[:-SIGNATURE_BYTES])
    signed = msgspec.msgpack.encode(msgspec.structs.replace(envelope, version=max(SUPPORTED_VERSIONS) + 1))
    return signed + signer.sign(domain("envelope") + signed)


class Backwards:
    """A learner that offers its progress back to front; in everything else the one it is made of."""

    def __init__(self, learner: Any, coupled: Any) -> None:
        self._learner = learner
        self._coupled = coupled
        """The `Coupled` of the learner: where offers are kept."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def freeze(self) -> dict[str, object]:
        """See `Freezable`, whose methods `isinstance` does not find behind `__getattr__` from Python 3.12 on."""
        frozen: dict[str, object] = self._learner.freeze()
        return frozen

    def thaw(self, state: dict[str, object]) -> None:
        """See `Freezable`."""
        self._learner.thaw(state)

    def offer(self, start: int, stop: int) -> None:
        """See `Learner.offer`."""
        self._learner.offer(start, stop)
        outer, offered = self._coupled.outer.params[start:stop], self._coupled.offered.values
        offered.copy_(outer - (outer - offered).flip(0))
        # It goes on from there, or what it hides would come on top of its next contribution, and grow from round to round.
        unflatten(self._coupled.layout, offered, self._coupled.parameters, start)
