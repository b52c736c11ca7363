"""Commands by which this machine parts with a swarm: until its node is started again, and for good. As in `cli`, they import what they need inside."""

import asyncio
from typing import Annotated

import typer

from farflung.node.flags import Home, Json, Swarm, print_json

parting_app = typer.Typer()


@parting_app.command()
def leave(
    name: Swarm = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the node to hand over and save.")] = 120.0,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask this machine's node to finish or hand back its data, say goodbye, save and end."""
    from farflung.node.query import leave_swarm

    reason = asyncio.run(leave_swarm(name, home, timeout_s=timeout))
    if as_json:
        print_json({"left": reason})
        return
    typer.echo(f"left: {reason}")


@parting_app.command()
def forget(
    name: Annotated[str, typer.Argument(help="The swarm.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Remove all that this machine has of a swarm: its model and log, whom it knows, and the invitation."""
    from farflung.node import disk, forgetting
    from farflung.node.live import size
    from farflung.node.paths import resolve_paths

    swarm = resolve_paths(home).find_swarm(name)
    stored = disk.stored_bytes(swarm.folder)
    if (warning := forgetting.warning(swarm)) is not None:
        typer.echo(warning, err=True)
    if not yes:
        typer.echo(
            f"swarm {swarm.name} ({swarm.hash_hex[:12]}): {size(stored)} in {swarm.folder}. Others go on without this machine; what nobody "
            "else has is lost, and a swarm by invitation has to invite this machine again.",
            err=True,
        )
        if not typer.confirm("Forget it?", err=True):
            raise typer.Exit(2)
    forgetting.forget(swarm)
    if as_json:
        print_json({"forgotten": swarm.hash_hex, "bytes": stored})
        return
    typer.echo(f"forgotten: {swarm.name}, {size(stored)}")
