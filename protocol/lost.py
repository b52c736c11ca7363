"""What the proposer of stage 0's chain does about lost stages: whether they are lost, and who begins them anew (`lives`).

Lost is what enough peers have not heard: a quorum of the view, for stage 0 must go on with it, and half of all others that we hear, for the data
nodes may be those with the bad links. Who is silent has no opinion. What peers say is as old as their last heartbeat.

Stage 0 is begun anew by the others (`accord`): who proposes in the chain of another stage looks around in the same way, for a quorum of its own members.

The founder is whoever still holds the stage's state, if its chain has only lost its quorum: of several the one with the newest version, then the smallest key.
Else it is somebody who waits outside and can hold that stage, and of these first who has a state of it on its disk, else a peer that can hold it and is free to
move, of the stage that has most, the proposer itself like any other; of several those come first that did not begin the stage the last time. A stage that
nobody can take waits for a newcomer.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from farflung.protocol import accord
from farflung.protocol.accord import Around, Word
from farflung.protocol.chain import Commit
from farflung.protocol.keys import PeerId
from farflung.protocol.lives import BEGINNING, Counters, Life
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.quorum import is_quorum
from farflung.protocol.roll import Roll, in_order

ABANDONED = 1.5
"""Times as long as stage 0 waits before it calls for its own next life, others that hear it wait before they come along with another call."""


def begins(roll: Roll, view: Collection[PeerId], own: Present, now: float) -> dict[int, PeerId]:
    """The stages to begin anew, and by whom; `view` is that of stage 0, we being one of it, and `own` what we say of ourselves."""
    mine = roll.lost(now, held=0)
    if not mine or not accord.enough(roll.stages, set(range(roll.stages)) - set(mine)):
        return {}
    found: dict[int, PeerId] = {}
    for stage in mine:
        if not _agreed(roll, view, stage, now):
            continue
        founder = _founder(roll, stage, set(found.values()), own, now)
        if founder is not None:
            found[stage] = founder
    return found


def says(roll: Roll, head: Commit, own: Present, now: float) -> Word | None:
    """What the chain of our stage is to say of lives from now on, but for those that stage 0 begins; None: nothing new. `head` is its newest commit."""
    around = Around(
        stages=roll.stages,
        stage=own.stage,
        words={stage: word for stage, word in roll.words(now).items() if stage != own.stage},
        number=roll.number(0),
        named=roll.named(now) if own.stage > 0 else (),
        lost=0 in roll.lost(now, held=own.stage) and _agreed(roll, head.view, 0, now),
        overdue=roll.overdue(now),
        unsettled=roll.unsettled(now),
        abandoned=roll.unsettled(now, ABANDONED),
        near=roll.near(now),
    )

    def call(number: int) -> Life | None:
        founder = _founder(roll, 0, (), own, now)
        return None if founder is None else Life(0, number, founder, _since(roll, head))

    return accord.next_word(Word(own.life, head.lives, head.call), around, call)


def outlook(roll: Roll, lost: Sequence[int]) -> str:
    """For people, of stages that are lost: what comes next, or what they have to do."""
    *most, last = map(str, lost)
    one, which = not most, f"{', '.join(most)} and {last}" if most else last
    said, it = (f"stage {which} is lost", "it") if one else (f"stages {which} are lost", "them")
    left = set(range(roll.stages)) - set(lost)
    if accord.enough(roll.stages, left) if roll.decides_together else 0 in left:
        return f"{said}: begun anew as soon as a machine can take {it}; to add one, `farflung join` there"
    served = " or ".join([", ".join(most), last] if most else [last])
    return (
        f"{said}, as far as this node hears, and too few are left to begin {it} anew: see to this machine's link, or "
        f"start a machine again that served stage {served}"
    )


def _since(roll: Roll, head: Commit) -> Counters:
    """What stage 0 counts on from: what its chain was last heard to have counted, or that of another stage, which has made no round that it did not begin.
    Where nobody has heard it, as many samples are let go as that stage has had tickets."""
    heard = roll.hearsay.counted
    return Counters(
        max(heard.version, head.version),
        max(heard.steps, head.steps),
        max(heard.tokens, head.tokens),
        heard.samples if heard != BEGINNING else head.ledger.cursor,
    )


def _agreed(roll: Roll, view: Collection[PeerId], stage: int, now: float) -> bool:
    """Whether a quorum of a view that we are one of, and half of all others that we hear, say that a stage is lost, as we do."""
    living = [peer for peer in roll.known if roll.alive(peer, now)]
    agree = {peer for peer in living if (said := roll.present(peer)) is not None and stage in said.lost}
    asked = [peer for peer in living if (said := roll.present(peer)) is not None and said.stage > 0]
    others = sum(peer in agree for peer in asked)
    return is_quorum(view, {*agree, roll.me}) and 2 * others >= len(asked)


def _founder(roll: Roll, stage: int, taken: Collection[PeerId], own: Present, now: float) -> PeerId | None:
    """Who begins a stage anew; None while nobody can."""
    called = {life.founder for life in roll.renewed.values() if roll.holders(life.stage, now) is None}
    last = roll.life(stage)
    if last is not None:  # it may be called again, if there is nobody else
        called.discard(last.founder)
    heard = {peer: one for peer in roll.known if roll.alive(peer, now) and (one := roll.present(peer)) is not None}
    said = {peer: one for peer, one in {**heard, roll.me: own}.items() if peer not in taken and peer not in called}
    serving = [*roll.serving(stage, now), *([roll.me] if (own.stage, own.life) == (stage, roll.number(stage)) else [])]
    held = {peer: present.version for peer, present in said.items() if peer in serving and present.digest}
    if held:
        return min(held, key=lambda peer: (-held[peer], peer))
    candidates = [peer for peer, present in said.items() if present.stage < 0 and stage in present.fits]
    if not candidates:
        staying = {peer: present.stage for peer, present in said.items() if present.trains and present.wants < 0}
        size = Counter(staying.values())
        able = [peer for peer in staying if stage in said[peer].fits and size[staying[peer]] > 1]
        if not able:
            return None
        richest = max((size[staying[peer]], staying[peer]) for peer in able)
        candidates = [peer for peer in able if (size[staying[peer]], staying[peer]) == richest]
    order = in_order(roll.swarm, candidates)
    kept = {peer: said[peer].version if said[peer].wants == stage else 0 for peer in order if said[peer].stage < 0}
    order.sort(key=lambda peer: (last is not None and peer == last.founder, -kept.get(peer, 0)))
    return order[0]
