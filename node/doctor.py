"""`farflung doctor`: before anything is downloaded or allocated, whether this machine can train a model, and with what.

Forecasts, not trials: memory by the formula of `training/memory.py`, disk by what a node keeps (`disk`). Then whether the system keeps its clock right, for peers
refuse messages that are a minute off, and whether there is a C compiler, without which coding is slow. Network reachability
and speed are not examined.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from farflung.compression import kernels
from farflung.compression.policy import uniform
from farflung.compression.registry import parse_codec
from farflung.compression.unreduced import MeanPolicy
from farflung.node import disk
from farflung.node.clocks import clock_state
from farflung.node.machine import choose_runtime, describe_device, on_host, plan_memory
from farflung.node.options import DoctorOptions
from farflung.node.paths import SwarmPaths, resolve_paths
from farflung.node.recipe import Recipe, read_recipe
from farflung.node.stage_recipe import stage_recipe
from farflung.node.stage_start import saved_stage
from farflung.node.swarmfiles import load_manifest
from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest import Manifest
from farflung.training.inner import InnerConfig
from farflung.training.memory import NOTHING_BESIDE, RESERVE, Beside, free_bytes
from farflung.training.model import ModelConfig
from farflung.training.presets import num_parameters, preset
from farflung.training.schedule import Schedule

DEFAULT_CODEC = {field.name: field.default for field in msgspec.structs.fields(Manifest)}["downlink_codec"]
"""Of means, for a preset, which has no manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patient:
    """What would be trained."""

    name: str
    model: ModelConfig
    inner: InnerConfig
    batch: int
    """Sequences in one inner step."""
    beside: Beside = NOTHING_BESIDE
    mean_bytes: int
    """An encoded mean, which is kept for those who catch up."""
    divisible: bool = True
    """Whether its batch may be computed in pieces."""
    folder: Path | None = None
    """Where the swarm lies on this machine; None: not yet."""


def examine(options: DoctorOptions) -> dict[str, Any]:
    """All findings, sizes in bytes; `lacks` says what is missing, None where nothing is. Raises ConfigError when the model cannot be trained here, saying what is missing."""
    paths = resolve_paths(options.home)
    patient = _patient(options)
    runtime = choose_runtime(options.device, options.dtype, compiled=False, memory_gb=options.memory_gb)
    plan = plan_memory(
        patient.model,
        patient.inner,
        patient.batch,
        runtime,
        options.save_memory,
        beside=patient.beside,
        divisible=patient.divisible,
    )
    needs, one_memory = plan.forecast, on_host(runtime)
    usable = int(free_bytes(torch.device(runtime.device), runtime.memory_bytes) * (1 - RESERVE))
    parameters = num_parameters(patient.model)
    room = {
        "needed": disk.needed_bytes(needs.checkpoint_bytes, patient.mean_bytes),
        "kept": 0 if patient.folder is None else disk.kept_bytes(patient.folder),
        "free": disk.free_bytes(paths.state),
    }
    return {
        "model": patient.name,
        "parameters": parameters,
        "optimizer": patient.inner.optimizer,
        "device": describe_device(runtime),
        "save_memory": str(plan.options),
        "microbatch": plan.microbatch,
        "device_bytes": {
            "parameters": needs.parameter_bytes,
            "gradients": needs.gradient_bytes,
            "inner state": needs.optimizer_bytes,
            "activations": needs.activation_bytes,
            "casts": needs.cast_bytes,
            "waiting microbatches": needs.kept_bytes,
            "inner step": needs.step_bytes,
            "peak": needs.device_bytes,
            "usable": usable,
        },
        "host_bytes": {
            "outer state": needs.outer_bytes,
            "a round": needs.round_bytes,
            "offloaded inner state": needs.offloaded_bytes,
            "page-locking": needs.pinned_bytes,
            "usable": usable if one_memory else int(free_bytes(torch.device("cpu")) * (1 - RESERVE)),
        },
        "one_memory": one_memory,
        "disk_bytes": room,
        "lacks": disk.lacks(**room),
        "clock": clock_state(),
        "compiler": kernels.find_compiler(),
    }


def report(findings: dict[str, Any]) -> list[str]:
    """The findings for people, a line each."""
    lines = [
        f"{findings['model']}: {findings['parameters'] / 1e6:,.1f} M parameters, inner optimizer {findings['optimizer']}",
        f"device: {findings['device']}",
        f"train with: --save-memory {findings['save_memory']}, {findings['microbatch']} sequences at a time",
    ]
    for title, key in (("device memory", "device_bytes"), ("host memory", "host_bytes"), ("disk", "disk_bytes")):
        terms = (f"{name} {size / 1e9:.2f}" for name, size in findings[key].items())
        lines.append(f"{title}, GB: {', '.join(terms)}")
    if findings["one_memory"]:
        lines.append("device and host memory are one here: both sums must fit together")
    if findings["lacks"]:
        lines.append(findings["lacks"])
    lines.append(f"clock: {findings['clock']}")
    slow = "none: int8 is coded at a third of the speed, deadzone at a fiftieth, trellis at less than a hundredth; install gcc"
    lines.append(f"C compiler: {findings['compiler'] or slow}")
    return lines


def _patient(options: DoctorOptions) -> Patient:
    if options.model is not None:
        try:
            inner = InnerConfig(schedule=Schedule(peak=1e-3, kind="constant"), optimizer=options.optimizer)
            shape = preset(options.model, vocab_size=options.vocab_size)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        codec = uniform(parse_codec(DEFAULT_CODEC), num_parameters(shape))
        mean_bytes = MeanPolicy(codec, codec).kept_nbytes()
        return Patient(name=options.model, model=shape, inner=inner, batch=options.batch, mean_bytes=mean_bytes)
    swarm = resolve_paths(options.home).find_swarm(options.swarm)
    manifest = load_manifest(swarm)
    if manifest is None:
        raise ConfigError(f"this machine has no manifest of {swarm.name} yet; name a size with `--model` instead")
    recipe = read_recipe(manifest)
    if manifest.pipeline.stages > 1:
        return _stage_patient(swarm, recipe)
    return Patient(
        name=swarm.name,
        model=recipe.model,
        inner=recipe.inner,
        batch=manifest.samples_per_step,
        beside=recipe.beside,
        mean_bytes=recipe.mean_bytes,
        folder=swarm.folder,
    )


def _stage_patient(swarm: SwarmPaths, recipe: Recipe) -> Patient:
    """Of a pipeline, the stage that this machine has, or the one that needs most."""
    saved = saved_stage(swarm)
    stages = [stage_recipe(recipe, stage) for stage in range(recipe.manifest.pipeline.stages)]
    one = stages[saved.life.stage] if saved is not None else max(stages, key=lambda each: num_parameters(each.shape()))
    which = "this machine's" if saved is not None else "the largest"
    return Patient(
        name=f"{swarm.name}, stage {one.stage} of {len(stages)} ({' + '.join(map(str, one.part.sizes))} layers), {which}",
        model=one.shape(),
        inner=recipe.inner,
        batch=one.samples_per_microbatch,
        beside=one.beside,
        mean_bytes=one.own.mean_bytes,
        divisible=False,
        folder=swarm.folder,
    )
