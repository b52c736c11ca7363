"""What a run leaves behind for reports beside its nodes' events (docs/events.md): `run.json`."""

from collections.abc import Sequence
from typing import Any

from farflung.sims.facts import Expectation, Incident, LedgerFacts, PeerFacts, RunFacts
from farflung.sims.faults import Fault, Kill, Leave, Start
from farflung.sims.scenario import Scenario

EVENTS, RUN = "events.jsonl", "run.json"


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
