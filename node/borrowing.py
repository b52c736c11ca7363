"""The outer state of a stage that is not ours, from those who hold it: to make a lost stage of its neighbours, or to evaluate the whole model.

For the first it has to be one state. For the second it need not: its holders go on meanwhile, and over the links of homes a large stage takes longer than they do for
a round. So what is evaluated may have parts of a round before and parts of a round later, as a model has whose fragments are synchronised by turns.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from farflung.compression.digest import digest_of
from farflung.node.door import Door
from farflung.node.network import Network, PeerId
from farflung.node.statesync import Download, Sources, StateSync, wrong_digest
from farflung.protocol.errors import NetworkError, RemoteError
from farflung.protocol.limits import CHUNK_BYTES
from farflung.training.outer import OuterState

ATTEMPTS = 3
"""To get a state in one piece; in a row in which nothing came, where it need not be."""

LIST_WAIT_S = 10.0
"""Until a stage's peers announce the state of which a chunk is that one of them has given."""

LOOK_S = 0.25

AGAIN_S = 2.0
"""After asking in vain: a holder that has just gone on has no list yet."""

Holders = tuple[int, bytes, list[PeerId]]
"""Version and digest of a state, and who announces it (`Roll.holders`)."""


@dataclass(frozen=True, slots=True)
class Moving:
    """What was borrowed of those who went on meanwhile."""

    outer: OuterState
    oldest: int
    """Version of the oldest of its parts."""
    newest: int


@dataclass(frozen=True, slots=True)
class _Shelf:
    """What a borrowed state is put on."""

    outer: OuterState


async def borrow(
    network: Network,
    holders: Sequence[PeerId],
    digest: bytes,  # that most of the stage's peers announce
    num_parameters: int,
    *,
    side: Door,
    refused: Callable[[RemoteError], None],
) -> OuterState | None:
    """The state with this digest; None when it cannot be had in one piece, as when its holders have gone on."""
    shelf = _Shelf(OuterState(torch.zeros(num_parameters), chunk_bytes=CHUNK_BYTES))
    sync = StateSync(network, shelf, refused)
    for donor in holders[:ATTEMPTS]:
        try:
            listing = await sync.list_chunks(donor, digest)
        except NetworkError:
            continue
        except RemoteError as error:
            refused(error)
            continue

        async def arrived(index: int, at: int, data: bytes, wanted: tuple[bytes, ...] = listing.digests) -> None:
            if digest_of(data) == wanted[index]:
                shelf.outer.load_chunk(index, data)

        await sync.fetch_all(Download(shelf.outer.num_chunks), holders, arrived)
        mine = await side.run(shelf.outer.chunk_digests)
        if digest_of(*mine) == digest:
            return shelf.outer
    return None


async def borrow_moving(
    network: Network,
    look: Callable[[], Holders | None],
    num_parameters: int,
    *,
    refused: Callable[[RemoteError], None],
) -> Moving | None:
    """The state that `look` tells of, each chunk as it was when it came: of that version or a later one. Each has the digest that most of the stage's peers announced
    for its version. None when it cannot be had."""
    shelf = _Shelf(OuterState(torch.zeros(num_parameters), chunk_bytes=CHUNK_BYTES))
    sync, download = StateSync(network, shelf, refused), Download(shelf.outer.num_chunks)
    lists: dict[int, tuple[bytes, ...]] = {}
    """By version, of those that were announced meanwhile: the digests of the chunks."""
    version_of: dict[int, int] = {}
    """Each chunk's."""

    async def follow() -> None:
        while True:
            if (held := look()) is not None and held[0] not in lists:
                with contextlib.suppress(NetworkError):  # it has gone on, and announces that soon
                    lists[held[0]] = await _list(sync, held[2], held[1], refused)
            await asyncio.sleep(LOOK_S)

    async def arrived(index: int, at: int, data: bytes) -> None:
        until = loop.time() + LIST_WAIT_S
        while at not in lists:
            if loop.time() >= until or any(version > at for version in lists):
                raise NetworkError(f"nobody has announced version {at}, of which a chunk came")
            await asyncio.sleep(LOOK_S)
        if digest_of(data) != lists[at][index]:
            raise wrong_digest(index, download.source[index])
        shelf.outer.load_chunk(index, data)
        version_of[index] = at

    def sources() -> Sources:
        held = look()
        return Sources(() if held is None else [peer for peer in held[2] if peer not in download.distrusted])

    in_vain, loop = 0, asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        while not download.complete and in_vain < ATTEMPTS:
            before = len(download.have)
            await sync.fetch_from(sources, download, arrived)
            in_vain = in_vain + 1 if len(download.have) == before else 0
            if in_vain:
                await asyncio.sleep(AGAIN_S)
        following.cancel()
    if not download.complete:
        return None
    held = look()
    versions = list(version_of.values()) or [0 if held is None else held[0]]  # a stage without parameters has no chunks
    return Moving(shelf.outer, min(versions), max(versions))


async def _list(
    sync: StateSync, holders: Sequence[PeerId], digest: bytes, refused: Callable[[RemoteError], None]
) -> tuple[bytes, ...]:
    """The digests of the chunks of a state. Raises NetworkError when no holder gives them."""
    for donor in holders[:ATTEMPTS]:
        try:
            return (await sync.list_chunks(donor, digest)).digests
        except NetworkError:
            continue
        except RemoteError as error:
            refused(error)
    raise NetworkError("no holder gives a list of its chunks")
