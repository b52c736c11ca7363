"""A scenario written as the file that `scenario.parse_scenario` reads: what has its default is left out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from farflung.protocol.errors import ConfigError
from farflung.sims.scenario import Scenario

SCENARIO = "scenario.toml"
"""In the folder of a run, or of what broke: what was run."""

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


def keep_scenario(folder: Path, scenario: Scenario, seed: int, file: Path, *, minutes: float | None = None) -> None:
    """Write into a run's folder what is run, so that `farflung sim run` repeats it: with `seed` in the place of the scenario's, the traces where they lie,
    beside the scenario's `file`, and without what calibrated costs have that does nothing here; `minutes`: of which only so many were played. Raises OSError."""
    peers = tuple(
        msgspec.structs.replace(one, trace=str((file.parent / one.trace).resolve())) if one.trace else one
        for one in scenario.peers
    )
    costs = scenario.costs if scenario.costs.processors else msgspec.structs.replace(scenario.costs, trained_per_s=0.0)
    whole = msgspec.structs.replace(scenario, seed=seed, peers=peers, costs=costs)
    said = "" if minutes is None else f"# the first {minutes:g} minutes were played\n"
    (folder / SCENARIO).write_text(said + write_scenario(whole), encoding="utf-8")


def check_apart(folder: Path, file: Path) -> None:
    """Refuse a run's folder in which the scenario's `file` would be written anew. Raises ConfigError."""
    if (folder / SCENARIO).resolve() == file.resolve():
        raise ConfigError(f"--out {folder}: the scenario lies there, and would be written anew; name another folder")


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
