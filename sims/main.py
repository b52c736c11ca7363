"""The `farflung` program: the node's commands, and those that need `farflung.sims`: the demo, the
benchmarks and the simulations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from farflung.node.cli import app
from farflung.node.flags import Json, print_json
from farflung.sims.sim_cli import finite, sim_app

bench_app = typer.Typer(help="Measure what the README claims, beside its baselines.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(sim_app, name="sim")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the logs and the exported model.")] = Path(
        "farflung-demo"
    ),
    minutes: Annotated[float, typer.Option(min=1.0, callback=finite, help="About how long it may take.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Train with six real nodes on this machine, kill one on the way, and report."""
    from farflung.sims.demo import run_demo
    from farflung.sims.summary import not_better, violations

    figures = run_demo(out, minutes=minutes, quiet=as_json)
    if as_json:
        print_json(figures)
    if said := not_better(figures):
        typer.echo(said, err=True)
    broken = violations(figures)
    for said in broken:
        typer.echo(f"BROKEN: {said}", err=True)
    if broken:
        raise typer.Exit(1)


@bench_app.command("overhead")
def bench_overhead(as_json: Json = False) -> None:
    """Tokens per second of a lone node beside a bare PyTorch loop, in one run. Fails below 0.97 of it."""
    from farflung.sims.bench_overhead import missed, run_overhead

    _fail_if(missed(run_overhead(as_json=as_json)))


@bench_app.command("round")
def bench_round(as_json: Json = False) -> None:
    """Seconds of one round of real peers beside hivemind's averager and gloo, in one run. Fails when it is not 3 times as fast as the former."""
    from farflung.sims.bench_round import missed, run_round

    _fail_if(missed(run_round(as_json=as_json)))


@bench_app.command("overlap")
def bench_overlap(as_json: Json = False) -> None:
    """How much of its time a peer computes on slow links, beside blocking DiLoCo and data-parallel: ten minutes. Fails below 97 % at 50 Mbit/s."""
    from farflung.sims.bench_overlap import missed, run_overlap

    _fail_if(missed(run_overlap(as_json=as_json)))


@bench_app.command("unequal")
def bench_unequal(as_json: Json = False) -> None:
    """Peers of speeds 1, 0.7, 0.4 and 0.2: how much of its time each computes, beside waiting for the slowest: five minutes. Fails when a goal is missed."""
    from farflung.sims.bench_unequal import missed, run_unequal

    _fail_if(missed(run_unequal(as_json=as_json)))


@bench_app.command("churn")
def bench_churn(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each swarm.")] = 2,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write churn.md and its plot here.")] = None,
    as_json: Json = False,
) -> None:
    """Loss and utilisation of unequal peers, and of peers that are replaced, beside equal ones, under virtual time: five minutes for each seed. Fails when a goal is missed."""
    from farflung.sims.bench_churn import run_churn
    from farflung.sims.churn_rows import missed

    _fail_if(missed(run_churn(seeds=seeds, page=page, as_json=as_json)))


@bench_app.command("groups")
def bench_groups(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each swarm.")] = 1,
    peers: Annotated[int, typer.Option(min=4, max=64, help="Of each swarm.")] = 12,
    steps: Annotated[int, typer.Option(min=100, help="Of each peer.")] = 600,
    as_json: Json = False,
) -> None:
    """A swarm that is several groups, which meet or not, beside one group of all, under virtual time: twenty minutes for each seed."""
    from farflung.sims.bench_groups import Task, run_groups

    run_groups(seeds=seeds, as_json=as_json, task=Task(peers=peers, steps=steps))


@bench_app.command("crowd")
def bench_crowd(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each swarm.")] = 3,
    newcomers: Annotated[int, typer.Option(min=1, max=63, help="That come at once.")] = 16,
    up_mbit: Annotated[float, typer.Option(min=0.1, callback=finite, help="Of everybody's uplink.")] = 20.0,
    down_mbit: Annotated[float, typer.Option(min=0.1, callback=finite, help="Of everybody's downlink.")] = 250.0,
    as_json: Json = False,
) -> None:
    """Newcomers that come at once to a swarm of one, and give each other what they have of the model or not, under virtual time: five minutes."""
    from farflung.sims.bench_crowd import Task, run_crowd

    run_crowd(seeds=seeds, as_json=as_json, task=Task(newcomers=newcomers, up_mbit=up_mbit, down_mbit=down_mbit))


