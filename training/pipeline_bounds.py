"""How short a step can be at best, whatever the routes: what the gap of a plan is measured against.

All bounds hold for every schedule of lanes under TC1, with any order at the peers. A lane's route is relaxed to a closed walk:
from a data node over v - 1 other peers and back, where consecutive peers are in stages that may follow each other. e(i, j) is a
message there and one back; the walk's time is F + B of its peers, the loss, and e of its edges. Then the step lasts at
least as long as the largest of

    rounds   the shortest walk, so often as the fullest lane has microbatches
    work     of a stage that all lanes visit: F + B of all microbatches, shared by its peers (here: stage 0, with the loss)
    forced   if the slots are so few that somebody must go through peer p: the shortest walk through p, for the slowest p,
             so often as the emptiest lane has microbatches
    prices   the mean over lanes of their walks, under the limit that each peer is on at most `slots` of them. For any
             prices >= 0 per peer: sum over lanes of min over walks (time + prices on it) - sum of prices x slots is at
             most the total (Lagrange); a subgradient ascent finds good prices, and any would be valid.

To the last, the wait for one's first turn at the data node is added: k lanes of one data node begin one after another.
Messages never wait in these bounds, nor do operations but for that turn, so bounds stay below what can be reached.
With `any_assignment` every peer may hold every stage: the bound then holds for any assignment of the peers to as large stages
that lets as many lanes run, and is weaker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.training.pipeline_routes import Task, most_lanes

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Seconds; each is a lower bound by itself."""

    rounds_s: float
    work_s: float
    forced_s: float
    prices_s: float

    @property
    def best_s(self) -> float:
        return max(self.rounds_s, self.work_s, self.forced_s, self.prices_s)


def lower_bounds(
    task: Task, stages: Sequence[Sequence[int]], *, any_assignment: bool = False, ascents: int = 200
) -> Bounds:
    """`stages` also tells how many peers each stage has, where `any_assignment` frees the peers to hold any of them."""
    walks = _Walks(task, None if any_assignment else stages)
    lanes = most_lanes(task, stages)
    each, more = divmod(task.num_microbatches, lanes)
    counts = [(each + 1, more), (each, lanes - more)]
    shortest = float(walks.closed(1.0, np.zeros(len(task.peers))).min())
    return Bounds(
        rounds_s=shortest * (each + (more > 0)),
        work_s=walks.home_work() * task.num_microbatches / len(stages[0]),
        forced_s=each * _forced(walks, task, stages, lanes, any_assignment),
        prices_s=_prices(walks, task, counts, ascents) + _turns(walks, lanes, len(stages[0])),
    )


