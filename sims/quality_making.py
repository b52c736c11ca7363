"""Makes runs and keeps them: one after another, in several processes, or on a GPU many in one model."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims import quality_fleet
from farflung.sims.kept import Kept
from farflung.sims.orphans import leave_with_pool
from farflung.sims.quality_runs import Run, keeper_of
from farflung.sims.quality_train import Outcome, train
from farflung.sims.quality_train import Progress as Advance

Group = list[Run]
"""Made in one go."""


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """So many that make runs; None for one, which is this."""
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        yield pool


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """On a GPU: what these models come to does not hang on the last 13 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def make(
    runs: Sequence[Run],
    kept: Kept[Outcome],
    pool: ProcessPoolExecutor | None,
    jobs: int,  # of its processes
    shown: Progress,
    task: TaskID,  # counts runs
) -> None:
    """All of them. When one fails no other is begun, those under way come to their end, and all that have are kept.

    Raises DataError, OSError; BrokenProcessPool when a process was killed.
    """

    def keep(group: Group, outcomes: Sequence[tuple[Outcome, float]]) -> None:
        for run, (outcome, seconds) in zip(group, outcomes, strict=True):
            kept.keep(run, outcome, seconds)
            if (keeper := keeper_of(run, kept.file)) is not None:
                keeper.drop()

    groups = grouped(runs, jobs)
    if pool is not None:
        shown.update(task, description=f"{jobs} processes", refresh=True)
        _side_by_side(
            pool, jobs, groups, kept.file, keep, lambda group: shown.update(task, advance=len(group), refresh=True)
        )
        return
    for group in groups:
        first = f"{group[0].method.name}, lr {group[0].lr:g}, seed {group[0].seed}"
        shown.update(task, description=first if len(group) == 1 else f"{len(group)} runs", refresh=True)
        done = shown.tasks[0].completed

        def progress(step: int, loss: float, group: Group = group, done: float = done) -> None:
            shown.update(task, completed=done + len(group) * step / group[0].tier.steps, refresh=step % 10 == 0)

        keep(group, made(group, kept.file, progress))
        shown.update(task, completed=done + len(group), refresh=True)


def _side_by_side(
    pool: ProcessPoolExecutor,
    jobs: int,
    groups: Sequence[Group],
    file: Path | None,
    keep: Callable[[Group, Sequence[tuple[Outcome, float]]], None],
    tell: Callable[[Group], None],  # that one is made
) -> None:
    waiting, running = deque(groups), dict[Future[list[tuple[Outcome, float]]], Group]()
    failed: BaseException | None = None
    while running or (waiting and failed is None):
        while waiting and len(running) < jobs and failed is None:
            try:
                future = pool.submit(made, waiting[0], file)
            except BrokenExecutor as error:
                failed = error
                break
            running[future] = waiting.popleft()
        if not running:
            break
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            group = running.pop(future)
            if (trouble := future.exception()) is not None:
                failed = failed or trouble
                continue
            try:
                keep(group, future.result())
            except OSError as error:
                failed = failed or error
                continue
            tell(group)
    if failed is not None:
        raise failed


def grouped(runs: Sequence[Run], jobs: int) -> list[Group]:
    """As they are made: in fleets where those fit, the others by themselves."""
    in_fleets = [run for run in runs if quality_fleet.fits(run.method, run.tier)]
    alone = [[run] for run in runs if not quality_fleet.fits(run.method, run.tier)]
    return [*alone, *quality_fleet.fleets(in_fleets, jobs)]


def _prepare() -> None:
    """A process that makes runs."""
    leave_with_pool()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    kernels.prepare(resolve_paths().cache / "kernels")


def made(
    group: Group,
    file: Path | None,  # of finished runs: beside it lies what is kept of one under way
    progress: Advance = lambda step, loss: None,
) -> list[tuple[Outcome, float]]:
    """The runs, and the seconds that each took; one that was cut off goes on from where it was, unless it was in a fleet."""
    if quality_fleet.fits(group[0].method, group[0].tier):
        return quality_fleet.train_fleet(group, progress)
    (run,) = group
    started = time.monotonic()
    keeper = keeper_of(run, file)
    outcome = train(run.method, run.tier, lr=run.lr, seed=run.seed, progress=progress, keeper=keeper)
    return [(outcome, time.monotonic() - started)]
