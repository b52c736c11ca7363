"""Scenario files: shipped ones are sound, wrong ones are refused with the key and the remedy, and lives are drawn as they say."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest_sections import InnerSpec, OuterSpec
from farflung.sims import regions
from farflung.sims.churn import make_schedule
from farflung.sims.costs import PASSES
from farflung.sims.faults import Delay, Heal, Kill, Leave, Partition, Pause, Presence, Resume, Skew, Slow, Start
from farflung.sims.scenario import (
    SHIPPED,
    TAKES,
    Lasting,
    Scenario,
    What,
    find_scenario,
    load_scenario,
    parse_scenario,
    shipped,
)
from farflung.sims.scenario_plan import MOST_CELLS, prepare, read_scenario
from farflung.sims.scenario_toml import write_scenario
from farflung.sims.simulation import simulate
from farflung.sims.swarm import Swarm
from farflung.training.methods import LONG_RUN, training_method
from farflung.training.optimizers import parse_optimizer
from farflung.training.presets import PRESETS, num_parameters

BASE = """
about = "two classes"
mode = "cost"
duration_s = 600.0
[manifest.model]
preset = "tiny"
[manifest.swarm]
inner_steps = 4
[[peers]]
name = "home"
count = 3
tokens_per_s = 1000.0
regions = ["Iowa", "Oregon"]
[[peers]]
name = "lab"
count = 2
tokens_per_s = 4000.0
"""


def scenario(more: str = "", *, base: str = BASE) -> Scenario:
    return parse_scenario(base + more, name="test")


def happens(what: str, peers: str, more: str = "") -> str:
    return f'[[happenings]]\nat = 3.0\nwhat = "{what}"\npeers = [{peers}]\n{more}'


@pytest.mark.parametrize(
    ("max_group", "preset", "cells"),
    [(64, "3m", 32768), (16, "3m", 8192), (4, "3m", 2048), (4, "35m", 8704), (4, "150m", 32768)],
)
def test_the_fewer_the_members_the_fewer_numbers_stand_for_the_model(max_group: int, preset: str, cells: int) -> None:
    text = BASE.replace("inner_steps = 4", f"inner_steps = 4\nmax_group = {max_group}").replace('"tiny"', f'"{preset}"')
    found = scenario(base=text)
    assert prepare(found, 0, make_schedule(found, 0, SHIPPED)).plan.outfit.terms.settings.rules.numel == cells


@pytest.mark.parametrize("name", shipped())
def test_shipped_scenarios_are_sound(name: str) -> None:
    found = load_scenario(SHIPPED / f"{name}.toml")
    assert find_scenario(name) == SHIPPED / f"{name}.toml"
    schedule = make_schedule(found, found.seed, SHIPPED)
    assert any(isinstance(fault, Start) for fault in schedule.faults)
    if found.mode == "cost":
        assert prepare(found, found.seed, schedule).plan.outfit.terms.settings.rules.numel == MOST_CELLS


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("speed = 3", "peers[1]: unknown key 'speed'; known are"),
        ("tokens_per_second = 3", "did you mean 'tokens_per_s'"),
        ('regions = ["Iova"]', "'Iova' is unknown; did you mean 'Iowa'"),
        ("up_mbit = -1.0", "peers[1]: up_mbit = -1.0: must be between"),
        ("session = { mean_s = 0.0 }", "peers[1]: mean_s = 0.0"),
        ("absence = { mean_s = 5.0 }", "give session.mean_s as well"),
        ("join_s = [9.0, 3.0]", "give [first, last]"),
        (
            "session = { mean_s = 9.0, shape = 0.6 }",
            'peers[1]: shape = 0.6: exponential has none; set kind = "weibull"',
        ),
        (
            'session = { mean_s = 9.0 }\nabsence = { kind = "exponential", mean_s = 9.0, shape = 2.0 }',
            "leave shape out",
        ),
        ('trace = "t.csv"\njoin_s = [0.0, 0.0]', "peers[1]: trace and join_s: give one of them"),
        ('trace = "t.csv"\nsession = { mean_s = 9.0 }', "trace and session"),
        ('trace = "t.csv"\nabsence = { mean_s = 9.0 }', "trace and absence"),
        ("says_goodbye = 1.0", "peers[1]: says_goodbye without sessions: nobody goes away"),
        ('[network]\nloss = "much"', "network.loss: Expected `float`"),
        ('[[happenings]]\nat = 3.0\nwhat = "kill"', "say whom"),
        ('[[happenings]]\nat = 3.0\nwhat = "kill"\npeers = ["hone"]', "no peer is called 'hone'; did you mean 'home'"),
        ('[[happenings]]\nat = 3.0\nwhat = "burn"\npeers = ["home"]', "happenings[0].what: Invalid enum value 'burn'"),
        ('[[happenings]]\nat = 900.0\nwhat = "drop"', "raise duration_s"),
        ("[expect]\nmin_round = 3", "did you mean 'min_rounds'"),
        ("[expect]\nmax_loss = 3.0", 'expect.max_loss: mode = "cost" trains nothing; leave it out'),
        (
            "[expect]\nmax_recovery_iterations = 3.0",
            "there is no pipeline; leave it out, or set manifest.pipeline.stages",
        ),
        ("[[peers]]\nname = 'lab'\ncount = 1\ntokens_per_s = 1.0", "same name"),
        *(
            (f"[expect]\n{key} = {value}", f"expect: {key} = {value}: must be between 0")
            for key, value in (
                ("min_rounds", "-1"),
                ("min_members", "-1"),
                ("max_missed_share", "inf"),
                ("min_training_share", "nan"),
                ("max_median_round_s", "inf"),
            )
        ),
        (happens("kill", '"lab"', "share = 0.1"), "happenings[0]: share = 0.1 of 2 is nobody"),
        (happens("partition", '"home", "lab"'), "happenings[0]: partition with all peers on one side"),
        (happens("apart", '"lab/0"'), "happenings[0]: apart with one peer"),
        (happens("apart", '"lab"', "share = 0.5"), "happenings[0]: apart with one peer"),
        ("x = [", "no TOML"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(more: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        scenario(more)
    assert said in str(refused.value).replace("\n", " ")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('preset = "tiny"', 'preset = "huge"', "manifest.model.preset = 'huge'"),
        ('preset = "tiny"', 'preset = ["tiny"]', "manifest.model.preset = ['tiny']"),
        ('preset = "tiny"', 'preset = "tiny"\nseq_len = -5', "manifest.model.seq_len = -5: must be"),
        ('preset = "tiny"', 'preset = "tiny"\nseq_len = true', "manifest.model.seq_len = True: must be"),
        ("inner_steps = 4", "inner_step = 4", "manifest: unknown key swarm.inner_step"),
        ("inner_steps = 4", "inner_steps = 0", "swarm.inner_steps = 0"),
        (
            'mode = "cost"',
            'mode = "cost"\nmethod = "thrift"',
            "no method is called 'thrift'; there are default, thrifty, none; did you mean",
        ),
        ("count = 2\n", "count = 2\nmemory_gb = 0.001\n", "peers 'lab' have 0.001 GB"),
    ],
)
def test_manifests_that_cannot_be_are_refused(old: str, new: str, said: str) -> None:
    made = scenario(base=BASE.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        prepare(made, 0, make_schedule(made, 0, Path()))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["", "default", "thrifty", "none"])
def test_a_scenario_trains_by_a_method_as_a_founder_would_have_it(name: str) -> None:
    """What the file says stays."""
    line = f'\nmethod = "{name}"' if name else ""
    made = scenario(base=BASE.replace('mode = "cost"', 'mode = "cost"' + line).replace("steps = 4", "steps = 6"))
    assert parse_scenario(write_scenario(made), name="test") == made
    manifest = read_scenario(made, bytes(32))[0].manifest
    assert manifest.inner_steps == 6
    if name == "none":
        assert (manifest.inner, manifest.outer, manifest.fragments) == (InnerSpec(), OuterSpec(), 1)
        return
    method = training_method(name or "default", LONG_RUN)
    assert (manifest.inner.optimizer, manifest.outer.momentum, manifest.fragments) == ("muon", 0.5, 3)
    assert manifest.uplink_codec == manifest.downlink_codec == method.codec and manifest.delay_steps == "auto"
    assert manifest.inner.lr == parse_optimizer("muon").usual_lr(num_parameters(PRESETS["tiny"]))


def test_a_learning_rate_that_is_said_stays() -> None:
    made = scenario("[manifest.inner]\nlr = 0.25\n")
    assert read_scenario(made, bytes(32))[0].manifest.inner.lr == 0.25


VALUES = {
    "peers": ('["lab", "home/0"]', '["home"]'),
    "share": ("1.0", "0.7"),
    "for_s": ("20.0", "30.0"),
    "factor": ("4.0", "5.0"),
    "probability": ("0.3", "0.4"),
    "seconds": ("1.0", "2.0"),
}
"""Of each key, the default where it has one, and another one."""


@pytest.mark.parametrize("what", TAKES)
def test_a_happening_takes_what_it_uses_and_nothing_else(what: What) -> None:
    """A key that it takes makes a difference; another is refused, even where it says what is so without."""
    begin = "join_s = [500.0, 500.0]\n" if what == "join" else ""
    begin += f'[[happenings]]\nat = 3.0\nwhat = "{what}"\n'
    keys = {key: values[0] for key, values in VALUES.items() if key in TAKES[what]}

    def made(keys: dict[str, str]) -> Scenario:
        return scenario(begin + "".join(f"{key} = {value}\n" for key, value in keys.items()))

    for key, (value, other) in VALUES.items():
        if key in keys:
            schedules = [make_schedule(made(one), 0, Path()).faults for one in (keys, keys | {key: other})]
            assert schedules[0] != schedules[1], key
        else:
            with pytest.raises(ConfigError, match=rf"happenings\[0\]: {what} with {key}: .*; leave {key} out"):
                made(keys | {key: value})


def test_a_delay_is_not_negative_and_a_share_is_of_somebody() -> None:
    delay = '[[happenings]]\nat = 3.0\nwhat = "delay"\n'
    with pytest.raises(ConfigError, match=r"happenings\[0\]: seconds = -1.0: must be between 0.0"):
        scenario(f"{delay}seconds = -1.0")
    with pytest.raises(ConfigError, match="share without peers: say of whom"):
        scenario(f"{delay}share = 0.5")
    behind = scenario(scripted(3.0, "skew", seconds=-2.0))
    assert Skew(at=3.0, peer=3, ahead_s=-2.0) in make_schedule(behind, 0, Path()).faults


def test_real_nodes_read_bytes() -> None:
    sections = '[manifest.data]\ntokenizer = "file"\n[[peers]]\nname = "home"'
    real = BASE.replace('mode = "cost"', 'mode = "real"')
    with pytest.raises(ConfigError, match=r"manifest\.data\.tokenizer = 'file': simulated nodes train on bytes"):
        scenario(base=real.replace('[[peers]]\nname = "home"', sections))
    scenario(
        "[expect]\nmax_loss = 3.0", base=real.replace('[[peers]]\nname = "home"', sections.replace("file", "bytes"))
    )


def test_a_folder_does_not_hide_a_shipped_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("churn-8").mkdir()
    assert find_scenario("churn-8") == SHIPPED / "churn-8.toml"
    Path("mine").write_text(BASE)
    assert find_scenario("mine") == Path("mine")
    Path("no-file").mkdir()
    with pytest.raises(ConfigError, match="no scenario is called 'no-file'"):
        find_scenario("no-file")


def test_files_are_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load_scenario(file)
    file.write_text(BASE.replace("about", "abuot"))
    with pytest.raises(ConfigError, match=r"mine\.toml.*did you mean 'about'"):
        load_scenario(file)
    with pytest.raises(ConfigError, match="did you mean 'straggler'"):
        find_scenario("stragler")


def test_a_node_makes_every_call_that_is_taken_for_a_pass() -> None:
    """They are known by their names: one that is renamed would cost nothing, and no other test would see it."""
    at = 30.0
    away = f'[[happenings]]\nat = {at}\nwhat = "leave"\npeers = ["lab"]\nfor_s = 10.0'
    made = scenario(away, base=BASE.replace("600.0", "70.0"))
    plan = prepare(made, 0, make_schedule(made, 0, Path())).plan
    called: set[str] = set()

    def seconds(peer: int, name: str) -> float:
        called.add(name)
        return plan.outfit.seconds(peer, name)

    async def spoil(swarm: Swarm) -> None:
        await asyncio.sleep(at)
        swarm.learners[0].outer.params[0] += 1.0  # so that it is repaired

    simulate(replace(plan, outfit=replace(plan.outfit, seconds=seconds)), meddler=spoil)
    assert PASSES <= called


def test_the_table_of_regions_is_whole_and_symmetric() -> None:
    assert len(regions.LINKS) == 12 * 11
    assert regions.between("Belgium", "Germany") == (0.004, 0.2425 * 2**30)
    assert regions.between("Australia", "Singapore") == regions.between("Singapore", "Australia")
    assert regions.between("Netherlands", "London")[1] == pytest.approx(0.02368 * 2**30)


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


def scripted(at: float, what: str, who: str = "lab/0", **keys: float) -> str:
    rest = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return f'[[happenings]]\nat = {at}\nwhat = "{what}"\npeers = ["{who}"]\n{rest}'


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
    """Whoever was there is back, also who left; a window that would reach into it ends, and what would be later does not happen."""
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
at = 395.0
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
    assert max(fault.at for fault in faults if not isinstance(fault, Heal | Resume | Start)) == 360.0
    assert max(fault.at for fault in faults) == 400.0
    assert [fault.until for fault in faults if isinstance(fault, Delay)] == [400.0]
    plan = prepare(made, 3, make_schedule(made, 3, Path())).plan
    assert (plan.schedule.duration_s, plan.calm_s) == (550.0, 150.0), "the last third of a plan's calm comes after it"


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
    (tmp_path / "t.csv").write_text("from,to\n1,2\n")
    with pytest.raises(ConfigError, match="start_s,end_s,host"):
        make_schedule(made, 0, tmp_path)
