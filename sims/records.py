"""The shared record store of the modelled DHT: eventually consistent, expiring, and never to be trusted to have everything.

The rules are those measured on hivemind's DHT (transport digest, section 3): among versions of a subkey the one that expires
last wins, and a store that would not outlast what is there is refused; a record outlives its publisher; a look-up may miss.
While the network is partitioned, what was stored before the cut is on both sides (replicas), what is stored later only on its
author's side until the network heals. Sides are by author: a record does not travel with a peer that changes sides.

Not modelled: what a real node serves and keeps at most (`node/dht_protocol.py`, `node/dht_storage.py`). There is room for every record, and a look-up
has them all but for those that it misses. Simulated swarms do not look here for each other: see `lookups`.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from farflung.node.network import PeerId

_VERSIONS_PER_AUTHOR = 2
"""Versions of one subkey kept per author: an older one matters only until the newest has reached everybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    value: bytes
    expires_at: float
    author: PeerId
    stored_at: float
    seen_at: float


class RecordStore:
    """All records of a modelled network. Times are true unix seconds, whatever the peers' clocks say."""

    def __init__(self, rng: random.Random, cut_at: Callable[[PeerId, PeerId], float]) -> None:
        """`cut_at` tells since when two peers have been separated without a break, infinite where they are not."""
        self._rng = rng
        self._cut_at = cut_at
        self._versions: dict[str, dict[str, list[_Version]]] = {}

    def put(
        self,
        key: str,
        subkey: str,
        value: bytes,
        expires_at: float,
        *,
        author: PeerId,
        now: float,
        delay_s: float,
    ) -> bool:
        """Store one version, seen by others within `delay_s` seconds; False when refused: expired, or outlasted."""
        seen_at = now + delay_s * self._rng.random()
        if not now < expires_at < math.inf:
            return False
        versions = [v for v in self._versions.get(key, {}).get(subkey, []) if v.expires_at > now]
        if any(v.expires_at >= expires_at and self._visible(v, author, now) for v in versions):
            return False
        own = [v for v in versions if v.author == author][1 - _VERSIONS_PER_AUTHOR :]
        new = _Version(value=value, expires_at=expires_at, author=author, stored_at=now, seen_at=seen_at)
        versions = [v for v in versions if v.author != author] + own + [new]
        self._versions.setdefault(key, {})[subkey] = versions
        return True

    def get(self, key: str, *, reader: PeerId, now: float, miss: float) -> tuple[dict[str, bytes], int]:
        """Live records under `key` by subkey in sorted order, as `reader` finds them, and how many it missed.

        `miss` is the probability to miss a subkey that is there.
        """
        found: dict[str, bytes] = {}
        num_missed = 0
        subkeys = self._versions.get(key, {})
        for subkey in sorted(subkeys):
            missed = self._rng.random() < miss
            subkeys[subkey] = [v for v in subkeys[subkey] if v.expires_at > now]
            if not subkeys[subkey]:
                del subkeys[subkey]
                continue
            seen = [v for v in subkeys[subkey] if self._visible(v, reader, now)]
            if seen and missed:
                num_missed += 1
            elif seen:
                found[subkey] = max(seen, key=lambda version: version.expires_at).value
        return found, num_missed

    def _visible(self, version: _Version, reader: PeerId, now: float) -> bool:
        if version.author == reader:
            return True
        return version.seen_at <= now and version.stored_at < self._cut_at(version.author, reader)
