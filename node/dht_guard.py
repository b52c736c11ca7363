"""What travels as a record of the DHT, and dictionaries of records, checked: hivemind's lose records to older, endless or oversized ones.

hivemind 1.1.12 (`utils/timed_storage.py`): a store with an older expiration is refused, yet it replaces the entry of the
expiry heap, so the newer record vanishes when the older one would have expired. Anyone could erase any record. Besides:
an infinite expiration, refused for the record itself, still freezes `latest_expiration_time` of its dictionary; and the
dictionaries travel over the wire with whatever size and expirations the sender wrote, and whatever they hold is read, lists in lists to any depth.

The guard refuses stale, non-finite and too distant expirations before they reach the storage (`dht_storage.py`), and bounds what is read.
`tests/node/test_dht_guard.py` shows the fault without it. Records themselves are checked by whoever knows what they mean; what is refused is told, each record once.
Imports hivemind (and so torch): import it only where a DHT node is made.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import timed_storage
from hivemind.utils.serializer import MSGPackSerializer

from farflung.protocol import limits
from farflung.protocol.errors import LimitExceeded, Malformed, RemoteError, Stale

RecordCheck = Callable[[bytes, str, bytes, float], None]
"""(key as `dht.key_digest` gives it, subkey, value, expires_at in unix seconds). Raises RemoteError for a record to refuse."""

MAX_SUBKEYS = 1024
"""Entries under one key: far above the peers of a swarm's group, far below what would hurt a node."""
MAX_LIFE_S = limits.MAX_RECORD_LIFE_S + 2 * limits.MAX_CLOCK_SKEW_S
"""Longest life of a stored record, with room for clocks that differ."""
MAX_VALUE_BYTES = limits.MAX_RECORD_BYTES + 8
"""Of a record as it is stored: MessagePack's head included."""
ID_BYTES = 20
"""Of a record's key, hashed: `dht.key_digest`."""

MAX_TOLD = 1024
"""Refused records remembered, so that one that is put again, or found in every search, is told of once."""

_DICTIONARY_EXT_CODE = 0x50  # the code under which hivemind registers DictionaryDHTValue

_Entry = tuple[
    Annotated[str, msgspec.Meta(max_length=limits.MAX_TEXT)],
    Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)],
    float,
]
# With a type, decoding ends at the first item that is none: a million empty lists took a second, and 70 MB.
_PACKED = msgspec.msgpack.Decoder(
    tuple[float, float, Annotated[list[_Entry], msgspec.Meta(max_length=MAX_SUBKEYS)]], strict=True
)

_WHOLE = frozenset([*range(0xA0, 0xC0), *range(0xC4, 0xCA), *range(0xD4, 0xDC)])
"""First bytes of what MessagePack calls str, bin or ext: whole as it lies there, while lists and maps are built item by item."""


def well_formed(key: object, value: object, expiration_time: object) -> bool:
    """Whether this may be an entry of a dictionary, now or not long ago: of the right types, and to be held no longer than anything is."""
    return (
        isinstance(key, str)
        and isinstance(value, bytes)
        and isinstance(expiration_time, float)
        and math.isfinite(expiration_time)
        and expiration_time <= timed_storage.get_dht_time() + MAX_LIFE_S
    )


