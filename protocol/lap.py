"""The lap: inner steps of the fastest member from one round to the next, and how much that round moves. Fixed by the manifest, or chosen live within its limits.

With P fragments in turn a lap is H / P. Each commit says how long the next one is (`Commit.lap`), how many of the manifest's fragments the round at
its end moves at once (`Commit.width`: P is their number over it) and how many steps the run has made (`Commit.steps`, the sum of all laps), so that
all count alike, whenever they change: the learning rate, the end of the run, the samples that are handed out ahead. The last lap is what is left,
however little, so that the sum is the run. The proposer of a round chooses, and everybody checks the limits. It chooses by what the swarm measures
while it trains, with s the seconds of a step of the fastest member, e those of a round, from its plan to the last member that holds all its means,
and t those in which nothing is trained for it, in the fastest member: to copy what is offered, and to apply what comes of it, both of what moves only:

    hide  = ceil(e / (BUSY s))       steps in which a round is over, the late have been waited for and the votes are in
    lap   = hide + 1                 then training goes on throughout, for tau = lap - 1
    lap   = max(hide + 1, ceil((e - tau s) / (STANDS s)))     with a tau that the manifest fixes
    and at least ceil(t / (STANDS s))        t grows with what moves, so that a wide round saves nothing of it

t is the proposer's own, and counts where that is about as fast as the fastest. Proposers take turns; a slower one makes no lap shorter, and leaves the width.

e is the median of the last ROUNDS rounds: one that went wrong does not move it, a link that has become slower does with the second. That is the
link speed that counts: what uplinks are said to give knows nothing of round trips, losses and processors, and is coarse for small models. A
lap that is too short is made longer at once, one that is too long only when the shorter one is below CALM of it, or noise would change it
every round.

While somebody downloads the outer state every lap is longer than the last, by half: the means that bring a state forward are kept for some
rounds only, and with rounds in quick succession it would be too old whenever it is there (a founder alone needs no time for a round at all).

P is chosen by what a round's time is made of: e = a + width b, where a is round trips, votes and waiting, and b the bytes of a fragment on the
slowest link: by what members say of links that are not fast, and by the last rounds that moved more or less. Of fast links, and of bytes that are
through before a link shows how fast it is, nobody can say what they take: so that is tried. A wide round pays a once for many fragments, so that H = P lap falls with the width, towards what
the bytes alone take; but it also moves more at once, and its result comes later. So a round is as narrow as it can be without making H
much longer (`WIDENS`, `NARROWS`), and never so wide that it could fail for it (`WIDE_SHARE`): where links are slow, all P in turn, and where round trips are what takes time, all at once.

tau needs no choice of its own. A result is applied when it is there (`node.trainer`), so that tau only says when a peer stands, and how long a
round may wait for the late (`protocol.rhythm`); the exchange decides how late results are, in steps about e / s.
Quality falls slowly with H (about 1 % from 30 to 100, digest 1.5) and with tau (0.2 % up to 10), so both are as small as links allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

BUSY = 2 / 3
"""Share of a lap, less a step, that a round may take. What is left is for the late, for whom half of what overlap hides is waited, and for the votes."""

STANDS = 0.03
"""Share of the time that peers may stand where tau is too short to hide a round, or a round takes their processors: 97 % of it they compute."""

CALM = 0.7
"""A shorter lap is taken up below this part of the old one."""

WIDENS = 0.7
"""Wider rounds are taken up where H falls below this part of what it is."""

NARROWS = 1.2
"""Narrower ones where H is at most so many times the shortest."""

WIDE_SHARE = 0.25
"""Of the longest that a round may take: wide ones take no more, so that they are not the first to fail where links become slow."""

LONGER = 1.5
"""Of a lap to the last, while somebody downloads the outer state."""

ROUNDS = 3
"""That the measure is taken from. As many are as wide as each other, before the width is looked at again."""


class Took(NamedTuple):
    """A round that was."""

    seconds: float
    fragments: float
    """That it moved."""

    def if_it_moved(self, fragments: float, more_s: float, less_s: float) -> float:
        """Seconds that it would have taken with so many fragments, where each more adds `more_s` and each less saves `less_s`."""
        other = fragments - self.fragments
        return max(0.0, self.seconds + other * (more_s if other > 0.0 else less_s))


class Lap(NamedTuple):
    """What a commit says of the round after it."""

    steps: int
    """Until it is due."""
    width: int = 1
    """Fragments that it moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laps:
    """What a manifest allows, in steps between two rounds that move one fragment each; of wider rounds as many times more. `least` is also the first lap, and
    the last one may be shorter: what is left of the run."""

    least: int
    most: int
    """Equal to `least` where the manifest fixes it."""
    delay: int | None = None
    """tau, less than `least`; None: a lap less a step."""
    widths: tuple[int, ...] = (1,)
    """Fragments that a round may move at once, from 1 on; only where laps are chosen."""

    @classmethod
    def fixed(cls, steps: int, delay: int = 0) -> "Laps":
        """Nothing is left to choose."""
        return cls(least=steps, most=steps, delay=delay)

    def delay_of(self, lap: int) -> int:
        """tau: steps that may be trained while a round is under way."""
        return lap - 1 if self.delay is None else min(self.delay, lap - 1)

    def allows(self, lap: Lap, left: int) -> bool:
        """Whether such a lap may begin when `left` steps are left of the run: a run does not end in the middle of a lap."""
        least, most = self.shortest(left) * lap.width, self._most(lap.width, left)
        return lap.width in self._widths(left) and least <= lap.steps <= most

    def shortest(self, left: int) -> int:
        """Steps of the shortest lap that may begin when so many are left; when none is, of the one that commits name and nobody trains."""
        return min(self.least, left) if left > 0 else self.least

    def finished(self, left: int) -> bool:
        """Whether the run is over with so many steps left."""
        return left <= 0

    def choose(
        self,
        now: Lap,  # that ends
        *,
        left: int,  # steps of the run after it
        step_s: float,  # of the fastest member; 0: not known
        rounds: Sequence[Took],  # newest first
        fragment_s: float | None = None,  # that the bytes of each fragment add to a round; None: nobody can say
        longest_s: float = math.inf,  # that a round may take
        newcomer: bool = False,  # does anybody download the outer state?
        taken_s: float | None = 0.0,  # in which the fastest does not train, a fragment that is moved; None: not known
    ) -> tuple[Lap, str]:
        """The next lap and its width, and a sentence that says why. Allowed, whatever was measured."""
        if self.least == self.most:
            reason = "what is left of the run" if 0 < left < self.least else "fixed by the manifest"
            return Lap(self.shortest(left)), reason
        widths = self._widths(left)
        width = max(k for k in widths if k <= now.width)
        if step_s <= 0.0 or not rounds:
            lap = max(self.shortest(left) * width, min(now.steps, self._most(width, left)))
            return Lap(lap, width), "nobody has said yet how long its steps take"
        newest, learnt_s = rounds[:ROUNDS], _fragment_s(rounds)
        # Of two words the one that speaks against another width: or where links are said to be slower than they are, each seems better than the present one.
        more_s = max(fragment_s or 0.0, learnt_s or 0.0)
        less_s = (fragment_s or 0.0) if learnt_s is None else learnt_s
        round_s = {k: median(took.if_it_moved(k, more_s, less_s) for took in newest) for k in self.widths}
        hiding = {k: self._hiding(round_s[k], step_s) for k in self.widths}
        needed = {k: max(steps, math.ceil(k * (taken_s or 0.0) / (STANDS * step_s))) for k, steps in hiding.items()}
        if (
            fragment_s is not None
            and taken_s is not None
            and all(round(took.fragments) == now.width for took in newest)
            and len(newest) == ROUNDS
        ):
            share = {k: WIDE_SHARE * (1.0 if k <= now.width else WIDENS) for k in widths}
            fits = [k for k in widths if k == 1 or round_s[k] <= share[k] * longest_s]
            width = _width(now.width, {k: max(self.least * k, needed[k]) / k for k in fits})
        wanted = needed[width]
        if width == now.width and (CALM * now.steps if taken_s is not None else 0.0) <= wanted <= now.steps:
            wanted = now.steps
        seconds = median(took.seconds for took in newest)
        reason = f"rounds take {seconds:.3g} s and steps {step_s:.3g} s: {hiding[width]} steps hide one"
        if width != now.width:
            reason += f" that moves {width} of {self.widths[-1]} fragments, and {hiding[now.width]} one of {now.width}"
        if needed[width] > hiding[width]:
            reason += (
                f", and {needed[width]} make up for {width * (taken_s or 0.0):.3g} s in which nothing is trained for it"
            )
        if newcomer and wanted < (longer := math.ceil(LONGER * now.steps)):
            wanted = longer
            reason += f", and {longer} let somebody who downloads the state catch up"
        least, most = self.shortest(left) * width, self._most(width, left)
        chosen = max(least, min(wanted, most))
        if chosen == most < needed[width]:
            reason += f", {chosen} is the most" + (" of what is left of the run" if left < self.most * width else "")
        elif chosen == least > wanted:
            reason += f", {chosen} is the least"
        return Lap(chosen, width), reason

    def _hiding(self, round_s: float, step_s: float) -> int:
        hide = math.ceil(round_s / (BUSY * step_s))
        if self.delay is None:
            return hide + 1
        return max(hide + 1, math.ceil((round_s - self.delay * step_s) / (STANDS * step_s)))

    def _widths(self, left: int) -> tuple[int, ...]:
        """Those whose shortest lap is not longer than what is left; the first one always."""
        return tuple(k for k in self.widths if k == 1 or self.least * k <= left)

    def _most(self, width: int, left: int) -> int:
        return max(self.shortest(left) * width, min(self.most * width, left))


def _fragment_s(rounds: Sequence[Took]) -> float | None:
    """What each fragment more has added to a round, by those that moved more or fewer than the newest; None where all moved as many."""
    alike: dict[int, list[Took]] = {}
    for took in rounds:
        alike.setdefault(round(took.fragments), []).append(took)
    newest, *others = ([median(one) for one in zip(*some[:ROUNDS], strict=True)] for some in alike.values())
    slopes = [(newest[0] - s) / (newest[1] - f) for s, f in others if abs(newest[1] - f) > 0.5]
    return max(0.0, median(slopes)) if slopes else None


def _width(now: int, steps: Mapping[int, float]) -> int:
    """The width to take, with what H would be at each, in whatever unit."""
    best = min(steps.values())
    narrowest = min(k for k, h in steps.items() if h <= NARROWS * best)
    return narrowest if narrowest < now or now not in steps or best < WIDENS * steps[now] else now
