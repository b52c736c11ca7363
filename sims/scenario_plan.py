"""From a scenario to a simulation: nodes, their speeds and links, and the schedule.

In `real` mode a node has what its manifest says, its learner included. In `cost` mode it has a vector of some thousand numbers in the place of N parameters (`num_cells`):

    bytes on a link   rates and windows are divided by (bytes of a contribution + bytes of a mean) / (those of the vector),
                      so that a round takes as long, a part at a time, and shares links as it would;
                      headers, requests and control messages are as long as they are (`node.network.Stream.write`, `overhead`)
    computing         a step takes batch tokens / tokens per second; encoding, reducing, applying what `costs` says for N parameters
    bytes reported    those of the vector, times the same factor

    states            8 bytes a parameter, whatever the codec: a byte of the vector's counts for more (`LinkModel.state_means`)

Contributions and means take as long together as they would, and each as long as the other. They are coded without feedback, the last ones like all.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from farflung.compression.int8 import Int8
from farflung.compression.policy import FlatCodec, uniform
from farflung.node.facilities import NET_EVERY_S
from farflung.node.learner import FEW_SAMPLES, HELDOUT_SAMPLES
from farflung.node.manifest_filling import NO_METHOD, fill_method, with_usual_lr
from farflung.node.recipe import Recipe, read_recipe
from farflung.node.stage_recipe import stage_recipe
from farflung.node.terms import Terms
from farflung.node.tls import IDLE_S
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import Ed25519Signer, PeerId
from farflung.protocol.limits import CHUNK_BYTES
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.manifest_toml import check_keys, manifest_from_sections
from farflung.protocol.settings import FAST_BYTES_PER_S, Settings
from farflung.sims import regions
from farflung.sims.faults import Schedule
from farflung.sims.learners import CostLearner, ReplicaLearner
from farflung.sims.links import LinkModel
from farflung.sims.outer_audit import known_means
from farflung.sims.scenario import PeerClass, Scenario
from farflung.sims.simulation import Plan
from farflung.sims.swarm import START_UNIX_S, Outfit, SimLearner
from farflung.training.data import Dataset
from farflung.training.errors import DataError, NotEnoughMemory
from farflung.training.memory import CUDA_BYTES, Beside, choose_options
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.order import SampleOrder
from farflung.training.outer import BYTES_PER_ELEMENT
from farflung.training.presets import PRESETS, num_parameters, preset
from farflung.training.replica import Replica
from farflung.training.rules import HeavyBall, Nesterov, OuterRule
from farflung.training.runtime import Runtime
from farflung.training.sources import open_dataset
from farflung.training.tokenizer import ByteTokenizer

CELL_CODEC = Int8(block=32)

MEMBER_CELLS = 16 * CELL_CODEC.block
"""Numbers in `cost` mode for each member that a group may have: parts of a round are whole blocks of the codec."""

MOST_CELLS = 1 << 15

MANY_NET_LINES = 120
"""Of a node, about what it has sent and received, in the time of a scenario: where it is long they are further apart."""

RAREST_NET_S = 60.0
"""Between two of them, at most: what a node that is killed has sent since the last one is not counted."""

WINDOW_BYTES = 1 << 20
"""Of a stream."""

MIN_WINDOW_BYTES = 256

LEAST_CHUNK_BYTES = 256
"""Of a chunk of outer state: a thousand of them are enough."""

BYTES_PER_MBIT = 125_000.0

FOUND = ("content_hash", "num_samples", "tokenizer_hash", "end_of_text")
"""Keys of `manifest.data` that are found in data and a tokenizer, which are not those of the swarm that a scenario is about."""

CALM_PLAYED = 0.75
"""Share of a scenario's calm that is the calm of its plan: a third of that is added to it (`simulation.Plan.calm_s`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much of the real thing is moved."""

    byte_means: float = 1.0
    """Bytes that one of contributions and means stands for."""
    state_means: float = 1.0
    """How many of those one byte of a state is."""


