"""`farflung eval`: held-out loss and perplexity of the model that this machine has on its disk, whole and with stages left out.

What is left out is asked for as SkipPipe reports it (2505.18880, table of inference with skipped stages): certain stages, `2,4`, or a share of them,
`25%`, in every possible choice of so many. Stage 0 has the embedding and the head: no model is left without it.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import torch

from farflung.node.founding import data_spec
from farflung.node.kept_model import kept_model, runtime_beside
from farflung.node.learner import HELDOUT_SAMPLES
from farflung.node.options import EvalOptions
from farflung.node.paths import resolve_paths
from farflung.node.recipe import swarm_dataset, swarm_tokenizer
from farflung.node.swarmfiles import data_here, tokenizer_file
from farflung.protocol.errors import ConfigError
from farflung.training.left_out import heldout_loss

MOST_CHOICES = 70
"""Of one share: all those of half of eight stages. Of more, so many are drawn."""

Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one `--skip-stages` leaves out."""

    said: str
    choices: list[Choice]
    possible: int
    """Choices that there are; more than `choices` when these were drawn."""


def evaluate_swarm(options: EvalOptions) -> dict[str, Any]:
    """What `farflung eval --json` prints. Blocks. Raises ConfigError, LocalError."""
    swarm = resolve_paths(options.home).find_swarm(options.swarm)
    kept = kept_model(swarm)
    manifest, model = kept.recipe.manifest, kept.recipe.model
    asked = [read_choices(said, len(kept.sizes)) for said in options.skip_stages]
    runtime = runtime_beside(swarm, options.device, options.dtype)
    spec = data_here(swarm) if options.data is None else data_spec(options.data)
    dataset = swarm_dataset(manifest, swarm_tokenizer(manifest, tokenizer_file(swarm)), spec)
    tokens = torch.from_numpy(dataset.heldout(HELDOUT_SAMPLES)).long()

    def loss_without(left_out: Choice) -> float:
        return heldout_loss(model, kept.sizes, kept.stages, tokens, left_out, runtime)

    loss = loss_without(())
    rows = []
    for one in asked:
        perplexities = {choice: math.exp(loss_without(choice)) for choice in one.choices}
        mean = fmean(perplexities.values())
        rows.append(
            {
                "asked": one.said,
                "choices": [{"stages": choice, "perplexity": found} for choice, found in perplexities.items()],
                "possible": one.possible,
                "perplexity": mean,
                "least": min(perplexities.values()),
                "most": max(perplexities.values()),
                "increase_percent": 100.0 * (mean / math.exp(loss) - 1.0),
            }
        )
    return {
        "swarm": manifest.name,
        "version": kept.version,
        "stages": len(kept.sizes),
        "samples": tokens.shape[0],
        "tokens": tokens[:, 1:].numel(),
        "loss": loss,
        "perplexity": math.exp(loss),
        "left_out": rows,
    }


def read_choices(said: str, stages: int) -> Asked:
    """What `--skip-stages` means for a model of so many stages. Raises ConfigError."""
    if stages == 1:
        raise ConfigError(
            "--skip-stages: every peer of this swarm holds the whole model, there are no stages; leave it out"
        )
    if re.fullmatch(r"\d+(\.\d+)?%", said):
        number = round(stages * float(said[:-1]) / 100.0)
        if not 1 <= number < stages:
            raise ConfigError(
                f"--skip-stages {said}: that is {number} of {stages} stages, where 1 to {stages - 1} can be left out; one stage is "
                f"{100.0 / stages:.3g}%"
            )
        possible = math.comb(stages - 1, number)
        if possible <= MOST_CHOICES:
            return Asked(said, list(combinations(range(1, stages), number)), possible)
        return Asked(said, _draw(stages, number), possible)
    if not re.fullmatch(r"\d+(,\d+)*", said):
        raise ConfigError(f"--skip-stages {said!r}: give numbers of stages, as 2,4, or a share of them, as 25%")
    choice = sorted({int(number) for number in said.split(",")})
    if choice[0] == 0:
        raise ConfigError("--skip-stages: stage 0 has the embedding and the head and cannot be left out")
    if choice[-1] >= stages:
        raise ConfigError(
            f"--skip-stages {said}: this swarm has stages 0 to {stages - 1}; there is no stage {choice[-1]}"
        )
    return Asked(said, [tuple(choice)], 1)


def _draw(stages: int, number: int) -> list[Choice]:
    """So many different choices, the same every time."""
    rng, found = random.Random(number), set[Choice]()
    while len(found) < MOST_CHOICES:
        found.add(tuple(sorted(rng.sample(range(1, stages), number))))
    return sorted(found)


def told(figures: dict[str, Any]) -> list[str]:
    """The figures for people, a line each."""
    lines = [
        f"{figures['swarm']}, outer parameters after round {figures['version']}, on {figures['samples']} held-out sequences "
        f"({figures['tokens']:,} tokens)",
        f"  whole: loss {figures['loss']:.4f} nats per token, perplexity {figures['perplexity']:.3f}",
    ]
    for row in figures["left_out"]:
        lines.append(
            f"  without {_who(row)}: perplexity {row['perplexity']:.3f}{_spread(row)}, {row['increase_percent']:+.1f} %"
        )
    return lines


def _who(row: dict[str, Any]) -> str:
    choices: Sequence[Any] = row["choices"]
    if row["asked"].endswith("%"):
        chosen = (
            f"all {len(choices)} choices"
            if len(choices) == row["possible"]
            else f"{len(choices)} choices of {row['possible']:,}"
        )
        return f"{row['asked']} of the stages ({chosen})"
    stages = choices[0]["stages"]
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _spread(row: dict[str, Any]) -> str:
    return f" ({row['least']:.3f} to {row['most']:.3f})" if len(row["choices"]) > 1 else ""
