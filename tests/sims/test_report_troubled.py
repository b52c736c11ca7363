"""The report of a run to which things were done from outside."""

import re
from pathlib import Path

import pytest
from msgspec import structs
from tests.sims.report_story import KEYS, START, write_run

from farflung.sims.facts import Incident
from farflung.sims.plots_time import window
from farflung.sims.report import load_scenes, render
from farflung.sims.scene import Scene
from farflung.sims.series import series_of
from farflung.sims.trace import trace_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


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
