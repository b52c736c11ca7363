"""Peers that this machine has met in a swarm, on disk, so that it can join again when all the first ones are gone.

One JSON file beside the swarm's manifest, replaced whole: key in hex, addresses best first, when last heard from. It is a
cache of what peers said of themselves: an address that lies only makes one dial fail.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from farflung.node.addresses import MAX_ADDRESS_CHARS, split_addresses, split_peer
from farflung.node.durable import write_atomically
from farflung.node.identity import libp2p_text
from farflung.node.network import PeerId
from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_ADDRESSES

MAX_PEERS = 256
"""Peers remembered; those heard from longest ago go first. Four full groups."""


class KnownPeer(msgspec.Struct, kw_only=True):
    """One peer of the book."""

    addresses: list[str]
    seen: float
    """Unix seconds; 0 when an invitation or a flag named it and it was never heard."""


_KeyHex = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _File(msgspec.Struct):
    peers: dict[_KeyHex, KnownPeer]


class PeerBook:
    """The known peers of one swarm."""

    def __init__(self, path: Path) -> None:
        """Read `path` if it is there. Raises ConfigError when it is damaged."""
        self._path = path
        self._peers: dict[str, KnownPeer] = {}
        if path.exists():
            try:
                self._peers = msgspec.json.decode(path.read_bytes(), type=_File).peers
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path} is damaged ({error}); remove it and join with an invitation or --peer"
                ) from error

    def note(self, peer: PeerId, addresses: Iterable[str], seen: float) -> None:
        """Remember what a peer announces. Without addresses nothing is remembered: it could not be dialled."""
        listed = list(addresses)[:MAX_ADDRESSES]
        if listed:
            known = self._peers.get(peer.hex())
            self._peers[peer.hex()] = KnownPeer(addresses=listed, seen=max(seen, known.seen if known else 0.0))

    def note_multiaddrs(self, addresses: Iterable[str]) -> None:
        """Remember addresses of an invitation or a flag, each with /p2p/ID at its end. Raises ConfigError."""
        found: dict[PeerId, list[str]] = {}
        for address in addresses:
            if address.startswith("/"):
                found.setdefault(split_peer(address)[0], []).append(address)
        for peer, listed in found.items():
            known = self._peers.get(peer.hex())
            self.note(peer, dict.fromkeys([*listed, *(known.addresses if known else ())]), 0.0)

    def peers(self) -> dict[PeerId, list[str]]:
        """Everybody, the most recently heard first."""
        ranked = sorted(self._peers.items(), key=lambda item: (-item[1].seen, item[0]))
        return {bytes.fromhex(peer): known.addresses for peer, known in ranked}

    def seeds(self, me: PeerId) -> list[str]:
        """Multiaddrs (with /p2p/ID) of everybody but us, the most recently heard first. What is no address of its peer is left out."""
        named = (
            f"{multiaddr}/p2p/{libp2p_text(peer)}"
            for peer, addresses in self.peers().items()
            if peer != me
            for multiaddr in split_addresses(peer, addresses)[0]
        )
        return [address for address in named if len(address) <= MAX_ADDRESS_CHARS]

    def save(self) -> None:
        """Replace the file. Raises LocalError where the disk does not take it."""
        ranked = sorted(self._peers.items(), key=lambda item: (-item[1].seen, item[0]))[:MAX_PEERS]
        self._peers = dict(ranked)
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(_File(self._peers))))
