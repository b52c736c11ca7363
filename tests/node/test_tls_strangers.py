"""Who shows no key, and addresses where there is nobody."""

import asyncio

import pytest
from tests.node.tls_lab import echo, end, read, run

from farflung.node import tls
from farflung.protocol.errors import NetworkError


@pytest.mark.parametrize("of_host", [3, 100])
def test_who_shows_no_key_keeps_no_more_than_so_many_connections(of_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once are taken, the other five cut; and when those three have given up, others come through."""
    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 3 if of_host > 3 else 100)
    monkeypatch.setattr(tls, "MAX_HANDSHAKES_OF_HOST", of_host)

    async def main() -> None:
        async with end() as server, end() as client:
            server.handlers["echo"] = echo
            silent = [await asyncio.open_connection(*server.address[0]) for _ in range(8)]
            cuts = [asyncio.Event() for _ in silent]

            async def until_cut(reader: asyncio.StreamReader, cut: asyncio.Event) -> None:
                await reader.read()
                cut.set()

            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for (reader, _), cut in zip(silent, cuts, strict=True):
                    group.create_task(until_cut(reader, cut))
                for cut in cuts[3:]:
                    await cut.wait()
                assert not any(cut.is_set() for cut in cuts[:3]) and server.carrier._handshakes.total() == 3
                for _, writer in silent:
                    writer.close()
            stream = await client.carrier.open(server.key, "echo", server.address)
            await stream.write((1).to_bytes(4, "big") + b"x")
            assert await read(stream, 1) == b"x"
            await stream.close()

    run(main)


def test_a_name_that_cannot_be_is_a_dead_address() -> None:
    async def main() -> None:
        async with end() as server, end() as client:
            with pytest.raises(NetworkError):
                await client.carrier.open(server.key, "echo", [(".", 80)])

    run(main)
