"""Records of real engines on loopback: how they get into hivemind's DHT, what is refused there, and who is found by them."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.engine_lab import engines, introduce, run, until

from farflung.node import engine as module
from farflung.node import jumps
from farflung.node.dht import Records, key_digest
from farflung.node.discovery import check_record
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity, libp2p_bytes, libp2p_text
from farflung.node.peerbook import PeerBook
from farflung.node.seeds import SEEDS_AT_ONCE
from farflung.protocol import limits
from farflung.protocol.errors import BadSignature, Malformed, Refused, RemoteError, Stale
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import place_peer
from farflung.protocol.replay import first_seq

pytestmark = pytest.mark.slow


def test_records() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:

            def check(key: bytes, subkey: str, value: bytes, expires_at: float) -> None:
                if key != key_digest("swarm") or not value.startswith(b"good"):
                    raise Refused("not good")

            made: list[Engine] = []
            for _ in range(3):
                seeds = (made[0].addresses()[0],) if made else ()
                made.append(
                    await Engine.create(
                        Identity.generate(), EngineConfig.loopback(initial_peers=seeds), check_record=check
                    )
                )
                stack.push_async_callback(made[-1].close)
            a, b, c = made
            soon = time.time() + 60
            assert await a.put_record("swarm", "a", b"good a", soon)
            assert await b.put_record("swarm", "b", b"good b", soon)
            assert not await c.put_record("swarm", "c", b"bad", soon)
            assert not await c.put_record("other", "c", b"good", soon)
            assert await b.put_record("swarm", "b", b"good b, newer", soon + 1)
            assert not await c.put_record("swarm", "b", b"good b, older", soon - 50)
            assert not await c.put_record("swarm", "c", b"good", time.time() - 1)
            for node in made:
                assert await node.get_records("swarm") == {"a": b"good a", "b": b"good b, newer"}
                assert await node.get_records("nothing") == {}
            with pytest.raises(ValueError):
                await a.put_record("swarm", "a", bytes(limits.MAX_RECORD_BYTES + 1), soon)
            assert await a.put_record("swarm", "a", b"good" + bytes(limits.MAX_RECORD_BYTES - 4), soon + 2)
            assert len((await c.get_records("swarm"))["a"]) == limits.MAX_RECORD_BYTES

    run(main)


def test_a_wrongly_signed_record_is_refused_told_of_once_and_changes_nothing() -> None:
    async def main() -> None:
        told: list[RemoteError] = []
        async with engines(1) as (careless,), AsyncExitStack() as stack:
            seeds = (careless.addresses()[0],)
            config = EngineConfig.loopback(initial_peers=seeds)
            careful = await Engine.create(Identity.generate(), config, check_record=check_record, refused=told.append)
            stack.push_async_callback(careful.close)
            swarm, author, now = b"s" * 32, Ed25519Signer(b"a" * 32), time.time()
            good = place_peer(author, swarm, PeerRecord(stages=(0, 1)), seq=first_seq(now), now=now, life_s=60.0)
            newer = place_peer(author, swarm, PeerRecord(stages=(0, 1)), seq=first_seq(now) + 1, now=now, life_s=120.0)
            forged = newer.value[:-1] + bytes([newer.value[-1] ^ 1])
            assert await careful.put_record(good.key, good.subkey, good.value, good.expires_at)
            assert not told
            for later in (0.0, 1.0):
                await careless.put_record(good.key, good.subkey, forged, newer.expires_at + later)
                # The one that took it answers with it: that is the same record once more.
                assert await careless.get_records(good.key) == {good.subkey: forged}
                assert await careful.get_records(good.key) == {good.subkey: good.value}
            [error] = told
            assert type(error) is BadSignature and f"said to be of {good.subkey[:12]}" in error.reason
            await careful.put_record(newer.key, newer.subkey, newer.value, newer.expires_at + 0.5)
            assert await careful.get_records(good.key) == {good.subkey: newer.value}
            assert len(told) == 1

    run(main)


UNREADABLE = b"\xc7\x03\x50\x93\x01\x02"
"""An extension of the type that dictionaries are, which breaks off."""


def test_a_dictionary_that_cannot_be_read_is_told_of_asked_for_or_not_and_changes_nothing() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import P2PHandlerError
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils.serializer import MSGPackSerializer

    class Mumbling(MSGPackSerializer):  # type: ignore[misc]
        @classmethod
        def dumps(cls, obj: object) -> bytes:
            return b"\xc1"

    async def main() -> None:
        told: list[RemoteError] = []
        async with engines(1) as (hostile,), AsyncExitStack() as stack:
            config = EngineConfig.loopback(initial_peers=(hostile.addresses()[0],))
            careful = await Engine.create(Identity.generate(), config, refused=told.append)
            stack.push_async_callback(careful.close)
            soon = time.time() + 60
            assert await careful.put_record("swarm", "a", b"good", soon)
            protocol = hostile._records._node.protocol
            store = dht_pb2.StoreRequest(
                keys=[key_digest("swarm")],
                subkeys=[protocol.IS_DICTIONARY],
                values=[UNREADABLE],
                expiration_time=[soon],
                in_cache=[False],
            )
            for _ in range(2):
                with pytest.raises(P2PHandlerError, match="damaged dictionary record"):
                    await protocol.get_stub(PeerID(libp2p_bytes(careful.peer_id))).rpc_store(store)
            [error] = told
            assert type(error) is Malformed and "no dictionary of records, in 6 bytes" in error.reason
            assert await careful.get_records("swarm") == {"a": b"good"}

            protocol.storage.store_subkey(DHTID.generate("other"), "b", b"good", soon)
            protocol.serializer = Mumbling
            assert await careful.get_records("other") == {}
            assert len(told) == 2 and "no dictionary of records, in 1 bytes" in told[1].reason

    run(main)


def test_what_a_node_serves_is_bounded_and_its_own_records_stay() -> None:
    """The guards are in what others reach, not beside it."""
    from hivemind.p2p import P2PHandlerError
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import dht_pb2

    from farflung.node.dht_storage import MAX_ENTRIES_OF_ONE

    async def main() -> None:
        async with engines(2) as (a, hostile):
            a.keep_records([key_digest("swarm")])
            soon, later = time.time() + 60, time.time() + 3000
            assert await a.put_record("swarm", a.peer_id.hex(), b"a", soon)
            protocol = hostile._records._node.protocol
            stub = protocol.get_stub(PeerID(libp2p_bytes(a.peer_id)))
            with pytest.raises(P2PHandlerError, match="LimitExceeded"):
                await stub.rpc_find(dht_pb2.FindRequest(keys=[key_digest("swarm")] * 6000))
            taken = 0
            for first in range(0, 320, 16):
                keys = [key_digest(f"made up {number}") for number in range(first, first + 16)]
                request = dht_pb2.StoreRequest(
                    keys=keys,
                    subkeys=[b"\xa1x"] * 16,
                    values=[b"\xc4\x01v"] * 16,
                    expiration_time=[later] * 16,
                    in_cache=[False] * 16,
                )
                taken += sum((await stub.rpc_store(request)).store_ok)
            assert taken == MAX_ENTRIES_OF_ONE
            assert await hostile.get_records("swarm") == {a.peer_id.hex(): b"a"}

    run(main)


def test_dead_seeds_do_not_prevent_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{libp2p_text(Identity.generate().public_key)}"
        async with engines(1) as (a,):
            node = await Engine.create(Identity.generate(), EngineConfig.loopback(initial_peers=(nobody,)))
            assert not node.joined
            await node.close()
            seeds = (nobody, a.addresses()[0])
            node = await Engine.create(Identity.generate(), EngineConfig.loopback(initial_peers=seeds))
            assert node.joined
            await node.close()

    run(main)


def test_the_last_of_forty_known_peers_leads_into_the_dht(tmp_path: Path) -> None:
    """Also where one of them announced what p2pd could not read as a relay's address."""

    async def main() -> None:
        async with engines(1) as (a,):
            book = PeerBook(tmp_path / "peers.json")
            for age in range(39):
                book.note(Identity.generate().public_key, ["/ip4/127.0.0.1/tcp/1", "/nonsense"], 1e9 - age)
            book.note(a.peer_id, a.addresses(), 0.0)
            config = EngineConfig.loopback(initial_peers=tuple(book.seeds(b"")))
            config = replace(config, libp2p=replace(config.libp2p, use_relay=True, auto_relay=True))
            node = await Engine.create(Identity.generate(), config)
            try:
                await until(lambda: node.joined)
            finally:
                await node.close()

    run(main)


