"""The figures of a run, worked out from its nodes' events alone, with nothing taken from a node's own opinion
of itself.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from farflung.node.events import Event, grown
from farflung.sims.audit import CHECKS, INVARIANTS, Check, refusals
from farflung.sims.audit_samples import Samples, account, check_samples
from farflung.sims.facts import KILLED, RunFacts
from farflung.sims.logs import Events, Logs, all_of, begins_late, chain_of
from farflung.sims.pipeline_log import logged_steps, pipeline_figures
from farflung.sims.pipeline_recoveries import recoveries, told
from farflung.sims.spans import USES, kills, pauses, seconds_by_use, silent_ends

Round = tuple[int, str]
"""Its height, of stage 0 counted on from life to life, and its group (`logs.Chain`)."""


def summarise(events_by_peer: Events, run: RunFacts) -> dict[str, Any]:
    """The figures that `farflung demo --json` and `farflung sim report --json` print.

    * `outer_loss`: the last held-out loss of the outer parameters (None without one; with several groups, that of whichever is furthest); `solo_loss`: that of
    the run alone; `outer_better`: whether the first is lower, None when one is missing. * `bytes_sent_per_peer`: {name: bytes} over all lives of a node; `ddp_bytes_per_peer`: what
    data-parallel would send. * `rounds_committed`: distinct heights of each group; `rounds_missed`: [{peer, round, group,
    reason}], `group` in hex, empty for the first one of the swarm. * `digests_equal`: all commits of one version have one digest over all peers; None where no two could be compared. *
    `samples_trained_twice`, `samples_lost` and `samples_miscounted`: see `audit_samples.Samples`; two different
    commits of one height count twice, so a fork shows here as well. * `checked`: [{which, name, what}], the
    invariants of the design for which logs had something to compare, and `invariants_broken`: [{which, detail}],
    what the comparison found (`audit`) and what nodes said themselves; `refused`: see `audit.refusals`. *
    `tokens_committed`, and `tokens_per_s` of the whole run. * `median_round_s`, from the plan
    until all members held all means, as the proposer saw it: the vote comes after that; `delay_steps`, the median of those that a contributor trained from its offer until the means
    were in, None without contributions. * `peers`: how many there were. * `utilisation`: {group: {peers, hours, and the share of
    their presence that went into each of `spans.USES`}}. * `pipeline`: see `pipeline_log.pipeline_figures`;
    rounds, tokens and samples are those of stage 0, for those of the others count the same again. * `recoveries`: of stages that were
    begun anew, see `pipeline_recoveries.told`. * `shadows`: see `shadow_figures`. * `judged`:
    what a judge beside the nodes found broken, `expected`: [{what, got, met}], `seed` and `method`, all as the facts have them. * `begin_late`: {name: seconds of the
    run} of peers the beginning of whose log is missing, so that all of this is of the rest. * `unwritten`: {name: [lines, from, until]} of peers whose log lacks
    lines that a full disk did not take: how many in all, and the seconds of the run between which that was.
    """
    logs = Logs(events=events_by_peer, run=run)
    samples = account(logs)
    checks = _look(logs, samples)
    of_bits = [check for check in checks if check.which == 1 and check.count]
    outer = outer_losses(events_by_peer)
    outer_loss = outer[-1]["loss"] if outer else None
    solo_loss = run.solo_loss[-1].loss if run.solo_loss else None
    by_round, last_heights = commits_by_round(events_by_peer).values(), _last_heights(events_by_peer)
    tokens = sum(sum(event["contributors"].values()) for event in by_round)
    seconds = run.ended - run.started
    steps = logged_steps(events_by_peer)
    return {
        "outer_loss": outer_loss,
        "solo_loss": solo_loss,
        "outer_better": None if outer_loss is None or solo_loss is None else outer_loss < solo_loss,
        "bytes_sent_per_peer": {
            logs.name(peer): total_bytes(events, "sent_bytes") for peer, events in events_by_peer.items()
        },
        "bits_per_parameter": {
            way: round(statistics.median(bits), 3)
            for way in ("up", "down")
            if (bits := [e[f"{way}_bits"] for e in logs.all("round.commit") if e[f"{way}_bits"]])
        },
        "left_out": round(statistics.median(owed), 3)
        if (owed := [e["owed"] for e in logs.all("round.commit") if e["owed"] is not None])
        else None,
        "delay_steps": statistics.median(delays)
        if (delays := [e["delay_steps"] for e in logs.all("round.commit") if e["delay_steps"] is not None])
        else None,
        "ddp_bytes_per_peer": run.ddp_bytes_per_peer,
        "rounds_committed": len(by_round),
        "rounds_missed": [
            {
                "peer": logs.name(e["peer"]),
                "round": _round_number(e, last_heights),
                "group": chain_of(e)[2],
                "reason": e["reason"],
            }
            for e in logs.all("round.missed")
        ],
        "digests_equal": not any(check.broken for check in of_bits) if of_bits else None,
        "samples_trained_twice": samples.twice,
        "samples_lost": samples.lost,
        "samples_miscounted": samples.miscounted,
        "peers_killed": sum(incident.what in KILLED for incident in run.timeline),
        "peers_joined": sum(incident.what == "join" for incident in run.timeline),
        "seconds": round(run.ended - run.started, 1),
        "checked": [{"which": c.which, "name": INVARIANTS[c.which], "what": c.what} for c in checks if c.count],
        "invariants_broken": _broken(logs, checks),
        "refused": refusals(logs),
        "tokens_committed": tokens,
        "tokens_per_s": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        "median_round_s": round(statistics.median(e["seconds"] for e in by_round), 3) if by_round else None,
        "peers": len(logs.names),
        "utilisation": utilisation(events_by_peer, run),
        "pipeline": pipeline_figures(steps),
        "recoveries": [told(one, run.started) for one in recoveries(events_by_peer, steps, kills(run.timeline))],
        "shadows": shadow_figures(logs),
        "judged": run.violations,
        "seed": run.seed,
        "method": run.method,
        "expected": [structs.asdict(one) for one in run.expected],
        "begin_late": {
            logs.name(peer): round(events[0]["time"] - run.started, 1)
            for peer, events in events_by_peer.items()
            if begins_late(events)
        },
        "unwritten": {
            logs.name(peer): [
                sum(event["count"] for event in lacking),
                round(min(event["since"] for event in lacking) - run.started, 1),
                round(max(event["time"] for event in lacking) - run.started, 1),
            ]
            for peer, events in events_by_peer.items()
            if (lacking := [event for event in events if event["event"] == "log.unwritten"])
        },
    }


def _look(logs: Logs, samples: Samples) -> list[Check]:
    return [*(check(logs) for check in CHECKS), *check_samples(logs, samples)]


def _broken(logs: Logs, checks: Sequence[Check]) -> list[dict[str, Any]]:
    """By what was compared, and what nodes said themselves."""
    found = [{"which": check.which, "detail": said} for check in checks for said in check.broken]
    return found + [
        {"which": e.get("which"), "detail": f"{logs.name(e['peer'])} reports: {e.get('detail', 'nothing more')}"}
        for e in logs.all("invariant.broken")
    ]


def broken_in(logs: Logs) -> list[str]:
    """What logs show to be broken, one sentence each: `violations` without what was judged beside them."""
    return [_sentence(broken) for broken in _broken(logs, _look(logs, account(logs)))]


def shadow_figures(logs: Logs) -> dict[str, Any] | None:
    """Copies of stages at peers of others: refreshes, their bytes as coded, and their share of all that nodes sent, as counted at the sockets, rounds and
    states included. None where there were none."""
    found = logs.all("shadow")
    if not found:
        return None
    nbytes = sum(copies_bytes(events)[0] for events in logs.events.values())
    sent = sum(total_bytes(events, "sent_bytes") for events in logs.events.values())
    return {
        "refreshes": len(found),
        "bytes": nbytes,
        "percent_of_sent": round(100.0 * nbytes / sent, 2) if sent else None,
    }


def utilisation(events_by_peer: Events, run: RunFacts) -> dict[str, dict[str, float]]:
    """Shares of the presence of each group's peers, all of them together, in the order in which groups come."""
    groups = groups_of(events_by_peer, run)
    ends, stopped = silent_ends(run), pauses(run.timeline, run.ended)
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(groups.values()):
        totals = dict.fromkeys(USES, 0.0)
        members = [peer for peer, group in groups.items() if group == name]
        for peer in members:
            spent = seconds_by_use(events_by_peer[peer], ends.get(peer, ()), stopped.get(peer, ()))
            for use, seconds in spent.items():
                totals[use] += seconds
        present = sum(totals.values())
        shares = {use: round(seconds / present, 4) if present else 0.0 for use, seconds in totals.items()}
        found[name] = {"peers": len(members), "hours": round(present / 3600, 3), **shares}
    return found


