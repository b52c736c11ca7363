"""`create` and what follows from it: manifests made and refused, recipes, and machines that they do not fit."""

import dataclasses
import math
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.node.founded import TEXT, TOML, found

from farflung.node import daemon, founding, machine
from farflung.node.identity import Identity
from farflung.node.listening import PORTS
from farflung.node.machine import choose_runtime, fit_memory
from farflung.node.options import CreateOptions
from farflung.node.paths import resolve_paths
from farflung.node.recipe import read_recipe, swarm_dataset, swarm_tokenizer
from farflung.node.storage import FileStorage, newest_history
from farflung.node.swarmfiles import load_port
from farflung.protocol.chain import genesis
from farflung.protocol.errors import ConfigError
from farflung.protocol.invitation import decode_invitation
from farflung.protocol.lap import Laps
from farflung.protocol.manifest import Manifest, open_manifest
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.inner import InnerConfig
from farflung.training.memory import RESERVE, Beside, forecast, parse_options
from farflung.training.methods import training_method
from farflung.training.optimizers import parse_optimizer
from farflung.training.presets import PRESETS
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- create --------------------------------------------------------------------------------------------------------


def test_a_spec_that_is_no_text_is_named_by_its_key(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text('[model]\npreset = "tiny"\n[data]\nspec = 3\n[swarm]\ntotal_steps = 9\n')
    options = CreateOptions(name="n", config=file, home=tmp_path / "home")
    with pytest.raises(ConfigError, match=r"data\.spec = 3: give `python`, a path"):
        founding.found_swarm(options)


def test_data_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text(TEXT)
    (tmp_path / "data" / "logo.png").write_bytes(b"\x89PNG" + bytes(500))
    with pytest.raises(ConfigError, match=r"logo\.png is no text in UTF-8.*take it out of the data"):
        found(tmp_path, tmp_path / "data")


def test_data_that_turns_into_no_text_is_refused_by_who_joins(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus)
    corpus.write_bytes(corpus.read_bytes() + b"\xff")
    with pytest.raises(ConfigError, match=rf"cannot be opened: .*{corpus.name} is no text in UTF-8, by its byte"):
        swarm_dataset(manifest, ByteTokenizer())


def test_create_says_how_much_is_held_out(tmp_path: Path) -> None:
    """And that is a part of the text, not the whole of it and the licence the rest."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    (folder / "LICENSE").write_text("as is. " * 120)
    made, manifest = found(tmp_path, folder)
    assert made.samples == manifest.data.num_samples > 0.8 * len(TEXT) / 32
    assert made.heldout_tokens is not None and 0 < made.heldout_tokens < 0.2 * len(TEXT)


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_a_kind_of_data_without_a_path_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"nothing stands behind it; give {kind}:PATH"):
        found(tmp_path, tmp_path, data=f"{kind}:")


def test_a_link_to_nothing_in_data_is_named(tmp_path: Path, corpus: Path) -> None:
    (corpus.parent / "link").symlink_to("none")
    with pytest.raises(ConfigError, match=r"link cannot be read: No such file"):
        found(tmp_path, corpus.parent)


def test_create_writes_manifest_secret_and_genesis(tmp_path: Path, corpus: Path) -> None:
    made, manifest = found(tmp_path, corpus, port=4242, seed=7, local=True, lr=1e-3)
    assert (manifest.inner.lr, manifest.model.init_seed, manifest.data.order_seed) == (1e-3, 7, 7)
    assert manifest.data.spec == f"text:{corpus}" and manifest.model.vocab_size == 264
    invitation = decode_invitation(made.invitation)
    assert (invitation.name, invitation.swarm.hex()) == ("alpha", made.hash_hex)
    assert [a.rpartition("/p2p/")[0] for a in invitation.addresses] == ["/ip4/127.0.0.1/tcp/4242"]
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("alpha")
    secret = swarm.folder / "invite"
    assert bytes.fromhex(secret.read_text()) == invitation.invite_seed
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert (made.port, load_port(swarm), made.addresses) == (4242, 4242, invitation.addresses) and not made.published
    anchor, history = newest_history(FileStorage(swarm.checkpoint).load_history())
    assert anchor is None
    assert [c.commit for c in history] == [genesis(manifest.founder, read_recipe(manifest).rules)]


def test_the_invitation_says_where_the_founder_will_be(tmp_path: Path, corpus: Path) -> None:
    made, _ = found(tmp_path, corpus)
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("alpha")
    assert made.port in PORTS and load_port(swarm) == made.port
    addresses = decode_invitation(made.invitation).addresses
    assert made.addresses == addresses and f"/ip4/127.0.0.1/tcp/{made.port}" in [a.split("/p2p/")[0] for a in addresses]
    other, _ = found(tmp_path, corpus, name="beta", port=0)
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("beta")
    assert (other.port, load_port(swarm), decode_invitation(other.invitation).addresses) == (0, 0, ())
    (swarm.folder / "port").write_text("many")
    with pytest.raises(ConfigError, match="port is damaged"):
        load_port(swarm)


def test_a_machine_without_free_ports_is_told_what_to_do(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founding, "free_ports", lambda count, *, local: [])
    with pytest.raises(ConfigError, match="from 20000 to 31999 are free here; give one with --port"):
        found(tmp_path, corpus)
    assert resolve_paths(tmp_path / "a", {}).swarms() == []


def test_defaults_need_nothing_but_a_name_and_fit_together(tmp_path: Path, corpus: Path) -> None:
    made = daemon.create(CreateOptions(name="b", data=str(corpus), steps=30, home=tmp_path / "a", open=True))
    manifest = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.model.preset, manifest.inner_steps, manifest.inner.warmup_steps) == ("1m", 30, 3)
    assert manifest.admission.rule == "open" and not (made.manifest.parent / "invite").exists()
    recipe = read_recipe(manifest)
    assert recipe.num_parameters == recipe.settings().rules.numel == sum(t.numel() for t in recipe_parameters(manifest))
    assert recipe.about.endswith(" M parameters, 30 steps, 3 rounds")
    assert (manifest.inner.optimizer, manifest.fragments, manifest.delay_steps) == ("muon", 3, "auto")
    assert manifest.uplink_codec == training_method("default", 30).codec, "the method called default is the default"


def test_layers_are_dealt_by_what_stages_compute_and_a_file_decides(tmp_path: Path, corpus: Path) -> None:
    """With the tokens of bytes a head is little; one of a vocabulary that computes as much as four layers costs stage 0 so many."""
    shape = "[model]\ndim = 64\nnum_layers = 12\nnum_heads = 2\nnum_kv_heads = 2\nffn_dim = 128\nseq_len = 16\nvocab_size = {}\n"
    layer = 4 * 64 * 64 + 3 * 64 * 128
    for name, vocab, more, layers in (
        ("alpha", 264, "", (4, 4, 4)),
        ("beta", 4 * layer // 64, "", (1, 5, 6)),
        ("gamma", 4 * layer // 64, "[pipeline]\nlayers = [4, 6, 2]\n", (4, 6, 2)),
        ("epsilon", 4 * layer // 64, '[pipeline]\nrecovery = "checkfree"\nshadows = 0\n', ()),  # as many for each
    ):
        file = tmp_path / f"{name}.toml"
        file.write_text(shape.format(vocab) + more)
        made, manifest = found(tmp_path, corpus, name=name, config=file, preset=None, stages=3)
        assert manifest.pipeline.layers == made.layers == layers
    made, manifest = found(tmp_path, corpus, name="delta")
    assert manifest.pipeline.layers == made.layers == ()


def test_laps_may_be_left_to_the_swarm(tmp_path: Path, corpus: Path) -> None:
    options = CreateOptions(
        name="b", method="default", inner_steps="auto", data=str(corpus), steps=300, home=tmp_path / "a", open=True
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    assert (manifest.inner_steps, manifest.fragments, manifest.delay_steps) == ("auto", "auto", "auto")
    recipe = read_recipe(manifest)
    assert recipe.rules.laps == Laps(least=10, most=166, widths=(1, 3)) and recipe.rules.total_steps == 300
    assert recipe.about.endswith(" M parameters, 300 steps, 1 to 30 rounds")

    coarse = dataclasses.replace(options, name="c", method="none", codec="sign(block=256)", steps=4000)
    manifest = open_manifest(daemon.create(coarse).manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.feedback.after_rounds == 2, "a quarter of the run at the longest laps"


def recipe_parameters(manifest: Manifest) -> list[torch.Tensor]:
    from farflung.training.model import Decoder

    return list(Decoder(read_recipe(manifest).model, seed=0).parameters())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"name": "Bad Name"}, "swarm name"),
        ({"microbatches": 8}, "pipeline.microbatches: the model is not cut into stages; say into how many"),
        ({"preset": "1n", "config": None}, "no model is called '1n'"),
        ({"config": Path("preset.toml")}, "model.preset = 7: must be a string"),
        ({"data": "/nowhere/at/all"}, "no such file or folder"),
        ({"tokenizer": "/nowhere.json"}, "cannot read the tokenizer"),
        ({"method": "defualt"}, "no method is called 'defualt'; there are default, thrifty, none; did you mean"),
        ({"codec": "int9"}, "unknown codec"),
        ({"optimizer": "adamv"}, "no inner optimizer is called 'adamv'; there are adamw, muon, torch.optim.A"),
        ({"optimizer": "torch.optim.SGD(lr=0.1)"}, "its learning rate is not given here but by inner.lr"),
        ({"optimizer": "muon(speed=2)"}, "it takes adamw_lr, iterations, momentum"),
        ({"batch_tokens": 100}, "must be a multiple of model.seq_len"),
        (
            {"config": Path("version.toml")},
            "swarm.protocol_versions: the swarm speaks protocol versions [99], we speak",
        ),
        (
            {"config": Path("name.toml")},
            "swarm.name = 'beta' in name.toml, and the swarm that is founded is 'alpha': leave",
        ),
        ({"config": Path("/nowhere.toml")}, "cannot read /nowhere.toml"),
    ],
)
def test_create_refuses_in_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("preset.toml").write_text("[model]\npreset = 7\n")
    Path("version.toml").write_text("[swarm]\nprotocol_versions = [99]\n")
    Path("name.toml").write_text('[swarm]\nname = "beta"\n')
    with pytest.raises(ConfigError) as caught:
        found(tmp_path, corpus, **flags)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert resolve_paths(tmp_path / "a", {}).swarms() == []


def test_a_path_to_data_is_kept_in_full(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be started in another folder."""
    monkeypatch.chdir(corpus.parent)
    for name, typed in (("a", corpus.name), ("b", f"text:{corpus.name}"), ("c", f"text:{corpus}")):
        assert found(tmp_path, corpus, name=name, data=typed)[1].data.spec == f"text:{corpus}"
    assert founding.data_spec("shards:~/s") == f"shards:{Path.home() / 's'}"


def test_a_file_may_name_the_swarm_as_the_command_does(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "named.toml"
    file.write_text('[swarm]\nname = "beta"\ntotal_steps = 9\n')
    assert found(tmp_path, corpus, name="beta", config=file)[1].name == "beta"


def test_a_name_is_founded_once_on_a_machine(tmp_path: Path, corpus: Path) -> None:
    found(tmp_path, corpus)
    with pytest.raises(ConfigError, match="continue that one with `farflung join alpha`"):
        found(tmp_path, corpus)


@pytest.mark.parametrize("cut_short_at", ["save_manifest", "founded", "save_secret", "save_port", "run_loop"])
def test_a_founding_that_is_cut_short_leaves_no_swarm(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, cut_short_at: str
) -> None:
    """Whatever there is at that moment is what a kill leaves."""
    paths = resolve_paths(tmp_path / "a", {})

    def cut_short(*_: object) -> None:
        assert list((paths.state / "swarms").iterdir()), "something is there"
        assert paths.swarms() == []
        raise KeyboardInterrupt

    peer = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().libp2p_id}"
    with monkeypatch.context() as cutting, pytest.raises(KeyboardInterrupt):
        cutting.setattr(founding, "_publish", lambda *_: None)
        cutting.setattr(founding, cut_short_at, cut_short)
        found(tmp_path, corpus, peers=(peer,))
    assert list((paths.state / "swarms").iterdir()) == [], "nor anything else, where it could be tidied up"
    made, _ = found(tmp_path, corpus)
    assert [swarm.manifest for swarm in paths.swarms()] == [made.manifest] and made.manifest.exists()


# ---- the recipe ----------------------------------------------------------------------------------------------------


def test_settings_follow_from_the_manifest(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus, codec="int8(block=256)")
    recipe = read_recipe(manifest)
    settings, pace = recipe.settings(), recipe.pace()
    assert (settings.align, settings.rules.ahead, settings.rules.total_steps) == (256, 3 * 4, manifest.total_steps)
    assert 1.0 < settings.bytes_per_element < 1.1
    assert (pace.laps, pace.samples_per_step, pace.tokens_per_sample) == (Laps.fixed(60, 5), 4, 32)
    assert settings.rules.laps == pace.laps and settings.step_tokens == pace.step_tokens == 4 * 32
    assert not settings.admits(bytes(32), b"") and not settings.admits(bytes(32), bytes(64))
    assert settings.admits(settings.founder, b"")


def test_the_round_of_what_is_left_in_the_end_is_told_as_well(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus, steps=150, inner_steps=100, fragments=1, delay_steps=0)
    assert read_recipe(manifest).about.endswith(", 150 steps, 2 rounds")


def test_a_codec_may_be_a_policy(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus, codec="1d:fp32,int8(block=32)")
    recipe = read_recipe(manifest)
    assert recipe.settings().uplink == "1d:fp32,int8(block=32)" and recipe.settings().align == 32
    assert recipe.uplink.numel == recipe.num_parameters
    assert len(recipe.uplink.segments) == 2 * manifest.model.num_layers, "the last norms are neighbours"


def test_each_way_has_the_codec_that_the_manifest_names(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text('[swarm]\nuplink_codec = "1d:fp32,int4(block=64)"\ndownlink_codec = "int8(block=128)"\n')
    options = CreateOptions(name="b", config=file, data=str(corpus), steps=30, home=tmp_path / "a", open=True)
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    recipe = read_recipe(manifest)
    settings = recipe.settings()
    assert (recipe.uplink.spec, recipe.downlink.spec) == ("1d:fp32,int4(block=64)", "int8(block=128)")
    assert (settings.uplink, settings.downlink, settings.align) == (recipe.uplink.spec, recipe.downlink.spec, 128)
    assert settings.bytes_per_element == recipe.downlink.expected_nbytes() / recipe.num_parameters, (
        "the larger of the two"
    )


def test_a_codec_that_this_version_does_not_know_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"swarm.uplink_codec = '1d:fp32,int7': unknown codec 'int7'"):
        found(tmp_path, corpus, codec="1d:fp32,int7")
    _, manifest = found(tmp_path, corpus)
    with pytest.raises(ConfigError, match=r"'alpha' cannot be used: unknown codec 'int7'"):
        read_recipe(msgspec.structs.replace(manifest, uplink_codec="1d:fp32,int7"))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, FeedbackSpec()),
        ({"codec": "int4"}, FeedbackSpec()),
        ({"codec": "deadzone(bits=1.0)"}, FeedbackSpec(uplink="residual", downlink="residual", after_rounds=25)),
        ({"codec": "1d:fp32,sign"}, FeedbackSpec(uplink="residual", downlink="residual", after_rounds=25)),
        ({"codec": "sign", "feedback": False}, FeedbackSpec()),
        ({"feedback": True}, FeedbackSpec(uplink="residual", downlink="residual")),
        ({"codec": "sign", "feedback": True}, FeedbackSpec(uplink="residual", downlink="residual")),
    ],
)
def test_feedback_follows_the_codec_unless_it_is_said(
    tmp_path: Path, corpus: Path, flags: dict[str, Any], wanted: FeedbackSpec
) -> None:
    _, manifest = found(tmp_path, corpus, **flags)
    assert manifest.feedback == wanted, "of 100 rounds"


