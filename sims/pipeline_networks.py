"""Networks that pipelines are planned for: SkipPipe's published ones, and random ones of volunteers.

The reference is the digest's section 1.5: twelve regions of one cloud, (latency in ms, GiB/s) for each pair, peers dealt
out to regions in turn. The released table has NL-London at 0.000237 GiB/s, a hundredth of what CheckFree's copy of it
says; here it is corrected, since a link that nobody would use makes cost-blind baselines look absurd.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.training.pipeline_costs import Costs

REGIONS = (
    "Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "NL", "Oregon", "Singapore", "Taiwan", "London", "Australia",
)  # fmt: skip
_LINKS = """
41/.0199 4/.2425 49/.0283 112/.0117 70/.0194 3/.2425 66/.0209 83/.0161 105/.0125 3.5/.2425 129/.0098
44/.0319 14/.0757 74/.0181 35/.0305 42/.0250 30.5/.0471 107/.0119 89/.0147 38.5/.0364 98/.0132
53.5/.0266 112/.0111 73/.0182 3.5/.2425 68/.0149 80/.0125 102/.0126 6.6/.1888 125.5/.0105
72.5/.0140 23.4/.0615 51/.0274 19.3/.0903 101.5/.0126 88/.0128 48.1/.0219 84/.0112
50/.0278 108.5/.0114 46.2/.0305 35.6/.0390 19.2/.0767 107/.0089 58/.0138
71.5/.0143 12.4/.1185 79.5/.0168 64/.0162 68/.0149 69/.0146
67/.0204 81.5/.0164 105.5/.0120 4.8/.02368 128/.0095
78.5/.0168 59.5/.0233 64/.0212 68/.0146
23.2/.0619 85/.0157 48/.0298
109.5/.0090 67/.0210
132/.0094
"""
"""Row i: region i to regions i + 1, ...; latency in ms / GiB per second."""
_SAME_REGION = (1.0, 2.0)
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


def _regions() -> tuple[list[list[float]], list[list[float]]]:
    """Latency in seconds and bytes per second between all regions."""
    count = len(REGIONS)
    latency = [[_SAME_REGION[0] / 1000.0] * count for _ in range(count)]
    rate = [[_SAME_REGION[1] * 2.0**30] * count for _ in range(count)]
    for one, line in enumerate(_LINKS.split("\n")[1:-1]):
        for offset, pair in enumerate(line.split(), start=1):
            ms, gib = map(float, pair.split("/"))
            other = one + offset
            latency[one][other] = latency[other][one] = ms / 1000.0
            rate[one][other] = rate[other][one] = gib * 2.0**30
    return latency, rate


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
    latency, rate = _regions()
    region = [peer % len(REGIONS) for peer in range(num_peers)]
    return Network(
        name=name,
        peers=tuple(f"{REGIONS[where]} {peer}" for peer, where in enumerate(region)),
        latency_s=tuple(tuple(latency[a][b] + _OVERHEAD_S for b in region) for a in region),
        transmit_s=tuple(tuple(message_bytes / rate[a][b] for b in region) for a in region),
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


def volunteers(num_peers: int, *, seed: int) -> Network:
    """Random homes: uplinks of 20 to 200 Mbit/s, 5 to 130 ms apart, a factor of four in speed and in memory.

    Six stages up to 50 peers and eight beyond, a third or a quarter of them skipped; a message is 8.4 MB, int8. Uplinks
    and speeds are log-uniform; latency grows with the distance of two random points in a square.
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
        transmit_s=tuple(tuple(1024 * 1024 * 8 / uplink[a] for _ in everybody) for a in everybody),
        layer_s=tuple(_LAYER_SAMPLE_S * 8 / one for one in speed),
        max_layers=tuple(int(4 * 4.0 ** rng.random()) for _ in everybody),
        num_stages=num_stages,
        num_layers=4 * num_stages,
        visits=visits,
        num_microbatches=6 * homes,
    )
