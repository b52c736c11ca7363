"""The lap: inner steps of the fastest member from one round to the next. Fixed by the manifest, or chosen live within its limits.

With P fragments in turn a lap is H / P. Each commit says how long the next one is (`Commit.lap`) and how many steps the run has made
(`Commit.steps`, the sum of all laps), so that all count alike, whenever laps change: the learning rate, the end of the run, the samples that are
handed out ahead. The proposer of a round chooses, and everybody checks the limits. It chooses by what the swarm measures while it trains, with
s the seconds of a step of the fastest member and e those of a round, from its plan to the last member that holds all its means:

    hide  = ceil(e / (BUSY s))       steps in which a round is over, the late have been waited for and the votes are in
    lap   = hide + 1                 then training goes on throughout, for tau = lap - 1
    lap   = max(hide + 1, ceil((e - tau s) / (STANDS s)))     with a tau that the manifest fixes

e is the median of the last ROUNDS rounds: one that went wrong does not move it, a link that has become slower does with the second. That is the
link speed that counts: what uplinks are said to give knows nothing of round trips, losses and processors, and is coarse for small models. A
lap that is too short is made longer at once, one that is too long only when the shorter one is below CALM of it, or noise would change it
every round.

While somebody downloads the outer state every lap is longer than the last, by half: the means that bring a state forward are kept for some
rounds only, and with rounds in quick succession it would be too old whenever it is there (a founder alone needs no time for a round at all).

tau needs no choice of its own. A result is applied when it is there (`node.trainer`), so that tau only says when a peer stands, and how long a
round may wait for the late (`protocol.rhythm`); the exchange decides how late results are, in steps about e / s. P stays the manifest's: whose turn it is follows
from the outer version, fragments begin at layers, and when laps are chosen a smaller P would only make the same bytes come in larger pieces.
Quality falls slowly with H (about 1 % from 30 to 100, digest 1.5) and with tau (0.2 % up to 10), so both are as small as links allow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

BUSY = 2 / 3
"""Share of a lap, less a step, that a round may take. What is left is for the late, for whom half of what overlap hides is waited, and for the votes."""

STANDS = 0.03
"""Share of the time that peers may stand where tau is too short to hide a round: 97 % of it they compute."""

CALM = 0.7
"""A shorter lap is taken up below this part of the old one."""

LONGER = 1.5
"""Of a lap to the last, while somebody downloads the outer state."""

ROUNDS = 3
"""That the measure is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laps:
    """What a manifest allows, in steps between two rounds whatever fragment they move. `least` is also the first one."""

    least: int
    most: int
    """Equal to `least` where the manifest fixes it."""
    delay: int | None = None
    """tau, less than `least`; None: a lap less a step."""

    @classmethod
    def fixed(cls, steps: int, delay: int = 0) -> "Laps":
        """Nothing is left to choose."""
        return cls(least=steps, most=steps, delay=delay)

    def delay_of(self, lap: int) -> int:
        """tau: steps that may be trained while a round is under way."""
        return lap - 1 if self.delay is None else self.delay

    def allows(self, lap: int, left: int) -> bool:
        """Whether a lap may begin when `left` steps are left of the run: a run does not end in the middle of a lap."""
        return self.least <= lap <= self._most(left)

    def finished(self, left: int) -> bool:
        """Whether the run is over with so many steps left: fewer than any lap has."""
        return left < self.least

    def choose(
        self,
        lap: int,  # the one that ends
        *,
        left: int,  # steps of the run after it
        step_s: float,  # of the fastest member; 0: not known
        rounds_s: Sequence[float],  # how long rounds took, newest first
        newcomer: bool = False,  # does anybody download the outer state?
    ) -> tuple[int, str]:
        """The next lap, and a sentence that says why. Allowed, whatever was measured."""
        if self.least == self.most:
            return self.least, "fixed by the manifest"
        if step_s <= 0.0 or not rounds_s:
            return min(lap, self._most(left)), "nobody has said yet how long its steps take"
        round_s = median(rounds_s[:ROUNDS])
        needed = self._needed(round_s, step_s)
        wanted = needed if not CALM * lap <= needed <= lap else lap
        reason = f"rounds take {round_s:.3g} s and steps {step_s:.3g} s: {needed} steps hide one"
        if newcomer and wanted < (longer := math.ceil(LONGER * lap)):
            wanted = longer
            reason += f", and {longer} let somebody who downloads the state catch up"
        chosen = max(self.least, min(wanted, self._most(left)))
        if chosen == self._most(left) < needed:
            reason += f", {chosen} is the most" + (" of what is left of the run" if left < self.most else "")
        elif chosen == self.least > wanted:
            reason += f", {chosen} is the least"
        return chosen, reason

    def _needed(self, round_s: float, step_s: float) -> int:
        hide = math.ceil(round_s / (BUSY * step_s))
        if self.delay is None:
            return hide + 1
        return max(hide + 1, math.ceil((round_s - self.delay * step_s) / (STANDS * step_s)))

    def _most(self, left: int) -> int:
        return max(self.least, min(self.most, left))
