"""`farflung bench round`: seconds of one round of real peers, beside hivemind's averager and gloo.

Every peer is a process with a real engine and a real `Peer` (`bench_peer vector`). It holds one vector and
contributes again as soon as it has reported a round. A round is timed from its plan to the moment the last peer has
the mean in a tensor, agreed on and decoded, where the baselines' clocks stop, too. What follows, outer step and digest of
the state, they have nothing like: it is reported apart (`apply_s`).

The baselines run with the same number of peers, one torch thread each, in the same minutes. They neither sign,
agree on a membership, survive a death, nor (gloo) encrypt. Behind the emulated WAN there are no baselines: there the
measure is what the link itself would need for the bytes that were sent.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farflung.sims import wan as wans
from farflung.sims.baselines import BaselineResult, gloo_average, hivemind_average
from farflung.sims.bench_workers import BenchError, Worker, introduce, last_answers, workers
from farflung.sims.wan import Link

MB = 1_000_000

LEAST_ROUNDS = 3
MOST_ROUNDS = 25
ROUNDS_MB = 400
"""Rounds measured after one of warm-up, in which connections are made: as many as this many megabytes hold, within the bounds. Short ones
differ more, and cost less.
"""

WAN_LINK = Link(rate_bit_s=20e6, delay_s=0.025, loss=0.005)
"""20 Mbit/s for each peer, and between any two a round trip of 100 ms and 1 % loss."""

UP_CAP = 0.94
"""Share of the uplink that peers behind the WAN are told to use, as a person would: headers need the rest."""

WAN_PEERS = 4

ROUNDS_WITHIN_S = 900.0
"""Then something hangs; the processes are ended."""


LEAST_TIMES_HIVEMIND = 3.0
"""By how much a round on loopback is to be faster than that of hivemind's averager."""

MOST_TIMES_LINK = 1.5
"""How much longer than its bytes take on the link a round behind the WAN may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFigures:
    """Rounds of one size. All are medians over the measured rounds."""

    method: str
    codec: str
    peers: int
    mb: float
    """fp32 megabytes (1e6 bytes) of each peer's vector."""
    seconds: float
    """From the plan to the last peer that has the agreed mean in a tensor."""
    mb_per_s: float
    """fp32 megabytes averaged per second by each peer."""
    scatter_s: float
    """From the plan to the cut: encoding and sending contributions."""
    gather_s: float
    """From the cut until everybody holds every mean: reducing and sending means."""
    commit_s: float
    """From then on: votes, certificate."""
    decode_s: float
    """From then on: decoding the means, at the slowest peer."""
    apply_s: float
    """After that, not in `seconds`: outer step, digest; the slowest peer."""
    sent_mb: float
    """Encoded megabytes that a peer sent in one round; the most of any peer."""
    nmse: float
    """Squared error of the outer parameters, relative to those of exact means; the largest of any peer."""
    rounds: tuple[float, ...]
    """Seconds of each measured round."""


