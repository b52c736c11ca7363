"""A run's report: `report.json` with its figures and `report.html`, one file that fetches nothing.

Made from a folder with the nodes' `events.jsonl` and a `run.json`, at any time after the run.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from farflung.sims.facts import RunFacts, load_events, load_run
from farflung.sims.plots import human_bytes, plot_bytes, plot_loss, plot_membership, plot_rounds
from farflung.sims.scene import Scene
from farflung.sims.summary import Events, commits_by_round, summarise, total_bytes

STYLE_SHEET = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1c1c1a; --muted: #6a6963; --grid: #e4e3de;
  --good: #1a7f4b; --bad: #c8323a;
  --series-1: #2a6fd0; --series-2: #e0662f; --series-3: #129a70; --series-4: #b98200;
  --series-5: #c94a86; --series-6: #6551c4; --series-7: #5c8a00; --series-8: #0e8fa8;
  --state-joining: #c4b3e8; --state-training: #86a9d4; --state-round: #234a75;
  --state-waiting: #e6cd87; --state-finished: #a5cbb2; }
@media (prefers-color-scheme: dark) { :root {
  --page: #151514; --card: #1f1f1d; --ink: #eeeeea; --muted: #a3a29b; --grid: #383733;
  --good: #4cc38a; --bad: #f2777c;
  --series-1: #5b9bf3; --series-2: #f08a55; --series-3: #35b98d; --series-4: #d6a11f;
  --series-5: #e57aac; --series-6: #9c8cf0; --series-7: #93b93a; --series-8: #3cb4cd;
  --state-joining: #7d6bb0; --state-training: #4a72a5; --state-round: #c7dcf5;
  --state-waiting: #8d773a; --state-finished: #4f7d63; } }
@media (max-width: 800px) { .tiles { grid-template-columns: repeat(2, 1fr) !important; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 12px; } .note { color: var(--muted); }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin-top: 20px; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 23px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; display: block; line-height: 1.4; }
.good b { color: var(--good); } .bad b { color: var(--bad); }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .number { text-align: right; }
pre { white-space: pre-wrap; margin: 8px 0 0; padding: 12px 14px; border-radius: 8px; background: var(--page);
  font-size: 13px; overflow-x: auto; }
table.narrow { width: auto; }
summary { cursor: pointer; color: var(--muted); } details table { margin-top: 8px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
"""


def report_folder(folder: Path) -> dict[str, Any]:
    """Write the report of `folder` (event files at any depth, and `run.json`) into it; returns the figures.

    Raises ConfigError for damaged or missing files.
    """
    return write_report(folder, load_events(folder.rglob("events.jsonl")), load_run(folder / "run.json"))


def write_report(out: Path, events_by_peer: Events, run: RunFacts) -> dict[str, Any]:
    """Write `report.json` and `report.html` into `out`; returns the figures (`summarise`)."""
    out.mkdir(parents=True, exist_ok=True)
    figures = summarise(events_by_peer, run)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    (out / "report.html").write_text(render_html(figures, events_by_peer, run), encoding="utf-8")
    return figures


def render_html(figures: Mapping[str, Any], events_by_peer: Events, run: RunFacts) -> str:
    """The page. Everything that came from nodes is escaped."""
    scene = Scene(events=events_by_peer, run=run)
    missed: list[dict[str, Any]] = figures["rounds_missed"]
    letters = reason_letters(missed)
    lettered: dict[int, str] = {}
    for one in missed:
        known = lettered.get(one["round"], "")
        letter = letters[one["reason"]]
        lettered[one["round"]] = known if letter in known else known + letter
    sections = [
        _section(
            "Loss",
            "The swarm's outer parameters on text held out from training, beside one worker that trained alone, on "
            "the same text. Thin lines: training loss of each peer, smoothed.",
            plot_loss(scene),
        ),
        _section(
            "Bytes",
            "What each peer sent in the whole run: contributions, means, and state for newcomers (heartbeats and votes "
            "are not counted), beside what data-parallel training with the same number of steps sends per worker.",
            plot_bytes(scene),
        ),
        _section("Who was there", "What every peer did, second by second.", plot_membership(scene)),
        _section(
            "Rounds",
            "How long each round took, from the plan to the commit, at the slowest peer.",
            plot_rounds(scene, lettered) + _missed_table(missed, letters) + _rounds_table(scene),
        ),
        _section("Peers", "", _peers_table(scene)),
    ]
    if run.sample_text:
        said = f"<pre>{escape(run.sample_text)}</pre>"
        sections.append(_section("What the model writes", "A sample from the exported model.", said))
    note = f'<p class="note">{escape(run.description)}</p>' if run.description else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>farflung: {escape(run.name)}</title><style>{STYLE_SHEET}</style></head><body><main>\n"
        f"<h1>Swarm {escape(run.name)}</h1>{note}{_tiles(figures)}\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


