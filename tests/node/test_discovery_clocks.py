"""What a node announces when its clock is set, and when its machine sleeps: over the modelled network, which refuses what real nodes refuse."""

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.node.test_discovery import SIGNERS, announcer, founded, in_network

from farflung.node.discovery import ANNOUNCE_S, PEER_LIFE_S, Finder, find_claims, find_manifest
from farflung.node.jumps import AFTER_JUMP_S, JUMP_S, LOOK_S, Jumps
from farflung.node.network import Network
from farflung.node.peerbook import PeerBook
from farflung.protocol.errors import ConfigError, RemoteError
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import peers_key, place_peer, validate_record

SWARM = founded(SIGNERS[0])[1].swarm


class Clock:
    """A node's own, which may be `ahead` of the right one (seconds), and what it puts meets nodes that have the right one."""

    def __init__(self, network: Network) -> None:
        self.ahead = 0.0
        self.refused: list[RemoteError] = []
        put = network.put_record

        async def checked_put(key: str, subkey: str, value: bytes, expires_at: float) -> bool:
            try:
                validate_record(key, subkey, value, expires_at, asyncio.get_running_loop().time())
            except RemoteError as error:
                self.refused.append(error)
                return False
            return await put(key, subkey, value, expires_at)

        network.put_record = checked_put  # type: ignore[method-assign]
        network.unix_time = lambda: asyncio.get_running_loop().time() + self.ahead  # type: ignore[method-assign]


async def listed(network: Network) -> Mapping[str, Any]:
    return await network.get_records(peers_key(SWARM))


@pytest.mark.parametrize("ahead_s", [7200.0, 50.0])
def test_a_clock_that_is_set_right_makes_the_node_listed_and_a_second_one_noticed(
    tmp_path: Path, ahead_s: float
) -> None:
    """It stayed unlisted until real time had caught up with where its clock was at the start."""
    signer = SIGNERS[1]

    async def body(networks: list[Network]) -> None:
        clock = Clock(networks[1])
        clock.ahead = ahead_s
        async with asyncio.TaskGroup() as tasks:
            ours = announcer(networks[1], signer, tmp_path / "1", SIGNERS[0])
            running = tasks.create_task(_ended(ours.run()))
            await asyncio.sleep(ANNOUNCE_S / 2)
            assert bool(await listed(networks[0])) == (ahead_s < 60.0) == (not clock.refused)
            clock.ahead = 0.0
            clock.refused.clear()
            await asyncio.sleep(2 * LOOK_S)
            assert await listed(networks[0]) and await find_manifest(networks[0], SWARM), "at once"
            for _ in range(20):
                await asyncio.sleep(ANNOUNCE_S)
                assert await listed(networks[0]) and not clock.refused and not running.done(), "no second node"
            second = tasks.create_task(announcer(networks[2], signer, tmp_path / "2", SIGNERS[0]).run())
            await asyncio.wait_for(running, 4 * ANNOUNCE_S)
            second.cancel()

    in_network(body)


async def _ended(running: Any) -> None:
    with pytest.raises(ConfigError, match="another node runs with this machine's key"):
        await running


def test_numbers_that_were_given_ahead_of_time_are_no_second_nodes(tmp_path: Path) -> None:
    """The own DHT node keeps what was put with them, and others had it that were as far ahead."""

    async def body(networks: list[Network]) -> None:
        clock, network = Clock(networks[1]), networks[1]
        clock.ahead = 50.0
        ours = announcer(network, SIGNERS[1], tmp_path / "1", SIGNERS[0])
        early = []
        for _ in range(3):
            await ours._announce()
            early.append((await network.get_records(peers_key(SWARM)))[SIGNERS[1].peer_id.hex()])
            await asyncio.sleep(1.0)
        clock.ahead = 0.0
        await ours._announce()
        for value in early:

            async def kept(key: str, value: bytes = value) -> Mapping[str, bytes]:
                return {SIGNERS[1].peer_id.hex(): value}

            network.get_records = kept  # type: ignore[method-assign]
            await ours._look_for_a_second()
        assert PEER_LIFE_S > 50.0 and ours._others_seq == 0

    in_network(body)


