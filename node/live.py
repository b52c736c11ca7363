"""A running node on the terminal: one panel that follows its events, or plain lines where there is no
terminal, or one that cannot redraw.

Driven by the events alone (the node's own log, or the control socket's stream), so it needs no timer: a node
says at least `net` every few seconds. Words are torchtitan's: step, loss, grad_norm, tokens/s.
"""

import math
import time
from collections.abc import AsyncIterable
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from farflung.node.events import rendered
from farflung.node.outlet import until_room
from farflung.node.status import BegunAnew, NodeStatus

REDRAW_S = 0.25
"""Shortest time between two redraws of the panel."""

PLAIN_STEP_S = 10.0
"""Shortest time between two `step` lines where output is plain; rounds and changes of state are always
printed.
"""

PLAIN_REFUSED_S = 60.0
"""Shortest time between two lines of one kind of refusal there; others decide how many there are."""

BARS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "training": "green",
    "round": "cyan",
    "ready": "cyan",
    "finished": "bold green",
    "stopped": "red",
}


def redraws(console: Console) -> bool:
    """Whether a picture can be drawn over the last one; a dumb terminal would show nothing of it."""
    return console.is_terminal and not console.is_dumb_terminal


async def show(events: AsyncIterable[dict[str, Any]], status: NodeStatus, console: Console) -> None:
    """Fold `events` into `status` and show it until they end. Cancel to stop earlier; the panel stays on the
    screen.
    """
    if not redraws(console):
        await _show_lines(events, status, console)
        return
    drawn = 0.0
    with Live(panel(status), console=console, auto_refresh=False) as live:
        try:
            async for event in events:
                status.apply(event)
                if time.monotonic() - drawn >= REDRAW_S:
                    live.update(panel(status), refresh=True)
                    drawn = time.monotonic()
        finally:
            live.update(panel(status), refresh=True)


async def show_json(events: AsyncIterable[dict[str, Any]], out: TextIO) -> None:
    """Write `events` until they end, a line of JSON each. Whoever reads too slowly is told how many were left out (`log.skipped`)."""
    async for event in events:
        await until_room(out)
        out.write(rendered(event) + "\n")
        out.flush()


async def _show_lines(events: AsyncIterable[dict[str, Any]], status: NodeStatus, console: Console) -> None:
    said = dict[str, float]()  # what is told now and then, and when it last was
    async for event in events:
        status.apply(event)
        now = time.monotonic()  # the wall clock may be set
        match event["event"]:
            case "step":
                what, pause = "step", PLAIN_STEP_S
            case "refused":
                what, pause = f"refused {event['error']}", PLAIN_REFUSED_S
            case _:
                what, pause = "", 0.0
        if now - said.get(what, -math.inf) < pause:
            continue
        text = line(event)
        if text is not None:
            said[what] = now
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def headline(status: NodeStatus) -> Text:
    """One line of truth: what the node does, where in the run, and why if it waits."""
    step = f"{status.step:,}"
    if status.total_steps:  # a step that was under way beside the last round goes beyond them
        step = f"{min(status.step, status.total_steps):,}/{status.total_steps:,}"
    text = Text()
    text.append(status.state, style=STATE_STYLES.get(status.state, "yellow"))
    text.append(f" · step {step} · round {status.round:,}")
    if status.phase:
        text.append(f" ({status.phase})")
    if status.reason:
        text.append(f" · {status.reason}", style="dim")
    return text


