"""From a manifest to what a node computes with: configs, codecs, protocol settings, data, and a learner on this machine.

A manifest is plain numbers and text; everything that can be wrong about them *here* (other data, a codec this version
does not know, too little memory) is a ConfigError that says what differs and what to do. Nothing else turns a manifest
into objects, so the node, the export and the demo's solo worker cannot disagree about what a swarm is.
"""

import hashlib
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from farflung.compression.policy import FlatCodec, parse_policy
from farflung.compression.unreduced import MeanPolicy
from farflung.node.disk import needed_bytes
from farflung.node.learner import SwarmLearner
from farflung.node.machine import fit_memory
from farflung.node.terms import Terms
from farflung.node.trainer import Pace
from farflung.protocol.admission import verify_admission
from farflung.protocol.chain import Rules
from farflung.protocol.errors import ConfigError, RemoteError
from farflung.protocol.keys import PeerId, short
from farflung.protocol.limits import CHUNK_BYTES
from farflung.protocol.manifest import Manifest, manifest_hash
from farflung.protocol.manifest_sections import OuterSpec
from farflung.protocol.settings import Settings
from farflung.training.data import Dataset
from farflung.training.errors import DataError
from farflung.training.flat import slots_of
from farflung.training.fragments import cut, in_line
from farflung.training.inner import InnerConfig
from farflung.training.memory import Beside, MemoryOptions, forecast
from farflung.training.model import ModelConfig, parameter_shapes
from farflung.training.optimizers import parse_optimizer
from farflung.training.order import SampleOrder
from farflung.training.replica import Replica
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule
from farflung.training.sources import lies_here, open_dataset
from farflung.training.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

HEARTBEAT_S = 2.0
"""Between two heartbeats: a vanished peer is called dead after six of them."""

REMOVAL_S = 10.0
"""How long a dead member stays in the view: shorter than this, and a restart would cost two changes of the view."""

CHECKPOINT_S = 300.0
"""Between two checkpoints; the means of the rounds since then are on disk, so nothing is lost in between."""

SMALL_STATE_BYTES = 50e6
"""A learner below this is saved after every round: it takes a moment, and a restart need not replay."""

REPLICA_BYTES_PER_PARAMETER = 24
"""Outer parameters and momentum, local and sent parameters, two moments, fp32 each; a residual is as long as one of them."""

