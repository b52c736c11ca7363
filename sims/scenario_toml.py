"""A scenario written as the file that `scenario.parse_scenario` reads: what has its default is left out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from farflung.sims.scenario import Scenario

_TABLES = ("manifest", "peers", "network", "happenings", "expect", "costs")


def write_scenario(scenario: Scenario) -> str:
    """Its text; reading that gives the same scenario again."""
    told = _told(scenario)
    lines = [f"{key} = {_value(value)}" for key, value in told.items() if key not in _TABLES]
    for section, keys in scenario.manifest.items():
        lines += ["", f"[manifest.{section}]", *_keys(keys)]
    for table in ("network", "expect", "costs"):
        if table in told:
            lines += ["", f"[{table}]", *_keys(told[table])]
    for table in ("peers", "happenings"):
        for entry in getattr(scenario, table):
            lines += ["", f"[[{table}]]", *_keys(_told(entry))]
    return "\n".join(lines) + "\n"


def _told(struct: msgspec.Struct) -> dict[str, Any]:
    """Of a struct, what is not its default."""
    fields = msgspec.structs.fields(struct)
    values = {field.name: getattr(struct, field.name) for field in fields}
    kept = {field.name: values[field.name] for field in fields if values[field.name] != _default(field)}
    return {name: _told(value) if isinstance(value, msgspec.Struct) else value for name, value in kept.items()}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _keys(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in values.items()]


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)  # printable text only, so JSON's escapes are TOML's
        case Mapping():
            return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return repr(value)
