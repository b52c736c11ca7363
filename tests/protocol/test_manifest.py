"""Manifests: every value in range, one encoding, signed by the founder."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol.errors import (
    BadSignature,
    ConfigError,
    LimitExceeded,
    LocalError,
    Malformed,
    Refused,
    RemoteError,
    WrongSwarm,
    WrongVersion,
)
from farflung.protocol.keys import Ed25519Signer, domain
from farflung.protocol.lap import Laps
from farflung.protocol.limits import MAX_MANIFEST_BYTES, MAX_RECORD_BYTES
from farflung.protocol.manifest import (
    Manifest,
    SignedManifest,
    decode_manifest,
    encode_manifest,
    manifest_hash,
    open_manifest,
    sign_manifest,
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
from farflung.protocol.versions import PROTOCOL_VERSION

LATER = PROTOCOL_VERSION + 1

FOUNDER, CARRIER = Ed25519Signer(b"f" * 32), b"c" * 32
MODEL = ModelSpec(vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, seq_len=128)
OF_FOUR = msgspec.structs.replace(MODEL, num_layers=4)
OF_SIX = msgspec.structs.replace(MODEL, num_layers=6)
BY_RULE = PipelineSpec(stages=3, recovery="checkfree", shadows=0.0)
BY_TWINS = PipelineSpec(stages=5, recovery="checkfree+", shadows=0.0)


def manifest(**changes: Any) -> Manifest:
    return Manifest(
        **{
            "name": "tiny",
            "founder": FOUNDER.peer_id,
            "created": 1_800_000_000,
            "model": MODEL,
            "data": DataSpec(spec="stdlib", content_hash=b"d" * 32, num_samples=1000),
            "batch_tokens": 1024,
            "total_steps": 2000,
            "admission": AdmissionSpec(rule="open"),
            **changes,
        }
    )


def refuse(data: bytes, expected: type[RemoteError], *, swarm: bytes | None = None) -> str:
    with pytest.raises(RemoteError) as caught:
        open_manifest(data, swarm=swarm, peer=CARRIER)
    assert type(caught.value) is expected
    assert caught.value.peer == CARRIER
    return str(caught.value)


def signed_raw(raw: object) -> bytes:
    """Any value as a manifest, well signed by the founder."""
    data = msgspec.msgpack.encode(raw)
    return SignedManifest(data, FOUNDER.sign(domain("manifest") + data)).encode()


def raw_manifest() -> dict[str, Any]:
    fields = msgspec.msgpack.decode(encode_manifest(manifest()))
    assert isinstance(fields, dict)
    return fields


def test_round_trip() -> None:
    signed = sign_manifest(FOUNDER, manifest())
    assert open_manifest(signed.encode(), swarm=manifest_hash(manifest()), peer=CARRIER) == manifest()
    assert signed.swarm == manifest_hash(manifest())
    assert decode_manifest(encode_manifest(manifest()), peer=None) == manifest()
    assert manifest().samples_per_step == 8


def test_ints_in_float_fields_do_not_change_the_hash() -> None:
    assert manifest_hash(manifest(inner=InnerSpec(lr=1, grad_clip=1))) == manifest_hash(
        manifest(inner=InnerSpec(lr=1.0, grad_clip=1.0))
    )


def test_every_field_counts_in_the_hash() -> None:
    hashes = {manifest_hash(manifest(**change)) for change in ({}, {"name": "b"}, {"inner_steps": 9}, {"created": 1})}
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Tiny"}, "swarm name 'Tiny'"),
        ({"founder": b"x"}, "founder: 1 bytes"),
        ({"created": -1}, "created = -1"),
        ({"protocol_versions": ()}, "protocol_versions"),
        ({"protocol_versions": (2, 1)}, "must ascend"),
        ({"protocol_versions": (0,)}, "protocol_versions = 0"),
        ({"batch_tokens": 1000}, "multiple of model.seq_len = 128"),
        ({"batch_tokens": 64}, "swarm.batch_tokens = 64: must be between 128"),
        ({"total_steps": 0}, "swarm.total_steps = 0"),
        ({"inner_steps": 2001}, "swarm.inner_steps = 2001: must be between 1 and 2000"),
        ({"inner": InnerSpec(warmup_steps=2000)}, "inner.warmup_steps = 2000: must be between 0 and 1999"),
        ({"fragments": 0}, "swarm.fragments = 0: must be between 1 and 64"),
        ({"fragments": 65}, "swarm.fragments = 65: must be between 1 and 64"),
        ({"fragments": 3}, "swarm.inner_steps = 100: must be a multiple of swarm.fragments = 3"),
        ({"fragments": 4, "delay_steps": 25}, "swarm.delay_steps = 25: must be between 0 and 24"),
        ({"delay_steps": -1}, "swarm.delay_steps = -1: must be between 0 and 99"),
        ({"delay_steps": 100}, "swarm.delay_steps = 100: must be between 0 and 99"),
        ({"inner_steps": "auto", "min_inner_steps": 0}, "swarm.min_inner_steps = 0: must be between 1 and 2000"),
        ({"inner_steps": "auto", "max_inner_steps": 9}, "swarm.max_inner_steps = 9: must be between 10"),
        ({"inner_steps": "auto", "fragments": 11}, "swarm.fragments = 11: must be between 1 and 10"),
        ({"inner_steps": "auto", "fragments": 3, "delay_steps": 4}, "swarm.delay_steps = 4: must be between 0 and 3"),
        ({"fragments": "auto"}, 'swarm.fragments = "auto": goes with swarm.inner_steps = "auto", which is 100'),
        (
            {"inner_steps": "auto", "fragments": "auto", "max_fragments": 11},
            "swarm.max_fragments = 11: must be between 1",
        ),
        ({"min_inner_steps": 20}, "swarm.min_inner_steps = 20: means nothing here, for inner_steps is 100, which fits"),
        ({"max_inner_steps": 200}, "swarm.max_inner_steps = 200: means nothing here"),
        ({"max_fragments": 2}, "swarm.max_fragments = 2: means nothing here, for fragments is 1, which fits itself"),
        ({"mix": 1.5}, "swarm.mix = 1.5: must be between"),
        ({"pipeline": BY_RULE, "model": OF_FOUR}, "with as many layers, and these have [1, 1, 2]; take as many"),
        ({"pipeline": BY_TWINS, "model": OF_SIX}, '"checkfree+": makes a stage of others with as many layers'),
        ({"mix": float("nan")}, "swarm.mix = nan: must be between"),
        ({"aggregation": "median"}, "swarm.aggregation = 'median': not supported yet"),
        ({"feedback": FeedbackSpec(uplink="kept", last_codec="int8 ")}, "feedback.last_codec = 'int8 '"),
        ({"feedback": FeedbackSpec(uplink="kept"), "mix": 0.5}, 'write mix = "rebase"'),
        ({"uplink_codec": "int8 "}, "swarm.uplink_codec = 'int8 '"),
        ({"downlink_codec": ""}, "swarm.downlink_codec = ''"),
        ({"max_group": 65}, "swarm.max_group = 65: must be between 1 and 64"),
        ({"min_contributors": 0}, "swarm.min_contributors = 0"),
        ({"window_rounds": 0}, "swarm.window_rounds = 0"),
        ({"lease_rounds": -1}, "swarm.lease_rounds = -1"),
        ({"model": msgspec.structs.replace(MODEL, vocab_size=255)}, "model.vocab_size = 255"),
        ({"pipeline": PipelineSpec(stages=2), "inner_steps": "auto"}, 'swarm.inner_steps = "auto": 2 stages have'),
        (
            {"pipeline": PipelineSpec(stages=2), "fragment_pattern": "strided"},
            "the layers of a stage stay in their order",
        ),
        ({"pipeline": PipelineSpec(stages=3)}, "pipeline.stages = 3: a model of 2 layers has at most 2 stages"),
        ({"pipeline": PipelineSpec(stages=2, layers=(1, 2))}, "they are 3, and the model has 2"),
        ({"pipeline": PipelineSpec(stages=2, microbatches=3)}, "must divide the 8 samples of a step"),
    ],
)
def test_ranges(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest(**change)
    assert says in str(caught.value)


def test_laps_are_what_lies_between_two_rounds_of_any_fragment() -> None:
    assert manifest(inner_steps=30, fragments=3, delay_steps=4).laps == Laps.fixed(10, 4)
    assert manifest(inner_steps=30, fragments=3, delay_steps="auto").laps == Laps(least=10, most=10)
    auto = {"inner_steps": "auto", "delay_steps": "auto", "fragments": 3}
    assert manifest(**auto).laps == Laps(least=4, most=166), "10 and 500, to multiples of three"
    assert manifest(**auto, min_inner_steps=9, max_inner_steps=10).laps == Laps(least=3, most=3)
    assert manifest(**auto | {"fragments": "auto", "max_fragments": 6}).laps == Laps(
        least=2, most=83, widths=(1, 2, 3, 6)
    )
    made = manifest(**auto)
    assert decode_manifest(encode_manifest(made), peer=None) == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dim": 68}, "model.dim = 68: must be a multiple of 2 * num_heads = 8"),
        ({"num_kv_heads": 3}, "model.num_kv_heads = 3: must divide num_heads = 4"),
        ({"num_kv_heads": 8}, "model.num_kv_heads = 8: must be between 1 and 4"),
        ({"num_layers": 0}, "model.num_layers = 0"),
        ({"dim": 1 << 20, "num_layers": 4096}, "parameters, at most"),
        ({"init_seed": -1}, "model.init_seed = -1"),
        ({"rope_theta": float("inf")}, "model.rope_theta = inf"),
        ({"preset": "a\x1b[2J"}, "printable"),
    ],
)
def test_model_ranges(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        msgspec.structs.replace(MODEL, **change)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        (
            TokenizerSpec,
            {"kind": "byte"},
            "data.tokenizer = 'byte': must be one of bytes, file; did you mean 'bytes'?",
        ),
        (TokenizerSpec, {"kind": "file"}, "data.tokenizer_hash: 0 bytes, must be 32"),
        (TokenizerSpec, {"kind": "file", "hash": bytes(32)}, "data.end_of_text = '': goes with a tokenizer file, and"),
        (TokenizerSpec, {"end_of_text": "</s>"}, "data.end_of_text = '</s>': goes with a tokenizer file"),
        (TokenizerSpec, {"kind": "file", "hash": bytes(32), "end_of_text": "\n"}, "only printable"),
        (TokenizerSpec, {"hash": b"x"}, "data.tokenizer_hash: 1 bytes, must be 0"),
        (DataSpec, {"spec": "", "content_hash": bytes(32), "num_samples": 1}, "data.spec is empty"),
        (DataSpec, {"spec": "x" * 513, "content_hash": bytes(32), "num_samples": 1}, "at most 512"),
        (DataSpec, {"spec": "x", "content_hash": b"", "num_samples": 1}, "data.content_hash"),
        (DataSpec, {"spec": "x", "content_hash": bytes(32), "num_samples": 0}, "data.num_samples = 0"),
        (InnerSpec, {"optimizer": "muon("}, "inner.optimizer = 'muon(': no optimizer looks like that"),
        (InnerSpec, {"optimizer": "__import__('os').system('true')"}, "no optimizer looks like that"),
        (InnerSpec, {"z_loss": -1e-4}, "inner.z_loss = -0.0001: must be between 0.0 and 1.0"),
        (InnerSpec, {"lr": 0.0}, "inner.lr = 0.0"),
        (InnerSpec, {"betas": (0.9, 1.0)}, "inner.betas[1] = 1.0"),
        (InnerSpec, {"schedule": "cosin"}, "did you mean 'cosine'?"),
        (InnerSpec, {"decay_fraction": 1.1}, "inner.decay_fraction = 1.1"),
        (InnerSpec, {"decay_fraction": 0.0}, "inner.decay_fraction = 0.0: must be between 1e-06 and 1.0"),
        (InnerSpec, {"decay_fraction": 0.1}, 'inner.decay_fraction = 0.1: means nothing here, for schedule = "cosine"'),
        (OuterSpec, {"optimizer": "nestrov"}, "did you mean 'nesterov'?"),
        (OuterSpec, {"optimizer": "sgd"}, "outer.momentum = 0.9: sgd has none; write momentum = 0"),
        (FeedbackSpec, {"last_codec": "int8"}, "feedback.last_codec = 'int8': only with feedback.uplink = 'kept'"),
        (FeedbackSpec, {"uplink": "kept", "decay": 0.95}, "feedback.decay = 0.95: means nothing here, for there is no"),
        (FeedbackSpec, {"after_rounds": 2}, 'means nothing here, for there is no residual; write uplink = "residual"'),
        (OuterSpec, {"clip": 0.1}, "outer.clip = 0.1: only heavyball clips"),
        (OuterSpec, {"optimizer": "heavyball", "clip": -1.0}, "outer.clip = -1.0"),
        (OuterSpec, {"momentum": 1.0}, "outer.momentum = 1.0"),
        (OuterSpec, {"lr_growth": 1.5}, "outer.lr_growth = 1.5"),
        (PipelineSpec, {"stages": 0}, "pipeline.stages = 0: must be between 1 and 64"),
        (PipelineSpec, {"stages": 2, "layers": (3,)}, "must name the layers of each of the 2 stages"),
        (PipelineSpec, {"stages": 2, "layers": (3, 0)}, "pipeline.layers = 0"),
        (
            PipelineSpec,
            {"recovery": "checkfre"},
            "must be one of ladder, checkfree, checkfree+; did you mean 'checkfree'",
        ),
        *(
            (PipelineSpec, {"recovery": "checkfree+", "shadows": 0.0, "stages": 6, **other}, "so take 5 stages or more")
            for other in ({"stages": 4}, {"skip": 0.4}, {"swaps": 1}, {"routing": "dynamic"})
        ),
        *(
            (PipelineSpec, {"recovery": "checkfree+", "shadows": 0.0, "stages": 5, one: 1}, "so take 2 slots and 2")
            for one in ("slots", "microbatches")
        ),
        (
            PipelineSpec,
            {"recovery": "checkfree"},
            'pipeline.shadows = 0.018: with pipeline.recovery = "checkfree" nobody',
        ),
        (PipelineSpec, {"stages": 6, "skip": 0.05}, "pipeline.skip = 0.05: leaves out none of 6 stages"),
        (PipelineSpec, {"stages": 4, "skip": 0.25, "microbatches": 1}, "so few leave some stage out of every step"),
        (PipelineSpec, {"stages": 6, "skip": 0.75}, "take 5 or more, or skip = 0"),
        (PipelineSpec, {"stages": 2, "skip": 0.5}, "pipeline.skip = 0.5: leaves out none of 2 stages"),
        (PipelineSpec, {"stages": 6, "least_visits": 0.5}, "pipeline.least_visits = 0.5: means nothing here"),
        (PipelineSpec, {"routing": "random"}, "pipeline.routing"),
        (PipelineSpec, {"stages": 6, "swaps": 3}, "pipeline.swaps = 3: must be between 0 and 2"),
        (PipelineSpec, {"stages": 6, "swaps": 1, "routing": "dynamic"}, "pipeline.swaps = 1: with routing = 'dynamic'"),
        (PipelineSpec, {"stages": 3, "skip": 0.33, "swaps": 1}, "pipeline.swaps = 1: routes of 2 visits have no two"),
        (PipelineSpec, {"microbatches": 0}, "pipeline.microbatches = 0"),
        (PipelineSpec, {"policy": "arival"}, "did you mean 'arrival'?"),
        (PipelineSpec, {"forward_codec": "fp 32"}, "pipeline.forward_codec = 'fp 32'"),
        (AdmissionSpec, {}, "swarm.invite_key: 0 bytes, must be 32"),
        (AdmissionSpec, {"rule": "opne"}, "did you mean 'open'?"),
        (AdmissionSpec, {"rule": "open", "invite_key": bytes(32)}, "swarm.invite_key: 32 bytes, must be 0"),
        (
            DeadlineSpec,
            {"min_round_s": 9.0, "max_round_s": 8.0},
            "swarm.max_round_s = 8.0: must be between 9.0",
        ),
    ],
)
def test_section_ranges(section: type[msgspec.Struct], values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**values)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("values", "visits", "sizes"),
    [
        ({}, 1, (7,)),
        ({"stages": 2}, 2, (3, 4)),
        ({"stages": 3, "layers": (2, 4, 1)}, 3, (2, 4, 1)),
        ({"stages": 6, "skip": 0.33}, 4, (1, 1, 1, 1, 1, 2)),
        ({"stages": 4, "skip": 0.75}, 2, (1, 2, 2, 2)),
    ],
)
def test_stages_of_seven_layers(values: dict[str, Any], visits: int, sizes: tuple[int, ...]) -> None:
    spec = PipelineSpec(**values)
    assert (spec.visits, spec.sizes(7)) == (visits, sizes)


def test_only_the_founder_signs() -> None:
    with pytest.raises(LocalError, match="founder"):
        sign_manifest(Ed25519Signer(b"x" * 32), manifest())


def test_signed_by_another() -> None:
    data = encode_manifest(manifest())
    forged = SignedManifest(data, Ed25519Signer(b"x" * 32).sign(domain("manifest") + data)).encode()
    said = refuse(forged, BadSignature)
    assert "'tiny'" in said and FOUNDER.peer_id.hex()[:12] in said


def test_wrong_swarm() -> None:
    refuse(sign_manifest(FOUNDER, manifest()).encode(), WrongSwarm, swarm=bytes(32))


def test_wrong_version_even_of_another_shape() -> None:
    said = refuse(signed_raw(raw_manifest() | {"protocol_versions": [LATER]}), WrongVersion)
    assert said.startswith(
        f"manifest 'tiny' of founder {FOUNDER.peer_id.hex()[:12]}: speaks protocol versions [{LATER}]"
    )
    other = signed_raw({"protocol_versions": [LATER, LATER + 1], "new": {"shape": 1}})
    digest = msgspec.msgpack.decode(other, type=SignedManifest).swarm.hex()
    assert refuse(other, WrongVersion).startswith(
        f"manifest {digest[:12]}: speaks protocol versions [{LATER}, {LATER + 1}]"
    )


def test_nobody_is_named_for_another_version_without_a_signature() -> None:
    data = msgspec.msgpack.encode(raw_manifest() | {"protocol_versions": [LATER]})
    refuse(SignedManifest(data, Ed25519Signer(b"x" * 32).sign(domain("manifest") + data)).encode(), BadSignature)


def test_out_of_range_is_refused() -> None:
    assert "swarm.fragments = 65" in refuse(signed_raw(raw_manifest() | {"fragments": 65}), Refused)


@pytest.mark.parametrize(
    "change", [{"unknown": 1}, {"name": 5}, {"created": "now"}, {"model": {}}, {"inner": [1]}, {"mix": 0}]
)
def test_malformed(change: dict[str, Any]) -> None:
    refuse(signed_raw(raw_manifest() | change), Malformed)


def test_another_order_of_fields_is_not_canonical() -> None:
    assert "canonical" in refuse(signed_raw(dict(reversed(raw_manifest().items()))), Malformed)


def test_a_field_left_to_its_default_is_not_canonical() -> None:
    fields = raw_manifest()
    del fields["mix"]
    assert "canonical" in refuse(signed_raw(fields), Malformed)


def test_too_large() -> None:
    refuse(bytes(MAX_RECORD_BYTES + 1), LimitExceeded)
    refuse(SignedManifest(bytes(MAX_MANIFEST_BYTES + 1), bytes(64)).encode(), LimitExceeded)


@given(st.data())
def test_damage_is_a_remote_error(data: st.DataObject) -> None:
    whole = sign_manifest(FOUNDER, manifest()).encode()
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole) - 1)))
    with pytest.raises(RemoteError):
        open_manifest(bytes(damaged[:cut]), swarm=None, peer=CARRIER)


@given(st.binary(max_size=200))
def test_noise_is_a_remote_error(noise: bytes) -> None:
    with pytest.raises(RemoteError):
        open_manifest(noise, swarm=None, peer=CARRIER)


@given(
    st.sampled_from(sorted(raw_manifest())),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field(field: str, value: object) -> None:
    data = signed_raw(raw_manifest() | {field: value})
    try:
        opened = open_manifest(data, swarm=None, peer=CARRIER)
    except RemoteError as err:
        assert err.peer == CARRIER
    else:
        assert encode_manifest(opened) == msgspec.msgpack.decode(data)[0]
