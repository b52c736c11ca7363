"""Everybody loses power at one moment: a schedule until then, and what comes after it."""

from dataclasses import replace

from farflung.sims.faults import Delay, Drop, Duplicate, Fault, Heal, Kill, Presence, Schedule, Slow, Start


def blackout(schedule: Schedule, at: float, *, away_s: float, then_s: float) -> Schedule:
    """The same until `at` seconds. Then nothing runs any more, what went wrong with the network is over, and `away_s` seconds later everybody who ever ran is started again; `then_s`
    seconds more are the rest."""
    faults = [_until(fault, at) for fault in schedule.faults if fault.at < at]
    presence = Presence()
    for fault in faults:
        presence.happen(fault)
    ever = sorted({fault.peer for fault in faults if isinstance(fault, Start)})
    return replace(
        schedule,
        duration_s=at + away_s + then_s,
        faults=(
            *faults,
            *(Heal(at=at, number=number) for number in presence.partitions),
            *(Kill(at=at, peer=peer, reset=False) for peer in presence.running),
            *(Start(at=at + away_s, peer=peer) for peer in ever),
        ),
    )


def _until(fault: Fault, at: float) -> Fault:
    """The fault, over by `at` at the latest."""
    if isinstance(fault, Drop | Duplicate | Delay | Slow):
        return replace(fault, until=min(fault.until, at))
    return fault
