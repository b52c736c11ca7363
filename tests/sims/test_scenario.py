"""Scenario files: shipped ones are sound, and wrong ones are refused with the key and the remedy."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from farflung.node.events import Event
from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest_sections import InnerSpec, OuterSpec
from farflung.sims import regions
from farflung.sims.churn import make_schedule
from farflung.sims.costs import PASSES, PRICED, TIMED
from farflung.sims.faults import Skew, Start
from farflung.sims.happenings import TAKES, What
from farflung.sims.scenario import (
    SHIPPED,
    Lasting,
    Scenario,
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


def scripted(at: float, what: str, who: str = "lab/0", **keys: float) -> str:
    rest = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return f'[[happenings]]\nat = {at}\nwhat = "{what}"\npeers = ["{who}"]\n{rest}'


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
        (happens("slow", '"lab"', "factor = 1.0"), "happenings[0]: slow with factor = 1 does nothing"),
        (happens("delay", '"lab"', "seconds = 0.0"), "happenings[0]: delay with seconds = 0 does nothing"),
        *(
            (
                f'[[happenings]]\nat = 3.0\nwhat = "{what}"\nprobability = 0.0',
                f"{what} with probability = 0 does nothing",
            )
            for what in ("drop", "duplicate")
        ),
        ('[[happenings]]\nat = 600.0\nwhat = "drop"', "happenings[0].at = 600: not before the end, so that it never"),
        (happens("apart", '"lab"', "share = 0.5"), "happenings[0]: apart with one peer"),
        *(
            (happens(what, '"lab"', "for_s = 1.0"), f"happenings[0]: {what} with for_s = 1: a process takes 8 s to end")
            for what in ("kill", "power", "leave")
        ),
        (
            "join_s = [600.0, 700.0]",
            "peers[1].join_s = [600.0, 700.0]: not before the end, so that no 'lab' is ever there",
        ),
        ("[expect]\nmin_members = 6", "expect.min_members = 6: there are 5 peers; lower it, or raise peers.count"),
        (
            '[manifest.data]\nspec = "text:no-file"',
            "manifest.data.spec = 'text:no-file': mode = \"cost\" reads no data",
        ),
        ("[costs]\ntrained_per_s = 1e9", "costs.trained_per_s = 1e+09: it is what steps take of shared processors"),
        ("[costs.calls]\ndecod = [0.1, 0.0]", "costs: calls.decod: no node makes such a call; did you mean 'decode'"),
        ("[costs.calls]\ntrain = [0.1, 0.0]", "costs: calls.train: what that takes follows from peers.tokens_per_s"),
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
        *(
            ("[[peers]]", f"[manifest.data]\n{key} = {value}\n[[peers]]", f"manifest.data.{key}: it is found in what")
            for key, value in (("num_samples", "9"), ("content_hash", '"00"'), ("tokenizer_hash", '""'))
        ),
        ("inner_steps = 4", 'inner_steps = 4\nadmission = "invite"', "manifest.swarm: simulated swarms are open"),
        ("inner_steps = 4", 'inner_steps = 4\ninvite_key = ""', "leave admission and invite_key out"),
    ],
)
def test_manifests_that_cannot_be_are_refused(old: str, new: str, said: str) -> None:
    made = scenario(base=BASE.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        prepare(made, 0, make_schedule(made, 0, Path()))
    assert said in str(refused.value)


CALM = BASE.replace("duration_s = 600.0", 'duration_s = 160.0\nmethod = "none"\ncalm_s = {calm_s}').replace(
    "inner_steps = 4", "batch_tokens = 512\ninner_steps = {inner_steps}"
)
"""Steps of 0.128 s of the fastest, who stay, and rounds of `min_round_s` = 5."""


@pytest.mark.parametrize(
    ("inner_steps", "least_s", "key"),
    [
        ("20", 31.0, "inner_steps"),
        ("20\nfragments = 4", 23.0, "inner_steps"),
        ('"auto"\nmin_inner_steps = 4\nmax_inner_steps = 30', 36.0, "max_inner_steps"),
    ],
    ids=["fixed", "fragments", "chosen"],
)
def test_a_calm_is_so_long_that_its_last_quarter_has_a_round(inner_steps: str, least_s: float, key: str) -> None:
    """Or a swarm that is well would be called broken."""
    short, long = (
        scenario(base=CALM.format(inner_steps=inner_steps, calm_s=calm_s)) for calm_s in (least_s - 1.0, least_s)
    )
    with pytest.raises(ConfigError, match=rf"calm_s = .*; give {least_s:g} or more, or fewer manifest\.swarm\.{key}$"):
        prepare(short, 0, make_schedule(short, 0, Path()))
    assert simulate(prepare(long, 0, make_schedule(long, 0, Path())).plan).violations == []


def test_a_calm_is_as_long_as_the_laps_of_the_fastest_that_stay() -> None:
    """Of all slow peers there may be one that makes five steps in the same time; where the fast ones may have gone it is of them that a calm has to be long enough."""
    slow = f'\n[[peers]]\nname = "slow"\ncount = 1\ntokens_per_s = {50.0}\n'
    made = scenario(slow, base=CALM.format(inner_steps="20", calm_s=61.0))
    prepare(made, 0, make_schedule(made, 0, Path()))
    gone = replace_struct(made, peers=tuple(replace_struct(one, session=Lasting(mean_s=900.0)) for one in made.peers))
    with pytest.raises(ConfigError, match=r"give \d+ or more"):
        prepare(gone, 0, make_schedule(gone, 0, Path()))


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
    assert (manifest.uplink_codec, manifest.downlink_codec) == (method.codec, method.mean_codec)
    assert manifest.delay_steps == "auto"
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


def test_peers_that_a_script_brings_may_be_there_later_than_any_by_themselves() -> None:
    scenario("join_s = [600.0, 700.0]\n" + happens("join", '"lab/1"'))
    whole = scenario("join_s = [500.0, 600.0]\n")
    assert replace_struct(whole, duration_s=100.0).duration_s == 100.0, "`sim local --minutes` plays a part of a file"


def test_what_goes_away_for_eight_seconds_is_back_then() -> None:
    faults = make_schedule(scenario(scripted(3.0, "kill", for_s=8.0)), 0, Path()).faults
    assert Start(at=11.0, peer=3) in faults


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

    def seconds(peer: int, name: str, share: float) -> float:
        called.add(name)
        return plan.outfit.seconds(peer, name, share)

    async def spoil(swarm: Swarm) -> None:
        await asyncio.sleep(at)
        swarm.learners[0].outer.params[0] += 1.0  # so that it is repaired

    simulate(replace(plan, outfit=replace(plan.outfit, seconds=seconds)), meddler=spoil)
    assert PASSES <= called <= PRICED | TIMED


NEWCOMER = """
about = "one has made rounds, another comes"
mode = "cost"
duration_s = 330.0
[manifest.model]
preset = "3m"
[manifest.swarm]
inner_steps = 600
[[peers]]
name = "home"
count = 1
tokens_per_s = 1000.0
up_mbit = 1.0
[[peers]]
name = "new"
count = 1
tokens_per_s = 1000.0
join_s = [50.0, 50.0]
"""


@pytest.mark.parametrize("method", ["default", "thrifty", "none"])
def test_a_state_takes_its_time_whatever_the_codecs_are(method: str) -> None:
    made = scenario(base=NEWCOMER.replace("mode =", f'method = "{method}"\nmode ='))
    prepared, spans = prepare(made, 0, make_schedule(made, 0, Path())), list[float]()

    def see(line: str, event: Event) -> None:
        if event["event"] == "span" and event["what"] == "download":
            spans.append(event["seconds"])

    report = simulate(prepared.plan, sink=see)
    real = 8 * num_parameters(PRESETS["3m"])
    assert spans == [pytest.approx(real / 125_000.0, rel=0.1)]
    assert report.net_bytes * prepared.bytes_factor == pytest.approx(real, rel=0.1)


def test_the_table_of_regions_is_whole_and_symmetric() -> None:
    assert len(regions.LINKS) == 12 * 11
    assert regions.between("Belgium", "Germany") == (0.004, 0.2425 * 2**30)
    assert regions.between("Australia", "Singapore") == regions.between("Singapore", "Australia")
    assert regions.between("Netherlands", "London")[1] == pytest.approx(0.02368 * 2**30)