def test_only_the_first_known_peers_are_asked_to_relay() -> None:
    """p2pd is told of them by its command line, which has an end."""
    seeds = [(bytes([number]) * 32, f"/ip4/10.0.0.1/tcp/{port}") for number in range(40) for port in (1, 2)]
    relays = module._relays(seeds)
    assert len(relays) == 2 * SEEDS_AT_ONCE and relays[1].startswith("/ip4/10.0.0.1/tcp/2/p2p/12D3Koo")


def test_records_are_found_though_nodes_forgot_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hivemind does when an answer comes late."""
    monkeypatch.setattr(Records, "stay_joined", lambda self: asyncio.sleep(0))  # which comes too late

    async def main() -> None:
        async with engines(2) as (a, b):
            for node in (a, b):
                table = node._records._node.protocol.routing_table
                for known in list(table.uid_to_peer_id):
                    del table[known]
            assert await b.put_record("swarm", "b", b"b", time.time() + 60)
            c = await Engine.create(Identity.generate(), EngineConfig.loopback(initial_peers=(a.addresses()[0],)))
            try:
                assert await c.get_records("swarm") == {"b": b"b"}
            finally:
                await c.close()

    run(main)


def test_two_that_came_by_a_third_find_each_others_records_after_it_has_gone_and_an_outage() -> None:
    """Each had its own records alone, until a restart, though they trained together."""

    async def main() -> None:
        async with engines(3) as (first, b, c):
            introduce([b, c])
            await first.close()
            for node in (b, c):
                table = node._records._node.protocol.routing_table
                for known in list(table.uid_to_peer_id):
                    del table[known]
            assert await b.put_record("swarm", "b", b"b", time.time() + 60)
            assert await c.get_records("swarm") == {"b": b"b"}

    run(main)


def test_a_jump_of_the_clock_makes_us_look_at_our_addresses_and_at_what_we_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was taken by a clock that was ahead would outlast what is put by the right one."""
    ahead_s, looks = 3000.0, 0
    monkeypatch.setattr(Engine, "unix_time", lambda engine: time.time() + ahead_s)
    monkeypatch.setattr(jumps, "LOOK_S", 0.05)
    refresh = Engine._refresh_addresses

    async def counted(engine: Engine) -> None:
        nonlocal looks
        looks += 1
        await refresh(engine)

    monkeypatch.setattr(Engine, "_refresh_addresses", counted)

    def check(key: bytes, subkey: str, value: bytes, expires_at: float) -> None:
        if expires_at > time.time() + ahead_s + 60.0:
            raise Stale("to be held too long")

    async def main() -> None:
        nonlocal ahead_s
        node = await Engine.create(Identity.generate(), EngineConfig.loopback(), check_record=check)
        try:
            node.keep_records([key_digest("swarm")])
            assert await node.put_record("swarm", "a", b"early", time.time() + ahead_s)
            ahead_s = 0.0
            await until(lambda: looks == 2)
            assert await node.get_records("swarm") == {}
            assert await node.put_record("swarm", "a", b"right", time.time() + 30.0)
            assert await node.get_records("swarm") == {"a": b"right"}
        finally:
            await node.close()

    run(main)