@pytest.mark.parametrize(
    ("text", "rule", "mix"),
    [
        ("", Nesterov(lr=0.7, momentum=0.9), None),
        ('[outer]\noptimizer = "sgd"\nlr = 1.0\nmomentum = 0.0\n', Sgd(lr=1.0), None),
        ('[outer]\noptimizer = "heavyball"\nlr = 1.0\nmomentum = 0.5\n', HeavyBall(clip=math.inf), None),
        (
            '[outer]\noptimizer = "heavyball"\nmomentum = 0.2\nclip = 0.1\n',
            HeavyBall(lr=0.7, momentum=0.2, clip=0.1),
            None,
        ),
        ("[swarm]\nmix = 0.5\n[outer]\nlr = 0.4\n", Nesterov(lr=0.4, momentum=0.9), 0.5),
    ],
)
def test_the_outer_options_reach_the_learner(
    tmp_path: Path, corpus: Path, text: str, rule: OuterRule, mix: float | None
) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(text, encoding="utf-8")
    options = CreateOptions(
        name="b", method="none", config=file, preset="tiny", data=str(corpus), steps=30, home=tmp_path / "a", open=True
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    recipe = read_recipe(manifest)
    assert recipe.terms().outer == rule
    replica = recipe.learner(swarm_dataset(manifest, swarm_tokenizer(manifest, tmp_path / "none")), Runtime()).replica
    assert (replica.outer.rule, replica.mix) == (rule, mix)


def test_feedback_is_in_the_file_as_well(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(
        '[swarm]\nuplink_codec = "deadzone(bits=0.5)"\n[feedback]\ndecay = 0.95\nafter_rounds = 3\n', encoding="utf-8"
    )
    made = daemon.create(
        CreateOptions(name="b", method="none", config=file, data=str(corpus), steps=30, home=tmp_path / "a", open=True)
    )
    manifest = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None)
    assert manifest.feedback == FeedbackSpec(uplink="residual", downlink="none", decay=0.95, after_rounds=3)


@pytest.mark.parametrize(
    ("said", "after_rounds"),
    [
        ('uplink = "residual"', 0),
        ("decay = 0.95", 0),
        ("decay = 1.0", 2),
        ('uplink = "residual"\nafter_rounds = 2', 2),
        ('downlink = "none"', 2),
    ],
)
def test_who_asks_for_feedback_has_it_from_the_first_round(
    tmp_path: Path, corpus: Path, said: str, after_rounds: int
) -> None:
    """SparseLoCo without it would drop 98 % of all elements for good in a quarter of the run."""
    file = tmp_path / "swarm.toml"
    codec, outer = "topk(chunk=4096,k=64,bits=2)", '[outer]\noptimizer = "sgd"\nlr = 1.0\nmomentum = 0.0\n'
    file.write_text(f'{outer}[swarm]\nuplink_codec = "{codec}"\n[feedback]\n{said}\n', encoding="utf-8")
    made = daemon.create(
        CreateOptions(
            name="b",
            method="none",
            config=file,
            data=str(corpus),
            steps=240,
            inner_steps=30,
            home=tmp_path / "a",
            open=True,
        )
    )
    feedback = open_manifest(made.manifest.read_bytes(), swarm=None, peer=None).feedback
    assert (feedback.uplink, feedback.after_rounds) == ("residual", after_rounds), "of 8 rounds"


def test_the_inner_options_reach_the_learner(tmp_path: Path, corpus: Path) -> None:
    sections = TOML.replace("seq_len = 32", "seq_len = 32\nqk_norm = true").replace(
        "lr = 3e-3", "lr = 3e-3\nz_loss = 1e-4"
    )
    config = tmp_path / "muon.toml"
    config.write_text(sections.format(steps=6000))
    options = CreateOptions(
        name="m", config=config, data=str(corpus), home=tmp_path / "a", optimizer="muon(adamw_lr=0.001)"
    )
    manifest = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    recipe = read_recipe(manifest)
    learner = recipe.learner(swarm_dataset(manifest, swarm_tokenizer(manifest, tmp_path / "none")), Runtime())
    reports = [learner.train(range(step * 4, step * 4 + 4), step) for step in range(20)]
    assert reports[-1].loss < reports[0].loss - 0.5
    keys = {
        name.split("/")[1].rpartition(".")[0] + "/" + name.split("/")[2] for name in learner.replica.optimizer.tensors()
    }
    assert {"model.layers.0.mlp.up_proj/momentum", "model.embed_tokens/exp_avg_sq"} <= keys
    assert {"model.layers.1.self_attn.q_norm/exp_avg"} <= keys and "model.embed_tokens/momentum" not in keys
    assert recipe.inner.z_loss == 1e-4


def test_other_data_is_refused_with_the_remedy(tmp_path: Path, corpus: Path) -> None:
    _, manifest = found(tmp_path, corpus)
    tokenizer = swarm_tokenizer(manifest, tmp_path / "none")
    assert swarm_dataset(manifest, tokenizer).num_samples == manifest.data.num_samples
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT + "one line more\n")
    with pytest.raises(ConfigError, match=r"is not what swarm 'alpha' trains on.*--data"):
        swarm_dataset(manifest, tokenizer, f"text:{copy}")
    corpus.unlink()
    with pytest.raises(ConfigError, match="no such file or folder; say where it lies here with `--data`"):
        swarm_dataset(manifest, tokenizer)


