"""What the ladder (`training/recovery_ladder.py`) is told of a stage: what the swarm has measured, at which speed somebody's bytes would arrive here, and who has
the stage's state already.

Bytes come as fast as the sender's uplink gives, which it tells, and no faster than our downlink takes. What our links have been seen to bring is a lower bound
of that: mostly the senders are slower. So it counts where the one that brought most could clearly have sent more (as in `protocol.partition.narrow`).
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from farflung.node.network import LinkStats, PeerId
from farflung.node.stage_recipe import StageRecipe
from farflung.protocol.keys import short
from farflung.protocol.partition import OFFERED
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.roll import Roll
from farflung.training.outer import BYTES_PER_ELEMENT
from farflung.training.pipeline_online import RATE_BYTES_PER_S, RECOMPUTED
from farflung.training.recovery_costs import Rung
from farflung.training.recovery_fit import Fit, Pair
from farflung.training.recovery_ladder import Loss, Offer

STEP_S = 10.0
"""Of the pipeline, while nobody has measured one."""


def data_nodes(roll: Roll, now: float) -> list[Present]:
    """What those that train say."""
    return roll.said_by(roll.training(0, now))


def loss_of(roll: Roll, recipe: StageRecipe, now: float) -> Loss:
    """The loss of a stage, or of a peer of it: by the medians of what the data nodes have measured; where there are none, of what the others have."""
    said = data_nodes(roll, now) or [
        one for stage in range(1, roll.stages) for peer in roll.training(stage, now) if (one := roll.present(peer))
    ]
    steps = [one.step_s for one in said if one.step_s > 0.0]
    losses = [one.losses_per_hour for one in said] or [roll.losses.per_hour]
    gone = {recipe.stage} | {stage for stage in range(roll.stages) if roll.holders(stage, now) is None}
    return Loss(
        stage=recipe.stage,
        iteration_s=median(steps) if steps else STEP_S,
        failures_per_hour=min(0.99, median(losses)),
        may_skip=0 not in gone and len(gone) <= roll.stages - recipe.pipeline.visits,
    )


def arrives(roll: Roll, links: Mapping[PeerId, LinkStats], sender: PeerId) -> float:
    """Bytes/s."""
    return min(_uplink(roll, sender) or RATE_BYTES_PER_S, _downlink(roll, links))


def fit_s(roll: Roll, recipe: StageRecipe, pairs: Sequence[Pair]) -> float:
    """What a fit takes: so many forwards and backwards of the tokens that are here, at the speed that peers of the pipeline know of theirs."""
    known = [said.forward_s for peer in roll.known if (said := roll.present(peer)) and said.forward_s]
    tokens = sum(x.shape[0] * x.shape[1] for x, _ in pairs)
    passes = Fit().steps * (1.0 + RECOMPUTED) * tokens / recipe.tokens_per_microbatch
    return passes * median(known) if known else 0.0


def grad_norm(roll: Roll, stage: int, now: float) -> float | None:
    """Of the gradient of a stage's layers: the median of what its peers know; None where nobody does."""
    said = [found for peer in roll.serving(stage, now) if (found := roll.present(peer))]
    norms = [one.grad_norm for one in said if one.grad_norm > 0.0]
    return median(norms) if norms else None


def replicas(roll: Roll, recipe: StageRecipe, links: Mapping[PeerId, LinkStats], now: float) -> list[Offer]:
    """Of a stage's state by peers that serve it: of the one that most of them have, and of older ones, from which it is caught up with."""
    held = roll.holders(recipe.stage, now)
    if held is None:
        return []
    newest, digest, _ = held
    by_version: dict[int, list[PeerId]] = {}
    for peer in roll.serving(recipe.stage, now):
        said = roll.present(peer)
        if said is not None and (said.digest == digest or (said.digest and said.version < newest)):
            by_version.setdefault(said.version, []).append(peer)
    return [
        Offer(
            rung=Rung.REPLICA if version == newest else Rung.BEHIND,
            holders=tuple(map(short, peers)),
            nbytes=BYTES_PER_ELEMENT * recipe.own.num_parameters,
            bytes_s=min(sum(arrives(roll, links, peer) for peer in peers), _downlink(roll, links)),
            steps_behind=(newest - version) * recipe.whole.manifest.laps.least,
        )
        for version, peers in sorted(by_version.items(), reverse=True)
    ]


def _uplink(roll: Roll, peer: PeerId) -> float:
    """As it tells; 0 while unknown."""
    said = roll.present(peer)
    return 0.0 if said is None else said.up_bytes_per_s


def _downlink(roll: Roll, links: Mapping[PeerId, LinkStats]) -> float:
    """Of ours; infinite where nothing shows a bound."""
    fastest = max(links, key=lambda peer: links[peer].down_bytes_per_s, default=None)
    if fastest is None or not (seen := links[fastest].down_bytes_per_s):
        return math.inf
    return seen if OFFERED * seen < _uplink(roll, fastest) else math.inf