WHOLE = Scale()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A scenario that can be run."""

    plan: Plan
    bytes_factor: float
    """Bytes that one simulated byte stands for, of contributions and means."""
    state_factor: float
    """The same of outer states."""
    bits: tuple[float, float]
    """Bits per parameter in which the manifest's codecs are expected to send contributions and means."""


def prepare(scenario: Scenario, seed: int, schedule: Schedule) -> Prepared:
    """Make the nodes for a schedule (`churn.make_schedule`). Raises ConfigError."""
    signers = [Ed25519Signer(key) for key in key_seeds(scenario, seed)]
    recipe, dataset = read_scenario(scenario, signers[schedule.founder].peer_id)
    if dataset is not None:
        outfit, scale = _real(recipe, dataset, scenario, signers), WHOLE
    else:
        outfit, scale = _cost(recipe, scenario, signers)
    where = {signer.peer_id: region for signer, (_, _, region) in zip(signers, scenario.roster(), strict=True)}
    by_class = [link_of(peer_class, scenario, scale) for peer_class, _, _ in scenario.roster()]

    def backbone(a: PeerId, b: PeerId) -> tuple[float, float]:
        latency_s, bytes_per_s = regions.between(where[a], where[b])
        return latency_s, bytes_per_s / scale.byte_means

    _check_calm(scenario, outfit.terms.settings)
    plan = Plan(
        seed=seed,
        schedule=until_judged(scenario, schedule),
        calm_s=CALM_PLAYED * scenario.calm_s,
        outfit=outfit,
        links=by_class.__getitem__,
        backbone=backbone,
        nats=[peer_class.nat for peer_class, _, _ in scenario.roster()].__getitem__,
        known_means=known_means(outfit.terms),
    )
    return Prepared(
        plan=plan,
        bytes_factor=scale.byte_means,
        state_factor=scale.byte_means * scale.state_means,
        bits=(bits_per_parameter(recipe.uplink), bits_per_parameter(recipe.downlink)),
    )


def bits_per_parameter(codec: FlatCodec) -> float:
    """In which it is expected to send a whole vector, headers included."""
    return 8 * codec.expected_nbytes() / codec.numel


def _check_calm(scenario: Scenario, settings: Settings) -> None:
    """Refuse a calm in whose last part even a swarm that is well may have no round: a lap may be longer. Raises ConfigError.

    A lap is as long as the fastest member says, who is one that stays if all are in one group; else there may be none but slow ones.
    """
    laps = settings.rules.laps
    steps = laps.most * max(laps.widths)
    honest = [one for one in scenario.peers if not one.attacks] or list(scenario.peers)
    stays = [one.tokens_per_s for one in honest if one.session is None and not one.trace]
    together = stays and scenario.num_peers <= settings.rules.max_group
    step_s = settings.step_tokens / (max(stays) if together else min(one.tokens_per_s for one in honest))
    least_s = (steps * step_s + settings.min_round_s) / (1.0 - CALM_PLAYED)
    if 0.0 < scenario.calm_s < least_s:
        raise ConfigError(
            f"calm_s = {scenario.calm_s:g}: a round has to fall into its last quarter, and from one to the next it may take {steps} steps of "
            f"{step_s:.3g} s, and swarm.min_round_s = {settings.min_round_s:g}; give {math.ceil(least_s)} or more, or fewer "
            f"manifest.swarm.{'inner_steps' if laps.least == laps.most else 'max_inner_steps'}"
        )


def until_judged(scenario: Scenario, schedule: Schedule) -> Schedule:
    """The schedule of a scenario without the last part of its calm, which a simulation adds: in that rounds have to go on."""
    return dataclasses.replace(schedule, duration_s=scenario.duration_s - (1.0 - CALM_PLAYED) * scenario.calm_s)


