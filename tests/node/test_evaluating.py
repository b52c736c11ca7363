"""`farflung eval`: the model on disk, whole and with stages left out, against a model that really lacks their layers."""

import json
import math
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from farflung.node import daemon, kept_model
from farflung.node.cli import app
from farflung.node.evaluating import MOST_CHOICES, evaluate_swarm, read_choices
from farflung.node.model_cli import harmless
from farflung.node.options import CreateOptions, EvalOptions
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.recipe import Recipe, read_recipe, swarm_dataset, swarm_tokenizer
from farflung.node.storage import FileStorage, Place
from farflung.node.swarmfiles import load_manifest, tokenizer_file
from farflung.node.whole_model import save_model
from farflung.protocol.errors import ConfigError, LocalError
from farflung.training.flat import flatten
from farflung.training.model import Decoder, next_token_loss
from farflung.training.pipeline_slice import StageSlice
from farflung.training.runtime import Runtime
from farflung.training.sample import Sampling, sample_text
from farflung.training.tokenizer import ByteTokenizer

SIZES = (1, 1, 2)
TEXT = "".join(f"line {i}: the swarm is judged by text number {i * i}.\n" for i in range(500))
TOML = """
[model]
dim = 16
num_layers = 4
num_heads = 2
num_kv_heads = 1
ffn_dim = 32
seq_len = 16

[swarm]
total_steps = 100
inner_steps = 5
batch_tokens = 64
"""


def found(tmp_path: Path, **flags: Any) -> SwarmPaths:
    (tmp_path / "corpus.txt").write_text(TEXT)
    (tmp_path / "swarm.toml").write_text(TOML)
    told = {"name": "judged", "config": tmp_path / "swarm.toml", "data": str(tmp_path / "corpus.txt"), "local": True}
    daemon.create(CreateOptions(**(told | {"home": tmp_path / "home"} | flags)))
    return resolve_paths(tmp_path / "home", {}).find_swarm("judged")


def recipe_of(swarm: SwarmPaths) -> Recipe:
    manifest = load_manifest(swarm)
    assert manifest is not None
    return read_recipe(manifest)


def some_model(recipe: Recipe) -> Decoder:
    """All of whose layers matter."""
    torch.manual_seed(5)
    model = Decoder(recipe.model, seed=1)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def evaluated(tmp_path: Path) -> tuple[SwarmPaths, Decoder]:
    """A machine whose node has put the model of three stages together."""
    swarm = found(tmp_path, stages=3)
    model = some_model(recipe_of(swarm))
    stages = {}
    for stage in range(3):
        part = StageSlice(SIZES, stage)
        stages[stage] = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if part.holds(name)])
    save_model(swarm, 7, stages, {0: (7, 7), 1: (7, 8), 2: (5, 5)})
    return swarm, model


def perplexity_of(swarm: SwarmPaths, model: Decoder, layers: Sequence[int]) -> float:
    """Of a model that has these layers only."""
    recipe = recipe_of(swarm)
    fewer = Decoder(replace(recipe.model, num_layers=len(layers)), seed=1)
    fewer.load_state_dict(model.state_dict(), strict=False)
    fewer.model.layers = nn.ModuleList([model.model.layers[layer] for layer in layers])
    data = swarm_dataset(recipe.manifest, swarm_tokenizer(recipe.manifest, tokenizer_file(swarm)))
    tokens = torch.from_numpy(data.heldout(64)).long()
    with torch.no_grad():
        return math.exp(float(next_token_loss(fewer(tokens[:, :-1]), tokens[:, 1:])))


