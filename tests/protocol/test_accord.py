"""How stages decide together: the rules one by one, and many small swarms that are cut apart, lose stages and get them back, by the decisions that nodes make."""

import random
from dataclasses import dataclass, field

import pytest
from tests.protocol.pipeline_says import SWARM, says

from farflung.protocol import accord, lost
from farflung.protocol.accord import Around, Word, acknowledged, elected, enough, follows, next_word, rank
from farflung.protocol.chain import Commit
from farflung.protocol.ledger import Ledger
from farflung.protocol.limits import MAX_LIFE
from farflung.protocol.lives import HOME_LOST_AFTER, LOST_AFTER, Counters, Life, renewed
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.roll import Roll

F, G, H = (bytes([number]) * 32 for number in (70, 71, 72))


def home(number: int, founder: bytes = F) -> Life:
    return Life(0, number, founder)


# ---- what is enough ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(2, 9))
def test_two_sets_of_stages_that_may_decide_have_one_in_common(stages: int) -> None:
    sets = [{stage for stage in range(stages) if bits >> stage & 1} for bits in range(1 << stages)]
    deciding = [one for one in sets if enough(stages, one)]
    assert all(one & other for one in deciding for other in deciding)
    assert enough(stages, set(range(1, stages))) == (stages >= accord.FEWEST)  # all without stage 0
    assert enough(stages, {0}) == (stages < accord.FEWEST)


def test_a_life_counts_when_enough_have_acknowledged_it_in_this_term() -> None:
    life = Life(3, 1, G)
    yes, later = Word(0, (life,)), Word(0, (Life(3, 2, H),))
    assert not acknowledged(5, {1: yes}, 0, life) and acknowledged(5, {1: yes, 2: later}, 0, life)
    other_term = Word(0, (home(1), life))
    assert not acknowledged(5, {1: yes, 2: other_term}, 0, life)
    over = Word(0, (Life(2, 1, H), life))  # a chain that knows itself that it is over
    assert not acknowledged(5, {1: yes, 2: over}, 0, life)
    assert acknowledged(5, {1: yes, 3: Word(0, (life,))}, 0, life)  # the chain whose place it takes, for that one only
    assert not acknowledged(5, {1: yes, 3: Word(0, (life,))}, 0, Life(2, 1, H))
    assert not acknowledged(5, {1: yes, 3: later}, 0, life)
    assert not acknowledged(5, {1: yes, 2: Word(0, (Life(3, 1, H),))}, 0, life)


def test_who_is_called_by_enough_is_elected_and_inherits_what_any_of_them_knows() -> None:
    known = (Life(3, 1, G),)
    words = {1: Word(0, (), home(1)), 2: Word(0, known, home(1)), 3: Word(1, (), home(1))}
    assert elected(5, words) == (home(1), (home(1), *known))
    assert elected(5, {**words, 3: Word(0, (), home(1))}) is None  # of a life that is over, as stage 2 knows
    assert elected(5, {**words, 3: Word(1, (), home(1, G))}) is None
    assert elected(5, {**words, 3: Word(1, (), home(2))}) is None
    newer_term = Word(0, (home(1, H),), home(2))
    words = {1: newer_term, 2: Word(0, known, home(2)), 4: Word(0, (), home(2))}
    assert elected(5, words) == (home(2), (home(2),))  # an earlier term may have named what never counted


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        (Word(0), Word(0, (Life(2, 1, G),)), ""),
        (Word(0), Word(0, (), home(2)), ""),
        (Word(0, (), home(1)), Word(0, (Life(2, 1, G),), home(1)), "of a term that is over"),
        (Word(0, (), home(1)), Word(0, (home(1),), home(1)), ""),
        (Word(0, (Life(2, 1, G),)), Word(0), "takes lives of stages back"),
        (Word(0, (), home(1)), Word(0, (), home(1, G)), "cannot come next"),
        (Word(0, (), home(1)), Word(0), "cannot come next"),
        (Word(0), Word(0, (), Life(1, 1, G)), "cannot come next"),
        (Word(0), Word(0, (Life(5, 1, G),)), "that there cannot be"),
        (Word(0), Word(0, (Life(2, 1, G), Life(1, 1, G))), "that there cannot be"),
    ],
)
def test_what_a_chain_may_say_next(before: Word, after: Word, wrong: str) -> None:
    found = follows(5, before, after)
    assert (wrong in found) if wrong else found == ""


