"""`farflung sim …`: swarms of real nodes under virtual time, and the calculators beside them."""

from typing import Annotated

import typer

from farflung.node.cli import Json, print_json

sim_app = typer.Typer(help="Simulate swarms: the node's own code under virtual time.", no_args_is_help=True)


@sim_app.command("fuzz")
def sim_fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many schedules of misfortune to draw.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Draw swarms and schedules of faults, and judge every invariant in each."""
    from farflung.sims.chaos import run_seed

    failed = []
    for seed in range(first, first + seeds):
        report = run_seed(seed)
        if report.violations:
            failed.append({"seed": seed, "violations": report.violations})
        if not as_json:
            typer.echo(f"seed {seed}: {report.violations[0] if report.violations else 'ok'}")
    if as_json:
        print_json({"seeds": seeds, "first": first, "failed": failed})
    if failed:
        raise typer.Exit(1)
