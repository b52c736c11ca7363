"""A stage's state is borrowed while those who hold it go on: in parts of several versions, each of which was announced."""

import asyncio

import pytest
import torch
from tests.node.donors import Serving, step
from tests.node.lab import NUMEL, Lab, in_lab

from farflung.node import borrowing
from farflung.node.borrowing import Holders, borrow, borrow_moving
from farflung.protocol.errors import Refused, RemoteError
from farflung.sims.links import LinkModel
from farflung.training.outer import OuterState

SLOW = LinkModel(latency_s=0.01, up_bytes_per_s=200.0, down_bytes_per_s=1e6)
"""The state takes its donors some ten seconds."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "CHUNK_BYTES", 800)


def holders(*donors: Serving) -> Holders:
    """What is announced by those who are at the newest version."""
    newest = max(donor.version for donor in donors)
    there = [donor for donor in donors if donor.version == newest]
    return newest, there[0].digest, [donor.node.id for donor in donors]


def goes_on(donor: Serving) -> None:
    """A round is committed and applied."""
    step(donor.node, donor.version)
    donor.version += 1
    donor.remember()


def chunks(state: OuterState) -> list[bytes]:
    return [state.chunk_bytes(index) for index in range(state.num_chunks)]


def versions(state: OuterState, history: dict[int, list[bytes]]) -> set[int]:
    """Of the chunks; every one is of some version."""
    return {
        next(version for version, whole in history.items() if whole[index] == chunk)
        for index, chunk in enumerate(chunks(state))
    }


def test_what_moves_on_is_had_in_parts_of_several_versions_and_not_in_one_piece() -> None:
    async def main(lab: Lab) -> None:
        donors = [Serving(node) for node in lab.nodes[1:]]
        for donor in donors:
            lab.hub.set_link(donor.node.id, SLOW)
        history = {5: chunks(donors[0].node.learner.outer)}

        async def train() -> None:
            for version in (6, 7):
                await asyncio.sleep(4.0)
                for donor in donors:
                    goes_on(donor)
                history[version] = chunks(donors[0].node.learner.outer)

        said: list[RemoteError] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(train())
            found = await borrow_moving(lab.nodes[0].network, lambda: holders(*donors), NUMEL, refused=said.append)
        assert found is not None and not said
        seen = versions(found.outer, history)
        assert len(seen) > 1 and (found.oldest, found.newest) == (min(seen), max(seen))
        async with asyncio.TaskGroup() as group:
            group.create_task(train())
            number, digest, ids = holders(*donors)
            side = lab.nodes[0].doors.side
            whole = await borrow(lab.nodes[0].network, ids, digest, NUMEL, side=side, refused=said.append)
        assert number == 7 and whole is None, "this is what it is for"

    in_lab(3, main)


@pytest.mark.parametrize("late_s", [3.0, 1000.0])
def test_chunks_of_a_version_that_is_announced_late_wait_for_that(late_s: float) -> None:
    """Nothing is believed that nobody announces."""

    async def main(lab: Lab) -> None:
        donor = Serving(lab.nodes[1])
        before = holders(donor)
        goes_on(donor)
        loop = asyncio.get_running_loop()
        announced_at = loop.time() + late_s
        network = lab.nodes[0].network
        found = await borrow_moving(
            network,
            lambda: before if loop.time() < announced_at else holders(donor),
            NUMEL,
            refused=lab.nodes[0].refused,
        )
        assert (found is None) == (late_s > 100.0)
        assert found is None or chunks(found.outer) == chunks(donor.node.learner.outer)

    in_lab(2, main)


def test_a_holder_that_has_just_gone_on_is_asked_again_and_nobody_is_nobody() -> None:
    async def main(lab: Lab) -> None:
        donor, network = Serving(lab.nodes[1]), lab.nodes[0].network
        assert await borrow_moving(network, lambda: None, NUMEL, refused=lab.nodes[0].refused) is None
        step(donor.node, 5)
        donor.version = 6  # no list yet

        async def hash_it() -> None:
            await asyncio.sleep(3.0)
            donor.remember()

        async with asyncio.TaskGroup() as group:
            group.create_task(hash_it())
            found = await borrow_moving(network, lambda: holders(donor), NUMEL, refused=lab.nodes[0].refused)
        assert found is not None and torch.equal(found.outer.params, donor.node.learner.outer.params)

    in_lab(2, main)


def test_who_gives_what_was_not_announced_is_named_and_left_alone() -> None:
    async def main(lab: Lab) -> None:
        liar, honest = (Serving(node) for node in lab.nodes[1:])
        announced = holders(honest)[:2]
        liar.node.learner.outer.params.add_(1.0)  # and it does not say so
        said: list[RemoteError] = []
        ids = [liar.node.id, honest.node.id]
        found = await borrow_moving(lab.nodes[0].network, lambda: (*announced, ids), NUMEL, refused=said.append)
        assert found is not None and found.outer.digest() == announced[1]
        assert said and all(isinstance(error, Refused) and error.peer == liar.node.id for error in said)

    in_lab(3, main)


def test_a_stage_without_parameters_has_no_chunks_and_is_had() -> None:
    async def main(lab: Lab) -> None:
        found = await borrow_moving(
            lab.nodes[0].network, lambda: (3, b"", [lab.nodes[1].id]), 0, refused=lambda error: None
        )
        assert found is not None and found.outer.params.numel() == 0 and (found.oldest, found.newest) == (3, 3)

    in_lab(2, main)
