"""What commands ask of running nodes, over the control socket: which node is meant, and its typed answers."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from farflung.node.control import Answer, NoNode, request, runs, stream
from farflung.node.events import last_life
from farflung.node.live import show, show_json
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.status import FreshInvitation, LedgerStatus, NodeStatus, PeerStatus, SampleStop
from farflung.protocol.errors import ConfigError, LocalError


async def running_statuses(name: str | None, home: Path | None) -> tuple[list[NodeStatus], list[LocalError]]:
    """Status of the named swarm's node, or of every node that runs here; and of those that do not answer, why.

    Raises as `the_running` does where there is none to ask.
    """
    running = _running(home) if name is None else []
    meant = running or [the_running(name, home)]
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_status_or_why(swarm)) for swarm in meant]
    answers = [task.result() for task in asked]
    return (
        [one for one in answers if isinstance(one, NodeStatus)],
        [one for one in answers if isinstance(one, LocalError)],
    )


async def known_peers(name: str | None, home: Path | None) -> list[PeerStatus]:
    """All peers that a node knows, itself included. Raises as `the_running` and `request` do."""
    reply = await _ask(the_running(name, home), "peers")
    return msgspec.convert(reply["peers"], list[PeerStatus])


async def asked_ledger(name: str | None, home: Path | None, sample: int | None) -> LedgerStatus:
    """Which sample belongs to whom, as a node knows it. Raises as `known_peers` does, and ControlError when it cannot know."""
    return msgspec.convert(await _ask(the_running(name, home), "ledger", sample=sample), LedgerStatus)


async def fresh_invitation(name: str | None, home: Path | None) -> FreshInvitation:
    """An invitation by a running node, which knows who is where. Raises as `known_peers` does, and ControlError
    when this machine may not invite.
    """
    return msgspec.convert(await _ask(the_running(name, home), "invitation"), FreshInvitation)


async def leave_swarm(name: str | None, home: Path | None, *, timeout_s: float) -> str:
    """Make a node leave and wait until it has saved; what it says at the end. Raises as `known_peers` does."""
    reply = await _ask(the_running(name, home), "leave", timeout_s=timeout_s)
    return str(reply["reason"])


async def follow(name: str | None, home: Path | None, *, as_json: bool) -> None:
    """Show a node's events until it ends, in words or as lines of JSON. Raises as `known_peers` does."""
    swarm = the_running(name, home)
    if as_json:
        await show_json(stream(swarm, "events"), sys.stdout)
        return
    await show(stream(swarm, "events"), await _status(swarm), Console())


def the_running(name: str | None, home: Path | None) -> SwarmPaths:
    """The swarm that is meant: the named one, else the only one with a node here, else the only one known.

    Raises NoNode when none runs and several are known, ConfigError when no swarm is known or several nodes run.
    """
    paths = resolve_paths(home)
    running = _running(home) if name is None else []
    if len(running) == 1:
        return running[0]
    if name is None and not running and len(known := paths.swarms()) > 1:
        listed = ", ".join(f"{swarm.name} ({swarm.hash_hex[:12]})" for swarm in known)
        raise NoNode(f"no node runs here; start one with `farflung join NAME`: {listed}")
    return paths.find_swarm(name)


def ledger_lines(told: LedgerStatus) -> list[str]:
    """The ledger in words: the epoch, and where the samples are that it has handed out."""
    lines = [
        f"swarm {told.swarm}, commit {told.height}: epoch {told.epoch}, {told.epoch_handed_out:,} of {told.num_samples:,} samples "
        f"handed out, {told.epoch_trained:,} trained"
    ]
    if told.earlier_left:
        lines.append(f"of earlier epochs {told.earlier_left:,} are not trained yet")
    lines += [f"{one.peer[:12]} holds {one.samples:,}: {_numbers(one.intervals)}" for one in told.held if one.samples]
    lines += [
        f"{one.peer[:12]} is gone, its {one.samples:,} are kept for it until version {one.until_version}: {_numbers(one.intervals)}"
        for one in told.suspended
    ]
    if told.free:
        lines.append(f"free, to be handed out next: {_numbers(told.free)}")
    since = f"trained since commit {told.since_height}, the oldest kept here: "
    lines.append(since + (", ".join(f"{num:,} by {who[:12]}" for who, num in told.trained_by.items()) or "none"))
    return lines


def sample_lines(told: LedgerStatus) -> list[str]:
    """Where the sample has been that was asked about; nothing when none was."""
    if told.sample is None:
        return []
    first = told.sample.stops[0].height
    return [
        f"sample {told.sample.number:,}, of epoch {told.sample.epoch}",
        *(
            f"  {'by' if one.height == first else 'since'} commit {one.height}: {_stop(one)}"
            for one in told.sample.stops
        ),
    ]


def _stop(one: SampleStop) -> str:
    who = "somebody: who, is not known here any more" if one.peer is None else one.peer[:12]
    said = {
        "ahead": "not handed out",
        "held": f"held by {who}",
        "suspended": f"kept for {who}, which is gone",
        "free": "free, to be handed out again",
        "trained": f"trained by {who}",
    }
    return said[one.state]


def _numbers(intervals: list[tuple[int, int]]) -> str:
    return ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in intervals)


async def _status(swarm: SwarmPaths) -> NodeStatus:
    return msgspec.convert(await _ask(swarm, "status"), NodeStatus)


async def _status_or_why(swarm: SwarmPaths) -> NodeStatus | LocalError:
    """Nodes that answer are shown, whatever has become of the others."""
    try:
        return await _status(swarm)
    except LocalError as error:
        return error


async def _ask(swarm: SwarmPaths, verb: str, **arguments: Any) -> Answer:
    try:
        return await request(swarm, verb, **arguments)
    except NoNode as error:
        raise NoNode(f"{error}{_how_it_ended(swarm)}") from error


def _how_it_ended(swarm: SwarmPaths) -> str:
    """Of the last node of a swarm that ran here, by its log."""
    try:
        life = last_life(swarm.events)
    except ConfigError as error:
        return f". How the last one ended is not known: {error}"
    if life is None:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(life.at))
    if life.end is not None:
        how = "stopped" if life.end["event"] == "node.stop" else "failed"
        return f". The last one {how} on {at}: {life.end.get('reason', 'it does not say why')}"
    return (
        f". The last one did not stop, but was killed, or lost power after {at}, when it wrote its last event; it goes on from its last "
        "checkpoint"
    )


def _running(home: Path | None) -> list[SwarmPaths]:
    return [swarm for swarm in resolve_paths(home).swarms() if runs(swarm)]
