"""How fast a link must be for a method of training: compute utilisation against link speed, from a timetable alone.

Utilisation is the share of the time in which a peer computes. The model is that of Streaming DiLoCo (2501.18512; digest
section 1.5), which the paper describes as a simulation of the forward and backward passes of layers; its code is not
public, so what follows is a reading of its table:

    a step       s seconds: L layers forward (a third of s), the same L backward (two thirds)
    a message    one layer of the fragment that is due: SHARE N b / L bits; ready when the layer's backward pass ends
    the link     W bit/s each way at once, one message after another, in the order in which they are ready
    needed       before the layer's forward pass in the step after the tau steps of delay; until then compute stands

    utilisation = H s / (duration of H steps, once the pattern repeats)

So data-parallel training (H = 1) hides most of an exchange behind the backward pass, except for the first layer, whose
gradient is ready last; and fragments hide about half a step each without any delay. With SHARE = 1 the published
bandwidths come out within a point of their grid in 74 of 75 cases, with SHARE = 0.84 in all 75, and 67 of them exactly.
The paper does not say what the other 16 % would be.

What is left out, as in the paper: latency, the overhead of TCP, other traffic, peers that are slower than others. An
independent measurement of blocking rounds between 4 nodes over TCP took 1.08 to 1.92 times as long as such a model says
(digest section 2.9).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farflung.compression.policy import parse_policy
from farflung.compression.unreduced import MeanPolicy
from farflung.sims.quality_methods import Outer, Wire, by_names
from farflung.training.methods import LONG_RUN
from farflung.training.streaming import Timetable

SHARE = 0.84
"""Of the parameters that are exchanged: the module says why."""

FORWARD = 1 / 3
"""Of a step; the backward pass takes twice as long."""

PEERS = 2
"""As in the paper."""

BF16_BITS = 16.0
"""Bits per parameter of the published rows without a codec."""

Speeds = NDArray[np.float64]
"""Of the link, one way, in Gbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained."""

    name: str
    parameters: float
    layers: int
    step_s: float
    """Seconds of one inner step on one peer, all compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How it is exchanged."""

    name: str
    timetable: Timetable
    """Its fragments are the layers p, p + P, p + 2 P, ... (strided)."""
    bits: float
    """Per parameter and exchange, in the busier direction of a peer's link."""


def utilisation(
    model: Model,
    method: Method,
    speeds: Speeds,  # [n]
) -> Speeds:  # [n], in (0, 1]
    """Share of the time in which a peer computes, at each of the speeds."""
    table, layers = method.timetable, model.layers
    forward_s, backward_s = model.step_s * FORWARD / layers, model.step_s * (1 - FORWARD) / layers
    message_s = SHARE * model.parameters * method.bits / layers / (speeds * 1e9)
    now, link_free = np.zeros_like(speeds), np.zeros_like(speeds)
    needed: dict[int, dict[int, Speeds]] = {}  # step → layer → when its message has arrived
    ends: list[Speeds] = []
    for step in range(1, 3 * table.interval + 1):
        done = 0
        for layer, arrived in sorted(needed.pop(step, {}).items()):
            now = np.maximum(now + (layer - done) * forward_s, arrived)
            done = layer
        now = now + (layers - done) * forward_s
        due = {exchange.fragment for exchange in table.after(step).sends}
        left = layers
        for layer in reversed(range(layers)):
            if layer % table.fragments in due:
                now = now + (left - layer) * backward_s
                left = layer
                link_free = np.maximum(link_free, now) + message_s
                needed.setdefault(step + 1 + table.delay, {})[layer] = link_free
        now = now + left * backward_s
        if step % table.interval == 0:
            ends.append(now)
    # The first period begins with an idle link, later ones repeat. Only a link that is a little too slow falls behind so slowly that
    # compute has not met it yet; in the end no period is shorter than the link is busy.
    busy_s = layers * message_s
    return table.interval * model.step_s / np.maximum(ends[-1] - ends[-2], busy_s)


def needed_speed(
    speeds: Speeds,  # [n], rising
    reached: Speeds,  # [n], the utilisation at each
    threshold: float,
) -> float | None:
    """The first of the speeds at which the utilisation reaches the threshold; None when none does."""
    enough = np.flatnonzero(reached >= threshold - 1e-9)
    return float(speeds[enough[0]]) if len(enough) else None


def link_bits(
    wire: Wire,
    peers: int,
    parameters: int = 1 << 20,  # of the matrix that stands for a model; codecs add a header to each
) -> float:
    """Bits per parameter of one exchange in the busier direction of a peer's link, with the codecs' own headers.

    What codecs promise for Gaussian data; real pseudo-gradients take a little less (`compression.trellis`).
    """
    side = int(parameters**0.5)
    codec = MeanPolicy(*(parse_policy(spec).resolve([("matrix", (side, side))]) for spec in (wire.up, wire.down)))
    whole = codec.part(0, side * side)
    up, down = (8 * way.expected_nbytes(side * side) / side**2 for way in (whole.up, whole.down))
    if wire.topology != "butterfly":
        return (peers - 1) * up
    return (peers - 1) / peers * (up + (up if whole.leaves_unreduced(peers - 1, side * side) else down))


def our_methods(names: Sequence[str] = ("default", "thrifty")) -> list[Method]:
    """Our rows, as `farflung bench quality` has them for long runs, as those of such models are: with means as late as those whose loss it tells, and, as a swarm allows them on
    a slow link, until the next exchange."""
    methods = []
    for method in by_names(",".join(names), LONG_RUN):
        assert isinstance(method.outer, Outer)
        table, bits = method.outer.timetable, link_bits(method.outer.wire, PEERS)
        methods.append(Method(name=f"{method.name}, {table.delay} late", timetable=table, bits=bits))
        latest = replace(table, delay=table.interval // table.fragments - 1)
        methods.append(Method(name=method.name, timetable=latest, bits=bits))
    return methods
