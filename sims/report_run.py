"""What a report says of one run: the verdict, its figures, its pictures, its tables."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from farflung.sims import markup
from farflung.sims.audit import counted
from farflung.sims.incidents import count_things
from farflung.sims.logs import chain_of
from farflung.sims.markup import Markup, text
from farflung.sims.plots import human_bytes, plot_bytes, plot_losses, plot_rounds, short_number
from farflung.sims.plots_time import plot_gantt, plot_membership
from farflung.sims.report_incidents import list_things
from farflung.sims.report_pipeline import pipeline_sections, pipeline_tiles
from farflung.sims.scene import Scene
from farflung.sims.spans import USES
from farflung.sims.summary import Round, checked, commits_by_round, copies_bytes, not_better, total_bytes, violations
from farflung.sims.svg import SERIES

USE_LABELS = {
    "train": "training steps",
    "apply": "outer steps, evaluations",
    "join": "joining",
    "round": "in a round, not computing",
    "pause": "stopped from outside",
    "wait": "waiting",
}

WORK_LABELS = (
    ("train", "inner steps"),
    ("apply", "outer step"),
    ("evaluate", "evaluation"),
    ("download", "download of the state"),
    ("send", "round: sending"),
    ("collect", "round: waiting for others' contributions"),
    ("average", "round: averaging"),
    ("vote", "round: vote"),
)

MOST_MISSED = 40
"""Missed rounds that are listed one by one; all are counted by reason."""

MOST_ROUNDS = 200
"""Rounds that are listed from the first on, and as many to the last."""

CHECKED_NOTE = (
    "What the nodes' logs were compared for. The mean itself (4), the votes (5), microbatches (7) and limits (8) leave no trace in "
    "them: what is not listed here is not claimed. Simulations judge those."
)

BITS = {True: ("equal", "good"), False: ("DIFFERENT", "bad"), None: ("not compared", "")}
"""What a tile says of `digests_equal`, and how it looks."""

COPIES_NOTE = (
    "Copies are of other stages, in case they lose all their peers. The first one of a stage of which nobody else has any may overdraw what is allowed, and is "
    "paid back by those that follow."
)

MOST_PEERS = 60
"""Rows of the table of peers: those that trained most."""


def run_summary(scene: Scene) -> Markup:
    """The verdict, what it rests on, and the figures."""
    return Markup(_verdict(scene) + markup.tiles(_tiles(scene.figures)))


def run_sections(scene: Scene) -> list[Markup]:
    """The rest of the page."""
    figures = scene.figures
    missed: list[dict[str, Any]] = figures["rounds_missed"]
    letters = reason_letters(missed)
    sections = []
    if scene.has_losses:
        sections.append(
            markup.section("Loss", _loss_note(scene), markup.figures(plot_losses([scene])), _loss_legend(scene))
        )
    sections += pipeline_sections(scene)
    sections += [
        markup.section(
            "How peers spent their time",
            "Shares of the time in which they were there, for each class of machines. Training is what they are there for.",
            utilisation_table({scene.label: figures}),
            markup.legend([(f"--use-{use}", USE_LABELS[use]) for use in uses_of([figures])]),
        ),
        markup.section(
            "Who was there",
            "What peers did when, and what was done to them.",
            markup.wide(plot_membership(scene)),
            list_things(scene),
        ),
        markup.section(
            "Where time went",
            "A window of the run. Each peer has two lanes: above what it computed, below the phases of its rounds. Dashed lines are "
            "commits, when the first peer had applied them.",
            markup.wide(plot_gantt(scene)),
            markup.legend([(f"--work-{what}", said) for what, said in WORK_LABELS]),
        ),
        markup.section(
            "Rounds",
            "How long each round took, from the plan until all members held all means, as its proposer saw it. The vote comes after that.",
            markup.wide(plot_rounds(scene, letters_by_round(missed, letters))),
            _missed_table(missed, letters),
            _rounds_table(scene),
        ),
        markup.section("Bytes", _bytes_note(scene), markup.wide(plot_bytes(scene))),
        markup.section("Peers", "", _peers_table(scene)),
        markup.section("Invariants", CHECKED_NOTE, _checks_table(figures), _refused_table(figures["refused"])),
    ]
    if samples := scene.run.samples:
        said = Markup("".join(f"<pre>{text(sample)}</pre>" for sample in samples))
        sections.append(markup.section("What the model writes", "Samples from the exported model.", said))
    return sections


def _verdict(scene: Scene) -> Markup:
    figures = scene.figures
    broken = violations(figures)
    headline = f"Invariants broken: {len(broken)}." if broken else "No invariant that was checked is broken."
    if not figures["rounds_committed"]:
        headline = f"No round was committed. {headline}"
    unmet = unmet_of(figures)
    if unmet:
        headline += " Not what was expected."
    elif figures["expected"]:
        headline += f" All that was expected was met: {', '.join(one['what'] for one in figures['expected'])}."
    why = "nobody kept the ledger" if scene.run.ledger is None else "the logs lack rounds"
    unknown = f" Whether samples were lost is not known: {why}." if figures["samples_lost"] is None else ""
    missed, done = len(figures["rounds_missed"]), count_things(scene.run)
    said = (
        f"{counted(figures['peers'], 'peer')} trained {short_number(figures['tokens_committed'])} tokens in "
        f"{counted(figures['rounds_committed'], 'round')} and {duration(scene.seconds)}; {figures['peers_killed'] or 'none'} killed, "
        f"{figures['peers_joined'] or 'none'} joined on the way{done and f'; {done}'}. "
        + (
            f"{counted(missed, 'time')} a peer missed a round; the reasons are below."
            if missed
            else "No peer missed a round."
        )
        + unknown
        + f" {sentence(checked(figures))}"
    )
    found = [said for said in (not_better(figures), _begin_late(figures), _unwritten(figures)) if said]
    return markup.verdict(headline, said, [*broken, *unmet, *found])


def _begin_late(figures: Mapping[str, Any]) -> str:
    """What is to be said where a log was full more than once; empty where all are whole."""
    late = [f"{name} (from {duration(seconds)} on)" for name, seconds in figures["begin_late"].items()]
    if not late:
        return ""
    return f"The beginning of {counted(len(late), 'log')} is missing; all that is told here is of the rest: {_first_of(late)}."


def _unwritten(figures: Mapping[str, Any]) -> str:
    """What is to be said where a disk was full for a while."""
    lacking = [
        f"{name} ({counted(lines, 'line')}, between {duration(since)} and {duration(until)})"
        for name, (lines, since, until) in figures["unwritten"].items()
    ]
    if not lacking:
        return ""
    return f"A full disk did not take lines of {counted(len(lacking), 'log')}; all that is told here is of the rest: {_first_of(lacking)}."


def _first_of(named: list[str]) -> str:
    return ", ".join(named[:MOST_MISSED]) + (", and others" if len(named) > MOST_MISSED else "")


def sentence(said: str) -> str:
    """With a capital letter and a full stop."""
    return f"{said[0].upper()}{said[1:]}."


def _checks_table(figures: Mapping[str, Any]) -> Markup:
    """What was compared, and what came of it."""
    found = Counter(broken["which"] for broken in figures["invariants_broken"])
    rows = [
        [
            text(str(one["which"])),
            text(one["name"]),
            text(one["what"]),
            text("BROKEN" if found[one["which"]] else "held"),
        ]
        for one in sorted(figures["checked"], key=lambda one: int(one["which"]))
    ]
    return markup.table(["", "invariant", "compared", ""], rows, numbers=frozenset({0}))


def _refused_table(refused: list[dict[str, Any]]) -> Markup:
    if not refused:
        return markup.note("Nobody refused a message but for being late or repeated.")
    rows = [
        [text(one["peer"]), text(one["of"]), text(f"{one['times']:,}"), text(f"{one['error']}: {one['reason']}")]
        for one in refused[:MOST_MISSED]
    ]
    shown = f"Refused, other than for being late or repeated{'' if len(rows) == len(refused) else f': the first {MOST_MISSED} of {len(refused)} kinds'}."
    return Markup(markup.note(shown) + markup.table(["by", "of", "times", "because"], rows, numbers=frozenset({2})))


def unmet_of(figures: Mapping[str, Any]) -> list[str]:
    """What was expected and did not come, a sentence each."""
    return [f"Expected {one['what']}, got {one['got']}." for one in figures["expected"] if not one["met"]]


def _tiles(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    outer, solo = figures["outer_loss"], figures["solo_loss"]
    sent, baseline = figures["bytes_sent_per_peer"], figures["ddp_bytes_per_peer"]
    most = max(sent.values(), default=0)
    cells = []
    if outer is not None:
        alone = "" if solo is None else f"; one worker alone: {solo:.3f}"
        kind = "" if solo is None else "good" if outer < solo else "bad"
        cells.append((f"{outer:.3f}", f"held-out loss of the outer parameters, nats{alone}", kind))
    cells += [
        (f"{short_number(figures['tokens_per_s'])}/s", "tokens that rounds counted, all peers together", ""),
        (busy_share(figures), "of the peers' time went into training steps", ""),
    ]
    if most and baseline:
        told = f"sent by the busiest peer ({human_bytes(most)}) than data-parallel would ({human_bytes(baseline)})"
        cells.append((f"{baseline / most:,.0f} times less", told, ""))
    else:
        cells.append((human_bytes(most), "sent by the busiest peer", ""))
    if figures["bits_per_parameter"]:
        ways = "/".join(figures["bits_per_parameter"])
        left_out = figures["left_out"]
        kept = f"; {left_out:.2f} of an update kept for later" if left_out is not None else ""
        bits = " / ".join(f"{bits:.2f}" for bits in figures["bits_per_parameter"].values())
        cells.append((bits, f"bits per parameter sent, {ways}; fp32 has 32{kept}", ""))
    cells += pipeline_tiles(figures)
    if figures["median_round_s"] is not None:
        delay = figures["delay_steps"]
        meanwhile = f"; {delay:g} steps were trained from an offer until its mean was in" if delay is not None else ""
        told = f"median round, from the plan until all members held all means{meanwhile}"
        cells.append((f"{figures['median_round_s']:.1f} s", told, ""))
    equal, twice, lost = figures["digests_equal"], figures["samples_trained_twice"], figures["samples_lost"]
    cells += [
        (BITS[equal][0], "bits of the model on all peers, at each version", BITS[equal][1]),
        (
            f"{twice:,} / {'?' if lost is None else f'{lost:,}'}",
            "samples trained twice / lost",
            "good" if not twice and not lost else "bad",
        ),
    ]
    return cells


def busy_share(figures: Mapping[str, Any]) -> str:
    """Of all groups together, by their hours."""
    groups = figures["utilisation"].values()
    hours = sum(group["hours"] for group in groups)
    return f"{sum(group['hours'] * group['train'] for group in groups) / hours:.0%}" if hours else "none"


def uses_of(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The `USES` that figures of runs tell of: nobody stops processes in most of them."""
    stopped = any(group["pause"] for figures in runs for group in figures["utilisation"].values())
    return [use for use in USES if use != "pause" or stopped]