@bench_app.command("codec")
def bench_codec(
    size: Annotated[
        float, typer.Option(min=0.1, callback=finite, help="Megabytes of fp32 in the vector that speed is judged by.")
    ] = 64.0,
    page: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write compression.md and its plots here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bits, error and speed of every codec, beside other projects' codecs, in one run: two minutes."""
    from farflung.sims.bench_codec import run_codec

    run_codec(as_json=as_json, size_mb=size, page=page)


@bench_app.command("feedback")
def bench_feedback(
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write feedback.md and its plot here.")] = None,
    as_json: Json = False,
) -> None:
    """What error feedback is worth with coarse codecs, on a quadratic and a small model: some minutes."""
    from farflung.sims.bench_feedback import run_feedback

    run_feedback(as_json=as_json, page=page)


@bench_app.command("drift")
def bench_drift(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 1,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write drift.md and its plot here.")] = None,
    as_json: Json = False,
) -> None:
    """What it costs that peers of a pipeline's stage train apart, by routes and rounds: half an hour for each seed."""
    from farflung.sims.bench_drift import run_drift

    run_drift(seeds=seeds, page=page, as_json=as_json)


@bench_app.command("quality")
def bench_quality(
    tier: Annotated[str, typer.Option(help="ci (minutes per method), nightly (hours), or gpu.")] = "ci",
    methods: Annotated[
        str | None, typer.Option(help="Names from the table, separated by commas; all of them if not given.")
    ] = None,
    peers: Annotated[int | None, typer.Option(min=2, help="M, in the place of the tier's.")] = None,
    interval: Annotated[
        int | None, typer.Option(min=2, help="H, in the place of that of every method with rounds.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Seeds of what the goals compare, in the place of the tier's; other methods have half as many."
        ),
    ] = None,
    untuned: Annotated[
        bool,
        typer.Option(
            "--untuned",
            help="Only the middle learning rate of each method's grid: less than half as many runs, and the page says so.",
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Train on this, as bytes, in the place of the embedded corpus, of which the tier gpu has many epochs: text:PATH, shards:FOLDER or hf:DATASET.",
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Train there; ci and nightly do on the CPU, gpu on CUDA.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, in processes of one thread each.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the runs here, as JSON lines, and go on from it; a run under way is kept beside it every ten minutes, unless a GPU trains many at a time.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write quality_TIER.md and its plot here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Loss and bytes of low-bandwidth training methods beside data-parallel training, in one run."""
    from farflung.sims.quality import run_quality
    from farflung.training.errors import DataError

    try:
        run_quality(
            tier,
            names=methods,
            peers=peers,
            interval=interval,
            seeds=seeds,
            untuned=untuned,
            data=data,
            device=device,
            jobs=jobs,
            out=out,
            page=page,
            as_json=as_json,
        )
    except (ValueError, RuntimeError, OSError, DataError) as error:
        raise typer.BadParameter(str(error)) from error


@bench_app.command("calibrate")
def bench_calibrate(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write them here, for `farflung sim run --costs FILE`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What things cost a node on this machine, measured from real ones, for simulations: five minutes."""
    from farflung.sims.bench_calibrate import run_calibrate

    run_calibrate(as_json=as_json, out=out)


@bench_app.command("fidelity")
def bench_fidelity(
    scenario: Annotated[
        str, typer.Argument(help="One that processes can play: `farflung sim list`, or a file.")
    ] = "churn-8",
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of `farflung bench calibrate --out FILE`, instead of measuring them first."),
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write fidelity.md here.")] = None,
    as_json: Json = False,
) -> None:
    """How far virtual time is from real processes: a scenario played both ways, a quarter of an hour. Fails when it is off by too much."""
    from farflung.sims.bench_fidelity import missed, run_fidelity

    _fail_if(missed(run_fidelity(scenario, costs=costs, page=page, as_json=as_json)))


@bench_app.command("scale")
def bench_scale(
    peers: Annotated[str, typer.Option(metavar="N,...", help="How many, separated by commas.")] = "100,1000",
    minutes: Annotated[float, typer.Option(min=1.0, callback=finite, help="Virtual ones.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Processor time to simulate a peer for an hour, by how many there are: a quarter of an hour."""
    from farflung.sims.bench_scale import parse_sizes, run_scale

    try:
        sizes = parse_sizes(peers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run_scale(sizes=sizes, minutes=minutes, as_json=as_json)


@bench_app.command("recovery")
def bench_recovery(
    tier: Annotated[
        str,
        typer.Option(
            help="ci (minutes per seed), published (CheckFree's set-up, smaller: an hour and a half) or nightly (a day)."
        ),
    ] = "ci",
    methods: Annotated[
        str | None, typer.Option(help="Names from the table, separated by commas; all of them if not given.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(metavar="PERCENT,...", help="Failures per stage and hour, in the place of the tier's."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds, in the place of the tier's.")] = None,
    single_seeds: Annotated[
        int | None, typer.Option(min=0, help="Seeds of single losses, if not as many; 0 leaves them out.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Iterations between checkpoints, in the place of the tier's; not trained again for it.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time, each with one thread; as many as there are CPUs if not given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep finished runs here, as JSON lines, and go on from those.")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write its page and plot here.")] = None,
    as_json: Json = False,
) -> None:
    """Loss and modelled time when pipeline stages are lost, by how they come back, in one run. Fails when a goal is missed for certain."""
    from farflung.sims.bench_recovery import parse_rates, run_recovery
    from farflung.sims.local_run import count_cores
    from farflung.sims.recovery_words import missed

    try:
        _, _, goals = run_recovery(
            tier,
            names=methods,
            rates=parse_rates(rates),
            seeds=seeds,
            single_seeds=single_seeds,
            checkpoint_every=checkpoint_every,
            jobs=jobs or count_cores(),
            out=out,
            page=page,
            as_json=as_json,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    _fail_if(missed(goals))


@bench_app.command("pipeline")
def bench_pipeline(
    skip_stages: Annotated[
        bool, typer.Option("--skip-stages", help="Only what leaving stages out at inference costs: four minutes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures here, as JSON.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write pipeline.md and its plots here, with both parts.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a step, measured and simulated, as a Chrome trace for Perfetto."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A pipeline of twelve processes on slow links against its simulation, and what skipping stages is worth: eight minutes. Fails when a goal is missed."""
    from farflung.sims.bench_pipeline import missed, run_pipeline

    try:
        figures = run_pipeline(as_json=as_json, out=out, page=page, skip_stages=skip_stages, trace=trace)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _fail_if(missed(figures))


def _fail_if(missed: Sequence[str]) -> None:
    for said in missed:
        typer.echo(f"MISSED: {said}", err=True)
    if missed:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `farflung` script."""
    app()


if __name__ == "__main__":
    main()