def test_a_number_of_others_that_was_ahead_of_time_hides_no_second_node_once_ours_are_given_anew(
    tmp_path: Path,
) -> None:
    async def body(networks: list[Network]) -> None:
        clock, network, record = Clock(networks[1]), networks[1], PeerRecord(addresses=(), stages=(0, 1))
        clock.ahead = 50.0
        ours = announcer(network, SIGNERS[1], tmp_path / "1", SIGNERS[0])
        before: int = ours._seq + 1000

        async def look_after_another(seq: int) -> None:
            now = network.unix_time()
            value = place_peer(SIGNERS[1], SWARM, record, seq=seq, now=now, life_s=PEER_LIFE_S).value

            async def kept(key: str) -> Mapping[str, bytes]:
                return {SIGNERS[1].peer_id.hex(): value}

            network.get_records = kept  # type: ignore[method-assign]
            await ours._look_for_a_second()

        await look_after_another(before)  # of an earlier run
        clock.ahead = 0.0
        await ours._announce()
        await look_after_another(ours._seq + 1)
        with pytest.raises(ConfigError, match="another node runs"):
            await look_after_another(ours._seq + 2)

    in_network(body)


class Laptop:
    """A network whose machine has slept, while its loop's clock stood still; it has no network for the first seconds, and does not notice: its own DHT node takes what it puts."""

    def __init__(self) -> None:
        self.peer_id = SIGNERS[0].peer_id
        self.asleep_s = 0.0
        self.offline_until = 0.0
        self.looks = 0
        self._elsewhere: dict[tuple[str, str], tuple[bytes, float]] = {}

    def unix_time(self) -> float:
        return asyncio.get_running_loop().time() + self.asleep_s

    async def put_record(self, key: str, subkey: str, value: bytes, expires_at: float) -> bool:
        if self.unix_time() >= self.offline_until:
            self._elsewhere[key, subkey] = (value, expires_at)
        return True

    async def get_records(self, key: str) -> dict[str, bytes]:
        self.looks += 1
        now = self.unix_time()
        return {of: value for (at, of), (value, until) in self._elsewhere.items() if at == key and until > now}


def test_after_a_machine_has_slept_all_is_announced_at_once_and_again_when_it_has_its_network(tmp_path: Path) -> None:
    """Name and manifest were missing for up to a quarter of an hour after each sleep."""

    async def body(networks: list[Network]) -> None:
        laptop: Any = Laptop()
        tell = {"met": lambda found: None, "refused": lambda error: None, "heard": lambda: ()}
        finder = Finder(laptop, SWARM, PeerBook(tmp_path / "book"), admits=lambda peer, token: True, **tell)
        async with asyncio.TaskGroup() as tasks:
            ours = announcer(laptop, SIGNERS[0], tmp_path / "claim", SIGNERS[0])
            working = [tasks.create_task(work) for work in (ours.run(), finder.run())]
            await asyncio.sleep(300.0)
            laptop.asleep_s = 9 * 3600.0
            laptop.offline_until = laptop.unix_time() + 10.0
            before = laptop.looks
            assert not await find_manifest(laptop, SWARM)
            await asyncio.sleep(LOOK_S + 0.1)
            assert laptop.looks - before >= 3, "of the finder, too"
            await asyncio.sleep(AFTER_JUMP_S[0])
            assert await find_manifest(laptop, SWARM) and await find_claims(laptop, "alpha") and await listed(laptop)
            for task in working:
                task.cancel()

    in_network(body)


def test_a_pause_ends_by_a_jump_either_way_and_not_by_a_correction() -> None:
    async def body(networks: list[Network]) -> None:
        loop, ahead = asyncio.get_running_loop(), [0.0]
        jumps = Jumps(lambda: loop.time() + ahead[0])
        began = loop.time()
        assert not await jumps.pause(60.0) and loop.time() == began + 60.0
        ahead[0] = JUMP_S - 1.0
        assert not await jumps.pause(0.0) and not await jumps.pause(7.0) and loop.time() == began + 67.0
        for jumped in (3600.0, 0.0, -7200.0):
            ahead[0] = jumped
            assert await jumps.pause(60.0) and jumps.jumped
            began = loop.time()
            for soon in AFTER_JUMP_S:
                assert await jumps.pause(600.0) and not jumps.jumped
                assert loop.time() == began + soon
                began = loop.time()
            assert not await jumps.pause(1.0) and not jumps.jumped
        loop.call_later(12.0, lambda: ahead.__setitem__(0, 0.0))
        began = loop.time()
        assert await jumps.pause(math.inf) and loop.time() <= began + 12.0 + LOOK_S

    in_network(body)
