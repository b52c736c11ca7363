"""How fast members and their links are and how long rounds take, by their own word and by the chain: the figures that `rhythm` and `sharing` reckon with."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from farflung.protocol import rhythm, sharing
from farflung.protocol.chain import RoundResult
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId
from farflung.protocol.lap import CALM, Took
from farflung.protocol.membership import TRAINING_STATES, Membership
from farflung.protocol.messages import Heartbeat
from farflung.protocol.rhythm import Offer, Runner
from farflung.protocol.settings import RECENT_ROUNDS, Settings
from farflung.protocol.sharing import Link

LEARNT_FROM = 128
"""Rounds back from which it is learnt how long those of one or of several take, and what each fragment more does. Links may have changed since earlier ones."""


@dataclass(slots=True)
class Tempo:
    """As one member knows it: of itself it reads `vitals`, of others their heartbeats."""

    settings: Settings
    membership: Membership
    history: History
    vitals: Callable[[], Heartbeat]
    taken_s: float | None = field(default=None, init=False)
    """That a round has lately taken from our training for each fragment that it moved, seconds; whoever trains says so. None: there was none yet."""
    _slow: dict[bool, tuple[object, tuple[frozenset[PeerId], str]]] = field(default_factory=dict, init=False)
    """What `too_slow` found last, and when: with what those who are ready say, and without."""

    def rounds_s(self) -> list[float]:
        """How long the newest rounds took from plan to end, seconds, newest first."""
        return [r.seconds_ms / 1000.0 for r in self.history.recent_rounds()]

    def rounds_as_wide_s(self, numel: int, *, alone: bool) -> list[float]:
        """The same if they had moved so many elements, as much longer, at the most, as that is more; of those that were of somebody alone, or not, as `alone` says,
        however many of the other kind are newer: what is known of several is not forgotten while one of them is away, or sends nothing.
        """
        fragments = self._fragments(numel)
        recent = self._rounds(alone=alone)[:RECENT_ROUNDS]
        return [took.seconds * max(1.0, fragments / took.fragments) for took in map(self._took, recent)]

    def usual_round_s(self) -> float:
        """The median of those; 0 before there was a round."""
        recent = self.rounds_s()
        return median(recent) if recent else 0.0

    def rounds_like(self, newest: RoundResult) -> list[Took]:
        """How long the newest rounds took and how many fragments they moved, newest first: `newest`, which is not in the history yet, and those before that were
        of somebody alone, or not, as that is. Who is alone waits for nobody, and nothing is to be learnt from that for several, or the other way round.
        """
        return [self._took(r) for r in (newest, *self._rounds(alone=_is_of_one(newest)))]

    def _rounds(self, *, alone: bool) -> list[RoundResult]:
        """Those that were of somebody alone, or not, newest first."""
        return [r for r in self.history.recent_rounds(LEARNT_FROM) if _is_of_one(r) == alone]

    def _took(self, result: RoundResult) -> Took:
        return Took(result.seconds_ms / 1000.0, self.moved(result))

    def moved(self, result: RoundResult) -> float:
        """How many fragments a round moved, by its elements."""
        return self._fragments(result.parts[-1].stop - result.parts[0].start)

    def _fragments(self, numel: int) -> float:
        return numel * self.settings.rules.num_fragments / self.settings.rules.numel

    def tokens_per_s(self, peer: PeerId) -> float:
        """How fast a peer trains, by its own word; 0 when it has not said."""
        if peer == self.membership.me:
            return self.vitals().tokens_per_s
        beat = self.membership.heartbeat(peer)
        return 0.0 if beat is None else beat.tokens_per_s

    def taken_of(self, fastest: float) -> float | None:
        """`taken_s`, if we are about as fast as the fastest member, of so many tokens a second; None: we do not know what a round takes from that."""
        return self.taken_s if self.vitals().tokens_per_s >= CALM * fastest else None

    def too_slow(self, now: float, links: Mapping[PeerId, Link] | None = None) -> tuple[frozenset[PeerId], str]:
        """Members that train, and whose links are so slow that the next round does without them, and why (`sharing`), where as many steps lie between rounds as
        the manifest allows. `links`: of those who are ready, who may have said so later than in their last heartbeat. The last round of a run does without nobody: what is not in it
        is lost. Looked at once in a heartbeat, unless links change. Raises IndexError before there is a history.
        """
        head, rules, links = self.history.head.commit, self.settings.rules, links or {}
        key = (head.height, now // self.settings.heartbeat_s, links)
        known = self._slow.get(bool(links))
        if known is None or known[0] != key:
            found: tuple[frozenset[PeerId], str] = (frozenset(), "")
            if not rules.is_last(head):
                contenders = self._contenders(links)
                fastest = max((one.tokens_per_s for one in contenders.values()), default=0.0)
                step_s = self.settings.step_tokens / fastest if fastest > 0.0 else 0.0
                first, last = rules.span(head)
                most = rules.laps.most * head.width
                found = sharing.leave_out(
                    contenders,
                    self.settings.expected_bytes(head) * (last - first),
                    lap_s=most * step_s,
                    hidden_s=rules.laps.delay_of(most) * step_s,
                )
            known = self._slow[bool(links)] = (key, found)
        return known[1]

    def _contenders(self, links: Mapping[PeerId, Link]) -> dict[PeerId, sharing.Contender]:
        """The live members that train, or have something to offer."""
        head, rules = self.history.head.commit, self.settings.rules
        most = max(1, rules.ahead * rules.tokens_per_sample // self.settings.step_tokens)
        recent = [{one.peer for one in result.contributors} for result in self.history.recent_rounds()]
        found: dict[PeerId, sharing.Contender] = {}
        for peer in self.membership.live(head.view):
            mine = peer == self.membership.me
            beat = self.vitals() if mine else self.membership.heartbeat(peer)
            if beat is None:
                continue
            state = self.membership.state if mine else beat.state
            if state not in TRAINING_STATES and peer not in links:
                continue
            heard = Link(up_bytes_per_s=beat.up_bytes_per_s, down_bytes_per_s=beat.down_bytes_per_s)
            missed = next((k for k, counted in enumerate(recent) if peer in counted), len(recent))
            found[peer] = sharing.Contender(
                link=said if (said := links.get(peer, heard)).up_bytes_per_s > 0.0 else heard,
                tokens_per_s=beat.tokens_per_s,
                laps=min(1 + missed, most),
            )
        return found

    def runners(self, peers: Collection[PeerId], now: float) -> list[Runner]:
        """When those of `peers` that train from the newest state will be ready, by their own word. Raises IndexError before there is a history."""
        me = self.membership.me
        found = self.membership.runners([p for p in peers if p != me], self.history.head.commit.version)
        if me in peers and (beat := self.vitals()).tokens_per_s > 0.0:
            found.append(Runner(now + beat.ready_in_s, beat.tokens_per_s))
        return found

    def patient_until(
        self, offers: Collection[Offer], awaited: Collection[PeerId], now: float, *, least_until: float
    ) -> float:
        """Until when a round with these offers waits for `awaited` (`rhythm`); `least_until`: at least, without overlap. Raises IndexError before there is a history."""
        head, rules = self.history.head.commit, self.settings.rules
        lap = self.settings.rhythm(head.lap)
        until = rhythm.patient_until(
            lap,
            offers,
            self.runners(awaited, now),
            round_s=self.usual_round_s(),
            longest_s=self.settings.max_round_s,
        )
        if rules.is_last(head):
            # What is not in it is lost. It may come after a step or two, and what others have said be of the lap before: so it waits one of the manifest's.
            fastest = max((offer.tokens_per_s for offer in offers), default=0.0)
            a_lap_s = rules.laps.least * self.settings.step_tokens / fastest if fastest > 0.0 else 0.0
            first = min((offer.ready_at for offer in offers), default=0.0)
            return max(until, least_until, first + min(a_lap_s, self.settings.max_round_s))
        if lap.delay_steps > 0:
            return until
        until = max(until, least_until)
        in_vain = all(self._ready_at(peer, now) > until for peer in awaited)
        return now if in_vain and any(lap.is_whole(offer) for offer in offers) else until

    def _ready_at(self, peer: PeerId, now: float) -> float:
        """When it will have made its steps, by its own word; also of one in a step so long that it has not applied the newest commit. -inf when it has not said."""
        if peer != self.membership.me:
            return self.membership.ready_at(peer)
        beat = self.vitals()
        return now + beat.ready_in_s if beat.tokens_per_s > 0.0 else -math.inf

    def is_due(self, step_s: float, now: float) -> bool:
        """Whether we, a member between two inner steps of `step_s` seconds, should offer what we have: the fastest is about to have its H steps.

        Raises IndexError before there is a history.
        """
        head = self.history.head.commit
        lap = self.settings.rhythm(head.lap)
        if lap.delay_steps == 0:
            return False
        fellows = [p for p in head.view if p != self.membership.me]
        if all(runner.ready_at >= now + step_s for runner in self.runners(fellows, now)):
            return False  # after most steps; whom the round does without need not be known
        nobody_waits_for = self.too_slow(now)[0] | {self.membership.me}
        others = self.runners([p for p in head.view if p not in nobody_waits_for], now)
        return rhythm.is_due(lap, others, step_s=step_s, round_s=self.usual_round_s(), now=now)


def _is_of_one(result: RoundResult) -> bool:
    """Whether it was of somebody alone."""
    return len(result.contributors) == 1
