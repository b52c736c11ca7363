"""What a run leaves behind for reports beside its nodes' events (docs/events.md): `run.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from farflung.sims.facts import FIRST_S, Expectation, Incident, LedgerFacts, PeerFacts, RunFacts
from farflung.sims.faults import (
    Delay,
    Drop,
    Duplicate,
    Fault,
    Heal,
    Kill,
    Leave,
    Partition,
    Pause,
    Resume,
    Skew,
    Slow,
    Start,
)
from farflung.sims.scenario import Scenario


def run_facts(
    scenario: Scenario,
    ids: Sequence[str],  # public keys in hex, by number
    done: Sequence[tuple[float, Fault]],  # what happened when, in unix seconds
    violations: Sequence[str],
    expected: Sequence[dict[str, Any]],  # as in the result
    between: tuple[float, float],  # the run's beginning and end, unix seconds
    *,
    seed: int,  # that was played, whatever the scenario's is
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
        lossy=scenario.network.loss > 0.0,
        description=scenario.about,
        ledger=ledger,
        seed=seed,
        method=scenario.method,
    )


def timeline_of(done: Sequence[tuple[float, Fault]], ids: Sequence[str]) -> list[Incident]:
    """What happened to nodes and to their network, by public keys in hex, in the order of `done`."""
    starts = [(at, fault.peer) for at, fault in done if isinstance(fault, Start)]
    early = {peer: at for at, peer in reversed(starts) if at <= starts[0][0] + FIRST_S}
    return [_incident(at, fault, ids, early) for at, fault in done]


def _incident(at: float, fault: Fault, ids: Sequence[str], early: Mapping[int, float]) -> Incident:
    """`early`: by number, when those came who were there from the start. Windows last as long as they were to, however late they began."""
    match fault:
        case Start(peer=peer):
            return Incident(time=at, what="start" if early.get(peer) == at else "join", peer=ids[peer])
        case Kill(peer=peer, reset=reset):
            return Incident(time=at, what="kill" if reset else "power", peer=ids[peer])
        case Leave(peer=peer):
            return Incident(time=at, what="stop", peer=ids[peer])
        case Pause(peer=peer):
            return Incident(time=at, what="pause", peer=ids[peer])
        case Resume(peer=peer):
            return Incident(time=at, what="resume", peer=ids[peer])
        case Skew(peer=peer, ahead_s=ahead_s):
            return Incident(time=at, what="skew", peer=ids[peer], much=ahead_s)
        case Partition(groups=groups, number=number, bridged=bridged):
            sides = [[ids[peer] for peer in group] for group in groups]
            return Incident(time=at, what="apart" if bridged else "partition", number=number, groups=sides)
        case Heal(number=number):
            return Incident(time=at, what="heal", number=number)
        case Slow(until=until, peer=peer, factor=factor):
            return Incident(time=at, what="slow", peer=ids[peer], until=at + until - fault.at, much=factor)
        case Delay(until=until, extra_s=extra_s, peer=whose):
            key = "" if whose is None else ids[whose]
            return Incident(time=at, what="delay", peer=key, until=at + until - fault.at, much=extra_s)
        case Drop(until=until, probability=probability):
            return Incident(time=at, what="drop", until=at + until - fault.at, much=probability)
        case Duplicate(until=until, probability=probability):
            return Incident(time=at, what="duplicate", until=at + until - fault.at, much=probability)
