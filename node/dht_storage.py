"""What a node keeps of the DHT's records: so many bytes, whoever puts them, and what it needs itself is never pushed out by others'.

hivemind's storage, when it is full, drops what expires first: 4,096 records of one stranger, to be held for an hour, pushed out the peers of
a swarm, which are put for ten minutes at a time, and each later one too, of which it said that it was stored. And it counts keys, however much lies under them.

Here an entry counts for who has put it, a key that libp2p has proven. Where there is no room, entries of who has put most there give way to one of who
has put less, with that one; else the new one is refused. So who comes alone pushes out nothing but its own, under however many keys it signs.
Under the keys of its own swarm a node keeps more, and nothing under other keys takes room from them.

Imports hivemind (and so torch): import it only where a DHT node is made.
"""

import heapq
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hivemind.utils import timed_storage
from hivemind.utils.timed_storage import ValueWithExpiration

from farflung.node.dht_guard import MAX_SUBKEYS, GuardedDictionary, well_formed
from farflung.node.network import PeerId

MAX_STORED_BYTES = 64 << 20
"""All that is kept, with what it takes to keep it. Records of a swarm of a thousand peers are about 3 MB."""
MAX_OWN_KEYS = 3
"""Keys of our swarm: its peers, its manifest, its name."""
MAX_OWN_BYTES = 4 << 20
"""Under each of them."""
MAX_OTHER_BYTES = MAX_STORED_BYTES - MAX_OWN_KEYS * MAX_OWN_BYTES
"""Under all other keys together."""
MAX_OTHER_ENTRIES = 16384
"""As well: to find out who has put most takes time."""
MAX_OTHER_SUBKEYS = 128
"""Entries under one of the other keys: enough to find others of a swarm that is not ours, or to see that a name is contested."""
MAX_OTHER_SUBKEY_BYTES = 1 << 20
MAX_ENTRIES_OF_ONE = 256
"""Entries that one peer may have put, under one of our keys, or under all others together. Its own are three; the rest it hands over to us."""
ENTRY_BYTES = 2048
"""As which an entry counts besides its value: measured, for one that is alone under its key."""
LEAST_BYTES = 8 << 10
"""As which the shortest entry counts where it is asked who has put most: of two peers with a record each neither gives way because it has more addresses."""

Putter = PeerId | None
"""Who has put a record: the key of a peer, or None for this node."""
Place = tuple[int, str]
"""Key and subkey."""


@dataclass(slots=True)
class _Entry:
    value: bytes
    expires_at: float
    by: Putter


class Pool:
    """Entries that share a room, and whose they are. What this node has put itself does not give way, and finds room as long as others can."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.num_entries = 0
        self.num_bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._sizes: dict[Putter, dict[Place, int]] = {}
        """Of each one's entries, those that were put last at the end."""
        self._totals: dict[Putter, int] = {}
        """Bytes of each one's entries, as they count between peers."""

    def add(self, place: Place, size: int, by: Putter) -> None:
        """There is room."""
        self._sizes.setdefault(by, {})[place] = size
        self._totals[by] = self._totals.get(by, 0) + _weight(size)
        self.num_entries += 1
        self.num_bytes += size

    def remove(self, place: Place, by: Putter) -> None:
        theirs = self._sizes[by]
        size = theirs.pop(place)
        self._totals[by] -= _weight(size)
        self.num_entries -= 1
        self.num_bytes -= size
        if not theirs:
            del self._sizes[by], self._totals[by]

    def room_for(self, size: int, by: Putter) -> tuple[Place, ...] | None:
        """What has to give way to an entry: nothing most of the time. None when it is to be refused."""
        if by is not None and len(self._sizes.get(by, ())) >= MAX_ENTRIES_OF_ONE:
            return None
        entries, excess = self.num_entries + 1 - self._max_entries, self.num_bytes + size - self._max_bytes
        if entries <= 0 and excess <= 0:
            return ()
        most = max((who for who in self._totals if who is not None), key=self._totals.__getitem__, default=None)
        if most is None or most == by:
            return None
        left = self._totals[most]
        going = []
        for place, bytes_of_it in self._sizes[most].items():
            if entries <= 0 and excess <= 0:
                break
            # With the new entry one has less than the other had: else they would push each other out in turns.
            if by is not None and left <= self._totals.get(by, 0) + _weight(size):
                return None
            going.append(place)
            left -= _weight(bytes_of_it)
            entries -= 1
            excess -= bytes_of_it
        return tuple(going) if entries <= 0 and excess <= 0 else None


def _weight(size: int) -> int:
    """Of an entry of so many bytes, between peers."""
    return max(size, LEAST_BYTES)


