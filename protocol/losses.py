"""How often peers are lost, as one peer counts it: those that fall silent for good, over the hours for which peers were heard.

Who hears nobody may have stood still itself, or its link was cut, and has lost nobody by that. So a silent peer counts when somebody else was heard after it
should have been, and when all that are there have had the time to be heard again. Where there is only one other, nobody can tell the two apart, and its
silence counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId

ONE_LOSS_IN_H = 10.0
"""Peer-hours for one loss, until we have heard of more: 10 % an hour, the middle of CheckFree's rates."""


@dataclass(slots=True)
class Losses:
    """See the module. All times are seconds of one monotonic clock."""

    silence_s: float
    """Without a word, after which a peer is silent."""
    count: int = 0
    """Of peers that fell silent."""
    heard_s: float = 0.0
    """For which peers were heard, together."""
    _silent: set[PeerId] = field(default_factory=set)
    _looked_at: float | None = None
    _hears_since: float | None = None
    """Since when somebody was heard at any time; None while nobody is."""

    def look(
        self,
        words: Mapping[PeerId, float],  # of each peer that serves, when it was heard last
        now: float,
    ) -> None:
        """Count those that have fallen silent since the last look."""
        quiet = {peer for peer, at in words.items() if now > at + self.silence_s}
        hears = len(quiet) < len(words)
        self._hears_since = None if not hears else now if self._hears_since is None else self._hears_since
        silent = self._silent & quiet
        if self._hears_since is not None and now > self._hears_since + self.silence_s:
            newest = max(words.values())
            silent |= {peer for peer in quiet if newest > words[peer] + self.silence_s}
        elif len(words) == 1:
            silent = quiet
        self.count += len(silent - self._silent)
        self.heard_s += (len(words) - len(quiet)) * (now - (now if self._looked_at is None else self._looked_at))
        self._silent, self._looked_at = silent, now

    @property
    def per_hour(self) -> float:
        """Of one peer; at first what is usual."""
        return (1.0 + self.count) / (ONE_LOSS_IN_H + self.heard_s / 3600.0)
