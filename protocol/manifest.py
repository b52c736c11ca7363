"""The manifest: everything a swarm agrees on, signed by its founder and never changed. Its hash is the
swarm's id.

Encoding is MessagePack with field names, all fields present, in the order below; a decoder accepts only bytes
that it would itself write, so one manifest has one hash. About 1 kB. What a peer decides for itself (device,
caps, dtype) is not here.

One field has one legal value so far (aggregation). It is in the format already so that a manifest says
what its swarm does, and a later version need not guess.
"""

import re
from typing import Literal

import msgspec

from farflung.protocol.checks import check_length, check_range, check_supported, check_unused
from farflung.protocol.errors import BadSignature, ConfigError, LocalError, Malformed, WrongSwarm, WrongVersion
from farflung.protocol.keys import PeerId, Signer, digest, domain, short, verify
from farflung.protocol.lap import Laps
from farflung.protocol.limits import (
    MAX_FRAGMENTS,
    MAX_GROUP_PEERS,
    MAX_MANIFEST_BYTES,
    MAX_NAME,
    MAX_PROTOCOL_VERSIONS,
    MAX_RECORD_BYTES,
)
from farflung.protocol.manifest_sections import (
    AdmissionSpec,
    DataSpec,
    DeadlineSpec,
    FeedbackSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    PipelineSpec,
    TokenizerSpec,
)
from farflung.protocol.naming import check_name
from farflung.protocol.types import Key, Signature
from farflung.protocol.versions import SUPPORTED_VERSIONS, negotiate
from farflung.protocol.wire import check_size, decode