def panel(status: NodeStatus) -> Panel:
    """The node as a bordered block: also what `farflung status` prints."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")  # a folder that is to be made room in is named whole
    unseen = bool(status.stage) and status.loss is None  # only data nodes see it
    if unseen:
        loss = f"seen by stage 0, this is stage {status.stage}"
    else:
        loss = _number(status.loss, ".3f") if status.tokens else "none yet"
    if status.outer_loss is not None:
        loss += f" · outer, held-out {status.outer_loss:.3f} after round {status.outer_version}"
    elif status.outer_few_loss is not None:
        loss += f" · outer, of a few held-out samples {status.outer_few_loss:.3f}"
    facts.add_row("loss", Text.assemble(loss, "  ", (sparkline(status.recent_losses), "green")))
    facts.add_row("speed", f"{status.tokens_per_s:,.0f} tokens/s · {status.tokens:,} tokens trained here")
    rounds = f"{status.rounds_contributed:,} of {status.rounds_done:,} rounds carry this node's work"
    if status.last_round_s:
        rounds += f" · last took {status.last_round_s:.1f} s"
    facts.add_row("rounds", rounds)
    if status.stage is not None:
        facts.add_row("pipeline", _pipeline(status))
    if status.joined:
        facts.add_row("joined", Text(status.joined))
    if status.recovered:
        said = "\n".join(_recovered(one, status.peer) for one in status.recovered)
        facts.add_row("begun anew", Text(said))
    if status.trial:
        facts.add_row("trial", Text(status.trial))
    if status.shadow_bytes or status.copies:
        facts.add_row("shadows", _shadows(status))
    if status.no_place:
        facts.add_row("copies", Text("; ".join(status.no_place), style="yellow"))
    if status.alarm:
        facts.add_row("alarm", Text(_alarm(status.alarm), style="bold red"))
    for what, why in status.disk_full.items():
        facts.add_row("alarm", Text(_full(what, why), style="bold red"))
    if status.log_full:
        facts.add_row(
            "alarm", Text(f"{status.log_full} ({_lines(status.lines_unwritten)} lost so far)", style="bold red")
        )
    elif status.lines_unwritten:
        facts.add_row("log", Text(f"lacks {_lines(status.lines_unwritten)}: the disk was full", style="yellow"))
    if status.lost:
        who = "other stages" if status.stage == 0 else "data nodes"
        facts.add_row("lost", Text(f"{status.lost}, or the {who} begin the stage anew", style="bold red"))
    if status.group or status.met:
        name = f"group {status.group[:12]}" if status.group else "the first group"
        facts.add_row("group", f"{status.group_members} members of {name} · has met another {status.met:,} times")
    if status.owed is not None:
        facts.add_row("feedback", f"{status.owed:.2f} of the last update's norm was kept for later rounds")
    if status.next_sync_s is not None:
        facts.add_row("next sync", f"in {duration(status.next_sync_s)}")
    if status.last_missed is not None:
        missed = f"{status.rounds_missed:,} · last: round {status.last_missed.round}: {status.last_missed.reason}"
        facts.add_row("missed", Text(missed, style="yellow"))
    if status.refused:
        facts.add_row("refused", Text(f"{status.refused:,} · last: {status.last_refused}", style="yellow"))
    if status.synced_chunks < status.chunks:
        facts.add_row("state", f"{status.synced_chunks:,} of {status.chunks:,} chunks received")
    facts.add_row(
        "network",
        f"{_others(status.peers)} · up {size(status.sent_bytes)} · down {size(status.received_bytes)}",
    )
    if status.started:
        up = f"{status.device or 'unknown device'} · up for {duration(status.time - status.started)}"
    else:
        up = "not up yet"
    facts.add_row("node", f"{status.peer[:12]} · {up}")
    title = Text(f"farflung · {status.swarm}", style="bold")
    return Panel(Group(headline(status), Text(), facts), title=title, title_align="left", expand=False)


def line(event: dict[str, Any]) -> str | None:
    """One event as one plain line, or None for what only fills a log."""
    at = time.strftime("%H:%M:%S", time.localtime(event["time"])) if "time" in event else "--:--:--"
    match event["event"]:
        case "kernels" if not event["native"]:
            said = f"no C kernels, so codecs are slower (trellis some hundred times): {event['reason']}"
        case "node.start":
            said = f"node {event['peer'][:12]} on {event['device']}" + (", resumed" if event["resumed"] else "")
        case "node.stop":
            said = f"stopped: {event['reason']}"
        case "node.failed":
            said = f"failed: {event['reason']}"
        case "node.state":
            said = event["state"] + (f": {event['reason']}" if event["reason"] else "")
        case "step":
            loss = "" if event["loss"] is None else f"  loss {event['loss']:.4f}"
            said = (
                f"step {event['step']}{loss}"
                f"  grad_norm {_number(event['grad_norm'], '.3f')}  {event['tokens_per_s']:,.0f} tokens/s"
            )
        case "round.commit":
            said = (
                f"round {event['round']} committed in {event['seconds']:.1f} s with "
                f"{len(event['contributors'])} contributors, sent {size(event['sent_bytes'])}, received {size(event['received_bytes'])}, "
                f"bits per parameter {event['up_bits']:.2f} up and {event['down_bits']:.2f} down"
            )
            if event["owed"] is not None:
                said += f", {event['owed']:.2f} of our update's norm kept for later"
        case "round.missed":
            said = f"round {event['round']} missed: {event['reason']}"
        case "group.divided":
            said = f"the group was full and is two now: this node is one of {len(event['view'])}, {len(event['others'])} are in the other"
        case "stage.alarm":
            said = f"ALARM: {_alarm(event['replicas'])}" if event["replicas"] else "every stage has two peers or more"
        case "stage.lost" if event["reason"]:
            said = (
                f"stage {event['stage']} is lost: {event['reason']}, or the "
                f"{'data nodes' if event['stage'] else 'other stages'} begin it anew with what is left"
            )
        case "stage.lost":
            said = f"stage {event['stage']} has a quorum again"
        case "stage.trial":
            said = event["reason"]
        case "stage.join":
            said = f"joins {event['reason']}"
        case "stage.anew":
            said = (
                f"stage {event['stage']} was lost and is begun anew by {event['founder'][:12]} (life {event['life']})"
            )
        case "stage.call":
            said = f"stage {event['of']} is lost: our stage calls {event['founder'][:12]} to begin it anew (life {event['life']})"
        case "stage.recovery":
            said = f"this node begins stage {event['stage']} anew (life {event['life']}): {event['reason']}"
        case "shadow.given":
            said = f"{event['to'][:12]}, who begins stage {event['stage']} anew, has fetched this node's copy of step {event['of_step']:,}"
        case "stage.waits":
            said = f"stage {event['stage']} waits: {event['reason']}"
        case "outer.skipped":
            said = f"no evaluation this time: {event['reason']}"
        case "stage.unfitted":
            said = f"stage {event['stage']} is not fitted to what its neighbours remember: {event['reason']}"
        case "stage.unmade":
            said = f"no {event['rung']} after all: {event['reason']}"
        case "shadow.missing":
            said = (
                "; ".join(event["reasons"]) if event["reasons"] else "every stage that needs a copy has a place for one"
            )
        case "stage.made":
            said = (
                f"stage {event['stage']} is made: {event['rung']}, {event['bytes']:,} bytes in {event['seconds']:.1f} s"
            )
            if event["misfit"] is not None:
                said += f"; its error is {event['misfit']:.2f} of that without it"
            if event["ends"]:
                said += f"; embedding and head: {event['ends']}"
        case "stage.move":
            said = f"about to move to stage {event['to']}: {event['reason']}"
        case "stage.stay":
            said = f"does not move to stage {event['to']}: {event['reason']}"
        case "outer.eval":
            loss = event["few_loss"] if event["loss"] is None else event["loss"]
            said = f"outer loss of {event['samples']} held-out samples {_number(loss, '.4f')} after {event['tokens']:,} tokens"
        case "peer.suspect" | "peer.dead" | "peer.left":
            said = f"peer {event['of'][:12]} {event['event'].removeprefix('peer.')}: {event['reason']}"
        case "refused":
            said = f"refused: {event['reason']} ({event['of'][:12] or 'nobody knows whose'})"
        case "state.sync":
            said = f"state: {event['chunks_done']} of {event['chunks']} chunks"
        case "link.slow":
            said = f"ALARM: {event['reason']}"
        case "step.diverged":
            said = f"began again from the outer parameters: {event['reason']}"
        case "step.dropped":
            said = f"its part of a step is left out: {event['reason']}"
        case "progress.dropped":
            said = f"{event['steps']} steps dropped: {event['reason']}"
        case "invariant.broken":
            said = f"INVARIANT {event['which']} BROKEN: {event['detail']}"
        case "disk.full" if event["reason"]:
            said = f"ALARM: {_full(event['what'], event['reason'])}"
        case "disk.full":
            said = f"the disk takes {event['what']} again"
        case "log.full":
            said = f"ALARM: {event['reason']}; the node goes on" + (
                f" ({_lines(event['count'])} lost so far)" if event["count"] else ""
            )
        case "log.unwritten":
            since = time.strftime("%H:%M:%S", time.localtime(event["since"]))
            said = f"the log can be written again, and lacks {_lines(event['count'])} since {since}"
        case "log.skipped":
            said = f"({event['count']} events not shown)"
        case _:
            return None
    return f"{at} {said}"


def _pipeline(status: NodeStatus) -> str:
    """Which stage it serves, who is there, and how the last step went."""
    said = f"stage {status.stage}"
    if status.stage_peers:
        said += f" of {len(status.stage_peers)} · {_staff(status.stage_peers)}"
    if status.coordinator:
        planner = "this node" if status.coordinator == status.peer else status.coordinator[:12]
        said += f" · last step took {status.last_step_s:.1f} s, planned by {planner}"
    if status.visits_lost:
        said += f" · {status.visits_lost:,} visits lost"
    return said


def _staff(counts: list[int]) -> str:
    """How many serve each stage; that nobody serves one is said in words."""
    empty = [str(stage) for stage, count in enumerate(counts) if not count]
    if not empty:
        return f"{' + '.join(map(str, counts))} peers"
    there = "no other peer than this one" if sum(counts) == 1 else f"{sum(counts)} peers"
    return f"{there}: nobody serves stage{'s' * (len(empty) > 1)} {_listed(empty)}"


def _listed(items: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def _recovered(one: BegunAnew, me: str) -> str:
    """How a lost stage came back, as far as a node knows."""
    founder = "this node" if one.founder == me else one.founder[:12]
    said = f"stage {one.stage} lost, begun anew by {founder} (life {one.life})"
    if one.failed:
        said += f", not made of {', nor '.join(one.failed)}"
    if one.copy_step is not None:
        said += f", who has fetched this node's copy of step {one.copy_step:,}"
    if one.rung:
        said += f", made of: {one.rung}"
    if one.misfit is not None:
        said += f" (its error is {one.misfit:.2f} of that without it)"
    if one.ends:
        said += f", embedding and head: {one.ends}"
    return f"{said} · {one.reason}" if one.reason else said


def _shadows(status: NodeStatus) -> str:
    """Which copies of other stages are here, and the bytes of all that were."""
    held = ", ".join(f"stage {copy.stage} as of step {copy.step:,}" for copy in status.copies) or "none here now"
    allowed = f"{status.shadow_budget_bytes / 1e6:,.1f} MB allowed"
    return f"{held} · {status.shadow_bytes / 1e6:,.1f} MB of other stages fetched · {allowed}"


def _alarm(replicas: dict[str, int]) -> str:
    """Which stages could be lost, for people."""
    few = [f"stage {stage} has {'one peer only' if count else 'no peer'}" for stage, count in sorted(replicas.items())]
    return f"{' · '.join(few)}: invite another" if few else ""


def _full(what: str, why: str) -> str:
    return f"{why}; {what} wait for that"


def _others(count: int) -> str:
    return "no other peer" if not count else f"{count:,} peer{'s' * (count > 1)}"


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as bars between their own least and greatest."""
    shown = values[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000: `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people: `42 s`, `3 min 20 s`, `5 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
