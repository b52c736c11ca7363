"""`docs/manifest.md`: every key of a manifest's TOML file, from the structs that check them. `python -m tests.manifest_page` in the root writes it."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from pathlib import Path

import msgspec
from tests.syntax import parsed

from farflung.compression.registry import ACTIVATION_CODECS, CODECS
from farflung.node import founding
from farflung.node.manifest_filling import NO_METHOD, PIPELINE_INNER_STEPS
from farflung.protocol import manifest, manifest_sections
from farflung.protocol.limits import MAX_FRAGMENTS
from farflung.protocol.manifest_toml import _MOVED, _NESTED, _known
from farflung.training.methods import LONG_RUN, METHOD_NAMES, training_method
from farflung.training.presets import PRESETS, num_parameters

PAGE = Path(__file__).parent.parent / "docs" / "manifest.md"
MODULES = (manifest_sections, manifest)
STRUCTS = {
    "model": manifest_sections.ModelSpec,
    "tokenizer": manifest_sections.TokenizerSpec,
    "data": manifest_sections.DataSpec,
    "inner": manifest_sections.InnerSpec,
    "outer": manifest_sections.OuterSpec,
    "feedback": manifest_sections.FeedbackSpec,
    "pipeline": manifest_sections.PipelineSpec,
    "admission": manifest_sections.AdmissionSpec,
    "deadlines": manifest_sections.DeadlineSpec,
    "swarm": manifest.Manifest,
}
"""By the part of a manifest."""

EXAMPLE = """\
[model]
preset = "35m"
qk_norm = true

[inner]
z_loss = 1e-4

[swarm]
total_steps = 20_000
min_contributors = 2
"""

FILLED = {
    "model.preset": f'`"{founding.DEFAULT_PRESET}"`, where `model.dim` is not said',
    "model.vocab_size": "the tokenizer's, as a multiple of 8",
    **{f"model.{key}": "the preset's" for key in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")},
    **{f"model.{key}": "the preset's" for key in ("seq_len", "rope_theta", "tie_embeddings")},
    "data.spec": '`"python"`',
    "data.content_hash": "found in the data; leave it out",
    "data.num_samples": "found in the data; leave it out",
    "data.tokenizer_hash": "the file's; leave it out",
    "data.end_of_text": "what the folder of `--from` says; else the first usual name that the file has, as `</s>`",
    "inner.lr": "by the model's size, of `adamw` and `muon`; of others `0.001`",
    "inner.warmup_steps": "`100`, and at most a tenth of `swarm.total_steps`",
    "feedback.uplink": f'`"none"`; `"residual"` with codecs below {founding.FEEDBACK_BITS:g} bits',
    "feedback.downlink": f'`"none"`; `"residual"` with codecs below {founding.FEEDBACK_BITS:g} bits',
    "feedback.after_rounds": f"`0`; with a residual that follows from the codec, the rounds of the first part of {founding.FEEDBACK_WAITS} of the run",
    "pipeline.layers": "by what the stages compute, head included",
    "swarm.name": "the `NAME` of `create NAME`; any other is an error",
    "swarm.batch_tokens": f"{founding.DEFAULT_BATCH} samples",
    "swarm.total_steps": f"`{founding.DEFAULT_STEPS}`",
    "swarm.inner_steps": f"`{founding.DEFAULT_INNER_STEPS}`, with stages `{PIPELINE_INNER_STEPS}`",
    "swarm.delay_steps": '`0`; where `inner_steps = "auto"`, `"auto"`',
    "swarm.invite_key": "made with the invitation; leave it out",
}
"""What `create` writes where the file says nothing and the manifest's own default, if it has one, would not do."""

TYPES = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "`true` or `false`",
    "bytes": "hex digits",
    "tuple[int, ...]": "whole numbers in brackets",
    "tuple[float, float]": "two numbers in brackets",
    "int | Auto": 'whole number, or `"auto"`',
    "float | Literal['rebase']": 'number, or `"rebase"`',
}
VALUES = {
    "model.preset": "[one of these](#models)",
    "model.vocab_size": "whole number, 2 to 2^24, and not fewer than the tokenizer's",
    "data.spec": '`"python"`, a text file or folder, a folder of token shards, or `"hf:DATASET"`',
    "data.tokenizer": '`"bytes"`, or the path of a file',
    "swarm.fragments": f'whole number, 1 to {MAX_FRAGMENTS} and to H, or `"auto"`',
    "swarm.max_fragments": f"whole number, 1 to {MAX_FRAGMENTS} and to `min_inner_steps`",
}
"""Where what `create` takes is not what the struct checks."""
OF_CODECS = {"uplink_codec", "downlink_codec", "last_codec", "forward_codec", "backward_codec"}


