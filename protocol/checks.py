"""Checks of single values that name the key, the value and what is allowed. For manifests and what people
type.
"""

from collections.abc import Collection
from difflib import get_close_matches

import msgspec

from farflung.protocol.errors import ConfigError
from farflung.protocol.versions import PROTOCOL_VERSION


def check_range(key: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless `low <= value <= high`; NaN is outside every range."""
    if not low <= value <= high:
        raise ConfigError(f"{key} = {value}: must be between {low} and {high}")


def check_one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`; suggests the nearest."""
    if value not in allowed:
        raise ConfigError(f"{key} = {value!r}: must be one of {', '.join(allowed)}{nearest(value, allowed)}")


def check_supported(key: str, value: object, only: object) -> None:
    """Raise ConfigError for an option that has a meaning but that this protocol version cannot do."""
    if value != only:
        raise ConfigError(
            f"{key} = {value!r}: not supported yet by protocol version {PROTOCOL_VERSION}, which knows only {only!r}"
        )


def check_unused(spec: msgspec.Struct, section: str, name: str, why: str) -> None:
    """Raise ConfigError where a field of `spec` is not its default though it would mean nothing; `why`, and what to do."""
    value = getattr(spec, name)
    if value != next(field.default for field in msgspec.structs.fields(spec) if field.name == name):
        raise ConfigError(f"{section}.{name} = {value!r}: means nothing here, for {why}, or leave it out")


def check_length(key: str, value: bytes, *allowed: int) -> None:
    """Raise ConfigError unless the number of bytes is one of `allowed`."""
    if len(value) not in allowed:
        raise ConfigError(f"{key}: {len(value)} bytes, must be {' or '.join(map(str, allowed))}")


def check_text(key: str, value: str, limit: int) -> None:
    """Raise ConfigError for text that is too long or not printable (a terminal may show it)."""
    if len(value) > limit:
        raise ConfigError(f"{key}: {len(value)} characters, at most {limit} are allowed")
    if not value.isprintable():
        raise ConfigError(f"{key} = {value!r}: only printable characters are allowed")


def nearest(word: str, known: Collection[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is near."""
    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
