"""Real engines on loopback: hivemind's p2pd, DHT and streams, direct TLS, and what happens when things die."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from farflung.node import engine as module
from farflung.node import p2pd
from farflung.node.dht import SEEDS_AT_ONCE, Records, key_digest
from farflung.node.discovery import check_record
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity, libp2p_bytes, libp2p_text
from farflung.node.network import Stream
from farflung.node.pacing import CHUNK_S, Pacer
from farflung.node.peerbook import PeerBook
from farflung.protocol import limits
from farflung.protocol.errors import BadSignature, ConfigError, Malformed, NetworkError, Refused, RemoteError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import place_peer
from farflung.protocol.replay import first_seq

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

MB = 1 << 20


def run(main: Callable[[], Awaitable[None]], seconds: float = 60) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main()

    asyncio.run(bounded())


@asynccontextmanager
async def engines(count: int, **changes: object) -> AsyncIterator[list[Engine]]:
    """`count` engines; all join through the first and know nothing else of each other."""
    async with AsyncExitStack() as stack:
        made: list[Engine] = []
        for _ in range(count):
            seeds = (made[0].addresses()[0],) if made else ()
            config = replace(EngineConfig.loopback(initial_peers=seeds), **changes)  # type: ignore[arg-type]
            made.append(await Engine.create(Identity.generate(), config))
            stack.push_async_callback(made[-1].close)
        yield made


def introduce(nodes: list[Engine]) -> None:
    for one in nodes:
        for other in nodes:
            one.add_addresses(other.peer_id, other.addresses())


async def read(stream: Stream, size: int) -> bytes:
    buffer = bytearray(size)
    await stream.readinto(memoryview(buffer))
    return bytes(buffer)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def mailbox(node: Engine) -> "asyncio.Queue[tuple[bytes, bytes]]":
    queue: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    node.on_message(lambda peer, message: queue.put_nowait((peer, message)))
    return queue


def test_messages_between_three() -> None:
    async def main() -> None:
        async with engines(3) as (a, b, c):
            boxes = [mailbox(node) for node in (a, b, c)]
            # b and c have never heard of each other's address; libp2p finds it through a.
            b.send(c.peer_id, b"from b")
            assert await boxes[2].get() == (b.peer_id, b"from b")
            c.send(b.peer_id, b"x" * limits.MAX_CONTROL_BYTES)
            assert await boxes[1].get() == (c.peer_id, b"x" * limits.MAX_CONTROL_BYTES)
            for index in range(100):
                a.send(b.peer_id, b"%d" % index)
            assert [(await boxes[1].get())[1] for _ in range(100)] == [b"%d" % i for i in range(100)]
            with pytest.raises(ValueError):
                a.send(b.peer_id, b"x" * (limits.MAX_CONTROL_BYTES + 1))
            assert b.joined and c.joined

    run(main)


@pytest.mark.parametrize("carrier", ["tls", "libp2p"])
def test_bulk_both_ways(carrier: str) -> None:
    size = 32 * MB
    up, down = random.Random(1).randbytes(size), random.Random(2).randbytes(size)

    async def main() -> None:
        async with engines(2, tls=carrier == "tls") as (a, b):
            introduce([a, b])
            received: list[bool] = []

            async def handler(stream: Stream) -> None:
                assert stream.peer == b.peer_id
                received.append(await read(stream, size) == up)
                await stream.write(down)

            a.serve("part", handler)
            stream = await b.open_stream(a.peer_id, "part")
            assert stream.peer == a.peer_id
            await stream.write(up)
            assert await read(stream, size) == down
            await stream.close()
            assert received == [True]
            for one, other in ((a, b), (b, a)):
                link = one.links()[other.peer_id]
                assert link.sent_bytes == link.received_bytes == size
                assert link.down_bytes_per_s > 0
            assert b.links()[a.peer_id].carrier == carrier

    run(main)


@pytest.mark.parametrize("tls", [True, False])
def test_last_bytes_survive_close(tls: bool) -> None:
    """A writer that closes at once, and a reader that comes late, lose nothing."""

    async def main() -> None:
        async with engines(2, tls=tls) as (a, b):
            introduce([a, b])
            results: asyncio.Queue[bytes] = asyncio.Queue()

            async def handler(stream: Stream) -> None:
                await asyncio.sleep(0.2)
                results.put_nowait(await read(stream, 3 * MB))
                with pytest.raises(NetworkError):
                    await read(stream, 1)

            a.serve("part", handler)
            data = random.Random(3).randbytes(3 * MB)
            stream = await b.open_stream(a.peer_id, "part")
            await stream.write(data)
            await stream.close()
            assert await results.get() == data

    run(main)


@pytest.mark.parametrize("tls", [True, False])
def test_last_words_survive_the_engine(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent and written before `close` arrives, as far as the other side takes it in time."""
    monkeypatch.setattr(module, "FLUSH_S", 30.0)  # not what is tested: this machine may be slow

    async def main() -> None:
        async with engines(2, tls=tls) as (a, b):
            introduce([a, b])
            box = mailbox(a)
            results: asyncio.Queue[bytes] = asyncio.Queue()

            async def handler(stream: Stream) -> None:
                results.put_nowait(await read(stream, 3 * MB))

            a.serve("part", handler)
            stream = await b.open_stream(a.peer_id, "part")
            await stream.write(bytes(3 * MB))
            await stream.close()
            b.send(a.peer_id, b"goodbye")
            await b.close()
            assert await box.get() == (b.peer_id, b"goodbye")
            assert await results.get() == bytes(3 * MB)

    run(main)


