"""What a node shows goes into a pipe that is read, that nobody reads, and whose reader has gone; and the process ends all the same."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator

from rich.console import Console

from farflung.node import outlet
from farflung.node.live import show_json
from farflung.node.outlet import Outlet, finish, outlet_of


def read(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read()


def pipe() -> tuple[int, Outlet]:
    reading, writing = os.pipe()
    return reading, Outlet(os.fdopen(writing, "w", encoding="utf-8"))


def test_all_is_handed_over_in_order() -> None:
    reading, out = pipe()
    console = Console(file=out, force_terminal=False)  # type: ignore[arg-type]
    for number in range(100):
        console.print(f"line {number} é")
    out.finish(10.0)
    out._stream.close()
    with os.fdopen(reading, encoding="utf-8") as file:
        assert file.read().splitlines() == [f"line {number} é" for number in range(100)]


def test_nobody_waits_for_a_pipe_that_nobody_reads() -> None:
    reading, out = pipe()
    for _ in range(4096):
        out.write("x" * 1024)  # four times what is kept for a slow reader
    finish(out, within_s=0.1)  # type: ignore[arg-type]
    assert outlet.MAX_WAITING - (1 << 17) < out._waiting <= outlet.MAX_WAITING
    os.close(reading)  # and the thread ends
    out._thread.join(10.0)
    assert not out._thread.is_alive()
    out._stream.close()


def test_a_reader_that_has_gone_is_not_the_writers_concern() -> None:
    reading, out = pipe()
    os.close(reading)
    for _ in range(100):
        out.write("x" * 1024)
    out.finish(10.0)
    assert not out._thread.is_alive()
    out._stream.close()


def test_a_full_terminal_that_was_made_non_blocking_is_waited_for() -> None:
    reading, out = pipe()
    os.set_blocking(out.fileno(), False)
    text = "x" * 200_000  # more than a pipe takes
    out.write(text)
    found = b""
    while len(found) < len(text):
        found += os.read(reading, 1 << 16)
    assert found.decode() == text
    out.finish(10.0)
    os.close(reading)
    out._stream.close()


def test_a_stream_without_a_descriptor_stays_what_it_is() -> None:
    stream = io.StringIO()
    assert outlet_of(stream) is stream
    finish(stream, within_s=0.0)


def test_a_process_ends_though_nobody_reads_what_it_shows() -> None:
    program = (
        "import sys; from farflung.node.outlet import finish, outlet_of; out = outlet_of(sys.stdout)\n"
        "for _ in range(500): out.write('x' * 1000)\n"
        "finish(out, within_s=0.2); print('over', file=sys.stderr)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0
        assert process.stderr is not None and process.stderr.read() == b"over\n"


def test_events_wait_for_room_and_are_not_left_out() -> None:
    reading, out = pipe()

    async def events() -> AsyncIterator[dict[str, int | str]]:
        for number in range(3000):
            yield {"number": number, "more": "x" * 1000}

    async def main() -> list[str]:
        found = asyncio.get_running_loop().run_in_executor(None, read, reading)
        await show_json(events(), out)  # type: ignore[arg-type]
        out.finish(10.0)
        out._stream.close()
        return (await found).splitlines()

    assert [json.loads(line)["number"] for line in asyncio.run(main())] == list(range(3000))
