"""Models that are there already: what `export` and `transformers` wrote comes back to the bit, and what we do not compute is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from farflung.training.errors import UnusableModel
from farflung.training.export import export_folder
from farflung.training.flat import Layout
from farflung.training.given import LONGEST, GivenModel, open_given
from farflung.training.model import Decoder, ModelConfig, parameter_shapes
from farflung.training.tokenizer import ByteTokenizer


@pytest.fixture(params=[(True, False), (False, False), (True, True)], ids=["tied", "untied", "qk-norm"])
def model(config: ModelConfig, request: pytest.FixtureRequest) -> Decoder:
    tied, qk_norm = request.param
    config = replace(config, vocab_size=264, tie_embeddings=tied, qk_norm=qk_norm, rope_theta=5e4, norm_eps=2e-6)
    model = Decoder(config, seed=3).requires_grad_(requires_grad=False)
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).roll(number))
    return model


def write(model: Decoder, folder: Path, **options: Any) -> Path:
    export_folder(folder, model.config, dict(model.named_parameters()), ByteTokenizer(), name="x", facts={}, **options)
    return folder


def whole(given: GivenModel) -> Tensor:
    return given.parameters(parameter_shapes(given.config))


def flat(model: Decoder) -> Tensor:
    return torch.cat([parameter.reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_what_was_exported_comes_back(model: Decoder, tmp_path: Path, shard_bytes: int) -> None:
    given = open_given(write(model, tmp_path, shard_bytes=shard_bytes))
    assert given.config == model.config and given.tokenizer == "bytes"
    assert torch.equal(whole(given), flat(model))


def test_it_comes_in_the_order_asked_for(model: Decoder, tmp_path: Path) -> None:
    shapes = parameter_shapes(model.config)[::-1]
    found = open_given(write(model, tmp_path)).parameters(shapes)
    layout = Layout(model, [name for name, _ in shapes])
    assert all(torch.equal(view, model.get_parameter(name)) for name, view in layout.views(found).items())


def test_half_precision_is_widened(model: Decoder, tmp_path: Path) -> None:
    found = whole(open_given(write(model, tmp_path, dtype=torch.bfloat16)))
    assert found.dtype == torch.float32 and torch.equal(found, flat(model).bfloat16().float())


def test_transformers_and_we_compute_the_same_of_what_it_saved(model: Decoder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(write(model, tmp_path / "ours"), dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    given = open_given(tmp_path / "theirs")
    assert given.config == model.config and given.tokenizer == ""
    ours = Decoder(given.config, seed=None)
    for name, view in Layout(ours).views(whole(given)).items():
        ours.get_parameter(name).data.copy_(view)
    tokens = torch.arange(24)[None] * 11 % 257
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("config_says", "generation_says", "found"),
    [(7, 8, 7), ([9, 7], 8, 9), (None, 8, 8), (None, [6, 8], 6), (None, None, None), ([], "</s>", None)],
)
def test_what_ends_a_text_is_what_the_folder_says(
    config: ModelConfig, tmp_path: Path, config_says: object, generation_says: object, found: int | None
) -> None:
    folder = write(Decoder(config, seed=1), tmp_path)
    edit(folder, eos_token_id=config_says)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_says}))
    assert open_given(folder).end_of_text == found


def test_samples_are_no_longer_than_small_cards_can_train(model: Decoder, tmp_path: Path) -> None:
    write(model, tmp_path)
    edit(tmp_path, max_position_embeddings=131_072)
    assert open_given(tmp_path).config.seq_len == LONGEST


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def retensor(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, file)

    return do


def scatter(folder: Path, places: dict[str, Any]) -> None:
    """Say that the weights are in other files."""
    (folder / "model.safetensors").rename(folder / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


NORM = "model.norm.weight"
NAN = torch.full((16,), float("nan"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: edit(f, model_type="gpt2"), "of type 'gpt2'; those that can be trained on are llama, qwen3"),
        (lambda f: edit(f, model_type=["llama"]), r"of type \['llama'\]"),
        (lambda f: edit(f, hidden_size="wide"), "hidden_size"),
        (lambda f: edit(f, num_hidden_layers=0), "at least 1"),
        (lambda f: edit(f, num_key_value_heads=3), "multiple"),
        (lambda f: edit(f, head_dim=8), "4 heads of 8 at a width of 16"),
        (lambda f: edit(f, hidden_act="gelu"), "the activation gelu"),
        (lambda f: edit(f, attention_bias=True), "biases"),
        (lambda f: edit(f, use_sliding_window=True), "sliding windows"),
        (lambda f: edit(f, quantization_config={"bits": 4}), "quantised weights"),
        (lambda f: edit(f, rope_scaling={"rope_type": "llama3", "factor": 8}), "rotary frequencies of type llama3"),
        (lambda f: edit(f, rope_parameters={"rope_type": "yarn"}), "rotary frequencies of type yarn"),
        (lambda f: edit(f, rope_parameters={"rope_theta": [1]}), "config.json"),
        (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json"),
    ],
)
def test_a_shape_that_is_not_ours_is_refused(
    config: ModelConfig, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(write(Decoder(config, seed=1), tmp_path))
    with pytest.raises(UnusableModel, match=said):
        open_given(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (retensor(lambda t: t.pop(NORM)), f"lacks 1 of 20 parameters: {NORM}; get all of its files"),
        (retensor(lambda t: t.update(more=NAN)), "has more, which this kind of model has no place for"),
        (retensor(lambda t: t.update({NORM: NAN})), f"{NORM} has values that are not finite"),
        (
            retensor(lambda t: t.update({NORM: NAN[:3]})),
            r"is F32 \[3\], where config.json says \[16\], in F32, BF16, F16",
        ),
        (retensor(lambda t: t.update({NORM: NAN.to(torch.float64)})), "is F64"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot read .*model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot read .*model.safetensors"),
        (lambda f: scatter(f, {"a": 1}), "in which files"),
    ],
)
def test_weights_that_cannot_be_of_it_are_refused(
    config: ModelConfig, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    given = open_given(write(Decoder(config, seed=1), tmp_path))
    spoil(tmp_path)
    with pytest.raises(UnusableModel, match=said):
        whole(given)
    if "not finite" not in said:  # the rest shows before the data is opened, which may take hours
        with pytest.raises(UnusableModel, match=said):
            open_given(tmp_path)


def test_a_file_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"is no folder; give one .* as `farflung export` writes"):
        open_given(tmp_path / "nowhere")


def test_files_beside_the_folder_are_not_read(config: ModelConfig, tmp_path: Path) -> None:
    folder = write(Decoder(config, seed=1), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {NORM: "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnusableModel, match=r"cannot read .*model/model.safetensors"):
        whole(open_given(folder))


def test_a_tied_head_that_is_written_twice_is_taken_once(config: ModelConfig, tmp_path: Path) -> None:
    model = Decoder(config, seed=1)
    folder = write(model, tmp_path)
    retensor(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    assert torch.equal(whole(open_given(folder)), flat(model))


def test_frequencies_that_older_files_have_are_left_out(config: ModelConfig, tmp_path: Path) -> None:
    model = Decoder(config, seed=1)
    folder = write(model, tmp_path)
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)]
    retensor(lambda t: t.update({name: torch.ones(2) for name in names}))(folder)
    assert torch.equal(whole(open_given(folder)), flat(model))


def test_where_both_are_the_one_file_is_read_as_transformers_does(model: Decoder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(model, tmp_path, shard_bytes=20_000)
    write(Decoder(model.config, seed=4), tmp_path / "other")
    (tmp_path / "other/model.safetensors").rename(tmp_path / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = open_given(tmp_path).parameters([(name, p.shape) for name, p in theirs.named_parameters()])
    assert torch.equal(ours, torch.cat([parameter.detach().reshape(-1) for parameter in theirs.parameters()]))
