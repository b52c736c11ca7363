"""What was done to a run from outside, in words."""

from typing import Any

from farflung.sims.facts import Incident, PeerFacts, RunFacts, What
from farflung.sims.incidents import count_things, things_done, whom, words
from farflung.sims.plots_incidents import MOST_LANES, Frame, lanes_of
from farflung.sims.scene import Scene

NAMES = ["home/0", "home/1", "home/2", "far/0", "far/1", "lone/0"]
KEYS = {name: f"key of {name}" for name in NAMES}


def told(*timeline: Incident) -> list[tuple[float, float, str, str]]:
    """From, until, what, whom, of each thing."""
    scene = scene_of(timeline)
    return [(one.start, one.end, words(one), whom(one, scene)) for one in things_done(scene.run)]


def scene_of(timeline: tuple[Incident, ...]) -> Scene:
    peers = [PeerFacts(peer=KEYS[name], name=name, group=name.partition("/")[0]) for name in NAMES]
    return Scene(events={}, run=RunFacts(name="run", started=0.0, ended=100.0, peers=peers, timeline=list(timeline)))


def done(at: float, what: What, name: str = "", **more: Any) -> Incident:
    return Incident(time=at, what=what, peer=KEYS[name] if name else "", **more)


def test_what_was_done_at_once_to_several_is_one_thing() -> None:
    assert told(
        done(0.0, "start", "home/0"),
        *(done(5.0, "slow", name, until=20.0, much=4.0) for name in ("home/0", "home/1", "home/2", "far/0")),
        *(done(5.0, "kill", name) for name in ("far/1", "lone/0")),
        done(9.0, "slow", "home/0", until=300.0, much=0.5),
    ) == [
        (5.0, 20.0, "computing takes 4 times as long", "all of home, far/0"),
        (5.0, 5.0, "killed", "far/1, lone/0"),
        (9.0, 100.0, "computing takes 0.5 times as long", "home/0"),
    ]


def test_a_pause_lasts_until_it_goes_on_is_killed_or_the_run_ends() -> None:
    assert told(
        *(done(5.0, "pause", name) for name in ("home/0", "home/1", "home/2", "far/0", "far/1")),
        done(6.0, "resume", "home/1"),
        done(7.0, "power", "home/2"),
        *(done(8.0, "resume", name) for name in ("far/0", "far/1")),
    ) == [
        (5.0, 100.0, "stopped", "home/0"),
        (5.0, 6.0, "stopped", "home/1"),
        (5.0, 7.0, "stopped", "home/2"),
        (5.0, 8.0, "stopped", "all of far"),
        (7.0, 7.0, "lost power", "home/2"),
    ]


def test_a_partition_lasts_until_it_heals_whatever_becomes_of_others() -> None:
    one, two = [KEYS["far/0"], KEYS["far/1"]], [KEYS["lone/0"]]
    assert told(
        done(5.0, "partition", groups=[one]),
        done(6.0, "partition", groups=[one, two], number=1),
        done(7.0, "heal"),
        done(8.0, "partition", groups=[two]),
        *(done(8.0, "partition", groups=[[KEYS[name]]], number=n) for n, name in ((2, "home/0"), (3, "home/1"))),
        done(9.0, "heal", number=1),
        *(done(11.0, "heal", number=n) for n in (2, 3)),
    ) == [
        (5.0, 7.0, "partition", "all of far | the others"),
        (6.0, 9.0, "partition", "lone/0 | all of far | the others"),
        (8.0, 100.0, "partition", "lone/0 | the others"),
        (8.0, 11.0, "partition", "home/0 | the others"),
        (8.0, 11.0, "partition", "home/1 | the others"),
    ]
    everybody_else = [KEYS[name] for name in NAMES if name != "home/0"]
    (thing,) = things_done(scene_of((done(9.0, "partition", groups=[everybody_else]),)).run)
    assert thing.peers == (KEYS["home/0"],) and thing.end == 100.0, "who is on the smaller side, whoever is named"


def test_who_does_not_reach_whom_lasts_until_it_heals_and_others_are_no_part_of_it() -> None:
    pair = [[KEYS["lone/0"]], [KEYS["home/1"]]]
    assert told(
        done(5.0, "apart", groups=pair, number=1),
        done(6.0, "heal"),
        done(9.0, "heal", number=1),
    ) == [(5.0, 9.0, "do not reach each other", "lone/0, home/1")]


def test_the_network_is_everybodys() -> None:
    assert told(
        done(1.0, "drop", until=2.0, much=0.25),
        done(3.0, "duplicate", until=4.0, much=0.5),
        done(5.0, "delay", until=6.0, much=1.5),
        done(5.0, "delay", "home/0", until=6.0, much=2.0),
        done(7.0, "skew", "home/0", much=-2.0),
        *(done(8.0, "skew", name, much=ahead) for name, ahead in (("home/0", -3.25), ("home/1", 1.0))),
    ) == [
        (1.0, 2.0, "25% of control messages lost", "everybody"),
        (3.0, 4.0, "50% of control messages doubled", "everybody"),
        (5.0, 6.0, "messages 1.5 s late, each way", "everybody"),
        (5.0, 6.0, "messages 2 s late, each way", "home/0"),
        (7.0, 7.0, "clock set 2 s back", "home/0"),
        (8.0, 8.0, "clocks set off by up to 3.25 s", "home/0, home/1"),
    ]


def test_of_the_network_each_is_told_by_itself() -> None:
    """Two that begin and end together are two, as much of them or not."""
    drops = [done(1.0, "drop", until=2.0, much=much) for much in (0.25, 0.25, 0.5)]
    doubled = [done(1.0, "duplicate", until=2.0, much=much) for much in (0.1, 0.2)]
    assert [what for _, _, what, _ in told(*drops, *doubled)] == [
        "25% of control messages lost",
        "25% of control messages lost",
        "50% of control messages lost",
        "10% of control messages doubled",
        "20% of control messages doubled",
    ]
    assert count_things(scene_of(tuple(drops)).run) == "3 losses of messages"


def test_things_are_counted() -> None:
    timeline = [done(1.0, "pause", "home/0"), done(2.0, "pause", "home/1"), done(3.0, "drop", until=4.0, much=0.1)]
    assert count_things(scene_of(tuple(timeline)).run) == "2 pauses, 1 loss of messages"
    assert count_things(scene_of((done(1.0, "kill", "home/0"),)).run) == ""


def test_words_of_a_lane_do_not_overlap() -> None:
    """They are longer than what they are about."""
    drops = [done(at, "drop", until=at + 1.0, much=0.1) for at in (10.0, 12.0, 60.0)]
    scene = scene_of((*drops, done(11.0, "pause", "home/0"), done(70.0, "kill", "home/0")))
    frame = Frame(scene=scene, things=things_done(scene.run), start=0.0, end=100.0)
    lanes = lanes_of(frame, peers_too=False)
    assert [[thing.start for thing, _ in lane] for lane in lanes] == [[10.0, 60.0], [12.0]]
    assert [[thing.what for thing, _ in lane] for lane in lanes_of(frame, peers_too=True)][1] == ["pause"]
    scene = scene_of(tuple(done(1.0 + n / 10, "drop", until=90.0, much=n / 20) for n in range(20)))
    frame = Frame(scene=scene, things=things_done(scene.run), start=0.0, end=100.0)
    assert len(lanes_of(frame, peers_too=False)) == MOST_LANES
