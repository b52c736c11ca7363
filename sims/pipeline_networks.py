"""Networks that pipelines are planned for: SkipPipe's published ones, and random ones of volunteers.

The reference is the digest's section 1.5: the twelve regions of `regions`, peers dealt out to them in turn. Its link from
the Netherlands to London is the corrected one: with the released one, which nobody would use, cost-blind baselines look
absurd.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.sims import regions
from farflung.training.pipeline_costs import Costs

_HOME_BYTES_PER_S = 2.0 * 2**30
"""Within a region, where the table (`regions`) knows no limit."""
_OVERHEAD_S = 0.35
"""Per message: copies between CPU and GPU, serialisation (section 1.3)."""
_PAUSE_S = 0.13
"""Per operation (section 1.4, stage C)."""
_LAYER_SAMPLE_S = 0.055
"""Forward of one layer for one sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Peers before they have stages."""

    name: str
    peers: tuple[str, ...]
    latency_s: tuple[tuple[float, ...], ...]
    transmit_s: tuple[tuple[float, ...], ...]
    layer_s: tuple[float, ...]
    """Per peer: forward of one layer, one microbatch."""
    max_layers: tuple[int, ...]
    """Per peer: what its memory holds."""
    num_stages: int
    num_layers: int
    visits: int
    """Hops of a route that skips."""
    num_microbatches: int
    slots: int = 3
    """Activations that every peer holds."""
    pause_s: float = 0.0

    def costs(self, layers: Sequence[int]) -> Costs:
        """With stages of so many layers."""
        return Costs(
            forward_s=tuple(tuple(size * one for one in self.layer_s) for size in layers),
            latency_s=self.latency_s,
            transmit_s=self.transmit_s,
            pause_s=self.pause_s,
        )


def _clouds(
    name: str,
    *,
    num_peers: int,
    message_bytes: float,
    layer_s: float,
    num_stages: int,
    layers: int,
    visits: int,
    per_home: int,
    homes: int,
) -> Network:
    region = [regions.NAMES[peer % len(regions.NAMES)] for peer in range(num_peers)]
    links = [[regions.between(a, b) for b in region] for a in region]
    return Network(
        name=name,
        peers=tuple(f"{where} {peer}" for peer, where in enumerate(region)),
        latency_s=tuple(tuple(latency_s + _OVERHEAD_S for latency_s, _ in row) for row in links),
        transmit_s=tuple(tuple(message_bytes / min(rate, _HOME_BYTES_PER_S) for _, rate in row) for row in links),
        layer_s=(layer_s,) * num_peers,
        max_layers=(layers,) * num_peers,
        num_stages=num_stages,
        num_layers=num_stages * layers,
        visits=visits,
        num_microbatches=per_home * homes,
        pause_s=_PAUSE_S,
    )


def reference() -> Network:
    """20 peers, 6 stages of 4 layers, routes of 4 visits, 30 microbatches of 8 samples: 33.5 MB of fp32 per message."""
    return _clouds(
        "reference",
        num_peers=20,
        message_bytes=4 * 1024 * 1024 * 8,
        layer_s=_LAYER_SAMPLE_S * 8,
        num_stages=6,
        layers=4,
        visits=4,
        per_home=6,
        homes=5,
    )


def forty_two() -> Network:
    """42 peers, 8 stages of 3 layers, routes of 6 visits, microbatches of one sample, 16.8 MB. The published figure has 42
    locations whose table is not published, so the peers are in the twelve regions here, too."""
    return _clouds(
        "forty-two",
        num_peers=42,
        message_bytes=4 * 2048 * 2048,
        layer_s=_LAYER_SAMPLE_S,
        num_stages=8,
        layers=3,
        visits=6,
        per_home=6,
        homes=7,
    )


def volunteers(
    num_peers: int,
    *,
    seed: int,
    message_bytes: float = 1024 * 1024 * 8,  # int8
    layer_s: float = 8 * _LAYER_SAMPLE_S,  # forward of one layer, one microbatch, at medium speed
) -> Network:
    """Random homes: uplinks of 20 to 200 Mbit/s, 5 to 130 ms apart, a factor of four in speed and in memory.

    Six stages up to 50 peers and eight beyond, a third or a quarter of them skipped. Uplinks and speeds are log-uniform; latency
    grows with the distance of two random points in a square.
    """
    rng = random.Random(seed)
    num_stages, visits = (6, 4) if num_peers <= 50 else (8, 6)
    uplink = [20e6 / 8 * 10.0 ** rng.random() for _ in range(num_peers)]
    place = [(rng.random(), rng.random()) for _ in range(num_peers)]
    speed = [4.0 ** (rng.random() - 0.5) for _ in range(num_peers)]
    everybody = range(num_peers)

    def latency(a: int, b: int) -> float:
        distance = math.dist(place[a], place[b])
        return 0.005 + 0.125 * distance / math.sqrt(2.0)

    homes = round(num_peers / visits)
    return Network(
        name=f"volunteers {num_peers}",
        peers=tuple(f"peer {peer}" for peer in everybody),
        latency_s=tuple(tuple(latency(a, b) for b in everybody) for a in everybody),
        transmit_s=tuple(tuple(message_bytes / uplink[a] for _ in everybody) for a in everybody),
        layer_s=tuple(layer_s / one for one in speed),
        max_layers=tuple(int(4 * 4.0 ** rng.random()) for _ in everybody),
        num_stages=num_stages,
        num_layers=4 * num_stages,
        visits=visits,
        num_microbatches=6 * homes,
    )
