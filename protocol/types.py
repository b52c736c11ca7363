"""Field types of the wire: lengths and ranges are checked while decoding, before any rule of ours sees the value."""

from typing import Annotated

from msgspec import Meta

from farflung.protocol.limits import MAX_GROUP_PEERS, MAX_INTERVALS, MAX_LABEL, MAX_PARAMETERS, MAX_TEXT

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""A peer: its Ed25519 public key."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""A hash: SHA-256, of bulk data BLAKE3."""

OptionalDigest = Annotated[bytes, Meta(max_length=32)]
"""A hash, or empty where there is none."""

Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Offset = Annotated[int, Meta(ge=0, le=MAX_PARAMETERS)]
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
LONGEST_S = 1e7
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
Text = Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
"""In one line and without control characters, for it is shown in terminals."""
LABEL = r"^[a-z0-9._-]*\Z"
Label = Annotated[str, Meta(max_length=MAX_LABEL, pattern=LABEL)]
"""What people call a region or an owner, in few letters so that two who mean the same say the same; empty where it is not told."""

LEAST_RATE = 1e-3
"""Of tokens or bytes a second: who is slower is not known to move at all, and what is divided by less may be no number."""


def as_text(words: str) -> str:
    """What of it can be sent as a `Text`: one line, as far as it fits."""
    line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."


def check_rates(*rates: float) -> None:
    """Raise ValueError, which makes a message malformed, for a rate that is neither 0, not known, nor at least `LEAST_RATE`."""
    for rate in rates:
        if 0.0 < rate < LEAST_RATE:
            raise ValueError(f"a rate below {LEAST_RATE:g} a second")


Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_GROUP_PEERS)]
Interval = tuple[Count, Count]
"""Sample numbers [start, stop)."""
Intervals = Annotated[tuple[Interval, ...], Meta(max_length=MAX_INTERVALS)]