def utilisation_table(runs: Mapping[str, Mapping[str, Any]]) -> Markup:
    """A row for each class of each run: `runs` has figures by label."""
    uses, rows = uses_of(runs.values()), []
    for label, figures in runs.items():
        for name, group in figures["utilisation"].items():
            bar = markup.stacked_bar([(f"--use-{use}", group[use], USE_LABELS[use]) for use in uses])
            shares = [text(f"{group[use]:.1%}") for use in uses]
            rows.append([text(label), text(name), text(str(group["peers"])), bar, *shares])
    headings = ["run", "class", "peers", "", *(USE_LABELS[use] for use in uses)]
    if len(runs) == 1:
        headings, rows = headings[1:], [row[1:] for row in rows]
    return markup.table(
        headings,
        rows,
        numbers=frozenset(n for n, said in enumerate(headings) if said == "peers" or said in USE_LABELS.values()),
    )


def _loss_note(scene: Scene) -> str:
    note = "The swarm's outer parameters on text held out from training"
    if scene.run.solo_loss:
        note += ", beside one worker that trained alone, on the same text"
    if scene.figures["recoveries"]:
        note += "; red: a stage had nobody, from the loss of its last peer until it computed again"
    return note + "." + (" Thin lines: training loss of each peer that sees it, smoothed." if scene.seers else "")


