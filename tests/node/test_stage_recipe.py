"""What a swarm's recipe means for one stage: its own flat vector, chain, memory and boundaries."""

from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest

from farflung.node.recipe import read_recipe
from farflung.node.stage_recipe import MOST_HOLDERS, ROOM, stage_recipe
from farflung.protocol.appointment import appoint, check_appointment
from farflung.protocol.errors import BadSignature, ConfigError
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lives import Counters, Life, group_of
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, InnerSpec, ModelSpec, PipelineSpec
from farflung.protocol.route import DROPPED, Leg
from farflung.training.memory import NOTHING_BESIDE, RESERVE, Beside, forecast, parse_options
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.runtime import Runtime

FOUNDER, OTHER = Ed25519Signer(b"f" * 32), Ed25519Signer(b"o" * 32)
MODEL = ModelSpec(vocab_size=264, dim=32, num_layers=5, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=16)


def manifest(**changes: Any) -> Manifest:
    return Manifest(
        **{
            "name": "tiny",
            "founder": FOUNDER.peer_id,
            "created": 1_800_000_000,
            "model": MODEL,
            "data": DataSpec(spec="stdlib", content_hash=b"d" * 32, num_samples=1000),
            "batch_tokens": 16 * 8,
            "total_steps": 40,
            "inner_steps": 10,
            "inner": InnerSpec(warmup_steps=4),
            "pipeline": PipelineSpec(stages=2, microbatches=4),
            "admission": AdmissionSpec(rule="open"),
            **changes,
        }
    )


def test_stages_share_the_parameters_among_them() -> None:
    whole = read_recipe(manifest(fragments=2))
    stages = [stage_recipe(whole, stage) for stage in range(2)]
    assert sum(one.own.num_parameters for one in stages) == whole.num_parameters
    for one in stages:
        assert one.own.cuts[-1] == one.own.num_parameters and len(one.own.cuts) == 3
        assert one.own.uplink.numel == one.own.num_parameters
        assert one.samples_per_microbatch == 2 and one.tokens_per_microbatch == 32


def test_each_stage_has_a_chain_of_its_own() -> None:
    whole = read_recipe(manifest())
    first, second = (stage_recipe(whole, stage) for stage in range(2))
    groups = {
        whole.swarm,
        *(one.settings(Life(one.stage, 0, who.peer_id)).swarm for one in (first, second) for who in (FOUNDER, OTHER)),
    }
    assert len(groups) == 5
    life = Life(1, 2, OTHER.peer_id, Counters(3, 30, 3840))
    settings = second.settings(life)
    assert settings.founder == OTHER.peer_id and settings.rules.numel == second.own.num_parameters
    assert settings.swarm == group_of(whole.swarm, life)
    assert (settings.rules.stages, settings.rules.since) == (1, life.since)
    assert first.settings(Life(0, 0, FOUNDER.peer_id)).rules.stages == 2  # which may begin the other anew


@pytest.mark.parametrize(
    ("stages", "skip", "fewest"),
    [(5, 0.4, 2), (5, 0.2, 3), (5, 0.6, 2), (5, 0.0, 6), (2, 0.0, 3)],
)
def test_a_route_may_lose_one_hop_where_routes_skip(stages: int, skip: float, fewest: int) -> None:
    """`fewest`: of the hops of a route; more than those of any route where none may go."""
    one = stage_recipe(read_recipe(manifest(pipeline=PipelineSpec(stages=stages, skip=skip, microbatches=4))), 1)
    for live in range(1, stages):
        way = tuple(Leg(stage, stage if stage < live else DROPPED) for stage in range(stages))
        assert one.droppable().allows(way, loss_at_home=True) == (live >= fewest)
    assert one.droppable().max_jump >= one.rules().max_jump or one.rules().visits == stages


def test_dynamic_routes_may_bring_more_than_there_are_slots() -> None:
    """A peer takes as many again as it has slots for, which its memory is forecast for; more, and it is busy."""
    planned, dynamic = (
        stage_recipe(read_recipe(manifest(pipeline=PipelineSpec(stages=2, slots=2, routing=routing))), 1)
        for routing in ("planned", "dynamic")
    )
    boundary_bytes = 4 * planned.tokens_per_microbatch * MODEL.dim
    slots = 2
    assert dynamic.beside.kept_bytes == 3 * slots * boundary_bytes  # an input and a gradient, and an input that waits
    assert planned.beside.kept_bytes == 4 * slots * boundary_bytes  # and as many of a lost peer
    service = dynamic.service(dynamic.learner(None, Runtime()))
    assert service.most_waiting == 2 < planned.service(planned.learner(None, Runtime())).most_waiting


