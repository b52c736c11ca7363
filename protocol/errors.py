"""What can go wrong between peers, and whose fault it is.

FarflungError
├── LocalError                 we, or our user, asked for something wrong
│   ├── ConfigError            a flag, file or key is wrong; the message names the remedy
│   │   └── Unclaimed          nobody who is meant claims a name; a claim may be on its way
│   ├── DiskFull               the disk has no room for a file of ours, which stays as it was
│   ├── IdentityError          the key file is missing, unreadable or not ours
│   └── NameContested          a bare swarm name that more than one founder claims, or that nobody vouches for
├── RemoteError                a peer broke the protocol: `peer` says who; our state is unchanged
│   ├── Malformed              the bytes are no message of ours
│   ├── LimitExceeded          a length, count or size is above its named limit
│   ├── BadSignature           the signature does not fit the sender
│   ├── WrongSwarm             the message belongs to another swarm
│   ├── WrongVersion           no protocol version in common
│   ├── Stale                  expired, or from a clock too far from ours
│   ├── Replayed               seen before
│   └── Refused                well-formed, but it breaks a rule of the protocol at this point
└── NetworkError               a peer cannot be reached, or a transfer broke off; nobody's fault
"""

MAX_REASON = 400
"""Characters of what a peer did wrong."""


class FarflungError(Exception):
    """Base of every error this package raises on purpose."""


class LocalError(FarflungError):
    """We or our user asked for something wrong; the message names the remedy."""


class ConfigError(LocalError):
    """A flag, a file or a key of a file is wrong."""


class Unclaimed(ConfigError):
    """Nobody who is meant claims a name, as far as is known: a claim may be on its way."""


class DiskFull(LocalError):
    """The disk has no room for a file of ours, which stays as it was. Who waits for room says `remedy` meanwhile."""

    def __init__(self, reason: str, *, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class IdentityError(LocalError):
    """The identity key is missing, unreadable or damaged."""


class NameContested(LocalError):
    """A bare swarm name that nobody vouches for, or that several founders claim."""


class RemoteError(FarflungError):
    """A peer broke the protocol. Nothing of ours changed.

    `peer` is the offender's public key (32 bytes), or None where the bytes do not even say who sent them. A reason may quote
    what was sent, and goes to logs and terminals: it is cut, and characters that do not print are written as Python's escapes.
    """

    def __init__(self, reason: str, *, peer: bytes | None = None) -> None:
        reason = _printable(reason[:MAX_REASON])[:MAX_REASON]
        who = peer.hex()[:12] if peer else "an unknown peer"
        super().__init__(f"{reason} (from {who})")
        self.reason = reason
        self.peer = peer


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class Malformed(RemoteError):
    """The bytes are no message of ours."""


class LimitExceeded(RemoteError):
    """A length, count, shape or size is above its named limit."""


class BadSignature(RemoteError):
    """The signature does not fit the sender and the bytes."""


class WrongSwarm(RemoteError):
    """The message, record or manifest belongs to another swarm."""


class WrongVersion(RemoteError):
    """No protocol version in common."""


class Stale(RemoteError):
    """Expired, or stamped by a clock too far from ours."""


class Replayed(RemoteError):
    """A message that was seen before."""


class Refused(RemoteError):
    """Well-formed and signed, but against the rules at this point of the protocol."""


class NetworkError(FarflungError):
    """A peer cannot be reached, or a transfer broke off."""
