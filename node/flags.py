"""What commands have in common: flags, JSON for scripts, and errors as lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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


def known_swarm(home: Path | None, name: str | None) -> None:
    """Raise ConfigError for a name that this machine does not know, before torch is loaded, which takes seconds."""
    from farflung.node.paths import resolve_paths

    resolve_paths(home).find_swarm(name)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what takes its seconds, on stderr and where somebody looks, until it is done: torch alone takes some to be loaded."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    # No `Console.status`: that takes the place of stderr, and loggers that are made meanwhile would keep it.
    with Live(
        Spinner("dots", what),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2))


def print_error(error: Exception) -> None:
    """Say on stderr what went wrong, in one line."""
    from rich.console import Console
    from rich.text import Text

    said = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True, highlight=False).print(said, soft_wrap=True)
