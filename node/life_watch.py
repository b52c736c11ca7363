"""What a peer of a pipeline does about the lives of stages (`protocol/lives.py`): it says which are lost, hears which were begun anew, and goes where that calls it.

Of other stages it says what it hears (`roll`), of its own, whose state it holds, what it knows of the chain (`stranded`). A life that is newer than its own ends its part
here: whoever is to begin that one leaves to do so, and all others to come in again, with all rounds of the old one that they have. That is looked at all the
time and not only when it is news: a machine that was killed on its way out starts in the old life again, and one that was killed on its way to another stage that it
was called for in its old stage; it goes there again where too few stages are left to decide that somebody else shall.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from farflung.node.disk_room import Room
from farflung.node.events import EventLog
from farflung.node.stage_self import OUTSIDE, Self
from farflung.protocol.accord import Word, enough
from farflung.protocol.lives import Life
from farflung.protocol.roll import Roll
from farflung.protocol.stranded import Stranded


class Part(Protocol):
    """A peer's part in the pipeline."""

    me: Self


class LifeWatch:
    """See the module."""

    def __init__(
        self, part: Part, *, roll: Roll, life: Life, owed: Collection[Life], log: EventLog, keep: Callable[[], None]
    ) -> None:
        """`life`: of our stage; `owed`: of others, for which we were called before we were started, and have not begun; `keep` writes the lives of the roll to disk."""
        self._life = life
        self.called_to = -1
        """The stage that we are to begin anew; -1: none."""
        self._part = part
        self._roll = roll
        self._log = log
        self._keep = keep
        self._room = Room(log, "its notes of stages that were begun anew")
        self._known = dict(roll.renewed)
        self._owed = tuple(owed)
        self._stranded = Stranded(roll.heartbeat_s)
        self._said = False
        """We have said that our own stage is lost."""
        self._over = False
        """Our life has ended."""
        self._word = Word(life.number)
        """What our chain says, as last looked at."""
        self._named: tuple[Life, ...] = ()
        """What stage 0 names, by what we last heard."""

    @property
    def stranded(self) -> bool:
        """Whether we hold the state of our stage, and its chain has had no quorum for long."""
        return bool(self._stranded.reason and self._part.me.holds[1])

    def lost(self, now: float) -> tuple[int, ...]:
        """The stages that cannot go on, as far as we know."""
        stage = self._life.stage
        lost = self._roll.lost(now, held=stage if self._part.me.holds[1] else -1)
        return tuple(sorted({*lost, stage})) if self.stranded else lost

    def look(self, now: float) -> None:
        """Whether our own chain has a quorum; several times a second."""
        me, stage = self._part.me, self._life.stage
        alone = stage == 0 and not self._roll.decides_together  # nobody else decides for it
        if alone or me.chain is None or me.finished:  # members leave a chain that has done its work
            return
        self._stranded.look(*me.chain, now, swarm_s=self._roll.swarm_s(now))
        if self.stranded != self._said:
            self._said = self.stranded
            self._log.emit("stage.lost", stage=stage, reason=self._stranded.reason if self._said else "")

    def tell(self) -> None:
        """Write down which stages had been begun anew before we came."""
        for life in self._known.values():
            self._tell(life)

    def follow(self, now: float) -> bool:
        """Which stages were begun anew, and whether that ends our part here. True when others should hear of it."""
        me, stage = self._part.me, self._life.stage
        said, self._word = self._word, me.word
        self._roll.speak(stage, self._word, now)
        if (call := self._word.call) is not None and call != said.call:
            self._log.emit("stage.call", of=0, life=call.number, founder=call.founder.hex())
        named = self._roll.named(now) if stage > 0 and self._roll.decides_together else ()
        if named != self._named:
            self._named = named
            me.decide()
        news = [life for life in self._roll.renewed.values() if self._known.get(life.stage) != life]
        over = self._roll.number(stage) > self._life.number and not self._over and me.caught_up
        owed = self._still_owed(now) if self._owed else []
        open_to_us = [
            life
            for life in self._roll.renewed.values()
            if (over if life.stage == stage else life in news or life in owed)
        ]
        call = next((life for life in open_to_us if self._calls(life, now)), None)
        if not news and not over and call is None:
            return said != self._word
        if not self._room.takes(
            self._keep
        ):  # nothing follows from what a restart would forget: it is news until there is room
            return said != self._word
        for life in news:
            self._tell(life)
        self._known, self._over = dict(self._roll.renewed), self._over or over
        if call is not None:
            self.called_to, self._owed = call.stage, ()
            me.go(call.stage, f"called to begin stage {call.stage} anew")
        elif over:
            why = "its chain had no quorum" if self.stranded else "it did not hear us"
            me.go(OUTSIDE, f"stage {stage} was begun anew while {why}")
        return True

    def _still_owed(self, now: float) -> list[Life]:
        """Those of the lives for which we were called that nobody else can take the place of any more, as too few stages are left to decide that; if our own
        stage can do without us."""
        stages, newest = self._roll.stages, self._roll.renewed
        lost = set(self._roll.lost(now, held=self._life.stage))
        if enough(stages, set(range(stages)) - lost) or not self._part.me.spared:
            return []
        return [life for life in self._owed if life.stage in lost and newest.get(life.stage) == life]

    def _tell(self, life: Life) -> None:
        self._log.emit("stage.anew", stage=life.stage, life=life.number, founder=life.founder.hex())

    def _calls(self, life: Life, now: float) -> bool:
        """Whether it is us who are to begin this life, and it has not been begun."""
        ours = (life.stage, life.number) == (self._life.stage, self._life.number)
        return life.founder == self._roll.me and not ours and self._roll.holders(life.stage, now) is None
