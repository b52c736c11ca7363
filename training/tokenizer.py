"""Text to token ids and back: bytes, embedded in this package, or any JSON file of the `tokenizers` library.

Bytes need no file and no training and know every text; they cost about four times the tokens of a 32 k
vocabulary.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from farflung.training.errors import DataError

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""Names that tokenizer files give to the token that ends a text; where nobody says which it is, the first one that a file has is taken."""


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def end_of_text(self) -> int:
        """The id that ends every text."""

    @property
    def end_of_text_name(self) -> str: ...

    @property
    def content_hash(self) -> str:
        """Hex SHA-256 of everything that decides the ids; goes into a swarm's manifest."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of a text, all of it, without an end-of-text. Raises DataError where it knows no ids for it."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; end-of-text and unknown ids vanish, broken bytes become U+FFFD."""

    def to_json(self) -> str:
        """The same tokenizer as a `tokenizers` file (tokenizer.json). As special tokens it adds what training has before every text but the first:
        an end-of-text."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is end-of-text."""

    vocab_size = 257
    end_of_text = 256
    end_of_text_name = "<|endoftext|>"
    content_hash = hashlib.sha256(b"farflung bytes 0-255, end of text 256").hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """A byte-level BPE without merges. Beside special tokens it differs from `encode` in one text: the name of end-of-text itself."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        special = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        vocabulary[self.end_of_text_name] = self.end_of_text
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [{"id": self.end_of_text, "content": self.end_of_text_name, **special}],
                "normalizer": None,
                "pre_tokenizer": byte_level,
                "post_processor": _begin_with(self),
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": False,
                    "vocab": vocabulary,
                    "merges": [],
                },
            },
            ensure_ascii=False,
        )


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library. Raises DataError when it cannot be used."""

    def __init__(self, path: Path, end_of_text: str | int | None = None) -> None:
        """`end_of_text`: the token that ends a text, by its name, or by an id, which counts if it is of a special token; otherwise the usual names decide."""
        self._path = path
        try:
            self._json = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer {path}: {error}") from error
        with _rust_errors(f"tokenizer {path} is not a file of the tokenizers library"):
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
        self._tokenizer.no_truncation()  # published files often cut and fill up texts for the model that they came with
        self._tokenizer.no_padding()
        if isinstance(self._tokenizer.model, tokenizers.models.BPE):
            # With dropout it draws the ids of a text anew each time, and no two peers, nor one peer twice, have the same data.
            self._tokenizer.model.dropout = None
        self.end_of_text_name, self.end_of_text = self._ending(end_of_text)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())  # ids may have holes
        self.content_hash = hashlib.sha256(self._json.encode() + self.end_of_text_name.encode()).hexdigest()

    def _ending(self, wanted: str | int | None) -> tuple[str, int]:
        """Name and id of the token that ends a text."""
        if isinstance(wanted, int):
            added = self._tokenizer.get_added_tokens_decoder().get(wanted)
            if added is not None and added.special:  # other ids are defaults that nobody has chosen
                return added.content, wanted
            wanted = None
        for name in END_OF_TEXT_NAMES if wanted is None else (wanted,):
            if (found := self._tokenizer.token_to_id(name)) is not None:
                return name, found
        if wanted is not None:
            raise DataError(f"tokenizer {self._path} has no token {wanted!r} to end a text with (`data.end_of_text`)")
        raise DataError(
            f"tokenizer {self._path} has no end-of-text token, which is one of {', '.join(END_OF_TEXT_NAMES)}: say which of its tokens it is "
            "(`data.end_of_text`), or add one to the file (the tokenizers library's `add_special_tokens`)"
        )

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        with _rust_errors(f"tokenizer {self._path} has no ids for some text; give one that knows all of the data"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        known: Sequence[int] = [i for i in ids if 0 <= i < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        # The file's own special tokens are of the model that it came with: training never sees them.
        return json.dumps(
            json.loads(self._tokenizer.to_str()) | {"post_processor": _begin_with(self)}, ensure_ascii=False
        )


def open_tokenizer(spec: str, end_of_text: str | int | None = None) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json, of which `end_of_text` is as for `JsonTokenizer`. Raises DataError."""
    return ByteTokenizer() if spec == "bytes" else JsonTokenizer(Path(spec), end_of_text)


def _begin_with(tokenizer: Tokenizer) -> dict[str, object]:
    """What a `tokenizers` file has to say so that special tokens are an end-of-text before each text."""
    name = tokenizer.end_of_text_name
    of_text, of_second = (
        [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": text, "type_id": 0}}] for text in ("A", "B")
    )
    return {
        "type": "TemplateProcessing",
        "single": of_text,
        "pair": [*of_text, *of_second],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.end_of_text], "tokens": [name]}},
    }


@contextmanager
def _rust_errors(what: str) -> Iterator[None]:
    """The library's errors become plain `Exception`s, no class of their own. Raises DataError for them."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise DataError(f"{what}: {error}") from error


def _byte_characters() -> list[str]:
    """How byte-level BPE writes each byte: as itself if printable, else as a character from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = map(chr, itertools.count(0x100))
    return [chr(byte) if byte in printable else next(substitutes) for byte in range(256)]
