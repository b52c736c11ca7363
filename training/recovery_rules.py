"""What the parameters of a lost stage can be made of, when nobody has a copy: pure functions of stage vectors.

A stage's vector is the flat fp32 vector of its layers' parameters (`flat.Layout`); embedding, final norm and head are
not part of it. Stages have equally many layers, so element k of one is element k of every other.

    weighted_mean   W_i = (w_{i-1} W_{i-1} + w_{i+1} W_{i+1}) / (w_{i-1} + w_{i+1}),  w a stage's gradient norm
    interpolated    linear in the stage's index between the nearest survivors; a copy where they are on one side only
    drawn           new initial weights

Source: CheckFree (2506.15461; pipeline digest, 2.2 and 2.7), whose printed algorithm has w_{i-1} in both terms, a
slip. The neighbour that is still changing more gets more weight, so that the new stage takes over part of its work.
CheckFree has no rule for two adjacent stages at once; there the mean's neighbours are lost, and interpolation takes
the nearest stages that are not.

Everything is elementwise on the CPU with one rounding per operation, so all peers that compute a stage get the same
bits. A new stage begins with fresh moments of its optimiser whatever the rule: moments of other parameters would
mislead it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from farflung.training.errors import Unrecoverable
from farflung.training.flat import Layout
from farflung.training.model import Layer, ModelConfig, draw_

NORM_FLOOR = 1e-4
"""Added to both norms, as the authors' code does: two stages without a gradient are averaged evenly."""


def weighted_mean(
    before: Tensor,  # fp32 [n], stage i - 1
    after: Tensor,  # fp32 [n], stage i + 1
    before_norm: float | None,  # gradient norms of those stages, before clipping
    after_norm: float | None,
) -> Tensor:
    """CheckFree's stage i, fp32 [n]. Raises Unrecoverable when the stages have different sizes.

    Evenly where a norm is not known: a stage that has just come back, and taken no step yet, is no worse for that.
    """
    check_sizes([before, after])
    if before_norm is None or after_norm is None:
        before_norm = after_norm = 0.0
    total = (before_norm + NORM_FLOOR) + (after_norm + NORM_FLOOR)
    mean = before.mul((before_norm + NORM_FLOOR) / total)
    return mean.add_(after.mul((after_norm + NORM_FLOOR) / total))


def interpolated(
    survivors: Mapping[int, Tensor],  # fp32 [n] by stage
    stage: int,
) -> Tensor:
    """Linear in the index between the nearest survivors, fp32 [n]. Raises Unrecoverable when there are none."""
    check_sizes(survivors.values())
    below = max((other for other in survivors if other < stage), default=None)
    above = min((other for other in survivors if other > stage), default=None)
    if below is None and above is None:
        raise Unrecoverable(f"nothing is left to make stage {stage} of; draw it anew")
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None
        return survivors[nearest].clone()
    share = (stage - below) / (above - below)  # of the stage above
    return survivors[below].mul(1.0 - share).add_(survivors[above].mul(share))


def drawn(config: ModelConfig, layers: int, seed: int) -> Tensor:
    """Initial weights of so many layers of a model, fp32 [n]; the same bits for a seed on every machine."""
    with torch.device("meta"):
        shapes = nn.ModuleList(Layer(config) for _ in range(layers))
    layout = Layout(shapes)
    vector = torch.empty(layout.num_parameters)
    generator = torch.Generator().manual_seed(seed)
    for name, view in layout.views(vector).items():
        draw_(name, view, config.num_layers, generator)
    return vector


def check_sizes(vectors: Iterable[Tensor]) -> None:
    """Raise Unrecoverable unless all vectors have one length."""
    sizes = {vector.numel() for vector in vectors}
    if len(sizes) > 1:
        raise Unrecoverable(
            f"stages have {sorted(sizes)} parameters, so none can be made of others; cut the model evenly, or keep shadows"
        )
