"""`farflung sim fuzz`: scenarios of all kinds are drawn, what is broken is found in them and made small, and its file breaks again."""

import json
from pathlib import Path

import pytest
from tests.sims.test_broken import broken
from tests.sims.test_broken_pipeline import broken as broken_pipeline
from tests.thorough import further
from typer.testing import CliRunner

from farflung.protocol.manifest_sections import CHECKFREE, CHECKFREE_PLUS
from farflung.sims import fuzzing
from farflung.sims.choices import Choices
from farflung.sims.churn import make_schedule
from farflung.sims.failure import kind_of, replay
from farflung.sims.fuzzing import SHRINK_TRIES, make_small, play, write_found
from farflung.sims.main import app
from farflung.sims.scenario import load_scenario, parse_scenario
from farflung.sims.scenario_drawing import ATTACKS, GROWS_EVERY, MAX_SIZE, NATS, WHATS, draw_scenario, size_of
from farflung.sims.scenario_run import plan_scenario
from farflung.sims.scenario_toml import SCENARIO, write_scenario


def test_whatever_is_drawn_is_a_scenario_can_be_run_and_is_its_file() -> None:
    scenarios = []
    for seed in range(0, 12 * GROWS_EVERY, 3):
        choices = Choices(seed)
        scenario = draw_scenario(seed, choices)
        assert parse_scenario(write_scenario(scenario), name="other") == scenario
        assert draw_scenario(seed, Choices(seed, choices.taken)) == scenario
        plan_scenario(scenario, seed, make_schedule(scenario, seed, Path()))
        scenarios.append(scenario)
    assert {(one.mode, one.stages > 1) for one in scenarios} == {("cost", False), ("real", False), ("real", True)}
    classes = [peers for one in scenarios for peers in one.peers]
    assert {peers.nat for peers in classes} == set(NATS)
    assert {attack for peers in classes for attack in peers.attacks} == set(ATTACKS)
    assert {happening.what for one in scenarios for happening in one.happenings} == set(WHATS)
    assert {(one.mode, one.network.greetings) for one in scenarios} == {
        ("cost", "sent"),
        ("cost", "reckoned"),
        ("real", "sent"),
    }
    assert any(peers.session for peers in classes) and any(peers.stage for peers in classes)
    manifest = {(section, key) for one in scenarios for section, keys in one.manifest.items() for key in keys}
    assert {("swarm", key) for key in ("fragments", "delay_steps", "mix", "uplink_codec", "max_group")} <= manifest
    assert {("feedback", "uplink"), ("outer", "optimizer")} <= manifest
    pipelines = [drawn_pipeline(seed) for seed in range(600)]
    routes = {key for one in pipelines for key in one}
    assert {one.get("recovery") for one in pipelines} == {None, CHECKFREE, CHECKFREE_PLUS}
    assert {"stages", "skip", "routing", "swaps", "policy", "recovery", "shadows", "forward_codec"} <= routes
    assert any(one.manifest["swarm"]["inner_steps"] == "auto" for one in scenarios)


def drawn_pipeline(seed: int) -> dict[str, object]:
    """What its manifest says of pipelines."""
    return draw_scenario(seed, Choices(seed)).manifest.get("pipeline", {})


def test_later_seeds_draw_more() -> None:
    assert (size_of(0), size_of(10_000)) == (2, MAX_SIZE)
    drawn = [draw_scenario(seed, Choices(seed)) for seed in (*range(15), *range(400, 415))]
    assert max(len(one.happenings) for one in drawn[:15]) < max(len(one.happenings) for one in drawn[15:])
    assert sum(one.num_peers for one in drawn[:15]) < sum(one.num_peers for one in drawn[15:])


def test_the_simplest_of_all_is_a_few_peers_to_which_nothing_happens() -> None:
    simplest = draw_scenario(7, Choices(7, {}))
    assert (simplest.num_peers, simplest.happenings, simplest.calm_s) == (1, (), 0.0)
    text = write_scenario(simplest)
    assert len(text.splitlines()) < 35 and "[network]" not in text and "fragments" not in text


