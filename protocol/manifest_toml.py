"""A person's manifest: TOML with the sections [model], [data], [inner], [outer], [feedback], [pipeline] and [swarm].

The tokenizer is part of [data] (`tokenizer`, `tokenizer_hash`, `end_of_text`), admission and deadlines are part of [swarm].
Keys and hashes are hex. Two things are never in the file: the founder's key and the time of founding; others
(content hash, number of samples, invite key) a command may fill in between `parse_toml` and
`manifest_from_sections`.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from farflung.protocol.checks import nearest
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import MAX_TOML_CHARS
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import DataSpec, FeedbackSpec, InnerSpec, ModelSpec, OuterSpec, PipelineSpec

Sections = dict[str, dict[str, Any]]
"""Section -> key -> value, as in the file."""

# TOML key -> where it stands in a manifest, for those that do not stand under the section's own name.
_MOVED: dict[str, dict[str, tuple[str, str]]] = {
    "data": {
        "tokenizer": ("tokenizer", "kind"),
        "tokenizer_hash": ("tokenizer", "hash"),
        "end_of_text": ("tokenizer", "end_of_text"),
    },
    "swarm": {
        "admission": ("admission", "rule"),
        "invite_key": ("admission", "invite_key"),
        "min_round_s": ("deadlines", "min_round_s"),
        "max_round_s": ("deadlines", "max_round_s"),
    },
}
_MOVED_FROM = {place: (section, key) for section, keys in _MOVED.items() for key, place in keys.items()}
_NESTED = {"model", "tokenizer", "data", "inner", "outer", "feedback", "pipeline", "admission", "deadlines"}
_HEX = {("data", "content_hash"), ("data", "tokenizer_hash"), ("swarm", "invite_key")}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _known() -> dict[str, list[str]]:
    def keys(section: str, struct: type[msgspec.Struct], without: set[str]) -> list[str]:
        own = [field.name for field in msgspec.structs.fields(struct) if field.name not in without]
        return own + list(_MOVED.get(section, {}))

    return {
        "model": keys("model", ModelSpec, set()),
        "data": keys("data", DataSpec, set()),
        "inner": keys("inner", InnerSpec, set()),
        "outer": keys("outer", OuterSpec, set()),
        "feedback": keys("feedback", FeedbackSpec, set()),
        "pipeline": keys("pipeline", PipelineSpec, set()),
        "swarm": keys("swarm", Manifest, _NESTED | {"founder", "created"}),
    }


def parse_toml(text: str) -> Sections:
    """Read the file; checks syntax, sections and keys, not yet values. Raises ConfigError; names the nearest
    valid key.
    """
    if len(text) > MAX_TOML_CHARS:
        raise ConfigError(f"the manifest file has {len(text)} characters, at most {MAX_TOML_CHARS} are allowed")
    try:
        sections = tomllib.loads(text)
    except ValueError as err:  # TOMLDecodeError, and impossible dates or numbers
        raise ConfigError(f"the manifest file is no TOML: {err}") from err
    except RecursionError as err:
        raise ConfigError("the manifest file is nested too deeply") from err
    check_keys(sections)
    return sections


def check_keys(sections: Mapping[str, Any]) -> None:
    """Raise ConfigError for sections and keys that a manifest does not have; names the nearest that it has."""
    known = _known()
    for section, values in sections.items():
        if section not in known:
            raise ConfigError(f"unknown section [{section}]; known are {', '.join(known)}{nearest(section, known)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{section} must be a section: write [{section}]")
        for key in values:
            if key not in known[section]:
                raise ConfigError(f"unknown key {section}.{key}{_where(section, key, known)}")


def manifest_from_sections(
    sections: Mapping[str, Mapping[str, Any]],
    *,
    founder: PeerId,
    created: int,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Manifest:
    """Build a manifest. `presets` gives the [model] keys of each preset; keys in the section override them.

    Raises ConfigError naming the key.
    """
    parts: dict[str, dict[str, Any]] = {name: {} for name in _NESTED}
    top: dict[str, Any] = {"founder": founder, "created": created}
    parts["model"] |= _preset(sections.get("model", {}), presets or {})
    for section, values in sections.items():
        for key, value in values.items():
            if (section, key) in _HEX:
                value = _from_hex(f"{section}.{key}", value)
            part, field = _MOVED.get(section, {}).get(key, (section, key))
            (top if part == "swarm" else parts[part])[field] = value
    try:
        return msgspec.convert(top | parts, Manifest, builtin_types=(bytes,))
    except msgspec.ValidationError as err:
        raise ConfigError(_as_in_the_file(str(err))) from err


def manifest_from_toml(
    text: str,
    *,
    founder: PeerId,
    created: int,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Manifest:
    """A manifest from a complete file. Raises ConfigError naming the key, and the nearest valid one when it
    is unknown.
    """
    return manifest_from_sections(parse_toml(text), founder=founder, created=created, presets=presets)


def manifest_to_toml(manifest: Manifest) -> str:
    """The file that `manifest_from_toml` turns into this manifest again, given its founder and time."""
    values = msgspec.structs.asdict(manifest)
    lines = [f"# founder {manifest.founder.hex()}, created {manifest.created} (unix s)"]
    for section, keys in _known().items():
        lines += ["", f"[{section}]"]
        for key in keys:
            part, field = _MOVED.get(section, {}).get(key, (section, key))
            value = values[field] if part == "swarm" else getattr(values[part], field)
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _where(section: str, key: str, known: Mapping[str, list[str]]) -> str:
    near = nearest(key, known[section])
    for other, keys in known.items():
        if key in keys:
            return f"{near} [{other}] has one of that name" if near else f"; it belongs in [{other}]"
    return near or f"; [{section}] knows {', '.join(known[section])}"


def _as_in_the_file(said: str) -> str:
    """What msgspec says of a place in a manifest, of the key in the file."""
    what, _, path = said.partition(" - at `$")
    place = path.strip("`").split(".")[1:]
    if missing := _MISSING.fullmatch(what):
        place.append(missing[1])
    part, name = place if len(place) == 2 else ("swarm", place[0])
    section, key = _MOVED_FROM.get((part, name), (part, name))
    return f"{section}.{key} is missing" if missing else f"{section}.{key}: {what}"


def _preset(model: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name = model.get("preset", "")
    if not isinstance(name, str):
        raise ConfigError(f"model.preset = {name!r}: must be a string")
    if not name:
        return {}
    if name in presets:
        return dict(presets[name])
    if set(model) >= {"vocab_size", "dim", "num_layers"}:
        return {}  # only a label: the numbers are all here
    raise ConfigError(
        f"model.preset = {name!r}: unknown; known are {', '.join(presets) or 'none'}{nearest(name, presets)}"
    )


def _from_hex(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):  # filled in by a command
        return value
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {value!r}: must be hex digits in quotes") from None


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return f'"{value.hex()}"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # printable text only, so JSON's escapes are TOML's
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)
