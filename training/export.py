"""A Hugging Face folder that `transformers` loads as LlamaForCausalLM, or with QK-norm as Qwen3ForCausalLM, with its
tokenizer and a model card.

The parameters keep their names and layout (see `model.py`), so the tensors are copied as they are.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from farflung.training.checkpoint import save_tensors
from farflung.training.model import ModelConfig
from farflung.training.tokenizer import Tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Where the weights are, or, if they are several files, what says in which of them."""

SHARD_BYTES = 4 << 30
"""Largest weight file; hubs and old filesystems dislike larger ones."""


def export_folder(
    folder: Path,
    config: ModelConfig,
    parameters: Mapping[str, Tensor],  # by name, e.g. replica.layout.views(replica.outer.params)
    tokenizer: Tokenizer,
    *,
    name: str,  # of the model, for the card
    facts: Mapping[str, str | int | float],  # of the run, for the card, in the order to show
    dtype: torch.dtype = torch.float32,  # of the weights in the files
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder; it is created. Files of the same names are replaced. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", hf_config(config, tokenizer, dtype))
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    _write_json(folder / "generation_config.json", {**ends, "do_sample": True, "temperature": 0.8, "top_k": 40})
    _write_weights(folder, parameters, dtype, shard_bytes)
    _write(folder / "tokenizer.json", tokenizer.to_json())
    end = tokenizer.end_of_text_name
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # a model of this kind refuses token types
        "model_max_length": config.seq_len,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "special_tokens_map.json", {"bos_token": end, "eos_token": end})
    _write(folder / "README.md", model_card(name, facts))


def hf_config(config: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, object]:
    """config.json of a LlamaForCausalLM or Qwen3ForCausalLM of this shape, for transformers 4 (4.51 for Qwen3) and 5."""
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": tokenizer.end_of_text,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
        "use_cache": True,
    }


def model_card(name: str, facts: Mapping[str, str | int | float]) -> str:
    """README.md with YAML front matter, as the hub reads it. JSON strings are valid YAML, whatever `name`
    holds."""
    rows = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in facts.items())
    return (
        "---\n"
        "library_name: transformers\n"
        "pipeline_tag: text-generation\n"
        f"model_name: {json.dumps(name)}\n"
        "tags:\n- farflung\n- diloco\n- llama\n"
        "---\n\n"
        f"# {_cell(name)}\n\n"
        "Trained with farflung: one model on GPUs scattered over the internet, synchronised by DiLoCo.\n"
        "These are the outer parameters, which all peers of the swarm held bit by bit alike.\n\n"
        "| fact | value |\n|---|---|\n"
        f"{rows}\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\n'
        'model = AutoModelForCausalLM.from_pretrained(".")\n'
        'inputs = tokenizer("import ", return_tensors="pt")  # with the end of a text before it, as texts were trained on\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0], skip_special_tokens=True))\n"
        "```\n"
    )


def _write_weights(folder: Path, parameters: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in parameters.items():
        tensor_bytes = tensor.numel() * dtype.itemsize
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    index = folder / INDEX
    if len(shards) == 1:
        names = [WEIGHTS]
        index.unlink(missing_ok=True)
    for file_name, shard in zip(names, shards, strict=True):
        tensors = {name: parameters[name].detach().to("cpu", dtype, copy=True).contiguous() for name in shard}
        partial = folder / (file_name + ".partial")
        save_tensors(partial, tensors, {"format": "pt"})
        partial.chmod((folder / "config.json").stat().st_mode)  # safetensors makes files that nobody else may read
        partial.replace(folder / file_name)
    if len(shards) > 1:
        total = sum(tensor.numel() for tensor in parameters.values()) * dtype.itemsize
        weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        _write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for stale in _weight_files(folder, keep=names):
        stale.unlink()


def _weight_files(folder: Path, keep: Iterable[str]) -> list[Path]:
    """Weight files of an earlier export with another number of shards: `transformers` would prefer them."""
    ours = [*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS]
    return [path for path in ours if path.name not in set(keep) and path.exists()]


def _cell(value: str | int | float) -> str:
    """One line, no table separator: a fact may come from a manifest that somebody else wrote."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
