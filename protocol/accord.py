"""How the stages of a pipeline decide together: what stage 0 says of the others' lives (`lives`), and who begins stage 0 anew.

Stage 0's chain decides which stages begin anew. If it did so alone, nobody could ever replace it: two sides of a partition, one with stage 0 and one with
the rest, would each make the other half anew. So from three stages on the *chains* of the stages vote, each by a commit of its own, and what counts is what
dynamic linear voting counts among peers (`quorum`): **more than half of the stages, or exactly half with stage 0**. Of two stages the first goes on without the
other and the other does not go on without the first, as of two peers; a swarm of three outlives the loss of any one.

It is Raft with chains in the place of servers, which makes it short: a chain has a quorum of its own, writes down what it votes for, and never takes it back.

    a term          a life of stage 0, by its number. One founder begins it, so one chain of commits: a log that names lives of other stages, one after another
    to acknowledge  a chain takes the newest list of lives that stage 0 names into its own commits (`Commit.lives`). A life counts once stage 0 has
                    named it and enough stages, stage 0 among them, have acknowledged a list of the term that has it (`acknowledged`)
    to call         where stage 0 is lost (`lost`), a chain commits who is to begin its next life (`Commit.call`). It calls one for each number, none with a
                    lower one than before, and from then on acknowledges (stage 0: names) nothing of an earlier term. Called by enough stages is elected
                    (`elected`)
    to inherit      who is elected begins with the newest list that those who called him have acknowledged: of the highest term, of these the longest

**Two sides never both begin anything.** Any two sets of enough stages have one in common. So there is one founder for each number; and a life that counted before
a call was acknowledged by a stage that called, so whoever is elected inherits it. An old stage 0 that was only cut off finds nobody to acknowledge what
it names, for enough stages are in a later term: it can begin no stage anew, and where it meets one of the others it ends.

**Stages that change.** A chain of a life that is over has no vote: the vote of stage s is that of its newest life, and nobody counts one whose own list, or that of
another who calls, knows a later life of the stage; but for that very life, for it was there when that was named. Stage 0 names no further lives before the last
ones count. So each change is decided by enough of the stages as they were before it, and the next one by enough of those after it. Who had a vote in it may be gone
by then, since the life has ended its own; so everybody says which lives it knows to count (`Present.decided`), and of those that stage 0 names one word of that is enough.

**Nothing stands for ever.** Two who are called for one number may each have too few; then after `lives.LOST_AFTER` heartbeats the lowest stage that is there calls
for the next number, and the others come along. If stage 0 is back by then, that is stage 0: some have called and acknowledge nothing of its any more, so its own
chain calls for its next life, begun by one of its peers with all that it has; who hears it waits half as long again before coming along with an older call,
or both would happen at the same moment. Numbers of stage 0's lives may so have gaps.

What it costs: where more than half of the stages lose their quorum at once, or exactly half and stage 0 is one of them, nothing begins anew until enough have
it again. That is no matter of taste: each set of stages that may replace the rest forbids the rest to replace it. And a stage that stage 0 had just named a next
life of when it was lost itself counts with neither life in a call, where a caller knows of that one: it may have counted, or not.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from farflung.protocol.limits import MAX_LIFE
from farflung.protocol.lives import Life
from farflung.protocol.quorum import is_quorum

FEWEST = 3
"""Stages of a pipeline that decide together. Of two, stage 0 is always enough."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a stage's chain says, by its newest commit as far as that is known."""

    life: int
    """Number of the life whose chain it is."""
    lives: tuple[Life, ...] = ()
    """Named by stage 0, and acknowledged."""
    call: Life | None = None
    """Of stage 0: the newest that it has called for."""


def enough(stages: int, voters: Iterable[int]) -> bool:
    """Whether these stages may decide for all of a pipeline."""
    return is_quorum(range(stages), set(voters))


def number_in(lives: Iterable[Life], stage: int) -> int:
    """Of a stage's newest life, by a list of those that were begun anew."""
    return next((life.number for life in lives if life.stage == stage), 0)


def rank(lives: Collection[Life]) -> tuple[int, int]:
    """Of two lists the one that knows more has the higher: its term, and how many lives stage 0 had named before."""
    return number_in(lives, 0), sum(life.number for life in lives if life.stage > 0)


def acknowledged(stages: int, words: Mapping[int, Word], term: int, life: Life) -> bool:
    """Whether a life that stage 0 names in this term counts."""
    voters = {
        stage
        for stage, word in words.items()
        if number_in(word.lives, 0) == term
        and (number_in(word.lives, stage) <= word.life or _takes_place_of(life, stage, word))
        and (life in word.lives or number_in(word.lives, life.stage) > life.number)
    }
    return enough(stages, {0, *voters})


