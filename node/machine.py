"""What this machine gives to a swarm: the device, its precision, and the memory that training may take there."""

import importlib.util
import os
import platform
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch

from farflung.compression import kernels
from farflung.protocol.errors import ConfigError
from farflung.training.devices import is_on_host
from farflung.training.errors import NotEnoughMemory
from farflung.training.inner import InnerConfig
from farflung.training.memory import (
    BY_COST,
    CUDA_BYTES,
    NOTHING_BESIDE,
    RESERVE,
    Beside,
    MemoryPlan,
    choose_options,
    free_bytes,
    parse_options,
)
from farflung.training.model import ModelConfig, keeps_scores
from farflung.training.optimizers import parse_optimizer
from farflung.training.out_of_memory import is_lack
from farflung.training.runtime import Runtime


def choose_runtime(device: str, dtype: str, *, compiled: bool, memory_gb: float | None = None) -> Runtime:
    """What `--device`, `--dtype`, `--compile` and `--memory` mean on this machine. Raises ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = torch.device(device).type
    index = torch.device(device).index or 0
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices that torch can use; "
            "see `python -c 'import torch; print(torch.cuda.is_available())'`, or give --device cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: torch finds no Apple GPU here; give --device cpu")
    if compiled:
        _check_compiling(kind)
    _try_out(torch.device(device))
    best = Runtime.best(device)
    autocast = {"auto": best.autocast, "bf16": torch.bfloat16, "fp32": None}[dtype]
    memory_bytes = None if memory_gb is None else int(memory_gb * 1e9)
    if memory_bytes is not None and kind == "cuda":
        memory_bytes -= CUDA_BYTES
        if memory_bytes <= 0:
            raise ConfigError(
                f"--memory {memory_gb:g}: CUDA itself takes {CUDA_BYTES / 1e9:g} GB of the device; give more, or --device cpu"
            )
    return Runtime(device=device, autocast=autocast, compile=compiled, memory_bytes=memory_bytes)


def _check_compiling(
    kind: str,  # of device
) -> None:
    """That there is what `torch.compile` needs to compile what it generates. Raises ConfigError."""
    compiler = os.environ.get("CXX", "g++") if kind == "cpu" else kernels.find_compiler() or "cc"
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"--compile needs a compiler for what torch generates, and there is no {compiler} here; "
            "install gcc and g++ (Debian: `apt install g++`), or join without --compile"
        )
    if kind == "mps":  # shaders, and nothing for Python to load
        return
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--compile needs Triton on CUDA, and this Python has none; install it (`pip install triton`), or join without --compile"
        )
    # the first of Debian's own Python lies in /usr/local, where nothing is; Triton and torch look into the second there
    folders = (sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY"))
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        raise ConfigError(
            f"--compile needs the headers of Python, and there is no {folders[1]}/Python.h here; "
            "install them (Debian: `apt install python3-dev`), or join without --compile"
        )


def _try_out(device: torch.device) -> None:
    """Compute something there: that a device is counted says neither that its driver works, nor that torch has kernels for it, nor that it has room for
    this process. Raises ConfigError."""
    if device.type == "cpu":
        return
    try:
        _compute(device)
    except RuntimeError as error:
        words = str(error).partition("\n")[0]  # then torch goes on about debugging
        if is_lack(error):
            raise ConfigError(
                f"--device {device} is full ({words}): close what else uses it, or give --device cpu"
            ) from error
        made_for = torch.cuda.get_arch_list() if device.type == "cuda" else []
        build = f"{torch.__version__}, made for {' '.join(made_for)}" if made_for else torch.__version__
        raise ConfigError(
            f"--device {device}: this torch ({build}) cannot compute on it ({words}); install a torch with kernels for this device "
            "or a driver that it can use, or give --device cpu"
        ) from error


def _compute(device: torch.device) -> None:
    """A kernel or two, waited for. Raises RuntimeError."""
    (torch.ones(2, device=device) + 1).sum().item()


def describe_device(runtime: Runtime) -> str:
    """The device for people, as it stands in heartbeats and records."""
    device = torch.device(runtime.device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    if device.type == "mps":
        return "Apple GPU"
    return f"CPU {platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def on_host(runtime: Runtime) -> bool:
    """Whether the device has no memory of its own."""
    return is_on_host(torch.device(runtime.device))


def plan_memory(
    model: ModelConfig,
    inner: InnerConfig,
    batch: int,  # sequences in one inner step
    runtime: Runtime,
    save: str = "auto",  # what `--save-memory` says
    *,
    beside: Beside = NOTHING_BESIDE,
    divisible: bool = True,  # whether the batch may be computed in pieces
) -> MemoryPlan:
    """How to train this model here, before anything is allocated. Raises ConfigError when it cannot be done."""
    device = torch.device(runtime.device)
    try:
        return choose_options(
            model,
            parse_optimizer(inner.optimizer),
            batch=batch,
            device_bytes=free_bytes(device, runtime.memory_bytes),
            host_bytes=None if on_host(runtime) else free_bytes(torch.device("cpu")),
            compute_bytes=runtime.compute_bytes,
            beside=beside,
            scores=keeps_scores(device.type),
            pinned=device.type == "cuda",
            allowed=BY_COST if save == "auto" else (parse_options(save),),
            divisible=divisible,
        )
    except NotEnoughMemory as error:
        more = (
            "close other programs" if runtime.memory_bytes is None else "give more with --memory, close other programs"
        )
        raise ConfigError(
            f"{error}: {more}, choose another --device{'' if save == 'auto' else ' or --save-memory auto'}, or "
            "join a swarm with a smaller model"
        ) from error


def fit_memory(
    model: ModelConfig,
    inner: InnerConfig,
    batch: int,
    runtime: Runtime,
    save: str = "auto",
    *,
    beside: Beside = NOTHING_BESIDE,
    divisible: bool = True,
) -> Runtime:
    """The runtime with the options of `plan_memory`; on CUDA with torch's allocator held to what there is for it, so that trials find the microbatch, and
    elsewhere with no larger microbatch than that plan's. Raises ConfigError."""
    plan = plan_memory(model, inner, batch, runtime, save, beside=beside, divisible=divisible)
    device = torch.device(runtime.device)
    if device.type != "cuda":  # where no trial fails in good time
        return replace(runtime, save=plan.options, max_microbatch=plan.microbatch)
    total = torch.cuda.get_device_properties(device).total_memory
    # unlike everything else in torch.cuda, this wants to be told the number of the device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, _allowed_bytes(device, runtime, plan) / total), index)
    return replace(runtime, save=plan.options)


def _allowed_bytes(device: torch.device, runtime: Runtime, plan: MemoryPlan) -> int:
    """What torch's allocator may take of a CUDA device, with what it has: what is free and within the limit. It must be told even without one, for under WSL2
    what does not fit lies in the host's memory and is slow (microsoft/WSL#11050), where elsewhere a trial would fail."""
    free = free_bytes(device, runtime.memory_bytes)
    if is_on_host(device):
        # the rest is needed beside it, and what a trial would find out elsewhere ends the process here
        free = max(plan.forecast.device_bytes, int(free * (1 - RESERVE)) - plan.forecast.host_bytes)
    return free + torch.cuda.memory_allocated(device)