def test_memory_and_devices_are_checked_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = InnerConfig(schedule=Schedule(peak=1e-3, kind="constant"))
    huge = dataclasses.replace(PRESETS["8b"], dim=1 << 16, num_heads=64, num_kv_heads=64)
    with pytest.raises(ConfigError, match="or join a swarm with a smaller model"):
        fit_memory(huge, plain, 1, Runtime())
    needs = forecast(PRESETS["1m"], parse_optimizer(plain.optimizer), parse_options("none"), beside=Beside(copies=1))
    usable = needs.device_bytes + needs.host_bytes
    monkeypatch.setattr(machine, "free_bytes", lambda device, limit=None: int(usable / (1 - RESERVE)) + 1)
    fitted = fit_memory(PRESETS["1m"], plain, 1, Runtime(), "none", beside=Beside(copies=1))
    assert fitted == Runtime(max_microbatch=1)
    with pytest.raises(ConfigError, match="need"):
        fit_memory(PRESETS["1m"], plain, 1, Runtime(), "none", beside=Beside(copies=2))
    with pytest.raises(ConfigError, match="CUDA devices"):
        choose_runtime("cuda:63", "auto", compiled=False)
    assert choose_runtime("cpu", "bf16", compiled=False).autocast is torch.bfloat16
    assert choose_runtime("cpu", "auto", compiled=False, memory_gb=0.5).memory_bytes == 500_000_000
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no no-such-compiler here; install gcc and g\+\+"):
        choose_runtime("cpu", "auto", compiled=True)