def page() -> str:
    """What `PAGE` has to say."""
    tables = [line for section, keys in _known().items() for line in _table(section, keys)]
    return "\n".join([*_head(), *tables, *_methods(), *_codecs(), *_presets()]) + "\n"


def _head() -> list[str]:
    return [
        "# The manifest: what a swarm agrees on",
        "",
        "Made by `python -m tests.manifest_page`; do not edit.",
        "",
        "Whoever founds a swarm may write any of this into a TOML file, for `farflung create NAME --config FILE`; flags win over it. It is signed, and never changes: another manifest is another swarm. "
        "A key that is not in these tables is an error, and so is a value out of range; both name the key; `[pipeline]` needs `stages` above 1. A scenario's `[manifest.*]` has the same keys ([simulated swarms](scenarios.md)).",
        "",
        "```toml",
        *EXAMPLE.splitlines(),
        "```",
        "",
        f"*Default* is what `--method {NO_METHOD}` leaves. [The methods](#methods) say more, where neither file nor flags do.",
    ]


def _table(section: str, keys: list[str]) -> list[str]:
    about = " ".join(inspect.getdoc(STRUCTS[section]).split())
    rows = ["", f"## [{section}]", "", *([] if section == "swarm" else [about, ""])]
    rows += ["| key | values | default | |", "|---|---|---|---|"]
    for key in keys:
        part, name = _MOVED.get(section, {}).get(key, (section, key))
        field = next(one for one in msgspec.structs.fields(STRUCTS[part]) if one.name == name)
        default = FILLED.get(f"{section}.{key}") or f"`{_toml(field.default)}`"
        about = " ".join(_docstrings(STRUCTS[part])[name].split())
        rows.append(f"| `{key}` | {_values(section, key, part, name)} | {default} | {about} |")
    return rows


def _toml(value: object) -> str:
    """As the person's file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"


def _class(struct: type) -> ast.ClassDef:
    (found,) = parsed(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(found, ast.ClassDef)
    return found


def _docstrings(struct: type) -> dict[str, str]:
    """By field. Fields without one are missing."""
    body = _class(struct).body
    return {
        field.target.id: said.value.value
        for field, said in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr)
    }


def _values(section: str, key: str, part: str, name: str) -> str:
    field = next(one for one in _class(STRUCTS[part]).body if isinstance(one, ast.AnnAssign) and one.target.id == name)
    annotation = ast.unparse(field.annotation)
    if key in OF_CODECS:
        return "codec ([all](#codecs))"
    if (told := VALUES.get(f"{section}.{key}")) is not None:
        return told
    if annotation.startswith("Literal"):
        return " or ".join(f'`"{value}"`' for value in ast.literal_eval(field.annotation.slice))
    said = _checks().get(f"{section}.{key}") or _checks().get(key, [])
    if said and said[-1].startswith('`"'):
        return said[-1]
    kind, alternative, other = TYPES[annotation].partition(", or ")
    return ", ".join([kind, *said[-1:]]) + alternative + other


def _checks() -> dict[str, list[str]]:
    """By the key that a check names: what it lets through, the strictest last."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for call in ast.walk(parsed(inspect.getsource(module))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and len(call.args) > 1):
                continue
            key = call.args[0]
            if isinstance(key, ast.JoinedStr):  # of each of several: `inner.betas[{i}]`
                key = ast.Constant(key.values[0].value.partition("[")[0])
            if not isinstance(key, ast.Constant):
                continue
            match call.func.id, call.args[2:]:
                case "check_range", [low, high]:
                    said = f"{_bound(module, low)} to {_bound(module, high)}"
                case "check_one_of", [allowed]:
                    said = " or ".join(f'`"{one}"`' for one in _evaluated(module, allowed))
                case "check_supported", [only]:
                    said = f'`"{_evaluated(module, only)}"`'
                case _:
                    continue
            found.setdefault(key.value, []).append(said)
    return found


def _evaluated(module: types.ModuleType, node: ast.expr) -> object:
    return eval(ast.unparse(node), vars(module))  # an expression of our own source


