"""The command line: reads flags, hands plain options to the daemon, prints answers.

Commands import what they need inside, so that `farflung --help` and `farflung status` start without torch,
the engine or the plots. Exit codes: 0 done; 1 a bug, with its traceback; 2 something the user, the machine or
a peer can change, as one line on stderr (also typer's own code for wrong usage).
"""

import asyncio
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from farflung.node.flags import Device, Dtype, Home, Json, Swarm, known_swarm, print_error, print_json, working
from farflung.node.id_cli import id_app
from farflung.node.loading import loading
from farflung.node.model_cli import model_app
from farflung.node.parting_cli import parting_app
from farflung.protocol.errors import FarflungError
from farflung.training.errors import TrainingError
from farflung.training.methods import DEFAULT, LONG_DEFAULT, LONG_RUN


class ErrorsAsLines(TyperGroup):
    """A command group that prints errors that are no bugs as one line and exits with 2. Others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # what a terminal of another encoding cannot show is no reason to fail
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except (FarflungError, TrainingError, OSError) as error:
            known = error if isinstance(error, FarflungError) else _no_bug(error)
            if known is None:
                raise
            print_error(known)
            raise typer.Exit(2) from error


def _no_bug(error: Exception) -> FarflungError | None:
    from farflung.node.runner import no_bug  # which brings torch

    return no_bug(error)


app = typer.Typer(
    name="farflung",
    cls=ErrorsAsLines,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # typer's own view prints local variables, keys among them
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(id_app, name="id")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from farflung.protocol.versions import PROTOCOL_VERSION

        typer.echo(f"farflung {version('farflung')}, protocol version {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def _farflung(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which farflung this is.")
    ] = False,
) -> None:
    """Train one language model on GPUs scattered over the internet."""


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the new swarm: a-z, 0-9, '.', '_', '-'.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with the manifest's keys; flags win.")] = None,
    preset: Annotated[str | None, typer.Option(help="Named size of the model.")] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Train on from the model in this Hugging Face folder, as `export` writes, instead of drawn weights.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Named settings of optimisers, rounds and codecs, for all that is not said otherwise: `default`, `thrifty` with fewer bytes, or `none`: DiLoCo "
            "as published."
        ),
    ] = "default",
    data: Annotated[
        str | None, typer.Option(help="`python`, a text file or folder, token shards, or `hf:DATASET`.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="`bytes` or a `tokenizers` JSON file.")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps of one peer until the end.")] = None,
    inner_steps: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|auto",
            help="H: inner steps between two rounds of a fragment; `auto`: as few as links allow, and no fewer than the method's. Default: the method's "
            f"(of `default` {DEFAULT.inner_steps}, from {LONG_RUN:,} steps on {LONG_DEFAULT.inner_steps}; of `none` 100), with --stages 15.",
        ),
    ] = None,
    fragments: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS|auto",
            help="P: parts of the model that are synchronised in turn; with --inner-steps auto, `auto`: as many as hardly make H longer. "
            f"Default: the method's ({DEFAULT.fragments}, or what divides H; with --inner-steps auto: auto; of `none` 1).",
        ),
    ] = None,
    delay_steps: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|auto",
            help="Inner steps that peers may train while a round is under way; `auto`: until the next is due. "
            "Default: auto; with --method none only where --inner-steps is auto, else 0.",
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one inner step of one peer, or of the whole pipeline.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Cut the model into stages that different peers hold. Default: 1, no cut.")
    ] = None,
    skip: Annotated[
        float | None, typer.Option(help="With --stages: share of them that a microbatch leaves out. Default: 0.")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="planned|dynamic",
            help="With --stages: whether a microbatch's way is planned for each step, or chosen by who sends it on. Default: planned.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="With --stages: microbatches of one step. Default: 4.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Inner optimiser: `adamw`, `muon`, or `torch.optim.NAdam(momentum_decay=0.01)`.")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Peak learning rate of the inner optimiser. Default: by the model's size, for AdamW and Muon."
        ),
    ] = None,
    min_contributors: Annotated[
        int | None, typer.Option(help="Peers that must contribute for a round to count.")
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="How contributions and means are packed. Default: the method's, of `none` `int8(block=128)`."
        ),
    ] = None,
    feedback: Annotated[
        bool | None,
        typer.Option(
            "--feedback/--no-feedback",
            help="Remember what the codec leaves out, from the first round on, and send it in later ones. Default: the method's, which keeps it in the "
            "sender's parameters; of `none`: with codecs below 3 bits, after a quarter of the run.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of parameters and of the order of samples.")] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Let anybody join who finds the name, wreckers included.")
    ] = False,
    peer: Annotated[list[str] | None, typer.Option(help="Address of a peer to publish through; repeatable.")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port this machine's node will listen on; 0: any, each time. Default: a free one, which is kept."
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="For nodes on this machine only.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Found a swarm: write and sign its manifest, and print the invitation."""
    from farflung.node import founded
    from farflung.node.options import CreateOptions, number_or_auto

    options = CreateOptions(
        name=name,
        config=config,
        preset=preset,
        start=start,
        method=method,
        data=data,
        tokenizer=tokenizer,
        steps=steps,
        inner_steps=number_or_auto("--inner-steps", inner_steps),
        fragments=number_or_auto("--fragments", fragments),
        delay_steps=number_or_auto("--delay-steps", delay_steps),
        batch_tokens=batch_tokens,
        stages=stages,
        skip=skip,
        routing=routing,
        microbatches=microbatches,
        optimizer=optimizer,
        lr=lr,
        min_contributors=min_contributors,
        codec=codec,
        feedback=feedback,
        seed=seed,
        open=open_,
        peers=tuple(peer or ()),
        port=port,
        local=local,
        home=home,
    )
    with working(f"founding {name} ..."):
        with loading():
            from farflung.node import daemon

        made = daemon.create(options)
    if as_json:
        print_json(founded.facts(made, options))
    else:
        for line in founded.lines(made, options):
            typer.echo(line)


