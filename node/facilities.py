"""What a node lives on: its network, key, threads, disk and log; and what it says of its machine."""

from dataclasses import dataclass

from farflung.node.door import Doors
from farflung.node.events import EventLog
from farflung.node.network import Network
from farflung.node.sealed_mail import Decode
from farflung.node.storage import Held, Storage
from farflung.protocol import messages
from farflung.protocol.keys import Signer
from farflung.protocol.messages import Message
from farflung.protocol.pipeline_messages import UNKNOWN, Domains

NET_EVERY_S = 5.0
"""Between two lines of the log about what was sent and received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a node says of itself in heartbeats and in its log."""

    device: str
    pid: int
    """Of its process; 0 where several nodes share one."""
    admission: bytes = b""
    domains: Domains = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Facilities:
    """See the module."""

    network: Network
    signer: Signer
    doors: Doors
    storage: Storage
    log: EventLog
    facts: Facts
    checkpoint_s: float = 300.0
    """Between two checkpoints."""
    held: Held | None = None
    """What the learner has already; None: what is in `storage`, if anything."""
    net_every_s: float = NET_EVERY_S
    """Between two `net` lines in the log."""
    exit_when_done: bool = True
    decode: Decode[Message] = messages.decode
    """Of its mail; nodes that share a process may share what is decoded."""
