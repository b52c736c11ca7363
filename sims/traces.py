"""Traces: when hosts were there, recorded or drawn (`availability`), in a CSV file with a line `start_s,end_s,host` for each session."""

import csv
from pathlib import Path

from farflung.protocol.errors import ConfigError


def read_trace(file: Path) -> list[list[tuple[float, float]]]:
    """Sessions by host, hosts as they first appear: from, to, in seconds from 0 on, in the order of time. At least one host, each with a session. Raises ConfigError."""
    hosts: dict[str, list[tuple[float, float]]] = {}
    try:
        with file.open(newline="", encoding="utf-8") as text:
            lines = csv.DictReader(text)
            for row in lines:
                start, end = float(row["start_s"]), float(row["end_s"])
                if not 0.0 <= start < end:
                    raise ConfigError(
                        f"trace {file}, line {lines.line_num}: {start:g} to {end:g}: give seconds from 0 on, the end after the start"
                    )
                hosts.setdefault(row["host"], []).append((start, end))
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"trace {file}: {error!r}; it must be a CSV file with the header start_s,end_s,host"
        ) from error
    if not hosts:
        raise ConfigError(f"trace {file} has no sessions")
    return [sorted(sessions) for sessions in hosts.values()]
