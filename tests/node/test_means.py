"""Means: on disk before they count as held, found by digest, and kept for those who catch up."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from farflung.compression.codec import CodecError, Payload
from farflung.compression.digest import digest_of
from farflung.node.disk import KEPT_ROUNDS
from farflung.node.means import MeanStore
from farflung.sims.toy import MemoryStorage

PLANS = [bytes([i]) * 32 for i in range(KEPT_ROUNDS + 3)]


class InlineDoor:
    """Calls at once, and remembers the order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(function.__name__)
        return function(*args, **kwargs)

    def close(self) -> None:
        pass


class SlowDoor(InlineDoor):
    """The first call takes longest."""

    _waits = 0.08

    async def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._waits /= 4
        await asyncio.sleep(self._waits)
        return await super().run(function, *args, **kwargs)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def store(disk: MemoryStorage | None = None) -> tuple[MeanStore, MemoryStorage]:
    disk = disk or MemoryStorage()
    return MeanStore(disk, InlineDoor()), disk


def test_of_rounds_that_go_by_during_a_download_the_last_few_are_on_disk_and_none_in_memory() -> None:
    """It may take any number of rounds, and chunks that are still to come may be as old as others keep means."""

    async def main() -> None:
        means, disk = store()
        for plan in PLANS:
            await means.put(plan, 0, plan[:4])
            for _ in range(2):
                await means.pass_by(plan)
            assert not means._undecided and await means.get(plan, 0, digest_of(plan[:4])) == plan[:4]
        last = PLANS[-KEPT_ROUNDS:]
        assert {plan for plan, _ in disk.means} == means.needed() == set(last)
        assert {plan for plan, _ in means._digests} == set(last)
        for plan in PLANS:  # the state is here
            means.decide(plan)
        assert means.needed() == set(last) and not means._passed
        await means.pass_by(last[0])
        assert not means._passed, "it is among the committed ones"

    run(main())