@app.command()
def join(
    swarm: Annotated[str, typer.Argument(metavar="NAME|INVITATION", help="A known name, or an invitation.")],
    peer: Annotated[list[str] | None, typer.Option(help="Address of a peer to ask first; repeatable.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    compile_: Annotated[
        bool,
        typer.Option("--compile/--no-compile", help="Compile the layers: a slower start, faster steps on some GPUs."),
    ] = False,
    memory: Annotated[
        float | None, typer.Option(help="Most memory of the device to use, in GB (10^9 bytes); otherwise what is free.")
    ] = None,
    save_memory: Annotated[
        str, typer.Option(help="`auto`, `none`, or any of `checkpoint,offload,8bit`: for models that are too large.")
    ] = "auto",
    stage: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of a pipeline: the stage to serve. Default: of those that fit, the one that needs a peer most."
        ),
    ] = None,
    region: Annotated[
        str,
        typer.Option(
            help="Of a pipeline: where this machine stands, as eu-west; copies of its stage lie elsewhere. Reports have "
            "london, iowa and others of a dozen on their map, the rest beside it."
        ),
    ] = "",
    owner: Annotated[
        str,
        typer.Option(help="Of a pipeline: whose machine it is; those of one owner do not hold each other's copies."),
    ] = "",
    threads: Annotated[int | None, typer.Option(help="CPU threads for training.")] = None,
    up_mbps: Annotated[float | None, typer.Option(help="Most megabits per second to send.")] = None,
    down_mbps: Annotated[float | None, typer.Option(help="Most megabits per second to receive.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any. Default: that of the last time.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Listen on 127.0.0.1 only: for nodes on this machine.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="Where the swarm's data lies here, if not where the manifest says.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="The swarm's tokenizer file, if it has one.")] = None,
    exit_when_done: Annotated[
        bool,
        typer.Option("--exit-when-done/--stay", help="End with the run, or stay and serve the model to others."),
    ] = True,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Show progress here.")] = True,
    home: Home = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the node's events once it is up, a line of JSON each; all else on stderr."),
    ] = False,
) -> None:
    """Run this machine's node in a swarm, until the run is done or Ctrl-C."""
    from farflung.node.options import JoinOptions

    options = JoinOptions(
        swarm=swarm,
        peers=tuple(peer or ()),
        device=device,
        dtype=dtype,
        compile=compile_,
        memory_gb=memory,
        save_memory=save_memory,
        stage=stage,
        region=region.strip().lower(),
        owner=owner.strip().lower(),
        threads=threads,
        up_mbps=up_mbps,
        down_mbps=down_mbps,
        port=port,
        local=local,
        data=data,
        tokenizer=tokenizer,
        exit_when_done=exit_when_done,
        live=live,
        as_json=as_json,
        home=home,
    )
    from farflung.node.control import only_node
    from farflung.node.paths import resolve_paths
    from farflung.node.wanted import local_swarm

    # A wrong name or invitation, or a second node, is told of before torch is loaded, which takes seconds.
    known = local_swarm(resolve_paths(home), swarm, options.peers).swarm
    if known is not None:
        with only_node(known):
            pass
    with working("starting ..."), loading():
        from farflung.node import daemon

    daemon.run_join(options)


