"""What a peer computed and sent in one step of the pipeline, and when: for its log, from which reports draw the step (`pipeline.step` in docs/events.md), and
what that has cost all in all, by which stages are balanced.

Some twenty bytes an operation and thirty-five a message, so a step with eight microbatches adds about a kilobyte to the log of a peer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farflung.node.network import PeerId
from farflung.protocol.flights import Note
from farflung.training.pipeline_plan import Kind, Op

MOST_ENTRIES = 4096
"""Of each kind in one step: others decide how often they repeat a request, so there has to be an end."""

NAME_BYTES = 4
"""Of the receiver's key that the log gets: enough to tell peers of one swarm apart."""


@dataclass(slots=True)
class Spent:
    """What a step has cost this peer, all in all."""

    visits: int = 0
    """Microbatches that went through its stage and back."""
    computing_s: float = 0.0
    sent_bytes: int = 0


@dataclass(slots=True)
class Diary:
    """Seconds are those of the loop's clock."""

    ran: list[tuple[Op, float, float]] = field(default_factory=list)
    """Operation, from when the model was asked for it until it was done."""
    sent: list[tuple[Op, int, float, float]] = field(default_factory=list)
    """What it is for, the receiver's place in the plan, from handing it over until its answer came."""

    spent: Spent = field(default_factory=Spent)

    def computed(self, op: Op, began: float, ended: float) -> None:
        self.spent.visits += op.kind is Kind.B
        self.spent.computing_s += ended - began
        if len(self.ran) < MOST_ENTRIES:
            self.ran.append((op, began, ended))

    def delivered(self, op: Op, to: int, began: float, ended: float, *, nbytes: int) -> None:
        self.spent.sent_bytes += nbytes
        if len(self.sent) < MOST_ENTRIES:
            self.sent.append((op, to, began, ended))

    def told(self, since: float, keys: Sequence[PeerId], notes: Sequence[Note]) -> dict[str, Any]:
        """Fields of the event: milliseconds since the step began, and what was decided on the way, at a data node."""

        def ms(at: float) -> int:
            return round(1000.0 * (at - since))

        def name(place: int) -> str:
            return keys[place][:NAME_BYTES].hex() if place >= 0 else ""

        return {
            "ops": [[op.kind, op.microbatch, op.hop, ms(began), ms(ended)] for op, began, ended in self.ran],
            "sent": [
                [op.kind, op.microbatch, op.hop, name(to), ms(began), ms(ended)] for op, to, began, ended in self.sent
            ],
            "notes": [[note.what, note.microbatch, name(note.peer), note.reason] for note in notes[:MOST_ENTRIES]],
        }
