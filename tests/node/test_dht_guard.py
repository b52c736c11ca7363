"""hivemind's storage loses a newer record to a refused older one; the guarded storage does not."""

import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from farflung.protocol import limits
from farflung.protocol.errors import LimitExceeded, Malformed, Refused, RemoteError, Stale

KEY = 7
VALUE = b"\xc4\x01v"  # MessagePack of b"v"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    from hivemind.utils import timed_storage

    time = {"now": 1000.0}
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: time["now"])
    return time


@pytest.fixture
def guarded(clock: dict[str, float]) -> Any:
    from farflung.node import dht_guard
    from farflung.node.dht_storage import GuardedStorage

    dht_guard.register()
    return GuardedStorage()


def live(storage: Any) -> dict[str, bytes]:
    found = storage.get(KEY)
    return {} if found is None else {subkey: entry.value for subkey, entry in found.value.items()}


def put_all(storage: Any, dictionary: Any) -> None:
    for subkey, entry in dictionary.items():
        storage.store_subkey(KEY, subkey, entry.value, entry.expiration_time)


def older_after_newer(storage: Any, clock: dict[str, float]) -> dict[str, bytes]:
    assert storage.store(KEY, VALUE, 1060.0, subkey="peer")
    assert not storage.store(KEY, b"older", 1001.5, subkey="peer")
    clock["now"] = 1002.5
    return live(storage)


def test_the_fault_without_the_guard(clock: dict[str, float]) -> None:
    from hivemind.dht.storage import DHTLocalStorage

    # When this fails, upstream is fixed and dht_guard.py can go.
    assert older_after_newer(DHTLocalStorage(), clock) == {}


def test_the_guard_keeps_the_newer_record(guarded: Any, clock: dict[str, float]) -> None:
    assert older_after_newer(guarded, clock) == {"peer": VALUE}
    clock["now"] = 1061.0
    assert live(guarded) == {}


@pytest.mark.parametrize("expires", [math.inf, -math.inf, math.nan, 999.0, 1e9, 1060, "soon", None])
def test_bad_expirations_change_nothing(guarded: Any, expires: Any) -> None:
    assert guarded.store(KEY, VALUE, 1060.0, subkey="peer")
    before = guarded.get(KEY).expiration_time
    for subkey in ("peer", "other"):
        assert not guarded.store(KEY, VALUE, expires, subkey=subkey)
    assert guarded.get(KEY).expiration_time == before
    assert guarded.store(KEY, VALUE, 1090.0, subkey="other")  # later stores still prolong the dictionary
    assert guarded.get(KEY).expiration_time == 1090.0


def test_plain_records_are_refused(guarded: Any) -> None:
    assert not guarded.store(KEY, VALUE, 1060.0)
    assert not guarded.store(KEY, VALUE, 1060.0, subkey=5)


def test_entries_are_bounded(guarded: Any) -> None:
    from farflung.node import dht_guard

    guarded.keep([KEY])
    for index in range(dht_guard.MAX_SUBKEYS):
        assert guarded.store(KEY, VALUE, 1060.0, subkey=str(index))
    assert not guarded.store(KEY, VALUE, 1061.0, subkey="one more")
    assert guarded.store(KEY, b"newer", 1061.0, subkey="0")


def test_dictionaries_over_the_wire(guarded: Any, clock: dict[str, float]) -> None:
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    from farflung.node import dht_guard

    sent = DictionaryDHTValue()
    sent.latest_expiration_time = math.inf  # is not believed
    sent.store("good", VALUE, 1060.0)
    sent.store("over on the way", VALUE, 1001.0)
    raw = MSGPackSerializer.dumps(sent)
    clock["now"] = 1001.5
    received = MSGPackSerializer.loads(raw)
    assert type(received) is dht_guard.GuardedDictionary
    assert [subkey for subkey, _ in received.items()] == ["good"]
    put_all(guarded, received)
    assert live(guarded) == {"good": VALUE}
    assert guarded.get(KEY).expiration_time == 1060.0
    again = MSGPackSerializer.loads(MSGPackSerializer.dumps(guarded.get(KEY).value))
    assert [subkey for subkey, _ in again.items()] == ["good"]
    # The same dictionary with one older entry must not take the newer one away.
    older = DictionaryDHTValue()
    older.store("good", b"older", 1002.0)
    put_all(guarded, MSGPackSerializer.loads(MSGPackSerializer.dumps(older)))
    clock["now"] = 1003.0
    assert live(guarded) == {"good": VALUE}