class _Walks:
    """Shortest closed walks, by dynamic programming over the number of hops."""

    def __init__(self, task: Task, stages: Sequence[Sequence[int]] | None) -> None:
        costs, rules = task.costs, task.rules
        peers = range(costs.num_peers)
        forward = np.array(costs.forward_s)
        message = np.array([[costs.message_s(a, b) for b in peers] for a in peers])
        self.edge: Array = message + message.T
        np.fill_diagonal(self.edge, np.inf)
        self.pause = costs.pause_s
        self.visits = rules.visits
        both = 1.0 + costs.backward
        if stages is None:
            self.homes = np.arange(costs.num_peers)
            self.first: Array = forward[0]
            self.node: Array = both * forward[1:].min(axis=0) if len(forward) > 1 else np.full(costs.num_peers, np.inf)
            self.step = self.edge
        else:
            held = np.full(costs.num_peers, -1)
            for stage, members in enumerate(stages):
                held[list(members)] = stage
            self.homes = np.flatnonzero(held == 0)
            self.first = forward[0]
            self.node = np.where(held > 0, both * forward[held, np.arange(len(held))], np.inf)
            ahead = held[None, :] - held[:, None]
            may = ((ahead > 0) & (ahead <= rules.max_jump + rules.max_swap)) | (
                (ahead < 0) & (-ahead <= rules.max_swap)
            )
            self.step = np.where(may, self.edge, np.inf)
        self.home: Array = (both + costs.loss) * self.first[self.homes]

    def home_work(self) -> float:
        """F, LOSS and B of one microbatch at the fastest data node."""
        return float(self.home.min())

    def legs(self, count: float, prices: Array) -> list[Array]:
        """[hops][home, peer]: from the home to the peer in so many hops, the peer's own work and price included."""
        node = count * self.node + prices
        start = (count * self.home + prices[self.homes])[:, None]
        legs = [start + count * self.edge[self.homes] + node]
        for _ in range(self.visits - 2):
            legs.append((legs[-1][:, :, None] + count * self.step).min(axis=1) + node)
        return legs

    def closed(self, count: float, prices: Array) -> Array:
        """[home]: the cheapest closed walk; `count` times its time, plus its prices."""
        if self.visits == 1:
            return count * self.home + prices[self.homes]
        closed: Array = (self.legs(count, prices)[-1] + count * self.edge[self.homes]).min(axis=1)
        return closed

    def through(self) -> Array:
        """[peer]: the shortest closed walk with this peer in it."""
        shortest = np.full(len(self.node), np.inf)
        shortest[self.homes] = self.closed(1.0, np.zeros(len(self.node)))
        if self.visits == 1:
            return shortest
        there = self.legs(1.0, np.zeros(len(self.node)))
        back = [self.edge[self.homes].T]  # [peer, home], after the peer's own work
        for _ in range(self.visits - 2):
            back.append((self.step[:, :, None] + self.node[None, :, None] + back[-1][None, :, :]).min(axis=1))
        for hops, leg in enumerate(there):
            shortest = np.minimum(shortest, (leg.T + back[self.visits - 2 - hops]).min(axis=1))
        return shortest

    def cheapest(self, count: float, prices: Array) -> tuple[float, Array]:
        """The cheapest closed walk and how often each peer is on it."""
        uses = np.zeros(len(prices))
        if self.visits == 1:
            totals = count * self.home + prices[self.homes]
            uses[self.homes[totals.argmin()]] = 1.0
            return float(totals.min()), uses
        legs = self.legs(count, prices)
        ends = legs[-1] + count * self.edge[self.homes]
        home, peer = np.unravel_index(int(ends.argmin()), ends.shape)
        uses[self.homes[home]] += 1.0
        uses[peer] += 1.0
        for leg in reversed(legs[:-1]):
            peer = (leg[home] + count * self.step[:, peer]).argmin()
            uses[peer] += 1.0
        return float(ends.min()), uses


def _forced(walks: _Walks, task: Task, stages: Sequence[Sequence[int]], lanes: int, any_assignment: bool) -> float:
    """The longest of the shortest walks through peers that some lane must visit."""
    through = walks.through()
    slots = np.array(task.slots, dtype=np.float64)
    held = [peer for stage in stages for peer in stage]
    if any_assignment:
        forced = [peer for peer in held if slots[peer] > slots[held].sum() - lanes * walks.visits]
    else:
        homes, others = list(stages[0]), [peer for stage in stages[1:] for peer in stage]
        forced = [peer for peer in homes if slots[peer] > slots[homes].sum() - lanes]
        forced += [peer for peer in others if slots[peer] > slots[others].sum() - lanes * (walks.visits - 1)]
    return float(max((through[peer] for peer in forced), default=0.0))


def _prices(walks: _Walks, task: Task, counts: Sequence[tuple[int, int]], ascents: int) -> float:
    """The best bound on the mean of the lanes that the ascent finds."""
    slots = np.array(task.slots, dtype=np.float64)
    lanes = sum(number for _, number in counts)
    prices = np.zeros(len(slots))
    best = 0.0
    scale = float(walks.closed(1.0, prices).min())
    for ascent in range(ascents):
        total, used = -float(prices @ slots), -slots
        for count, number in counts:
            if number:
                value, uses = walks.cheapest(float(count), prices)
                total += number * value
                used = used + number * uses
        best = max(best, total / lanes)
        size = 0.5 * scale / (1.0 + 0.1 * ascent)
        prices = np.maximum(0.0, prices + size * used / float(np.abs(used).max() or 1.0))
    return best


def _turns(walks: _Walks, lanes: int, homes: int) -> float:
    """Mean wait of a lane for its first forward: lanes spread evenly over the data nodes wait the least."""
    fewest, more = divmod(lanes, homes)
    pairs = (homes - more) * fewest * (fewest - 1) / 2 + more * (fewest + 1) * fewest / 2
    return pairs * (float(walks.first[walks.homes].min()) + walks.pause) / lanes
