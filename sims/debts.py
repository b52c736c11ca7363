"""What a peer has sent to rounds, and nobody has heard yet what became of it (invariant 9): of each contribution a round that counts it tells, or a reason why none does.

What is offered goes into the next round, at whatever height that is: if the view changes first, or the plan comes to nothing, it is sent once more. So two contributions
without a round between them are one debt, and it is paid by the first round at or above their heights, or by a reason. A peer hears of that round when its history goes on, and
says it when it has applied it: meanwhile it may have sent something to the round after.
"""

from collections.abc import Iterable


class Debts:
    """Of one peer. `rounds`, where it is asked for: heights of rounds, of the peer's history at least."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[int, ...] | None] = {}
        """By height, what was sent to its round; None until that is known."""

    def sent(self, height: int) -> None:
        """Something goes to the round of this height."""
        self._samples[height] = self._samples.get(height)

    def sent_samples(self, samples: tuple[int, ...], rounds: Iterable[int]) -> list[int]:
        """What that was, of the newest; the heights to which other things were sent, of which nothing can come any more and nothing was said."""
        if not self._samples:
            return []
        same = self._newest(rounds)
        other = [height for height in same if self._samples[height] not in (None, samples)]
        for height in same:
            del self._samples[height]
        self._samples[same[-1]] = samples
        return other

    def excused(self, rounds: Iterable[int]) -> None:
        """There is a reason why no round counts the newest."""
        for height in self._newest(rounds) if self._samples else ():
            del self._samples[height]

    def committed(self, height: int, rounds: Iterable[int]) -> list[tuple[int, int]]:
        """The peer has applied the round of this height. Of what it had sent until then: to which height, and the round that must count it."""
        due = {sent: _paid_by(sent, rounds) for sent in self._samples if sent <= height}
        paid = {sent: by for sent, by in due.items() if by is not None and by <= height}
        for sent in paid:
            del self._samples[sent]
        return sorted(paid.items())

    def _newest(self, rounds: Iterable[int]) -> list[int]:
        """Heights of the newest contribution, in order."""
        newest = max(self._samples)
        between = [height for height in rounds if height < newest]
        return sorted(height for height in self._samples if _paid_by(height, between) is None)


def _paid_by(height: int, rounds: Iterable[int]) -> int | None:
    """The round of which what was sent at this height is part."""
    return min((one for one in rounds if one >= height), default=None)
