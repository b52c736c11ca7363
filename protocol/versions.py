"""Protocol versions by number, what each changed, and how two peers settle on one.

A version is named in every envelope, record and manifest; decoders take it from there and never guess it.

* **1**: replica mode, fragments in turn, mean of contributors, dynamic linear voting.
* **2**: laps: commits say how many inner steps the run has made and how many lie before the next round.
* **3**: lives: the chain of stage 0 begins lost stages of a pipeline anew.
* **4**: rounds in waves: several parts of one owner, means before the cut, and one stream for what a peer sends of a round.
* **5**: means, chunks of the state and shadows are named by BLAKE3, no longer by SHA-256; who asks for a shadow says whether a stage begins with it.
* **6**: from three stages on the chains of a pipeline decide together which lives count, and may begin stage 0 anew: commits acknowledge lives and call for one,
  `Present` tells it, with what stage 0's chain has counted.
* **7**: the order of fragments moves on by one after some turns.
* **8**: heartbeats say when the next comes, and who offers something for a round whom it lacked in the last ones.
* **9**: what is for somebody to whom there is no way goes by way of others; heartbeats say whom their author does not hear.
* **10**: commits say how many fragments the next round moves at once, and manifests which layers make one.
* **11**: samples are handed out by the sixteenth of a window at least, so that ledgers stay short.
* **12**: a full group becomes two: commits say who goes, and which samples each half hands out; heartbeats and peer records say of which group their author is, and owners of
  parts ask other groups for their outer parameters, as often as the manifest says; newcomers give each other the chunks of the state that they have.
* **13**: manifests say how the outer rate grows with the number of contributors.
* **14**: the last lap is what is left of the run, where that is no whole number of laps.
* **15**: activations that neighbours of a stage remember are named with the number of their step.
* **16**: the mean of two members is what both have sent, and each hears the other's.
* **17**: manifests say which token of a tokenizer file ends a text; texts are held out by blocks of every file, and the hash of streamed data leaves out where files lie;
  the weight decay of a manifest is decoupled in classes of torch as well; plans bring microbatches of few data nodes to one peer.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from farflung.protocol.errors import Malformed, WrongVersion
from farflung.protocol.keys import PeerId
from farflung.protocol.wire import Small, decode

PROTOCOL_VERSION = 17
"""What we write."""

SUPPORTED_VERSIONS: tuple[int, ...] = (17,)
"""What we can read, ascending."""


def negotiate(theirs: Iterable[int], *, peer: PeerId | None, ours: Iterable[int] = SUPPORTED_VERSIONS) -> int:
    """The highest version that both sides speak. Raises WrongVersion naming both sides' versions."""
    offered, known = sorted(set(theirs)), sorted(set(ours))
    common = set(offered) & set(known)
    if not common:
        raise WrongVersion(f"speaks protocol versions {offered}, we speak {known}", peer=peer)
    return max(common)


def check_version(version: int, *, what: str, peer: PeerId | None) -> None:
    """Raise WrongVersion unless we can read `version`."""
    if version not in SUPPORTED_VERSIONS:
        known = ", ".join(map(str, SUPPORTED_VERSIONS))
        raise WrongVersion(f"{what} of protocol version {version}, we read {known}", peer=peer)


T = TypeVar("T", bound=msgspec.Struct)


class _Versioned(msgspec.Struct, array_like=True):
    version: Small


_VERSION_DECODER = msgspec.msgpack.Decoder(_Versioned)


def decode_versioned(
    decoder: msgspec.msgpack.Decoder[T], data: bytes, *, what: str, limit: int, peer: PeerId | None
) -> T:
    """`wire.decode` of an array that begins with its version. Raises WrongVersion as well: another version may have another shape, and then that is the truth
    that helps."""
    try:
        return decode(decoder, data, what=what, limit=limit, peer=peer)
    except Malformed:
        head = decode(_VERSION_DECODER, data, what=what, limit=limit, peer=peer)
        check_version(head.version, what=what, peer=peer)
        raise