def key_seeds(scenario: Scenario, seed: int) -> list[bytes]:
    """Seeds of the peers' keys, by number."""
    return [
        hashlib.sha256(f"{scenario.name}/{seed}/{number}".encode()).digest() for number in range(scenario.num_peers)
    ]


def read_scenario(scenario: Scenario, founder: PeerId) -> tuple[Recipe, Dataset | None]:
    """The swarm that a scenario founds, and in `real` mode its data. Raises ConfigError, also when it is too large for some peers."""
    dataset = _dataset(scenario) if scenario.mode == "real" else None
    recipe = read_recipe(_manifest(scenario, founder, dataset))
    for peer_class in scenario.peers:
        _check_memory(peer_class, recipe)
    return recipe, dataset


def training_seconds(manifest: Manifest, tokens_per_s: float) -> dict[str, float]:
    """What training takes a peer of this speed, by the name of the call."""
    return {
        "train": manifest.batch_tokens / tokens_per_s,
        # A forward pass is a third of a step.
        "evaluate": HELDOUT_SAMPLES * manifest.model.seq_len / (3.0 * tokens_per_s),
        "evaluate_few": FEW_SAMPLES * manifest.model.seq_len / (3.0 * tokens_per_s),
    }


def link_of(peer_class: PeerClass, scenario: Scenario, scale: Scale = WHOLE) -> LinkModel:
    """The access link of a peer of the class."""
    network = scenario.network
    return LinkModel(
        latency_s=peer_class.latency_ms / 1000.0,
        jitter_s=network.jitter_ms / 1000.0,
        drop=network.loss,
        duplicate=network.duplicate,
        reorder=network.reorder,
        up_bytes_per_s=peer_class.up_mbit * BYTES_PER_MBIT / scale.byte_means,
        down_bytes_per_s=peer_class.down_mbit * BYTES_PER_MBIT / scale.byte_means,
        byte_means=scale.byte_means,
        state_means=scale.state_means,
        window_bytes=max(MIN_WINDOW_BYTES, round(WINDOW_BYTES / scale.byte_means)),
        # with shared processors these are work of theirs
        message_s=0.0 if scenario.costs.processors else scenario.costs.message_s,
        write_s=0.0 if scenario.costs.processors else scenario.costs.write_s,
        kept_s=IDLE_S,
    )


# ---- what the swarm trains -----------------------------------------------------------------------------------------


def _dataset(scenario: Scenario) -> Dataset:
    spec = str(scenario.manifest.get("data", {}).get("spec", "python"))
    try:
        if spec == "python":
            return _python(_shape(scenario).seq_len)
        return open_dataset(spec, ByteTokenizer(), _shape(scenario).seq_len)
    except DataError as error:
        raise ConfigError(f"manifest.data.spec: {error}") from error


@lru_cache(maxsize=1)
def _python(seq_len: int) -> Dataset:
    """The text of this Python, which nothing changes while it runs; reading it takes longer than many a small scenario."""
    return open_dataset("python", ByteTokenizer(), seq_len)


def _shape(scenario: Scenario) -> ModelConfig:
    model = scenario.manifest.get("model", {})
    name, seq_len = model.get("preset"), model.get("seq_len")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"manifest.model.preset = {name!r}: give one of {', '.join(PRESETS)}")
    if seq_len is not None and (not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1):
        raise ConfigError(f"manifest.model.seq_len = {seq_len!r}: must be a whole number of tokens, 1 or more")
    return preset(name, vocab_size=ByteTokenizer().vocab_size, seq_len=seq_len)