def _takes_place_of(life: Life, stage: int, word: Word) -> bool:
    """Whether a life follows on the chain of a stage that says this word, and agrees to it: that chain has a vote until then."""
    return life.stage == stage and life.number == word.life + 1 and life in word.lives


def elected(stages: int, words: Mapping[int, Word]) -> tuple[Life, tuple[Life, ...]] | None:
    """The newest life of stage 0 that enough stages call, and the list that it begins with; None while there is none."""
    calls = {word.call for word in words.values() if word.call is not None}
    for life in sorted(calls, key=lambda one: (-one.number, one.founder)):
        callers = {stage: word for stage, word in words.items() if word.call == life}
        newest = max((word.lives for word in callers.values()), key=rank)
        if enough(stages, (stage for stage, word in callers.items() if number_in(newest, stage) <= word.life)):
            others = [one for one in newest if one.stage > 0]
            return life, (life, *others)
    return None


def homes(stages: int, words: Mapping[int, Word]) -> list[Life]:
    """Lives of stage 0 that count, the newest last: one that is elected, and those of which some stage has acknowledged a list, which nobody has before."""
    found = {life for word in words.values() for life in word.lives if life.stage == 0}
    now = elected(stages, words)
    return sorted(found if now is None else {*found, now[0]}, key=lambda life: (life.number, life.founder))


def number_of(call: Life | None) -> int:
    """0 for none."""
    return 0 if call is None else call.number


def follows(stages: int, before: Word, after: Word) -> str:
    """What is wrong with a chain's next word; empty when nothing is. All that voters can check: what is said elsewhere is no commit of theirs."""
    if after.call != before.call:
        if after.call is None or after.call.stage != 0 or after.call.number <= number_of(before.call):
            return "calls for a life of stage 0 that cannot come next"
    if after.lives == before.lives:
        return ""
    listed = [life.stage for life in after.lives]
    if listed != sorted(set(listed)) or any(not 0 <= life.stage < stages or life.number < 1 for life in after.lives):
        return "has lives of stages that there cannot be"
    if rank(after.lives) <= rank(before.lives) or number_in(after.lives, 0) < number_of(before.call):
        return "takes lives of stages back, or those of a term that is over"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What the proposer of a stage's chain sees."""

    stages: int
    stage: int
    """Its own."""
    words: Mapping[int, Word]
    """Of other stages, as far as they are heard."""
    number: int
    """Of stage 0's life that counts."""
    named: tuple[Life, ...]
    """By stage 0, in that life; nothing while nobody of it is heard, and where we are of it."""
    lost: bool
    """Enough peers agree that stage 0 is lost."""
    overdue: bool
    """Who was called last has been for long, and does not count."""
    unsettled: bool
    """For long some have been called, perhaps one after another, who do not count. Stage 0 can begin nothing any more: it calls for its own next life, if it is there."""
    abandoned: bool
    """For half as long again: though stage 0 is heard it has not called, and who hears it must come along with the others."""
    near: Collection[int]
    """Other stages whose chains have a quorum."""


def next_word(mine: Word, around: Around, call: Callable[[int], Life | None]) -> Word | None:
    """What the next commit of a stage's chain says; None while that is nothing new. `call`: a life of stage 0 of this number, None if nobody can begin it."""
    lives = mine.lives
    if rank(around.named) > rank(lives) and number_in(around.named, 0) >= number_of(mine.call):
        lives = around.named
    said = Word(mine.life, lives, _call(mine, around, call))
    return None if said == mine else said


def _call(mine: Word, around: Around, call: Callable[[int], Life | None]) -> Life | None:
    known = max(around.number, number_of(mine.call))
    pending = number_of(mine.call) > around.number
    higher = {stage: word.call for stage, word in around.words.items() if word.call and word.call.number > known}
    if around.stage == 0:  # it is there, and begins its next life itself, if it has to
        known = max([known, *(one.number for one in higher.values())])
    elif higher:
        # somebody else was first: of several the highest number, for which most will come, then the lowest stage
        stage = min(higher, key=lambda one: (-higher[one].number, one))
        patience_over = around.unsettled if stage == 0 else around.abandoned  # stage 0 goes on with all that it has
        return higher[stage] if around.lost or pending or patience_over else mine.call
    waits = pending and not around.overdue
    there = {around.stage, *around.near}
    needed = around.lost or (around.unsettled if around.stage == 0 else around.overdue)
    if not needed or waits or min(there) != around.stage or not enough(around.stages, there):
        return mine.call
    return mine.call if known >= MAX_LIFE else call(known + 1) or mine.call
