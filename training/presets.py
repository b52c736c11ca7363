"""Named model shapes from 0.2 M to 8 B parameters, and the count of parameters of any shape.

The names count the parameters with a byte vocabulary, except the three largest, which are the shapes of
Llama 3.2 1B, Llama 3.2 3B and Llama 3 8B and count with their vocabulary of 128 k.
"""

from dataclasses import replace

from farflung.training.model import ModelConfig

BYTE_VOCAB = 257
"""256 bytes and the end-of-text token (`tokenizer.ByteTokenizer`)."""


def _shape(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=BYTE_VOCAB, dim=dim, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        ffn_dim=ffn_dim, seq_len=seq_len,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "tiny": _shape(64, 3, 4, 2, 256, 128),
    "1m": _shape(128, 4, 4, 2, 512, 128),
    "3m": _shape(192, 6, 6, 2, 704, 256),
    "10m": _shape(320, 8, 5, 5, 896, 512),
    "35m": _shape(512, 12, 8, 4, 1408, 1024),
    "60m": _shape(640, 12, 10, 5, 1920, 1024),
    "150m": _shape(896, 16, 14, 7, 2560, 1024),
    "350m": _shape(1280, 20, 20, 10, 3328, 1024),
    "1b": replace(_shape(2048, 16, 32, 8, 8192, 2048), rope_theta=500_000.0),
    "3b": replace(_shape(3072, 28, 24, 8, 8192, 2048), rope_theta=500_000.0),
    "8b": replace(_shape(4096, 32, 32, 8, 14336, 4096), rope_theta=500_000.0, tie_embeddings=False),
}


def preset(name: str, *, vocab_size: int = BYTE_VOCAB, seq_len: int | None = None) -> ModelConfig:
    """The shape called `name`, for a tokenizer of `vocab_size` ids and, if given, another sequence length
    in tokens.

    The embedding is rounded up to a multiple of 8 rows, which the matrix units of GPUs want; the rows
    beyond the tokenizer's are never targets and never sampled. Raises ValueError for an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(PRESETS)}")
    shape = PRESETS[name]
    return replace(shape, vocab_size=-(-vocab_size // 8) * 8, seq_len=seq_len or shape.seq_len)


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this shape, a tied head counted once."""
    attention = 2 * config.dim * config.dim + 2 * config.dim * config.kv_dim
    norms = 2 * config.dim + (2 * config.head_dim if config.qk_norm else 0)
    layer = attention + 3 * config.dim * config.ffn_dim + norms
    tables = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + tables + config.dim