def test_who_calls_whom() -> None:
    def said(mine: Word, **changes: object) -> Word | None:
        usual = {
            "stages": 5,
            "stage": 1,
            "words": {},
            "number": 0,
            "named": (),
            "lost": True,
            "overdue": False,
            "unsettled": False,
            "abandoned": False,
        }
        around = Around(**{**usual, "near": {2, 3}, **changes})  # type: ignore[arg-type]
        return next_word(mine, around, lambda number: home(number, H))

    new = Word(0)
    assert said(new) == Word(0, (), home(1, H))
    assert said(new, lost=False) is None and said(new, near={2}) is None  # two of five
    assert said(new, stage=2, near={1, 3}) is None  # stage 1 will
    other = {3: Word(0, (), home(1, G))}
    assert said(new, words=other) == Word(0, (), home(1, G))  # it was first
    assert said(new, words=other, lost=False) is None  # we hear stage 0
    assert said(new, words=other, lost=False, unsettled=True) is None  # and it will call for its own next life
    own = Word(0, (), home(2, H))
    assert said(new, words={**other, 0: own}, lost=False, unsettled=True) == own
    assert said(new, words=other, lost=False, unsettled=True, abandoned=True) == Word(0, (), home(1, G))
    assert said(new, number=MAX_LIFE) is None  # no number is left
    called = Word(0, (), home(1, H))
    assert said(called) is None and said(called, overdue=True) == Word(0, (), home(2, H))
    assert said(called, lost=False, overdue=True) == Word(
        0, (), home(2, H)
    )  # stage 0 is back, and nobody would acknowledge it
    assert said(called, number=1) == Word(0, (), home(2, H))  # that one counted, and is lost, too
    assert said(called, named=(Life(2, 1, G),), lost=False) is None  # of the term before
    assert said(called, named=(home(1, H), Life(2, 1, G)), lost=False) == Word(
        0, (home(1, H), Life(2, 1, G)), home(1, H)
    )


# ---- many swarms ---------------------------------------------------------------------------------------------------

BEAT_S = 2.0


@dataclass
class Machine:
    """One peer, alone in its stage: its chain is what it writes down."""

    key: bytes
    roll: Roll
    stage: int = -1
    life: int = 0
    word: Word = field(default_factory=lambda: Word(0))
    up: bool = True
    side: int = 0
    disks: dict[tuple[int, int], Word] = field(default_factory=dict)
    """By stage and number, chains that it has begun."""

    def present(self, now: float) -> Present:
        serves = self.stage >= 0
        return says(
            self.stage, life=self.life, trains=serves, digest=b"d" * 32 if serves else b"", lives=self.word.lives if serves else (),
            call=self.word.call if serves else None, lost=self.roll.lost(now, held=self.stage), fits=() if serves else tuple(range(self.roll.stages)),
            decided=self.roll.decided,
        )  # fmt: skip

    def commit(self, word: Word) -> None:
        self.word = self.disks[self.stage, self.life] = word


