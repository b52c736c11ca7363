"""The report of a run that never happened, with every kind of event that a report reads."""

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs
from tests.sims.report_story import INNER_STEPS, KEYS, REASON, ROUND_S, ROUNDS, START, join_at, write_run
from typer.testing import CliRunner

from farflung.node.events import EventLog
from farflung.protocol.errors import ConfigError
from farflung.sims.facts import (
    Incident,
    LedgerFacts,
    RunFacts,
    event_files,
    load_events,
    load_run,
    save_run,
)
from farflung.sims.main import app
from farflung.sims.plots_time import window
from farflung.sims.report import check_names, load_scenes, render, report_folder
from farflung.sims.report_run import reason_letters
from farflung.sims.scene import Scene, smooth
from farflung.sims.series import MOST_ROWS, POINTS, series_of
from farflung.sims.spans import STATES, USES
from farflung.sims.summary import violations
from farflung.sims.trace import trace_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    report_folder(folder)
    return folder


def test_figures_on_disk(folder: Path) -> None:
    figures = json.loads((folder / "report.json").read_text())
    assert figures["rounds_committed"] == ROUNDS
    assert figures["rounds_missed"] == [{"peer": "node 4", "round": n, "group": "", "reason": REASON} for n in (7, 15)]
    assert figures["digests_equal"] is True
    assert (figures["samples_trained_twice"], figures["samples_lost"]) == (0, 0)
    assert (figures["peers_killed"], figures["peers_joined"]) == (1, 2)
    assert figures["outer_loss"] < figures["solo_loss"] and figures["outer_better"] is True
    assert figures["samples_miscounted"] == 0 and violations(figures) == []
    assert {one["which"] for one in figures["checked"]} == {1, 2, 3, 4, 5, 6, 9}


def test_series_on_disk_are_what_the_page_plots(folder: Path) -> None:
    figures = json.loads((folder / "report.json").read_text())
    series = figures["series"]
    outer, solo, one = series["loss"]["outer"][""], series["loss"]["solo"], series["loss"]["training"]["node 2"]
    assert {len(column) for column in outer.values()} == {ROUNDS} and outer["loss"][-1] == figures["outer_loss"]
    assert all(before <= after for key in ("seconds", "tokens", "bytes") for before, after in pairwise(outer[key]))
    assert series["loss"]["few"][""]["loss"] == [2.5 - height / 100 for height in range(4, ROUNDS + 1, 4)]
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
    assert "until all members held all means, as its proposer saw it" in page and "slowest peer" not in page
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


def test_names_are_no_mathematics(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = load_run(tmp_path / "run.json")
    odd = [structs.replace(peer, name=rf"${number}_{{a$ \$") for number, peer in enumerate(run.peers)]
    save_run(tmp_path / "run.json", structs.replace(run, name=r"$\frac{$", peers=odd))
    report_folder(tmp_path)
    pictures = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "report.html").read_text())
    assert {peer.name for peer in odd} <= set(pictures)


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
        events=load_events(event_files(folder)),
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


def test_the_older_part_of_a_log_counts_and_a_missing_beginning_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    newer = tmp_path / "run" / "node-2" / "events.jsonl"
    older = newer.with_name("events.older.jsonl")
    lines = newer.read_text().splitlines(keepends=True)
    older.write_text("".join(lines[:200]))
    newer.write_text("".join(lines[200:]))
    known = json.loads((folder / "report.json").read_text())
    figures = report_folder(tmp_path / "run")
    assert figures == {key: value for key, value in known.items() if key != "series"} and figures["begin_late"] == {}
    older.unlink()
    figures = report_folder(tmp_path / "run")
    begun = json.loads(lines[200])["time"] - START
    assert figures["begin_late"] == {"node 3": round(begun, 1)}
    assert (
        f"The beginning of 1 log is missing; all that is told here is of the rest: node 3 (from {begun:.0f} s on)."
        in (tmp_path / "run" / "report.html").read_text()
    )
    newer.rename(older)
    assert report_folder(tmp_path / "run") == figures, "while a full log is put away there is only the older part"


def test_what_a_full_disk_did_not_take_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    log = tmp_path / "run" / "node-2" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    first, after = json.loads(lines[200]), json.loads(lines[300])
    lacks = {"count": 100, "since": first["time"]}
    heading = {key: after[key] for key in ("time", "swarm", "peer", "height", "version", "step")}
    log.write_text(
        "".join([*lines[:200], json.dumps(heading | {"event": "log.unwritten"} | lacks) + "\n", *lines[300:]])
    )
    figures = report_folder(tmp_path / "run")
    since, until = (round(event["time"] - START, 1) for event in (first, after))
    assert figures["unwritten"] == {"node 3": [100, since, until]} and violations(figures) == []
    told = f"all that is told here is of the rest: node 3 (100 lines, between {since:.0f} s and {until:.0f} s)."
    page = (tmp_path / "run" / "report.html").read_text()
    assert (
        f"A full disk did not take lines of 1 log; {told}" in page and "No invariant that was checked is broken" in page
    )


def test_a_run_in_the_folder_of_another_is_not_of_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "new")
    shutil.copytree(folder, tmp_path / "new" / "old")
    figures = report_folder(tmp_path / "new")
    assert violations(figures) == [] and figures["samples_trained_twice"] == 0
    assert figures["tokens_committed"] == json.loads((folder / "report.json").read_text())["tokens_committed"]