def test_fragments_may_have_layers_in_another_order_than_the_model(tmp_path: Path) -> None:
    """What a checkpoint of such a swarm holds is judged, exported and sampled as the model that it is."""
    config = tmp_path / "strided.toml"
    config.write_text(TOML.replace("inner_steps = 5", 'inner_steps = 4\nfragments = 2\nfragment_pattern = "strided"'))
    swarm = found(tmp_path, config=config)
    recipe, model = recipe_of(swarm), some_model(recipe_of(swarm))
    layers = [name.split(".")[2] for name in recipe.order if name.endswith("q_proj.weight")]
    assert layers == ["0", "2", "1", "3"]

    data = swarm_dataset(recipe.manifest, swarm_tokenizer(recipe.manifest, tokenizer_file(swarm)))
    learner = recipe.learner(data, Runtime())
    learner.replica.model.load_state_dict(model.state_dict())
    flatten(learner.replica.layout, learner.replica.parameters, learner.replica.outer.params)
    place = Place(height=7, version=7, trained=(), steps=0, in_flight=b"")
    FileStorage(swarm.checkpoint).save_learner(learner, {}, place, ())

    args = ["--home", str(tmp_path / "home")]
    shown = CliRunner().invoke(app, ["eval", "judged", *args, "--device", "cpu", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["perplexity"] == pytest.approx(perplexity_of(swarm, model, [0, 1, 2, 3]), rel=1e-5)
    told = CliRunner().invoke(
        app, ["sample", "judged", *args, "--device", "cpu", "--prompt", "line", "--max-tokens", "30", "--json"]
    )
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["text"] == sample_text(model, ByteTokenizer(), "line", Sampling(max_tokens=30))
    shown = CliRunner().invoke(app, ["export", "judged", str(tmp_path / "out"), *args])
    assert shown.exit_code == 0, shown.output
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(exported[name], parameter)


def test_how_far_the_stages_of_an_exported_model_are_apart_is_said(tmp_path: Path) -> None:
    """In the output, for scripts, and in the model's card."""
    evaluated(tmp_path)
    args = ["--home", str(tmp_path / "home")]
    shown = CliRunner().invoke(app, ["export", "judged", str(tmp_path / "out"), *args])
    assert shown.exit_code == 0, shown.output
    assert "  rounds of each stage: 7, 7 to 8, 5\n  rounds between the stages: 3\n" in shown.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| rounds of each stage | 7, 7 to 8, 5 |\n| rounds between the stages | 3 |\n" in card
    shown = CliRunner().invoke(app, ["export", "judged", str(tmp_path / "json"), *args, "--json"])
    facts = json.loads(shown.stdout)
    assert (facts["rounds of each stage"], facts["rounds between the stages"]) == ("7, 7 to 8, 5", 3)


def test_stages_left_out_are_layers_that_are_not_there(tmp_path: Path) -> None:
    swarm, model = evaluated(tmp_path)
    args = ["eval", "judged", "--home", str(tmp_path / "home"), "--device", "cpu", "--skip-stages"]
    shown = CliRunner().invoke(app, [*args, "1", "--skip-stages", "33%", "--skip-stages", "2,1", "--json"])
    assert shown.exit_code == 0, shown.output
    figures = json.loads(shown.stdout)
    assert figures["version"] == 7 and figures["stages"] == 3 and figures["samples"] == 64
    without = {(): [0, 1, 2, 3], (1,): [0, 2, 3], (2,): [0, 1], (1, 2): [0]}
    wanted = {choice: perplexity_of(swarm, model, layers) for choice, layers in without.items()}
    assert len({round(one, 6) for one in wanted.values()}) == 4  # each choice is another model
    assert figures["perplexity"] == pytest.approx(wanted[()], rel=1e-5)
    one, third, both = figures["left_out"]
    assert one["perplexity"] == pytest.approx(wanted[1,], rel=1e-5)
    assert [choice["stages"] for choice in third["choices"]] == [[1], [2]] and third["possible"] == 2
    assert third["perplexity"] == pytest.approx((wanted[1,] + wanted[2,]) / 2, rel=1e-5)
    assert (third["least"], third["most"]) == pytest.approx(sorted((wanted[1,], wanted[2,])), rel=1e-5)
    assert both["perplexity"] == pytest.approx(wanted[1, 2], rel=1e-5)
    assert both["increase_percent"] == pytest.approx(100 * (wanted[1, 2] / wanted[()] - 1), abs=1e-2)
    lines = CliRunner().invoke(app, [*args, "2", "--skip-stages", "33%"]).stdout.splitlines()
    assert "after round 7, on 64 held-out sequences (1,024 tokens)" in lines[0]
    assert lines[1].startswith(f"  whole: loss {math.log(wanted[()]):.4f} nats per token, perplexity")
    assert lines[2].startswith("  without stage 2: perplexity") and lines[2].endswith("%")
    assert lines[3].startswith("  without 33% of the stages (all 2 choices): perplexity") and " to " in lines[3]


def test_what_is_written_is_what_the_whole_model_writes(tmp_path: Path) -> None:
    _, model = evaluated(tmp_path)
    args = ["sample", "judged", "--home", str(tmp_path / "home"), "--device", "cpu", "--prompt", "line", "--seed", "3"]
    told = CliRunner().invoke(app, [*args, "--max-tokens", "50", "--json"])
    assert told.exit_code == 0, told.output
    wanted = sample_text(model, ByteTokenizer(), "line", Sampling(max_tokens=50, seed=3))
    assert json.loads(told.stdout) == {"version": 7, "prompt": "line", "text": wanted}
    shown = CliRunner().invoke(app, [*args, "--max-tokens", "50"]).stdout
    assert shown == f"line{harmless(wanted)}\n" and len(wanted) >= 20
    assert harmless("\x1b[2Ja\tb\n\u20ac") == "\ufffd[2Ja\tb\n\u20ac"


def test_beside_a_running_node_a_gpu_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(kept_model, "choose_runtime", lambda device, dtype, *, compiled: chosen.append(device))
    with tempfile.TemporaryDirectory() as short:  # a socket's path must be
        swarm = SimpleNamespace(socket=Path(short) / "control", name="alpha")
        kept_model.runtime_beside(swarm, "auto", "auto")  # type: ignore[arg-type]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as node:
            node.bind(str(swarm.socket))
            node.listen()
            for device in ("auto", "cuda"):
                kept_model.runtime_beside(swarm, device, "auto")  # type: ignore[arg-type]
        kept_model.runtime_beside(swarm, "auto", "auto")  # type: ignore[arg-type]  # a killed node leaves its socket
    assert chosen == ["auto", "cpu", "cuda", "auto"]


def test_a_model_that_is_not_there_or_another_one_is_said(tmp_path: Path) -> None:
    swarm = found(tmp_path, stages=3)
    options = EvalOptions(swarm="judged", home=tmp_path / "home", device="cpu")
    with pytest.raises(ConfigError, match="go to the machine of one, the founder's for example"):
        evaluate_swarm(options)
    stages = {stage: torch.zeros(3) for stage in range(3)}
    save_model(swarm, 7, stages, dict.fromkeys(stages, (7, 7)))
    with pytest.raises(
        LocalError, match=r"another model than the manifest of judged says: stage 0 has [\d,]+ parameters; remove"
    ):
        evaluate_swarm(options)


def test_a_whole_replica_is_evaluated_too_but_has_no_stages(tmp_path: Path) -> None:
    found(tmp_path)
    options = EvalOptions(swarm="judged", home=tmp_path / "home", skip_stages=("1",))
    with pytest.raises(ConfigError, match="no checkpoint of judged on this machine yet"):
        evaluate_swarm(options)
    with pytest.raises(ConfigError, match="every peer of this swarm holds the whole model"):
        read_choices("1", 1)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("0", "stage 0 has the embedding and the head"),
        ("2,0", "stage 0 has the embedding and the head"),
        ("4", "stages 0 to 3; there is no stage 4"),
        ("two", "give numbers of stages, as 2,4, or a share of them, as 25%"),
        ("1,", "give numbers of stages"),
        ("100%", "that is 4 of 4 stages, where 1 to 3 can be left out; one stage is 25%"),
        ("5%", "that is 0 of 4 stages"),
    ],
)
def test_what_cannot_be_left_out_is_said(said: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read_choices(said, 4)


def test_shares_are_all_choices_or_some_that_are_drawn() -> None:
    assert read_choices("50%", 4).choices == [(1, 2), (1, 3), (2, 3)]
    assert read_choices("3,1,3", 4).choices == [(1, 3)]
    many = read_choices("50%", 24)
    assert many.possible == math.comb(23, 12) and len(set(many.choices)) == MOST_CHOICES
    assert all(len(set(choice)) == 12 and 0 not in choice and max(choice) < 24 for choice in many.choices)
    assert read_choices("50%", 24) == many