def test_what_is_broken_is_found_made_small_and_played_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the first draw; and what is left of it is three peers at most, to which one thing happens."""
    broken["weighs_all_contributors_alike"](monkeypatch)
    fuzzed = CliRunner().invoke(app, ["sim", "fuzz", "--seeds", "1", "--out", str(tmp_path), "--json"])
    assert fuzzed.exit_code == 1, fuzzed.output
    [found] = json.loads(fuzzed.stdout)["failed"]
    small = [line for line in fuzzed.stderr.splitlines() if line.startswith("seed 0 is made small: ")]
    assert len(small) >= 2 and f": 0 of {SHRINK_TRIES} tries" in small[0], "it takes a while"
    assert any("happenings: invariant 4" in line or "happenings: ok" in line for line in small)
    assert found["violations"][0].startswith("invariant 4:") and found["peers"] <= 3 and found["happenings"] <= 1
    folder = Path(found["folder"])
    small = load_scenario(folder / SCENARIO)
    assert small.duration_s < 90.0 and len(small.manifest) < 6
    again = CliRunner().invoke(
        app, ["sim", "run", str(folder / SCENARIO), "--seed", str(found["seed"]), "--out", str(tmp_path), "--json"]
    )
    assert again.exit_code == 1 and json.loads(again.stdout)["violations"][0] == found["violations"][0]
    replayed = CliRunner().invoke(app, ["sim", "replay", str(folder)])
    assert replayed.exit_code == 0 and "the same log" in replayed.output


def test_what_ends_the_search_names_its_seed_and_leaves_its_scenario(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A defect of the simulator, and not of a node."""

    def fails(plan: object, **_: object) -> None:
        raise KeyError("nobody has thought of it")

    monkeypatch.setattr(fuzzing, "simulate_any", fails)
    fuzzed = CliRunner().invoke(app, ["sim", "fuzz", "--first", "7", "--out", str(tmp_path / "out")])
    file = tmp_path / "out" / "fuzz-7" / SCENARIO
    assert isinstance(fuzzed.exception, KeyError) and any("--first 7" in note for note in fuzzed.exception.__notes__)
    assert f"seed 7: KeyError ends the search: farflung sim run {file}; farflung sim fuzz --first 7" in fuzzed.stderr
    assert load_scenario(file) == draw_scenario(7, Choices(7))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broken_pipeline_is_found_made_small_and_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the second pipeline that is drawn; two peers in two stages are left of it."""
    broken_pipeline["copies_cost_nothing"](monkeypatch)
    choices = Choices(6)
    _, report = play(draw_scenario(6, choices))
    assert report.num_peers == 6 and report.violations[0].startswith("invariant 8:")
    small = make_small(6, choices.taken, report, max_tries=60)
    assert (small.num_peers, small.stages, small.happenings) == (2, 2, ())
    found = write_found(tmp_path, small)
    _, again = replay(tmp_path)
    assert "of copies" in again.violations[0] and again.log_sha256 == found.log_sha256


@pytest.mark.slow
@pytest.mark.timeout(300)  # up to a hundred tries, of up to ten peers: 40 s on a quiet machine
@pytest.mark.parametrize(
    ("name", "which", "needs"),
    [("forgets_the_samples_of_the_dead", 6, (1,)), *further(("moves_for_a_round_that_failed", 2, (0, 1, 2)))],
)
def test_what_takes_misfortune_is_found_and_only_that_is_left(
    name: str, which: int, needs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the first forty draws: which one changes with everything that moves a message, the release of Python too. A single happening is left, or that
    peers come and go, or that messages are lost; a round also fails where links are slow, and nothing happens, and where
    messages are lost while somebody is killed."""
    broken[name](monkeypatch)
    for seed in range(40):
        choices = Choices(seed)
        _, report = play(draw_scenario(seed, choices))
        if report.violations:
            break
    assert report.violations[0].startswith(f"invariant {which}:")
    small = make_small(seed, choices.taken, report, max_tries=100)
    misfortunes = len(small.happenings) + sum(one.session is not None for one in small.peers)
    misfortunes += small.network.loss > 0.0
    assert small.num_peers <= 3 and misfortunes in needs
    assert kind_of(play(small)[1].violations[0]) == kind_of(report.violations[0])


def test_a_file_says_all_that_a_scenario_can() -> None:
    everything = parse_scenario(
        """
about = "All \\"kinds\\" of values"
mode = "real"
duration_s = 90.0
calm_s = 30.0
[manifest.model]
preset = "tiny"
[manifest.inner]
betas = [0.9, 0.99]
[manifest.pipeline]
stages = 2
layers = [1, 2]
[[peers]]
name = "home"
count = 2
tokens_per_s = 10.0
stage = 1
regions = ["Iowa", "Oregon"]
session = { kind = "weibull", mean_s = 30.0, shape = 0.5 }
absence = { mean_s = 9.0 }
[expect]
min_rounds = 2
[costs]
start_s = 1.0
calls = { "apply" = [0.1, 0.2] }
""",
        name="everything",
    )
    text = write_scenario(everything)
    assert parse_scenario(text, name="other") == everything
