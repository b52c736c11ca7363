"""What a member's machine needs to know of the manifest and of its node, as plain numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from farflung.protocol.chain import Commit, Rules
from farflung.protocol.keys import PeerId
from farflung.protocol.rhythm import Rhythm

RESEND_S = 1.5
"""Seconds between repetitions of a message that was not acted on: control messages may be lost."""

VAIN_S = 180.0
"""Without a quorum of the group in which a newcomer waits for a place, while there are others: its members may only have been started again, or parted for a moment.
They themselves wait longer (`waiting`)."""

ASLEEP_S = 30.0
"""Between two looks at deadlines, if nothing else: after more the machine has slept, and knows nothing of the time between."""

SHUN_S = 10.0
"""In which a newcomer that has waited for a group in vain looks for another one, before it begins with that again."""

SETTLE_S = 1.0
"""Seconds a proposer waits for more joiners before it changes the view, so that four newcomers cost one commit."""

HOLD_S = 60.0
"""Longest that rounds wait for one newcomer that is about to catch up: for a mean or several, from far away or over a thin link, and for its word that they are there."""

VOTE_S = 5.0
"""Seconds from a proposal to its certificate before members move to the next ballot: a few round trips."""

GIVE_UP_S = 10.0
"""Seconds a ready member waits for a quorum to come back before it trains on by itself."""

REPAIR_S = 30.0
"""Between two attempts to repair the same version."""

MAX_BALLOT_STEP = 64
"""Ballots that one message may move us ahead: one for each member that may have failed as a proposer."""

HISTORY = 512
"""Certified commits kept for those who catch up; at a round a minute, a night's sleep."""

FAST_BYTES_PER_S = 6.25e6
"""50 Mbit/s: faster uplinks all count the same. There the processor, not the link, decides what is measured."""

MEASURABLE_BYTES = 1 << 16
"""Smaller transfers say more about latency than about a link's rate."""

SHORT_S = 1.0
"""What is through in less says more about round trips than about bytes, also where a link seems to be slow."""

WAVES_FROM_S = 0.5
"""Rounds whose contributions take a link that is not fast so long, a few round trips, have two waves (`partition`)."""

RECENT_ROUNDS = 5
"""Rounds that adaptive deadlines learn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The rules of one swarm, for one member."""

    swarm: bytes
    """Manifest hash, 32 bytes."""
    founder: PeerId
    rules: Rules
    """What every commit must follow."""
    step_tokens: int
    """Tokens of one inner step of one member."""
    align: int
    """Parts begin at multiples of this many elements (the codecs' block)."""
    uplink: str
    downlink: str
    last_codec: str = ""
    """Of both directions in the last round of the run; empty: the same as always."""
    bytes_per_element: float
    """Expected of encoded contributions and means, whichever are longer; for estimates of transfer times."""
    last_bytes_per_element: float = 0.0
    """The same of the last round, where it has a codec of its own."""
    min_contributors: int
    min_round_s: float
    """Lower bound of adaptive deadlines, seconds; and without overlap a round is planned no earlier after the last, unless all are ready."""
    max_round_s: float
    """Upper bound of adaptive deadlines, seconds."""
    fast_bytes_per_s: float = FAST_BYTES_PER_S
    """Of links, beyond which they all count the same. Less where a byte stands for many, in simulations."""
    waves_from_s: float = WAVES_FROM_S
    """Rounds whose contributions take a link that is not fast so long have two waves."""
    removal_s: float
    """Seconds after which a dead member is removed from the view."""
    heartbeat_s: float
    vain_s: float = VAIN_S
    """Without a group that could take it in where it waits for a place, after which a newcomer begins with another one."""
    admits: Callable[[PeerId, bytes], bool]
    """Whether a peer may be here: the founder, and who shows a token that opens the swarm to it."""

    def codecs(self, parent: Commit) -> tuple[str, str]:
        """Of contributions and of means, in the round after `parent`."""
        return (self.last_codec,) * 2 if self._has_its_own(parent) else (self.uplink, self.downlink)

    def expected_bytes(self, parent: Commit) -> float:
        """Per element of what that round moves, either way."""
        return self.last_bytes_per_element if self._has_its_own(parent) else self.bytes_per_element

    def _has_its_own(self, parent: Commit) -> bool:
        return bool(self.last_codec) and self.rules.is_last(parent)

    def unmeasured_s(self, nbytes: float) -> float | None:
        """Seconds for so many bytes where no link is known: none to speak of, if they are too few to have been measured; None: that cannot be said."""
        return 0.0 if nbytes < MEASURABLE_BYTES * self.fast_bytes_per_s / FAST_BYTES_PER_S else None

    def rhythm(self, lap: int) -> Rhythm:
        """That of a lap of so many steps."""
        return Rhythm(inner_steps=lap, delay_steps=self.rules.laps.delay_of(lap), step_tokens=self.step_tokens)
