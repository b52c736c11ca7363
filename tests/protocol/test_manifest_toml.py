"""A person's file: round trips, and messages that name key and remedy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import ConfigError
from farflung.protocol.limits import MAX_TOML_CHARS
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.manifest_toml import (
    manifest_from_sections,
    manifest_from_toml,
    manifest_to_toml,
    parse_toml,
)

FOUNDER = b"f" * 32
FILE = f"""
[model]
vocab_size = 256
dim = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
ffn_dim = 128
seq_len = 128

[data]
spec = "text:/data/*.txt"
content_hash = "{"64" * 32}"
num_samples = 1000
tokenizer = "file"
tokenizer_hash = "{"74" * 32}"
end_of_text = "<|end|>"

[inner]
lr = 1
betas = [0.9, 0.99]

[swarm]
name = "tiny"
batch_tokens = 1024
total_steps = 2000
admission = "invite"
invite_key = "{"6b" * 32}"
min_round_s = 1.5

[pipeline]
stages = 2
layers = [1, 1]
microbatches = 8

[feedback]
uplink = "residual"
decay = 0.95
after_rounds = 2
"""


def read(text: str, presets: dict[str, dict[str, Any]] | None = None) -> Manifest:
    return manifest_from_toml(text, founder=FOUNDER, created=1_800_000_000, presets=presets)


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return str(caught.value)


def test_reads_every_section() -> None:
    manifest = read(FILE)
    assert manifest.founder == FOUNDER
    assert manifest.model.dim == 64
    assert manifest.tokenizer.kind == "file" and manifest.tokenizer.hash == b"t" * 32
    assert manifest.tokenizer.end_of_text == "<|end|>"
    assert manifest.inner.lr == 1.0 and manifest.inner.betas == (0.9, 0.99)
    assert manifest.admission.rule == "invite" and manifest.admission.invite_key == b"k" * 32
    assert manifest.deadlines.min_round_s == 1.5
    assert manifest.feedback == FeedbackSpec(uplink="residual", downlink="none", decay=0.95, after_rounds=2)


def test_round_trip() -> None:
    manifest = read(FILE)
    assert read(manifest_to_toml(manifest)) == manifest


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("lr = 1", "learning_rate = 1", "unknown key inner.learning_rate"),
        ("lr = 1", "l_r = 1", "did you mean 'lr'?"),
        ("name = ", "naem = ", "unknown key swarm.naem; did you mean 'name'?"),
        ("lr = 1", "batch_tokens = 1", "unknown key inner.batch_tokens; it belongs in [swarm]"),
        (
            "dim = 64",
            "layers = 64",
            "unknown key model.layers; did you mean 'num_layers'? [pipeline] has one of that name",
        ),
        ("name = ", "founder = ", "unknown key swarm.founder"),
        (
            "[inner]",
            "[iner]",
            "unknown section [iner]; known are model, data, inner, outer, feedback, pipeline, swarm; did you mean 'inner'?",
        ),
        ("[model]", "outer = 3\n[model]", "outer must be a section"),
        ("dim = 64", 'dim = "64"', "model.dim: Expected `int`, got `str`"),
        ("dim = 64", "dim = 64.5", "model.dim: Expected `int`, got `float`"),
        ("dim = 64", "", "model.dim is missing"),
        ("total_steps = 2000", "", "swarm.total_steps is missing"),
        ("total_steps = 2000", "total_steps = []", "swarm.total_steps: Expected `int`, got `array`"),
        ('admission = "invite"', "admission = 1", "swarm.admission: Expected `str`, got `int`"),
        ('tokenizer = "file"', "tokenizer = 1", "data.tokenizer: Expected `str`, got `int`"),
        ("betas = [0.9, 0.99]", 'betas = [0.9, ""]', "inner.betas[1]: Expected `float`, got `str`"),
        ("decay = 0.95", "decay = 1.5", "feedback.decay = 1.5: must be between"),
        ("after_rounds = 2", "after_rounds = -1", "feedback.after_rounds = -1: must be between"),
        ('uplink = "residual"', "uplink = 1", "feedback.uplink: Expected"),
        ('uplink = "residual"', 'uplink = "keep"', "feedback.uplink = 'keep': must be one of none, residual, kept"),
        ("lr = 1", "lr = -1", "inner.lr = -1.0: must be between"),
        ("lr = 1", "lr = nan", "inner.lr = nan"),
        ("lr = 1", "lr = 1" + "0" * 400, "inner.lr"),
        ("dim = 64", "dim = 1" + "0" * 400, "model.dim"),
        ("num_samples = 1000", "num_samples = 1000-01-01", "num_samples"),
        ("lr = 1", "lr = 1" + "0" * 5000, "no TOML"),
        ("lr = 1", "lr = ", "no TOML"),
        ('"' + "64" * 32 + '"', "5", "data.content_hash = 5: must be hex digits in quotes"),
        ("64" * 32, "6g", "data.content_hash = '6g'"),
        ("64" * 32, "64", "data.content_hash: 1 bytes, must be 32"),
        ("vocab_size = 256", 'preset = "tiny"', "model.preset = 'tiny': unknown; known are none"),
        ("dim = 64", "dim = 64\npreset = 1", "model.preset = 1: must be a string"),
    ],
)
def test_complaints(before: str, after: str, says: str) -> None:
    assert before in FILE
    assert says in complaint(FILE.replace(before, after, 1))


def test_presets() -> None:
    lines = FILE.splitlines()
    text = "\n".join(['[model]\npreset = "small"\nseq_len = 64', *lines[lines.index("[data]") :]])
    small = {
        "vocab_size": 256,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_dim": 64,
        "seq_len": 8,
    }
    manifest = read(text, {"small": small})
    assert (manifest.model.preset, manifest.model.dim, manifest.model.seq_len) == ("small", 32, 64)
    assert read(manifest_to_toml(manifest)) == manifest  # the preset is only a label by then
    with pytest.raises(ConfigError, match=r"known are small; did you mean 'small'\?"):
        read(text.replace('"small"', '"smal"'), {"small": small})


def test_a_command_fills_in_what_a_person_cannot_know() -> None:
    sections = parse_toml(FILE.replace("num_samples = 1000\n", "").replace(f'content_hash = "{"64" * 32}"\n', ""))
    sections["data"] |= {"num_samples": 1000, "content_hash": b"d" * 32}
    assert manifest_from_sections(sections, founder=FOUNDER, created=1_800_000_000) == read(FILE)


def test_limits() -> None:
    assert "at most" in complaint("#" * (MAX_TOML_CHARS + 1))
    assert "nested too deeply" in complaint("[swarm]\nname = " + "[" * 5000)


@given(st.data())
def test_damage_is_a_config_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(FILE) - 1))
    damaged = FILE[:at] + data.draw(st.text(max_size=3)) + FILE[data.draw(st.integers(at, min(at + 3, len(FILE)))) :]
    try:
        read(damaged)
    except ConfigError:
        pass  # nothing else may come out