def test_falls_back_to_libp2p_when_tls_cannot_be_dialled() -> None:
    async def main() -> None:
        async with engines(2) as (a, b):
            a.serve("part", lambda stream: stream.write(b"ok"))
            multiaddrs = [address for address in a.addresses() if address.startswith("/")]
            b.add_addresses(a.peer_id, [*multiaddrs, "tls://127.0.0.1:1"])
            for _ in range(2):
                stream = await b.open_stream(a.peer_id, "part")
                assert await read(stream, 2) == b"ok"
                await stream.close()
                assert b.links()[a.peer_id].carrier == "libp2p"
            b.add_addresses(a.peer_id, a.addresses())  # the right address is tried at once
            stream = await b.open_stream(a.peer_id, "part")
            assert await read(stream, 2) == b"ok"
            await stream.close()
            assert b.links()[a.peer_id].carrier == "tls"

    run(main)


@pytest.mark.parametrize("tls", [True, False])
def test_kinds_and_keys_that_are_not_admitted(tls: bool) -> None:
    async def main() -> None:
        stranger = Identity.generate()
        async with AsyncExitStack() as stack:
            config = EngineConfig.loopback(tls=tls)
            a = await Engine.create(Identity.generate(), config, admit=lambda peer: peer != stranger.public_key)
            stack.push_async_callback(a.close)
            b = await Engine.create(stranger, config)
            stack.push_async_callback(b.close)
            a.serve("part", lambda stream: stream.write(b"ok"))
            introduce([a, b])
            for kind in ("part", "nothing"):
                with pytest.raises(NetworkError):
                    stream = await b.open_stream(a.peer_id, kind)
                    await read(stream, 2)
            # Another key at a known address: refused by both carriers.
            wrong = Identity.generate().public_key
            tls_only = [address for address in a.addresses() if address.startswith("tls")]
            b.add_addresses(wrong, [a.addresses()[0].split("/p2p/")[0], *tls_only])
            with pytest.raises(NetworkError):
                await b.open_stream(wrong, "part")

    run(main)


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


def test_daemon_that_dies_or_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engines(1) as (a,):
            (child,) = p2pd_children(os.getpid())
            child.kill()
            with pytest.raises(ExceptionGroup) as caught:
                await a.wait_failed()
            assert "libp2p daemon ended" in str(caught.value.exceptions[0])
            with pytest.raises(ExceptionGroup):
                await a.close()
        bad = replace(EngineConfig.loopback(), libp2p=p2pd.P2pdConfig(listen=("/nonsense",)))
        with pytest.raises(NetworkError, match="daemon ended"):
            await Engine.create(Identity.generate(), bad)
        slow = replace(EngineConfig.loopback(), libp2p=p2pd.P2pdConfig(startup_timeout_s=0.0))
        with pytest.raises(NetworkError, match="startup_timeout_s"):
            await Engine.create(Identity.generate(), slow)
        assert not psutil.Process().children()

    run(main)


