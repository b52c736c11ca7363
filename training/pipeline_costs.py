"""What operations and messages take: serial computation at each peer, and an alpha-beta model of its links.

    F = w[stage][peer]     B = backward * w     I = W = B / 2     LOSS = loss * w     (the digest's section 1.3)
    message i -> j: leaves when i's uplink is free, occupies it for transmit_s[i][j], arrives latency_s[i][j] later

The uplink is what volunteers are short of, so messages of one peer share it: one at a time, in the order of the
operations that made them. First come, first served is how a node sends them, too; and as a peer computes serially, it makes
the order of messages known when an operation starts. With `shared_uplinks` off a message never waits for another one,
which is how SkipPipe's own simulator and the digest's figures count.
"""

from dataclasses import dataclass

from farflung.training.pipeline_plan import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds, for one microbatch. Raises ValueError when the tables do not fit together or are not finite."""

    forward_s: tuple[tuple[float, ...], ...]
    """[stage][peer]: the stage's forward at that peer."""
    latency_s: tuple[tuple[float, ...], ...]
    """[from][to]: from the last byte sent to the input ready, with fixed overheads."""
    transmit_s: tuple[tuple[float, ...], ...]
    """[from][to]: bytes of a boundary over the path's rate."""
    backward: float = 1.5
    """Backward over forward; with recomputation about 2.5 to 3."""
    loss: float = 0.25
    """Head and loss, over the data node's forward."""
    pause_s: float = 0.0
    """A peer rests after each operation: copies between CPU and GPU, serialisation."""
    shared_uplinks: bool = True

    def __post_init__(self) -> None:
        peers = len(self.latency_s)
        tables = (self.forward_s, self.latency_s, self.transmit_s)
        if any(len(row) != peers for table in tables for row in table) or len(self.transmit_s) != peers:
            raise ValueError(f"cost tables must have one column per peer, of which there are {peers}")
        if not all(0.0 <= value < float("inf") for table in tables for row in table for value in row):
            raise ValueError("times must be finite and not negative")
        if not 0.0 <= min(self.backward, self.loss, self.pause_s):
            raise ValueError("backward, loss and pause_s must not be negative")

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def num_peers(self) -> int:
        return len(self.latency_s)

    def seconds(self, kind: Kind, stage: int, peer: int) -> float:
        """What an operation takes; a LOSS is counted by the stage of its hop."""
        factor = {Kind.F: 1.0, Kind.LOSS: self.loss, Kind.B: self.backward}.get(kind, self.backward / 2)
        return factor * self.forward_s[stage][peer]

    def message_s(self, sender: int, receiver: int) -> float:
        """A message on a free uplink; 0 within a peer."""
        return 0.0 if sender == receiver else self.transmit_s[sender][receiver] + self.latency_s[sender][receiver]
