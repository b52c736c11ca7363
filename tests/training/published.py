"""Tokenizer files in the styles in which they are published, small: each with special tokens of its own before every text."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

BEGIN = {"llama-2": "<s>", "llama-2-first": "<s>", "llama-3": "<|begin_of_text|>"}
"""The token that the file puts before a text, by style."""

ENDS = {"llama-2": "</s>", "llama-2-first": "</s>", "llama-3": "<|end_of_text|>"}
STYLES = list(BEGIN)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer_json(style: str, **model: Any) -> str:  # keys of the file's model, over its own
    """A file of `style`; a letter is a token, and so is `at` and a word's beginning."""
    begin, end = BEGIN[style], ENDS[style]
    space = "\u0120" if style == "llama-3" else "\u2581"
    pieces = ["<unk>", begin, end, space, *LETTERS, *(c for c in "\n.\u010a" if c not in LETTERS), "at", f"{space}t"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    bpe = BPE(vocabulary, [("a", "t"), (space, "t")], unk_token="<unk>", fuse_unk=True)
    tokenizer: Any = tokenizers.Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (begin, end)])
    template = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])])
    if style == "llama-3":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    else:
        first = style == "llama-2-first"  # then the text's first word alone gets the space
        if first:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.post_processor = template
    said = json.loads(tokenizer.to_str())
    said["model"] |= model
    return json.dumps(said, ensure_ascii=False)


def write_tokenizer(style: str, path: Path, **model: Any) -> Path:
    path.write_text(tokenizer_json(style, **model), encoding="utf-8")
    return path