def packed(*entries: object) -> bytes:
    """A dictionary of these entries as it travels: an extension of hivemind's."""
    inner = msgspec.msgpack.encode([1024, 1060.0, entries])
    return extension(0x50, inner)


def extension(code: int, raw: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, raw))


NOT_TO_BE_READ = {
    "nested": (extension(0x50, b"\x91" * (1 << 16)), "damaged"),
    # One alone: where they are read, nested ones end the process.
    "a tuple": (extension(0x40, b"\x91\x01"), "an extension of type 64"),
    "a tensor": (extension(0x51, b"\x80"), "an extension of type 81"),
    "lists": (b"\xdd\x00\x01\x86\xa0" + b"\x90" * 100_000, "neither text"),
    "lists for entries": (packed(*[[]] * 1000), "array"),
    "many lists for entries": (packed(*[[]] * 100_000), "length <= 1024"),
    "lists in an entry": (packed(["a", VALUE, [[]] * 100_000]), "`float`"),
    "lists for a time": (extension(0x50, b"\x93\xdd\x00\x01\x86\xa0" + b"\x90" * 100_002), "`float`"),
    "a map": (b"\x81\xa1a\xc4\x00", "neither text"),
    "nothing": (b"", "neither text"),
    "a number for a subkey": (packed(["good", VALUE, 1060.0], [5, VALUE, 1060.0]), "`str`"),
    "no text": (packed([msgspec.Raw(b"\xa1\xff"), VALUE, 1060.0]), "utf-8"),
    "text for a value": (packed(["a", "text", 1060.0]), "`bytes`"),
    "a long subkey": (packed(["a" * (limits.MAX_TEXT + 1), VALUE, 1060.0]), "length"),
    "a long value": (packed(["a", bytes(limits.MAX_RECORD_BYTES + 9), 1060.0]), "length"),
    "endless": (packed(["a", VALUE, math.inf]), "an entry"),
    "endless in the past": (packed(["a", VALUE, -math.inf]), "an entry"),
    "no time": (packed(["a", VALUE, math.nan]), "an entry"),
    "too distant": (packed(["a", VALUE, 1e9]), "an entry"),
}


