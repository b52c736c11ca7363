"""Seeds by the hundred: what commands that soak (`chaos`, `chaos_pipeline`) have in common.

Every so often a seed is run twice, the second time by another process, so that what depends on Python's hash seed differs: another log is a violation.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from farflung.sims.simulation import Report

R = TypeVar("R", bound=Report)

MOST_TOLD = 5
"""Violations of one seed that are printed."""


def run_seeds(
    seeds: Sequence[int], *, jobs: int, run: Callable[[int], R], repeat_every: int = 0
) -> Iterator[tuple[R, bool]]:
    """The report of each seed, in order, and whether it was run twice: every `repeat_every`-th is, 0 for none."""
    repeated = seeds[::repeat_every] if repeat_every else ()
    fresh = get_context("spawn")  # a fork would have its parent's hash seed
    with ProcessPoolExecutor(jobs, mp_context=fresh) as pool, ProcessPoolExecutor(1, mp_context=fresh) as other:
        again = {seed: other.submit(run, seed) for seed in repeated}
        for report in map(run, seeds) if len(seeds) == 1 else pool.map(run, seeds):
            second = again.pop(report.seed, None)
            if second is not None and (log := second.result().log_sha256) != report.log_sha256:
                report.violations.append(
                    f"seed {report.seed} run twice gave two logs: sha256 {report.log_sha256} and {log}"
                )
            yield report, second is not None


def soak(description: str | None, run: Callable[[int], R], told: Callable[[R], str]) -> None:
    """The command: runs the seeds that it is asked for, says of each what `told` does, and exits with 1 if any of them broke an invariant."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--events", action="store_true", help="print the event log")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--twice", action="store_true", help="run each seed twice: its log has to be the same")
    parser.add_argument("--repeat-every", type=int, default=0, metavar="N", help="run every N-th seed twice")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else list(range(args.first, args.first + args.seeds))
    failed = 0
    for report, twice in run_seeds(seeds, jobs=args.jobs, run=run, repeat_every=1 if args.twice else args.repeat_every):
        if args.events:
            sys.stdout.write("\n".join(report.schedule + report.events) + "\n")
        verdict = "ok" if not report.violations else "VIOLATED"
        sys.stdout.write(f"seed {report.seed:4d}: {told(report)}, {verdict}{', twice' if twice else ''}\n")
        for violation in report.violations[:MOST_TOLD]:
            sys.stdout.write(f"    {violation}\n")
        failed += bool(report.violations)
        sys.stdout.flush()
    sys.stdout.write(f"{len(seeds) - failed} passed, {failed} failed\n")
    sys.exit(1 if failed else 0)
