"""What a founder's manifest says where nobody has said anything: a method's settings, laps that fit, a learning rate for the model's size."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from tests.node.founded import found
from typer.main import get_command

from farflung.compression.policy import parse_policy
from farflung.node import daemon
from farflung.node.cli import app
from farflung.node.founding import FEEDBACK_BITS
from farflung.node.options import CreateOptions
from farflung.node.recipe import read_recipe
from farflung.protocol.errors import ConfigError
from farflung.protocol.lap import Laps
from farflung.protocol.manifest import Manifest, open_manifest
from farflung.protocol.manifest_sections import OuterSpec
from farflung.training.methods import LONG_RUN, METHOD_NAMES, training_method


def test_stages_have_rounds_more_often(tmp_path: Path, corpus: Path) -> None:
    """Unless it is said how often."""
    for name, flags, steps in (
        ("alpha", {}, 15),
        ("beta", {"inner_steps": 60}, 60),
        ("gamma", {"fragments": 4}, 16),
    ):
        for method in ("none", "default"):
            flags |= {"method": method, "home": tmp_path / method}
            _, manifest = found(tmp_path, corpus, name=name, config=None, preset="1m", stages=2, **flags)
            assert manifest.inner_steps == steps


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_method_is_what_neither_flags_nor_the_file_say(tmp_path: Path, corpus: Path, name: str) -> None:
    options = CreateOptions(name="b", method=name, data=str(corpus), steps=300, home=tmp_path / "a", open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    method = training_method(name, 300)
    assert read_recipe(manifest).terms().growth == manifest.outer.lr_growth == method.outer_growth == 0.25
    assert (manifest.inner.optimizer, manifest.outer.lr, manifest.outer.momentum) == (
        "muon",
        method.outer_lr,
        method.outer_momentum,
    )
    assert (manifest.uplink_codec, manifest.downlink_codec) == (method.codec, method.mean_codec)
    assert (manifest.feedback.uplink, manifest.feedback.downlink) == ("kept", "none")
    assert manifest.feedback.last_codec == method.last_codec == "deadzone(bits=2.5)"
    last, usual = (parse_policy(codec).default for codec in (method.last_codec, method.codec))
    terms = read_recipe(manifest).terms()
    assert terms.last is not None and terms.settings.last_codec == method.last_codec
    assert (
        terms.settings.last_bytes_per_element >= terms.settings.bytes_per_element
        and terms.settings.align % last.block == 0
    )
    assert terms.settings.align == math.lcm(last.block, usual.block)
    assert (manifest.inner_steps, manifest.fragments, manifest.laps) == (30, 3, Laps(least=10, most=10))
    assert manifest.fragment_pattern == "strided"
    assert read_recipe(manifest).settings().uplink == method.codec

    (tmp_path / "c.toml").write_text("[outer]\nlr = 0.4\n")
    other = dataclasses.replace(
        options, name="c", config=tmp_path / "c.toml", codec="int8(block=128)", inner_steps=5, optimizer="adamw"
    )
    manifest = open_manifest(daemon.create(other).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner.optimizer, manifest.outer.lr, manifest.outer.momentum) == (
        "adamw",
        0.4,
        method.outer_momentum,
    )
    assert manifest.outer.lr_growth == 0.0, "somebody chose that rate"
    assert manifest.uplink_codec == "int8(block=128)" and manifest.laps == Laps(least=5, most=5)
    assert manifest.fragments == 1, "three do not divide five steps"
    assert manifest.feedback.last_codec == "", "it is coarser than the codec of the flag"


@pytest.mark.parametrize(
    ("inner_steps", "delay_steps", "fragments"),
    [(10, None, 2), (20, None, 2), (25, None, 1), (27, None, 3), (30, 9, 3), (30, 10, 2), (30, 15, 1), (4, 2, 1)],
)
def test_as_many_fragments_as_divide_the_steps_and_leave_room_for_the_delay(
    tmp_path: Path, corpus: Path, inner_steps: int, delay_steps: int | None, fragments: int
) -> None:
    options = CreateOptions(
        name="b",
        data=str(corpus),
        steps=300,
        inner_steps=inner_steps,
        delay_steps=delay_steps,
        home=tmp_path,
        open=True,
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner_steps, manifest.fragments) == (inner_steps, fragments)


@pytest.mark.parametrize(
    ("flags", "said", "last"),
    [
        ({"codec": "sign"}, "", "deadzone(bits=2.5)"),
        ({"codec": "1d:fp32,topk(chunk=4096,k=64,bits=2)"}, "", "deadzone(bits=2.5)"),
        ({"codec": "int4"}, "", ""),
        ({}, '[swarm]\nuplink_codec = "int8"\n', "deadzone(bits=2.5)"),  # means are as coarse as ever
        ({"codec": "sign"}, '[feedback]\nuplink = "residual"\n', ""),
        ({"codec": "sign"}, '[feedback]\nlast_codec = "int4"\n', "int4"),
    ],
)
def test_what_is_kept_is_told_in_the_end_however_coarse_the_codec(
    tmp_path: Path, corpus: Path, flags: dict[str, Any], said: str, last: str
) -> None:
    (tmp_path / "c.toml").write_text(said)
    options = CreateOptions(
        name="b", data=str(corpus), steps=300, config=tmp_path / "c.toml", home=tmp_path, open=True, **flags
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.feedback.last_codec == last
    coarse = "sign" in manifest.downlink_codec or "topk" in manifest.downlink_codec
    assert manifest.feedback.downlink == ("residual" if coarse else "none")
    assert manifest.feedback.after_rounds == 0, "a mean that is owed is nobody's progress, so it is sent from the first"
    long = dataclasses.replace(options, steps=LONG_RUN, home=tmp_path / "long")
    manifest = open_manifest(daemon.create(long).manifest.read_bytes(), swarm=None, peer=None)
    own = manifest.downlink_codec == training_method("default", LONG_RUN).mean_codec
    assert manifest.feedback.downlink == ("residual" if coarse or own else "none"), "however long the run is"
    assert manifest.feedback.after_rounds == 0


@pytest.mark.parametrize(("name", "inner_steps"), [("default", 60), ("thrifty", 240)])
def test_a_method_sends_less_in_a_long_run(name: str, inner_steps: int, tmp_path: Path, corpus: Path) -> None:
    options = CreateOptions(name="b", method=name, data=str(corpus), steps=LONG_RUN, home=tmp_path, open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.inner_steps == inner_steps and manifest.fragments == 3
    assert manifest.uplink_codec == training_method(name, LONG_RUN).codec != training_method(name, LONG_RUN - 1).codec


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("steps", [300, LONG_RUN])
def test_laps_may_be_chosen_in_runs_of_any_length(tmp_path: Path, corpus: Path, name: str, steps: int) -> None:
    options = CreateOptions(
        name="b", method=name, data=str(corpus), steps=steps, inner_steps="auto", home=tmp_path / "a", open=True
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.fragments == "auto" and manifest.max_fragments == 3
    least = training_method(name, steps).inner_steps
    assert manifest.laps == Laps(least=least // 3, most=166, widths=(1, 3)), "it sends as little as it says"
    (tmp_path / "c.toml").write_text("[swarm]\nmax_inner_steps = 12\n")
    fewer = dataclasses.replace(options, home=tmp_path / "b", config=tmp_path / "c.toml")
    manifest = open_manifest(daemon.create(fewer).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.laps == Laps(least=4, most=4, widths=(1, 3))


def test_help_says_what_is_filled_in(tmp_path: Path, corpus: Path) -> None:
    def filled(name: str, steps: int = 300, **flags: Any) -> Manifest:
        options = CreateOptions(name=name, data=str(corpus), steps=steps, home=tmp_path, open=True, **flags)
        return open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)

    said = {param.name: param.help for param in get_command(app).commands["create"].params if hasattr(param, "help")}
    short, long, staged = filled("short"), filled("long", LONG_RUN), filled("staged", stages=2)
    auto = filled("auto", inner_steps="auto")
    plain, plain_auto = filled("plain", method="none"), filled("plain-auto", method="none", inner_steps="auto")
    laps = f"of `default` {short.inner_steps}, from {LONG_RUN:,} steps on {long.inner_steps}; of `none` {plain.inner_steps}"
    assert f"Default: the method's ({laps}), with --stages {staged.inner_steps}." in said["inner_steps"]
    parts = (
        f"{short.fragments}, or what divides H; with --inner-steps auto: {auto.fragments}; of `none` {plain.fragments}"
    )
    assert f"Default: the method's ({parts})." in said["fragments"] and plain_auto.fragments == 1
    delays = f"only where --inner-steps is {plain_auto.delay_steps}, else {plain.delay_steps}"
    assert f"Default: {short.delay_steps}; with --method none {delays}." in said["delay_steps"]
    assert f"of `none` `{plain.uplink_codec}`" in said["codec"] and short.uplink_codec != plain.uplink_codec
    assert short.feedback.uplink == "kept" and "keeps it in the sender's parameters" in said["feedback"]
    assert (
        plain.feedback.uplink == "none" and f"of `none`: with codecs below {FEEDBACK_BITS:g} bits" in said["feedback"]
    )


def test_a_method_leaves_the_layers_of_stages_in_their_order(tmp_path: Path, corpus: Path) -> None:
    for name, stages, order in (("b", 2, "sequential"), ("c", 1, "strided")):
        options = CreateOptions(
            name=name, method="default", data=str(corpus), stages=stages, steps=300, home=tmp_path / name, open=True
        )
        manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
        assert manifest.fragment_pattern == order


def test_mixing_would_lose_what_is_kept(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    options = CreateOptions(name="b", config=file, data=str(corpus), home=tmp_path / "a", open=True)
    file.write_text("[swarm]\nmix = 0.5\n[feedback]\nuplink = 'kept'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r'swarm.mix = 0.5: with feedback.uplink = "kept".*write mix = "rebase"'):
        daemon.create(options)
    file.write_text("[swarm]\nmix = 0.5\n", encoding="utf-8")
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.mix, manifest.feedback.uplink, manifest.feedback.last_codec) == (0.5, "residual", "")


def test_a_method_says_nothing_of_an_outer_optimiser_that_is_not_its_own(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text("[outer]\noptimizer = 'sgd'\nlr = 1.0\nmomentum = 0\n", encoding="utf-8")
    options = CreateOptions(name="b", config=file, data=str(corpus), home=tmp_path / "a", open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.outer == OuterSpec(optimizer="sgd", lr=1.0, momentum=0.0)
    assert manifest.inner.optimizer == "muon" and manifest.feedback.uplink == "kept"


@pytest.mark.parametrize(("method", "inner_steps"), [("default", 32), ("none", 104)])
def test_laps_fit_the_fragments_that_somebody_wants(
    tmp_path: Path, corpus: Path, method: str, inner_steps: int
) -> None:
    options = CreateOptions(
        name="b", method=method, fragments=8, data=str(corpus), home=tmp_path / "a", steps=300, open=True
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner_steps, manifest.fragments) == (inner_steps, 8)


@pytest.mark.parametrize(
    ("options", "lr"),
    [
        ({"method": "none"}, 2.2e-3),
        ({"method": "none", "optimizer": "muon"}, 4.4e-3),
        ({}, 4.4e-3),
        ({"method": "default", "lr": 0.01}, 0.01),
        ({"optimizer": "torch.optim.NAdam"}, 1e-3),
    ],
)
def test_the_learning_rate_fits_the_model_where_nobody_says_one(
    tmp_path: Path, corpus: Path, options: dict[str, Any], lr: float
) -> None:
    made = daemon.create(CreateOptions(name="a", data=str(corpus), home=tmp_path, preset="3m", **options))
    manifest = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.inner.lr == pytest.approx(lr, rel=0.1)
