"""Real engines on loopback: hivemind's p2pd and streams, direct TLS, and what happens when things die."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.node.engine_lab import engines, introduce, read, run, until

from farflung.node import engine as module
from farflung.node import frames, p2pd
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity, libp2p_text
from farflung.node.network import Stream
from farflung.node.pacing import CHUNK_S, Pacer
from farflung.protocol import limits
from farflung.protocol.errors import ConfigError, Malformed, NetworkError, RemoteError

pytestmark = pytest.mark.slow

MB = 1 << 20


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


def test_named_addresses_stay_beside_those_that_peers_tell_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were replaced: a peer that tells of addresses that do not lead to it from here was not reached again."""
    monkeypatch.setattr(module, "MAX_PEERS", 3)

    async def main() -> None:
        async with engines(2) as (a, b):
            (named,) = b._multiaddrs[a.peer_id]
            for port in (1, 2):
                b.add_addresses(a.peer_id, [f"/ip4/127.0.0.1/tcp/{port}", f"{named}/p2p/{libp2p_text(a.peer_id)}"])
                assert b._multiaddrs[a.peer_id] == [named, f"/ip4/127.0.0.1/tcp/{port}"], "of the others the last told"
            for number in range(1, 9):  # more than it remembers
                b.add_addresses(bytes([number]) * 32, ["/ip4/127.0.0.1/tcp/1"])
            assert b._multiaddrs[a.peer_id][0] == named and len(b._multiaddrs) == 3
            box = mailbox(a)
            b.send(a.peer_id, b"still here")
            assert await box.get() == (b.peer_id, b"still here")

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


def test_who_waits_until_nothing_is_served_can_have_the_memory_of_it() -> None:
    """A handler holds what it works on until it has seen that it is cancelled."""

    class Held:
        pass

    async def main() -> None:
        async with engines(2) as (a, b):
            introduce([a, b])
            held: list[weakref.ref[Held]] = []

            async def handler(stream: Stream) -> None:
                mine = Held()
                held.append(weakref.ref(mine))
                await read(stream, 1)

            a.serve("part", handler)
            stream = await b.open_stream(a.peer_id, "part")
            while not held:
                await asyncio.sleep(0.01)
            del handler
            await a.finish_serving()
            gc.collect()
            assert held[0]() is None
            await a.finish_serving()  # nothing to wait for
            await stream.close()

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


def test_a_kind_that_cannot_be_read_is_told_of() -> None:
    async def main() -> None:
        told: list[RemoteError] = []
        async with engines(1) as (a,), AsyncExitStack() as stack:
            config = EngineConfig.loopback(initial_peers=(a.addresses()[0],))
            b = await Engine.create(Identity.generate(), config, refused=told.append)
            stack.push_async_callback(b.close)
            reader, writer = await a._libp2p.open(b.peer_id, frames.BULK_PROTOCOL)
            writer.write(b"\x01\xff")
            assert await reader.read() == b""
            writer.close()
            [error] = told
            assert isinstance(error, Malformed) and error.peer == a.peer_id

    run(main)


def test_daemon_that_dies_or_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children()  # other tests' pools may live on

    async def main() -> None:
        async with engines(1) as (a,):
            (child,) = p2pd_children(os.getpid())
            child.kill()
            with pytest.raises(ExceptionGroup) as caught:
                await a.wait_failed()
            assert "was killed by signal 9 (SIGKILL), perhaps for want of memory" in str(caught.value.exceptions[0])
            with pytest.raises(ExceptionGroup):
                await a.close()
        bad = replace(EngineConfig.loopback(), libp2p=p2pd.P2pdConfig(listen=("/nonsense",)))
        with pytest.raises(NetworkError, match=r"daemon ended with status 1; its last words: .*nonsense"):
            await Engine.create(Identity.generate(), bad)
        slow = replace(EngineConfig.loopback(), libp2p=p2pd.P2pdConfig(startup_timeout_s=0.0))
        with pytest.raises(NetworkError, match="startup_timeout_s"):
            await Engine.create(Identity.generate(), slow)
        assert set(psutil.Process().children()) <= set(before)

    run(main)


def test_a_daemon_starts_where_the_temporary_folder_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a job may be: its control socket's path did not fit."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def main() -> None:
        async with engines(1) as (a,):
            assert a.addresses()

    run(main)
    assert not list(deep.iterdir())


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
