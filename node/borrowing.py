"""The outer state of a stage that is not ours, from those who hold it: to evaluate the whole model, or to make a lost stage of its neighbours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from farflung.compression.digest import digest_of
from farflung.node.door import Door
from farflung.node.network import Network, PeerId
from farflung.node.statesync import Download, StateSync
from farflung.protocol.errors import NetworkError, RemoteError
from farflung.protocol.limits import CHUNK_BYTES
from farflung.training.outer import OuterState

ATTEMPTS = 3
"""To get a state in one piece."""


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