def _manifest(scenario: Scenario, founder: PeerId, dataset: Dataset | None) -> Manifest:
    """The manifest of the file, with what a founder's command fills in."""
    try:
        check_keys(scenario.manifest)
    except ConfigError as error:
        raise ConfigError(f"manifest: {error}") from error
    sections = {section: dict(values) for section, values in scenario.manifest.items()}
    for key in FOUND:
        if key in sections.get("data", {}):
            raise ConfigError(
                f"manifest.data.{key}: it is found in what simulated nodes train on, if anything; leave it out"
            )
    asked = sections.get("swarm", {})
    if asked.get("admission", "open") != "open" or "invite_key" in asked:
        raise ConfigError(
            "manifest.swarm: simulated swarms are open, to attackers too; leave admission and invite_key out"
        )
    shape = _shape(scenario)
    data = {"content_hash": "00" * 32, "num_samples": 1 << 40, "spec": "none"}
    if dataset is not None:
        data = {"content_hash": dataset.content_hash, "num_samples": dataset.num_samples, "spec": "python"}
    sections["data"] = data | sections.get("data", {})
    swarm = {"name": scenario.name, "admission": "open", "batch_tokens": 4 * shape.seq_len, "total_steps": 1 << 30}
    sections["swarm"] = swarm | sections.get("swarm", {})
    fill_method(sections, scenario.method)
    presets = {str(sections["model"]["preset"]): dataclasses.asdict(shape)}
    manifest = manifest_from_sections(sections, founder=founder, created=int(START_UNIX_S), presets=presets)
    says_lr = scenario.method == NO_METHOD or "lr" in sections["inner"]
    return manifest if says_lr else with_usual_lr(manifest)


def _check_memory(peer_class: PeerClass, recipe: Recipe) -> None:
    """Of a pipeline, for the stage that they are told to take, or the smallest one."""
    if not peer_class.memory_gb:
        return
    try:
        if recipe.manifest.pipeline.stages == 1:
            copies = recipe.manifest.feedback.directions
            _check_fits(peer_class, recipe, recipe.model, recipe.manifest.samples_per_step, Beside(copies=copies))
            return
        which = range(recipe.manifest.pipeline.stages) if peer_class.stage is None else (peer_class.stage,)
        stages = [stage_recipe(recipe, stage) for stage in which]
        least = min(stages, key=lambda one: num_parameters(one.shape()))
        _check_fits(peer_class, recipe, least.shape(), least.samples_per_microbatch, least.beside, divisible=False)
    except NotEnoughMemory as error:
        raise ConfigError(
            f"peers {peer_class.name!r} have {peer_class.memory_gb:g} GB: {error}; give them more, train a smaller manifest.model.preset, or cut it into "
            "(more) manifest.pipeline.stages"
        ) from error


def _check_fits(
    peer_class: PeerClass, recipe: Recipe, model: ModelConfig, batch: int, beside: Beside, *, divisible: bool = True
) -> None:
    """Raises NotEnoughMemory."""
    choose_options(
        model,
        parse_optimizer(recipe.inner.optimizer),
        batch=batch,
        device_bytes=max(0, int(peer_class.memory_gb * 1e9) - CUDA_BYTES),
        host_bytes=None,
        compute_bytes=2,
        beside=beside,
        divisible=divisible,
    )


# ---- what nodes are made of ----------------------------------------------------------------------------------------


def _outfit(
    recipe: Recipe, scenario: Scenario, signers: list[Ed25519Signer], learner: Callable[[int], SimLearner]
) -> Outfit:
    by_class = [peer_class for peer_class, _, _ in scenario.roster()]
    training = [training_seconds(recipe.manifest, peer_class.tokens_per_s) for peer_class in by_class]

    num_parameters = recipe.num_parameters
    step_s = scenario.costs.step_s(num_parameters, recipe.manifest.batch_tokens)

    def seconds(index: int, name: str, share: float) -> float:
        return training[index].get(name) or scenario.costs.seconds(name, share * num_parameters)

    return Outfit(
        signers=signers,
        terms=recipe.terms(),
        learner=learner,
        seconds=seconds,
        checkpoint_s=recipe.checkpoint_s,
        start_s=scenario.costs.start_s,
        processors=scenario.costs.processors,
        message_s=scenario.costs.message_s,
        write_s=scenario.costs.write_s,
        asleep=dict.fromkeys(training[0], 0.0) | {"train": step_s},
        attacks=lambda index: by_class[index].attacks,
        echoes=scenario.network.greetings == "reckoned",
        net_every_s=min(max(NET_EVERY_S, scenario.duration_s / MANY_NET_LINES), RAREST_NET_S),
    )