def reason_letters(missed: list[dict[str, Any]]) -> dict[str, str]:
    """A letter for each distinct reason, in the order of first appearance: a, b, … z, a1, b1, …"""
    letters: dict[str, str] = {}
    for one in missed:
        number = len(letters)
        suffix = str(number // 26) if number >= 26 else ""
        letters.setdefault(one["reason"], chr(ord("a") + number % 26) + suffix)
    return letters


def _section(title: str, note: str, body: str) -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def _tiles(figures: Mapping[str, Any]) -> str:
    outer, solo = figures["outer_loss"], figures["solo_loss"]
    sent, baseline = figures["bytes_sent_per_peer"], figures["ddp_bytes_per_peer"]
    most = max(sent.values(), default=0)
    broken = figures["invariants_broken"]
    left_out = figures["left_out"]
    twice, lost = figures["samples_trained_twice"], figures["samples_lost"]
    tiles = [
        (
            f"{outer:.3f}" if outer is not None else "none",
            f"outer held-out loss; one worker alone: {solo:.3f}" if solo is not None else "outer held-out loss",
            "" if outer is None or solo is None else "good" if outer < solo else "bad",
        ),
        (
            f"{baseline / most:,.0f} times less" if most and baseline else "none",
            f"sent by the busiest peer ({human_bytes(most)}) than data-parallel would ({human_bytes(baseline)})",
            "",
        ),
        (
            " / ".join(f"{bits:.2f}" for bits in figures["bits_per_parameter"].values()) or "none",
            "bits per parameter sent, up / down; fp32 has 32"
            + (f"; {left_out:.2f} of an update kept for later" if left_out is not None else ""),
            "",
        ),
        (
            f"{figures['rounds_committed']}",
            f"rounds committed; {len(figures['rounds_missed'])} times a peer missed one",
            "",
        ),
        (
            "equal" if figures["digests_equal"] else "DIFFERENT",
            "bits of the model on all peers, at each version",
            "good" if figures["digests_equal"] else "bad",
        ),
        (
            f"{twice:,} / {lost:,}",
            "samples trained twice / lost",
            "good" if twice == lost == 0 else "bad",
        ),
        (
            f"{figures['peers_killed']} / {figures['peers_joined']}",
            "peers killed / joined on the way",
            "",
        ),
        (f"{figures['seconds']:,.0f} s", "from the first node to the end", ""),
        (
            "all hold" if not broken else f"{len(broken)} broken",
            "invariants" if not broken else "; ".join(f"{b['peer']}: {b['which']}: {b['detail']}" for b in broken),
            "good" if not broken else "bad",
        ),
    ]
    cells = (
        f'<div class="tile {kind}"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small, kind in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _missed_table(missed: list[dict[str, Any]], letters: Mapping[str, str]) -> str:
    if not missed:
        return '<p class="note">No peer missed a round.</p>'
    rows = [[letters[one["reason"]], str(one["round"]), one["peer"], one["reason"]] for one in missed]
    return _table(["", "missed round", "by", "because"], rows, numbers={1}, narrow=True)


def _rounds_table(scene: Scene) -> str:
    rows = []
    for number, event in commits_by_round(scene.events).items():
        who = ", ".join(scene.names.get(peer, peer[:12]) for peer in event["contributors"])
        tokens = sum(event["contributors"].values())
        left_out = str(event["parts_left_out"] or "")
        rows.append([str(number), f"{event['seconds']:.1f}", who, f"{tokens:,}", left_out, event["digest"][:12]])
    headings = ["round", "seconds", "contributors", "tokens", "parts left out", "digest"]
    return f"<details><summary>All rounds</summary>{_table(headings, rows, numbers={0, 1, 3})}</details>"


def _peers_table(scene: Scene) -> str:
    roles = {facts.peer: facts.role for facts in scene.run.peers}
    rows = []
    for peer in scene.peers:
        events = scene.events.get(peer, ())
        steps, commits = scene.of(peer, "step"), scene.of(peer, "round.commit")
        variable = f"--series-{scene.peers.index(peer) + 1}" if scene.peers.index(peer) < 8 else "--muted"
        dot = f'<span class="dot" style="background: var({variable})"></span>'
        rows.append(
            [
                dot + escape(scene.names[peer]),
                escape(roles.get(peer, "")),
                escape(peer[:12]),
                f"{len(steps):,}",
                f"{sum(event['tokens'] for event in steps):,}",
                f"{sum(bool(event['contributed']) for event in commits)} of {len(commits)}",
                str(len(scene.of(peer, "round.missed"))),
                human_bytes(total_bytes(events, "sent_bytes")),
                human_bytes(total_bytes(events, "received_bytes")),
            ]
        )
    headings = ["peer", "role", "key", "steps", "tokens", "rounds contributed", "missed", "sent", "received"]
    return _table(headings, rows, numbers={3, 4, 5, 6, 7, 8}, escaped=True)


def _table(
    headings: list[str],
    rows: list[list[str]],
    *,
    numbers: set[int],
    escaped: bool = False,
    narrow: bool = False,
) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<{tag}{kind}>{text if escaped else escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows
    )
    width = ' class="narrow"' if narrow else ""
    return f'<div class="scroll"><table{width}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
