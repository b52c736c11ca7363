"""What becomes of contributions: each is counted by the next round, or there is a reason."""

from farflung.sims.debts import Debts

FIRST, MORE = (0, 1), (0, 1, 2)
"""Samples that were sent."""


def test_the_round_that_something_was_sent_to_must_count_it() -> None:
    debts = Debts()
    debts.sent(4)
    assert debts.committed(3, [3]) == []
    assert debts.committed(4, [3, 4]) == [(4, 4)]
    assert debts.committed(5, [3, 4, 5]) == [], "once"


def test_what_was_sent_to_the_round_after_does_not_pay() -> None:
    """A peer hears that a round is over before it has applied it, and may contribute to the next one meanwhile."""
    debts = Debts()
    debts.sent(4)
    debts.sent(5)
    assert debts.committed(4, [4]) == [(4, 4)]
    assert debts.committed(5, [4, 5]) == [(5, 5)]


def test_a_change_of_view_in_between_leaves_one_debt() -> None:
    debts = Debts()
    debts.sent(4)
    debts.sent(6)
    assert debts.committed(6, [3, 6]) == [(4, 6), (6, 6)]


def test_a_reason_is_for_the_newest_contribution_and_no_other() -> None:
    debts = Debts()
    debts.sent(3)
    debts.sent(4)
    debts.sent(5)
    debts.excused([3])  # height 4 was a change of view
    assert debts.committed(6, [3, 6]) == [(3, 3)]
    debts.excused([3, 6])


def test_who_gave_up_what_it_sent_and_sends_other_things_has_said_why() -> None:
    debts = Debts()
    assert debts.sent_samples(FIRST, []) == [], "nobody knows for which round"
    debts.sent(4)
    assert debts.sent_samples(FIRST, []) == []
    debts.sent(4)
    assert debts.sent_samples(FIRST, []) == [], "the plan came to nothing"
    debts.sent(5)
    assert debts.sent_samples(MORE, []) == [4]
    debts.excused([])
    debts.sent(5)
    assert debts.sent_samples(FIRST, []) == []
    debts.sent(6)
    assert debts.sent_samples(MORE, [5]) == [], "a round was in between"
