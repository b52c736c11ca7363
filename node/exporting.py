"""`farflung export`: the last checkpoint's outer parameters as a Hugging Face folder, with what is known of the run; of a pipeline, those of
all stages as they were last evaluated (`whole_model`)."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from farflung.node.events import Event, grown, kept_events
from farflung.node.kept_model import KeptModel, kept_model
from farflung.node.options import ExportOptions
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.recipe import Recipe, swarm_tokenizer
from farflung.node.storage import FileStorage
from farflung.node.swarmfiles import tokenizer_file
from farflung.protocol.chain import Commit
from farflung.protocol.errors import LocalError
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.export import export_folder
from farflung.training.flat import Layout
from farflung.training.model import Decoder


def export_swarm(options: ExportOptions) -> dict[str, Any]:
    """Write the folder; returns the facts in its model card. Blocks. Raises ConfigError, LocalError."""
    swarm = resolve_paths(options.home).find_swarm(options.swarm)
    kept = kept_model(swarm)
    recipe, manifest = kept.recipe, kept.recipe.manifest
    tokenizer = swarm_tokenizer(manifest, tokenizer_file(swarm))
    commits = [link.certified.commit for link in FileStorage(swarm.checkpoint).load_history()]
    facts = _facts(swarm, recipe, commits, kept)
    layout = Layout(Decoder(recipe.model, seed=None))
    was_there = options.folder.exists()
    try:
        export_folder(
            options.folder, recipe.model, layout.views(kept.whole()), tokenizer, name=manifest.name, facts=facts
        )
    except OSError as error:
        # The folder was empty: nobody shall take half a model for one, and it may be tried again.
        with suppress(OSError):
            for path in options.folder.iterdir():
                path.unlink()
            if not was_there:
                options.folder.rmdir()
        raise LocalError(
            f"cannot write the model to {options.folder}: {error.strerror}; make room, or name another folder"
        ) from error
    return facts


def _facts(swarm: SwarmPaths, recipe: Recipe, commits: list[Commit], kept: KeptModel) -> dict[str, Any]:
    manifest, at_version = recipe.manifest, kept.version
    past = [commit for commit in commits if commit.version <= at_version]
    contributors = {c.peer for commit in past if commit.round for c in commit.round.contributors}
    losses: list[Event] = []

    def looked_at(events: Iterable[Event]) -> Iterator[Event]:
        for e in events:  # The history is cut now and then; the log tells of all rounds that this node saw.
            if e["event"] == "round.commit":
                contributors.update(map(bytes.fromhex, e["contributors"]))
            elif e["event"] == "outer.eval" and e["loss"] is not None and e["version"] <= at_version:
                losses.append(e)
            yield e

    sent_bytes = sum(
        more for _, more in grown(looked_at(kept_events(swarm.events)), "sent_bytes")
    )  # they may be gigabytes
    facts: dict[str, Any] = {
        "swarm": manifest.name,
        "manifest hash": swarm.hash_hex,
        "parameters": recipe.num_parameters,
        "rounds": at_version,
        "peers that contributed": len(contributors),
    }
    if past:  # a damaged history is to be removed, and the model still worth having
        facts |= {"steps": max(commit.steps for commit in past), "tokens": max(commit.tokens for commit in past)}
    if losses:
        newest = max(losses, key=lambda e: int(e["version"]))
        facts["held-out loss"] = f"{newest['loss']:.4f} nats per token, after round {newest['version']}"
    facts |= {
        "data": manifest.data.spec,
        "tokens per step and peer": manifest.batch_tokens,
        "inner steps between two rounds of a fragment": manifest.inner_steps,
        "fragments": manifest.fragments,
        "pipeline stages": manifest.pipeline.stages,
        **_apart(kept),
        "codec up": recipe.uplink.spec,
        "codec down": recipe.downlink.spec,
        "error feedback": _feedback(manifest.feedback),
        "sent by this peer, bytes": sent_bytes,
        "farflung": version("farflung"),
    }
    return facts


def _apart(kept: KeptModel) -> dict[str, Any]:
    """After how many rounds each stage is what was exported, and how far apart that is: one may have missed some, or gone on while it was sent."""
    if not kept.versions:
        return {}
    said = [str(old) if old == new else f"{old} to {new}" for old, new in kept.versions.values()]
    oldest, newest = min(old for old, _ in kept.versions.values()), max(new for _, new in kept.versions.values())
    return {"rounds of each stage": ", ".join(said), "rounds between the stages": newest - oldest}


def _feedback(spec: FeedbackSpec) -> str:
    ways = f"up: {spec.uplink}, down: {spec.downlink}"
    return f"{ways}, after {spec.after_rounds} rounds, decay {spec.decay:g}" if spec != FeedbackSpec() else "none"