ADMISSIONS = 4096
"""Admission tokens whose verdict is remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a manifest means to this version of farflung."""

    manifest: Manifest
    swarm: bytes
    """The manifest's hash, 32 bytes."""
    model: ModelConfig
    inner: InnerConfig
    outer: OuterRule
    tensors: tuple[tuple[str, torch.Size], ...]
    """Names and shapes of what one peer holds, in the order of its flat vector: of the model, or of one stage of it."""
    uplink: FlatCodec
    downlink: FlatCodec
    last: FlatCodec | None
    """Of both directions in the last round of the run; None: as always."""

    @property
    def num_parameters(self) -> int:
        """That one peer holds."""
        return sum(shape.numel() for _, shape in self.tensors)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of `tensors`."""
        return tuple(name for name, _ in self.tensors)

    @property
    def mix(self) -> float | None:
        """alpha; None rebases (`training.coupled`)."""
        return None if self.manifest.mix == "rebase" else self.manifest.mix

    @property
    def about(self) -> str:
        """What is trained and for how long, for people."""
        laps, steps = self.manifest.laps, self.manifest.total_steps
        least, most = (-(-steps // lap) for lap in (laps.most * laps.widths[-1], laps.least))
        rounds = f"{most:,} rounds" if least == most else f"{least:,} to {most:,} rounds"
        return f"{self.num_parameters / 1e6:,.1f} M parameters, {steps:,} steps, {rounds}"

    @property
    def align(self) -> int:
        """Parts and fragments begin at multiples of this many elements."""
        return math.lcm(*(codec.block for codec in (self.uplink, self.downlink, self.last) if codec is not None))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ends of the fragments, in the order of the flat vector."""
        slots = slots_of(self.tensors)
        fragments = cut(slots, self.manifest.num_fragments, "sequential")
        inner = [round(fragment.slices[0][0] / self.align) * self.align for fragment in fragments[1:]]
        cuts = (0, *inner, self.num_parameters)
        if sorted(set(cuts)) != list(cuts):
            raise ConfigError(
                f"swarm.fragments = {self.manifest.num_fragments}: a model of {self.num_parameters:,} parameters has fewer that "
                f"begin at multiples of {self.align}"
            )
        return cuts

    @property
    def beside(self) -> Beside:
        """What a peer holds in memory that a replica which trains alone does not: residuals of error feedback."""
        return Beside(copies=self.manifest.feedback.directions)

    @property
    def mean_bytes(self) -> int:
        """About what the encoded means of a round of all parameters are, as a node keeps them."""
        return MeanPolicy(self.uplink, self.downlink).kept_nbytes()

    def disk_bytes(self, options: MemoryOptions) -> int:
        """About what a node keeps on its disk, where it holds the model by these options."""
        needs = forecast(self.model, parse_optimizer(self.inner.optimizer), options, beside=self.beside)
        return needed_bytes(needs.checkpoint_bytes, self.mean_bytes)

    @property
    def checkpoint_s(self) -> float:
        """Seconds between two checkpoints; 0: after every round."""
        bytes_per_parameter = REPLICA_BYTES_PER_PARAMETER + 4 * self.manifest.feedback.directions
        return 0.0 if bytes_per_parameter * self.num_parameters < SMALL_STATE_BYTES else CHECKPOINT_S

    @property
    def rules(self) -> Rules:
        """What every commit must follow."""
        m = self.manifest
        return Rules(
            ahead=m.window_rounds * m.samples_per_step,
            lease=m.lease_rounds,
            max_group=m.max_group,
            cuts=self.cuts,
            laps=m.laps,
            total_steps=m.total_steps,
            tokens_per_sample=m.model.seq_len,
            divides=m.pipeline.stages == 1,
        )

    def settings(self) -> Settings:
        """The protocol's rules."""
        m = self.manifest
        return Settings(
            swarm=self.swarm,
            founder=m.founder,
            rules=self.rules,
            step_tokens=m.batch_tokens,
            align=self.align,
            uplink=self.uplink.spec,
            downlink=self.downlink.spec,
            last_codec="" if self.last is None else self.last.spec,
            last_bytes_per_element=0.0 if self.last is None else self.last.expected_nbytes() / self.num_parameters,
            bytes_per_element=max(self.uplink.expected_nbytes(), self.downlink.expected_nbytes()) / self.num_parameters,
            min_contributors=m.min_contributors,
            min_round_s=m.deadlines.min_round_s,
            max_round_s=m.deadlines.max_round_s,
            removal_s=REMOVAL_S,
            heartbeat_s=HEARTBEAT_S,
            admits=admission_check(m),
        )

    def pace(self) -> Pace:
        """The rhythm of training."""
        m = self.manifest
        return Pace(
            laps=m.laps,
            samples_per_step=m.samples_per_step,
            tokens_per_sample=m.model.seq_len,
            total_steps=m.total_steps,
        )

    def terms(self) -> Terms:
        """What a peer of the swarm needs of all this."""
        return Terms(
            settings=self.settings(),
            pace=self.pace(),
            uplink=self.uplink,
            downlink=self.downlink,
            feedback=self.manifest.feedback,
            outer=self.outer,
            growth=self.manifest.outer.lr_growth,
            last=self.last,
            meet_every=self.manifest.meet_every,
        )

    def learner(self, dataset: Dataset, runtime: Runtime, save_memory: str = "auto") -> SwarmLearner:
        """A fresh replica on this machine, fed from `dataset`. Blocks; raises ConfigError when memory is too small."""
        batch = self.manifest.samples_per_step
        runtime = fit_memory(self.model, self.inner, batch, runtime, save_memory, beside=self.beside)
        replica = Replica(
            self.model,
            self.inner,
            self.outer,
            seed=self.manifest.model.init_seed,
            runtime=runtime,
            mix=self.mix,
            chunk_bytes=CHUNK_BYTES,
            order=self.order,
        )
        order = SampleOrder(
            num_samples=self.manifest.data.num_samples,
            seed=self.manifest.data.order_seed,
            in_order=dataset.in_order,
        )
        return SwarmLearner(replica, dataset, order)


def read_recipe(manifest: Manifest) -> Recipe:
    """What `manifest` means here. Raises ConfigError naming what this version does not know."""
    model, inner, outer = manifest.model, manifest.inner, manifest.outer
    try:
        shape = ModelConfig(
            vocab_size=model.vocab_size,
            dim=model.dim,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            ffn_dim=model.ffn_dim,
            seq_len=model.seq_len,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
            tie_embeddings=model.tie_embeddings,
            qk_norm=model.qk_norm,
        )
        slots = in_line(slots_of(parameter_shapes(shape)), manifest.num_fragments, manifest.fragment_pattern)
        tensors = tuple((slot.name, slot.shape) for slot in slots)
        return Recipe(
            manifest=manifest,
            swarm=manifest_hash(manifest),
            model=shape,
            inner=InnerConfig(
                schedule=Schedule(
                    peak=inner.lr,
                    warmup_steps=inner.warmup_steps,
                    total_steps=manifest.total_steps,
                    kind="wsd" if inner.schedule == "wsd" else "cosine",
                    final_ratio=inner.min_lr_ratio,
                    decay_ratio=inner.decay_fraction,
                ),
                optimizer=inner.optimizer,
                betas=inner.betas,
                weight_decay=inner.weight_decay,
                max_grad_norm=inner.grad_clip,
                z_loss=inner.z_loss,
            ),
            outer=outer_rule(outer),
            tensors=tensors,
            uplink=parse_policy(manifest.uplink_codec).resolve(tensors),
            downlink=parse_policy(manifest.downlink_codec).resolve(tensors),
            last=last_codec(manifest, tensors),
        )
    except ValueError as error:
        raise ConfigError(f"the manifest of {manifest.name!r} cannot be used: {error}") from error


