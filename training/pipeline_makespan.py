"""The time of a step, fast: what the search for routes asks millions of times.

Under TC1 (pipeline_rules.py) no forward waits for a slot, and first come, first served makes an operation's begin known
when it arrives. So a lane is one number, when its microbatch arrives at its next hop, and the simulation is a heap of
lanes: one step per operation, no ready lists. Given a limit it stops as soon as some lane cannot keep it even without any
further waiting; the search rejects six proposals of seven, most of them that way.

The result is `simulate(plan, costs).makespan_s` to the bit, in Python and in C (pipeline_makespan.c, used once
`kernels.prepare` has run). So plans are the same with and without a compiler; what differs is how many proposals fit in a
second of the search, moves included: 9 000 and 50 000 for the reference network (270 operations per step).
"""

import ctypes
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from farflung.compression import kernels
from farflung.training.pipeline_costs import Costs

_SLACK = 1e-9
"""Relative: sums in another order differ by less, so only steps that are over the limit for certain stop early."""


class _Step(NamedTuple):
    peer: int
    seconds: float
    transmit_s: float
    """To the peer of the next step; -1 when that is the same one."""
    latency_s: float
    rest_s: float
    """From the end of this operation to the return of the microbatch, without any waiting."""


class Makespan:
    """Steps of one network: routes change, one lane at a time; the number of hops does not."""

    def __init__(self, costs: Costs, counts: Sequence[int], hops: int) -> None:
        """`counts`: microbatches of every lane, at least 1; `hops`: of every route. Routes are put before `seconds`."""
        assert hops and counts and min(counts) >= 1
        self._costs = costs
        self._counts = np.array(counts, dtype=np.int32)
        self._hops = hops
        self._routes = np.zeros((len(counts), hops), dtype=np.int32)  # stage * peers + peer
        self._steps: list[list[_Step]] = [[] for _ in counts]
        integer, real, pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
        types = (integer, integer, integer, *(pointer,) * 5, *(real,) * 3, integer, *(pointer,) * 3, real)
        self._native = kernels.find("pipeline_makespan", *types)
        if self._native is not None:
            tables = [
                np.array(table, dtype=np.float64) for table in (costs.forward_s, costs.transmit_s, costs.latency_s)
            ]
            lanes, peers = len(counts), costs.num_peers
            work = np.zeros(2 * peers + lanes + lanes * (2 * hops + 1), dtype=np.float64)
            places = np.zeros(3 * lanes, dtype=np.int32)
            self._result = np.zeros(1, dtype=np.float64)
            self._kept = (*tables, work, places)  # C has their addresses
            arrays = (self._routes.ctypes.data, self._counts.ctypes.data, *(table.ctypes.data for table in tables))
            factors = (costs.backward, costs.loss, costs.pause_s, int(costs.shared_uplinks))
            self._arguments = (lanes, hops, peers, *arrays, *factors, work.ctypes.data, places.ctypes.data)
            self._arguments += (self._result.ctypes.data,)

    def put(self, lane: int, stages: Sequence[int], peers: Sequence[int]) -> None:
        """The lane takes this route from now on."""
        num_peers = self._costs.num_peers
        if self._native is None:
            self._steps[lane] = self._unrolled(stages, peers)
        else:
            self._routes[lane] = [stage * num_peers + peer for stage, peer in zip(stages, peers, strict=True)]

    def seconds(self, limit: float = inf) -> float:
        """When the last microbatch has returned; infinity if that is after `limit`."""
        if self._native is None:
            return self._seconds(limit)
        self._native(*self._arguments, limit)
        return float(self._result[0])

    def _unrolled(self, stages: Sequence[int], peers: Sequence[int]) -> list[_Step]:
        costs, home = self._costs, peers[0]
        forward = [costs.forward_s[stage][peer] for stage, peer in zip(stages, peers, strict=True)]
        where = list(chain(peers, [home], reversed(peers)))
        seconds = [*forward, costs.loss * forward[0], *(costs.backward * one for one in reversed(forward))]
        steps: list[_Step] = []
        rest = 0.0
        for at in reversed(range(len(where))):
            sender = where[at]
            receiver = where[at + 1] if at + 1 < len(where) else sender
            if at + 1 < len(where):
                rest += seconds[at + 1] + costs.message_s(sender, receiver)
            local = sender == receiver
            transmit = -1.0 if local else costs.transmit_s[sender][receiver]
            steps.append(_Step(sender, seconds[at], transmit, costs.latency_s[sender][receiver], rest))
        steps.reverse()
        return steps

    def _seconds(self, limit: float) -> float:
        free = [0.0] * self._costs.num_peers
        uplink = [0.0] * self._costs.num_peers
        pause, shared, steps = self._costs.pause_s, self._costs.shared_uplinks, self._steps
        left = self._counts.tolist()
        place = [0] * len(left)
        rounds = [one[0].seconds + one[0].rest_s for one in steps]
        stop = limit + _SLACK * limit
        end = 0.0
        heap = [(0.0, lane) for lane in range(len(left))]
        heapify(heap)
        while heap[0][0] < inf:
            arrived, lane = heap[0]
            at = place[lane]
            peer, seconds, transmit, latency, rest = steps[lane][at]
            now = (arrived if arrived > free[peer] else free[peer]) + seconds
            if now + rest + (left[lane] - 1) * rounds[lane] > stop:
                return inf
            free[peer] = now + pause
            if at == 2 * self._hops:
                place[lane] = 0
                left[lane] -= 1
                end = max(end, now)
                heapreplace(heap, (now if left[lane] else inf, lane))
                continue
            place[lane] = at + 1
            arrival = now
            if transmit >= 0.0:
                leaves = uplink[peer] if shared and uplink[peer] > now else now
                uplink[peer] = leaves + transmit
                arrival = uplink[peer] + latency
            heapreplace(heap, (arrival, lane))
        return end if end <= limit else inf