@pytest.mark.parametrize("routing", ["planned", "dynamic"])
@pytest.mark.parametrize("microbatches", [1, 8])
def test_memory_is_forecast_for_the_sums_that_a_plan_may_bring(routing: str, microbatches: int) -> None:
    pipeline = PipelineSpec(stages=2, microbatches=microbatches, routing=routing)
    home, other = (stage_recipe(read_recipe(manifest(pipeline=pipeline)), stage) for stage in range(2))
    most = other.rules().most_homes
    assert most is not None and most >= 2 and other.beside.sums == min(most, microbatches)
    assert home.beside.sums == 1, "a data node has its own microbatches only"


def test_memory_is_forecast_for_the_shadows_that_may_be_held_and_have_been_given() -> None:
    """The held ones are of the largest stage, which may be a multiple of ours."""
    for layers in ((1, 4), (4, 1)):
        spec = PipelineSpec(stages=2, layers=layers)
        stages = [stage_recipe(read_recipe(manifest(pipeline=spec)), stage) for stage in range(2)]
        none = [
            stage_recipe(read_recipe(manifest(pipeline=msgspec.structs.replace(spec, shadows=0.0))), s) for s in (0, 1)
        ]
        largest = max(one.own.num_parameters for one in stages)
        for one, without in zip(stages, none, strict=True):
            held = (one.beside.copies - without.beside.copies - MOST_HOLDERS) * one.own.num_parameters
            assert ROOM * largest <= held < ROOM * largest + one.own.num_parameters


@pytest.mark.parametrize("swaps", [0, 1, 2])
def test_rules_of_swaps_are_the_manifests(swaps: int) -> None:
    one = stage_recipe(read_recipe(manifest(pipeline=PipelineSpec(stages=5, swaps=swaps))), 1).rules()
    assert (one.max_swap, one.max_swaps, one.max_swap_sum) == (min(1, swaps), swaps, swaps)


def test_only_the_founder_appoints() -> None:
    swarm = read_recipe(manifest()).swarm
    appointment = appoint(FOUNDER, swarm, 1, OTHER.peer_id)
    check_appointment(appointment, swarm, FOUNDER.peer_id, peer=None)
    for forged, where in (
        (appoint(OTHER, swarm, 1, OTHER.peer_id), swarm),
        (msgspec.structs.replace(appointment, stage=2), swarm),
        (msgspec.structs.replace(appointment, founder=FOUNDER.peer_id), swarm),
        (appointment, bytes(32)),
    ):
        with pytest.raises(BadSignature, match="appointment for stage"):
            check_appointment(forged, where, FOUNDER.peer_id, peer=OTHER.peer_id)


def test_what_cannot_be_is_said_at_the_founding() -> None:
    with pytest.raises(ConfigError, match="there is no stage 2"):
        stage_recipe(read_recipe(manifest()), 2)
    wrong = manifest(pipeline=PipelineSpec(stages=2, forward_codec="nocodec"))
    with pytest.raises(ConfigError, match=r"pipeline\.forward_codec"):
        stage_recipe(read_recipe(wrong), 0)


def test_a_stage_fits_where_the_model_does_not() -> None:
    """And a microbatch is computed whole: what fits in two pieces does not fit."""
    whole = read_recipe(
        manifest(model=msgspec.structs.replace(MODEL, dim=256, ffn_dim=512, seq_len=128), batch_tokens=1024)
    )
    spec = parse_optimizer(whole.inner.optimizer)

    def needs(config: ModelConfig, microbatch: int, beside: Beside = NOTHING_BESIDE) -> int:
        one = forecast(config, spec, parse_options("none"), microbatch=microbatch, beside=beside)
        return int((one.device_bytes + one.host_bytes) / (1 - RESERVE)) + 1

    second = stage_recipe(whole, 1)
    microbatch = second.samples_per_microbatch
    stage, model = needs(second.shape(), microbatch, second.beside), needs(whole.model, microbatch)
    assert needs(second.shape(), microbatch) < stage < model
    # the limit of a process is above what it has already
    used = psutil.Process().memory_info().rss
    roomy = replace(Runtime(), memory_bytes=used + stage + (64 << 20))
    assert str(second.fit(roomy, "none").save) == "none"
    with pytest.raises(ConfigError, match="2 sequences of 128 tokens"):
        second.fit(replace(roomy, memory_bytes=used + (8 << 20)), "none")
