"""What a peer's part in the pipeline asks of the peer that it is part of (`stage_peer.StagePeer`)."""

from typing import Protocol

from farflung.node.network import PeerId
from farflung.protocol.accord import Word
from farflung.protocol.lives import Counters
from farflung.protocol.pipeline_messages import Copy
from farflung.training.errors import NoRoom

OUTSIDE = -1
"""In the place of a stage: none."""


class Self(Protocol):
    """See the module."""

    @property
    def trains(self) -> bool:
        """Is a member of its stage's chain, with its outer state, and not about to leave."""

    @property
    def free(self) -> bool:
        """Could take part in a step now."""

    @property
    def in_step(self) -> bool:
        """Is at a step of the pipeline."""

    @property
    def unsent(self) -> bool:
        """Has trained more since its last round than is usual while one is under way."""

    @property
    def finished(self) -> bool:
        """The run is complete for its stage."""

    @property
    def holds(self) -> tuple[int, bytes]:
        """Version and digest of its outer state; the digest is empty while there is none."""

    @property
    def up_bytes_per_s(self) -> float:
        """Of its uplink; 0 while unknown."""

    def wake(self) -> None:
        """There may be something to do."""

    def lacks(self, error: NoRoom) -> None:
        """The device has no room for something of a step."""

    def decide(self) -> None:
        """Its chain may have something to decide."""

    def met(self, peer: PeerId) -> None:
        """Another peer of its stage."""

    @property
    def grad_norm(self) -> float:
        """Of the gradient of its layers, of late; 0 while there was none."""

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Shadows of other stages that it holds."""

    @property
    def chain(self) -> tuple[tuple[PeerId, ...], list[PeerId]] | None:
        """The newest view of its chain, and who of it is heard; None while it knows none."""

    @property
    def spared(self) -> bool:
        """Its chain could let it go, and go on without it: by those members that hold the stage's state."""

    @property
    def counted(self) -> Counters | None:
        """What stage 0's chain has counted, where that is its own."""

    @property
    def caught_up(self) -> bool:
        """Its outer state has all the rounds that it knows of, or it has none at all."""

    @property
    def word(self) -> Word:
        """What its chain says of the lives of stages."""

    def go(self, stage: int, reason: str) -> None:
        """Leave this stage's chain for that of another; OUTSIDE: to come in again as a newcomer."""