def _bound(module: types.ModuleType, node: ast.expr) -> str:
    """A number, or where it depends on other keys, these."""
    if any(isinstance(one, ast.Name) and one.id in ("self", "seq_len") for one in ast.walk(node)):
        return f"`{ast.unparse(node).replace('self.', '').replace('laps.least', 'H / P')}`"
    value = _evaluated(module, node)
    if isinstance(value, int) and value >= 1 << 20:
        return f"2^{value.bit_length() - 1}" if value & (value - 1) == 0 else f"2^{value.bit_length()} - 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def _methods() -> list[str]:
    lengths = (LONG_RUN - 1, LONG_RUN)
    shown = [training_method(name, steps) for name in METHOD_NAMES for steps in lengths]
    said = [method.sections(method.inner_steps, method.fragments) for method in shown]
    titles = [f"`{name}`{', long' * (steps >= LONG_RUN)}" for name in METHOD_NAMES for steps in lengths]
    rows = [
        f"| `{section}.{key}` | {' | '.join(f'`{_toml(one[section][key])}`' for one in said)} |"
        for section, values in said[0].items()
        for key in values
    ]
    return [
        "",
        "## Methods",
        "",
        f"`create --method` writes these where neither the file nor a flag does; *long*: runs of {LONG_RUN:,} steps or more. What they cost and give, [in long runs](quality_nightly.md) and [in short ones](quality_ci.md).",
        "",
        f"| key | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
        *rows,
        "",
        f"With stages H is {PIPELINE_INNER_STEPS} at most, and `fragment_pattern` is sequential. With another H, P is the most up to {shown[0].fragments} that divides it and leaves H / P more than `delay_steps`; where only `swarm.fragments` is said, H is the next multiple of it; with "
        f'`inner_steps = "auto"` P is `"auto"`, `max_fragments` {shown[0].fragments}, and `min_inner_steps` the method\'s H: with shorter laps it would not send as little. What somebody has chosen otherwise takes some of a method back: with `outer.optimizer` it says nothing of `[outer]`, with `outer.lr` no '
        "`lr_growth`; with codecs that are both finer than its `last_codec`, or another `feedback.uplink`, not that; with a coarser codec of means their feedback is `residual`; with `swarm.mix` the uplink's feedback is `residual`.",
    ]


def _codecs() -> list[str]:
    return [
        "",
        "## Codecs",
        "",
        "`NAME`, or `NAME(key=value,...)` with what is to differ from its defaults; a key without a default has to be said. `+zstd` behind any of them compresses what it made. [How many bits, how much error, how fast](compression.md).",
        "",
        "| codec | | keys |",
        "|---|---|---|",
        *(_codec(codec) for codec in CODECS),
        "",
        "Between the stages of a pipeline (`forward_codec`, `backward_codec`) also:",
        "",
        "| codec | | keys |",
        "|---|---|---|",
        *(_codec(codec) for codec in ACTIVATION_CODECS),
    ]


def _codec(codec: type) -> str:
    kinds = [kind for kind in reversed(codec.__mro__) if kind.__module__.startswith("farflung.")]
    said = {key: text for kind in kinds for key, text in _docstrings(kind).items()}
    keys = [
        f"`{field.name}`{'' if field.default is dataclasses.MISSING else f' = `{_toml(field.default)}`'}: {' '.join(said[field.name].split())}"
        for field in dataclasses.fields(codec)
    ]
    return f"| `{codec.name}` | {inspect.getdoc(codec).partition(chr(10))[0]} | {' '.join(keys)} |"


def _presets() -> list[str]:
    return [
        "",
        "## Models",
        "",
        "| `preset` | parameters | `dim` | `num_layers` | `num_heads` | `num_kv_heads` | `ffn_dim` | `seq_len` | `rope_theta` | `tie_embeddings` |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| `{name}` | {num_parameters(shape) / 1e6:,.4g} M | {shape.dim} | {shape.num_layers} | {shape.num_heads} | {shape.num_kv_heads} | {shape.ffn_dim} "
            f"| {shape.seq_len} | {shape.rope_theta:,.0f} | {_toml(shape.tie_embeddings)} |"
            for name, shape in PRESETS.items()
        ),
        "",
        "Parameters are counted with the vocabulary of bytes. Keys of `[model]` beside `preset` win over it. Without one, what is *the preset's* above has to be said, but for `rope_theta` and `tie_embeddings`, which are as of the smallest.",
    ]


def keys_of_structs() -> set[str]:
    """`section.key` of all that a person may say, without help of the parser's own table."""
    inside = {"tokenizer": "data", "admission": "swarm", "deadlines": "swarm"}
    renamed = {"data.kind": "data.tokenizer", "data.hash": "data.tokenizer_hash", "swarm.rule": "swarm.admission"}
    keys = {
        f"{inside.get(part, part)}.{field.name}"
        for part, struct in STRUCTS.items()
        for field in msgspec.structs.fields(struct)
        if not (part == "swarm" and field.name in _NESTED | {"founder", "created"})
    }
    return {renamed.get(key, key) for key in keys}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
