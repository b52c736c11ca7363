"""The *lives* of a stage: which of its histories counts, and how a stage begins anew whose peers are all gone, or too many of them for a quorum.

A stage's chain is on the disks of its peers, and only they vote in it. When all of them are gone, or so many that the others are no quorum, their chain
stands still for good, and so that the stage can go on somebody has to begin another chain for it: the stage's next life. Two lives must never both
count, so it takes one decision:

    no peer of stage s is heard, or none ──▶ all say so (`Present.lost`) ──▶ a commit of stage 0 names Life(s, n + 1, founder)
    whose chain has had a quorum lately          ──▶ enough other stages acknowledge it ──▶ the founder has or makes the state, and begins the chain of that life

**The chain of stage 0 names lives.** Each of its commits lists the newest life of every stage that was begun anew; the next may only add one to a number. So lives
are numbered without gaps, and each has one founder. Of two stages that is all: of two sides of a partition at most one can begin any, the one with the quorum
of stage 0, whichever side the stage's peers are on. **From three stages on they decide together** (`accord`): a life counts when enough stages have
acknowledged it, and when stage 0 is lost itself, or has no quorum for good, enough of the others call for its next life.

**When.** The proposer looks around first (`protocol/lost.py`): a quorum of the data nodes and half of all other peers that it hears must say that they
have heard no holder of the stage's state for `LOST_AFTER` heartbeats (`STARTING_S`, where nobody has heard any since all were started). `GONE_AFTER` are
enough for data nodes that have found the processes of all holders ended, each by itself, and for others whom half of the data nodes tell so. Whether the data nodes'
processes have ended (`HOME_GONE_AFTER`) all other peers look for themselves and tell (`Present.ended`): only those that compute next to a data node have connections to it, so half of the peers of any one
stage are believed. A holder
whose chain has had no quorum for `NO_QUORUM_AFTER` (`stranded`) says that its own stage is lost, and does not count as one while it says so. Voters check only the numbers. They must not withhold their votes by what they
hear: a commit that one member has voted for has to be voted for by all in the end (Paxos), and stage 0 would stand still for as long as they disagree.

**Who else knows.** What stage 0 names data nodes know from their chain. All others believe what half of the data nodes say that they hear; that is as much as is
known of anything between stages (`protocol/roll.py`): without a stage's whole chain nobody can check a certificate. What a stage has acknowledged, or whom it
calls, is believed of any of its peers, for it takes several stages; so is that a life counts which stage 0 names (`Present.decided`). A number never goes back.

**Two lives are never both served.** A chain is bound to its life (`group_of`), so votes and rounds of one mean nothing in another. Peers say of which
life they are; whoever knows a newer one does not plan with those of an older one, and refuses plans that do. A peer that learns of a newer life of its
stage than its own ends it, and comes in again as a newcomer: of the old one it keeps what is on its disk, for a founder's use only. On the smaller side of a partition an old life may be
trained with until the sides meet: what its peers did is dropped then, what others did there is local progress as that of any minority (invariant 5).

**A stage that has lost its quorum.** Who begins the next life is one that still holds the state (`lost`), and it begins with just that: parameters, momentum,
moments, and what it has trained by itself since (`node/remains.py`). Two lives do not come of it, for the decision is the same one: a stage's
survivors decide nothing, and a side of a partition that may not decide begins nothing, whatever it says. If the absent members live there, and
are a quorum of the stage's old chain, what they commit (in steps that data nodes of that side lead) is of the old life and ends with it when the sides meet:
they come in again as newcomers, and take the state of the new one. If those without whom the data nodes are no quorum hear one of them, nothing begins. And
one that comes back to the survivors in time, so that they are a quorum, ends the claim. So a wrong alarm costs the rounds of the old life that only the
absent members knew: those since the survivors last heard them.

**If the founder dies** before anybody holds the new life's state, that life is lost like any other, and the next number begins. Whoever waits to come in and has
the state of an earlier life on its disk is called first, so another survivor's copy is not passed over.

**Stage 0** counts the run, hands out the samples, and holds the ends of the model. Its next life counts on from what half of its peers were last heard to have counted, which every
peer passes on (`Present.counted`), and hands out no sample below the highest number that may have been handed out by then: so no sample is trained twice as far
as anybody can know, and those that the lost data nodes had in hand, at most a window and a commit's worth each, are not trained in this epoch. A data node that is left
without a quorum has the ledger; it hands out again what the others had in hand (`node/remains.py`). Rounds that only the absent data nodes knew of are gone, as
with every stage. Lives of other stages go on; those that the old stage 0 named and too few acknowledged may be named again with another founder.

What is not covered: of two stages stage 0, and of more the loss of so many at once that the rest is not enough (`accord`). And a founder that began a life, lost its disk and came back before its life was
found lost begins the same life twice; if others had joined it, they refuse it (as with every member that forgot its promises, `standing`).
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from farflung.protocol.keys import PeerId, digest
from farflung.protocol.limits import MAX_HOPS, MAX_LIFE
from farflung.protocol.types import Count, Key

LOST_AFTER = 15
"""Heartbeats without a word from any holder of a stage's state, after which it is lost: half a minute. A wrong alarm costs a stage's last
rounds, and all of its moments, so it takes longer than for a peer to be left out of a step, or a view."""

QUIET_AFTER = 2
"""Heartbeats without a word from any holder of a stage's state, after which data nodes, or all others those of stage 0, dial them (`Network.is_gone`)."""

