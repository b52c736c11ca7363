"""Makes runs and keeps them: one after another, in several processes, or on a GPU many in one model."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.progress import Progress, TaskID

from farflung.compression import kernels
from farflung.node.paths import resolve_paths
from farflung.sims import quality_fleet
from farflung.sims.kept import Kept
from farflung.sims.quality_runs import Run, keeper_of
from farflung.sims.quality_train import Outcome, train
from farflung.sims.quality_train import Progress as Advance
from farflung.training.presets import num_parameters

Group = list[Run]
"""Made in one go."""


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """So many that make runs; None for one, which is this."""
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:
        try:
            yield pool
        finally:  # when one run has failed, the others are not begun
            pool.shutdown(wait=False, cancel_futures=True)


def make(
    runs: Sequence[Run],
    kept: Kept[Outcome],
    pool: ProcessPoolExecutor | None,
    jobs: int,  # of its processes
    shown: Progress,
    task: TaskID,  # counts runs
) -> None:
    """All of them. Raises DataError, OSError; BrokenProcessPool when a process was killed."""
    groups = grouped(runs, jobs)
    if pool is not None:
        shown.update(task, description=f"{jobs} processes", refresh=True)
        made_by = {pool.submit(made, group, kept.file): group for group in groups}
        for future in as_completed(made_by):
            for run, (outcome, seconds) in zip(made_by[future], future.result(), strict=True):
                kept.keep(run, outcome, seconds)
                shown.update(task, advance=1, refresh=True)
        return
    prepare()
    for group in groups:
        name = group[0].method.name if len(group) == 1 else f"{len(group)} runs"
        shown.update(task, description=f"{name}, lr {group[0].lr:g}, seed {group[0].seed}", refresh=True)
        done = shown.tasks[0].completed

        def progress(step: int, loss: float, group: Group = group, done: float = done) -> None:
            shown.update(task, completed=done + len(group) * step / group[0].tier.steps, refresh=step % 10 == 0)

        for run, (outcome, seconds) in zip(group, made(group, kept.file, progress), strict=True):
            kept.keep(run, outcome, seconds)
        shown.update(task, completed=done + len(group), refresh=True)


def grouped(runs: Sequence[Run], jobs: int) -> list[Group]:
    """As they are made: in fleets where those fit, the others by themselves."""
    in_fleets = [run for run in runs if quality_fleet.fits(run.method, run.tier, num_parameters(run.tier.model))]
    alone = [[run] for run in runs if run not in in_fleets]
    return [*alone, *quality_fleet.fleets(in_fleets, jobs)]


def prepare() -> None:
    """A process that makes runs."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True  # what these models come to does not hang on the last 13 bits
    kernels.prepare(resolve_paths().cache / "kernels")


def made(
    group: Group,
    file: Path | None,  # of finished runs: beside it lies what is kept of one under way
    progress: Advance = lambda step, loss: None,
) -> list[tuple[Outcome, float]]:
    """The runs, and the seconds that each took; one that was cut off goes on from where it was."""
    if len(group) > 1 or quality_fleet.fits(group[0].method, group[0].tier, num_parameters(group[0].tier.model)):
        return quality_fleet.train_fleet(group, progress)
    (run,) = group
    started = time.monotonic()
    keeper = keeper_of(run, file)
    outcome = train(run.method, run.tier, lr=run.lr, seed=run.seed, progress=progress, keeper=keeper)
    if keeper is not None:
        keeper.drop()
    return [(outcome, time.monotonic() - started)]
