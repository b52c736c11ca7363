"""What may run where, now: the state machine that both the simulator and an executor drive. It knows no time.

The caller tells it what has arrived (`arrive`), asks what a peer does next (`start`), asks what waits for that
(`follow`, which also binds the peer of a hop that the plan left open), and reports its end (`finish`). A forward takes one
of its peer's slots and waits for one; the backward, or W, gives it back and never waits.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from farflung.training.pipeline_plan import Kind, Op, Plan, Policy, after

Bind = Callable[[int, float], int]
"""(stage, when the message leaves) -> peer, for hops without one."""

_RANK = {
    Policy.ARRIVAL: dict.fromkeys(Kind, 0),
    Policy.BACKWARD: {Kind.LOSS: 0, Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2},
    Policy.PROGRAM: dict.fromkeys(Kind, 0),
}

_Ready = list[tuple[int, float, int, Op]]
"""A heap of (rank, arrived, lane, op): ties in time go to the lower lane, on every machine."""


class Machine:
    """One run of one valid plan."""

    def __init__(self, plan: Plan, bind: Bind | None = None) -> None:
        self.plan = plan
        self._bind = bind
        self._schedule = plan.schedule()
        self._number = {turn: number for number, turn in enumerate(self._schedule)}
        self._peer = [[hop.peer for hop in plan.lanes[lane].route] for lane, _ in self._schedule]
        self._rank = _RANK[plan.policy]
        self._free = list(plan.slots)
        self._forwards: list[_Ready] = [[] for _ in plan.peers]
        self._others: list[_Ready] = [[] for _ in plan.peers]
        self._arrived: set[Op] = set()
        self._position = [0] * len(plan.peers)

    def begin(self) -> list[Op]:
        """The first forward of every lane: they arrive before anything else."""
        return [Op(Kind.F, self._number[lane, 0], 0) for lane, one in enumerate(self.plan.lanes) if one.microbatches]

    def lane(self, op: Op) -> int:
        return self._schedule[op.microbatch][0]

    def stage(self, op: Op) -> int:
        return self.plan.lanes[self.lane(op)].route[op.hop].stage

    def peer(self, op: Op) -> int:
        """Who does `op`; a hop that the plan leaves open has a peer once `follow` has said its forward."""
        peer = self._peer[op.microbatch][op.hop]
        assert peer is not None, f"{op} is not bound yet"
        return peer

    def arrive(self, op: Op, now: float = 0.0) -> None:
        """All that `op` needs is at its peer."""
        peer = self.peer(op)
        if self.plan.policy is Policy.PROGRAM:
            self._arrived.add(op)
        else:
            ready = self._forwards if op.kind is Kind.F else self._others
            heappush(ready[peer], (self._rank[op.kind], now, self.lane(op), op))

    def start(self, peer: int) -> Op | None:
        """What the peer does now, which then counts as begun; None when it has to wait."""
        op = self._next_of_program(peer) if self.plan.policy is Policy.PROGRAM else self._best(peer)
        if op is not None and op.kind is Kind.F:
            self._free[peer] -= 1
        return op

    def follow(self, op: Op, now: float = 0.0) -> list[Op]:
        """What `op`, which was started, makes ready when it ends."""
        lane, turn = self._schedule[op.microbatch]
        hops = len(self.plan.lanes[lane].route)
        ops = after(self.plan, hops, op)
        for follower in ops:
            if follower.kind is Kind.F and self._peer[op.microbatch][follower.hop] is None:
                assert self._bind is not None, "a plan with open hops needs somebody who binds them"
                self._peer[op.microbatch][follower.hop] = self._bind(self.stage(follower), now)
        returned = op.hop == 0 and op.kind in (Kind.B, Kind.I)
        if returned and turn + 1 < self.plan.lanes[lane].microbatches:
            ops.append(Op(Kind.F, self._number[lane, turn + 1], 0))
        return ops

    def finish(self, op: Op) -> None:
        if op.kind in (Kind.B, Kind.W):
            self._free[self.peer(op)] += 1

    def waiting(self) -> list[Op]:
        """What has arrived and was not started: empty at the end of a whole run."""
        heaps = [entry[-1] for ready in (self._forwards, self._others) for heap in ready for entry in heap]
        return sorted([*heaps, *self._arrived])

    def _best(self, peer: int) -> Op | None:
        forwards, others = self._forwards[peer], self._others[peer]
        if forwards and self._free[peer] and (not others or forwards[0] < others[0]):
            return heappop(forwards)[-1]
        return heappop(others)[-1] if others else None

    def _next_of_program(self, peer: int) -> Op | None:
        assert self.plan.program is not None
        ops, at = self.plan.program.get(peer, ()), self._position[peer]
        if at == len(ops) or ops[at] not in self._arrived or (ops[at].kind is Kind.F and not self._free[peer]):
            return None
        self._position[peer] += 1
        self._arrived.remove(ops[at])
        return ops[at]


def drive(machine: Machine, perform: Callable[[Op], None]) -> int:
    """Run to the end without a clock, peer after peer, one operation each; returns how many were performed."""
    for op in machine.begin():
        machine.arrive(op)
    performed, before = 0, -1
    while performed > before:
        before = performed
        for peer in range(len(machine.plan.peers)):
            began = machine.start(peer)
            if began is None:
                continue
            perform(began)
            followers = machine.follow(began)
            machine.finish(began)
            for follower in followers:
                machine.arrive(follower)
            performed += 1
    return performed