def groups_of(events_by_peer: Events, run: RunFacts) -> dict[str, str]:
    """The group of every peer with events: as the facts have it, or else the device that it named."""
    given = {facts.peer: facts.group for facts in run.peers if facts.group}
    found: dict[str, str] = {}
    listed = [facts.peer for facts in run.peers if facts.peer in events_by_peer]
    for peer in dict.fromkeys([*listed, *events_by_peer]):
        started = next((e for e in events_by_peer[peer] if e["event"] == "node.start"), None)
        found[peer] = given.get(peer) or ("unknown" if started is None else str(started["device"]))
    return found


def violations(figures: Mapping[str, Any]) -> list[str]:
    """What broke an invariant of the design, one sentence each; empty for a run in which nothing was found that did."""
    return [_sentence(broken) for broken in figures["invariants_broken"]] + list(figures["judged"])


def _sentence(broken: Mapping[str, Any]) -> str:
    which = broken["which"]  # of another version of farflung it may be one that is not known here
    return f"invariant {which}, {INVARIANTS.get(which, 'unknown here')}: {broken['detail']}"


def checked(figures: Mapping[str, Any]) -> str:
    """What was looked at in the nodes' logs, in one sentence: nothing else is claimed."""
    if not figures["checked"]:
        return "checked: nothing, for the logs left nothing to compare"
    return "checked: " + "; ".join(f"{one['what']} ({one['which']})" for one in figures["checked"])


