"""What may run where, now: the state machine that both the simulator and an executor drive. It knows no time.

The caller tells it what has arrived (`arrive`), asks what a peer does next (`start`), asks what waits for that
(`follow`, which also binds the peer of a hop that the plan left open), and reports its end (`finish`). A forward takes one
of its peer's slots and waits for one; the backward, or W, gives it back and never waits. A stage server (farflung.node) uses the part
that is about one peer, `Worklist`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from farflung.training.pipeline_plan import Kind, Op, Plan, Policy, after

Bind = Callable[[int, float], int]
"""(stage, when the message leaves) -> peer, for hops without one."""

_RANK = {
    Policy.ARRIVAL: dict.fromkeys(Kind, 0),
    Policy.BACKWARD: {Kind.LOSS: 0, Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2},
    Policy.PROGRAM: dict.fromkeys(Kind, 0),
}

_Entry = tuple[int, float, int, Op]
"""(rank, arrived, lane, op): ties in time go to the lower lane, on every machine."""


class Worklist:
    """What one peer has to do: its ready operations, its slots, and the order that a plan's policy gives them.

    A slot belongs to a (microbatch, hop): an operation that comes once more takes no second one. What a program does not list, or has
    listed already (where peers may die, others take over), is taken as soon as it is there, backward before forward.

    `guest` says of a (microbatch, hop) that the plan had another peer for it. Such hops bring as many slots along as the peer has of its own: by the plan
    these are full, and a lost peer's work would wait for them while the others wait for it.
    """

    def __init__(
        self,
        policy: Policy,
        slots: int,
        program: Sequence[Op] | None = None,
        guest: Callable[[int, int], bool] = lambda microbatch, hop: False,
    ) -> None:
        self._rank = _RANK[policy]
        self._slots = slots
        self._guest = guest
        self._holding: set[tuple[int, int]] = set()
        self._forwards: list[_Entry] = []
        self._others: list[_Entry] = []
        self._program = deque(program or ())
        self._to_come = set(self._program)
        self._arrived: set[Op] = set()

    def arrive(self, op: Op, now: float, lane: int) -> None:
        """All that `op` needs is here."""
        if op in self._to_come:
            self._arrived.add(op)
        else:
            ready = self._forwards if op.kind is Kind.F else self._others
            heappush(ready, (self._rank[op.kind], now, lane, op))

    def start(self) -> Op | None:
        """What is done now, which then counts as begun; None when all has to wait."""
        op = self._best() or self._next_of_program()
        if op is not None and op.kind is Kind.F:
            self._holding.add((op.microbatch, op.hop))
        return op

    def finish(self, op: Op) -> None:
        if op.kind in (Kind.B, Kind.W):
            self._holding.discard((op.microbatch, op.hop))

    def forget(self, microbatch: int, hop: int | None = None) -> None:
        """Nothing of a microbatch, or of one of its hops, is to be done here any more; its slots are free."""

        def forgotten(op: Op) -> bool:
            return op.microbatch == microbatch and hop in (None, op.hop)

        self._holding -= {key for key in self._holding if key[0] == microbatch and hop in (None, key[1])}
        for ready in (self._forwards, self._others):
            ready[:] = [entry for entry in ready if not forgotten(entry[-1])]
            heapify(ready)
        self._arrived -= {op for op in self._arrived if forgotten(op)}
        self._program = deque(op for op in self._program if not forgotten(op))
        self._to_come = set(self._program)

    def waiting(self) -> list[Op]:
        """What has arrived and was not started."""
        return [*(entry[-1] for ready in (self._forwards, self._others) for entry in ready), *self._arrived]

    def _can_hold(self, op: Op) -> bool:
        if (op.microbatch, op.hop) in self._holding:
            return True
        guest = self._guest(op.microbatch, op.hop)
        return sum(self._guest(*held) == guest for held in self._holding) < self._slots

    def _best(self) -> Op | None:
        forward, others = self._first_forward(), self._others
        if forward is not None and (not others or forward < others[0]):
            self._forwards.remove(forward)
            heapify(self._forwards)
            return forward[-1]
        return heappop(others)[-1] if others else None

    def _first_forward(self) -> _Entry | None:
        if not self._forwards or self._can_hold(self._forwards[0][-1]):
            return self._forwards[0] if self._forwards else None
        return min((entry for entry in self._forwards if self._can_hold(entry[-1])), default=None)

    def _next_of_program(self) -> Op | None:
        program = self._program
        if (
            not program
            or program[0] not in self._arrived
            or (program[0].kind is Kind.F and not self._can_hold(program[0]))
        ):
            return None
        op = program.popleft()
        self._to_come.discard(op)
        self._arrived.discard(op)
        return op


class Machine:
    """One run of one valid plan."""

    def __init__(self, plan: Plan, bind: Bind | None = None) -> None:
        self.plan = plan
        self._bind = bind
        self._schedule = plan.schedule()
        self._number = {turn: number for number, turn in enumerate(self._schedule)}
        self._peer = [[hop.peer for hop in plan.lanes[lane].route] for lane, _ in self._schedule]
        self._worklists = [
            Worklist(plan.policy, slots, None if plan.program is None else plan.program.get(peer, ()))
            for peer, slots in enumerate(plan.slots)
        ]

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
        self._worklists[self.peer(op)].arrive(op, now, self.lane(op))

    def start(self, peer: int) -> Op | None:
        """What the peer does now, which then counts as begun; None when it has to wait."""
        return self._worklists[peer].start()

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
        self._worklists[self.peer(op)].finish(op)

    def waiting(self) -> list[Op]:
        """What has arrived and was not started: empty at the end of a whole run."""
        return sorted(op for worklist in self._worklists for op in worklist.waiting())


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