def _loss_legend(scene: Scene) -> Markup:
    several = len({chain_of(event)[2] for event in scene.outer}) > 1
    entries = [("--ink", "swarm, held out" + (", a line for each group" if several else ""))]
    if scene.outer_few:
        few = max(event["samples"] for event in scene.outer_few)
        entries.append(("--ink", f"swarm, {few} of the held-out samples, always the same (rings)"))
    if scene.run.solo_loss:
        entries.append(("--ink", "one worker alone, held out (dashed)"))
    if scene.figures["recoveries"]:
        entries += [("--bad", "a stage loses its last peer (dashed)"), ("--good", "it computes again")]
    entries += [(_colour(scene.peers.index(peer) + 1), scene.names[peer]) for peer in scene.seers]
    return markup.legend(entries, mark="line")


def _colour(number: int) -> str:
    """Of a peer, by its number from 1: as `Scene.colours`."""
    return f"--series-{number}" if number <= len(SERIES) else "--muted"


def _bytes_note(scene: Scene) -> str:
    note = "What each peer sent in the whole run: contributions, means, state for newcomers, heartbeats and votes (not what the DHT and encryption add)"
    if scene.run.ddp_bytes_per_peer:
        note += ", beside what data-parallel training with the same number of steps sends per worker"
    return note + "."


def letters_by_round(missed: list[dict[str, Any]], letters: Mapping[str, str]) -> dict[Round, str]:
    """For each round of each group that some peer missed, the letters of the reasons."""
    lettered: dict[Round, str] = {}
    for one in missed:
        at, letter = (one["round"], one["group"]), letters[one["reason"]]
        known = lettered.get(at, "")
        lettered[at] = known if letter in known else known + letter
    return lettered


