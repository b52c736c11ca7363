"""Founding a swarm: from flags and a TOML file to a signed manifest, its folder on this machine, and an invitation.

What the person leaves out comes from the file, then from defaults that suit a first run; number of samples and content
hash come from opening the data. The founder's folder gets the genesis commit here and nowhere else: a founder that has
lost its folder joins its own swarm as anybody does, and cannot begin a second history.
"""

import dataclasses
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from farflung.node.discovery import find_claims, publish_founding
from farflung.node.durable import sync_folder
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity
from farflung.node.listening import PORTS, free_ports, own_addresses
from farflung.node.manifest_filling import (
    FEEDBACK_BITS,
    coded_bits,
    fill_method,
    in_stages,
    usual_inner_steps,
    with_usual_lr,
)
from farflung.node.options import CreatedSwarm, CreateOptions
from farflung.node.p2pd import P2pdConfig
from farflung.node.paths import Paths, SwarmPaths, resolve_paths
from farflung.node.peerbook import PeerBook
from farflung.node.recipe import Recipe, file_hash, read_recipe
from farflung.node.runner import run_loop
from farflung.node.signer import IdentitySigner
from farflung.node.stage_recipe import stage_recipe
from farflung.node.storage import FileStorage, Place
from farflung.node.swarmfiles import save_local, save_manifest, save_port, save_secret, save_tokenizer
from farflung.protocol.admission import invite_key
from farflung.protocol.chain import founded
from farflung.protocol.checks import nearest
from farflung.protocol.errors import ConfigError, WrongVersion
from farflung.protocol.invitation import Invitation, encode_invitation
from farflung.protocol.keys import SEED_BYTES
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.protocol.lives import Life
from farflung.protocol.manifest import Manifest, SignedManifest, sign_manifest
from farflung.protocol.manifest_sections import MAX_LABEL
from farflung.protocol.manifest_toml import Sections, manifest_from_sections, parse_toml
from farflung.protocol.naming import check_free, check_name, full_name
from farflung.protocol.versions import negotiate
from farflung.training.data import Dataset, TokenWindows
from farflung.training.errors import DataError, UnusableModel
from farflung.training.files import files_in
from farflung.training.given import GivenModel, open_given
from farflung.training.inner import InnerConfig
from farflung.training.model_state import save_fresh
from farflung.training.pipeline_slice import even_sizes
from farflung.training.presets import PRESETS, preset
from farflung.training.sources import open_dataset
from farflung.training.stream_spec import StreamSpec
from farflung.training.streamed import StreamedDataset
from farflung.training.tokenizer import Tokenizer, open_tokenizer

DEFAULT_PRESET = "1m"
"""Trains on any laptop."""

DEFAULT_STEPS = 2000
DEFAULT_BATCH = 16
"""Sequences of one inner step of one peer."""

DEFAULT_INNER_STEPS = 100

FEEDBACK_WAITS = 4
"""It starts after the first of so many parts of the run, where nobody asked for it: from random weights it gains less, or does harm (`docs/feedback.md`)."""

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Manifest)}


