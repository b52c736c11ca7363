"""The meetings of a peer's group with others (`meetings`): what they read of the member, and what is logged of them."""

import asyncio
from collections.abc import Callable

from torch import Tensor

from farflung.node.facilities import Facilities
from farflung.node.learner import Learner
from farflung.node.meetings import Meetings
from farflung.node.terms import Terms
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import PeerId
from farflung.protocol.member import Member
from farflung.protocol.messages import Part, Plan
from farflung.training.rules import halfway


def meetings_of(
    terms: Terms,
    facilities: Facilities,
    learner: Learner,
    member: Member,
    *,
    version: Callable[[], int],
    steady: Callable[[], asyncio.Event],
    met: Callable[[bytes, Part, Tensor], None],  # is shown what is added to means, by plan and part
    refused: Callable[[RemoteError], None],
) -> Meetings:
    """See the module; the rest is as `Meetings` has it."""
    log = facilities.log

    def turn() -> int:
        head = member.head.commit
        return head.version // terms.settings.rules.turns(head)

    def has_met(plan_id: bytes, plan: Plan, part: Part, peer: PeerId, term: Tensor) -> None:
        log.emit("group.met", round=plan.height, of=peer.hex(), start=part.start, stop=part.stop)
        met(plan_id, part, term)

    def has_not(plan: Plan, part: Part, peer: PeerId, reason: str) -> None:
        where = {"start": part.start, "stop": part.stop}
        log.emit("group.unmet", round=plan.height, of=peer.hex(), **where, reason=reason)

    return Meetings(
        facilities.network,
        facilities.doors,
        learner,
        member.neighbours,
        every=terms.meet_every,
        turn=turn,
        weight=lambda: halfway(terms.next_rule(member.head.commit)),
        admission=facilities.facts.admission,
        admits=terms.settings.admits,
        version=version,
        steady=steady,
        met=has_met,
        unmet=has_not,
        refused=refused,
    )