def reason_letters(missed: list[dict[str, Any]]) -> dict[str, str]:
    """A letter for each distinct reason, in the order of first appearance: a, b, … z, a1, b1, …"""
    letters: dict[str, str] = {}
    for one in missed:
        number = len(letters)
        suffix = str(number // 26) if number >= 26 else ""
        letters.setdefault(one["reason"], chr(ord("a") + number % 26) + suffix)
    return letters


def _missed_table(missed: list[dict[str, Any]], letters: Mapping[str, str]) -> Markup:
    if not missed:
        return markup.note("No peer missed a round.")
    counts = Counter(one["reason"] for one in missed)
    by_reason = [[text(letters[reason]), text(f"{count:,}"), text(reason)] for reason, count in counts.most_common()]
    shown = markup.table(
        ["", "times", "a peer missed a round, because"], by_reason, numbers=frozenset({1}), narrow=True
    )
    divided = any(one["group"] for one in missed)
    rows = []
    for one in missed[:MOST_MISSED]:
        of = (_group_name(one["group"]),) if divided else ()
        rows.append([text(cell) for cell in (letters[one["reason"]], str(one["round"]), one["peer"], *of)])
    headings = ["", "round", "missed by", *(["group"] if divided else [])]
    listed = markup.table(headings, rows, numbers=frozenset({1}), narrow=True)
    title = "Each of them" if len(missed) <= MOST_MISSED else f"The first {MOST_MISSED} of them"
    return Markup(shown + markup.folded(title, listed))


def _group_name(group: str) -> str:
    return group[:12] or "first"


def _rounds_table(scene: Scene) -> Markup:
    rows, commits = [], commits_by_round(scene.events)
    divided = any(group for _, group in commits)
    left_out = len(commits) - 2 * MOST_ROUNDS
    shown = list(commits.items())
    if left_out > 0:
        shown = shown[:MOST_ROUNDS] + shown[-MOST_ROUNDS:]
    for (number, group), event in shown:
        names = [scene.names.get(peer, peer[:12]) for peer in event["contributors"]]
        who = ", ".join(names) if len(names) <= 12 else f"{len(names)} peers"
        tokens = sum(event["contributors"].values())
        cells = (str(number), f"{event['seconds']:.1f}", who, f"{tokens:,}", str(event["parts_left_out"] or ""))
        of = (_group_name(group),) if divided else ()
        rows.append([text(cell) for cell in (*cells, event["digest"][:12], *of)])
    headings = [
        "round",
        "seconds",
        "contributors",
        "tokens",
        "parts left out",
        "digest",
        *(["group"] if divided else []),
    ]
    title = f"The first {MOST_ROUNDS} and the last {MOST_ROUNDS} rounds; {left_out:,} in between are left out"
    listed = markup.table(headings, rows, numbers=frozenset({0, 1, 3}))
    return markup.folded(title if left_out > 0 else "All rounds", listed)


def _peers_table(scene: Scene) -> Markup:
    roles = {facts.peer: facts.role for facts in scene.run.peers}
    tokens = {peer: sum(event["tokens"] for event in scene.of(peer, "step")) for peer in scene.peers}
    shown = scene.peers
    if len(shown) > MOST_PEERS:
        shown = sorted(shown, key=lambda peer: -tokens[peer])[:MOST_PEERS]
    copies = {peer: copies_bytes(scene.events.get(peer, ())) for peer in shown}
    have_copies = any(received for received, _ in copies.values())
    rows = []
    for peer in shown:
        events, commits = scene.events.get(peer, ()), scene.of(peer, "round.commit")
        number = scene.peers.index(peer) + 1
        cells = [
            roles.get(peer, ""),
            peer[:12],
            f"{len(scene.of(peer, 'step')):,}",
            f"{tokens[peer]:,}",
            f"{sum(bool(event['contributed']) for event in commits)} of {len(commits)}",
            str(len(scene.of(peer, "round.missed"))),
            human_bytes(total_bytes(events, "sent_bytes")),
            human_bytes(total_bytes(events, "received_bytes")),
        ]
        if have_copies:
            received, allowed = copies[peer]
            cells.append(f"{human_bytes(received)} of {human_bytes(allowed)}" if received else "")
        name = markup.dotted(_colour(number), scene.names[peer])
        rows.append([name, *map(text, cells)])
    headings = ["peer", "role", "key", "steps", "tokens", "rounds contributed", "missed", "sent", "received"]
    if have_copies:
        headings.append("copies of stages, of what was allowed")
    listed = markup.table(headings, rows, numbers=frozenset(range(3, len(headings))))
    if have_copies:
        listed = Markup(listed + markup.note(COPIES_NOTE))
    if len(shown) < len(scene.peers):
        return Markup(markup.note(f"The {len(shown)} of {len(scene.peers)} that trained most.") + listed)
    return listed


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
