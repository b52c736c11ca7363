"""`farflung sim …`: swarms of real nodes, under virtual time and as processes, and the calculators beside them."""

import math
from pathlib import Path
from typing import Annotated

import typer

from farflung.node.flags import Json, print_json


def finite(value: float | None) -> float | None:
    """Of an option: neither nan nor infinity, of which nothing can be planned."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number that can be reached")
    return value


Method = Annotated[
    str | None,
    typer.Option(help="Train by this method of `farflung create`, where the file's manifest says nothing else."),
]

VOLUNTEERS = "volunteers"
"""The network that is drawn, of any size."""

sim_app = typer.Typer(help="Simulate swarms: the node's own code under virtual time.", no_args_is_help=True)


@sim_app.command("run")
def sim_run(
    scenario: Annotated[str, typer.Argument(help="A .toml file, or the name of a scenario that comes with farflung.")],
    seed: Annotated[int | None, typer.Option(min=0, help="In the place of the file's.")] = None,
    method: Method = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the log and the result here.")] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What things cost a node, from `farflung bench calibrate`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a scenario under virtual time, with every invariant judged. Exit code 1: violated, or not what the file expects."""
    from farflung.sims.costs import load_costs
    from farflung.sims.sim_run import run_scenario

    prices = None if costs is None else load_costs(costs)
    result = run_scenario(scenario, seed=seed, method=method, out=out, quiet=as_json, costs=prices)
    if as_json:
        print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)


@sim_app.command("local")
def sim_local(
    scenario: Annotated[str, typer.Argument(help="A .toml file, or the name of a scenario that comes with farflung.")],
    seed: Annotated[int | None, typer.Option(min=0, help="In the place of the file's.")] = None,
    method: Method = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the log and the result here.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.2, callback=finite, help="End after so long, whatever the file says.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a scenario with real node processes on this machine, in real time. Exit code 1: violated, or not what the file expects."""
    from farflung.sims.local_run import run_local

    result = run_local(scenario, seed=seed, method=method, out=out, minutes=minutes, quiet=as_json)
    if as_json:
        print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)


@sim_app.command("list")
def sim_list(as_json: Json = False) -> None:
    """The scenarios that come with farflung."""
    from farflung.sims.scenario import SHIPPED, load_scenario, shipped

    about = {name: load_scenario(SHIPPED / f"{name}.toml").about for name in shipped()}
    if as_json:
        print_json(about)
    else:
        width = max(map(len, about))
        typer.echo("\n".join(f"{name:{width}}  {said}" for name, said in about.items()))


@sim_app.command("fuzz")
def sim_fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many scenarios to draw.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, callback=finite, help="Begin no seed after so long.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for what fails.")] = Path("farflung-fuzz"),
    as_json: Json = False,
) -> None:
    """Draw whole scenarios, replicas and pipelines, judge every invariant, and make small what fails."""
    from farflung.sims.fuzzing import fuzz

    result = fuzz(first, seeds, minutes=minutes, out=out)
    if as_json:
        print_json(result)
    else:
        for failure in result["failed"]:
            size = f"{failure['peers']} peers, {failure['happenings']} happenings"
            typer.echo(f"{failure['violations'][0]}; {size}: farflung sim replay {failure['folder']}")
        typer.echo(f"{result['tried']} seeds, {len(result['failed'])} failed")
    if result["failed"]:
        raise typer.Exit(1)


@sim_app.command("replay")
def sim_replay(
    folder: Annotated[Path, typer.Argument(help="What `farflung sim run` or `fuzz` wrote about a violation.")],
    everything: Annotated[bool, typer.Option("--all", help="Do not wait for Enter between faults.")] = False,
) -> None:
    """Step through a simulation that broke an invariant. Exit code 1: it does not go as it did."""
    from farflung.sims.sim_run import step_through

    if not step_through(folder, everything=everything):
        raise typer.Exit(1)


@sim_app.command("bandwidth")
def sim_bandwidth(
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw utilisation against speed, a PNG.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write bandwidth.md and its plot here.")] = None,
    as_json: Json = False,
) -> None:
    """How fast links must be for 1 B to 100 B parameters: the table of Streaming DiLoCo, and ours beside it."""
    from farflung.sims.bandwidth_run import run_bandwidth

    run_bandwidth(as_json=as_json, plot=plot, page=page)


@sim_app.command("report")
def sim_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs; several are compared.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page, NAME.html; its figures go beside it, as NAME.report.json.")
    ] = Path("report.html"),
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell of runs of nodes, real or simulated, in one page that fetches nothing."""
    from farflung.protocol.errors import ConfigError
    from farflung.sims.outputs import check_outputs
    from farflung.sims.report import check_names, figures_file, load_scenes, write_report
    from farflung.sims.trace import write_trace

    check_names(out, trace, printed=as_json)
    try:
        scenes = load_scenes(runs)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    check_outputs(files=[out, figures_file(out), trace])
    figures = write_report(scenes, out)
    if trace is not None:
        write_trace(scenes, trace)
    if as_json:
        print_json(figures)
    else:
        typer.echo(f"report: {out}" + (f"\ntrace:  {trace}" if trace is not None else ""))


def _plan_all(page: Path, proposals: int | None, seed: int, as_json: bool) -> None:
    from farflung.sims.pipeline_run import describe
    from farflung.sims.plan_page import make_page

    found = make_page(page, proposals=proposals, seed=seed, say=lambda text: typer.echo(text, err=True))
    if as_json:
        print_json([dict(one) for one in found])
    else:
        typer.echo("\n\n".join(describe(dict(one)).rpartition("\n\n")[0] for one in found))


@sim_app.command("plan")
def sim_plan(
    network: Annotated[str | None, typer.Option(help="reference (if none is named), forty-two, or volunteers.")] = None,
    peers: Annotated[int | None, typer.Option(min=8, help="How many volunteers: 50 if not given.")] = None,
    proposals: Annotated[int | None, typer.Option(min=1, help="Budget of the search; by default, what fits.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search, and of random networks.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan's step as a Chrome trace.")] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Plan all networks instead, and write planning.md and its plot here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan pipeline routes for a network and compare them with full columns and others: a minute or two."""
    from farflung.sims.pipeline_run import describe, run_plan

    if page is not None and (trace is not None or peers is not None or network is not None):
        raise typer.BadParameter("a page has all networks and no trace; leave --page or the other options out")
    network = network or "reference"
    if peers is not None and network != VOLUNTEERS:
        raise typer.BadParameter(
            f"{network} has its own number of peers; leave --peers out, or take --network {VOLUNTEERS}"
        )
    try:
        if page is not None:
            _plan_all(page, proposals, seed, as_json)
            return
        figures = run_plan(network, peers=peers or 50, proposals=proposals, seed=seed, trace=trace)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(figures)
    else:
        typer.echo(describe(figures))
