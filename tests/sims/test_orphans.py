"""Whoever was started by somebody ends with it, however that ends."""

import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import psutil
import pytest

from farflung.sims import demo_node, local_node, quality_making, recovery_jobs, soak, solo
from farflung.sims.told_to_end import orderly_end

WITHIN_S = 60.0
"""For what takes a second: others may use this machine."""

WAITS = """
import signal, sys
from farflung.sims import orphans
orphans.ORPHAN_S = 0.1
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphans.leave_with_parent()
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("how", "status"), [("hears", -signal.SIGTERM), ("deaf", 1)])
def test_a_process_ends_when_its_input_closes(how: str, status: int) -> None:
    argv = [sys.executable, "-c", WAITS, how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n" and process.poll() is None
            process.stdin.close()
            assert process.wait(WITHIN_S) == status
        finally:
            process.kill()


POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from farflung.sims.orphans import leave_with_pool
with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=leave_with_pool) as pool:
    pool.submit(time.sleep, 3600)
    print(pool.submit(os.getpid).result(), *pool._processes, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_a_pool_end_with_it_busy_or_not(kind: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            pids = {int(word) for word in process.stdout.readline().split()}
            workers = [psutil.Process(pid) for pid in pids]
            assert len(workers) == 2
            process.send_signal(kind)
            process.wait(WITHIN_S)
            _, left = psutil.wait_procs(workers, WITHIN_S)
            for one in left:
                one.kill()
            assert not left
        finally:
            process.kill()


class Watches(Exception):
    """It does."""


def watches() -> None:
    raise Watches


@pytest.mark.parametrize(
    ("module", "begin"),
    [(recovery_jobs, recovery_jobs._begin), (quality_making, quality_making._prepare), (soak, soak._begin)],
)
def test_all_our_pools_do(monkeypatch: pytest.MonkeyPatch, module: ModuleType, begin: Callable[[], None]) -> None:
    monkeypatch.setattr(module, "leave_with_pool", watches)
    with pytest.raises(Watches):
        begin()


@pytest.mark.parametrize("module", [demo_node, solo, local_node])
def test_all_node_processes_and_workers_look_at_their_input(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    monkeypatch.setattr(module, "leave_with_parent", watches)
    words = ["manifest", "--first", "0", "--steps", "1", "--evaluate-every", "1"]
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(Watches):
        module.main(*[None] if module is local_node else [])


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_cleans_up_and_is_told_once(kind: signal.Signals) -> None:
    before = signal.signal(kind, signal.SIG_DFL)
    cleaned = False
    try:
        with pytest.raises(SystemExit) as end, orderly_end():
            try:
                signal.raise_signal(kind)
            finally:
                signal.raise_signal(kind)
                cleaned = True
        assert signal.getsignal(kind) is signal.SIG_DFL
    finally:
        signal.signal(kind, before)
    assert cleaned and end.value.code == 128 + kind


def test_who_is_deaf_to_a_hangup_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with orderly_end():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
