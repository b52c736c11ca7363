"""One worker that trains alone, as the demo's yardstick: the swarm's own recipe, data and learning rates, and no swarm.

The worker is this module as a program (`python -m farflung.sims.solo MANIFEST ...`): it prints one JSON line per evaluation. It
takes the samples from `--first` on, one step's worth after the other, for the number of steps that a peer of the swarm did.
Its loss is that of its own parameters on the text that the swarm is evaluated on.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from farflung.node.learner import SwarmLearner
from farflung.node.recipe import Recipe, read_recipe, swarm_dataset, swarm_tokenizer
from farflung.protocol.errors import LocalError
from farflung.protocol.manifest import open_manifest
from farflung.sims.facts import SoloPoint
from farflung.sims.orphans import leave_with_parent
from farflung.training.runtime import Runtime


def open_learner(manifest_file: Path) -> tuple[Recipe, SwarmLearner]:
    """The recipe of a signed manifest on disk, and a fresh learner on the CPU."""
    recipe = read_recipe(open_manifest(manifest_file.read_bytes(), swarm=None, peer=None))
    tokenizer = swarm_tokenizer(recipe.manifest, manifest_file.with_name("tokenizer.json"))
    return recipe, recipe.learner(swarm_dataset(recipe.manifest, tokenizer), Runtime())


def evaluate_local(learner: SwarmLearner) -> float:
    """Held-out loss of the parameters being trained, nats per token."""
    outer, replica = learner.outer.params, learner.replica
    kept = outer.clone()
    outer.sub_(replica.pseudo_gradient())  # outer - (outer - local); rounding is far below the loss
    try:
        return learner.evaluate()
    finally:
        outer.copy_(kept)


class SoloFailed(LocalError):
    """A worker that trained alone ended early, or is stuck."""


SILENT_S = 180.0
"""Between two evaluations of a worker: beside a busy swarm they take some ten seconds."""


async def train_alone(
    manifest: Path,
    recipe: Recipe,
    evaluate_every: int,  # steps
    enough: Callable[[], int],  # steps after which a worker may end early; 0 while that is not known
    *,
    into: list[list[SoloPoint]],  # a list for each worker, which grows as it goes
) -> None:
    """Workers in processes of their own, each on samples of its own, through the manifest's schedule.

    Raises SoloFailed.
    """
    steps = recipe.manifest.total_steps
    span = steps * recipe.manifest.samples_per_step
    async with asyncio.TaskGroup() as tasks:
        for number, points in enumerate(into):
            tasks.create_task(_worker(manifest, number * span, steps, evaluate_every, enough, points))


def best_run(runs: list[list[SoloPoint]], steps: int) -> list[SoloPoint]:
    """The better run, up to the first evaluation after at least `steps` steps."""
    until = [[p for p in points if p.step < steps] for points in runs]
    fair = [before + points[len(before) : len(before) + 1] for before, points in zip(until, runs, strict=True)]
    return min(fair, key=lambda points: points[-1].loss)


async def _worker(
    manifest: Path, first: int, steps: int, evaluate_every: int, enough: Callable[[], int], points: list[SoloPoint]
) -> None:
    words = ["--first", str(first), "--steps", str(steps), "--evaluate-every", str(evaluate_every)]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-P", "-m", "farflung.sims.solo", str(manifest), *words],
        stdin=asyncio.subprocess.PIPE,  # closes with us: it looks at that
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        while line := await _line(process, points):
            points.append(msgspec.json.decode(line, type=SoloPoint))
            if 0 < enough() <= points[-1].step:
                return
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status != 0:
        raise SoloFailed(f"a worker that trained alone ended with status {status}")


async def _line(process: asyncio.subprocess.Process, points: Sequence[SoloPoint]) -> bytes:
    """What a worker says next; empty at its end."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SILENT_S):
            return await process.stdout.readline()
    except TimeoutError as error:
        step = points[-1].step if points else 0
        raise SoloFailed(
            f"a worker that trains alone has said nothing for {SILENT_S:g} s, since step {step}"
        ) from error


def main() -> None:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=Path, help="signed manifest of the swarm")
    parser.add_argument("--first", type=int, required=True, help="number of the first sample")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, required=True, help="steps between two evaluations")
    asked = parser.parse_args()
    leave_with_parent()
    torch.set_num_threads(1)
    recipe, learner = open_learner(asked.manifest)
    per_step, seq_len = recipe.manifest.samples_per_step, recipe.manifest.model.seq_len
    began = time.monotonic()
    for step in range(asked.steps):
        first = asked.first + step * per_step
        learner.train(range(first, first + per_step), step)
        done = step + 1
        if done % asked.evaluate_every == 0 or done == asked.steps:
            seconds = round(time.monotonic() - began, 2)
            point = SoloPoint(done, done * per_step * seq_len, seconds, evaluate_local(learner))
            sys.stdout.write(msgspec.json.encode(point).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
