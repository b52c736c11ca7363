"""The report of a run that never happened, with every kind of event that a report reads."""

import json
import math
import random
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from farflung.protocol.errors import ConfigError
from farflung.sims.facts import (
    Incident,
    LedgerFacts,
    PeerFacts,
    RunFacts,
    SoloPoint,
    load_events,
    load_run,
    save_run,
)
from farflung.sims.main import app
from farflung.sims.plots_time import window
from farflung.sims.report import load_scenes, render, report_folder
from farflung.sims.report_run import reason_letters
from farflung.sims.scene import Scene, smooth
from farflung.sims.series import MOST_ROWS, POINTS, series_of
from farflung.sims.spans import STATES, USES
from farflung.sims.summary import violations
from farflung.sims.trace import trace_events

START = 1_700_000_000.0
STEP_TOKENS = 2048
STEP_SAMPLES = 4
INNER_STEPS = 20
ROUND_S = 12.0
ROUNDS = 20
KEYS = [bytes([17 * number] * 32).hex() for number in range(1, 7)]
REASON = "the plan's deadline passed 1.8 s before the last part arrived at node 3"


class Writer:
    """Events of one peer, with the context that every event carries."""

    def __init__(self, peer: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self.context: dict[str, Any] = {"swarm": "demo", "peer": peer, "height": 0, "version": 0, "step": 0}

    def __call__(self, at: float, event: str, **fields: Any) -> None:
        self.lines.append({"time": round(START + at, 3), "event": event, **self.context, **fields})


def join_at(first: int) -> float:
    """Seconds at which a newcomer that waits through round `first` starts."""
    return first * ROUND_S - 3.5


def write_run(folder: Path) -> RunFacts:
    """Four nodes from the start, one joins late, one is killed in a round, another one takes its place."""
    rng = random.Random(1)
    writers = [Writer(key) for key in KEYS]
    present_from = [0, 0, 0, 0, 5, 12]
    kill_round, killed = 10, 1
    for number, first in enumerate(present_from):
        at = join_at(first) if first else 0.4 * number
        writer = writers[number]
        writer(at, "node.start", pid=100 + number, device="cpu", agent="farflung 0.1.0", resumed=False)
        writer(at, "node.state", state="joining", reason="asking 3 peers for the manifest")
        if first:
            for done in (3, 9):
                writer(at + done / 3, "state.sync", chunks_done=done, chunks=9, donors=2, bytes=done << 20)
    cursor, sent = 0, [0] * 6
    kept: dict[int, list[list[int]]] = {n: [] for n in range(6)}  # trained, and not counted yet
    for height in range(1, ROUNDS + 1):
        begin = (height - 1) * ROUND_S + 3
        alive = [
            n for n, first in enumerate(present_from) if height > first and not (n == killed and height > kill_round)
        ]
        dead_now = {killed} if height == kill_round else set()
        missing = {3} if height in (7, 15) else set()
        contributors = [n for n in alive if n not in missing | dead_now]
        fresh = {n: cursor + place * INNER_STEPS * STEP_SAMPLES for place, n in enumerate(alive)}
        cursor += len(alive) * INNER_STEPS * STEP_SAMPLES
        for n in alive:
            kept[n].append([fresh[n], fresh[n] + INNER_STEPS * STEP_SAMPLES])
        samples = {KEYS[n]: kept[n] for n in contributors}
        tokens = {KEYS[n]: len(kept[n]) * INNER_STEPS * STEP_TOKENS for n in contributors}
        kept |= {n: [] for n in contributors}
        took = 1.6 + rng.random() * 0.7 + (2.4 if dead_now else 0) + (0.9 if missing else 0)
        for n in alive:
            writer, pace = writers[n], 1.0 + 0.1 * n
            writer(begin, "node.state", state="training", reason="")
            for step in range(INNER_STEPS):
                at = begin + (step + 1) / INNER_STEPS * 4.0 * pace
                writer.context["step"] = (height - 1) * INNER_STEPS + step + 1
                loss = 1.9 + 3.6 * math.exp(-writer.context["step"] / 90) + rng.gauss(0, 0.09)
                writer(
                    at,
                    "step",
                    loss=loss,
                    tokens=STEP_TOKENS,
                    samples=[[fresh[n] + step * STEP_SAMPLES, fresh[n] + (step + 1) * STEP_SAMPLES]],
                    tokens_per_s=10240 / pace,
                    grad_norm=0.8,
                    lr=1e-3,
                    seconds=0.9 * 4.0 * pace / INNER_STEPS,
                )
            ready = begin + 4.0 * pace
            plan = begin + 6.0
            writer(plan, "round.plan", round=height, members=[KEYS[m] for m in alive])
            writer(ready, "node.state", state="ready", reason="")
            if n not in missing:
                writer(plan, "node.state", state="round", reason="")
                writer(plan, "round.scatter", round=height, bytes=1 << 20)
            if n in dead_now:
                continue
            if n not in missing:
                writer(plan + 0.3, "span", what="encode", round=height, seconds=0.3)
                writer(plan + 0.8, "span", what="scatter", round=height, seconds=0.8)
            writer(plan + 1.0, "round.cut", round=height)
            writer(plan + 1.1, "span", what="reduce", round=height, seconds=0.1)
            writer(plan + 1.3, "round.held", round=height)
            writer(plan + took - 0.01, "span", what="apply", round=height, seconds=0.05)
            sent[n] += int(3.1e6 + rng.random() * 4e5)
            writer.context |= {"height": height, "version": height}
            if n in missing:
                writer(plan + took, "round.missed", round=height, reason=REASON)
            writer(
                plan + took,
                "round.commit",
                round=height,
                contributors=tokens,
                view=[KEYS[m] for m in contributors],
                parts_left_out=0,
                seconds=took - 0.05 * n,
                sent_bytes=sent[n],
                received_bytes=sent[n],
                up_bits=8.125 if n in contributors else 0.0,
                down_bits=8.125,
                owed=0.61 if n in contributors else None,
                contributed=n in contributors,
                samples=samples,
                digest=f"{height:064x}",
            )
            writer(plan + took, "net", sent_bytes=sent[n], received_bytes=sent[n], peers=len(alive) - 1)
            if n == contributors[-1]:
                outer = 1.95 + 3.5 * math.exp(-height * INNER_STEPS / 80)
                heard = {"samples": 64, "tokens": cursor * 512, "seconds": 0.25}
                writer(plan + took + 0.3, "outer.eval", loss=outer, few_loss=None, **heard)
            elif n == contributors[0] and height % 4 == 0:
                heard = {"samples": 8, "tokens": cursor * 512, "seconds": 0.03}
                writer(plan + took + 0.1, "outer.eval", loss=None, few_loss=2.5 - height / 100, **heard)
    end = (ROUNDS * ROUND_S) + 4
    for n, writer in enumerate(writers):
        if n != killed:
            writer(end - 2, "node.state", state="finished", reason="all steps are done")
            writer(end, "node.stop", reason="the run is done")
        target = folder / f"node-{n}" / "events.jsonl"
        target.parent.mkdir(parents=True)
        target.write_text("".join(json.dumps(line) + "\n" for line in writer.lines))
    roles = ["founder", "member", "member", "member", "joined late", "replacement"]
    kill_at = START + (kill_round - 1) * ROUND_S + 3 + 6.4
    timeline = [Incident(time=START + 0.4 * n, what="start", peer=KEYS[n]) for n in range(4)]
    timeline += [Incident(time=START + join_at(present_from[n]), what="join", peer=KEYS[n]) for n in (4, 5)]
    timeline.append(Incident(time=kill_at, what="kill", peer=KEYS[killed]))
    run = RunFacts(
        name="demo",
        started=START,
        ended=START + end,
        peers=[PeerFacts(peer=key, name=f"node {n + 1}", role=roles[n]) for n, key in enumerate(KEYS)],
        timeline=sorted(timeline, key=lambda incident: incident.time),
        solo_loss=[
            SoloPoint(
                step=step,
                tokens=step * STEP_TOKENS,
                seconds=step * 0.22,
                loss=2.35 + 3.2 * math.exp(-step / 70),
            )
            for step in range(0, ROUNDS * INNER_STEPS + 1, 20)
        ],
        ddp_bytes_per_peer=int(ROUNDS * INNER_STEPS * 2 * 4.2e6),
        ledger=LedgerFacts(
            cursor=cursor + 160,
            held={KEYS[0]: [(cursor, cursor + 80)]},
            free=[(cursor + 80, cursor + 160)],
            suspended={KEYS[killed]: [(start, stop) for start, stop in kept[killed]]},
        ),
        description="micro preset (1.05 M parameters), bytes, text of the Python installation; 2 CPU cores",
        sample_text='def parse(self, value):\n    """Return the value as a string <str>."""\n    return self._read(value)',
    )
    save_run(folder / "run.json", run)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    report_folder(folder)
    return folder


def test_figures_on_disk(folder: Path) -> None:
    figures = json.loads((folder / "report.json").read_text())
    assert figures["rounds_committed"] == ROUNDS
    assert figures["rounds_missed"] == [{"peer": "node 4", "round": n, "reason": REASON} for n in (7, 15)]
    assert figures["digests_equal"] is True
    assert (figures["samples_trained_twice"], figures["samples_lost"]) == (0, 0)
    assert (figures["peers_killed"], figures["peers_joined"]) == (1, 2)
    assert figures["outer_loss"] < figures["solo_loss"] and figures["outer_better"] is True
    assert figures["samples_miscounted"] == 0 and violations(figures) == []
    assert {one["which"] for one in figures["checked"]} == {1, 2, 3, 4, 5, 6, 9}


def test_series_on_disk_are_what_the_page_plots(folder: Path) -> None:
    figures = json.loads((folder / "report.json").read_text())
    series = figures["series"]
    outer, solo, one = series["loss"]["outer"], series["loss"]["solo"], series["loss"]["training"]["node 2"]
    assert {len(column) for column in outer.values()} == {ROUNDS} and outer["loss"][-1] == figures["outer_loss"]
    assert all(before <= after for key in ("seconds", "tokens", "bytes") for before, after in pairwise(outer[key]))
    assert series["loss"]["few"]["loss"] == [2.5 - height / 100 for height in range(4, ROUNDS + 1, 4)]
    assert solo["loss"][-1] == figures["solo_loss"] and len(solo["tokens"]) == len(solo["loss"])
    assert len(one["loss"]) == len(one["seconds"]) == len(one["tokens"]) == 10 * INNER_STEPS, (
        "it was killed in the tenth"
    )
    assert series["bytes"]["sent"] == figures["bytes_sent_per_peer"]
    assert series["bytes"]["data_parallel"] == figures["ddp_bytes_per_peer"]
    spans = series["membership"]["states"]["node 5"]
    assert spans[0][:2] == ["joining", join_at(5)] and all(a[2] <= b[1] for a, b in pairwise(spans))
    assert [one[1:] for one in series["membership"]["incidents"] if one[1] != "start"] == [
        ["join", "node 5"],
        ["kill", "node 2"],
        ["join", "node 6"],
    ]
    rounds = series["rounds"]
    assert rounds["round"] == list(range(1, ROUNDS + 1)) and rounds["contributors"][9] == 4
    assert (
        [why for why in rounds["missed"] if why] == [{REASON: 1}] * 2 and rounds["missed"][6] and all(rounds["seconds"])
    )


def test_series_of_many_peers_and_steps_stay_small(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    keys = [f"{n:012x}".ljust(64, "0") for n in range(100)]
    events = {key: [{**e, "peer": key} for e in scene.events[KEYS[n % 6]]] for n, key in enumerate(keys)}
    told = series_of(Scene(events=events, run=structs.replace(scene.run, peers=[])))
    assert told["loss"]["training"] == {} and len(told["bytes"]["sent"]) == MOST_ROWS
    assert set(told["membership"]["states"]) == set(STATES) and max(told["membership"]["states"]["training"]) > 50
    one = KEYS[0]
    steps = [{**scene.of(one, "step")[0], "time": START + n} for n in range(5000)]
    curve = series_of(Scene(events={one: steps}, run=scene.run))["loss"]["training"]["node 1"]
    assert POINTS <= len(curve["loss"]) <= 2 * POINTS and curve["seconds"][-1] == 4999.0


def test_the_page_says_what_was_checked_and_what_was_found(folder: Path, tmp_path: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "No invariant that was checked is broken." in page and "Checked: the bits of 20 versions (1); " in page
    assert "All invariants" not in page and "is NOT lower" not in page
    run = write_run(tmp_path)
    better = [structs.replace(point, loss=1.0) for point in run.solo_loss]
    save_run(tmp_path / "run.json", structs.replace(run, solo_loss=better))
    file = tmp_path / "node-3" / "events.jsonl"
    file.write_text(file.read_text().replace(f"{5:064x}", f"{6:064x}"))
    figures = report_folder(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert figures["outer_better"] is False and "is NOT lower than that of the best worker alone, 1.0000" in page
    assert "Invariants broken: 1." in page and "node 4 held other bits at version 5" in page


def test_page_fetches_nothing_and_is_well_formed(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "http" not in page and "@import" not in page and "<script" not in page
    assert not re.search(r"\bsrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page)) <= set(ids)
    assert not re.search(r"#010[1-6]0", page)  # every marker colour became a variable
    assert page.count("<svg") == 7

    class Balanced(HTMLParser):
        open_tags: list[str]
        VOID = ("meta", "use", "path", "br")

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in self.VOID:
                self.open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    parser = Balanced()
    parser.open_tags = []
    parser.feed(page)
    assert parser.open_tags == []


def test_page_escapes_what_nodes_said(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "node-3" / "events.jsonl"
    file.write_text(file.read_text().replace("the plan's deadline", "<img src=x onerror=1>"))
    report_folder(tmp_path)
    assert "<img" not in (tmp_path / "report.html").read_text()
    assert "&lt;img" in (tmp_path / "report.html").read_text()


def test_report_of_a_run_in_which_nothing_happened(tmp_path: Path) -> None:
    run = RunFacts(
        name="empty",
        started=START,
        ended=START,
        peers=[],
        timeline=[],
        solo_loss=[],
        ddp_bytes_per_peer=0,
        ledger=LedgerFacts(cursor=0),
    )
    save_run(tmp_path / "run.json", run)
    figures = report_folder(tmp_path)
    assert figures["outer_loss"] is None and figures["rounds_committed"] == 0


def test_damaged_run_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": 3}')
    with pytest.raises(ConfigError, match=r"run\.json.*name"):
        load_run(tmp_path / "run.json")


def test_a_killed_peers_last_span_ends_with_the_kill(folder: Path) -> None:
    scene = Scene(
        events=load_events(folder.rglob("events.jsonl")),
        run=load_run(folder / "run.json"),
    )
    kill = next(i.time for i in scene.run.timeline if i.what == "kill")
    spans = scene.states(KEYS[1])
    assert spans[-1].end == kill
    assert all(before.end <= after.start for before, after in pairwise(spans))
    assert scene.states(KEYS[0])[-1].what == "finished"


def test_letters_name_distinct_reasons() -> None:
    missed = [{"reason": reason} for reason in ["late", "cut off", "late", *map(str, range(30))]]
    letters = reason_letters(missed)
    assert letters["late"] == "a" and letters["cut off"] == "b"
    assert len(set(letters.values())) == len(letters) == 32


def test_a_folder_without_facts_is_told_from_its_events(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "run.json").unlink()
    figures = report_folder(tmp_path / "bare")
    known = json.loads((folder / "report.json").read_text())
    assert figures["rounds_committed"] == known["rounds_committed"] and figures["outer_loss"] == known["outer_loss"]
    assert (figures["peers_killed"], figures["peers_joined"]) == (1, 2), "one fell silent, two came late"
    assert figures["samples_lost"] is None and figures["solo_loss"] is None
    assert "nobody kept the ledger" in (tmp_path / "bare" / "report.html").read_text()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        load_scenes([tmp_path])


def test_several_runs_side_by_side(folder: Path, tmp_path: Path) -> None:
    words = ["sim", "report", str(folder), str(folder), "--out", str(tmp_path / "both.html"), "--json"]
    words += ["--trace", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    written = json.loads((tmp_path / "both.json").read_text())
    assert all(one.pop("series") for one in written.values()) and told == written and len(told) == 2
    page = (tmp_path / "both.html").read_text()
    assert all(label in page for label in told) and "2 runs compared" in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)), "the pictures of two runs do not mix"
    assert len(page) < 4_000_000


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sim", "report", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "holds no run" in result.output


def test_the_trace_has_every_span(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    events = list(trace_events(scene))
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"node {n}" for n in range(1, 7)}
    complete = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= -1_000_000 for e in complete)
    steps = sum(len(scene.of(peer, "step")) for peer in scene.peers)
    assert sum(e["name"] == "train" for e in complete) == steps
    assert {"send", "collect", "average", "vote", "apply", "evaluate", "joining"} <= {e["name"] for e in complete}
    begun = {e["id"] for e in events if e["ph"] == "b"}
    assert begun and begun == {e["id"] for e in events if e["ph"] == "e"}
    assert [e["name"] for e in events if e["ph"] == "i" and e["s"] == "g"].count("kill") == 1


def test_utilisation_by_group(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    (group,) = scene.figures["utilisation"].values()
    assert group["peers"] == 6 and sum(group[use] for use in USES) == pytest.approx(1.0, abs=1e-3)
    assert group["train"] > 0.2 and group["round"] > 0.05
    peers = [structs.replace(facts, group="fast" if n < 2 else "slow") for n, facts in enumerate(scene.run.peers)]
    two = Scene(events=scene.events, run=structs.replace(scene.run, peers=peers))
    assert {name: group["peers"] for name, group in two.figures["utilisation"].items()} == {"fast": 2, "slow": 4}


def test_the_window_shows_the_kill_or_what_was_missed_or_the_middle(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    kill = next(i.time for i in scene.run.timeline if i.what == "kill")
    start, end = window(scene)
    assert start < kill < end and 2 * ROUND_S < end - start < 4 * ROUND_S
    quiet = Scene(events=scene.events, run=structs.replace(scene.run, timeline=[]))
    start, end = window(quiet)
    assert any(start < e["time"] < end for e in scene.of(KEYS[3], "round.missed")), "node 4 missed round 7"
    bare = {peer: [e for e in events if e["event"] != "round.missed"] for peer, events in scene.events.items()}
    start, end = window(Scene(events=bare, run=quiet.run))
    assert start < START + scene.seconds / 2 < end


def troubled(scene: Scene) -> Scene:
    """The same run with one thing of each kind done to it, and no kill."""
    whole = [incident for incident in scene.run.timeline if incident.what != "kill"]
    done = [
        Incident(time=START + 30.0, what="pause", peer=KEYS[2]),
        Incident(time=START + 50.0, what="resume", peer=KEYS[2]),
        Incident(time=START + 60.0, what="partition", groups=[[KEYS[0], KEYS[3]]]),
        Incident(time=START + 80.0, what="heal"),
        Incident(time=START + 90.0, what="slow", peer=KEYS[0], until=START + 99.0, much=4.0),
        Incident(time=START + 100.0, what="drop", until=START + 110.0, much=0.3),
        Incident(time=START + 105.0, what="duplicate", until=START + 110.0, much=0.2),
        Incident(time=START + 110.0, what="delay", peer=KEYS[3], until=START + 120.0, much=1.5),
        Incident(time=START + 140.0, what="skew", peer=KEYS[3], much=-2.0),
        Incident(time=START + 190.0, what="power", peer=KEYS[3]),
    ]
    timeline = sorted([*whole, *done], key=lambda incident: incident.time)
    return Scene(events=scene.events, run=structs.replace(scene.run, timeline=timeline))


def test_what_was_done_to_a_run_is_drawn_and_listed(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    shown = troubled(scene)
    page = render([shown])
    assert "on the way; 1 pause, 1 partition, 1 slow-down, 1 delay, 1 loss of messages, 1 doubling of messages." in page
    told = ("partition: node 1, node 4 | the others", "30% of control messages lost", "20% of control messages doubled")
    assert all(f">{words}<" in page for words in told), "in the lanes"
    for words in (">stopped<", ">cut off from most<", ">computes slowly<", ">messages late<", ">clock -2 s<"):
        assert words in page, "in the legend, or on a row"
    assert "url(#membership--h" in page, "hatched"
    rows = re.sub(r"<[^>]*>", "|", page[page.index("what was done<") : page.index("<h2>Where time went")])
    assert "|60.0 s||80.0 s||partition||node 1, node 4 | the others|" in rows
    assert "|30.0 s||50.0 s||stopped||node 3|" in rows and "|190.0 s||||lost power||node 4|" in rows
    assert not re.search(r"#010[1-6]0", page)
    assert "|stopped from outside|" in re.sub(r"<[^>]*>", "|", page)
    assert "stopped" not in render([scene]), "nobody was"


def test_a_run_without_kills_is_looked_at_where_trouble_begins(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    shown = troubled(scene)
    calm = [incident for incident in shown.run.timeline if incident.what != "power"]
    start, end = window(Scene(events=shown.events, run=structs.replace(shown.run, timeline=calm)))
    assert start < START + 30.0 < end < START + 70.0
    start, end = window(shown)
    assert start < START + 190.0 < end, "a loss of power is a kill"


def test_series_have_what_was_done(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    found = series_of(troubled(scene))["membership"]
    assert found["lasting"][:2] == [
        ["pause", 30.0, 50.0, ["node 3"], "stopped"],
        ["partition", 60.0, 80.0, ["node 1", "node 4"], "partition"],
    ]
    assert [190.0, "power", "node 4"] in found["incidents"] and [80.0, "heal", ""] in found["incidents"]


def test_the_trace_has_pauses_and_what_was_done_to_the_network(folder: Path) -> None:
    (scene,) = load_scenes([folder])
    events = list(trace_events(troubled(scene)))
    stopped = [e for e in events if e["ph"] == "X" and e["name"] == "stopped"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in stopped] == [(3, 30_000_000, 20_000_000)]
    at_once = [e["name"] for e in events if e["ph"] == "i" and e["s"] == "g"]
    assert {"partition", "heal", "drop", "pause", "resume", "power"} <= set(at_once)


def test_many_peers_are_counted_not_listed(folder: Path) -> None:
    """A thousand peers: the page stays light, and lists whom it can."""
    (scene,) = load_scenes([folder])
    events = {
        f"{number:064x}": [{**one, "peer": f"{number:064x}"} for one in scene.events[KEYS[number % 6]] if one["event"] != "step"]
        for number in range(1000)
    }  # fmt: skip
    stopped = [Incident(time=START + 30.0, what="pause", peer=f"{number:064x}") for number in range(10)]
    run = structs.replace(scene.run, peers=[], timeline=stopped)
    page = render([Scene(events=events, run=run)])
    assert ">stopped: 10 peers<" in page, "in a lane: there are no rows"
    assert len(page) < 2_000_000 and "The 60 of 1000 that trained most" in page


def test_smoothing_keeps_a_constant() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
