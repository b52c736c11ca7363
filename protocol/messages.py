"""Every control message that peers exchange, and the only list of their numbers, but for 21 to 25 (`pipeline_messages`).

Of the protocol version that `versions` names. Bodies are MessagePack arrays [tag, field, …]; new fields go last with a default, types never change, retired tags are
never used again. Bulk (contributions, means, chunks) travels on streams, each begun by one of the `headers`, which are numbered from 64 on.
"""

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol import wire
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId
from farflung.protocol.limits import (
    MAX_BEAT_S,
    MAX_COMMITS_PER_REPLY,
    MAX_CONTROL_BYTES,
    MAX_FORWARD_BYTES,
    MAX_GROUP_PEERS,
    MAX_HOPS,
    MAX_MICROBATCHES,
    MAX_PARTS,
)
from farflung.protocol.route import Legs
from farflung.protocol.types import (
    Count,
    Digest,
    Key,
    Keys,
    Offset,
    OptionalDigest,
    Rate,
    Seconds,
    Signature,
    Text,
    check_rates,
)


class Ready(Struct, frozen=True, array_like=True):
    """A member has local progress to contribute."""

    tokens: Count
    samples: Count
    up_bytes_per_s: Rate
    down_bytes_per_s: Rate
    ready_ms: Count
    lacks: Annotated[tuple[Key, ...], Meta(max_length=MAX_GROUP_PEERS)] = ()
    """Members that it does not hear, though others do, and whose contributions to its parts did not come lately (`reach`)."""

    def __post_init__(self) -> None:
        check_rates(self.up_bytes_per_s, self.down_bytes_per_s)


class Accepted(Struct, frozen=True, array_like=True):
    """What a member last voted for at a height."""

    ballot: Count
    commit: Commit


class Part(Struct, frozen=True, array_like=True):
    """One part of a round: elements [start, stop) of the flat vector, reduced by `owner`."""

    owner: Key
    start: Offset
    stop: Offset


class Contributor(Struct, frozen=True, array_like=True):
    peer: Key
    ready: Ready


class Heartbeat(Struct, frozen=True, array_like=True, tag=1):
    """To every known peer, every few seconds and after every commit: I live, and this is what I hold."""

    height: Count
    ballot: Count
    version: Count
    """Version of the outer state this peer really holds (it may lag behind its chain)."""
    digest: OptionalDigest
    """Digest of that state; empty while unknown."""
    state: Text
    step: Count
    tokens_per_s: Rate
    up_bytes_per_s: Rate
    down_bytes_per_s: Rate
    loss: float
    device: Text
    admission: Annotated[bytes, Meta(max_length=64)]
    """The invite key's signature over this peer's key; empty in open swarms and for the founder."""
    addresses: Annotated[tuple[Text, ...], Meta(max_length=16)]
    every_s: Annotated[float, Meta(gt=0.0, le=MAX_BEAT_S)]
    """Seconds from one of this peer's heartbeats to the next."""
    reply: bool = False
    """Whether this only answers another heartbeat (and wants no answer)."""
    ready_in_s: Seconds = 0.0
    """Seconds until this peer has made all the steps that it makes for a round; 0 when it waits for one."""
    deaf_to: Annotated[tuple[Key, ...], Meta(max_length=MAX_GROUP_PEERS)] = ()
    """Whom others hear and this one does not: what they say to it others have to pass on."""
    group: OptionalDigest = b""
    """Whose history this peer follows, as commits name it; of one that has none yet, empty like the first."""

    def __post_init__(self) -> None:
        check_rates(self.tokens_per_s, self.up_bytes_per_s, self.down_bytes_per_s)


class Goodbye(Struct, frozen=True, array_like=True, tag=2):
    """I leave on purpose; give my samples to others at once."""

    reason: Text


class Probe(Struct, frozen=True, array_like=True, tag=3):
    """A second opinion, please: when did you last hear from `target`?"""

    target: Key


class Opinion(Struct, frozen=True, array_like=True, tag=4):
    target: Key
    age_s: Seconds
    """Seconds since the sender last heard from the target."""


class Forward(Struct, frozen=True, array_like=True, tag=32):
    """Pass this on, please, to a peer to which there is no way from me."""

    to: Key
    sealed: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES + 1, max_length=MAX_FORWARD_BYTES)]
    """A message of the sender's, as it would have gone there itself."""


class Promise(Struct, frozen=True, array_like=True, tag=5):
    """Member to proposer: I am at your ballot and will vote for nothing lower; and I am ready, or not."""

    height: Count
    ballot: Count
    parent: Digest
    accepted: Accepted | None
    ready: Ready | None


class Plan(Struct, frozen=True, array_like=True, tag=6):
    """Proposer to members: the round."""

    height: Count
    ballot: Count
    attempt: Count
    parent: Digest
    members: Keys
    """Who receives the mean: live members, and joiners that hold the current state."""
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_GROUP_PEERS)]
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)]
    uplink: Text
    downlink: Text
    scatter_s: Seconds
    gather_s: Seconds
    reason: Text
    made_ms: Count = 0
    """By the proposer's clock: a proposer that is killed and started again may plan the same once more, but it is another plan, with its own cut."""


