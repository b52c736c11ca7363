"""Held-out loss of a model of which some stages are left out: their layers do nothing, as in SkipPipe's routes that skip them (digest, 1.2).

A stage and a sequence at a time, like `stage_replica.pass_through`: the device never holds more than one stage, and the held-out samples travel
between them on the CPU. Stage 0 has the embedding and the head and cannot be left out.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from farflung.training.flat import Layout, unflatten
from farflung.training.inner import precision
from farflung.training.model import Decoder, ModelConfig, next_token_loss
from farflung.training.out_of_memory import no_room
from farflung.training.pipeline_slice import StageSlice
from farflung.training.pipeline_stages import Head
from farflung.training.runtime import Runtime
from farflung.training.stage_replica import EVALUATION, pass_through


def heldout_loss(
    config: ModelConfig,
    sizes: tuple[int, ...],  # layers of each stage
    stages: Mapping[int, Tensor],  # parameters of each, fp32 [n]
    tokens: Tensor,  # int64 [k, seq_len + 1]
    left_out: Collection[int],  # stages, not 0
    runtime: Runtime,
) -> float:
    """Mean loss in nats per token."""
    assert 0 not in left_out, "stage 0 has the embedding"
    outputs = list(torch.split(tokens[:, :-1], 1))
    for stage in range(len(sizes)):
        if stage not in left_out:
            outputs = pass_through(config, StageSlice(sizes, stage), stages[stage], outputs, runtime)
    device, total = torch.device(runtime.device), 0.0
    with no_room(EVALUATION, device), torch.no_grad():
        ends = Decoder(config, seed=None, held=StageSlice(sizes, 0).holds).to(device)
        unflatten(Layout(ends), stages[0], list(ends.parameters()))
        head = Head(ends)
        for x, targets in zip(outputs, torch.split(tokens[:, 1:], 1), strict=True):
            with precision(device, runtime.autocast):
                logits = head(x.to(device))
            total += float(next_token_loss(logits, targets.to(device)))
    return total / tokens.shape[0]
