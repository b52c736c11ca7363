"""What a peer says about itself in the DHT: addresses, speed, progress. Unproven, so good for finding, showing and
planning, never for deciding. Texts are limited to printable characters: `status` shows them in a terminal.
"""

import re

import msgspec

from farflung.protocol.addresses import is_address
from farflung.protocol.checks import check_length, check_range, check_text
from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_ADDRESSES, MAX_PROTOCOL_VERSIONS, MAX_TEXT
from farflung.protocol.versions import SUPPORTED_VERSIONS

_STATE = re.compile(r"[a-z_]{1,16}")


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One peer's account of itself. Raises ConfigError for values out of range."""

    addresses: tuple[str, ...] = ()
    """Where it may be reached, best first."""
    device: str = ""
    """For people, such as `NVIDIA RTX 3060, 12 GiB`."""
    tokens_per_s: float = 0.0
    """Training speed; 0 when unknown."""
    up_bytes_per_s: float = 0.0
    """Of its uplink, as it has measured; 0 when unknown, as below."""
    down_bytes_per_s: float = 0.0
    """The most that it has lately received at: a lower bound of its downlink."""
    stages: tuple[int, int]
    """Layers it holds, first and one past the last; all of them in replica mode."""
    height: int = 0
    """Height of its last commit."""
    version: int = 0
    """Version of its outer state."""
    state_digest: bytes = b""
    """Digest of its outer state, 32 bytes, or empty before it has any."""
    protocol_versions: tuple[int, ...] = SUPPORTED_VERSIONS
    """Those it can read; a record in an envelope of another version is refused before this is seen."""
    agent: str = ""
    """Program and version, for people."""
    state: str = "joining"
    """One word, for people: joining, training, paused, leaving."""
    admission_token: bytes = b""
    """See `admission`; empty in an open swarm."""
    group: bytes = b""
    """Whose history it follows (`chain.Half`), 32 bytes; empty of the first, and before it has any."""

    def __post_init__(self) -> None:
        check_range("peer record: number of addresses", len(self.addresses), 0, MAX_ADDRESSES)
        for address in self.addresses:
            if not is_address(address):
                raise ConfigError(f"peer record: {address[:80]!r} is no address")
        check_text("peer record: device", self.device, MAX_TEXT)
        check_text("peer record: agent", self.agent, 64)
        for key, rate in (
            ("tokens_per_s", self.tokens_per_s),
            ("up_bytes_per_s", self.up_bytes_per_s),
            ("down_bytes_per_s", self.down_bytes_per_s),
        ):
            check_range(f"peer record: {key}", rate, 0.0, 1e15)
        first, end = self.stages
        check_range("peer record: first layer", first, 0, 4096)
        check_range("peer record: end of layers", end, first, 4096)
        check_range("peer record: height", self.height, 0, 1 << 53)
        check_range("peer record: version", self.version, 0, 1 << 53)
        check_length("peer record: state_digest", self.state_digest, 0, 32)
        check_range("peer record: number of versions", len(self.protocol_versions), 1, MAX_PROTOCOL_VERSIONS)
        for version in self.protocol_versions:
            check_range("peer record: protocol version", version, 1, 65535)
        if not _STATE.fullmatch(self.state):
            raise ConfigError(f"peer record: state {self.state[:32]!r} is no word of 1 to 16 letters")
        check_length("peer record: admission_token", self.admission_token, 0, 64)
        check_length("peer record: group", self.group, 0, 32)