class Collected(Struct, frozen=True, array_like=True, tag=7):
    """Owner to proposer: whose contributions I hold for all my parts."""

    plan: Digest
    peers: Keys


class Cut(Struct, frozen=True, array_like=True, tag=8):
    """Proposer to members: the one set of contributors of this round."""

    plan: Digest
    contributors: Keys


class Held(Struct, frozen=True, array_like=True, tag=9):
    """Receiver to proposer: the digest of the mean I hold for each part, empty where I hold none."""

    plan: Digest
    digests: Annotated[tuple[OptionalDigest, ...], Meta(max_length=MAX_PARTS)]


class Fetch(Struct, frozen=True, array_like=True, tag=10):
    """Proposer to a receiver: get this part from one of these."""

    plan: Digest
    part: Count
    digest: Digest
    holders: Keys


class Abort(Struct, frozen=True, array_like=True, tag=11):
    """Proposer to members: nothing comes of this plan."""

    plan: Digest
    reason: Text


class Propose(Struct, frozen=True, array_like=True, tag=12):
    """Proposer to members: vote for this commit."""

    ballot: Count
    commit: Commit


class Voted(Struct, frozen=True, array_like=True, tag=13):
    height: Count
    ballot: Count
    digest: Digest
    signature: Signature


class Committed(Struct, frozen=True, array_like=True, tag=14):
    """To everybody: decided."""

    certified: Certified


class GetCommits(Struct, frozen=True, array_like=True, tag=15):
    """Send me what came after this height (`after` = -1: just the newest, with its parent)."""

    after: Annotated[int, Meta(ge=-1, le=1 << 62)]


class Commits(Struct, frozen=True, array_like=True, tag=16):
    """Answer to GetCommits: certified commits in order; `anchor` is the parent of the first one (None at genesis)."""

    anchor: Commit | None
    chain: Annotated[tuple[Certified, ...], Meta(max_length=MAX_COMMITS_PER_REPLY)]


Message = (
    Heartbeat
    | Goodbye
    | Probe
    | Opinion
    | Forward
    | Promise
    | Plan
    | Collected
    | Cut
    | Held
    | Fetch
    | Abort
    | Propose
    | Voted
    | Committed
    | GetCommits
    | Commits
)


Microbatch = Annotated[int, Meta(ge=0, lt=MAX_MICROBATCHES)]
"""Its number in the step."""
Hop = Annotated[int, Meta(ge=0, le=MAX_HOPS)]
"""Of a route of n legs: 0 to n - 1, and n for the loss."""


class Said(IntEnum):
    """What a stage peer says of a microbatch."""

    PASSED = 0
    """Done here, and taken by the next; of the last backward: done."""
    HOLDING = 1
    """It waits here for its turn."""
    STUCK = 2
    """Done here, and the next cannot be reached."""
    GAVE_UP = 3
    """It was given up, as asked or because there is no room for it or it overflowed, and will never count here under this version of its route."""
    MISSING = 4
    """What is to be sent again is not here."""


class Passage(Struct, frozen=True, array_like=True, tag=17):
    """Stage peer to data node: where a microbatch is."""

    window: Digest
    microbatch: Microbatch
    hop: Hop
    backward: bool
    said: Said
    version: Count
    route: Legs
    """With the legs that were bound on the way."""
    loss: float
    """NaN as long as it is not known here."""


class Again(Struct, frozen=True, array_like=True, tag=18):
    """Data node to stage peer: send what you sent for this hop once more, along this route.

    A forward is computed anew from its input and goes on up to hop `until`, which only keeps it; a gradient was kept.
    """

    window: Digest
    microbatch: Microbatch
    hop: Hop
    backward: bool
    until: Annotated[int, Meta(ge=0, le=MAX_HOPS + 1)]
    version: Count
    route: Legs


class GiveUp(Struct, frozen=True, array_like=True, tag=19):
    """Data node to stage peer: do not do this hop under this version of the route, unless you have done it."""

    window: Digest
    microbatch: Microbatch
    hop: Hop
    backward: bool
    version: Count
    route: Legs


class Landed(Struct, frozen=True, array_like=True, tag=20):
    """Data node to stage peers: these are over; forget what you keep for them."""

    window: Digest
    microbatches: Annotated[tuple[Microbatch, ...], Meta(max_length=MAX_MICROBATCHES)]


PipelineMessage = Passage | Again | GiveUp | Landed
"""Between the peers of a pipeline, as control messages like the others."""


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Struct) -> bytes:
    """Canonical bytes of a message or bulk header, these or those of `pipeline_messages`."""
    return _encoder.encode(message)


def tag(message: Struct) -> int:
    """The message's number on the wire."""
    return int(message.__struct_config__.tag)  # type: ignore[arg-type]


def decode(body: bytes, *, peer: PeerId | None) -> Message:
    """Raises Malformed or LimitExceeded naming `peer`."""
    return wire.decode(_messages, body, what="message", limit=MAX_CONTROL_BYTES, peer=peer)