class Swarm:
    """Machines under one clock; all that decides is what nodes use."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.stages = rng.randint(3, 6)
        self.now = 0.0
        keys = [bytes([number + 1]) * 32 for number in range(self.stages + 5)]
        self.machines = [Machine(key, Roll(SWARM, keys[0], key, self.stages, BEAT_S)) for key in keys]
        self.acknowledged: dict[Life, set[int]] = {}
        """By life, the terms in which it was found to count."""
        self.begun: dict[tuple[int, int], bytes] = {}
        for stage, one in enumerate(self.machines[: self.stages]):
            one.stage = stage
            one.commit(Word(0))
        for one in self.machines:
            one.roll.tick(0.0)
            for stage, other in enumerate(keys[: self.stages]):
                if stage:
                    one.roll.appointments[stage] = _Appointed(stage, other)  # type: ignore[assignment]

    def beat(self) -> None:
        """Everybody tells those on its side what it is, and acts."""
        self.now += BEAT_S
        up = [one for one in self.machines if one.up]
        for one in up:
            one.roll.tick(self.now)
            one.roll.by_chain = one.stage == 0
            if one.stage >= 0:
                one.roll.speak(one.stage, one.word, self.now)
        presents = [(one, one.present(self.now)) for one in up]
        self.rng.shuffle(presents)
        for sender, said in presents:
            for one in up:
                if one is not sender and one.side == sender.side and self.rng.random() < 0.9:
                    one.roll.heard(sender.key, said, self.now)
        for one in up:
            self.act(one)
        self.judge()

    def act(self, one: Machine) -> None:
        roll = one.roll
        if one.stage >= 0 and roll.number(one.stage) > one.life:
            one.stage, one.life, one.word = -1, 0, Word(0)  # it ends, and comes in again
        mine = [life for life in roll.renewed.values() if life.founder == one.key]
        for life in mine:
            if (life.stage, life.number) in one.disks or (one.stage, one.life) == (life.stage, life.number):
                continue
            lives = roll.inherits(life, self.now) if life.stage == 0 else ()
            if lives is not None and roll.holders(life.stage, self.now) is None:
                key = (life.stage, life.number)
                assert self.begun.setdefault(key, one.key) == one.key, (
                    f"two begin life {life.number} of stage {life.stage}"
                )
                one.stage, one.life = key
                one.commit(Word(life.number, lives))
                return
        if one.stage < 0 or self.rng.random() < 0.3:
            return
        said = one.present(self.now)
        head = Commit(0, b"", 0, 0, 0, 1, 1, (one.key,), (), Ledger(), None, one.word.lives, one.word.call)
        if one.life < roll.number(one.stage):
            return
        settled = all(life.number <= roll.number(life.stage) for life in one.word.lives) and one.word.call is None
        if one.stage == 0 and settled and (begins := lost.begins(roll, (one.key,), said, self.now)):
            one.commit(Word(one.life, renewed(one.word.lives, begins, Counters())))
        elif (word := lost.says(roll, head, said, self.now)) is not None:
            assert follows(self.stages, one.word, word) == ""
            one.commit(word)

    def judge(self) -> None:
        """One founder for each life that counts anywhere; what counts in a term is known to all later ones."""
        for one in self.machines:
            for life in one.roll.renewed.values():
                key = (life.stage, life.number)
                assert self.begun.setdefault(key, life.founder) == life.founder, f"two founders of {key}"
        homes = sorted((one.word for one in self.machines if one.stage == 0), key=lambda word: word.life)
        for word in homes:
            ranked = {life.stage: life for life in word.lives}
            for one in self.machines:
                for life in one.roll.renewed.values():
                    if life.stage > 0 and word.life > one.roll.number(0):  # that counted in an earlier term
                        assert life.number <= ranked.get(life.stage, Life(0, 0, b"")).number, f"{life} is forgotten"

    def misfortune(self) -> None:
        rng, serving = self.rng, [one for one in self.machines if one.up and one.stage >= 0]
        match rng.choice(["kill", "kill", "home", "cut", "heal", "back"]):
            case "kill":
                if serving:
                    rng.choice(serving).up = False
            case "home":
                for one in serving:
                    if one.stage == 0:
                        one.up = rng.random() < 0.3
            case "cut":
                for one in self.machines:
                    one.side = rng.randint(0, 1)
            case "heal":
                for one in self.machines:
                    one.side = 0
            case "back":
                self.back()

    def back(self) -> None:
        """Who was killed starts again, with what is on its disk."""
        for one in self.machines:
            if not one.up:
                one.up = True
                kept, appointments = one.roll.renewed, one.roll.appointments
                one.roll = Roll(SWARM, one.roll.founder, one.key, self.stages, BEAT_S, renewed=kept)
                one.roll.appointments = appointments
                one.roll.tick(self.now)
                if one.stage >= 0:
                    one.word = one.disks[one.stage, one.life]

    def complete(self) -> bool:
        """Whether every stage is served, in its newest life."""
        served = {(one.stage, one.life) for one in self.machines if one.up}
        newest = {
            stage: max((number for s, number in self.begun if s == stage), default=0) for stage in range(self.stages)
        }
        return all((stage, number) in served for stage, number in newest.items())


@dataclass(frozen=True)
class _Appointed:
    stage: int
    founder: bytes


def after_hardship(seed: int) -> Swarm:
    """A swarm that misfortunes have befallen, one after another; links are whole again."""
    swarm = Swarm(seed)
    for _ in range(10):
        swarm.beat()
    for _ in range(swarm.rng.randint(2, 6)):
        swarm.misfortune()
        for _ in range(swarm.rng.choice([5, 40, HOME_LOST_AFTER + 30, HOME_LOST_AFTER + LOST_AFTER + 60])):
            swarm.beat()
    for one in swarm.machines:
        one.side = 0
    return swarm


def assert_completed(swarm: Swarm, beats: int) -> None:
    for _ in range(beats):
        swarm.beat()
        if swarm.complete():
            break
    assert swarm.complete(), [(one.stage, one.life, one.word, one.roll.renewed) for one in swarm.machines]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_cut_lost_and_comes_back_there_is_one_history(seed: int) -> None:
    swarm = after_hardship(seed)
    swarm.back()
    assert_completed(swarm, 600)


@pytest.mark.parametrize("seed", [*range(12), 32, 211, 1153])
def test_where_no_more_than_enough_stages_come_back_they_begin_the_others_anew(seed: int) -> None:
    """Stage 0 among them, and machines that are free. A stage that has agreed to its own end is one of those that agree to it (10, 32, 211); whoever is to take
    its place hears that it may though nobody serves the old life any more (1153)."""
    swarm = after_hardship(seed)
    newest = [max(one.roll.number(stage) for one in swarm.machines) for stage in range(swarm.stages)]
    there = {one.stage for one in swarm.machines if one.stage >= 0 and one.life == newest[one.stage]}
    for stage in sorted(there - {0}, key=lambda stage: swarm.rng.random()):
        if enough(swarm.stages, there - {stage}):
            there.discard(stage)
    free = [one for one in swarm.machines if one.stage not in there and one.stage < 0]
    assert 0 in there and enough(swarm.stages, there) and len(free) >= swarm.stages - len(there)
    gone = [one for one in swarm.machines if one.stage >= 0 and one.stage not in there]
    swarm.back()
    for one in gone:
        one.up = False
    assert_completed(swarm, 1200)


@pytest.mark.parametrize("stages", [3, 4, 5])
def test_stage_0_is_begun_anew_by_one_of_two_sides_at_most(stages: int) -> None:
    """Whichever half of the stages is on which side; each side has machines enough for all of them."""
    for bits in range(1 << stages):
        swarm = Swarm(7)
        while swarm.stages != stages:
            swarm = Swarm(swarm.rng.randrange(1 << 30))
        for _ in range(10):
            swarm.beat()
        for number, one in enumerate(swarm.machines):
            one.side = bits >> one.stage & 1 if one.stage >= 0 else number % 2
        for _ in range(HOME_LOST_AFTER + 4 * LOST_AFTER):
            swarm.beat()
        whole = [
            side for side in (0, 1) if {one.stage for one in swarm.machines if one.side == side} >= set(range(stages))
        ]
        assert len(whole) <= 1, f"both sides have all stages, of which {bits:b} were on one"


def test_a_list_of_a_higher_term_knows_more() -> None:
    assert rank(()) < rank((Life(1, 1, F),)) < rank((Life(1, 1, F), Life(2, 1, F))) < rank((home(1),))
