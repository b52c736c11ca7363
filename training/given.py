"""A model that is there already, to train on from: a folder as Hugging Face keeps it, with a LlamaForCausalLM or a Qwen3ForCausalLM in safetensors,
downloaded, or written by `export`.

The parameters have the names and the layout of ours (`model`), so they are taken as they are. What our layers do not compute (biases, scaled
rotary frequencies, sliding windows, quantised weights) is refused by name: a model that is nearly the same would train, from a worse loss.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from torch import Tensor

from farflung.training.errors import UnusableModel
from farflung.training.export import INDEX, WEIGHTS
from farflung.training.flat import slots_of
from farflung.training.model import ModelConfig, parameter_shapes
from farflung.training.tokenizer import ByteTokenizer

LONGEST = 2048
"""Tokens of a sample where nobody says how many: models are published with a context that no small card can train."""

_DTYPES = ("F32", "BF16", "F16")

_COMPUTED = "rotary_emb.inv_freq"
"""End of the names of what older files have beside the parameters, and anybody computes from config.json, as `transformers` does."""


class _HfConfig(msgspec.Struct):
    """What counts of config.json, with the defaults of LlamaConfig and, in `_DEFAULTS`, Qwen3Config."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    quantization_config: dict[str, Any] | None = None


_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenModel:
    """See the module."""

    folder: Path
    config: ModelConfig
    tokenizer: str
    """For `open_tokenizer`: `bytes`, or the path of the folder's file; empty where it has none."""
    end_of_text: int | None
    """The token that ends a text, by its id, where the folder says it."""

    def check(self, shapes: Iterable[tuple[str, torch.Size]]) -> None:
        """Compare what the files say of their weights with `shapes`, which are of all parameters; no weight is read. Raises UnusableModel for some that are
        missing, of another shape, or of no floating dtype that models are published in."""
        wanted = dict(shapes)
        missing = set(wanted)
        for path in self._files():
            with _weights(path) as file:
                for name in self._names(file):
                    if name not in wanted:
                        raise UnusableModel(f"{self.folder} has {name}, which this kind of model has no place for")
                    told = file.get_slice(name)
                    shape, dtype = list(told.get_shape()), told.get_dtype()
                    if shape != list(wanted[name]) or dtype not in _DTYPES:
                        raise UnusableModel(
                            f"{self.folder}: {name} is {dtype} {shape}, where config.json says {list(wanted[name])}, in {', '.join(_DTYPES)}"
                        )
                    missing.discard(name)
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise UnusableModel(
                f"{self.folder} lacks {len(missing)} of {len(wanted)} parameters: {some}; get all of its files"
            )

    def parameters(
        self,
        shapes: Iterable[tuple[str, torch.Size]],  # of all parameters, in the order wanted
    ) -> Tensor:  # fp32 [n] on the CPU
        """The flat vector. Blocks while it reads the files. Raises UnusableModel as `check` does, and for weights that are not finite."""
        shapes = list(shapes)
        self.check(shapes)
        slots = slots_of(shapes)
        flat = torch.empty(slots[-1].stop)
        views = {slot.name: flat[slot.start : slot.stop].view(slot.shape) for slot in slots}
        for path in self._files():
            with _weights(path) as file:
                for name in self._names(file):
                    tensor = file.get_tensor(name)
                    if not bool(torch.isfinite(tensor).all()):
                        raise UnusableModel(f"{self.folder}: {name} has values that are not finite")
                    views[name].copy_(tensor)
        return flat

    def _names(self, file: Any) -> Iterator[str]:
        """Of the parameters in it."""
        for name in file.keys():
            again = name == "lm_head.weight" and self.config.tie_embeddings  # some files have the one matrix twice
            if not again and not name.endswith(_COMPUTED):
                yield name

    def _files(self) -> Collection[Path]:
        index = self.folder / INDEX
        if (self.folder / WEIGHTS).exists() or not index.exists():  # where both are, `transformers` reads the one file
            return [self.folder / WEIGHTS]
        match _read_json(index):
            case {"weight_map": dict(places)} if all(isinstance(place, str) for place in places.values()):
                # names only: never outside of the folder
                return [self.folder / Path(name).name for name in sorted(set(places.values()))]
        raise UnusableModel(f"{index} does not say in which files the weights are")


def open_given(folder: Path) -> GivenModel:
    """What `folder` holds. Of its weights only names and shapes are read. Raises UnusableModel."""
    if not folder.is_dir():
        raise UnusableModel(
            f"{folder} is no folder; give one with config.json and model.safetensors, as `farflung export` writes"
        )
    raw = _read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise UnusableModel(
            f"{folder} holds a model of type {kind!r}; those that can be trained on are {', '.join(_DEFAULTS)}"
        )
    try:
        found = msgspec.convert(_DEFAULTS[kind] | raw, _HfConfig)
    except msgspec.ValidationError as error:
        raise UnusableModel(f"{folder / 'config.json'}: {error}") from error
    if odd := list(_oddities(found)):
        raise UnusableModel(f"{folder} has {', '.join(odd)}, which farflung's layers do not compute")
    rope = found.rope_parameters or {}
    try:
        config = ModelConfig(
            vocab_size=found.vocab_size,
            dim=found.hidden_size,
            num_layers=found.num_hidden_layers,
            num_heads=found.num_attention_heads,
            num_kv_heads=found.num_key_value_heads or found.num_attention_heads,
            ffn_dim=found.intermediate_size,
            seq_len=min(found.max_position_embeddings, LONGEST),
            rope_theta=float(rope.get("rope_theta") or found.rope_theta or 10_000.0),
            norm_eps=found.rms_norm_eps,
            tie_embeddings=found.tie_word_embeddings,
            qk_norm=found.model_type == "qwen3",
        )
    except (TypeError, ValueError) as error:
        raise UnusableModel(f"{folder / 'config.json'}: {error}") from error
    given = GivenModel(
        folder=folder, config=config, tokenizer=_tokenizer_of(folder), end_of_text=_end_of_text(folder, raw)
    )
    given.check(parameter_shapes(config))
    return given


@contextmanager
def _weights(path: Path) -> Iterator[Any]:  # safetensors does not say of which types its functions are
    """An open file of weights. Raises UnusableModel where it cannot be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise UnusableModel(f"cannot read {path}: {error}") from error


def _tokenizer_of(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    ours = file.read_bytes() == ByteTokenizer().to_json().encode()  # exported by us: then nobody needs the file
    return "bytes" if ours else str(file)


def _end_of_text(folder: Path, config: dict[str, Any]) -> int | None:
    generation = folder / "generation_config.json"
    for said in (config, _read_json(generation) if generation.is_file() else {}):
        token = said.get("eos_token_id")
        if isinstance(token, list) and token:
            token = token[0]
        if isinstance(token, int) and token >= 0:
            return token
    return None


def _oddities(config: _HfConfig) -> Iterator[str]:
    """What the model does that ours does not."""
    if config.hidden_act != "silu":
        yield f"the activation {config.hidden_act}"
    if config.attention_bias or config.mlp_bias:
        yield "biases"
    if config.use_sliding_window:
        yield "sliding windows"
    if config.quantization_config is not None:
        yield "quantised weights"
    for scaling in (config.rope_scaling, config.rope_parameters):
        kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            yield f"rotary frequencies of type {kind}"
    if config.head_dim is not None and config.num_attention_heads * config.head_dim != config.hidden_size:
        yield f"{config.num_attention_heads} heads of {config.head_dim} at a width of {config.hidden_size}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableModel(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UnusableModel(f"{path} is no JSON object")
    return found
