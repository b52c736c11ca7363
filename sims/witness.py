"""What is to be known of a simulation when it is over: what the audit reads of its nodes' logs.

Nodes say far more than the audit asks for, most of it of steps; and what they all say of a commit is kept once.
"""

from collections.abc import Sequence

from farflung.node.events import Event
from farflung.sims.audit import LOSSES
from farflung.sims.logs import Chain, chain_of
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.trail import is_nodes

READ = (
    "kernels",
    "node.start",
    "node.stop",
    "progress.dropped",
    "round.scatter",
    "round.held",
    "round.missed",
    "round.abort",
    "invariant.broken",
    *LOSSES,
)
"""Events that the audit reads, beside those of steps, plans and commits."""

OF_STEPS = ("time", "event", "peer", "version", "samples", "group")
"""What of a step, as far as it is there."""

SHARED = ("contributors", "samples", "view", "members")
"""What is long, and the same from all who say it of a round."""


class Witness:
    """A sink of `simulation.simulate`, as it is of pipelines."""

    def __init__(self, keys: Sequence[str]) -> None:
        """`keys`: public keys in hex, by the peer's number."""
        self.events: dict[str, list[Event]] = {}
        """By public key: of these `summary.broken_in` says what it says of all."""
        self._keys = keys
        self._versions: dict[int, dict[Chain, int]] = {}
        """Of each peer's life, at its last event of each chain."""
        self._said: dict[tuple[str, Chain, int], Event] = {}
        """What was said first of a round."""

    def __call__(self, line: str, event: Event) -> None:
        if is_nodes(event):
            moved = self._moves(event)
            match event["event"], event.get("what"):
                case "step", _ if "stage" not in event:  # what a pipeline trained is not compared
                    self._keep({key: event[key] for key in OF_STEPS if key in event})
                case (("round.plan" | "round.commit" | "view.commit"), _):
                    self._keep(self._shared(event))
                case (kind, what) if moved or kind in READ or (kind, what) == ("span", "download"):
                    self._keep(event)

    def _moves(self, event: Event) -> bool:
        """Whether it has another version than the life had before: of those the audit looks at all changes."""
        kind = event["event"]
        if kind in ("kernels", "node.start"):
            self._versions[event["peer"]] = {}
        if kind.startswith(("stage.", "shadow")):
            return False
        versions, chain = self._versions.setdefault(event["peer"], {}), chain_of(event)
        before, versions[chain] = versions.get(chain), event["version"]
        return bool(before != event["version"])

    def _shared(self, event: Event) -> Event:
        number = event["height"] if event["event"] == "view.commit" else event["round"]
        first = self._said.setdefault((event["event"], chain_of(event), number), event)
        return event | {key: first[key] for key in SHARED if key in event and first.get(key) == event[key]}

    def _keep(self, event: Event) -> None:
        key = self._keys[event["peer"]]
        self.events.setdefault(key, []).append(event | {"time": START_UNIX_S + event["time"], "peer": key})