def p2pd_children(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if child.name() == "p2pd"]


NODE = """
import asyncio
import structlog
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity

async def main():
    node = await Engine.create(Identity.generate(), EngineConfig.loopback())
    async def hold(stream):
        await asyncio.Event().wait()
    node.serve("hold", hold)
    print(node.peer_id.hex(), *node.addresses(), flush=True)
    await asyncio.Event().wait()

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
asyncio.run(main())
"""


def test_killed_peer_is_noticed_and_leaves_nothing_behind() -> None:
    async def main(peer: bytes, addresses: list[str], process: "subprocess.Popen[str]") -> None:
        async with engines(1) as (a,):
            a.add_addresses(peer, addresses)
            direct = await a.open_stream(peer, "hold")
            a._links.dial_failed(peer, time.monotonic())
            relayed = await a.open_stream(peer, "hold")
            assert type(direct) is not type(relayed)
            await direct.write(b"x")
            await relayed.write(b"x")
            children = psutil.Process(process.pid).children(recursive=True)
            (daemon,) = (child for child in children if child.name() == "p2pd")
            (control,) = (flag for flag in daemon.cmdline() if flag.startswith("-listen="))
            folder = Path(control.removeprefix("-listen=/unix")).parent
            assert [path.name for path in folder.iterdir()] == ["control"]  # the key is gone
            process.send_signal(signal.SIGKILL)
            for stream in (direct, relayed):
                with pytest.raises(NetworkError):
                    await read(stream, 1)
                await stream.close()
            await until(lambda: not any(child.is_running() for child in children))
            assert not folder.exists()

    with subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            key, *addresses = process.stdout.readline().split()
            run(lambda: main(bytes.fromhex(key), addresses, process), 30)
        finally:
            process.kill()


def test_caps_hold_for_real() -> None:
    async def main() -> None:
        async with engines(2) as (a, b):
            introduce([a, b])
            b.set_caps(4e6, None)

            async def handler(stream: Stream) -> None:
                await read(stream, 4_000_000)
                await stream.write(b"ok")

            a.serve("part", handler)
            stream = await b.open_stream(a.peer_id, "part")
            begun = time.monotonic()
            await stream.write(bytes(4_000_000))
            await read(stream, 2)
            assert time.monotonic() - begun >= 0.9  # a loaded machine may only be slower
            await stream.close()

    run(main)


class StoppedPacer(Pacer):
    """Of a clock that stands still: notes how long each reservation would have waited, and lets it pass."""

    def __init__(self, rate: float | None) -> None:
        self.waits: list[float] = []
        super().__init__(rate, clock=lambda: 0.0, sleep=self._note)

    async def _note(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.mark.parametrize("carrier", ["tls", "libp2p"])
def test_what_is_received_waits_for_the_cap(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Pacer", StoppedPacer)
    rate, size = 1e6, 2_000_000

    async def main() -> None:
        async with engines(2, tls=carrier == "tls", down_bytes_per_s=rate) as (a, b):
            introduce([a, b])
            down = a._down
            assert isinstance(down, StoppedPacer)

            async def handler(stream: Stream) -> None:
                await read(stream, size)
                await stream.write(b"ok")

            async def send() -> None:
                stream = await b.open_stream(a.peer_id, "part")
                await stream.write(bytes(size))
                assert await read(stream, 2) == b"ok"
                await stream.close()

            a.serve("part", handler)
            await send()
            assert down.waits[-1] >= size / rate - CHUNK_S  # all but the burst
            down.waits.clear()
            a.set_caps(None, None)
            await send()
            assert not down.waits

    run(main)


def test_config() -> None:
    for wrong in ({"connections": 0}, {"connections": 17}, {"tls_port": 1 << 16}):
        with pytest.raises(ValueError):
            EngineConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        EngineConfig(initial_peers=("1.2.3.4:5",))
    assert module.EngineConfig().libp2p.startup_timeout_s >= 120
