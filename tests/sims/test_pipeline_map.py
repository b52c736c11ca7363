"""Where a pipeline's peers stand in the picture of its routes: on a map by the regions that nodes tell, beside it, or in a circle."""

from collections.abc import Mapping
from pathlib import Path

from tests.sims.pipeline_logs import HOME, LEFT, RIGHT, START, by_hand, scene_of

from farflung.node.events import EventLog
from farflung.sims.facts import PeerFacts, RunFacts, load_folder
from farflung.sims.plots_routes import places_told, plot_routes
from farflung.sims.report import render
from farflung.sims.scene import Scene


def node_folder(folder: Path, regions: Mapping[str, str]) -> Path:
    """What real nodes leave: an `events.jsonl` in a folder of each, and nothing else. A peer without a region gave none to `join`."""
    for peer, events in by_hand().items():
        log = EventLog(folder / peer[:8] / "events.jsonl", swarm="s", peer=peer, clock=lambda: START)
        with log:
            log.emit("node.start", pid=7, device="cpu", agent="a", resumed=False, region="elsewhere")  # before it moved
            log.emit("node.start", pid=7, device="cpu", agent="a", resumed=True, region=regions.get(peer, ""))
            for event in events:
                log.emit(**event)
    return folder


def test_regions_and_names_are_no_mathematics() -> None:
    odd = {"home/0": "Iowa", "far/0": r"$\frac{$ 1", "far/1": "Japan"}
    assert odd["far/0"] in plot_routes(scene_of(by_hand(), **odd))
    assert odd["far/0"] in plot_routes(scene_of(by_hand(), **{"far/0": odd["far/0"]}))


def real_scene(folder: Path, regions: Mapping[str, str]) -> Scene:
    run, events = load_folder(node_folder(folder, regions))
    return Scene(events=events, run=run)


def test_the_regions_that_real_nodes_tell_are_on_the_map(tmp_path: Path) -> None:
    """As `farflung join --region` has them: in lower case."""
    told = real_scene(tmp_path, {HOME: "iowa", LEFT: "london", RIGHT: "japan"})
    picture = plot_routes(told)
    assert all(f">{region}<" in picture for region in ("Iowa", "London", "Japan"))
    assert "not on the map" not in picture and places_told(told) == ""
    known = RunFacts(name="s", started=START, ended=START, peers=[PeerFacts(peer=HOME, name="a", region="Belgium")])
    assert Scene(events=told.events, run=known).regions == {HOME: "Belgium", LEFT: "london", RIGHT: "japan"}


def test_a_region_that_the_map_does_not_have_stands_beside_it(tmp_path: Path) -> None:
    told = real_scene(tmp_path, {HOME: "iowa", LEFT: "eu-west"})
    picture = plot_routes(told)
    assert all(f">{label}<" in picture for label in ("Iowa", "eu-west", "region not told", "not on the map"))
    assert "not on the map, or was not told" in render([told])


def test_regions_of_which_the_map_has_none_stand_in_a_circle(tmp_path: Path) -> None:
    told = real_scene(tmp_path, {HOME: "eu-west", LEFT: "attic", RIGHT: "attic"})
    picture = plot_routes(told)
    assert ">eu-west<" in picture and ">attic<" in picture and "peer 1" not in picture
    assert "they stand in a circle, and distances mean nothing" in render([told])


def test_where_no_node_tells_a_region_routes_are_drawn_by_stages(tmp_path: Path) -> None:
    silent = real_scene(tmp_path, {})
    assert silent.regions == {} and places_told(silent) == ""
    picture = plot_routes(silent)
    assert ">stage 1<" in picture and ">peer 1<" in picture
