"""Schedules of scenarios: what is scripted happens to whom it should, and lives are drawn as they say."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sims.test_scenario import BASE, scenario, scripted

from farflung.protocol.errors import ConfigError
from farflung.sims.churn import make_schedule
from farflung.sims.faults import Delay, Heal, Kill, Leave, Partition, Pause, Presence, Resume, Slow, Start
from farflung.sims.local_run import shortened
from farflung.sims.scenario import Lasting, load_scenario
from farflung.sims.scenario_plan import prepare


def test_everything_scripted_happens_to_whom_it_should() -> None:
    made = scenario(
        """
[[happenings]]
at = 10.0
what = "kill"
peers = ["home/1"]
for_s = 30.0
[[happenings]]
at = 20.0
what = "kill"
peers = ["home/1"]
[[happenings]]
at = 60.0
what = "partition"
peers = ["region:Oregon", "lab/0"]
for_s = 10.0
[[happenings]]
at = 80.0
what = "pause"
peers = ["lab"]
share = 0.5
for_s = 5.0
[[happenings]]
at = 590.0
what = "slow"
peers = ["home/2"]
for_s = 60.0
"""
    )
    faults = [f for f in make_schedule(made, 3, Path()).faults if f.at > 0.0]
    assert faults[:4] == [
        Kill(at=10.0, peer=1),
        Start(at=40.0, peer=1),
        Partition(at=60.0, groups=((1, 3),)),
        Heal(at=70.0),
    ]
    pause, resume, slow = faults[4:]
    assert isinstance(pause, Pause) and pause.peer in (3, 4) and resume == Resume(at=85.0, peer=pause.peer)
    assert slow == Slow(at=590.0, until=600.0, peer=2, factor=4.0)


def lives(tmp_path: Path, happenings: str) -> list[tuple[str, float]]:
    """What happens to lab/0, who is there from 0 to 100, 150 to 300 and 350 to 500 s, when that is scripted beside it."""
    (tmp_path / "t.csv").write_text("start_s,end_s,host\n0,100,a\n150,300,a\n350,500,a\n0,600,b\n")
    made = scenario(f'trace = "t.csv"\nsays_goodbye = 1.0\n{happenings}')
    faults = [fault for fault in make_schedule(made, 0, tmp_path).faults if getattr(fault, "peer", None) == 3]
    return [(type(fault).__name__, fault.at) for fault in faults]


OWN = [("Start", 0.0), ("Leave", 100.0), ("Start", 150.0), ("Leave", 300.0), ("Start", 350.0), ("Leave", 500.0)]


@pytest.mark.parametrize(
    ("happenings", "lived"),
    [
        ("", OWN),
        # whoever is away is not hit, and does not come back by it
        (scripted(110.0, "kill", for_s=20.0), OWN),
        (scripted(320.0, "leave", for_s=8.0) + scripted(550.0, "power", for_s=8.0), OWN),
        # for good, whatever its own life is
        (scripted(50.0, "power"), [("Start", 0.0), ("Kill", 50.0)]),
        (scripted(50.0, "leave") + scripted(60.0, "kill", for_s=20.0), [("Start", 0.0), ("Leave", 50.0)]),
        (scripted(50.0, "kill") + scripted(200.0, "join"), [("Start", 0.0), ("Kill", 50.0), ("Start", 200.0), *OWN[3:]]),
        # for as long as it says
        (scripted(50.0, "kill", for_s=150.0), [("Start", 0.0), ("Kill", 50.0), ("Start", 200.0), *OWN[3:]]),
        (
            scripted(50.0, "kill", for_s=150.0) + scripted(60.0, "kill", for_s=20.0),
            [("Start", 0.0), ("Kill", 50.0), ("Start", 200.0), *OWN[3:]],
        ),
    ],
    ids=["nothing", "away", "away twice", "for good", "for good and again", "called back", "longer than its absence", "shorter inside"],
)  # fmt: skip
def test_who_is_taken_away_comes_back_when_that_is_over(
    happenings: str, lived: list[tuple[str, float]], tmp_path: Path
) -> None:
    assert lives(tmp_path, happenings) == lived


def test_before_it_joins_nobody_is_brought_by_what_did_not_hit_it() -> None:
    made = scenario("join_s = [90.0, 90.0]\n" + scripted(10.0, "kill", "lab", for_s=20.0))
    assert {fault.at for fault in make_schedule(made, 0, Path()).faults if getattr(fault, "peer", 0) >= 3} == {90.0}


def test_who_is_paused_twice_goes_on_after_the_last_one() -> None:
    whom = "home/0"
    made = scenario(
        scripted(10.0, "pause", whom, for_s=60.0)
        + scripted(30.0, "pause", whom, for_s=10.0)
        + scripted(60.0, "pause", whom, for_s=40.0)
        # and what stopped one life does not hold the next, nor does it let go of it
        + scripted(200.0, "pause", whom, for_s=60.0)
        + scripted(210.0, "kill", whom, for_s=10.0)
        + scripted(240.0, "pause", whom, for_s=100.0)
    )
    faults = [f for f in make_schedule(made, 0, Path()).faults if f.at > 0.0]
    assert faults == [
        Pause(at=10.0, peer=0),
        Resume(at=100.0, peer=0),
        Pause(at=200.0, peer=0),
        Kill(at=210.0, peer=0),
        Start(at=220.0, peer=0),
        Pause(at=240.0, peer=0),
        Resume(at=340.0, peer=0),
    ]


def test_partitions_that_are_open_together_end_each_by_itself() -> None:
    made = scenario(
        scripted(10.0, "partition", "lab", for_s=60.0)
        + scripted(30.0, "partition", "home", for_s=10.0)
        + scripted(50.0, "partition", "home/0", for_s=40.0)
        + scripted(100.0, "partition", "home/0", for_s=10.0)
    )
    faults = [f for f in make_schedule(made, 0, Path()).faults if f.at > 0.0]
    assert faults == [
        Partition(at=10.0, groups=((3, 4),)),
        Partition(at=30.0, groups=((0, 1, 2),), number=1),
        Heal(at=40.0, number=1),
        Partition(at=50.0, groups=((0,),), number=1),
        Heal(at=70.0),
        Heal(at=90.0, number=1),
        Partition(at=100.0, groups=((0,),)),
        Heal(at=110.0),
    ]


def test_before_the_calm_all_is_put_right_and_nothing_happens_in_it() -> None:
    """Whoever was there is back, also who left; a window that would reach into it ends, and sessions go on that would end later."""
    made = scenario(
        """
