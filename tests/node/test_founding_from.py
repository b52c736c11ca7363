"""`create --from`: a swarm that trains on from a model that was there already."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tests.node.founded import TEXT
from tests.node.processes import nodes

from farflung.node import daemon
from farflung.node.kept_model import kept_model
from farflung.node.options import CreatedSwarm, CreateOptions, ExportOptions
from farflung.node.paths import resolve_paths
from farflung.node.recipe import read_recipe, swarm_dataset, swarm_tokenizer
from farflung.node.storage import FileStorage, Place
from farflung.node.swarmfiles import load_manifest, tokenizer_file
from farflung.protocol.errors import ConfigError
from farflung.training.export import export_folder
from farflung.training.model import Decoder, ModelConfig
from farflung.training.runtime import Runtime
from farflung.training.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

SHAPE = ModelConfig(vocab_size=264, dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32)
TOML = """
[swarm]
total_steps = 120
inner_steps = 20
fragments = 2
fragment_pattern = "strided"
batch_tokens = 128
min_contributors = 2
min_round_s = 1.0
"""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a model that nobody would draw."""
    write(tmp_path / "given", ByteTokenizer())
    return tmp_path / "given"


def write(folder: Path, tokenizer: Tokenizer) -> None:
    model = Decoder(SHAPE, seed=9).requires_grad_(requires_grad=False)
    export_folder(folder, SHAPE, dict(model.named_parameters()), tokenizer, name="given", facts={})


def flat() -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in Decoder(SHAPE, seed=9).parameters()])


def found(tmp_path: Path, start: Path, toml: str = TOML, **flags: Any) -> CreatedSwarm:
    (tmp_path / "swarm.toml").write_text(toml)
    (tmp_path / "corpus.txt").write_text(TEXT)
    facts = {"name": "on", "config": tmp_path / "swarm.toml", "data": str(tmp_path / "corpus.txt"), "start": start}
    return daemon.create(CreateOptions(**{**facts, "home": tmp_path / "a", "local": True, **flags}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "torch.optim.NAdam"])
def test_the_founder_begins_with_what_was_given(tmp_path: Path, given: Path, optimizer: str) -> None:
    made = found(tmp_path, given, optimizer=optimizer, lr=1e-3)
    assert made.about.endswith(f"from {given}")
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("on")
    manifest = load_manifest(swarm)
    assert manifest is not None and (manifest.model.preset, manifest.tokenizer.kind) == ("from given", "bytes")
    recipe = read_recipe(manifest)
    assert recipe.model == SHAPE

    kept = kept_model(swarm)
    assert kept.version == 0 and torch.equal(kept.whole(), flat())
    facts = daemon.export(ExportOptions(swarm="on", folder=tmp_path / "again", home=tmp_path / "a"))
    assert facts["rounds"] == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == (given / "model.safetensors").read_bytes()

    tokenizer = swarm_tokenizer(manifest, tokenizer_file(swarm))
    learner = recipe.learner(swarm_dataset(manifest, tokenizer, None), Runtime(microbatch=4))
    assert FileStorage(swarm.checkpoint).load_learner(learner) == Place(0, 0, (), 0, b"")
    replica = learner.replica
    model = Decoder(SHAPE, seed=9)
    views = replica.layout.views(replica.outer.params)
    assert len(recipe.cuts) == 3 and tuple(views) != tuple(dict(model.named_parameters())), (
        "in the order of two fragments"
    )
    assert all(torch.equal(view, model.get_parameter(name)) for name, view in views.items())
    assert not replica.outer.momentum.any() and not replica.pseudo_gradient().any()
    learner.train(range(4), 0)  # its inner optimiser begins as any
    assert replica.pseudo_gradient().any()


def test_samples_may_be_shorter_than_it_can_take(tmp_path: Path, given: Path) -> None:
    found(tmp_path, given, toml=TOML + "[model]\nseq_len = 16\n")
    manifest = load_manifest(resolve_paths(tmp_path / "a", {}).find_swarm("on"))
    assert manifest is not None and manifest.model.seq_len == 16


def test_its_own_tokenizer_comes_with_it(tmp_path: Path) -> None:
    text = ByteTokenizer().to_json().replace("<|endoftext|>", "</s>")
    (tmp_path / "tokenizer.json").write_text(text)
    write(tmp_path / "given", open_tokenizer(str(tmp_path / "tokenizer.json")))
    found(tmp_path, tmp_path / "given")
    swarm = resolve_paths(tmp_path / "a", {}).find_swarm("on")
    assert tokenizer_file(swarm).read_bytes() == (tmp_path / "given/tokenizer.json").read_bytes()
    manifest = load_manifest(swarm)
    assert manifest is not None and manifest.tokenizer.kind == "file"