def test_after_a_jump_of_the_clock_seeds_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that wakes has no network yet: they were asked at once, in vain, and then not for ten minutes."""
    ahead_s, asked, forgot = 0.0, 0, 0
    monkeypatch.setattr(Engine, "unix_time", lambda engine: time.time() + ahead_s)
    monkeypatch.setattr(jumps, "LOOK_S", 0.05)
    monkeypatch.setattr(jumps, "AFTER_JUMP_S", (0.3, 0.3, 0.3))
    join_once, look_again = Records.join_once, Records.look_again

    async def counted(records: Records) -> bool:
        nonlocal asked
        asked += 1
        return await join_once(records)

    def noted(records: Records) -> None:
        nonlocal forgot
        forgot += 1
        look_again(records)

    monkeypatch.setattr(Records, "join_once", counted)
    monkeypatch.setattr(Records, "look_again", noted)

    async def main() -> None:
        nonlocal ahead_s
        async with engines(1) as (a,):
            node = await Engine.create(Identity.generate(), EngineConfig.loopback(initial_peers=(a.addresses()[0],)))
            try:
                await asyncio.sleep(0.5)
                before = asked
                ahead_s = 3600.0
                # Both engines jump: at once, and three times more.
                await until(lambda: asked == before + 2 * 4)
                assert forgot == 2
            finally:
                await node.close()

    run(main)
