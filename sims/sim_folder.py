"""What a simulated run leaves behind for reports: its nodes' events as real nodes write them (docs/events.md), and `run.json`.

Simulated vectors and samples may be shorter than those they stand for (`scenario_plan.Prepared.bytes_factor`), and a learner that only costs
time has no loss: here bytes and tokens are those of the real thing, and there is no loss where nothing was learnt.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from farflung.node.events import Event
from farflung.sims.facts import Expectation, Incident, LedgerFacts, PeerFacts, RunFacts
from farflung.sims.faults import Fault, Kill, Leave, Start
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import Prepared
from farflung.sims.swarm import START_UNIX_S

EVENTS, RUN = "events.jsonl", "run.json"

BYTE_FIELDS = ("sent_bytes", "received_bytes", "bytes")


class Recorder:
    """A sink of `simulation.simulate` that writes the nodes' events into an open file."""

    def __init__(self, file: BinaryIO, scenario: Scenario, prepared: Prepared) -> None:
        self._file = file
        self._name = scenario.name
        self._learns = scenario.mode == "real"
        self._factor = prepared.bytes_factor
        self._ids = public_keys(prepared)
        pace = prepared.plan.outfit.terms.pace
        self._step_tokens = pace.samples_per_step * pace.tokens_per_sample

    def __call__(self, line: str, event: Event) -> None:
        if "peer" not in event:
            return  # a fault, or the judge's verdict: both are in run.json
        told = event | {"time": START_UNIX_S + event["time"], "swarm": self._name, "peer": self._ids[event["peer"]]}
        for key in BYTE_FIELDS:
            if key in told:
                told[key] = round(told[key] * self._factor)
        if "loss" in told and not self._learns:
            told["loss"] = None
        if told["event"] == "step" and told["tokens"] != self._step_tokens:
            told["tokens_per_s"] *= self._step_tokens / told["tokens"]
            told["tokens"] = self._step_tokens
        self._file.write(msgspec.json.encode(told) + b"\n")


def public_keys(prepared: Prepared) -> list[str]:
    """In hex, by the peer's number."""
    return [signer.peer_id.hex() for signer in prepared.plan.outfit.signers]


def run_facts(
    scenario: Scenario,
    ids: Sequence[str],  # public keys in hex, by number
    done: Sequence[tuple[float, Fault]],  # what happened when, in unix seconds
    violations: Sequence[str],
    expected: Sequence[dict[str, Any]],  # as in the result
    between: tuple[float, float],  # the run's beginning and end, unix seconds
    ledger: LedgerFacts | None = None,
) -> RunFacts:
    """What no node knows of the run."""
    started, ended = between
    peers = [
        PeerFacts(peer=peer, name=f"{peer_class.name}/{index}", role=region, region=region, group=peer_class.name)
        for peer, (peer_class, index, region) in zip(ids, scenario.roster(), strict=True)
    ]
    return RunFacts(
        name=scenario.name,
        started=started,
        ended=ended,
        peers=peers,
        timeline=timeline_of(done, ids),
        violations=list(violations),
        expected=[Expectation(what=one["what"], got=str(one["got"]), met=one["met"]) for one in expected],
        description=scenario.about,
        ledger=ledger,
    )


def timeline_of(done: Sequence[tuple[float, Fault]], ids: Sequence[str]) -> list[Incident]:
    """What happened to nodes, by public keys in hex, in the order of `done`."""
    return [incident for at, fault in done for incident in _incidents(at, fault, ids)]


def _incidents(at: float, fault: Fault, ids: Sequence[str]) -> list[Incident]:
    """Starts, joins, kills and goodbyes at `at`; what happens to the network is in the nodes' events."""
    match fault:
        case Start(peer=peer):
            return [Incident(time=at, what="join" if fault.at else "start", peer=ids[peer])]
        case Kill(peer=peer):
            return [Incident(time=at, what="kill", peer=ids[peer])]
        case Leave(peer=peer):
            return [Incident(time=at, what="stop", peer=ids[peer])]
        case _:
            return []
