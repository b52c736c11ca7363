"""Whose contributions a cut throws away: what the proposer had heard from honest owners is known, what it believed of attackers is not."""

from farflung.protocol.messages import Collected, Contributor, Cut, Plan, Ready
from farflung.sims.cuts import Cuts

PLAN = b"p" * 32
PROPOSER, A, B, EVIL = (bytes([number]) * 32 for number in range(1, 5))
EVERYBODY = (PROPOSER, A, B, EVIL)
READY = Ready(tokens=100, samples=1, up_bytes_per_s=1e6, down_bytes_per_s=1e6, ready_ms=0)


class Round:
    """One plan to which everybody contributes, of which everybody owns a part, and what its proposer is told."""

    def __init__(self) -> None:
        self._cuts = Cuts()
        contributors = tuple(Contributor(peer, READY) for peer in EVERYBODY)
        self._cuts.plan(PLAN, Plan(1, 1, 0, b"h" * 32, EVERYBODY, contributors, (), "int8", "int8", 9.0, 9.0, ""))
        self._sent = 0

    def report(self, owner: bytes, *held: bytes, carrier: bytes | None = None) -> None:
        self._sent += 1
        data = self._sent.to_bytes(4, "big")
        self._cuts.report(owner, data, Collected(PLAN, held))
        self._cuts.arrives(carrier or owner, PROPOSER, data, lambda proposer, name: False, {EVIL})

    def thrown_away(self, *counted: bytes) -> list[bytes]:
        return self._cuts.thrown_away(Cut(PLAN, counted), PROPOSER, EVERYBODY)


def test_whom_all_owners_hold_may_not_be_left_out() -> None:
    round_ = Round()
    for owner in (A, B, EVIL):
        round_.report(owner, *EVERYBODY)
    assert round_.thrown_away(PROPOSER, A, EVIL) == [B]


def test_whom_an_owner_lacks_that_is_kept_may_be() -> None:
    round_ = Round()
    round_.report(A, PROPOSER, A, EVIL)
    for owner in (B, EVIL):
        round_.report(owner, *EVERYBODY)
    assert round_.thrown_away(PROPOSER, A, EVIL) == []


def test_whom_an_attacking_owner_does_not_name_may_be() -> None:
    round_ = Round()
    for owner in (A, B):
        round_.report(owner, *EVERYBODY)
    round_.report(EVIL, PROPOSER, A, EVIL)
    assert round_.thrown_away(PROPOSER, A, EVIL) == []


def test_an_attacking_owner_that_says_this_and_that_may_have_been_believed_in_either() -> None:
    round_ = Round()
    for owner in (A, B):
        round_.report(owner, *EVERYBODY)
    round_.report(EVIL, *EVERYBODY)
    round_.report(EVIL, A)
    assert round_.thrown_away(PROPOSER, A, EVIL) == []


def test_an_attacking_owner_that_is_silent_excuses_nothing() -> None:
    round_ = Round()
    for owner in (A, B):
        round_.report(owner, *EVERYBODY)
    assert round_.thrown_away(PROPOSER, A) == [B, EVIL]


def test_what_only_an_attacker_passed_on_may_not_have_been_believed() -> None:
    round_ = Round()
    round_.report(A, PROPOSER, A, EVIL)
    round_.report(A, *EVERYBODY, carrier=EVIL)
    for owner in (B, EVIL):
        round_.report(owner, *EVERYBODY)
    assert round_.thrown_away(PROPOSER, A, EVIL) == []
