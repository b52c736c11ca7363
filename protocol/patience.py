"""When a member gives up waiting: for a proposer, which the next ballot leaves behind, for a quorum, and to be let go. Pure: reads a member, changes nothing."""

from collections.abc import Collection
from typing import Protocol

from farflung.protocol.acceptor import Acceptor
from farflung.protocol.attendance import Attendance
from farflung.protocol.chain import Certified
from farflung.protocol.keys import PeerId, short
from farflung.protocol.membership import Membership
from farflung.protocol.planning import no_quorum
from farflung.protocol.quorum import is_quorum
from farflung.protocol.settings import VOTE_S, Settings
from farflung.protocol.standing import Standing
from farflung.protocol.tempo import Tempo

STATE_BEATS = 2.0
"""Heartbeats in which a proposer must have said that it holds the outer state."""


class Waiting(Protocol):
    """What is read of the member that waits."""

    settings: Settings
    membership: Membership
    standing: Standing
    attendance: Attendance
    acceptor: Acceptor
    tempo: Tempo
    slot_at: float
    """When the height or ballot was opened."""

    @property
    def me(self) -> PeerId: ...

    @property
    def head(self) -> Certified: ...

    def proposer_now(self) -> PeerId: ...

    def turn(self, ballot: int) -> PeerId: ...


def why_next_ballot(s: Waiting, now: float) -> str | None:
    """Why the proposer cannot or does not do its work, so that its turn is over; None while there is hope."""
    turn = s.proposer_now()
    if turn != s.me and not s.membership.alive(turn):
        if s.membership.dead_for(turn, now) > 0.0 and _anything_to_decide(s, now):
            return f"proposer {short(turn)} is gone"
        return None
    part, ready = s.attendance.part, s.attendance.ready
    # Its plan says that it holds the state, newer than its last heartbeat may; and a heartbeat takes a while to follow the state.
    said_so = part is not None or now < s.slot_at + STATE_BEATS * s.membership.every_s(turn)
    if not said_so and not s.standing.holds(turn) and s.standing.decides and _anything_to_decide(s, now):
        return f"proposer {short(turn)} does not hold the outer state yet"
    voted_at = s.acceptor.voted_at
    if voted_at is not None and now > voted_at + VOTE_S:
        return f"no certificate from {short(turn)} in {VOTE_S:.0f} s"
    # A plan under way has its own deadline, below; a second attempt counts as nothing, or a proposer that others have left
    # while it was planning would plan for ever.
    idle = ready is not None and (part is None or part.plan.attempt > 1)
    late = now > max(s.attendance.ready_at, s.slot_at) + s.settings.max_round_s + VOTE_S
    if idle and late and s.me not in s.tempo.too_slow(now)[0]:  # for whom no round waits
        # It lives, and yet nothing comes of it: perhaps it cannot reach a quorum that the rest of us can.
        return f"nothing came from {short(turn)} for too long"
    if part is not None and (later := _later_ballot(s, turn)) is not None:
        # It was started again before anybody called it dead, or followed others, who had; and is not in its plan any more.
        return f"{short(turn)} has left its plan for ballot {later}"
    if part is not None and now > part.expires_at:
        return f"the plan of {short(turn)} came to nothing"
    return None


def why_no_quorum(s: Waiting) -> str:
    """What is missing, and what helps, for people."""
    view = s.head.commit.view
    return no_quorum(view, s.membership.live(view), s.standing.holders())


def not_gone(s: Waiting, view: Collection[PeerId], now: float) -> list[PeerId]:
    """Others of a view that nobody has called dead, those among them that we have not heard yet, since we have just started."""
    return [p for p in view if p != s.me and s.membership.dead_for(p, now) == 0.0]


def is_needed(s: Waiting, now: float) -> bool:
    """Whether somebody who stays, or is on its way in, could decide something with us and nothing without us: what a member that leaves waits for longest.
    Gone before it is let go it stays in the view, and others of that would need its vote, or the state that it alone has, for ever. What it has voted for may yet
    be decided, so the view of that counts as well."""
    if not s.standing.holds(s.me):
        return False
    voted = s.acceptor.accepted
    views = [s.head.commit.view] if voted is None else [s.head.commit.view, voted.commit.view]
    return any(_is_needed_in(s, view, now) for view in views if s.me in view)


def _is_needed_in(s: Waiting, view: Collection[PeerId], now: float) -> bool:
    """The same with a view. Who was not heard of since it began to leave may have died before, and counts as nobody who stays."""
    membership, others = s.membership, not_gone(s, view, now)
    stay = [p for p in others if not membership.leaves(p)]
    beats = [membership.heartbeat(p) for p in membership.live(membership.known())]
    if not stay and not any(beat is not None and beat.state == "joining" for beat in beats):
        return False
    sure = membership.sure(view)
    return is_quorum(view, {*others, s.me}) and not is_quorum(
        view, [p for p in stay if p in sure and s.standing.holds(p)]
    )


def _later_ballot(s: Waiting, peer: PeerId) -> int | None:
    """At which ballot of our height another member is, if that is a later one than ours."""
    beat = s.membership.heartbeat(peer)
    if beat is None or beat.height != s.head.commit.height or beat.ballot <= s.acceptor.ballot:
        return None
    return beat.ballot


def _anything_to_decide(s: Waiting, now: float) -> bool:
    view = s.head.commit.view
    gone = any(s.membership.dead_for(p, now) > s.settings.removal_s or s.membership.leaves(p) for p in view)
    rounds = s.attendance.ready is not None or s.attendance.part is not None
    return gone or rounds or s.acceptor.accepted is not None or bool(s.standing.joiners())
