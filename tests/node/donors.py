"""Nodes that give their state, and one that gets it."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from tests.node.lab import NUMEL, OUTER, Node

from farflung.node.donor import Donor
from farflung.node.statesync import Download, StateSync
from farflung.protocol.errors import RemoteError


class Serving:
    """A node as a donor: its learner's state at `version`."""

    def __init__(self, node: Node, version: int = 5) -> None:
        self.node = node
        self.version = version
        self.steady = asyncio.Event()
        self.steady.set()
        self.errors: list[RemoteError] = []
        self.admitted = True
        self.donor = Donor(node.network, node.learner, lambda: self.version, self.steady)
        self.donor.serve(self.errors.append, lambda peer: self.admitted, within_s=600.0)
        self.remember()

    def remember(self) -> None:
        self.donor.remember(self.version, self.node.learner.outer.chunk_digests())

    @property
    def digest(self) -> bytes:
        return self.node.learner.outer.digest()


def update(seed: int) -> torch.Tensor:
    return torch.cos(torch.arange(NUMEL) * (0.1 + seed))


def step(node: Node, seed: int) -> None:
    """One outer step of the whole vector."""
    node.learner.outer.step_(0, NUMEL, update(seed), OUTER.lr, OUTER.momentum)


def newcomer(node: Node) -> tuple[StateSync, Download, list[tuple[int, int]], Callable[..., Any]]:
    """A sync, an empty download, and what arrived."""
    node.learner.outer.params.zero_()
    arrived: list[tuple[int, int]] = []

    async def note(index: int, version: int, data: bytes) -> None:
        node.learner.outer.load_chunk(index, data)
        arrived.append((index, version))

    sync = StateSync(node.network, node.learner, node.refused)
    return sync, Download(node.learner.outer.num_chunks), arrived, note
