"""One member, alone with the messages that a test hands it: it stands at HEAD in a view of four, and has heard from everybody."""

from typing import Any

import msgspec
from tests.protocol.bus import (
    SWARM,
    beat,
    certify,
    follow,
    history_of,
    new_member,
    ready,
    rules,
    signers,
    state_digest,
)

from farflung.protocol import chain
from farflung.protocol.chain import Certified, Commit, Contribution, RoundResult
from farflung.protocol.effects import Effect, Send
from farflung.protocol.keys import PeerId
from farflung.protocol.member import Member
from farflung.protocol.messages import Contributor, Part, Plan
from farflung.protocol.proposer import plan_id
from farflung.protocol.quorum import proposer

WHO = signers(5)
INSIDE, OUTSIDER = WHO[:4], WHO[4]
IDS = [s.peer_id for s in INSIDE]
BY_ID = {s.peer_id: s for s in WHO}
RULES = rules(IDS[0])
PAST = history_of(INSIDE)
HEAD = PAST[-1].commit
NEXT = HEAD.height + 1
PARENT = chain.commit_hash(SWARM, HEAD)


def turn(ballot: int) -> PeerId:
    return proposer(SWARM, HEAD.view, NEXT, ballot)


LEADER = turn(0)
FOLLOWER = next(p for p in IDS if p not in (LEADER, turn(1)))
THIRD = next(p for p in IDS if p not in (LEADER, FOLLOWER))


def member(me: PeerId = FOLLOWER, *, history: list[Certified] | None = None, vote: Any = None) -> Member:
    """A member that has just heard from everybody and stands at `HEAD`."""
    made = new_member(BY_ID[me], RULES)
    made.membership.state = "training"
    past = PAST if history is None else history
    if past:
        made.recall([] if vote is None else [vote])
        made.begin(None, past, 0.0)
        head = past[-1].commit
        made.applied(head.height, head.version, state_digest(head.version), 0.0)
    holds = beat(height=HEAD.height, version=HEAD.version, digest=state_digest(HEAD.version))
    for peer in [*IDS, OUTSIDER.peer_id]:
        if peer != me:
            made.receive(peer, holds if past and peer in IDS else beat(), 0.0)
    return made


def plan(**changes: Any) -> Plan:
    """Everybody contributes; one owner, for short."""
    owner = IDS[0]
    values: dict[str, Any] = dict(
        height=NEXT, ballot=0, attempt=1, parent=PARENT, members=tuple(IDS),
        contributors=tuple(Contributor(p, ready()) for p in IDS), parts=(Part(owner, 0, RULES.rules.numel),),
        uplink=RULES.uplink, downlink=RULES.downlink, scatter_s=4.0, gather_s=4.0, reason="a test",
    )  # fmt: skip
    return Plan(**{**values, **changes})


PLAN_ID = plan_id(SWARM, plan())


def commit(parent: Commit = HEAD, *, view: tuple[PeerId, ...] | None = None, samples: int = 0) -> Commit:
    """What may follow: a round in which everybody contributed so many samples, or a change of view."""
    view = view or tuple(IDS)
    result = None
    if samples:
        result = RoundResult(
            plan=bytes([parent.height % 250]) * 32,
            contributors=tuple(Contribution(p, 100 * samples, samples, 1000) for p in parent.view),
            parts=(chain.PartResult(IDS[0], 0, RULES.rules.numel, b"d" * 32),),
            seconds_ms=100,
        )
    return follow(parent, view, result=result)


def grown(num: int, start: Commit = HEAD) -> list[Certified]:
    """So many certified rounds after `start`."""
    made: list[Certified] = []
    for _ in range(num):
        start = commit(start, samples=4)
        made.append(certify(start, INSIDE[:3]))
    return made


def sends(effects: list[Effect], kind: type[Any]) -> list[Send]:
    return [e for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def but(struct: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(struct, **changes)


FORGED = but(certify(commit(), INSIDE[:3]), votes=certify(HEAD, INSIDE[:3]).votes)
OTHER_VIEW = commit(view=tuple(IDS[:3]))
WRONG_LEDGER = but(commit(), ledger=HEAD.ledger, tokens=5)
BAD_SIGNATURE = b"s" * 64


def pass_time(one: Member, start: float, stop: float, silent: set[PeerId], step: float = 0.25) -> list[Effect]:
    effects: list[Effect] = []
    now = start
    head = one.head.commit
    holds = beat(height=head.height, version=head.version, digest=state_digest(head.version))
    while now < stop:
        for peer in [*IDS, OUTSIDER.peer_id]:
            if peer not in silent | {one.me}:
                effects += one.receive(peer, holds if peer in IDS else beat(), now)
        effects += one.tick(now)
        now += step
    return effects