class GuardedDictionary(DictionaryDHTValue):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's dictionary value, with the guard.

    Entries that are over, or not newer than ours, are left out and nobody is told: honest nodes send them. A replica that missed an update
    answers with the record that it has, and hands it on to nodes that it meets, and what is on its way may expire there.
    """

    def store(self, key: Any, value: Any, expiration_time: Any) -> bool:
        if not well_formed(key, value, expiration_time):
            return False
        # Equal expirations change nothing in the storage, but hivemind's answer is "refused" then as well.
        if key in self.data and self.data[key].expiration_time >= expiration_time:
            return False
        if key not in self.data and len(self) >= MAX_SUBKEYS:
            return False
        return bool(super().store(key, value, expiration_time))

    @classmethod
    def unpackb(cls, raw: bytes) -> "GuardedDictionary":
        """Decode from the wire. Raises ValueError, also for a single entry that no guarded node would have sent."""
        try:
            _maxsize, _latest, items = _PACKED.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(f"damaged: {error}") from error
        if not all(well_formed(*item) for item in items):
            raise ValueError("an entry that is to be held too long")
        new = cls()
        for item in items:
            new.store(*item)
        return new


class CheckedRecords(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Applies our own check to every record that a DHT node is asked to store or is given in answer to a search."""

    def __init__(self, check: RecordCheck, refused: Callable[[RemoteError], None]) -> None:
        """`refused` is told of each bad record once; it must not raise."""
        self._check = check
        self._refused = refused
        self._told: dict[bytes, None] = {}
        """Digests of those that were told of, the oldest first."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            self._open(record)
        except RemoteError as error:
            self.tell(record.key + record.subkey + record.value, error)
            return False
        return True

    def _open(self, record: DHTRecord) -> None:
        if len(record.key) != ID_BYTES:
            raise Malformed(f"record at an id of {len(record.key)} bytes")
        at = f"record at id {record.key.hex()}"
        if len(record.value) > MAX_VALUE_BYTES:
            raise LimitExceeded(f"{at}: {len(record.value)} bytes, limit {limits.MAX_RECORD_BYTES}")
        if not math.isfinite(record.expiration_time):
            raise Stale(f"{at}: to be held until {record.expiration_time}")
        try:
            subkey = msgspec.msgpack.decode(record.subkey, type=str, strict=True)
            value = msgspec.msgpack.decode(record.value, type=bytes, strict=True)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"{at}: no text for a subkey with bytes for a value: {error}") from error
        if len(subkey) > limits.MAX_TEXT or len(value) > limits.MAX_RECORD_BYTES:
            raise LimitExceeded(
                f"{at}: a subkey of {len(subkey)} characters and {len(value)} bytes, "
                f"limits {limits.MAX_TEXT} and {limits.MAX_RECORD_BYTES}"
            )
        self._check(record.key, subkey, value, record.expiration_time)

    def tell(self, content: bytes, error: RemoteError) -> None:
        """Tell of what was refused, unless this content has been told of."""
        digest = hashlib.sha256(content).digest()
        if digest in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            del self._told[next(iter(self._told))]
        self._told[digest] = None
        self._refused(error)


class CheckedDictionaries(MSGPackSerializer):  # type: ignore[misc]
    """Reads the dictionaries that a DHT node is sent, to be stored or as an answer, and tells of those that cannot be read: hivemind drops them with
    the whole message, and says nothing."""

    def __init__(self, records: CheckedRecords) -> None:
        self._records = records

    def loads(self, buf: bytes) -> Any:
        """As hivemind's. Raises ValueError."""
        try:
            if not buf or buf[0] not in _WHOLE:
                raise ValueError("neither text nor bytes nor an extension")
            value = super().loads(buf)
            if not isinstance(value, GuardedDictionary | bytes | str):  # it reads single values and subkeys too
                raise ValueError(f"a {type(value).__name__}")
        except (ValueError, TypeError) as error:
            self._records.tell(buf, Malformed(f"no dictionary of records, in {len(buf)} bytes: {error}"))
            raise ValueError("damaged dictionary record") from error
        return value

    @classmethod
    def _decode_ext_types(cls, type_code: int, data: bytes) -> GuardedDictionary:
        """Of hivemind's extensions only dictionaries. Its tuples and tensor descriptors are read in recursion that costs 50 kB of stack each time: a
        message of 700 bytes ended the process."""
        if type_code != _DICTIONARY_EXT_CODE:
            raise ValueError(f"an extension of type {type_code}")
        return GuardedDictionary.unpackb(data)


def register() -> None:
    """Have dictionaries from the wire decoded with the guard. Idempotent, for the whole process."""
    if MSGPackSerializer._ext_type_codes.get(_DICTIONARY_EXT_CODE) is GuardedDictionary:
        return
    # `ext_serializable` would do the same, with a warning in the log about the replaced registration.
    MSGPackSerializer._ext_type_codes[_DICTIONARY_EXT_CODE] = GuardedDictionary
    MSGPackSerializer._ext_types[GuardedDictionary] = _DICTIONARY_EXT_CODE