def found_swarm(options: CreateOptions) -> CreatedSwarm:
    """`farflung create`. Blocks; raises ConfigError, IdentityError, NameContested, NetworkError."""
    check_name(options.name)
    paths = resolve_paths(options.home)
    if known := [swarm.hash_hex[:12] for swarm in paths.swarms() if swarm.name == options.name]:
        raise ConfigError(
            f"this machine knows a swarm {options.name!r} already ({known[0]}); choose another name, or continue that "
            f"one with `farflung join {options.name}`"
        )
    identity = Identity.load_or_create(paths.identity)
    signer = IdentitySigner(identity)
    sections = _sections(options)
    given = None if options.start is None else _fill_given(sections, options.start)
    tokenizer, tokenizer_file = _tokenizer(sections, given)
    _fill_model(sections, tokenizer)
    dataset = _fill_data(sections, tokenizer)
    _fill_steps(sections)
    _fill_feedback(sections)
    seed = _fill_admission(sections)
    manifest = manifest_from_sections(
        sections, founder=identity.public_key, created=int(time.time()), presets=_presets(tokenizer, sections)
    )
    manifest = _with_layers(manifest)
    if "lr" not in sections["inner"]:
        manifest = with_usual_lr(manifest)
    _check_version(manifest)
    recipe = read_recipe(manifest)
    if manifest.pipeline.stages > 1:
        for stage in range(manifest.pipeline.stages):
            _ = stage_recipe(recipe, stage).own.rules  # raises ConfigError for what cannot be done
    if manifest.data.num_samples < manifest.samples_per_step:
        raise ConfigError(
            f"the data has {dataset.num_samples:,} samples of {manifest.model.seq_len} tokens, fewer than one step takes "
            f"({manifest.samples_per_step:,}): give more data, or a smaller --batch-tokens"
        )
    params = None if given is None else _params(given, recipe)
    port = _port(options)
    signed = sign_manifest(signer, manifest)
    with paths.new_swarm(recipe.swarm.hex(), manifest.name) as swarm:
        _keep_genesis(swarm, recipe, signer, signed)
        if params is not None:
            _keep_params(swarm, recipe, params)
        if seed:
            save_secret(swarm, seed)
        if tokenizer_file is not None:
            save_tokenizer(swarm, tokenizer_file)
        if port:
            save_port(swarm, port)
        if options.local:
            save_local(swarm)
        book = PeerBook(swarm.peers)
        book.note_multiaddrs(options.peers)
        book.save()
        if options.peers:  # last, so that nobody hears of a swarm that its founder does not have
            run_loop(_publish(options, identity, signed))
    addresses = (*own_addresses(identity, port, local=options.local), *options.peers)[:MAX_ADDRESSES]
    invitation = Invitation(
        name=manifest.name,
        swarm=recipe.swarm,
        founder=identity.public_key,
        invite_seed=seed,
        addresses=addresses,
    )
    return CreatedSwarm(
        name=manifest.name,
        full_name=full_name(manifest.name, identity.public_key),
        hash_hex=recipe.swarm.hex(),
        invitation=encode_invitation(invitation),
        addresses=addresses,
        port=port,
        published=bool(options.peers),
        founder=identity.public_key.hex(),
        manifest=paths.swarm(recipe.swarm.hex()).manifest,
        about=f"{recipe.about}, data {manifest.data.spec}" + (f", from {given.folder}" if given else ""),
        end_of_text=manifest.tokenizer.end_of_text,
        samples=dataset.num_samples,
        heldout_tokens=dataset.heldout_tokens if isinstance(dataset, TokenWindows) else None,
        layers=manifest.pipeline.layers,
    )


def _with_layers(manifest: Manifest) -> Manifest:
    """Of a pipeline, with the layers of its stages where nobody has said them: no rule of the protocol, so whoever founds a swarm decides it. By CheckFree's rules
    a stage is made of others with as many, and then all have as many."""
    pipeline = manifest.pipeline
    if pipeline.stages == 1 or pipeline.layers or pipeline.by_rule:
        return manifest
    layers = even_sizes(read_recipe(manifest).model, pipeline.stages)
    return msgspec.structs.replace(manifest, pipeline=msgspec.structs.replace(pipeline, layers=layers))


def _check_version(manifest: Manifest) -> None:
    """Raises ConfigError for a swarm that this farflung could not join."""
    try:
        negotiate(manifest.protocol_versions, peer=None)
    except WrongVersion as error:
        raise ConfigError(f"swarm.protocol_versions: the swarm {error.reason}; leave the line out") from error


def _port(options: CreateOptions) -> int:
    """Where the founder's node will listen; 0 when a person wants that left open. Raises ConfigError."""
    if options.port is not None:
        return options.port
    found = free_ports(1, local=options.local)
    if not found:
        raise ConfigError(
            f"no two neighbouring ports from {PORTS[0]} to {PORTS[-1] + 1} are free here; give one with --port"
        )
    return found[0]


# ---- the manifest's sections ---------------------------------------------------------------------------------------