@pytest.mark.parametrize("name", NOT_TO_BE_READ)
def test_dictionaries_that_no_guarded_node_sends_are_told_of_and_dropped(clock: dict[str, float], name: str) -> None:
    from farflung.node import dht_guard

    raw, reason = NOT_TO_BE_READ[name]
    dht_guard.register()
    told: list[RemoteError] = []
    dictionaries = dht_guard.CheckedDictionaries(dht_guard.CheckedRecords(lambda *_: None, told.append))
    tracemalloc.start()
    with pytest.raises(ValueError, match="damaged dictionary record"):
        dictionaries.loads(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000  # each empty list takes 70 bytes, and half a microsecond
    [error] = told
    assert type(error) is Malformed and reason in error.reason and len(str(error)) < 200


def test_entries_as_replicas_have_them_that_missed_an_update_are_not_told_of(
    guarded: Any, clock: dict[str, float]
) -> None:
    from farflung.node import dht_guard

    told: list[RemoteError] = []
    dictionaries = dht_guard.CheckedDictionaries(dht_guard.CheckedRecords(lambda *_: None, told.append))
    assert guarded.store(KEY, VALUE, 1060.0, subkey="peer")
    for entry in (["peer", b"older", 1050.0], ["peer", VALUE, 1060.0], ["gone", VALUE, 999.0]):
        put_all(guarded, dictionaries.loads(packed(entry)))
    assert live(guarded) == {"peer": VALUE} and not told


@pytest.mark.parametrize("raw", [b"", b"\x93", b"\xc0", b"\x93\x01\x02\x03", b"\x93\x01\x02\x91\x01"])
def test_damaged_dictionaries_are_value_errors(raw: bytes) -> None:
    from farflung.node.dht_guard import GuardedDictionary

    with pytest.raises(ValueError):
        GuardedDictionary.unpackb(raw)


@pytest.mark.parametrize(
    ("key", "subkey", "value", "expires", "error"),
    [
        (b"k" * 20, b"\xa1s", b"\xc4\x01v", 5.0, None),
        (b"k" * 20, b"\xa1s", b"\xc4\x01w", 5.0, Refused),  # the check says no
        (b"k" * 20, b"\xa1s", b"\xc4\x01v", math.nan, Stale),
        (b"k" * 20, b"\xc0", b"\xc4\x01v", 5.0, Malformed),  # no subkey
        (b"k" * 20, b"\xa1\xff", b"\xc4\x01v", 5.0, Malformed),  # no text
        (b"k" * 20, b"\xa1s", b"\xa1v", 5.0, Malformed),  # text instead of bytes
        (b"k" * 20, b"\xa1s", b"", 5.0, Malformed),
        (b"k" * 20, b"\xa1s", b"\xc5\xff\xff" + bytes(0xFFFF), 5.0, LimitExceeded),
        (b"k" * 20, b"\xda\x02\x01" + b"s" * 513, b"\xc4\x01v", 5.0, LimitExceeded),
        (bytes(1000) + b"k" * 20, b"\xa1s", b"\xc4\x01v", 5.0, Malformed),  # hivemind reads the same id from it
    ],
)
def test_records_are_checked_and_what_is_refused_is_told(
    key: bytes, subkey: bytes, value: bytes, expires: float, error: type[RemoteError] | None
) -> None:
    from hivemind.dht.validation import DHTRecord

    from farflung.node.dht_guard import CheckedRecords

    seen: list[tuple[bytes, str, bytes, float]] = []
    told: list[RemoteError] = []

    def check(key: bytes, name: str, content: bytes, expires_at: float) -> None:
        seen.append((key, name, content, expires_at))
        if content != b"v":
            raise Refused("not v")

    checked = CheckedRecords(check, told.append)
    assert checked.validate(DHTRecord(key, subkey, value, expires)) == (error is None)
    assert [type(each) for each in told] == ([] if error is None else [error])
    assert all(len(str(each)) < 200 for each in told)
    if error is None:
        assert seen == [(b"k" * 20, "s", b"v", 5.0)]


def test_a_bad_record_is_told_of_once_and_a_flood_is_not_remembered() -> None:
    from hivemind.dht.validation import DHTRecord

    from farflung.node.dht_guard import MAX_TOLD, CheckedRecords

    told: list[RemoteError] = []

    def check(key: bytes, name: str, content: bytes, expires_at: float) -> None:
        raise Refused(content.hex())

    checked = CheckedRecords(check, told.append)

    def put(number: int, expires: float) -> None:
        value = b"\xc4\x02" + number.to_bytes(2, "big")
        assert not checked.validate(DHTRecord(b"k" * 20, b"\xa1s", value, expires))

    for expires in (5.0, 6.0):  # again, to be held for longer
        put(0, expires)
        put(1, expires)
    assert [error.reason for error in told] == ["0000", "0001"]
    for number in range(2, MAX_TOLD + 3):
        put(number, 5.0)
    assert len(checked._told) == MAX_TOLD and len(told) == MAX_TOLD + 3


def test_key_digest_is_hiveminds() -> None:
    from hivemind.dht.routing import DHTID

    from farflung.node.dht import key_digest

    for key in ("", "swarm/peers", "x" * 300):
        assert key_digest(key) == DHTID.generate(key).to_bytes()
