"""Any plan under a cost model: a discrete-event simulation that yields when every operation runs and every message travels.

Events are ordered by (time, arrivals before decisions, lane or peer), so a run is the same everywhere, and a peer decides
among all that has arrived at that instant. An operation's end is known when it starts, so its messages are
scheduled then: there are no other events than arrivals and decisions, two to three per operation.

The planner's search simulates millions of plans of one kind only (fixed routes under TC1, first come, first served);
for those `pipeline_makespan.py` gives the same makespan, to the bit, a hundred times faster.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from farflung.training.pipeline_costs import Costs
from farflung.training.pipeline_machine import Bind, Machine
from farflung.training.pipeline_plan import BadPlan, Op, Plan


class Ran(NamedTuple):
    """An operation, where and when, in seconds since the step began."""

    op: Op
    stage: int
    peer: int
    begin_s: float
    end_s: float


class Sent(NamedTuple):
    """A message on its way: what it is for, and when it left and arrived."""

    op: Op
    sender: int
    receiver: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What happened in one step. An executor will write the same from the real clock."""

    peers: tuple[str, ...]
    ran: tuple[Ran, ...]
    """In order of begin."""
    sent: tuple[Sent, ...]

    @property
    def makespan_s(self) -> float:
        return max(one.end_s for one in self.ran)

    @property
    def longest_silence_s(self) -> float:
        """The longest time for which nothing of some microbatch ended that was under way: it waited, travelled and was computed."""
        heard_s: dict[int, float] = {}
        longest_s = 0.0
        for one in sorted(self.ran, key=lambda ran: ran.end_s):
            since_s = heard_s.get(one.op.microbatch, one.begin_s)
            longest_s = max(longest_s, one.end_s - since_s)
            heard_s[one.op.microbatch] = one.end_s
        return longest_s

    def busy(self) -> list[float]:
        """Share of the step that each peer computes."""
        seconds = [0.0] * len(self.peers)
        for one in self.ran:
            seconds[one.peer] += one.end_s - one.begin_s
        return [part / self.makespan_s for part in seconds]


_ARRIVE, _DECIDE = 0, 1


def simulate(plan: Plan, costs: Costs, bind: Bind | None = None) -> Timeline:
    """Raises BadPlan when the plan comes to no end or the costs are for other peers or stages."""
    if costs.num_peers != len(plan.peers) or costs.num_stages != len(plan.stages):
        raise BadPlan(
            f"costs of {costs.num_peers} peers, {costs.num_stages} stages for another plan; measure them anew"
        )
    machine = Machine(plan, bind)
    free_s = [0.0] * len(plan.peers)  # when a peer may start its next operation
    uplink_s = [0.0] * len(plan.peers)
    ran: list[Ran] = []
    sent: list[Sent] = []
    ended: list[Op | None] = [None] * len(plan.peers)  # begun, and not yet reported as finished
    pending: set[tuple[float, int]] = set()  # decisions in the queue
    events: list[tuple[float, int, int, Op | None]] = [(0.0, _ARRIVE, machine.lane(op), op) for op in machine.begin()]
    heapify(events)

    def decide(peer: int, when: float) -> None:
        if (when, peer) not in pending:
            pending.add((when, peer))
            heappush(events, (when, _DECIDE, peer, None))

    while events:
        now, _, peer, arrived = heappop(events)
        if arrived is not None:
            machine.arrive(arrived, now)
            peer = machine.peer(arrived)
            decide(peer, max(now, free_s[peer]))
            continue
        pending.discard((now, peer))
        if now < free_s[peer]:
            continue
        last, ended[peer] = ended[peer], None
        if last is not None:
            machine.finish(last)
        op = machine.start(peer)
        if op is None:
            continue
        stage = machine.stage(op)
        end = now + costs.seconds(op.kind, stage, peer)
        ended[peer], free_s[peer] = op, end + costs.pause_s
        ran.append(Ran(op, stage, peer, now, end))
        for follower in machine.follow(op, end):
            receiver = machine.peer(follower)
            arrival = end
            if receiver != peer:
                leaves = max(end, uplink_s[peer]) if costs.shared_uplinks else end
                uplink_s[peer] = leaves + costs.transmit_s[peer][receiver]
                arrival = uplink_s[peer] + costs.latency_s[peer][receiver]
                sent.append(Sent(follower, peer, receiver, leaves, arrival))
            heappush(events, (arrival, _ARRIVE, machine.lane(follower), follower))
        decide(peer, free_s[peer])
    if machine.waiting() or not ran:
        raise BadPlan(f"nothing moves with {len(machine.waiting())} operations waiting; validate the plan first")
    return Timeline(peers=plan.peers, ran=tuple(ran), sent=tuple(sent))
