"""What the modelled internet (`hub`) sees of a process."""

from typing import Protocol

from farflung.protocol.keys import PeerId
from farflung.sims.links import Meter
from farflung.sims.streams import MemoryStream


class Process(Protocol):
    """What the hub sees of a process: its network, alive until the hub takes it down or it detaches itself."""

    @property
    def peer_id(self) -> PeerId:
        """Its public key."""

    def deliver(self, sender: PeerId, message: bytes) -> None:
        """A control message has arrived."""

    def serves(self, kind: str) -> bool:
        """True when it accepts this kind of stream."""

    def accept(self, kind: str, stream: MemoryStream) -> None:
        """A stream has come in."""

    def keeps(self, target: "Process | None") -> bool:
        """Whether a connection to that process is still open, so that a stream needs no handshake."""

    def note_dialled(self, target: "Process") -> None:
        """A stream to that process was opened now."""

    def meter(self, peer: PeerId) -> Meter:
        """The meter of what goes to and comes from one peer."""

    def stop_serving(self) -> None:
        """The process has ended."""