def test_several_runs_are_not_taken_for_one(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(folder, tmp_path / name)
    with pytest.raises(
        ConfigError, match=f"holds no run: .*runs of their own are in {tmp_path / 'a'}, {tmp_path / 'b'}"
    ):
        load_scenes([tmp_path])
    for name in "ab":
        (tmp_path / name / "run.json").unlink()
    with pytest.raises(ConfigError, match=f"both have events of peer {KEYS[0][:12]}.*give the folder of one run"):
        load_scenes([tmp_path])


@pytest.mark.parametrize(
    ("other", "names", "said"),
    [
        ("swarms/a/events.jsonl", ("demo", "alpha"), "is of swarm demo, and .* of swarm alpha"),
        ("swarms/b/events.jsonl", ("demo", "demo"), "is of swarm demo, and .* of another swarm demo"),
    ],
)
def test_nodes_of_several_swarms_are_not_taken_for_one(
    other: str, names: tuple[str, str], said: str, tmp_path: Path
) -> None:
    for place, name, peer in zip(("one/swarms/a/events.jsonl", f"two/{other}"), names, KEYS, strict=False):
        (tmp_path / place).parent.mkdir(parents=True)
        log = EventLog(tmp_path / place, swarm=name, peer=peer)
        with log:
            log.emit("node.start", device="cpu")
    with pytest.raises(ConfigError, match=f"{said}; give the folder of one run"):
        load_scenes([tmp_path])
    assert len(load_scenes([tmp_path / "one"])) == 1


def test_several_runs_side_by_side(folder: Path, tmp_path: Path) -> None:
    words = ["sim", "report", str(folder), str(folder), "--out", str(tmp_path / "both.html"), "--json"]
    words += ["--trace", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    written = json.loads((tmp_path / "both.report.json").read_text())
    assert all(one.pop("series") for one in written.values()) and told == written and len(told) == 2
    page = (tmp_path / "both.html").read_text()
    assert all(label in page for label in told) and "2 runs compared" in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)), "the pictures of two runs do not mix"
    assert len(page) < 4_000_000


def test_no_run_is_lost_for_its_name(folder: Path, tmp_path: Path) -> None:
    """A number makes names differ, but another run may be called so; and names may differ in what an id cannot have."""
    names = ["x/a", "y/a", "a 1", "run_1", "run-1"]
    for name in names:
        shutil.copytree(folder, tmp_path / name)
    scenes = load_scenes([tmp_path / name for name in names])
    assert [scene.label for scene in scenes] == ["a 2", "a 3", "a 1", "run_1", "run-1"]
    assert len({scene.slug for scene in scenes}) == 5
    ids = re.findall(r'\bid="([^"]*)"', render(scenes[3:]))
    assert len(ids) == len(set(ids)), "the pictures of two runs do not mix"


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sim", "report", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "holds no run" in result.output
    (tmp_path / "events.jsonl").write_text('{"event": "x"}\n')
    result = CliRunner().invoke(app, ["sim", "report", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "events.jsonl, line 1: not an event" in result.output


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["--out", "run.json"], "a page ends in .html"),
        (["--out", "events.jsonl"], "a page ends in .html"),
        (["--trace", "run.json"], "not called as a run's own"),
        (["--trace", "node-1/events.jsonl"], "a trace ends in .json"),
        (["--out", "z.html", "--trace", "z.report.json"], "the page's figures are written there"),
    ],
)
def test_a_report_takes_the_place_of_nothing_that_a_run_is_told_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str], said: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    result = CliRunner().invoke(app, ["sim", "report", ".", *named])
    assert result.exit_code == 2 and said in result.output
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["run", "result"])
def test_figures_are_not_called_as_files_of_a_run(folder: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "result.json").write_text('{"passed": true}')
    before = (copy / "run.json").read_bytes()
    assert CliRunner().invoke(app, ["sim", "report", str(copy), "--out", str(copy / f"{name}.html")]).exit_code == 0
    assert (copy / "run.json").read_bytes() == before and (copy / "result.json").read_text() == '{"passed": true}'
    assert json.loads((copy / f"{name}.report.json").read_text())["rounds_committed"] == ROUNDS


def test_what_is_printed_is_not_mixed_with_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "report.json").open("w") as redirected:
        monkeypatch.setattr("sys.stdout", redirected)
        with pytest.raises(ConfigError, match="send what --json prints to another file"):
            check_names(tmp_path / "report.html", None, printed=True)
        check_names(tmp_path / "report.html", None, printed=False)
        check_names(tmp_path / "other.html", None, printed=True)


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


def test_nothing_on_a_track_overlaps(folder: Path) -> None:
    """Steps that waited for the door, and times that are rounded."""
    (scene,) = load_scenes([folder])
    stretch = 1.0 + 1e-5 / 7
    events = {
        peer: [
            one | {"time": START + stretch * (one["time"] - START)} | ({"seconds": 2.5 * one["seconds"]} if "seconds" in one else {})
            for one in own
        ]
        for peer, own in scene.events.items()
    }  # fmt: skip
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in trace_events(Scene(events=events, run=scene.run)):
        if one["ph"] == "X":
            tracks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    assert len(tracks) == 3 * 6
    for spans in tracks.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


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
    assert len(page) < 400_000 and "The 60 of 1000 that trained most" in page
    assert re.search(r"and 1\d,\d{3} more", page), "contributions that nobody counts, for these peers were made up"


def test_smoothing_keeps_a_constant() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
