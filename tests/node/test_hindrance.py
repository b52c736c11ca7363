"""What keeps a peer from steps: how long it waits between two tries, and when it does not count on the next one."""

from farflung.node.hindrance import FIRST_S, LASTS_S, LONGEST_S, Hindrance


def test_pauses_grow_to_the_longest_and_begin_anew_after_a_step() -> None:
    hindrance, now, pauses = Hindrance(), 100.0, list[float]()
    for _ in range(40):
        assert not hindrance.forbids(now)
        hindrance.met("the device is full", now)
        assert hindrance.forbids(now)
        pauses.append(hindrance.retry_at - now)
        now = hindrance.retry_at
    assert pauses[:5] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LONGEST_S] and set(pauses[4:]) == {LONGEST_S}
    hindrance.over()
    assert not hindrance.reason and not hindrance.forbids(now)
    hindrance.met("again", now)
    assert hindrance.retry_at == now + FIRST_S and not hindrance.lasts(now + LASTS_S - 1.0)


def test_it_lasts_when_tries_have_failed_for_a_while() -> None:
    hindrance = Hindrance()
    assert not hindrance.lasts(1e9)
    hindrance.met("one", 10.0)
    hindrance.met("another", 20.0)
    assert not hindrance.lasts(10.0 + LASTS_S - 0.1) and hindrance.lasts(10.0 + LASTS_S)
    assert hindrance.reason == "another"
