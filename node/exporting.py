"""`farflung export`: the last checkpoint's outer parameters as a Hugging Face folder, with what is known of the run; of a pipeline, those of
all stages as they were last evaluated (`whole_model`)."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from torch import Tensor

from farflung.node.events import Event, read_events
from farflung.node.options import ExportOptions
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.recipe import Recipe, read_recipe, swarm_tokenizer
from farflung.node.storage import FileStorage
from farflung.node.swarmfiles import load_manifest, tokenizer_file
from farflung.node.whole_model import saved_model
from farflung.protocol.chain import Commit
from farflung.protocol.errors import ConfigError, LocalError
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.checkpoint import read_state
from farflung.training.errors import DamagedCheckpoint
from farflung.training.export import export_folder
from farflung.training.flat import Layout
from farflung.training.model import Decoder
from farflung.training.pipeline_plan import BadPlan
from farflung.training.pipeline_slice import assemble

ATTEMPTS = 3
"""A running node may replace the checkpoint while it is being read."""


def export_swarm(options: ExportOptions) -> dict[str, Any]:
    """Write the folder; returns the facts in its model card. Blocks. Raises ConfigError, LocalError."""
    swarm = resolve_paths(options.home).find_swarm(options.swarm)
    manifest = load_manifest(swarm)
    if manifest is None:
        raise ConfigError(f"this machine has no manifest of {swarm.name}: it has never reached the swarm")
    recipe = read_recipe(manifest)
    tokenizer = swarm_tokenizer(manifest, tokenizer_file(swarm))
    storage = FileStorage(swarm.checkpoint)
    outer, at_version = _assembled(recipe, swarm) if manifest.pipeline.stages > 1 else _read(storage, swarm)
    commits = [link.certified.commit for link in storage.load_history()]
    facts = _facts(swarm, recipe, commits, at_version)
    layout = Layout(Decoder(recipe.model, seed=manifest.model.init_seed))
    if outer.numel() != layout.num_parameters:
        raise LocalError(f"the checkpoint of {swarm.name} is of another model than its manifest says")
    try:
        export_folder(options.folder, recipe.model, layout.views(outer), tokenizer, name=manifest.name, facts=facts)
    except OSError as error:
        raise LocalError(
            f"cannot write the model to {options.folder}: {error.strerror}; make room, or name another folder"
        ) from error
    return facts


def _read(storage: FileStorage, swarm: SwarmPaths) -> tuple[Any, int]:
    """Outer parameters [n] and their version."""
    for attempt in range(ATTEMPTS):
        saved = storage.saved_learner()
        if saved is None:
            raise ConfigError(
                f"there is no checkpoint of {swarm.name} on this machine yet; a node writes one after its first rounds and "
                "when it leaves"
            )
        folder, place = saved
        try:
            return read_state(folder)[0]["outer.params"], place.version
        except (DamagedCheckpoint, KeyError) as error:
            if attempt + 1 == ATTEMPTS:
                raise LocalError(f"the checkpoint of {swarm.name} cannot be read: {error}") from error
    raise AssertionError("unreachable")


def _assembled(recipe: Recipe, swarm: SwarmPaths) -> tuple[Tensor, int]:
    """Outer parameters [n] and their version, from the stages that this machine's node got for its last evaluation."""
    try:
        saved = saved_model(swarm)
        if saved is None:
            raise ConfigError(
                f"this machine has no whole model of {swarm.name}: data nodes (stage 0) put it together when they evaluate it, now "
                "and then and at the end of the run; export on the machine of one, the founder's for example"
            )
        version, stages = saved
        return assemble(recipe.model, recipe.manifest.pipeline.sizes(recipe.model.num_layers), stages), version
    except (DamagedCheckpoint, BadPlan) as error:
        raise LocalError(
            f"the model of {swarm.name} cannot be read: {error}; remove {swarm.folder / 'model'}, and the next evaluation "
            "brings it again"
        ) from error


def _facts(swarm: SwarmPaths, recipe: Recipe, commits: list[Commit], at_version: int) -> dict[str, Any]:
    manifest = recipe.manifest
    rounds = [c for c in commits if c.round is not None and c.version <= at_version]
    contributors = {c.peer for commit in rounds if commit.round for c in commit.round.contributors}
    events = list(read_events(swarm.events)) if swarm.events.exists() else []
    # The history is cut now and then; the log tells of all rounds that this node saw.
    contributors |= {bytes.fromhex(p) for e in events if e["event"] == "round.commit" for p in e["contributors"]}
    tokens = max((c.tokens for c in commits if c.version <= at_version), default=0)
    losses = [e for e in events if e["event"] == "outer.eval" and e["version"] <= at_version]
    facts: dict[str, Any] = {
        "swarm": manifest.name,
        "manifest hash": swarm.hash_hex,
        "parameters": recipe.num_parameters,
        "rounds": at_version,
        "steps": max((c.steps for c in commits if c.version <= at_version), default=0),
        "tokens": tokens,
        "peers that contributed": len(contributors),
    }
    if losses:
        newest = max(losses, key=lambda e: int(e["version"]))
        facts["held-out loss"] = f"{newest['loss']:.4f} nats per token, after round {newest['version']}"
    facts |= {
        "data": manifest.data.spec,
        "tokens per step and peer": manifest.batch_tokens,
        "inner steps between two rounds of a fragment": manifest.inner_steps,
        "fragments": manifest.fragments,
        "pipeline stages": manifest.pipeline.stages,
        "codec up": recipe.uplink.spec,
        "codec down": recipe.downlink.spec,
        "error feedback": _feedback(manifest.feedback),
        "sent by this peer, bytes": _sent(events),
        "farflung": version("farflung"),
    }
    return facts


def _feedback(spec: FeedbackSpec) -> str:
    ways = f"up: {spec.uplink}, down: {spec.downlink}"
    return f"{ways}, after {spec.after_rounds} rounds, decay {spec.decay:g}" if spec != FeedbackSpec() else "none"


def _sent(events: Iterable[Event]) -> int:
    """Bytes sent in all lives of this node."""
    total = current = 0
    for event in events:
        if event["event"] == "node.start":
            total, current = total + current, 0
        elif event["event"] == "net":
            current = int(event["sent_bytes"])
    return total + current