def measure_rounds(
    num_bytes: int,
    *,
    peers: int,
    rounds: int,
    within_s: float = ROUNDS_WITHIN_S,
    wan: wans.Wan | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundFigures:
    """Do rounds with one vector of `num_bytes` of fp32 in each peer. Raises BenchError."""
    with workers(within_s) as start:

        def launch(rank: int, contact: Sequence[str]) -> Worker:
            arguments = ["vector", "--rank", str(rank), "--peers", str(peers), "--contact", *contact]
            arguments += ["--numel", str(num_bytes // 4), "--rounds", str(rounds)]
            if wan is None:
                return start(arguments)
            arguments += ["--host", wan.hosts[rank].address, "--up-mbit", str(UP_CAP * WAN_LINK.rate_bit_s / 1e6)]
            return start(arguments, partial(wan.popen, wan.hosts[rank]))

        members, hello = introduce(launch, peers)
        progress("warm-up")
        results = last_answers(members, lambda done: progress(f"round {done} of {1 + rounds} done"))
    return _figures(num_bytes, hello["codec"], results)


def _figures(num_bytes: int, codec: str, results: Sequence[dict[str, Any]]) -> RoundFigures:
    """From what every peer saw to medians. Raises BenchError when a round was not what it should be."""
    odd = sorted({text for result in results for text in result["said"]})
    if odd:
        raise BenchError(f"the peers did not agree in peace: {'; '.join(odd)[:500]}")
    rows: list[tuple[float, ...]] = []
    for seen in zip(*(result["rounds"] for result in results), strict=True):
        if any(r["contributors"] != len(results) or r["left_out"] for r in seen):
            raise BenchError("a round went without somebody's contribution")
        if len({r["digest"] for r in seen}) != 1:
            raise BenchError("the peers hold different outer states")
        planned = min(r["planned"] for r in seen)
        cut = min(r["cut"] for r in seen)
        held = planned + seen[0]["held_s"]
        committed, averaged, applied = (max(r[when] for r in seen) for when in ("committed", "averaged", "applied"))
        sent = max(r["sent_bytes"] for r in seen) / MB
        phases = cut - planned, held - cut, committed - held, averaged - committed, applied - averaged
        rows.append((averaged - planned, *phases, sent))
    seconds, scatter, gather, commit, decode, apply, sent = (statistics.median(c) for c in zip(*rows[1:], strict=True))
    return RoundFigures(
        method="farflung",
        codec=codec,
        peers=len(results),
        mb=num_bytes / MB,
        seconds=seconds,
        mb_per_s=num_bytes / MB / seconds,
        scatter_s=scatter,
        gather_s=gather,
        commit_s=commit,
        decode_s=decode,
        apply_s=apply,
        sent_mb=sent,
        nmse=max(result["nmse"] for result in results),
        rounds=tuple(row[0] for row in rows[1:]),
    )


def rounds_of(size: int) -> int:
    """How many rounds of `size` fp32 megabytes are measured."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, ROUNDS_MB // size))


def run_round(
    *,
    as_json: bool = False,
    sizes: Sequence[int] = (16, 64, 256),
    peers: int = 8,
    wan: Sequence[int] = (16, 64, 256),
) -> list[dict[str, Any]]:
    """Measure, show each row as it is had, and return one row per figure. `sizes` and `wan`: fp32 megabytes on loopback and on the WAN.

    Raises BenchError, BaselineError.
    """
    console = Console(stderr=as_json)
    rows: list[dict[str, Any]] = []

    def had(*news: dict[str, Any]) -> None:
        rows.extend(news)
        for row in news:
            console.print(_sentence(row), highlight=False, markup=False)

    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        for size in sizes:

            def say(text: str, size: int = size) -> None:
                shown.update(task, description=f"{peers} peers on loopback, {size} MB: {text}")

            ours = measure_rounds(size * MB, peers=peers, rounds=rounds_of(size), progress=say)
            had({"where": "loopback", **asdict(ours)})
            say("hivemind's averager")
            had(_baseline_row(ours, hivemind_average(size * MB, peers=peers, rounds=rounds_of(size))))
            say("gloo")
            had(_baseline_row(ours, gloo_average(size * MB, peers=peers, rounds=rounds_of(size))))
        refused = wans.available() if wan else "not asked for"
        for size in wan if refused is None else ():

            def tell(text: str, size: int = size) -> None:
                shown.update(task, description=f"{WAN_PEERS} peers behind a WAN, {size} MB: {text}")

            with wans.emulate([WAN_LINK] * WAN_PEERS) as net:
                tell(f"carried by {net.carrier}")
                ours = measure_rounds(size * MB, peers=WAN_PEERS, rounds=rounds_of(size), wan=net, progress=tell)
            had(_wan_row(ours, net.carrier))
        if refused is not None:
            had({"where": "wan", "skipped": refused})
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        _show(rows, console)
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The goals that rows of `run_round` miss, for people."""
    said = []
    for row in rows:
        if row.get("method") == "hivemind" and row["times_slower_than_farflung"] < LEAST_TIMES_HIVEMIND:
            said.append(f"{_sentence(row)}; at least {LEAST_TIMES_HIVEMIND} is wanted")
        if row.get("times_the_link", 0.0) > MOST_TIMES_LINK:
            said.append(f"{_sentence(row)}; at most {MOST_TIMES_LINK} is wanted")
    return said


def _sentence(row: dict[str, Any]) -> str:
    """One row, for whoever waits for the others."""
    if "skipped" in row:
        return f"WAN skipped: {row['skipped']}"
    said = f"{row['where']}, {row['mb']:.0f} MB, {row['method']}: {row['seconds']:.3f} s"
    if "times_the_link" in row:
        return f"{said}, {row['times_the_link']:.2f} times what the link needs"
    if "times_slower_than_farflung" in row:
        return f"{said}, farflung is {row['times_slower_than_farflung']:.2f} times as fast"
    return said


def _baseline_row(ours: RoundFigures, baseline: BaselineResult) -> dict[str, Any]:
    return {
        "where": "loopback",
        "method": baseline.method,
        "codec": baseline.codec,
        "peers": baseline.peers,
        "mb": ours.mb,
        "seconds": baseline.seconds,
        "mb_per_s": baseline.mb_per_s,
        "setup_s": baseline.setup_seconds,
        "nmse": baseline.nmse,
        "rounds": baseline.rounds,
        "times_slower_than_farflung": baseline.seconds / ours.seconds,
        "times_slower_than_farflung_applied": baseline.seconds / (ours.seconds + ours.apply_s),
        "note": baseline.note,
    }


def _wan_row(ours: RoundFigures, carrier: str) -> dict[str, Any]:
    link_s = ours.sent_mb * MB * 8 / WAN_LINK.rate_bit_s
    return {
        "where": "wan",
        "carrier": carrier,
        **asdict(ours),
        "rate_mbit_s": WAN_LINK.rate_bit_s / 1e6,
        "link_s": link_s,
        "times_the_link": ours.seconds / link_s,
    }


def _show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    near = Table(title="One round on loopback, per peer", title_justify="left")
    for name in (
        "fp32 MB",
        "method",
        "codec",
        "seconds",
        "MB/s",
        "scatter / gather / commit / decode",
        "then apply",
        "NMSE",
    ):
        near.add_column(name, justify="left" if name in ("method", "codec") else "right")
    near.add_column("farflung is", justify="right")
    far = Table(
        title=f"One round of {WAN_PEERS} peers at {WAN_LINK.rate_bit_s / 1e6:.0f} Mbit/s, 100 ms, 1 % loss",
        title_justify="left",
    )
    for name in ("fp32 MB", "seconds", "scatter / gather / commit / decode", "MB sent", "bytes/rate", "ratio"):
        far.add_column(name, justify="right")
    notes: list[str] = []
    for row in rows:
        if "skipped" in row:
            continue
        phases = ""
        if "scatter_s" in row:
            phases = " / ".join(f"{row[f'{phase}_s']:.2f}" for phase in ("scatter", "gather", "commit", "decode"))
        if row["where"] == "wan":
            far.add_row(
                f"{row['mb']:.0f}",
                f"{row['seconds']:.2f}",
                phases,
                f"{row['sent_mb']:.1f}",
                f"{row['link_s']:.2f}",
                f"{row['times_the_link']:.2f}",
            )
            continue
        slower = row.get("times_slower_than_farflung")
        near.add_row(
            f"{row['mb']:.0f}",
            row["method"],
            row["codec"],
            f"{row['seconds']:.3f}",
            f"{row['mb_per_s']:.1f}",
            phases,
            f"{row['apply_s']:.2f}" if "apply_s" in row else "",
            f"{row['nmse']:.1e}",
            "" if slower is None else f"{slower:.2f} times as fast",
        )
        if row.get("note") and (text := f"{row['method']}: {row['note']}") not in notes:
            notes.append(text)
    if near.row_count:
        console.print(near)
    if far.row_count:
        console.print(far)
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)
