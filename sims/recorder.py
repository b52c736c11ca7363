"""The events of simulated nodes as real nodes write them (docs/events.md).

Simulated vectors and samples may be shorter than those they stand for, and coded otherwise (`scenario_run.Playable`), and a learner that only costs
time has no loss: here bytes, bits and tokens are those of the real thing, and there is no loss where nothing was learnt.
"""

from typing import BinaryIO

import msgspec

from farflung.node.events import Event
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_run import Playable
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.trail import is_nodes

BYTE_FIELDS = ("sent_bytes", "received_bytes", "bytes")

LOSSES = ("loss", "few_loss")


class Recorder:
    """A sink of `simulation.simulate` that writes the nodes' events into an open file."""

    def __init__(self, file: BinaryIO, scenario: Scenario, playable: Playable) -> None:
        self._file = file
        self._name = scenario.name
        self._learns = scenario.mode == "real"
        self._playable = playable

    def __call__(self, line: str, event: Event) -> None:
        if not is_nodes(event):
            return  # what is told of nodes is in run.json
        told = event | {
            "time": START_UNIX_S + event["time"],
            "swarm": self._name,
            "peer": self._playable.keys[event["peer"]],
        }
        kind, playable = told["event"], self._playable
        factor = playable.state_factor if kind == "state.sync" else playable.bytes_factor
        told |= {key: round(told[key] * factor) for key in BYTE_FIELDS if key in told}
        if not self._learns:
            told |= {key: None for key in LOSSES if key in told}
        if kind == "round.commit" and playable.bits is not None:
            up_bits, down_bits = playable.bits
            told |= {"up_bits": up_bits if told["up_bits"] else 0.0, "down_bits": down_bits}
        if kind == "step":
            # its tokens_per_s is the node's, which knows what a sample has
            told["tokens"] *= playable.sample_tokens
        self._file.write(msgspec.json.encode(told) + b"\n")
