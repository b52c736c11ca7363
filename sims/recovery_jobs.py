"""Runs of the bench, made one after another here or several at a time by other processes, each with one thread; either way they come to the same bits."""

import signal
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context

import torch

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims.bench_codec import one_thread
from farflung.sims.orphans import leave_with_pool
from farflung.sims.recovery_runs import Run
from farflung.sims.recovery_train import Outcome, Progress

Made = tuple[Run, Outcome, float]
"""A run, what it came to, and the seconds that it took."""


def make_all(runs: Sequence[Run], *, jobs: int, progress: Progress) -> Generator[Made, None, None]:
    """Each run as soon as it is made; in no order when several are at a time. `progress` is told of steps here, and of none elsewhere. Raises DataError; who
    stops listening ends what is under way.
    """
    if min(jobs, len(runs)) < 2:
        kernels.prepare(resolve_paths().cache / "kernels")
        with one_thread():
            for run in runs:
                yield _make(run, progress)
        return
    with _processes(min(jobs, len(runs))) as pool:
        for made in as_completed([pool.submit(_make, run) for run in runs]):
            yield made.result()


def _make(run: Run, progress: Progress = lambda step, loss: None) -> Made:
    began = time.monotonic()
    outcome = run.make(progress)
    return run, outcome, time.monotonic() - began


@contextmanager
def _processes(count: int) -> Generator[ProcessPoolExecutor, None, None]:
    """Of our own: they are ended, not waited for, when the runs are given up, for one may take an hour."""
    others = set(active_children())
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)  # its own thread sees them end, and joins them
        raise
    pool.shutdown()


def _begin() -> None:
    """In a new process."""
    leave_with_pool()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to deal with
    torch.set_num_threads(1)
    kernels.prepare(resolve_paths().cache / "kernels")
