"""Bytes and tokenizer files."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.training.published import write_tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from farflung.training.errors import DataError
from farflung.training.tokenizer import ByteTokenizer, open_tokenizer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "</s>": 9}
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return path


@given(text=TEXTS)
def test_bytes_round_trip(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


@given(text=TEXTS)
def test_the_json_form_gives_the_same_ids(text: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).ids == [256, *ids]
    assert ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(ids) == text


def test_strange_ids_and_broken_text_do_no_harm() -> None:
    assert ByteTokenizer().decode([72, 105, 256, 263, -1]) == "Hi"
    assert ByteTokenizer().decode([0xFF]) == "\ufffd"
    assert ByteTokenizer().encode("\ud800").tolist() == [ord("?")]


def test_a_file_is_used_and_hashed(words: Path) -> None:
    tokenizer = open_tokenizer(str(words))
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.end_of_text_name) == (10, 9, "</s>")
    assert tokenizer.encode("hello world").tolist() == [1, 2]
    assert tokenizer.decode([1, 2, 9, 77]) == "hello world"
    assert tokenizer.content_hash == open_tokenizer(str(words)).content_hash
    words.write_text(words.read_text() + "\n")
    assert tokenizer.content_hash != open_tokenizer(str(words)).content_hash


def test_no_text_is_cut_or_filled_up(words: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(words))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(words))
    assert open_tokenizer(str(words)).encode("hello world hello").tolist() == [1, 2, 1]
    assert open_tokenizer(str(words)).encode("hello").tolist() == [1]


def test_a_text_has_the_same_ids_each_time_though_the_file_asks_for_dropout(tmp_path: Path) -> None:
    text = "that hat at that cat " * 10
    wanted = open_tokenizer(str(write_tokenizer("llama-2", tmp_path / "plain.json"))).encode(text).tolist()
    tokenizer = open_tokenizer(str(write_tokenizer("llama-2", tmp_path / "dropping.json", dropout=0.5)))
    assert all(tokenizer.encode(text).tolist() == wanted for _ in range(5))
    assert '"dropout": null' in tokenizer.to_json()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, "</s>"),
        ("<s>", "<s>"),
        (1, "<s>"),
        pytest.param(4, "</s>", id="an id of no special token"),
        pytest.param(9_999, "</s>", id="an id of no token"),
        ("a", "a"),
    ],
)
def test_what_ends_a_text_is_said_or_else_the_usual(tmp_path: Path, said: str | int | None, found: str) -> None:
    tokenizer = open_tokenizer(str(write_tokenizer("llama-2", tmp_path / "tokenizer.json")), said)
    assert tokenizer.end_of_text_name == found
    assert tokenizer.end_of_text == {"</s>": 2, "<s>": 1, "a": 4}[found]


def test_an_end_that_the_file_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer("llama-2", tmp_path / "tokenizer.json")
    with pytest.raises(
        DataError, match=r"tokenizer\.json has no token '<eos>' to end a text with \(`data\.end_of_text`"
    ):
        open_tokenizer(str(path), "<eos>")


def test_unusable_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        open_tokenizer(str(tmp_path / "missing.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match="not a file of the tokenizers library"):
        open_tokenizer(str(broken))
    tokenizers.Tokenizer(WordLevel({"hello": 0}, unk_token="hello")).save(str(broken))
    with pytest.raises(DataError, match=r"no end-of-text token.*</s>.*say which .*`data.end_of_text`.*add one"):
        open_tokenizer(str(broken))


def test_a_text_without_ids_says_so(tmp_path: Path) -> None:
    path = tmp_path / "holes.json"
    tokenizers.Tokenizer(WordLevel({"hello": 0, "</s>": 1}, unk_token="[UNK]")).save(str(path))
    assert open_tokenizer(str(path)).encode("hello").tolist() == [0]
    with pytest.raises(DataError, match=r"holes\.json has no ids for some text; give one"):
        open_tokenizer(str(path)).encode("goodbye")


def test_bytes_are_a_spec_of_their_own() -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.vocab_size == 257
    assert tokenizer.end_of_text == 256
