"""An exported folder, loaded by transformers; and samples of text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.published import BEGIN, ENDS, STYLES, write_tokenizer
from torch.nn.functional import one_hot

from farflung.training.export import export_folder, model_card
from farflung.training.model import Decoder, ModelConfig
from farflung.training.replica import Replica
from farflung.training.sample import Sampling, sample_pieces, sample_text
from farflung.training.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

transformers = pytest.importorskip("transformers")
TEXT = "def f(x):\n\treturn  'héllo — 漢字 🙂'\n"


BYTES = ByteTokenizer()


def export(replica: Replica, folder: Path, tokenizer: Tokenizer = BYTES, **options: Any) -> None:
    views = replica.layout.views(replica.outer.params)
    export_folder(folder, replica.model.config, views, tokenizer, name="x", facts={"rounds": 3}, **options)


@pytest.fixture(params=["bytes", *STYLES])
def tokenizer(tmp_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    style = request.param
    return BYTES if style == "bytes" else open_tokenizer(str(write_tokenizer(style, tmp_path / "published.json")))


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
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == BYTES.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token_id == 256


@pytest.fixture
def small(config: ModelConfig, make_replica: Any) -> Replica:
    like = make_replica()
    return Replica(replace(config, vocab_size=264), like.inner_config, like.outer.rule, seed=3)


def test_the_exported_tokenizer_gives_the_ids_of_training(small: Replica, tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(small, tmp_path / "model", tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = ["the cat", "  that\nhat.", "a"]
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs(text)["input_ids"] == [tokenizer.end_of_text, *ids]
    # One text after another is what training had of them, the first end-of-text apart.
    trained = [np.append(tokenizer.encode(text), tokenizer.end_of_text) for text in texts]
    found = np.concatenate(theirs(texts)["input_ids"])
    assert np.append(found[1:], tokenizer.end_of_text).tolist() == np.concatenate(trained).tolist()
    pair = theirs("the cat", "a")["input_ids"]
    assert pair == [*theirs("the cat")["input_ids"], *theirs("a")["input_ids"]]


def test_no_special_token_is_one_that_was_never_trained(small: Replica, tmp_path: Path) -> None:
    for style in STYLES:
        export(small, tmp_path / style, open_tokenizer(str(write_tokenizer(style, tmp_path / "published.json"))))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / style)
        assert theirs.bos_token == theirs.eos_token == ENDS[style]
        assert theirs.convert_tokens_to_ids(BEGIN[style]) not in theirs("the cat")["input_ids"]


def test_the_code_on_the_card_does_as_training(
    small: Replica, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(small, tmp_path / "model", tokenizer)
    monkeypatch.chdir(tmp_path / "model")
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    seen: dict[str, Any] = {}
    exec(code, seen)  # ours
    wanted = [tokenizer.end_of_text, *tokenizer.encode("import ").tolist()]
    assert seen["inputs"]["input_ids"].tolist() == [wanted]


def test_an_export_of_an_export_is_the_same(small: Replica, tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(small, tmp_path / "one", tokenizer)
    export(small, tmp_path / "two", open_tokenizer(str(tmp_path / "one/tokenizer.json")))
    one, two = (json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in ("one", "two"))
    assert one == two


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


class Wordy(Decoder):
    """Sure of the next token of a text, whatever came before."""

    def __init__(self, config: ModelConfig, ids: list[int], prompt: int) -> None:
        super().__init__(replace(config, vocab_size=264), seed=1)
        self._ids, self._prompt = ids, prompt

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        following = self._ids[tokens.shape[1] - self._prompt]
        return one_hot(torch.full_like(tokens, following), 264).float()


@pytest.mark.parametrize("style", STYLES)
def test_a_space_between_the_prompt_and_what_follows_is_said(config: ModelConfig, tmp_path: Path, style: str) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer(style, tmp_path / "published.json")))
    whole, prompt = (tokenizer.encode(text).tolist() for text in ("the cat that hat", "the cat"))
    assert whole[: len(prompt)] == prompt
    model = Wordy(config, [*whole[len(prompt) :], tokenizer.end_of_text], len(prompt) + 1)
    greedy = Sampling(temperature=0.0)
    assert sample_text(model, tokenizer, "the cat", greedy) == " that hat"
    assert list(sample_pieces(model, tokenizer, "the cat", replace(greedy, max_tokens=1))) == [" t", ""]


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
