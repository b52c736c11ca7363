"""Commands about the model that this machine has on its disk: exported, judged, and what it writes. As in `cli`, they import what they need inside."""

from pathlib import Path
from typing import Annotated

import typer

from farflung.node.flags import Device, Dtype, Home, Json, Swarm, known_swarm, print_json, working

model_app = typer.Typer()


@model_app.command()
def export(
    name: Annotated[str, typer.Argument(help="The swarm.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the swarm's model as a Hugging Face folder that `transformers` loads."""
    from farflung.node.options import ExportOptions

    options = ExportOptions(swarm=name, folder=folder, home=home)
    known_swarm(home, name)
    with working("writing the model ..."):
        from farflung.node import daemon

        facts = daemon.export(options)
    if as_json:
        print_json(facts)
        return
    typer.echo(f"model of {name} written to {folder}")
    for key, value in facts.items():
        typer.echo(f"  {key}: {value}")


@model_app.command("eval")
def eval_(
    name: Swarm = None,
    skip_stages: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGES|SHARE%",
            help="Of a pipeline: also with these stages left out, `2,4`, or with every choice of a share, `25%`; repeatable.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Where the swarm's data lies here, if not where it is known.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Held-out loss and perplexity of the swarm's model as this machine has it, beside a running node (on the CPU, unless --device says otherwise) or after it."""
    from farflung.node.options import EvalOptions

    options = EvalOptions(
        swarm=name, skip_stages=tuple(skip_stages or ()), data=data, device=device, dtype=dtype, home=home
    )
    known_swarm(home, name)
    with working("evaluating the model ..."):
        from farflung.node.evaluating import evaluate_swarm, told

        figures = evaluate_swarm(options)
    if as_json:
        print_json(figures)
        return
    for line in told(figures):
        typer.echo(line)


@model_app.command()
def sample(
    name: Swarm = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Of so many of the most likely tokens; 0: of all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="The same one writes the same text.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """A few lines of the swarm's model as this machine has it, beside a running node (on the CPU, unless --device says otherwise) or after it."""
    from farflung.node.options import SampleOptions

    options = SampleOptions(
        swarm=name,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device=device,
        dtype=dtype,
        home=home,
    )
    known_swarm(home, name)
    with working("loading the model ..."):
        from farflung.node.sampling import sample_swarm

        version, pieces = sample_swarm(options)
    if as_json:
        print_json({"version": version, "prompt": prompt, "text": "".join(pieces)})
        return
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(harmless(piece), nl=False)
    typer.echo()


def harmless(text: str) -> str:
    """Without characters that a terminal obeys: strangers have trained the model."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)
