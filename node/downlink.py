"""What this node's downlink has been seen to take: a lower bound of what it can.

Most of the time those who send are the bound, not we. So the best of the last measurements is told, and not a mean of them: it grows as soon as
somebody sends faster, and a link that has become slower is told of once the better ones are forgotten. Whether the bound says
something about the link is decided by whoever knows the uplinks of the senders (`protocol.partition.narrow`).

Measured are the transfers of rounds, since all others send then. A mean that is fetched, or a state that is downloaded, says how fast its holders
could spare it: such bytes count where they come in beside a round's, and begin no measurement.
"""

from farflung.node.one_way import OneWay

LEAST_S = 0.5
"""Shorter stretches of receiving are not measured: bytes that waited in the system's buffers while we did something else come at once. Links
that matter for the parts of a round take longer (`protocol.settings.WAVES_FROM_S`)."""


class Downlink(OneWay):
    """Measures what is received."""

    def _counted_bytes(self) -> int:
        # Whole transfers would not do: where the link is too slow for its part, few of them come to their end.
        return self._passed_bytes() - self._passed_before

    def observe(self, bytes_per_s: float, seconds: float) -> None:
        if seconds >= LEAST_S:
            self._seen.append(bytes_per_s)
            self.bytes_per_s = min(max(self._seen), self._fast_bytes_per_s)