def last_codec(manifest: Manifest, tensors: Sequence[tuple[str, torch.Size]]) -> FlatCodec | None:
    """Of the last round, where it has one of its own. Raises ValueError."""
    spec = manifest.feedback.last_codec
    return parse_policy(spec).resolve(tensors) if spec else None


def outer_rule(spec: OuterSpec) -> OuterRule:
    """What moves outer parameters in a round."""
    if spec.optimizer == "sgd":
        return Sgd(lr=spec.lr)
    if spec.optimizer == "heavyball":
        return HeavyBall(lr=spec.lr, momentum=spec.momentum, clip=spec.clip or math.inf)
    return Nesterov(lr=spec.lr, momentum=spec.momentum)


def admission_check(manifest: Manifest) -> Callable[[PeerId, bytes], bool]:
    """Whether a peer may be here: the founder, and who shows a token. Verdicts are remembered, for every heartbeat carries a token."""

    @lru_cache(maxsize=ADMISSIONS)
    def admits(peer: PeerId, token: bytes) -> bool:
        if peer == manifest.founder:
            return True
        try:
            verify_admission(manifest, peer, token)
        except RemoteError:
            return False
        return True

    return admits


def file_hash(path: Path) -> bytes:
    """SHA-256 of a tokenizer file, 32 bytes. Raises ConfigError when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def swarm_tokenizer(
    manifest: Manifest,
    file: Path,  # where the swarm's tokenizer file lies here; not looked at when the swarm trains on bytes
) -> Tokenizer:
    """The tokenizer that the manifest means. Raises ConfigError when the file is missing or another one."""
    if manifest.tokenizer.kind == "bytes":
        return ByteTokenizer()
    wanted = manifest.tokenizer.hash
    if not file.is_file():
        raise ConfigError(
            f"swarm {manifest.name!r} uses a tokenizer file with SHA-256 {wanted.hex()}; get it from the founder "
            "and give it with `--tokenizer FILE`"
        )
    if (found := file_hash(file)) != wanted:
        raise ConfigError(
            f"{file} is not the tokenizer of swarm {manifest.name!r}: its SHA-256 is {found.hex()[:16]}…, the swarm's "
            f"is {wanted.hex()[:16]}…; give the founder's file with `--tokenizer FILE`"
        )
    try:
        return JsonTokenizer(file, manifest.tokenizer.end_of_text)
    except DataError as error:
        raise ConfigError(str(error)) from error


def swarm_dataset(
    manifest: Manifest,
    tokenizer: Tokenizer,
    spec: str | None = None,  # where the data lies here, when elsewhere than the manifest says
) -> Dataset:
    """The swarm's data on this machine, checked against the manifest's content hash.

    Reads all of it once. Raises ConfigError that says what differs and how to fix it.
    """
    spec = spec or manifest.data.spec
    try:
        dataset = open_dataset(spec, tokenizer, manifest.model.seq_len)
        found = dataset.content_hash
    except DataError as error:
        elsewhere = "; say where it lies here with `--data`" if lies_here(spec) else ""
        raise ConfigError(f"the data of swarm {manifest.name!r} cannot be opened: {error}{elsewhere}") from error
    wanted = manifest.data
    if found != wanted.content_hash.hex() or dataset.num_samples != wanted.num_samples:
        raise ConfigError(
            f"the data {spec!r} on this machine is not what swarm {manifest.name!r} trains on: it has "
            f"{dataset.num_samples:,} samples with content hash {found[:12]}, the swarm's has {wanted.num_samples:,} with "
            f"{short(wanted.content_hash)}. {_data_remedy(spec, wanted.spec)}"
        )
    return dataset


def _data_remedy(
    spec: str,
    founders: str,  # the manifest's spec
) -> str:
    if spec == "python":
        return (
            f"The embedded corpus is the standard library of the Python that runs farflung ({platform.python_version()} "
            "here): run it with the founder's Python version."
        )
    if not spec.startswith("hf:"):
        return "Copy the founder's files, and say where they lie with `--data` if that is elsewhere."
    if lies_here(spec) and lies_here(founders):
        return (
            "Copy the founder's files, and say where they lie with `--data hf:…`: with the same configuration, split, column, rows, samples "
            f"and revision as in {founders!r}."
        )
    if spec != founders:
        return f"Leave `--data` out, so that the founder's {founders!r} is read."
    if "revision=" in spec:
        return "The data set, or how it is read, has changed since the founding: ask the founder."
    return "The data set has changed since the founding: the founder should pin a revision."
