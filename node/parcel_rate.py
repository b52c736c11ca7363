"""What this node's uplink gives, measured by the parcels of pipelines, which are small beside what rounds send.

An answer to a parcel comes a trip, there and back, after its last byte has left; so from the time of the answer and the trip, which heartbeats measure
(`protocol/ways.py`), follows when the uplink was done with it. Parcels that were under way together, to whomever, make one run:

    rate = bytes of a run / (the last departure - the first begin)

What the other side takes for its answer, and what else uses the uplink meanwhile, makes a run longer and never shorter. So the best of the last runs counts.
"""

from collections import deque
from math import inf

from farflung.node.one_way import REMEMBERED
from farflung.protocol.settings import FAST_BYTES_PER_S, MEASURABLE_BYTES

LEAST_S = 0.02
"""A run counts as at least so long: trips are known to some milliseconds."""

MOST_S = 2.0
"""A run that is so long is measured, whether it has ended or not."""


class ParcelRate:
    """See the module. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """At most FAST_BYTES_PER_S; 0 before the first measurement."""
        self._under_way: list[float] = []
        """When each was begun."""
        self._gone: list[tuple[float, float, int]] = []
        """Of parcels that no run has counted: begin, departure, bytes."""
        self._counted_until = -inf
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self, now: float) -> None:
        """A parcel is written now."""
        self._under_way.append(now)

    def arrived(self, began: float, nbytes: int, trip_s: float, now: float) -> None:
        """The answer to the parcel that was begun then is here."""
        self._under_way.remove(began)
        self._gone.append((began, max(began, now - trip_s), nbytes))
        self._measure()

    def lost(self, began: float) -> None:
        """Nobody knows what became of it."""
        self._under_way.remove(began)

    def _measure(self) -> None:
        """Take out the runs to which no parcel can be added any more."""
        open_at = min(self._under_way, default=inf)
        waiting = sorted(self._gone)
        while waiting:
            began, left, nbytes = waiting[0]
            goes_on = began < self._counted_until
            began, count = max(began, self._counted_until), 1
            while count < len(waiting) and waiting[count][0] <= left:
                left = max(left, waiting[count][1])
                nbytes += waiting[count][2]
                count += 1
            if open_at <= left and left - began < MOST_S:
                break
            del waiting[:count]
            self._counted_until = max(left, self._counted_until)
            if not goes_on or left - began >= MOST_S:  # the end of a long run is too short to know its begin so well
                self._observe(nbytes, left - began)
        self._gone = waiting

    def _observe(self, nbytes: int, seconds: float) -> None:
        if nbytes >= MEASURABLE_BYTES:
            self._seen.append(nbytes / max(seconds, LEAST_S))
            self.bytes_per_s = min(max(self._seen), FAST_BYTES_PER_S)