session = { mean_s = 100.0 }
[[happenings]]
at = 340.0
what = "partition"
peers = ["lab"]
[[happenings]]
at = 345.0
what = "pause"
peers = ["home/0"]
[[happenings]]
at = 350.0
what = "delay"
for_s = 200.0
[[happenings]]
at = 360.0
what = "leave"
peers = ["home/1"]
[[happenings]]
at = 392.0
what = "kill"
peers = ["home"]
""",
        base=BASE.replace("duration_s = 600.0", "duration_s = 600.0\ncalm_s = 200.0"),
    )
    faults = make_schedule(made, 3, Path()).faults
    presence = Presence()
    for fault in faults:
        presence.happen(fault)
    assert sorted(presence.running) == [0, 1, 2, 3, 4] and not presence.paused and not presence.partitions
    assert max(fault.at for fault in faults if not isinstance(fault, Heal | Resume | Start)) == 392.0
    assert max(fault.at for fault in faults) == 400.0
    assert [fault.until for fault in faults if isinstance(fault, Delay)] == [400.0]
    plan = prepare(made, 3, make_schedule(made, 3, Path())).plan
    assert (plan.schedule.duration_s, plan.calm_s) == (550.0, 150.0), "the last third of a plan's calm comes after it"


CALM = BASE.replace("duration_s = 600.0", "duration_s = 600.0\ncalm_s = 200.0")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "join_s = [300.0, 392.5]",
            r"peers\[1\]\.join_s = .*: later than 8 s before the calm, so that some 'lab' may never be",
        ),
        ("join_s = [393.0, 400.0]", "so that no 'lab' is ever there; .* or lower calm_s = 200, or let a happening"),
        (
            scripted(393.0, "kill"),
            r"happenings\[0\]\.at = 393: later than 8 s before the calm, so that it never happens",
        ),
    ],
)
def test_what_comes_too_late_before_a_calm_is_refused(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scenario(more, base=CALM)


def test_whoever_may_join_before_a_calm_does() -> None:
    """Also at the last moment; or else by a happening."""
    for more in ("join_s = [392.0, 392.0]\n", "join_s = [500.0, 600.0]\n" + scripted(392.0, "join", "lab")):
        faults = make_schedule(scenario(more, base=CALM), 0, Path()).faults
        assert [fault.at for fault in faults if isinstance(fault, Start)] == [0.0] * 3 + [392.0] * 2


def test_a_calm_leaves_time_for_somebody_to_join() -> None:
    with pytest.raises(ConfigError, match=r"calm_s = 600: nobody joins later .*; give at most duration_s - 8 = 592"):
        scenario(base=CALM.replace("200.0", "600.0"))
    whole = scenario(base=CALM.replace("200.0", "592.0"))
    assert {fault.at for fault in make_schedule(whole, 0, Path()).faults} == {0.0}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(20.0, 300.0), st.sampled_from([0.5, 1.0, 2.0]))
def test_lives_are_sound_and_one_peers_life_is_its_own(seed: int, mean_s: float, shape: float) -> None:
    more = f'session = {{ kind = "weibull", mean_s = {mean_s}, shape = {shape} }}\nabsence = {{ mean_s = 20.0 }}\n'
    happening = '[[happenings]]\nat = 50.0\nwhat = "kill"\npeers = ["home/0"]\n'
    plain = make_schedule(scenario(more), seed, Path()).faults
    scripted = make_schedule(scenario(more + happening), seed, Path()).faults
    assert [f for f in plain if getattr(f, "peer", None) == 4] == [f for f in scripted if getattr(f, "peer", None) == 4]
    assert make_schedule(scenario(more), seed, Path()).faults == plain


def test_sessions_have_the_mean_they_should() -> None:
    base = BASE.replace("duration_s = 600.0", "duration_s = 2000000.0")
    for shape in (0.6, 1.0):
        made = scenario(
            f'session = {{ kind = "weibull", mean_s = 900.0, shape = {shape} }}\nabsence = {{ mean_s = 60.0 }}',
            base=base,
        )
        lengths, began = [], {}
        for fault in make_schedule(made, 1, Path()).faults:
            if isinstance(fault, Start):
                began[fault.peer] = fault.at
            elif isinstance(fault, Kill | Leave):
                lengths.append(fault.at - began[fault.peer])
        assert len(lengths) > 3000
        assert sum(lengths) / len(lengths) == pytest.approx(900.0, rel=0.1)
    assert Lasting(mean_s=5.0).shape == 1.0


def test_a_trace_is_lived_as_it_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("start_s,end_s,host\n0,100,a\n50,70,b\n102,300,a\n90,900,b\n")
    made = scenario('trace = "t.csv"\nsays_goodbye = 1.0')
    faults = [f for f in make_schedule(made, random.randrange(99), tmp_path).faults if getattr(f, "peer", 0) >= 3]
    assert [(type(f).__name__, f.at, f.peer) for f in faults if isinstance(f, Start | Leave)] == [
        ("Start", 0.0, 3),
        ("Start", 50.0, 4),
        ("Leave", 70.0, 4),
        ("Start", 90.0, 4),
        ("Leave", 100.0, 3),
        ("Start", 108.0, 3),
        ("Leave", 300.0, 3),
    ]
    for line in ("-5,50,h", "nan,50,h", "0,nan,h", "inf,inf,h", "50,40,h"):
        (tmp_path / "t.csv").write_text(f"start_s,end_s,host\n0,9,h\n{line}\n")
        with pytest.raises(ConfigError, match=r"t\.csv, line 3: .*the end after the start"):
            make_schedule(made, 0, tmp_path)
    (tmp_path / "t.csv").write_text(f"start_s,end_s,host\n0,9,{'h' * 200_000}\n")
    with pytest.raises(ConfigError, match="field larger than field limit"):
        make_schedule(made, 0, tmp_path)
    (tmp_path / "t.csv").write_text("from,to\n1,2\n")
    with pytest.raises(ConfigError, match="start_s,end_s,host"):
        make_schedule(made, 0, tmp_path)


@pytest.mark.parametrize(("calm_s", "begins"), [(0.0, 600.0), (200.0, 393.0)])
def test_a_host_of_a_trace_that_comes_too_late_is_refused(calm_s: float, begins: float, tmp_path: Path) -> None:
    """But for one that a happening brings, or where only a part of the file is played."""
    file, trace = tmp_path / "mine.toml", tmp_path / "t.csv"
    text = BASE.replace("600.0", f"600.0\ncalm_s = {calm_s}") + 'trace = "t.csv"\n'
    file.write_text(text)
    trace.write_text(f"start_s,end_s,host\n0,100,a\n{begins},900,b\n")
    with pytest.raises(ConfigError, match=rf"host of 'lab/1' begins at {begins:g} s, .*so that it is never there"):
        load_scenario(file)
    file.write_text(text + scripted(50.0, "join", "lab/1"))
    load_scenario(file)
    file.write_text(text)
    trace.write_text(f"start_s,end_s,host\n0,100,a\n{begins - 1.0},900,b\n")
    assert shortened(load_scenario(file), minutes=1.0).duration_s == 60.0
