"""Devices that are there, but cannot be used, or not as they seem; without any of them: torch's words are put into its mouth."""

from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from farflung.node import machine
from farflung.node.doctor import examine
from farflung.node.machine import choose_runtime, fit_memory, plan_memory
from farflung.node.options import DoctorOptions
from farflung.protocol.errors import ConfigError
from farflung.training import memory
from farflung.training.inner import InnerConfig
from farflung.training.memory import CUDA_BYTES, PLAIN, RESERVE, Beside, forecast
from farflung.training.model import ModelConfig
from farflung.training.optimizers import parse_optimizer
from farflung.training.presets import PRESETS
from farflung.training.replica import Replica
from farflung.training.rules import Nesterov
from farflung.training.runtime import Runtime
from farflung.training.schedule import Schedule

GB = 10**9
INNER = InnerConfig(schedule=Schedule(peak=1e-3, kind="constant"))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two CUDA devices of these properties, on which everything succeeds; the second is the current one."""
    facts = SimpleNamespace(name="a card", total_memory=80_000_000_000, major=9, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(machine, "_compute", lambda device: None)
    return facts


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for"),
            r"--device cuda: this torch \(\d.*, made for sm_90 sm_100\) cannot compute on it \(CUDA error: no kernel image .*--device cpu",
        ),
        (RuntimeError("The NVIDIA driver on your system is too old"), r"cannot compute on it \(The NVIDIA driver .* or a driver"),
        (torch.AcceleratorError("CUDA error: out of memory"), r"--device cuda is full \(CUDA error: out of memory\): close what else uses it, or give --device cpu"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("card")
def test_a_gpu_that_is_counted_and_does_not_work_is_refused(
    error: RuntimeError, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> NoReturn:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)  # nor does it say what it is
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "sm_100"])
    monkeypatch.setattr(machine, "_compute", fail)
    with pytest.raises(ConfigError, match=says):
        choose_runtime("auto", "auto", compiled=False)
    assert choose_runtime("cpu", "auto", compiled=False).device == "cpu"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="an Apple GPU computes")
def test_an_apple_gpu_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real kernel, which this torch has not."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(
        ConfigError, match=r"--device mps: this torch \(\d[^,]*\) cannot compute on it \(.*--device cpu"
    ):
        choose_runtime("mps", "auto", compiled=False)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.usefixtures("card")
def test_what_compiling_needs_is_asked_for_at_once(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the first step, after all downloads."""
    has_triton = False

    def find_spec(name: str) -> object | None:
        assert name == "triton"
        return object() if has_triton else None

    monkeypatch.setattr(machine.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path / "local"))
    monkeypatch.setattr(machine.sysconfig, "get_config_var", lambda name: str(tmp_path))
    if device == "cuda":
        with pytest.raises(ConfigError, match=r"--compile needs Triton on CUDA.*or join without --compile"):
            choose_runtime(device, "auto", compiled=True)
    has_triton = True
    with pytest.raises(ConfigError, match=r"no .*/Python\.h here; .*`apt install python3-dev`.*or join without --comp"):
        choose_runtime(device, "auto", compiled=True)
    (tmp_path / "Python.h").touch()
    assert choose_runtime(device, "auto", compiled=True).compile
    has_triton = False
    assert not choose_runtime(device, "auto", compiled=False).compile


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(share of the device, its number) that torch's allocator was held to, while 50 GB are free and torch has 3 of which 2 are in use."""
    said: list[tuple[float, int]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: said.append((share, device))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    return said


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_limit_is_enforced_on_a_gpu_of_which_cuda_itself_takes_some(
    device: str, index: int, card: SimpleNamespace, limits: list[tuple[float, int]]
) -> None:
    runtime = choose_runtime(device, "auto", compiled=False, memory_gb=8)
    assert runtime.autocast is torch.bfloat16 and runtime.memory_bytes == 8_000_000_000 - CUDA_BYTES
    fit_memory(PRESETS["1m"], INNER, 1, runtime)
    # torch wants a number there, and takes no "cuda"
    assert limits == [(pytest.approx((8 - 0.8) / 80), index)]
    card.major = 7
    assert choose_runtime(device, "auto", compiled=False).autocast is None
    with pytest.raises(ConfigError, match=r"--memory 0.8: CUDA itself takes 0.8 GB"):
        choose_runtime(device, "auto", compiled=False, memory_gb=0.8)


def test_without_a_limit_a_gpu_is_not_filled_beyond_what_is_free(
    card: SimpleNamespace, limits: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver would give more, out of the host's memory."""
    for memory_gb in (None, 70):
        fit_memory(PRESETS["1m"], INNER, 1, choose_runtime("cuda:0", "auto", compiled=False, memory_gb=memory_gb))
    assert limits == [(pytest.approx((50 + 3) / 80), 0)] * 2
    card.is_integrated = 1
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 * GB)
    runtime = choose_runtime("cuda:0", "auto", compiled=False)
    fit_memory(PRESETS["60m"], INNER, 1, runtime)
    host = plan_memory(PRESETS["60m"], INNER, 1, runtime).forecast.host_bytes
    assert host > 1 * GB
    assert limits[2:] == [(pytest.approx(((40 + 3 - 2) * (1 - RESERVE) + 2 - host / GB) / 80), 0)]


def test_an_integrated_gpu_shares_the_memory_of_the_host_which_is_page_locked(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not both of two figures are there, but the lesser one, once; and `doctor` says the same."""
    card.is_integrated = 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GB)
    runtime = choose_runtime("cuda", "auto", compiled=False)
    assert machine.on_host(runtime)
    plan = plan_memory(PRESETS["60m"], INNER, 16, runtime)
    assert plan.forecast.pinned_bytes > 0
    assert plan.forecast.device_bytes + plan.forecast.host_bytes <= 4 * GB * (1 - RESERVE)
    found = examine(DoctorOptions(model="60m", device="cuda", batch=16))
    assert found["one_memory"] and found["save_memory"] == str(plan.options)
    assert found["device_bytes"]["usable"] == found["host_bytes"]["usable"] == int(4 * GB * (1 - RESERVE))
    card.is_integrated = 0
    apart = examine(DoctorOptions(model="60m", device="cuda", batch=16))
    assert not apart["one_memory"] and apart["device_bytes"]["usable"] == int(60 * GB * (1 - RESERVE))
    assert apart["host_bytes"]["usable"] == int(4 * GB * (1 - RESERVE))


def test_on_an_apple_gpu_scores_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda device, limit=None: 64 * GB)
    apart = plan_memory(PRESETS["10m"], INNER, 1, Runtime(device="mps"), "none")
    cpu = plan_memory(PRESETS["10m"], INNER, 1, Runtime(), "none")
    kept = 4 * PRESETS["10m"].num_heads * PRESETS["10m"].seq_len ** 2 * PRESETS["10m"].num_layers
    assert apart.forecast.activation_bytes > cpu.forecast.activation_bytes + 0.9 * kept
    assert apart.forecast.pinned_bytes == 0


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("fitting", [1, 2, 3, 6, 16])
def test_steps_on_a_cpu_leave_room_for_the_rounds_beside_them(
    fitting: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `--memory`, and in what the system has: the microbatch is the one that `doctor` says, though at the first step no round has taken anything yet."""
    config = ModelConfig(vocab_size=64, dim=128, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=256, seq_len=16)
    beside, before = Beside(copies=2), 250_000_000

    def needs(microbatch: int) -> int:
        one = forecast(config, parse_optimizer("adamw"), PLAIN, microbatch=microbatch, beside=beside)
        return one.device_bytes + one.host_bytes

    limit = before + int(needs(fitting) / (1 - RESERVE)) + 1
    resident = [before]
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=resident[0]))
    monkeypatch.setattr(memory, "psutil", SimpleNamespace(Process=lambda: process))
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 * GB if asked else limit - resident[0])
    runtime = Runtime(memory_bytes=limit if asked else None)
    plan = plan_memory(config, INNER, 16, runtime, "none", beside=beside)
    replica = Replica(
        config, INNER, Nesterov(), seed=1, runtime=fit_memory(config, INNER, 16, runtime, "none", beside=beside)
    )
    resident[0] += 12 * replica.num_parameters  # and outer parameters and momentum
    tokens = torch.arange(16 * 17).view(16, 17) % 64
    chosen = replica.train_step(tokens, 0).microbatch
    assert chosen == plan.microbatch == fitting
    assert before + needs(chosen) <= limit


def test_where_no_trial_fails_in_good_time_the_plan_bounds_the_microbatch(
    card: SimpleNamespace, limits: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 * GB)
    for device in ("cpu", "mps"):
        runtime = Runtime(device=device)
        plan = plan_memory(PRESETS["10m"], INNER, 4, runtime)
        assert fit_memory(PRESETS["10m"], INNER, 4, runtime).max_microbatch == plan.microbatch
    for is_integrated in (0, 1):
        card.is_integrated = is_integrated
        assert (
            fit_memory(PRESETS["10m"], INNER, 4, choose_runtime("cuda", "auto", compiled=False)).max_microbatch is None
        )
    assert len(limits) == 2
