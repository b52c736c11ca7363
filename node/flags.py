"""What commands have in common: flags, and JSON for scripts."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Home = Annotated[
    Path | None,
    typer.Option("--home", help="Keep all files here instead of the platform's folders (or set FARFLUNG_HOME)."),
]
Swarm = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="The swarm; not needed when this machine knows only one."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, bf16 or fp32.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))
