"""From a scenario to a schedule: who joins, goes and comes back when, and what is scripted beside it.

Each peer's life is drawn from a generator of its own, so that one more peer or happening changes nobody else's. Weibull sessions with a shape
below 1 have a falling hazard: many short visits, a few that last; with shape 1 they are exponential. The scale follows from the mean,
mean = scale Γ(1 + 1/shape).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from farflung.protocol.errors import ConfigError
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
    Schedule,
    Skew,
    Slow,
    Start,
    Window,
    put_right,
)
from farflung.sims.happenings import REJOIN_S, Happening
from farflung.sims.scenario import Lasting, PeerClass, Scenario
from farflung.sims.traces import read_trace
from farflung.sims.wishes import Wish, grant

RESET_SHARE = 0.7
"""Of those who vanish, those whose connections show it; the others' machines lose power or network."""


def make_schedule(scenario: Scenario, seed: int, folder: Path) -> Schedule:
    """Everything that happens. `folder` holds the traces that the scenario names. Raises ConfigError."""
    wanted: list[Wish] = []
    for number, (peer_class, index, _) in enumerate(scenario.roster()):
        rng = random.Random(f"{seed}/churn/{number}")
        skew_s = scenario.network.clock_skew_s
        if skew_s:
            wanted.append(Wish(Skew(at=0.0, peer=number, ahead_s=rng.uniform(-skew_s, skew_s))))
        life = _traced(folder / peer_class.trace, index) if peer_class.trace else _drawn(peer_class, rng)
        wanted += _lived(life, number, peer_class, rng, scenario.duration_s)
    for position, happening in enumerate(scenario.happenings):
        wanted += _scripted(scenario, happening, random.Random(f"{seed}/happening/{position}"))
    faults = grant(sorted(wanted, key=lambda wish: wish.fault.at))
    if scenario.calm_s:
        faults = _calmed(faults, scenario.latest_s, scenario.duration_s - scenario.calm_s)
    if not any(isinstance(fault, Start) for fault in faults):
        raise ConfigError(
            f"nobody joins within {scenario.latest_s:g} s: give some peers an earlier join_s, or a session that begins earlier in their trace"
        )
    return Schedule(num_peers=scenario.num_peers, duration_s=scenario.duration_s, faults=faults)


def _draw(lasting: Lasting, rng: random.Random) -> float:
    return rng.weibullvariate(lasting.mean_s / math.gamma(1.0 + 1.0 / lasting.shape), lasting.shape)


def _drawn(peer_class: PeerClass, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Sessions of one peer: from, to."""
    now = rng.uniform(*peer_class.join_s)
    while True:
        end = math.inf if peer_class.session is None else now + _draw(peer_class.session, rng)
        yield now, end
        if peer_class.absence is None or math.isinf(end):
            return
        now = end + max(REJOIN_S, _draw(peer_class.absence, rng))


def _traced(file: Path, index: int) -> Iterator[tuple[float, float]]:
    """Sessions of the trace's host number `index`, in the order in which hosts first appear; hosts are used again when there are too few."""
    hosts = read_trace(file)
    now = -math.inf
    for start, end in hosts[index % len(hosts)]:
        start = max(start, now + REJOIN_S)
        if start < end:
            yield start, end
            now = end


def _lived(
    life: Iterator[tuple[float, float]], peer: int, peer_class: PeerClass, rng: random.Random, duration_s: float
) -> Iterator[Wish]:
    went: Wish | None = None
    for start, end in life:
        if start > duration_s:
            return
        yield Wish(Start(at=start, peer=peer), ends=went)
        if end > duration_s:
            return
        if rng.random() < peer_class.says_goodbye:
            went = Wish(Leave(at=end, peer=peer))
        else:
            went = Wish(Kill(at=end, peer=peer, reset=rng.random() < RESET_SHARE))
        yield went


def _scripted(scenario: Scenario, what: Happening, rng: random.Random) -> Iterator[Wish]:
    everybody = scenario.everybody(what)
    peers = sorted(rng.sample(everybody, round(what.share * len(everybody))))
    at, end = what.at, scenario.duration_s
    until = min(end, end if what.for_s is None else at + what.for_s)
    returns = what.for_s is not None and at + what.for_s <= end
    match what.what:
        case "kill" | "power":
            for peer in peers:
                yield (went := Wish(Kill(at=at, peer=peer, reset=what.what == "kill")))
                if returns:
                    yield Wish(Start(at=until, peer=peer), ends=went)
        case "leave":
            for peer in peers:
                yield (went := Wish(Leave(at=at, peer=peer)))
                if returns:
                    yield Wish(Start(at=until, peer=peer), ends=went)
        case "join":
            yield from (Wish(Start(at=at, peer=peer), called=True) for peer in peers)
        case "pause":
            for peer in peers:
                yield (pause := Wish(Pause(at=at, peer=peer)))
                if what.for_s is not None and until < end:
                    yield Wish(Resume(at=until, peer=peer), ends=pause)
        case "partition" | "apart":
            bridged = what.what == "apart"
            groups = tuple((peer,) for peer in peers) if bridged else (tuple(peers),)
            yield (cut := Wish(Partition(at=at, groups=groups, bridged=bridged)))
            if what.for_s is not None:
                yield Wish(Heal(at=until), ends=cut)
        case "slow":
            yield from (Wish(Slow(at=at, until=until, peer=peer, factor=what.factor)) for peer in peers)
        case "delay" if not what.peers:
            yield Wish(Delay(at=at, until=until, extra_s=what.seconds))
        case "delay":
            yield from (Wish(Delay(at=at, until=until, extra_s=what.seconds, peer=peer)) for peer in peers)
        case "drop":
            yield Wish(Drop(at=at, until=until, probability=what.probability))
        case "duplicate":
            yield Wish(Duplicate(at=at, until=until, probability=what.probability))
        case "skew":
            yield from (Wish(Skew(at=at, peer=peer, ahead_s=what.seconds)) for peer in peers)


def _calmed(faults: tuple[Fault, ...], latest_s: float, at: float) -> tuple[Fault, ...]:
    """Those that happen no later than `latest_s`, so that whoever went can be back at a moment after that, and what puts all of it right then."""
    left = [
        replace(fault, until=min(fault.until, at)) if isinstance(fault, Window) else fault
        for fault in faults
        if fault.at <= latest_s
    ]
    return (*left, *put_right(left, at))
