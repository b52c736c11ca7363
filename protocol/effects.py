"""What the pure machines ask the node to do. The node executes effects in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from farflung.protocol.chain import Certified, Commit
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Message, Plan
from farflung.protocol.saved_vote import SavedVote


class Send(msgspec.Struct, frozen=True):
    """Send a control message; best effort. A struct and no dataclass, for each heartbeat makes one for every peer."""

    to: PeerId
    message: Message
    via: PeerId | None = None
    """Who is asked to pass it on, where there is no way."""


@dataclass(frozen=True, slots=True)
class SaveVote:
    """Write to disk, before anything that follows: what we promised and voted for."""

    vote: SavedVote


@dataclass(frozen=True, slots=True)
class Expect:
    """A plan was accepted here: its transfers may come."""

    plan_id: bytes
    plan: Plan


@dataclass(frozen=True, slots=True)
class Contribute:
    """Take the pseudo-gradient, encode it part by part, and send each part to its owner."""

    plan_id: bytes
    plan: Plan


@dataclass(frozen=True, slots=True)
class Reduce:
    """Accumulate one of our parts over the contributors, encode the mean, and send it to the other members."""

    plan_id: bytes
    plan: Plan
    part: int
    weights: tuple[tuple[PeerId, float], ...]
    """(contributor, share) in the order of keys; shares sum to 1."""
    early: bool
    """Of all planned contributors, before the cut."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The cut of this plan leaves nobody out: early means are final, and the contributions that they were made of are not needed any more."""

    plan_id: bytes


@dataclass(frozen=True, slots=True)
class Secure:
    """Write all means of this plan to the disk itself, before anything that follows: others will count on it that we hold them, whoever loses power."""

    plan_id: bytes


@dataclass(frozen=True, slots=True)
class FetchMean:
    """Get an encoded mean from one of `holders`, checked against `digest`."""

    plan_id: bytes
    part: int
    digest: bytes
    holders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """The history moved: write this commit down, and apply it (after all before it)."""

    certified: Certified
    anchor: Commit | None = None
    """Its parent, where the history has jumped: then it does not follow the one before it here."""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """The round is over for us: training may go on."""

    plan_id: bytes | None
    contributed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """End the transfers of this plan."""

    plan_id: bytes
    final: bool
    """Nothing can come of it any more, so its means are not needed either."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Our outer state differs from the majority's at the same version."""

    version: int
    digest: bytes
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A peer broke a rule in a part of what it said; the rest of that stands."""

    error: RemoteError


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log, with its reason (docs/events.md)."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


Effect = (
    Send
    | SaveVote
    | Expect
    | Contribute
    | Reduce
    | Confirm
    | Secure
    | FetchMean
    | Apply
    | RoundOver
    | Forget
    | Repair
    | Refusal
    | Note
)
