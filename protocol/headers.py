"""What bulk streams begin with: headers of transfers, requests and their answers. They are numbered from 64 on, apart from control messages."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol import wire
from farflung.protocol.keys import SIGNATURE_BYTES, PeerId
from farflung.protocol.limits import (
    MAX_CONTROL_BYTES,
    MAX_HOPS,
    MAX_IMPRINTS,
)
from farflung.protocol.messages import Hop, Microbatch
from farflung.protocol.route import Legs
from farflung.protocol.types import (
    Count,
    Digest,
    Offset,
    OptionalDigest,
)


class ContributionHeader(Struct, frozen=True, array_like=True, tag=64):
    """Bulk stream `round`, on which one transfer follows another: a contributor's encoded part, for its owner. Then `nbytes` bytes; the owner
    answers one byte 1, which the next transfer does not wait for."""

    plan: Digest
    part: Count
    nbytes: Count


class MeanHeader(Struct, frozen=True, array_like=True, tag=65):
    """Bulk stream `round`: the encoded mean of a part, from its owner. Then `nbytes` bytes; the receiver answers one byte 1."""

    plan: Digest
    part: Count
    nbytes: Count
    early: bool = False
    """Made of all planned contributions, before the cut: it holds if the cut leaves nobody out."""
    lacks: Count | None = None
    """Of an unreduced mean, which of its contributions is not in these bytes: the receiver's own."""


class MeanRequest(Struct, frozen=True, array_like=True, tag=66):
    """Bulk stream `fetch`: the encoded mean of a part, by its digest. Answer: 8 bytes big-endian length (0: not here), then the bytes."""

    plan: Digest
    part: Count
    digest: Digest


class ChunkListRequest(Struct, frozen=True, array_like=True, tag=67):
    """Bulk stream `chunks`: digests of the donor's outer state. Answer: a framed ChunkList."""


class ChunkList(Struct, frozen=True, array_like=True, tag=68):
    version: Count
    digests: tuple[Digest, ...]


class ChunkRequest(Struct, frozen=True, array_like=True, tag=69):
    """Bulk stream `chunk`: one chunk of outer state. Answer: 8 bytes version, 8 bytes length, the bytes; repeated per request on the stream."""

    index: Count


class PiecesRequest(Struct, frozen=True, array_like=True, tag=81):
    """Bulk stream `pieces`: which chunks a newcomer can give. Answer: 8 bytes length, one bit for each chunk, the first of a byte its highest; or that it downloads nothing."""


class ParcelHeader(Struct, frozen=True, array_like=True, tag=70):
    """Bulk streams `activation` and `gradient`, one after another: what `hop` needs. Then `nbytes` bytes, the last of which are the
    int32 targets where the loss is not at home. The receiver answers one byte: 1 taken, 2 busy, 3 not wanted any more; before the bytes
    if asked, and then, if it was 1, after them once more.
    """

    window: Digest
    microbatch: Microbatch
    hop: Hop
    backward: bool
    until: Annotated[int, Meta(ge=0, le=MAX_HOPS + 1)]
    """The hop that only keeps it, of an activation that is sent once more; beyond the route otherwise."""
    version: Count
    route: Legs
    batch: Count
    """Sequences; a parcel is [batch, length, width]."""
    length: Count
    """Tokens of each sequence."""
    loss: float
    """Of the microbatch, on the way back; NaN before."""
    asks: bool
    """The sender waits for the first answer before it sends the bytes: it has a choice of peers."""
    nbytes: Count


class SettleRequest(Struct, frozen=True, array_like=True, tag=71):
    """Bulk stream `settle`: the data node is done with this window, and what the receiver has accumulated counts, or not."""

    window: Digest
    counts: bool


class Settled(Struct, frozen=True, array_like=True, tag=72):
    """Answer to SettleRequest: how many (microbatch, hop) of that data node were accumulated here."""

    visits: Count


class ShadowRequest(Struct, frozen=True, array_like=True, tag=73):
    """Bulk stream `shadow`: a compressed copy of a stage's parameters, or how they differ from the copy that the asker has. Answer: 8 bytes for the
    pipeline's step that it is of, 32 for the name of the copy that it continues, 8 for its length, and the bytes; no bytes from a peer that has none, or does not know that copy."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    have: OptionalDigest
    """Name of the copy that the asker has, to which it wants the difference; empty: a whole one."""
    founds: bool
    """Whether the asker begins the stage with it, and so wants it fine; else it keeps it, and is sent differences."""


class ImprintListRequest(Struct, frozen=True, array_like=True, tag=74):
    """Bulk stream `imprint`: which activations that went into or came out of a stage the receiver still has. Answer: an ImprintList."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]


class ImprintKey(Struct, frozen=True, array_like=True, order=True):
    """One microbatch of one step of the pipeline."""

    step: Count
    """Of two windows of one step one came to nothing, and both are of the same parameters."""
    window: Digest
    microbatch: Microbatch


ImprintKeys = Annotated[tuple[ImprintKey, ...], Meta(max_length=MAX_IMPRINTS)]


class ImprintList(Struct, frozen=True, array_like=True, tag=75):
    """Answer to ImprintListRequest."""

    inputs: ImprintKeys
    outputs: ImprintKeys


class ImprintRequest(Struct, frozen=True, array_like=True, tag=76):
    """Bulk stream `imprint`: the first sequence of one of those. Answer: an Imprinted, and the bytes."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    output: bool
    """Of the stage; else its input."""
    key: ImprintKey


class Imprinted(Struct, frozen=True, array_like=True, tag=77):
    """Answer to ImprintRequest: [1, length, width] as the codec of forwards encodes it; a length of 0 when it is not there any more."""

    length: Count
    nbytes: Count


class ExactRequest(Struct, frozen=True, array_like=True, tag=78):
    """Bulk stream `exact`: an exact copy of the parameters that the receiver trains in its layers, or has of embedding, last norm and head, if that is newer
    than this. Answer: an ExactHeader, and the bytes if that says so."""

    ends: bool
    step: Count
    version: Count


class ExactHeader(Struct, frozen=True, array_like=True, tag=79):
    """Answer to ExactRequest: what the receiver has."""

    name: OptionalDigest
    """Digest of the bytes; empty where it has none."""
    step: Count
    """Steps of the run that the parameters have had."""
    version: Count
    """Rounds among them."""
    follows: bool
    """It is newer than what was asked about: 8 bytes for its length follow, and the bytes."""


class OuterRequest(Struct, frozen=True, array_like=True, tag=80):
    """Bulk stream `outer`: outer parameters [start, stop) of the receiver, who is of another group of the swarm. Answer: 8 bytes version, and framed, bf16, or framed that there is none. Others
    may follow on the same stream."""

    start: Offset
    stop: Offset
    admission: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    """As in heartbeats, for the two have not heard of each other."""


BulkHeader = (
    ContributionHeader
    | MeanHeader
    | MeanRequest
    | ChunkListRequest
    | ChunkList
    | ChunkRequest
    | PiecesRequest
    | ParcelHeader
    | SettleRequest
    | Settled
    | ShadowRequest
    | ImprintListRequest
    | ImprintList
    | ImprintRequest
    | Imprinted
    | ExactRequest
    | ExactHeader
    | OuterRequest
)


_headers: msgspec.msgpack.Decoder[BulkHeader] = msgspec.msgpack.Decoder(BulkHeader)


def decode_header(body: bytes, *, peer: PeerId | None) -> BulkHeader:
    """Raises Malformed or LimitExceeded naming `peer`."""
    return wire.decode(_headers, body, what="bulk header", limit=MAX_CONTROL_BYTES, peer=peer)
