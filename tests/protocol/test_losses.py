"""How often peers are lost: who stays away counts, and what we did not hear ourselves does not."""

import pytest

from farflung.protocol.losses import Losses

SILENCE_S = 10.0
A, B = b"a" * 32, b"b" * 32


@pytest.mark.parametrize(("dies", "counted"), [(False, 0), (True, 1)])
def test_who_was_cut_off_for_a_while_has_lost_nobody_but_who_stays_away(dies: bool, counted: int) -> None:
    """Eight peers, whose words come at all times of a heartbeat of two seconds; for thirty seconds none does."""
    losses, peers = Losses(SILENCE_S), [bytes([number]) * 32 for number in range(8)]
    words = dict.fromkeys(peers, 0.0)
    for tick in range(4 * 100):
        now = tick / 4
        for number, peer in enumerate(peers):
            is_heard = not 40.0 <= now < 70.0 and not (dies and number == 5 and now >= 40.0)
            if tick % 8 == number and is_heard:
                words[peer] = now
        losses.look(words, now)
        if now <= 70.0 + SILENCE_S:
            assert losses.count == 0
    assert losses.count == counted


def test_who_stood_still_has_lost_nobody() -> None:
    """A machine that slept for an hour looks first, and hears then."""
    losses, words = Losses(SILENCE_S), {A: 0.0, B: 1.0}
    for now in (0.0, 2.0, 3602.0):
        losses.look(words, now)
    for now in (3602.5, 3608.0, 3614.0, 3620.0):
        words = {A: now - 0.5, B: now - 0.1}
        losses.look(words, now)
    assert losses.count == 0 and losses.heard_s == pytest.approx(2 * (2.0 + 18.0))


def test_one_of_several_that_falls_silent_counts_once_and_again_when_it_was_back() -> None:
    losses, words = Losses(SILENCE_S), {A: 0.0, B: 0.0}
    counts = []
    for now in range(0, 60, 2):
        words[A] = float(now)
        words[B] = float(now) if now in (2, 30) else words[B]
        losses.look(words, float(now))
        counts.append(losses.count)
    assert sorted(set(counts)) == [0, 1, 2] and counts[6] == 0 and counts[7] == 1


def test_of_two_the_other_one_counts() -> None:
    losses = Losses(SILENCE_S)
    for now in (0.0, 10.0, 10.1, 10.2):
        losses.look({B: 0.0}, now)
    assert losses.count == 1


def test_at_first_the_rate_is_what_is_usual() -> None:
    losses = Losses(SILENCE_S)
    assert losses.per_hour == pytest.approx(0.1)
    losses.count, losses.heard_s = 9, 90.0 * 3600.0
    assert losses.per_hour == pytest.approx(0.1)