class GuardedStorage:
    """In the place of hivemind's storage of one node. Plain records (without subkey) are refused: we have none."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, _Entry]] = {}
        self._own: dict[int, Pool] = {}
        self._under: dict[int, Pool] = {}
        """Of each of the other keys under which something is kept."""
        self._others = Pool(MAX_OTHER_ENTRIES, MAX_OTHER_BYTES)
        self._expiring: list[tuple[float, Place]] = []
        """A heap. Entries that were replaced or dropped since are still in it, up to as many as there are others."""

    @property
    def num_entries(self) -> int:
        return self._others.num_entries + sum(pool.num_entries for pool in self._own.values())

    @property
    def num_bytes(self) -> int:
        """All that is kept, with what it takes to keep it."""
        return self._others.num_bytes + sum(pool.num_bytes for pool in self._own.values())

    def keep(self, keys: Collection[int]) -> None:
        """Those of our own swarm, from now on."""
        if len(keys) > MAX_OWN_KEYS:
            raise ValueError(f"at most {MAX_OWN_KEYS} keys are a swarm's own")
        before = [(place, self._take(place)) for place in list(self._places())]
        self._own = {key: Pool(MAX_SUBKEYS, MAX_OWN_BYTES) for key in keys}
        for (key, subkey), entry in before:
            self._put((key, subkey), entry)

    def keys(self) -> list[int]:
        """Under which something is kept, those of our own swarm first."""
        self._drop_expired()
        return sorted(self._kept, key=lambda key: key not in self._own)

    def size(self, key: int) -> int:
        """Bytes of what is kept under a key, subkeys included."""
        if key not in self._kept:
            return 0
        pool = self._pools(key)[0]
        return pool.num_bytes - ENTRY_BYTES * pool.num_entries

    def get(self, key: int) -> ValueWithExpiration | None:
        """All under a key. A copy: hivemind's searches write what others answer into what they are given here."""
        return self.some(key, MAX_STORED_BYTES)

    def some(self, key: int, max_bytes: int) -> ValueWithExpiration | None:
        """What is kept under a key, as much of it as goes into so many bytes, drawn by lot if it is not all."""
        self._drop_expired()
        entries = list(self._kept.get(key, {}).items())
        if self.size(key) > max_bytes:
            random.shuffle(entries)
        dictionary, left = GuardedDictionary(), max_bytes
        for subkey, entry in entries:
            left -= len(subkey) + len(entry.value)
            if left < 0:
                break
            dictionary.store(subkey, entry.value, entry.expires_at)
        if not len(dictionary):
            return None
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def store(self, key: int, value: bytes, expiration_time: float, subkey: str | None = None) -> bool:
        """As hivemind calls it, for what this node puts itself."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: int, subkey: str, value: bytes, expiration_time: float, by: Putter = None) -> bool:
        """Whether it is kept now: it is not when it is no newer than what we have, or there is no room."""
        self._drop_expired()
        if not well_formed(subkey, value, expiration_time) or expiration_time < timed_storage.get_dht_time():
            return False
        found = self._kept.get(key, {}).get(subkey)
        if found is not None and found.expires_at >= expiration_time:
            return False
        place = (key, subkey)
        if found is None:
            return self._put(place, _Entry(value, expiration_time, by))
        if by is not None and by.hex() != subkey:
            # Who puts another's record once more does not take it over, to be pushed out with its own; the signer itself does.
            by = found.by
        self._take(place)
        if self._put(place, _Entry(value, expiration_time, by)):
            return True
        self._put(place, found)
        return False

    def drop(self, key: int, subkey: str) -> None:
        """One that is there."""
        self._take((key, subkey))

    def _places(self) -> Iterator[Place]:
        for key, under in self._kept.items():
            for subkey in under:
                yield key, subkey

    def _pools(self, key: int) -> tuple[Pool, ...]:
        if key in self._own:
            return (self._own[key],)
        if key not in self._under:
            self._under[key] = Pool(MAX_OTHER_SUBKEYS, MAX_OTHER_SUBKEY_BYTES)
        return self._under[key], self._others

    def _put(self, place: Place, entry: _Entry) -> bool:
        """Keep it, if there is room; nothing has changed if not."""
        key, subkey = place
        size = ENTRY_BYTES + len(subkey) + len(entry.value)
        going: set[Place] = set()
        for pool in self._pools(key):
            making_room = pool.room_for(size, entry.by)
            if making_room is None:
                if key not in self._kept:
                    self._under.pop(key, None)
                return False
            going.update(making_room)
        for other in going:
            self._take(other)
        for pool in self._pools(key):
            pool.add(place, size, entry.by)
        self._kept.setdefault(key, {})[subkey] = entry
        heapq.heappush(self._expiring, (entry.expires_at, place))
        if len(self._expiring) > 2 * self.num_entries + 64:
            self._expiring = [(self._kept[key][subkey].expires_at, (key, subkey)) for key, subkey in self._places()]
            heapq.heapify(self._expiring)
        return True

    def _take(self, place: Place) -> _Entry:
        """Out of here."""
        key, subkey = place
        entry = self._kept[key].pop(subkey)
        for pool in self._pools(key):
            pool.remove(place, entry.by)
        if not self._kept[key]:
            del self._kept[key]
            self._under.pop(key, None)
        return entry

    def _drop_expired(self) -> None:
        now = timed_storage.get_dht_time()
        while self._expiring and self._expiring[0][0] < now:
            expires_at, (key, subkey) = heapq.heappop(self._expiring)
            entry = self._kept.get(key, {}).get(subkey)
            if entry is not None and entry.expires_at == expires_at:
                self._take((key, subkey))
