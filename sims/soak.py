"""Seeds by the thousand: what commands that soak (`chaos`, `chaos_pipeline`) have in common.

Every so often a seed is run twice, the second time by another process, so that what depends on Python's hash seed differs: another log is a violation.
A soak that is interrupted says how to go on: with `--kept FILE` by itself, for what has passed by the same code is not run again (`soaked`).
"""

import argparse
import contextlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from farflung.sims.orphans import leave_with_pool
from farflung.sims.simulation import Report
from farflung.sims.soaked import Passes

R = TypeVar("R", bound=Report)
R_co = TypeVar("R_co", bound=Report, covariant=True)

MOST_TOLD = 5
"""Violations of one seed that are printed."""

TOLD_EVERY = 100
"""Seeds to a line where no bar can be drawn; of fewer than so many seeds each has its own line."""

INTERRUPTED = 130
"""Exit code, as shells have it."""


class Run(Protocol[R_co]):
    """Simulates one seed; `keep`: its report has the log."""

    def __call__(self, seed: int, *, keep: bool) -> R_co: ...


def run_seeds(
    seeds: Sequence[int], *, jobs: int, run: Callable[[int], R], twice: Collection[int] = ()
) -> Generator[R, None, None]:
    """The report of each seed, in order; those of `twice` are run once more, to the same log."""
    fresh = get_context("spawn")  # a fork would have its parent's hash seed
    with (
        ProcessPoolExecutor(jobs, mp_context=fresh, initializer=_begin) as pool,
        ProcessPoolExecutor(1, mp_context=fresh, initializer=_begin) as other,
    ):
        try:
            again = {seed: other.submit(run, seed) for seed in seeds if seed in twice}
            for report in map(run, seeds) if len(seeds) == 1 else pool.map(run, seeds):
                second = again.pop(report.seed, None)
                if second is not None and (log := second.result().log_sha256) != report.log_sha256:
                    report.violations.append(
                        f"seed {report.seed} run twice gave two logs: sha256 {report.log_sha256} and {log}"
                    )
                yield report
        finally:  # whoever stops listening does not wait for thousands of seeds
            pool.shutdown(cancel_futures=True)
            other.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a new process."""
    leave_with_pool()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to deal with


def rate_and_rest(done: int, of: int, seconds: float) -> str:
    """Rate and time left, for people."""
    left_s = (of - done) * seconds / done
    left = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
    return f"{done / seconds:.2f} seeds/s, {left} left"


def soak(
    command: str,  # of which seeds that passed are kept
    description: str | None,
    kinds: Mapping[str, Run[R]],
    told: Callable[[R], str],
    args: Sequence[str] | None = None,  # in the place of the command line's
) -> None:
    """The command: runs the seeds that it is asked for, of the first of `kinds` unless another is named, says of each what `told` does, and exits with 1
    if any of them broke an invariant. Raises OSError, and ValueError when the file of those that have passed is one of something else.
    """
    asked = _parse(description, kinds, args)
    seeds = [asked.seed] if asked.seed is not None else list(range(asked.first, asked.first + asked.seeds))
    every = 1 if asked.twice else asked.repeat_every
    twice = set(seeds[::every]) if every else set[int]()
    passes = Passes(asked.kept, command, asked.kind, twice) if asked.kept else None
    left = [seed for seed in seeds if passes is None or seed not in passes]
    if before := len(seeds) - len(left):
        sys.stdout.write(f"{asked.kind}: {before} of {len(seeds)} seeds have passed before, by the same code\n")
    run = partial(kinds[asked.kind], keep=asked.events)
    began, done, failed, runs = time.monotonic(), 0, list[int](), 0
    reports = run_seeds(left, jobs=asked.jobs, run=run, twice=twice)
    try:
        with contextlib.closing(reports), _told_on(asked.kind, len(left)) as tell:
            for report in reports:
                again = report.seed in twice
                done, runs = done + 1, runs + 1 + again
                if asked.events:
                    sys.stdout.write("\n".join(report.schedule + report.events) + "\n")
                if report.violations:
                    failed.append(report.seed)
                elif passes is not None:
                    passes.add(report.seed, report.log_sha256)
                if report.violations or len(left) < TOLD_EVERY:
                    verdict = "VIOLATED" if report.violations else "ok"
                    violations = "".join(f"    {violation}\n" for violation in report.violations[:MOST_TOLD])
                    said = f"seed {report.seed:4d}: {told(report)}, {verdict}{', twice' if again else ''}\n{violations}"
                    sys.stdout.write(said)
                tell(done, f"{rate_and_rest(done, len(left), time.monotonic() - began)}, {len(failed)} failed")
                sys.stdout.flush()
    except KeyboardInterrupt:
        first = f"--first {asked.first + done} --seeds {len(seeds) - done}" if passes is None else "the same command"
        sys.stdout.write(f"interrupted: go on with {first}\n")
        sys.exit(INTERRUPTED)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used) / max(1, runs)
    sys.stdout.write(f"{len(seeds) - len(failed)} passed, {len(failed)} failed; {cpu_s:.2f} CPU s a run\n")
    if failed:
        sys.stdout.write(f"failed: {', '.join(map(str, failed))}\n")
    sys.exit(1 if failed else 0)


def _parse(description: str | None, kinds: Mapping[str, Run[R]], args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(kinds), default=next(iter(kinds)), help="what to run")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them, also to go on after an interruption")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--events", action="store_true", help="print the event log")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--twice", action="store_true", help="run each seed twice: its log has to be the same")
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="FILE",
        help="seeds that have passed: not run again by the same code; made when missing",
    )
    parser.add_argument("--repeat-every", type=int, default=0, metavar="N", help="run every N-th seed twice")
    return parser.parse_args(args)


@contextlib.contextmanager
def _told_on(kind: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """What takes how many seeds are done, and the words for that: a bar on a terminal, else a line for every hundred."""
    if not sys.stderr.isatty():

        def write(done: int, said: str) -> None:
            if total >= TOLD_EVERY and (done % TOLD_EVERY == 0 or done == total):
                sys.stdout.write(f"{kind}: {done} of {total} seeds, {said}\n")

        yield write
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(kind, total=total, said="")
        yield lambda done, said: progress.update(task, completed=done, said=said)
