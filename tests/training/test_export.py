"""An exported folder, loaded by transformers; and samples of text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from farflung.training.export import export_folder, model_card
from farflung.training.model import Decoder, ModelConfig
from farflung.training.replica import Replica
from farflung.training.sample import Sampling, sample_pieces, sample_text
from farflung.training.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers")
TEXT = "def f(x):\n\treturn  'héllo — 漢字 🙂'\n"


def export(replica: Replica, folder: Path, **options: Any) -> None:
    views = replica.layout.views(replica.outer.params)
    export_folder(folder, replica.model.config, views, ByteTokenizer(), name="x", facts={"rounds": 3}, **options)


@pytest.fixture(params=[(True, False), (False, False), (True, True)], ids=["tied", "untied", "qk-norm"])
def replica(config: ModelConfig, request: pytest.FixtureRequest, make_replica: Any) -> Replica:
    like = make_replica()
    tied, qk_norm = request.param
    config = replace(config, vocab_size=264, tie_embeddings=tied, qk_norm=qk_norm, rope_theta=50_000.0)
    replica = Replica(config, like.inner_config, like.outer.rule, seed=3)
    for number, parameter in enumerate(replica.parameters):
        if parameter.dim() == 1:  # as after training: a norm left out or misplaced then shows
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).roll(number))
    replica.apply([(0, replica.num_parameters, replica.pseudo_gradient() / 0.7)], contributed=True)
    return replica


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_transformers_computes_the_same(replica: Replica, tmp_path: Path, shard_bytes: int) -> None:
    export(replica, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if replica.model.config.qk_norm else "LlamaForCausalLM")
    tokens = torch.arange(24)[None] * 11 % 257
    with torch.no_grad():
        with replica.outer_parameters() as model:
            torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=2e-6)


def test_the_tokenizer_round_trips(replica: Replica, tmp_path: Path) -> None:
    export(replica, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == ByteTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == 256


def test_exporting_again_leaves_no_stale_weights(replica: Replica, tmp_path: Path) -> None:
    export(replica, tmp_path, shard_bytes=20_000)
    export(replica, tmp_path, dtype=torch.bfloat16)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert not list(tmp_path.glob("*.partial"))


def test_the_card_shows_the_facts() -> None:
    card = model_card('a "b": c', {"rounds": 12, "loss": 1.5, "note": "a|b\n# no heading"})
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'model_name: "a \\"b\\": c"' in card
    assert "| rounds | 12 |\n| loss | 1.5 |\n| note | a\\|b # no heading |" in card


class Dictated(Decoder):
    """Sure of the next byte of a text."""

    def __init__(self, config: ModelConfig, text: str) -> None:
        super().__init__(replace(config, vocab_size=264), seed=1)
        self._ids = [*text.encode(), ByteTokenizer().end_of_text]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        written = tokens.shape[1]
        return one_hot(torch.tensor([self._ids[:written]]), 264).float()


@pytest.mark.parametrize(
    ("most", "wanted"),
    [(9, ["a", "\u20ac", "b", ""]), (4, ["a", "\u20ac", ""]), (3, ["a", "\ufffd"])],
)
def test_a_character_of_several_bytes_is_said_when_it_is_whole(
    config: ModelConfig, most: int, wanted: list[str]
) -> None:
    model = Dictated(config, "a\u20acb")
    sampling = Sampling(temperature=0.0, max_tokens=most)
    assert list(sample_pieces(model, ByteTokenizer(), "", sampling)) == wanted


def test_samples_repeat_with_the_seed(replica: Replica) -> None:
    tokenizer = ByteTokenizer()
    with replica.outer_parameters() as model:
        one = sample_text(model, tokenizer, "abc", Sampling(max_tokens=40, seed=1))
        assert one == sample_text(model, tokenizer, "abc", Sampling(max_tokens=40, seed=1))
        assert one != sample_text(model, tokenizer, "abc", Sampling(max_tokens=40, seed=2))
        greedy = Sampling(max_tokens=40, temperature=0.0)
        assert sample_text(model, tokenizer, "", greedy) == sample_text(model, tokenizer, "", replace(greedy, seed=9))
        only_best = replace(greedy, temperature=1.0, top_k=1)
        assert sample_text(model, tokenizer, "", only_best) == sample_text(model, tokenizer, "", greedy)
        assert sample_text(model, tokenizer, "", Sampling(max_tokens=0)) == ""