GONE_AFTER = 3
"""In the place of `LOST_AFTER`, where all holders' machines say that nobody listens any more where they had answered before: their processes have ended. A slow
peer's machine takes the connection, and over a bad link no such word comes back. Whoever is started again later than that comes in as a newcomer, if somebody
else could take its stage meanwhile."""

NO_QUORUM_AFTER = 2 * LOST_AFTER
"""Heartbeats without a quorum of its chain, after which a holder of a stage's state says that the stage is lost: a minute. With `LOST_AFTER`, for which the others
then listen for a better word, that is three times the silence after which a stage without any holder is lost. Nothing is in danger meanwhile, for the
state is there; the survivor trains on; and a machine that is started again is back within that time, as a rule."""

HOME_LOST_AFTER = 6 * LOST_AFTER
"""In the place of `LOST_AFTER`, for stage 0: three minutes, in which a machine that was only started again is back. A wrong alarm costs what its chain alone
knows: which samples it had handed out and nobody trained. And those who were cut off with it must have stopped by then (`Roll.in_touch`)."""

HOME_GONE_AFTER = LOST_AFTER
"""Heartbeats since the processes of all holders of stage 0 were found ended, which are enough in the place of `HOME_LOST_AFTER`, for then nobody is cut off with it: half a
minute, in which a process that was only started again is back. Not since their last word: a machine that starts again says that nobody listens before its node does."""

SOONEST_LOST = min(LOST_AFTER, GONE_AFTER, HOME_LOST_AFTER, HOME_GONE_AFTER)
"""Heartbeats since a holder of a stage's state was heard, within which the stage is not lost, whatever else is known."""

STARTING_S = 600.0
"""In the place of `LOST_AFTER` for a stage of which a peer has heard nobody since it was started itself, unless a data node or half of all others say that it is lost, and of
`NO_QUORUM_AFTER` for a holder that has had no quorum since then, unless half of the data nodes have been running for longer than that: perhaps the whole
swarm is just being started."""


class Counters(Struct, frozen=True, array_like=True):
    """What a chain counts: where the chain of a later life goes on is where stage 0 was when it was decided."""

    version: Count = 0
    steps: Count = 0
    tokens: Count = 0
    samples: Count = 0
    """Those with lower numbers may have been handed out; a later life of stage 0 hands out others. 0 for lives of other stages."""


BEGINNING = Counters()
"""Of a first life."""


class Life(Struct, frozen=True, array_like=True):
    """One history of a stage."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    number: Annotated[int, Meta(ge=0, le=MAX_LIFE)]
    """0: by appointment of the swarm's founder; later ones by a commit of stage 0, or for stage 0 itself of the other stages (`accord`)."""
    founder: Key
    """Who begins its chain."""
    since: Counters = BEGINNING
    """What its first commit counts on from."""


def group_of(swarm: bytes, life: Life) -> bytes:
    """What the chain and the messages of a life are bound to, 32 bytes."""
    number = life.stage.to_bytes(4, "big") + life.number.to_bytes(4, "big")
    return digest("stage", swarm + number + life.founder)


def renewed(lives: Iterable[Life], begins: Mapping[int, PeerId], since: Counters) -> tuple[Life, ...]:
    """The newest lives after a commit that begins the stages `begins` anew, each by its founder; sorted by stage."""
    newest = {life.stage: life for life in lives}
    for stage, founder in begins.items():
        number = newest[stage].number + 1 if stage in newest else 1
        newest[stage] = Life(stage, number, founder, since)
    return tuple(newest[stage] for stage in sorted(newest))