def _real(recipe: Recipe, dataset: Dataset, scenario: Scenario, signers: list[Ed25519Signer]) -> Outfit:
    manifest = recipe.manifest
    order = SampleOrder(num_samples=dataset.num_samples, seed=manifest.data.order_seed, in_order=dataset.in_order)

    def learner(index: int) -> SimLearner:
        runtime = Runtime(device="cpu", microbatch=manifest.samples_per_step)
        replica = Replica(
            recipe.model,
            recipe.inner,
            recipe.outer,
            seed=manifest.model.init_seed,
            runtime=runtime,
            mix=recipe.mix,
            order=recipe.order,
        )
        return ReplicaLearner(replica, dataset, order)

    return _outfit(recipe, scenario, signers, learner)


def num_cells(recipe: Recipe) -> int:
    """Numbers that stand for the model in `cost` mode: enough for all members of a group, and, as far as `MOST_CELLS` allow, so many that a window of the real thing, of
    a megabyte, is one here, too."""
    for_windows = (
        math.ceil(recipe.num_parameters * MIN_WINDOW_BYTES / WINDOW_BYTES / CELL_CODEC.block) * CELL_CODEC.block
    )
    return min(MOST_CELLS, max(recipe.manifest.max_group * MEMBER_CELLS, for_windows))


def _cost(recipe: Recipe, scenario: Scenario, signers: list[Ed25519Signer]) -> tuple[Outfit, Scale]:
    """Nodes that exchange a few numbers (`num_cells`), and what these stand for."""
    cells = num_cells(recipe)
    flat = uniform(CELL_CODEC, cells)
    byte_means = (recipe.uplink.expected_nbytes() + recipe.downlink.expected_nbytes()) / (2 * flat.expected_nbytes())
    cell_means = recipe.num_parameters / cells
    share = cells / recipe.num_parameters / CELL_CODEC.block
    cuts = (*(round(cut * share) * CELL_CODEC.block for cut in recipe.cuts[:-1]), cells)
    outer = _calmed(recipe.outer)
    chunk_bytes = max(LEAST_CHUNK_BYTES, int(CHUNK_BYTES / cell_means) // BYTES_PER_ELEMENT * BYTES_PER_ELEMENT)
    outfit = _outfit(
        recipe, scenario, signers, lambda index: CostLearner(cells, outer, mix=recipe.mix, chunk_bytes=chunk_bytes)
    )
    settings = dataclasses.replace(
        outfit.terms.settings,
        rules=dataclasses.replace(outfit.terms.settings.rules, cuts=cuts),
        align=CELL_CODEC.block,
        uplink=flat.spec,
        downlink=flat.spec,
        last_codec="",
        bytes_per_element=flat.expected_nbytes() / cells,
        fast_bytes_per_s=FAST_BYTES_PER_S / byte_means,
    )
    terms = Terms(
        settings=settings,
        pace=outfit.terms.pace,
        uplink=flat,
        downlink=flat,
        feedback=FeedbackSpec(),
        outer=outer,
        meet_every=outfit.terms.meet_every,
    )
    return dataclasses.replace(outfit, terms=terms), Scale(byte_means=byte_means, state_means=cell_means / byte_means)


def _calmed(rule: OuterRule) -> OuterRule:
    """The same with little momentum: numbers that stay small."""
    if isinstance(rule, Nesterov | HeavyBall):
        return dataclasses.replace(rule, momentum=min(rule.momentum, 0.5))
    return rule
