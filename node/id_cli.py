"""`farflung id`: this machine's key, shown, copied and brought back. As in `cli`, commands import what they need inside."""

from pathlib import Path
from typing import Annotated

import typer

from farflung.node.flags import Home, Json, print_json

id_app = typer.Typer(help="This machine's identity: an Ed25519 key.", no_args_is_help=True)


@id_app.command("show")
def id_show(home: Home = None, as_json: Json = False) -> None:
    """Print this machine's public key; makes one at first use."""
    from farflung.node.identity import Identity
    from farflung.node.paths import resolve_paths

    path = resolve_paths(home).identity
    identity = Identity.load_or_create(path)
    facts = {"peer": identity.public_key.hex(), "libp2p": identity.libp2p_id, "file": str(path)}
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        typer.echo(f"{key:8}{value}")


@id_app.command("backup")
def id_backup(
    file: Annotated[Path, typer.Argument(help="New file for the copy; keep it secret.")],
    seal: Annotated[bool, typer.Option("--seal", help="Ask for a passphrase and encrypt the copy.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copy the key to a new file that only you can read."""
    from farflung.node.identity_files import backup_identity
    from farflung.node.paths import resolve_paths

    path = resolve_paths(home).identity
    passphrase = _passphrase(confirmed=True) if seal else None
    peer = backup_identity(path, file, passphrase)
    if as_json:
        print_json({"peer": peer.hex(), "file": str(file), "sealed": seal})
        return
    typer.echo(f"identity {peer.hex()[:12]} copied to {file}; whoever has it can act as this machine")


@id_app.command("restore")
def id_restore(
    file: Annotated[Path, typer.Argument(help="A file written by `farflung id backup`.")],
    force: Annotated[bool, typer.Option("--force", help="Put the key that is here aside.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a backed-up key this machine's identity."""
    from farflung.node.identity_files import is_sealed, restore_identity
    from farflung.node.paths import resolve_paths

    passphrase = _passphrase() if is_sealed(file) else None
    path = resolve_paths(home).identity
    peer, aside = restore_identity(path, file, passphrase, force=force)
    if as_json:
        print_json({"peer": peer.hex(), "file": str(path), "aside": None if aside is None else str(aside)})
        return
    typer.echo(f"this machine is {peer.hex()[:12]} now")
    if aside is not None:
        typer.echo(f"the former key lies in {aside}")


def _passphrase(*, confirmed: bool = False) -> str:
    """Ask for it on stderr: stdout may be read by a script."""
    return str(typer.prompt("passphrase", hide_input=True, confirmation_prompt=confirmed, err=True))