@app.command()
def doctor(
    name: Swarm = None,
    model: Annotated[
        str | None, typer.Option(help="Examine for this preset instead of a swarm, as 350m or 1b.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="With --model: tokens of the tokenizer.")] = 257,
    optimizer: Annotated[
        str, typer.Option(help="With --model: inner optimiser; that of swarms by the method `default` unless said.")
    ] = DEFAULT.optimizer,
    batch: Annotated[int, typer.Option(help="With --model: sequences in one inner step.")] = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    memory: Annotated[float | None, typer.Option(help="Most memory of the device to use, in GB.")] = None,
    save_memory: Annotated[str, typer.Option(help="`auto`, `none`, or any of `checkpoint,offload,8bit`.")] = "auto",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Say whether this machine can train a model: memory, disk and clock, before anything is allocated."""
    from farflung.node.options import DoctorOptions

    options = DoctorOptions(
        swarm=name,
        model=model,
        vocab_size=vocab_size,
        optimizer=optimizer,
        batch=batch,
        device=device,
        dtype=dtype,
        memory_gb=memory,
        save_memory=save_memory,
        home=home,
    )
    if name is not None or model is None:
        known_swarm(home, name)
    with working("examining this machine ..."):
        with loading():
            from farflung.node import doctor as examination

        findings = examination.examine(options)
    if as_json:
        print_json(findings)
    else:
        for line in examination.report(findings):
            typer.echo(line)
    if findings["lacks"]:
        raise typer.Exit(2)


@app.command()
def status(
    name: Swarm = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep showing, until the node ends or Ctrl-C; with --json its events, a line each."
        ),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show what the nodes on this machine do."""
    from farflung.node.query import follow, running_statuses

    if watch:
        asyncio.run(follow(name, home, as_json=as_json))
        return
    statuses, silent = asyncio.run(running_statuses(name, home))
    if as_json and statuses:
        import msgspec

        print_json({"nodes": msgspec.to_builtins(statuses)})
    elif statuses:
        from rich.console import Console

        from farflung.node.live import panel

        console = Console()
        for one in statuses:
            console.print(panel(one))
    for error in silent:
        print_error(error)
    if silent:
        raise typer.Exit(2)


@app.command()
def peers(name: Swarm = None, home: Home = None, as_json: Json = False) -> None:
    """List the peers that this machine's node knows."""
    from farflung.node.query import known_peers

    found = asyncio.run(known_peers(name, home))
    if as_json:
        import msgspec

        print_json({"peers": msgspec.to_builtins(found)})
        return
    from rich.console import Console

    from farflung.node.peer_table import print_peers

    print_peers(found, Console())


@app.command()
def ledger(
    name: Swarm = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="Also tell who has or had the sample of this number.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Say which samples of the data are trained, and which are with whom."""
    from farflung.node.query import asked_ledger, ledger_lines, sample_lines

    told = asyncio.run(asked_ledger(name, home, sample))
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(told))
        return
    for line in (*ledger_lines(told), *sample_lines(told)):
        typer.echo(line)


@app.command()
def invite(name: Swarm = None, home: Home = None, as_json: Json = False) -> None:
    """Print a fresh invitation, with the addresses at which this machine's node and others are found now, and the full name."""
    import msgspec

    from farflung.node.query import fresh_invitation

    fresh = asyncio.run(fresh_invitation(name, home))
    if as_json:
        print_json(msgspec.to_builtins(fresh))
        return
    typer.echo(f"farflung join {fresh.invitation}")
    typer.echo(f"full name {fresh.full_name}")


app.add_typer(parting_app)
app.add_typer(model_app)  # last: commands are listed in the order in which they come