def _sections(options: CreateOptions) -> Sections:
    """The TOML file with the flags over it."""
    sections: Sections = {}
    if options.config is not None:
        try:
            sections = parse_toml(options.config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {options.config}: {error}") from error
    feedback = {None: None, True: "residual", False: "none"}[options.feedback]
    flags: list[tuple[str, str, Any]] = [
        ("model", "preset", options.preset),
        ("data", "spec", options.data),
        ("data", "tokenizer", options.tokenizer),
        ("swarm", "total_steps", options.steps),
        ("swarm", "inner_steps", options.inner_steps),
        ("swarm", "fragments", options.fragments),
        ("swarm", "delay_steps", options.delay_steps),
        ("swarm", "batch_tokens", options.batch_tokens),
        ("pipeline", "stages", options.stages),
        ("pipeline", "skip", options.skip),
        ("pipeline", "routing", options.routing),
        ("pipeline", "microbatches", options.microbatches),
        ("inner", "optimizer", options.optimizer),
        ("inner", "lr", options.lr),
        ("swarm", "min_contributors", options.min_contributors),
        ("swarm", "uplink_codec", options.codec),
        ("swarm", "downlink_codec", options.codec),
        ("feedback", "uplink", feedback),
        ("feedback", "downlink", feedback),
        ("swarm", "admission", "open" if options.open else None),
        ("model", "init_seed", options.seed),
        ("data", "order_seed", options.seed),
    ]
    for section, key, value in flags:
        if value is not None:
            sections.setdefault(section, {})[key] = value
    for section in ("model", "data", "inner", "feedback", "swarm"):
        sections.setdefault(section, {})
    if not in_stages(sections) and (said := sorted(set(sections.get("pipeline", {})) - {"stages"})):
        raise ConfigError(
            f"pipeline.{said[0]}: the model is not cut into stages; say into how many (--stages), or leave it out"
        )
    if _asks_for_residuals(sections["feedback"]):
        sections["feedback"].setdefault("after_rounds", 0)
    swarm = sections["swarm"]
    if (said := swarm.setdefault("name", options.name)) != options.name:
        raise ConfigError(
            f"swarm.name = {said!r} in {options.config}, and the swarm that is founded is {options.name!r}: leave the line out, or give both the same name"
        )
    swarm.setdefault("total_steps", DEFAULT_STEPS)
    fill_method(sections, options.method)
    return sections


def _asks_for_residuals(said: dict[str, Any]) -> bool:
    """Whether a person wants residuals, and not the codecs that they chose: who has a decay in mind, as SparseLoCo's, has an algorithm in mind that begins with the run."""
    decay = said.get("decay")
    fades = isinstance(decay, int | float) and decay < 1.0
    return fades or "residual" in (said.get("uplink"), said.get("downlink"))


def _fill_given(sections: Sections, folder: Path) -> GivenModel:
    """The model's shape and tokenizer are the folder's."""
    model = sections["model"]
    if said := sorted(set(model) - {"seq_len", "init_seed"}):
        raise ConfigError(f"--from: the folder says what model.{said[0]} is; leave out {' and '.join(said)}")
    if in_stages(sections):
        raise ConfigError("--from: stages begin with drawn weights, each on a machine of its own; leave out --stages")
    try:
        given = open_given(folder.expanduser().absolute())
    except UnusableModel as error:
        raise ConfigError(f"--from: {error}") from error
    sections["model"] = {**dataclasses.asdict(given.config), "preset": f"from {given.folder.name}"[:MAX_LABEL], **model}
    if not sections["data"].setdefault("tokenizer", given.tokenizer):
        raise ConfigError(
            f"--from: {given.folder} has no tokenizer.json; give the one it was trained with by --tokenizer"
        )
    return given


def _params(given: GivenModel, recipe: Recipe) -> Tensor:
    try:
        return given.parameters(recipe.tensors)
    except UnusableModel as error:
        raise ConfigError(f"--from: {error}") from error


def _tokenizer(sections: Sections, given: GivenModel | None) -> tuple[Tokenizer, Path | None]:
    """The tokenizer; `data.tokenizer` becomes what a manifest knows: `bytes`, or `file` with a hash and the token that ends a text, which is what the file
    says, or else the given model."""
    data = sections["data"]
    wanted = data.get("tokenizer", "bytes")
    if wanted == "bytes":
        return open_tokenizer("bytes"), None
    if not isinstance(wanted, str) or wanted == "file":
        raise ConfigError('data.tokenizer: give "bytes", or the path of a tokenizer.json')
    file = Path(wanted).expanduser()
    data["tokenizer"], data["tokenizer_hash"] = "file", file_hash(file)
    end_of_text = data.get("end_of_text")
    if not isinstance(end_of_text, str | None):
        raise ConfigError(f"data.end_of_text = {end_of_text!r}: must be a string, the name of a token")
    try:
        tokenizer = open_tokenizer(str(file), given.end_of_text if given and end_of_text is None else end_of_text)
    except DataError as error:
        raise ConfigError(str(error)) from error
    data["end_of_text"] = tokenizer.end_of_text_name
    return tokenizer, file


def _presets(tokenizer: Tokenizer, sections: Sections) -> dict[str, dict[str, Any]]:
    seq_len = sections["model"].get("seq_len")
    wanted = {name: preset(name, vocab_size=tokenizer.vocab_size, seq_len=seq_len) for name in PRESETS}
    return {name: dataclasses.asdict(config) for name, config in wanted.items()}


def _fill_model(sections: Sections, tokenizer: Tokenizer) -> None:
    model = sections["model"]
    if "preset" not in model and "dim" not in model:
        model["preset"] = DEFAULT_PRESET
    name = model.get("preset", "")
    if not isinstance(name, str):
        raise ConfigError(f"model.preset = {name!r}: must be a string")
    if name and name not in PRESETS and "dim" not in model:
        raise ConfigError(f"no model is called {name!r}; there are {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    if "seq_len" not in model and name in PRESETS:
        model["seq_len"] = PRESETS[name].seq_len
    if "vocab_size" not in model and name not in PRESETS:
        model["vocab_size"] = -(-tokenizer.vocab_size // 8) * 8
    for key in ("seq_len", "vocab_size"):
        if key in model and not (isinstance(model[key], int) and model[key] >= 2):
            raise ConfigError(f"model.{key} = {model[key]!r}: must be a whole number of at least 2")
    if model.get("vocab_size", tokenizer.vocab_size) < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {model['vocab_size']}: the tokenizer has {tokenizer.vocab_size} ids; leave it out"
        )
    if "seq_len" not in model:
        raise ConfigError("model.seq_len is missing: say how many tokens a sample has")


def _fill_data(sections: Sections, tokenizer: Tokenizer) -> Dataset:
    data = sections["data"]
    wanted = data.get("spec", "python")
    if not isinstance(wanted, str):
        raise ConfigError(f"data.spec = {wanted!r}: give `python`, a path, or `hf:DATASET`, in quotation marks")
    data["spec"] = data_spec(wanted)
    try:
        dataset = open_dataset(data["spec"], tokenizer, sections["model"]["seq_len"])
        found = dataset.content_hash
        if isinstance(dataset, StreamedDataset):
            dataset.check_end()
    except DataError as error:
        raise ConfigError(str(error)) from error
    for key, value in (("content_hash", found), ("num_samples", dataset.num_samples)):
        if data.setdefault(key, value) != value:
            raise ConfigError(
                f"data.{key} = {data[key]}: the data here has {value}; leave the line out, or use the data it was made for"
            )
    return dataset


def data_spec(wanted: str) -> str:
    """What a person typed as a spec of `training.sources`, with the path in full: a bare one becomes `text:` or `shards:`."""
    kind, _, rest = wanted.partition(":")
    if kind in ("text", "shards", "hf") and not rest:
        raise ConfigError(
            f"--data {wanted!r}: nothing stands behind it; give {kind}:{'DATASET' if kind == 'hf' else 'PATH'}"
        )
    if kind in ("text", "shards"):
        return f"{kind}:{Path(rest).expanduser().absolute()}"
    if kind == "hf":
        try:
            return f"hf:{StreamSpec.parse(rest).in_full().written()}"
        except DataError as error:
            raise ConfigError(str(error)) from error
    if kind == "python":
        return wanted
    path = Path(wanted).expanduser()
    if not path.exists():
        raise ConfigError(f"--data {wanted!r}: there is no such file or folder; give `python`, a path, or `hf:DATASET`")
    try:
        files = [path] if path.is_file() else files_in(path)
    except DataError as error:
        raise ConfigError(str(error)) from error
    kind = "shards" if any(p.suffix in (".bin", ".npy") for p in files) else "text"
    return f"{kind}:{path.absolute()}"


def _fill_steps(sections: Sections) -> None:
    swarm, inner, seq_len = sections["swarm"], sections["inner"], sections["model"]["seq_len"]
    steps = swarm["total_steps"]
    swarm.setdefault("batch_tokens", DEFAULT_BATCH * seq_len)
    if isinstance(steps, int) and steps >= 1:
        swarm.setdefault("inner_steps", usual_inner_steps(sections, DEFAULT_INNER_STEPS))
        if swarm["inner_steps"] == "auto":  # as few as hide a round behind training, which has to go on then
            swarm.setdefault("delay_steps", "auto")
        inner.setdefault("warmup_steps", min(100, steps // 10))


def _fill_feedback(sections: Sections) -> None:
    """Feedback where the codec leaves out much, once the run is warm unless it was asked for."""
    feedback, swarm = sections["feedback"], sections["swarm"]
    for way in ("uplink", "downlink"):
        key = f"{way}_codec"
        coarse = coded_bits(f"swarm.{key}", swarm.get(key, _DEFAULTS[key])) < FEEDBACK_BITS
        feedback.setdefault(way, "residual" if coarse else "none")
    steps, inner_steps, fragments = swarm["total_steps"], swarm.get("inner_steps"), swarm.get("fragments", 1)
    # The fewest rounds that there may be: feedback begins after a quarter of the run at the latest.
    if inner_steps == "auto":
        inner_steps = swarm.get("max_inner_steps", _DEFAULTS["max_inner_steps"])
    if fragments == "auto":
        fragments = 1
    if (
        "residual" in (feedback["uplink"], feedback["downlink"])
        and isinstance(steps, int)
        and isinstance(inner_steps, int)
        and isinstance(fragments, int)
    ):
        feedback.setdefault("after_rounds", -(-steps * max(1, fragments) // (FEEDBACK_WAITS * max(1, inner_steps))))


def _fill_admission(sections: Sections) -> bytes:
    """The secret of the invitation; empty for an open swarm."""
    swarm = sections["swarm"]
    if swarm.get("admission", "invite") != "invite":
        return b""
    if "invite_key" in swarm:
        raise ConfigError("swarm.invite_key: leave it out, the key of the invitation is made here")
    seed = secrets.token_bytes(SEED_BYTES)
    swarm["invite_key"] = invite_key(seed)
    return seed


# ---- what goes out, and what stays here ----------------------------------------------------------------------------


async def _publish(options: CreateOptions, identity: Identity, signed: SignedManifest) -> None:
    """Refuse a name that is taken; put manifest and claim into the DHT."""
    config = EngineConfig(
        libp2p=P2pdConfig(nat_port_map=False, auto_nat=False, use_relay=False, auto_relay=False),
        initial_peers=options.peers,
        tls=False,
    )
    engine = await Engine.create(identity, config)
    try:
        if not engine.joined:
            raise ConfigError(
                f"none of the peers answers ({', '.join(options.peers)}); check the addresses, or leave --peer out: then "
                "the manifest is published at the first `farflung join`"
            )
        claims = await find_claims(engine, options.name)
        check_free(options.name, [found.claim for found in claims], identity.public_key, signed.swarm)
        await publish_founding(engine, IdentitySigner(identity), options.name, signed)
    finally:
        await engine.close()


def keep_founded(paths: Paths, recipe: Recipe, signer: IdentitySigner) -> None:
    """Make the founder's folder of a swarm of which all else is known."""
    with paths.new_swarm(recipe.swarm.hex(), recipe.manifest.name) as swarm:
        _keep_genesis(swarm, recipe, signer, sign_manifest(signer, recipe.manifest))


@dataclass(frozen=True, slots=True)
class _Unbegun:
    """A learner that has not taken a step, of which nothing but its checkpoint is wanted."""

    params: Tensor
    inner: InnerConfig

    def save(self, folder: Path) -> None:
        save_fresh(folder, self.params, self.inner)


def _keep_params(swarm: SwarmPaths, recipe: Recipe, params: Tensor) -> None:
    """The state of height 0, as the founder's node would have saved it: it goes on from there, and all others download it as they would any."""
    place = Place(height=0, version=0, trained=(), steps=0, in_flight=b"")
    FileStorage(swarm.checkpoint).save_learner(_Unbegun(params, recipe.inner), {}, place, ())


def _keep_genesis(swarm: SwarmPaths, recipe: Recipe, signer: IdentitySigner, signed: SignedManifest) -> None:
    """The signed manifest, and height 0 of the history with the founder's vote."""
    save_manifest(swarm, signed.encode())
    settings = recipe.settings()
    if recipe.manifest.pipeline.stages > 1:
        settings = stage_recipe(recipe, 0).settings(Life(0, 0, signer.peer_id))
    FileStorage(swarm.checkpoint).append_commit(None, founded(settings.swarm, signer, settings.rules))
    sync_folder(swarm.checkpoint)
