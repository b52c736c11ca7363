"""Invariant 3 where a round is cut: the dead cost only their own contribution, and nobody else's is thrown away.

A contribution counts if every owner holds it that the proposer keeps. So whoever is left out must be missing at one of those that hold all that
count. What owners tell the proposer is noted as it arrives, and what it tells itself, which no message carries, is given.

An attacker may say one thing and another, and spoil what it passes on for others, so that nobody here knows how much of that the proposer believed: whom
an attacking owner did not name in all that it said is left out with reason. Whoever all owners named, it as well, is not.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from typing import Any

from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Collected, Cut, Plan

KEPT = 256
"""Plans and reports that are remembered: many more than can be under way."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a proposer has heard from an owner, between what it surely has and what it may have."""

    least: frozenset[PeerId] = frozenset()
    most: frozenset[PeerId] = frozenset()
    sure: bool = False
    """Whether any of it came from an honest owner over honest peers."""

    def hears(self, peers: frozenset[PeerId], *, sure: bool) -> "_Told":
        """One report more. What an owner holds grows; an earlier word of it may come later."""
        most = self.most | peers
        if sure:
            return _Told(self.least | peers if self.sure else peers, most, sure=True)
        least = self.least if self.sure else self.least & peers if self.most else peers
        return _Told(least, most, self.sure)


@dataclass(slots=True)
class Cuts:
    """Of one chain. Plans go by their hash."""

    _planned: OrderedDict[bytes, frozenset[PeerId]] = field(default_factory=OrderedDict)
    """Who was to contribute."""
    _reports: OrderedDict[bytes, tuple[PeerId, Collected]] = field(default_factory=OrderedDict)
    """By the whole message."""
    _told: OrderedDict[tuple[bytes, PeerId], dict[PeerId, _Told]] = field(default_factory=OrderedDict)
    """By plan and proposer, what each owner has told it."""
    _cut: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Plans whose cut has been looked at: it is sent again and again, when more may have arrived."""

    def plan(self, name: bytes, plan: Plan) -> None:
        """It is sent."""
        self._planned[name] = frozenset(one.peer for one in plan.contributors)
        _trim(self._planned)

    def report(self, sender: PeerId, data: bytes, message: Collected) -> None:
        """It is sent, be it by way of another."""
        if message.plan in self._planned:
            self._reports[data] = sender, message
            _trim(self._reports)

    def arrives(
        self,
        carrier: PeerId,
        receiver: PeerId,
        data: bytes,
        has_cut: Callable[[PeerId, bytes], bool],
        attackers: Container[PeerId],
    ) -> None:
        """A message does, and is looked at next. `has_cut`: whether a proposer has cut the round of a plan: what comes later has come too late, be it in the same
        instant, as where a process was busy."""
        if data in self._reports:
            sender, message = self._reports[data]
            if has_cut(receiver, message.plan):
                return
            told = self._told.setdefault((message.plan, receiver), {})
            sure = sender not in attackers and carrier not in attackers
            told[sender] = told.get(sender, _Told()).hears(frozenset(message.peers), sure=sure)
            _trim(self._told)

    def thrown_away(
        self,
        cut: Cut,
        proposer: PeerId,  # who has just sent it
        own: Collection[PeerId] | None,  # what it has told itself; None if it owns no part
    ) -> list[PeerId]:
        """Whose contributions do not count though nothing speaks against them."""
        if cut.plan in self._cut or cut.plan not in self._planned:
            return []
        self._cut[cut.plan] = None
        _trim(self._cut)
        counted = frozenset(cut.contributors)
        told = dict(self._told.get((cut.plan, proposer), {}))
        if own is not None:
            told[proposer] = _Told().hears(frozenset(own), sure=True)
        kept = [held.least for held in told.values() if counted <= held.most]
        return sorted(frozenset.intersection(*kept) & self._planned[cut.plan] - counted) if kept else []


def _trim(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > KEPT:
        remembered.popitem(last=False)