def not_better(figures: Mapping[str, Any]) -> str:
    """What is to be said where the swarm has learnt no more than one worker alone; empty where it has, or nobody can tell."""
    if figures["outer_better"] is not False:
        return ""
    return (
        f"The swarm's held-out loss, {figures['outer_loss']:.4f}, is NOT lower than that of the best worker alone, "
        f"{figures['solo_loss']:.4f}."
    )


def outer_losses(events_by_peer: Events, which: str = "loss") -> list[Event]:
    """`outer.eval` events with a finite loss, one per version of each group (the latest), in the order of versions.

    `which`: `loss`, or `few_loss` of those that read a few samples only.
    """
    by_version: dict[tuple[int, str], Event] = {}
    for event in all_of(events_by_peer, "outer.eval"):
        if event[which] is not None:
            by_version[event["version"], chain_of(event)[2]] = event
    return [by_version[version] for version in sorted(by_version)]


def commits_by_round(events_by_peer: Events) -> dict[Round, Event]:
    """One `round.commit` event per round of each group, of who applied it first, in the order of rounds; of a pipeline those of stage 0. Its `seconds` are the proposer's, and
    the same for all."""
    last = _last_heights(events_by_peer)
    found: dict[Round, Event] = {}
    for event in all_of(events_by_peer, "round.commit"):
        stage, _, group = chain_of(event)
        if stage == 0:
            found.setdefault((_round_number(event, last), group), event)
    return dict(sorted(found.items()))


def _last_heights(events_by_peer: Events) -> dict[int, int]:
    """Of each life of stage 0, the height of its last round."""
    last: dict[int, int] = {}
    for event in all_of(events_by_peer, "round.commit"):
        stage, life, _ = chain_of(event)
        if stage == 0:
            last[life] = max(last.get(life, 0), event["round"])
    return last


def _round_number(event: Event, last: Mapping[int, int]) -> int:
    """The height of its round; of stage 0 counted on from life to life, by their `last` heights."""
    stage, life, _ = chain_of(event)
    return int(event["round"]) + sum(height for one, height in last.items() if stage == 0 and one < life)


def copies_bytes(events: Sequence[Event]) -> tuple[int, int]:
    """Of copies of other stages that a peer has fetched, and what the budget allowed for them until the last one. Both are counted on when it moves to
    another stage, and from nothing when its process is started anew."""
    received = allowed = current = 0
    for event in events:
        if event["event"] == "shadow":
            received += event["bytes"]
            if event["allowed_bytes"] < current:
                allowed += current
            current = event["allowed_bytes"]
    return received, allowed + current


def total_bytes(events: Sequence[Event], key: str) -> int:
    """`sent_bytes` or `received_bytes` of a peer, over all its processes."""
    return sum(more for _, more in grown(events, key))