END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def write_with_two_ends(folder: Path) -> None:
    """A model whose texts end with END, and whose tokenizer has another token with a name that is usual for it."""
    tokenizer: Any = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json().replace("<|endoftext|>", "<|eot_id|>"))
    tokenizer.add_special_tokens([END])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, open_tokenizer(str(folder / "tokenizer.json"), END))


def test_a_text_ends_as_the_folder_says_for_the_founder_and_for_whoever_joins(tmp_path: Path) -> None:
    write_with_two_ends(tmp_path / "given")
    assert open_tokenizer(str(tmp_path / "given/tokenizer.json")).end_of_text_name == "<|eot_id|>", "by itself"
    made = found(tmp_path, tmp_path / "given")
    assert made.end_of_text == END
    manifest = load_manifest(resolve_paths(tmp_path / "a", {}).find_swarm("on"))
    assert manifest is not None and manifest.tokenizer.end_of_text == END
    joiners = swarm_tokenizer(manifest, tmp_path / "given/tokenizer.json")
    assert (joiners.end_of_text_name, joiners.end_of_text) == (END, 257)
    assert swarm_dataset(manifest, joiners, None).num_samples == manifest.data.num_samples, "the founder's data"
    with pytest.raises(ConfigError, match="is not what swarm 'on' trains on"):
        swarm_dataset(manifest, open_tokenizer(str(tmp_path / "given/tokenizer.json")), None)
    daemon.export(ExportOptions(swarm="on", folder=tmp_path / "again", home=tmp_path / "a"))
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == 257
    assert json.loads((tmp_path / "again/tokenizer_config.json").read_text())["eos_token"] == END


def test_a_file_may_say_otherwise_how_a_text_ends(tmp_path: Path) -> None:
    write_with_two_ends(tmp_path / "given")
    made = found(tmp_path, tmp_path / "given", toml=TOML + '[data]\nend_of_text = "<|eot_id|>"\n')
    assert made.end_of_text == "<|eot_id|>"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"preset": "tiny"}, "--from: the folder says what model.preset is; leave out preset"),
        ({"toml": TOML + "[model]\nnum_layers = 2\n"}, "leave out num_layers"),
        ({"stages": 2}, "--from: stages begin with drawn weights, each on a machine of its own; leave out --stages"),
        ({"toml": TOML + "[model]\nseq_len = 1\n"}, "seq_len = 1"),
        ({"toml": TOML + '[data]\nend_of_text = "x"\n'}, "data.end_of_text = 'x': goes with a tokenizer file"),
        ({"toml": TOML + "[model]\nseq_len = 'long'\n"}, "seq_len = 'long': must be a whole number"),
    ],
)
def test_what_contradicts_the_folder_is_refused(tmp_path: Path, given: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found(tmp_path, given, **flags)
    assert resolve_paths(tmp_path / "a", {}).swarms() == []


def test_a_folder_that_cannot_be_used_founds_nothing(tmp_path: Path, given: Path) -> None:
    (given / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"--from: .*given has no tokenizer.json; give .* by --tokenizer"):
        found(tmp_path, given)
    (given / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--from: cannot read .*model.safetensors"):
        found(tmp_path, given, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"--from: .*nowhere is no folder"):
        found(tmp_path, tmp_path / "nowhere")
    assert resolve_paths(tmp_path / "a", {}).swarms() == []


def test_weights_of_another_shape_are_refused_before_the_data_is_opened(
    tmp_path: Path, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = given / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    monkeypatch.setattr("farflung.node.founding.open_dataset", lambda *_: pytest.fail("the data was opened"))
    with pytest.raises(ConfigError, match=r"--from: .*down_proj.weight is F32 \[32, 64\], where .* \[32, 96\]"):
        found(tmp_path, given)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_real_nodes_train_on_from_it(tmp_path: Path, given: Path) -> None:
    made = found(tmp_path, given, lr=1e-4)
    with nodes() as start:
        first = start(tmp_path / "a", "on")
        second = start(tmp_path / "b", made.invitation)
        for node in (first, second):
            node.until(lambda node=node: node.events("node.stop"))
    commits = [{e["version"]: e["digest"] for e in node.events("round.commit")} for node in (first, second)]
    both = set(commits[0]) & set(commits[1])
    assert both and all(commits[0][version] == commits[1][version] for version in both)
    drawn = torch.cat([p.detach().reshape(-1) for p in Decoder(SHAPE, seed=0).parameters()])
    for node in (first, second):
        kept = kept_model(node.swarm)
        assert kept.version > 0
        moved, anew = (torch.linalg.vector_norm(kept.whole() - began) for began in (flat(), drawn))
        assert 0 < moved < anew / 3, "nobody began with weights of its own"
