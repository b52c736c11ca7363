"""Who asks a node to end is heard, by whatever signal; who was made deaf to one stays so."""

import asyncio
import os
import signal
from typing import cast

import pytest

from farflung.node.daemon import NodeDaemon, _until_signalled
from farflung.node.runner import run_loop
from farflung.node.signals import heard


class StandIn:
    """For a node that is up, and leaves when it is asked to."""

    def __init__(self, *kinds: signal.Signals) -> None:
        self._kinds = kinds
        self._leaves = asyncio.Event()
        self.asked: list[str] = []

    def stop(self, reason: str) -> bool:
        self.asked.append(reason)
        self._leaves.set()
        return True

    def say(self, text: str) -> None:
        assert "leaving: finishing the step" in text

    async def run(self) -> None:
        for kind in self._kinds:
            os.kill(os.getpid(), kind)
        async with asyncio.timeout(10):
            await self._leaves.wait()


def lived(*kinds: signal.Signals) -> list[str]:
    """What a node is asked that is sent these signals; it ends well."""
    node = StandIn(*kinds)
    assert run_loop(_until_signalled(cast(NodeDaemon, node))) == 0
    return node.asked


def unheard(number: int, frame: object) -> None:
    raise AssertionError(f"nobody has heard signal {number}")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_node_leaves_when_it_is_asked_to(kind: signal.Signals) -> None:
    before = signal.signal(kind, unheard)
    try:
        assert lived(kind) == ["asked to stop"]
        assert signal.getsignal(kind) is unheard
    finally:
        signal.signal(kind, before)


def test_a_node_behind_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert lived(signal.SIGHUP, signal.SIGTERM) == ["asked to stop"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_in_the_background_can_be_interrupted() -> None:
    """Shells keep SIGINT from it."""
    told: list[signal.Signals] = []

    async def main() -> None:
        with heard([signal.SIGINT], told.append):
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(10):
                while not told:
                    await asyncio.sleep(0)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_loop(main())
        assert told == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