_DOMAIN = domain("manifest")
Auto = Literal["auto"]
_CODEC = re.compile(r"[a-z0-9][a-z0-9_(),.=+:-]{0,127}")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a swarm agrees on. Every value is checked when a manifest is made; ConfigError names key and
    range.
    """

    protocol_versions: tuple[int, ...] = SUPPORTED_VERSIONS
    """Versions a member may speak, ascending."""
    name: str
    """What people call it."""
    founder: bytes
    """The founder's public key, 32 bytes."""
    created: int
    """Unix seconds."""
    model: ModelSpec
    tokenizer: TokenizerSpec = TokenizerSpec()
    data: DataSpec
    batch_tokens: int
    """Tokens of one inner step of one peer, or of the whole pipeline; a multiple of `model.seq_len`."""
    total_steps: int
    """Inner steps of one peer until the end of the run; where they are no multiple of H / P, the last round comes after fewer."""
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    inner_steps: int | Auto = 100
    """H: inner steps between two rounds of the same fragment, a multiple of `fragments`; or `auto`: as few as hide a round behind
    training, between the next two (`farflung.protocol.lap`).
    """
    min_inner_steps: int = 10
    """The least that `auto` may choose, and what it begins with; rounded up to a multiple of the fragments. Goes with `auto`, like the
    next."""
    max_inner_steps: int = 500
    """The most, rounded down."""
    fragments: int | Auto = 1
    """P: parts of the model that are synchronised in turn, one every H / P steps, so that a round moves a P-th of the bytes
    (Streaming DiLoCo, arXiv 2501.18512); or `auto`, where `inner_steps` is it too: as many as make H not much longer.
    """
    max_fragments: int = 3
    """The most that `auto` may choose, and what it begins with; it may choose what divides it. Goes with `auto`."""
    fragment_pattern: Literal["sequential", "strided"] = "sequential"
    """Layers of the same fragment: neighbours, or every P-th, so that each fragment is of all depths. Only of models that peers train whole."""
    delay_steps: int | Auto = 0
    """tau: inner steps that a peer may train while a round is under way; less than H / P. 0: it stands. `auto`: a step less than H / P."""
    mix: float | Literal["rebase"] = "rebase"
    """Where the local parameters of a contributor go when a round's result is applied. `rebase`: to the new outer ones and all that was trained since
    sending. Or alpha, from 0 to 1: the share that they keep of themselves, the rest is the outer ones' (Streaming DiLoCo's is 0.5)."""
    uplink_codec: str = "int8(block=128)"
    """Codec of pseudo-gradients on their way to the owners of parts, as `farflung.compression` reads it."""
    downlink_codec: str = "int8(block=128)"
    """Codec of the reduced means on their way back."""
    feedback: FeedbackSpec = FeedbackSpec()
    pipeline: PipelineSpec = PipelineSpec()
    min_contributors: int = 1
    """A round with fewer changes nothing."""
    window_rounds: int = 3
    """Rounds' worth of samples handed out ahead to each member."""
    lease_rounds: int = 3
    """Rounds for which a vanished member's samples are kept for it."""
    max_group: int = MAX_GROUP_PEERS
    """Most members of one group."""
    meet_every: int = 1
    """Of so many rounds of a fragment one is a meeting with another group (`node/meetings.py`), where there are several. 0: none is. Meeting rarely is worse than never: what a group
    has learnt meanwhile does not survive half of the way to one that far off (`farflung bench groups`)."""
    aggregation: str = "mean"
    """Rule of the reduction: the mean over contributors, weighted by tokens."""
    admission: AdmissionSpec
    deadlines: DeadlineSpec = DeadlineSpec()

    def __post_init__(self) -> None:
        check_name(self.name)
        check_length("founder", self.founder, 32)
        check_range("created", self.created, 0, 1 << 53)
        self._check_versions()
        self._check_steps()
        self._check_pipeline()
        if self.mix != "rebase":
            check_range("swarm.mix", self.mix, 0.0, 1.0)
            if self.feedback.uplink == "kept":
                raise ConfigError(
                    f'swarm.mix = {self.mix}: with feedback.uplink = "kept" local parameters hold what codecs left out, and none of it may be '
                    'mixed away; write mix = "rebase", or uplink = "residual"'
                )
        check_supported("swarm.aggregation", self.aggregation, "mean")
        for key, codec in (
            ("swarm.uplink_codec", self.uplink_codec),
            ("swarm.downlink_codec", self.downlink_codec),
            ("feedback.last_codec", self.feedback.last_codec or self.uplink_codec),
        ):
            if not _CODEC.fullmatch(codec):
                raise ConfigError(f"{key} = {codec[:160]!r}: no codec looks like that; one is 'int8(block=128)'")
        check_range("swarm.max_group", self.max_group, 1, MAX_GROUP_PEERS)
        check_range("swarm.meet_every", self.meet_every, 0, 10_000)
        check_range("swarm.min_contributors", self.min_contributors, 1, self.max_group)
        check_range("swarm.window_rounds", self.window_rounds, 1, 64)
        check_range("swarm.lease_rounds", self.lease_rounds, 0, 10_000)
        if self.tokenizer.kind == "bytes":
            check_range("model.vocab_size", self.model.vocab_size, 256, 1 << 24)

    def _check_versions(self) -> None:
        versions = self.protocol_versions
        check_range("protocol_versions: their number", len(versions), 1, MAX_PROTOCOL_VERSIONS)
        for version in versions:
            check_range("protocol_versions", version, 1, 65535)
        if list(versions) != sorted(set(versions)):
            raise ConfigError(f"protocol_versions = {list(versions)}: must ascend")

    def _check_steps(self) -> None:
        seq_len = self.model.seq_len
        check_range("swarm.batch_tokens", self.batch_tokens, seq_len, 1 << 40)
        if self.batch_tokens % seq_len:
            raise ConfigError(
                f"swarm.batch_tokens = {self.batch_tokens}: must be a multiple of model.seq_len = {seq_len}"
            )
        check_range("swarm.total_steps", self.total_steps, 1, 1 << 40)
        if self.inner_steps == "auto":
            if self.pipeline.stages > 1:
                raise ConfigError(
                    f'swarm.inner_steps = "auto": {self.pipeline.stages} stages have their rounds at the same steps, so none may choose; give a number'
                )
            check_range("swarm.min_inner_steps", self.min_inner_steps, 1, self.total_steps)
            self._check_fragments(self.min_inner_steps)
            check_range("swarm.max_inner_steps", self.max_inner_steps, self.min_inner_steps, 1 << 40)
        else:
            check_range("swarm.inner_steps", self.inner_steps, 1, self.total_steps)
            for key in ("min_inner_steps", "max_inner_steps"):
                check_unused(self, "swarm", key, f'inner_steps is {self.inner_steps}, which fits itself only as "auto"')
            if self.fragments == "auto":
                raise ConfigError(
                    f'swarm.fragments = "auto": goes with swarm.inner_steps = "auto", which is {self.inner_steps}; give a number'
                )
            self._check_fragments(self.inner_steps)
            if self.inner_steps % self.fragments:
                raise ConfigError(
                    f"swarm.inner_steps = {self.inner_steps}: must be a multiple of swarm.fragments = {self.fragments}"
                )
        if self.fragments != "auto":
            check_unused(
                self, "swarm", "max_fragments", f'fragments is {self.fragments}, which fits itself only as "auto"'
            )
        if self.delay_steps != "auto":
            check_range("swarm.delay_steps", self.delay_steps, 0, self.laps.least - 1)
        check_range("inner.warmup_steps", self.inner.warmup_steps, 0, self.total_steps - 1)

    def _check_fragments(self, most: int) -> None:
        key = "swarm.max_fragments" if self.fragments == "auto" else "swarm.fragments"
        check_range(key, self.num_fragments, 1, min(most, MAX_FRAGMENTS))

    def _check_pipeline(self) -> None:
        pipeline = self.pipeline
        sizes = pipeline.sizes(self.model.num_layers)
        if pipeline.stages == 1:
            return
        if self.fragment_pattern != "sequential":
            raise ConfigError(
                f'swarm.fragment_pattern = "{self.fragment_pattern}": the layers of a stage stay in their order; leave it out, or train the model whole'
            )
        if pipeline.by_rule and len(set(sizes)) > 1:
            raise ConfigError(
                f'pipeline.recovery = "{pipeline.recovery}": makes a stage of others with as many layers, and these have {list(sizes)}; take as many for each, by '
                'pipeline.stages or pipeline.layers, or recovery = "ladder"'
            )
        if self.samples_per_step % pipeline.microbatches:
            raise ConfigError(
                f"pipeline.microbatches = {pipeline.microbatches}: must divide the {self.samples_per_step} samples of a step; "
                "change it or swarm.batch_tokens"
            )

    @property
    def laps(self) -> Laps:
        """Inner steps between two rounds, and what they may move."""
        delay, count = None if self.delay_steps == "auto" else self.delay_steps, self.num_fragments
        if self.inner_steps == "auto":
            least = -(-self.min_inner_steps // count)
            widths = tuple(k for k in range(1, count + 1) if count % k == 0) if self.fragments == "auto" else (1,)
            return Laps(least=least, most=max(least, self.max_inner_steps // count), delay=delay, widths=widths)
        return Laps(least=self.inner_steps // count, most=self.inner_steps // count, delay=delay)

    @property
    def num_fragments(self) -> int:
        """P, or the most that it may be."""
        return self.max_fragments if self.fragments == "auto" else self.fragments

    @property
    def samples_per_step(self) -> int:
        """Samples of one inner step of one peer."""
        return self.batch_tokens // self.model.seq_len


class SignedManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as it travels: its canonical bytes and the founder's signature over domain and bytes."""

    manifest: bytes
    signature: Signature

    @property
    def swarm(self) -> bytes:
        """The swarm's id: the hash of the bytes, whatever they are."""
        return digest("manifest", self.manifest)

    def encode(self) -> bytes:
        """The bytes on the wire, for `open_manifest`."""
        return _ENCODER.encode(self)

    def verify(self, *, peer: PeerId | None) -> Manifest:
        """The manifest, if its founder signed these bytes. `peer` is who gave them to us.

        Raises LimitExceeded, Malformed, WrongVersion (the founder, where there is one to be read, has signed it), Refused (a
        value out of range), BadSignature.
        """
        try:
            manifest = decode_manifest(self.manifest, peer=peer)
        except WrongVersion:
            if (told := _told(self.manifest)) is not None:
                self._check_signature(told.name, told.founder, peer)
            raise
        self._check_signature(manifest.name, manifest.founder, peer)
        return manifest

    def _check_signature(self, name: str, founder: PeerId, peer: PeerId | None) -> None:
        try:
            verify(founder, self.signature, _DOMAIN + self.manifest)
        except BadSignature as err:
            raise BadSignature(f"{_called(name, founder)}: {err.reason}", peer=peer) from None


class _Versioned(msgspec.Struct):
    protocol_versions: tuple[int, ...]


class _Told(msgspec.Struct):
    """What manifests of all versions so far say, for people."""

    name: str
    founder: Key


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)
_VERSION_DECODER = msgspec.msgpack.Decoder(_Versioned)
_TOLD_DECODER = msgspec.msgpack.Decoder(_Told)
_SIGNED_DECODER = msgspec.msgpack.Decoder(SignedManifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest. Raises LocalError when they are above MAX_MANIFEST_BYTES."""
    # Python lets an int stand where a float belongs (lr=1), and msgpack would write it as an int: decoding
    # makes it a float.
    data = _ENCODER.encode(_DECODER.decode(_ENCODER.encode(manifest)))
    if len(data) > MAX_MANIFEST_BYTES:
        raise LocalError(f"the manifest has {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are allowed")
    return data


def manifest_hash(manifest: Manifest) -> bytes:
    """SHA-256 over domain and canonical bytes: the swarm's id, 32 bytes."""
    return digest("manifest", encode_manifest(manifest))


def decode_manifest(data: bytes, *, peer: PeerId | None) -> Manifest:
    """A manifest from its canonical bytes; `peer` is who gave them to us.

    Raises LimitExceeded, Malformed (also for bytes that are not canonical), WrongVersion naming manifest and founder, Refused (out of
    range).
    """
    check_size(data, what="manifest", limit=MAX_MANIFEST_BYTES, peer=peer)
    # First the versions: a swarm that speaks none of ours may have a manifest of another shape.
    head = decode(_VERSION_DECODER, data, what="manifest", limit=MAX_MANIFEST_BYTES, peer=peer)
    try:
        negotiate(head.protocol_versions, peer=peer)
    except WrongVersion as err:
        told = _told(data)
        what = f"manifest {short(digest('manifest', data))}" if told is None else _called(told.name, told.founder)
        raise WrongVersion(f"{what}: {err.reason}", peer=peer) from None
    manifest = decode(_DECODER, data, what="manifest", limit=MAX_MANIFEST_BYTES, peer=peer)
    if _ENCODER.encode(manifest) != data:
        raise Malformed("manifest: not in canonical form", peer=peer)
    return manifest


def sign_manifest(signer: Signer, manifest: Manifest) -> SignedManifest:
    """Found a swarm. Raises LocalError when `signer` is not the manifest's founder or the manifest is too
    large.
    """
    if signer.peer_id != manifest.founder:
        raise LocalError(
            f"the manifest's founder is {short(manifest.founder)}, the key at hand is {short(signer.peer_id)}"
        )
    data = encode_manifest(manifest)
    return SignedManifest(data, signer.sign(_DOMAIN + data))


def open_manifest(data: bytes, *, swarm: bytes | None, peer: PeerId | None) -> Manifest:
    """A manifest from `SignedManifest.encode` bytes that `peer` gave us, checked against the id we want
    (None: any).

    Raises LimitExceeded, Malformed, WrongSwarm (another manifest), WrongVersion, Refused (out of range),
    BadSignature.
    """
    signed = decode(_SIGNED_DECODER, data, what="signed manifest", limit=MAX_RECORD_BYTES, peer=peer)
    if swarm is not None and signed.swarm != swarm:
        raise WrongSwarm(f"manifest {short(signed.swarm)}, wanted {short(swarm)}", peer=peer)
    return signed.verify(peer=peer)


def _told(data: bytes) -> _Told | None:
    """Of a manifest of another version: whose it is, if that can be read."""
    try:
        return decode(_TOLD_DECODER, data, what="manifest", limit=MAX_MANIFEST_BYTES, peer=None)
    except Malformed:
        return None


def _called(name: str, founder: PeerId) -> str:
    return f"manifest {name[:MAX_NAME]!r} of founder {short(founder)}"