def test_what_is_held_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been secured: a copy after it would not be."""

    async def main() -> None:
        means, disk = store()
        saved: list[bytes] = []
        save = disk.save_mean
        monkeypatch.setattr(
            disk, "save_mean", lambda plan, part, payload: (saved.append(payload), save(plan, part, payload))
        )
        for payload in (b"mean", b"mean", b"other", b"other"):
            assert await means.put(PLANS[0], 0, payload, replace=True) == digest_of(payload)
            assert await means.get(PLANS[0], 0, digest_of(payload)) == payload
        assert saved == [b"mean", b"other"]

    run(main())


def test_held_means_on_disk() -> None:
    async def main() -> None:
        means, disk = store()
        assert await means.put(PLANS[0], 2, b"mean") == digest_of(b"mean")
        assert disk.means == {(PLANS[0], 2): b"mean"}
        assert await means.get(PLANS[0], 2, digest_of(b"mean")) == b"mean"

    run(main())


def test_found_by_plan_part_and_digest_only() -> None:
    async def main() -> None:
        means, _ = store()
        await means.put(PLANS[0], 2, b"mean")
        assert await means.get(PLANS[0], 2, digest_of(b"other")) is None
        assert await means.get(PLANS[0], 1, digest_of(b"mean")) is None
        assert await means.get(PLANS[1], 2, digest_of(b"mean")) is None

    run(main())


def test_a_restart_finds_what_was_held() -> None:
    async def main() -> None:
        means, disk = store()
        await means.put(PLANS[0], 0, b"mean")
        again, _ = store(disk)
        assert await again.get(PLANS[0], 0, digest_of(b"mean")) == b"mean"
        disk.means[PLANS[0], 0] = b"rotten"
        assert await again.get(PLANS[0], 0, digest_of(b"mean")) is None, (
            "what is on disk is believed by its digest only"
        )

    run(main())


def test_recent_rounds_are_kept_for_others() -> None:
    async def main() -> None:
        means, disk = store()
        for plan in PLANS:
            await means.put(plan, 0, plan[:4])
            means.decide(plan)
        assert means.needed() == set(PLANS[-KEPT_ROUNDS:])
        assert await means.get(PLANS[-1], 0, digest_of(PLANS[-1][:4])) == PLANS[-1][:4]
        disk.means.clear()
        assert await means.get(PLANS[-1], 0, digest_of(PLANS[-1][:4])) is None, (
            "they are on disk only: rounds take no memory"
        )

    run(main())


def test_what_is_not_decided_yet_survives_a_checkpoint() -> None:
    async def main() -> None:
        means, _ = store()
        await means.put(PLANS[0], 0, b"x")
        assert PLANS[0] in means.needed()

    run(main())


def test_an_early_mean_gives_way_to_one_made_after_the_cut_and_never_the_other_way() -> None:
    async def main() -> None:
        means, disk = store()
        assert await means.put(PLANS[0], 0, b"early", early=True) == digest_of(b"early")
        assert await means.put(PLANS[0], 0, b"late", early=True) == digest_of(b"early"), "what came first stays"
        assert await means.put(PLANS[0], 0, b"final") == digest_of(b"final") == digest_of(disk.means[PLANS[0], 0])
        assert await means.put(PLANS[0], 0, b"early", early=True) == digest_of(b"final")
        assert await means.put(PLANS[0], 0, b"other") == digest_of(b"final")
        assert await means.get(PLANS[0], 0, digest_of(b"final")) == b"final" == disk.means[PLANS[0], 0]
        assert await means.get(PLANS[0], 0, digest_of(b"early")) is None

    run(main())


def test_what_is_held_is_what_is_on_disk_whatever_comes_at_once() -> None:
    async def main() -> None:
        for order in (("final", "early"), ("early", "final")):
            disk = MemoryStorage()
            means = MeanStore(disk, SlowDoor())
            puts = [means.put(PLANS[0], 0, which.encode(), early=which == "early") for which in order]
            await asyncio.gather(*puts)
            assert await means.get(PLANS[0], 0, digest_of(b"final")) == b"final" == disk.means[PLANS[0], 0]

    run(main())


def test_a_confirmed_mean_stays_though_it_came_early() -> None:
    async def main() -> None:
        for decided in (False, True):
            means, disk = store()
            await means.put(PLANS[0], 0, b"early", early=True)
            if decided:
                means.decide(PLANS[0])
            else:
                means.confirm(PLANS[0])
            assert await means.put(PLANS[0], 0, b"other") == digest_of(b"early") == digest_of(disk.means[PLANS[0], 0])
            assert await means.put(PLANS[0], 0, b"asked for", replace=True) == digest_of(b"asked for")

    run(main())


@pytest.mark.parametrize("committed", [False, True])
def test_means_that_come_as_their_plan_ends_are_not_kept(committed: bool) -> None:
    """A slow owner's last ones: nobody would ever ask for them, or drop them."""

    async def main() -> None:
        disk = MemoryStorage()
        means = MeanStore(disk, SlowDoor())
        await means.put(PLANS[0], 0, b"first")
        async with asyncio.TaskGroup() as group:
            late = [group.create_task(means.put(PLANS[0], part, b"late")) for part in (1, 2)]
            await asyncio.sleep(0)
            if committed:
                means.decide(PLANS[0])
            else:
                await means.discard(PLANS[0])
        assert [one.result() for one in late] == 2 * [digest_of(b"late")]
        assert means.needed() == ({PLANS[0]} if committed else set())
        assert disk.means.get((PLANS[0], 0)) == (b"first" if committed else None)
        assert committed or not disk.means
        for plan in PLANS[1 : KEPT_ROUNDS + 2]:
            await means.put(plan, 0, b"mean")
            means.decide(plan)
        assert PLANS[0] not in means.needed() and await means.put(PLANS[0], 1, b"again") == digest_of(b"again")

    run(main())


def test_a_refused_mean_leaves_nothing_of_its_plan() -> None:
    def refuse(payload: Payload) -> Payload:
        raise CodecError("no mean")

    async def caught(work: Coroutine[Any, Any, bytes]) -> bool:
        try:
            await work
        except CodecError:
            return True
        return False

    async def main() -> None:
        means, _ = store()
        assert await caught(means.put(PLANS[0], 0, b"?", take=refuse)) and means.needed() == set()
        async with asyncio.TaskGroup() as group:  # a good one that waits behind a bad one is kept all the same
            bad = group.create_task(caught(means.put(PLANS[0], 0, b"?", take=refuse)))
            group.create_task(means.put(PLANS[0], 1, b"good"))
        assert bad.result() and means.needed() == {PLANS[0]}
        assert await means.get(PLANS[0], 1, digest_of(b"good")) == b"good"

    run(main())
