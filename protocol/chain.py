"""The swarm's one history: commits, each naming its parent, certified by a quorum of the parent's view."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol import accord
from farflung.protocol import ledger as ledgers
from farflung.protocol.accord import Word
from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.keys import PeerId, Signer, digest, verify
from farflung.protocol.lap import Lap, Laps
from farflung.protocol.ledger import Ledger
from farflung.protocol.limits import MAX_DIVISIONS, MAX_FRAGMENTS, MAX_GROUP_PEERS, MAX_HOPS, MAX_PARTS
from farflung.protocol.lives import BEGINNING, Counters, Life, renewed
from farflung.protocol.quorum import is_quorum
from farflung.protocol.types import Count, Digest, Key, Keys, Offset, OptionalDigest, Signature

COMMIT_DOMAIN = b"farflung/commit/1\0"
VOTE_DOMAIN = b"farflung/vote/1\0"

TURNS = 4
"""Of each fragment, before their order moves on by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the manifest says about commits. Raises ValueError where a width is no part of the fragments."""

    ahead: int
    """Samples that a member holds after each commit, for every step of the lap that begins."""
    lease: int
    """Rounds for which a vanished member keeps its samples."""
    max_group: int
    """Most members of a view."""
    cuts: tuple[int, ...]
    """Where the fragments of the flat parameter vector end, from 0 to its number of elements; they are synchronised in turn, one or several at once."""
    laps: Laps
    """How long one may be and what its round may move, and tau."""
    total_steps: int
    """Inner steps of the whole run, as `Commit.steps` counts them."""
    tokens_per_sample: int
    stages: int = 1
    """Of the pipeline, in the rules of the chain of stage 0, which may begin the others anew; 1 elsewhere."""
    accord: int = 0
    """The same in the rules of the chain of another stage, where stages decide together (`accord`); 0 elsewhere."""
    divides: bool = False
    """Whether a full group becomes two."""
    inherits: bool = False
    """It is a later life of stage 0, which begins with what was known of the last one."""
    since: Counters = BEGINNING
    """What the first commit counts on from."""

    def __post_init__(self) -> None:
        if any(self.num_fragments % width for width in self.laps.widths):
            raise ValueError(f"{self.num_fragments} fragments cannot move by {self.laps.widths}")

    @property
    def numel(self) -> int:
        """Elements of the flat parameter vector."""
        return self.cuts[-1]

    @property
    def num_fragments(self) -> int:
        """The most that P may be."""
        return len(self.cuts) - 1

    def turns(self, commit: "Commit") -> int:
        """P: rounds as wide as the next one in which every fragment moves once."""
        return self.num_fragments // commit.width

    def finished(self, commit: "Commit") -> bool:
        """Whether the run is complete."""
        return self.laps.finished(self.total_steps - commit.steps)

    def is_last(self, parent: "Commit") -> bool:
        """Whether the round after `parent` is the last one of the run, after which nothing is to stay behind."""
        return self.laps.finished(self.total_steps - parent.steps - parent.lap)

    def ended_by(self, commit: "Commit") -> bool:
        """Whether `commit` carries the last round of the run."""
        return commit.round is not None and self.finished(commit)

    def may_divide(self, commit: "Commit") -> bool:
        """Whether the group may become two after `commit`, when it is full: its samples can be shared out no further than so often."""
        return self.divides and len(commit.ledger.shares) < MAX_DIVISIONS

    def has_room(self, commit: "Commit") -> bool:
        """Whether somebody may come after `commit`: a place is free, or the group may become two."""
        return len(commit.view) < self.max_group or self.may_divide(commit)

    def span(self, parent: "Commit") -> tuple[int, int]:
        """Elements [start, stop) that the round after `parent` moves: the fragments whose turn it is, and in the last round of the run everything, so that no
        progress stays behind.

        The order is that of `training.streaming.Timetable`, but moves on by one after every `TURNS` turns of each: who can only take part in every third
        round would meet the same one of three for ever.
        """
        if self.is_last(parent):
            return 0, self.numel
        count = self.turns(parent)
        first = (parent.version + 1 + parent.version // (TURNS * count)) % count * parent.width
        return self.cuts[first], self.cuts[first + parent.width]


class Contribution(Struct, frozen=True, array_like=True):
    """What one contributor brought into a round."""

    peer: Key
    tokens: Count
    samples: Count
    """Samples from the front of its window."""
    ready_ms: Count
    """How long it trained for this round: who needed least has waited for the others."""


class PartResult(Struct, frozen=True, array_like=True):
    """One part of the vector after the round."""

    owner: Key
    start: Offset
    stop: Offset
    digest: OptionalDigest
    """Of the encoded mean (`compression.digest`); empty when the part was left out for everybody alike."""


class RoundResult(Struct, frozen=True, array_like=True):
    """The all-reduce that a commit carries."""

    plan: Digest
    contributors: Annotated[tuple[Contribution, ...], Meta(max_length=MAX_GROUP_PEERS)]
    parts: Annotated[tuple[PartResult, ...], Meta(max_length=MAX_PARTS)]
    seconds_ms: Count
    """From plan to the last member that held everything, as the proposer saw it."""


class Half(Struct, frozen=True, array_like=True):
    """Of a group that has divided, the members who are not in the view of the commit that says so."""

    view: Keys
    ledger: Ledger
    turned: bool = False
    """They are those who stay: the commit is told as those who go see it."""
    group: OptionalDigest = b""
    """Of those who stay, where it is turned; the other is named by the commit (`turned`)."""


class Commit(Struct, frozen=True, array_like=True):
    """One link of the history of a group."""

    height: Count
    parent: OptionalDigest
    """Hash of the commit before; empty at height 0."""
    version: Count
    """Rounds that moved the outer state so far: the version of the outer state after this commit."""
    tokens: Count
    """Tokens the whole swarm has contributed so far."""
    steps: Count
    """Inner steps of the run so far: the sum of the laps that ended with a round."""
    lap: Count
    """Inner steps of the fastest member after which the next round is due."""
    width: Annotated[int, Meta(ge=1, le=MAX_FRAGMENTS)]
    """Fragments that it moves at once."""
    view: Keys
    """Who may vote on the next height, sorted."""
    left: Keys
    """Members that said goodbye."""
    ledger: Ledger
    round: RoundResult | None = None
    lives: Annotated[tuple[Life, ...], Meta(max_length=MAX_HOPS)] = ()
    """The newest of each stage of a pipeline that was begun anew, by stage: as stage 0's chain names them, or another has acknowledged."""
    call: Life | None = None
    """The newest life of stage 0 that this chain has called for (`accord`)."""
    group: OptionalDigest = b""
    """Whose history it is; empty: the first one's, which the swarm's founder has begun."""
    half: Half | None = None
    """Where the group becomes two: the other half."""

    @property
    def next_round(self) -> Lap:
        return Lap(self.lap, self.width)


class Vote(Struct, frozen=True, array_like=True):
    voter: Key
    signature: Signature


class Certified(Struct, frozen=True, array_like=True):
    """A commit with the votes that decided it."""

    commit: Commit
    ballot: Count
    votes: Annotated[tuple[Vote, ...], Meta(max_length=MAX_GROUP_PEERS)]


_encoder = msgspec.msgpack.Encoder()


def commit_hash(swarm: bytes, commit: Commit) -> bytes:
    """sha256 that names a commit, bound to the swarm (32 bytes). One that divides a group has one name in both histories."""
    if commit.half is not None and commit.half.turned:
        commit = as_decided(commit)
    return sha256(COMMIT_DOMAIN + swarm + _encoder.encode(commit)).digest()


def turned(swarm: bytes, commit: Commit) -> Commit:
    """A commit that divides a group, as the history of those who go begins with it: they are its view, and their group is named by it.

    Nothing else is needed to begin: whoever has the history of the group until then has that of both halves, and the votes of the whole group are the
    certificate of both. From the next commit on each goes its own way.
    """
    half = commit.half
    assert half is not None and not half.turned, "only what divides has another side"
    stays = Half(commit.view, commit.ledger, turned=True, group=commit.group)
    group = digest("group", commit_hash(swarm, commit))
    return msgspec.structs.replace(commit, view=half.view, ledger=half.ledger, group=group, half=stays)


def goes(commit: Commit, peer: PeerId) -> bool:
    """Whether a peer is of those who go, where a group becomes two. Who has no place yet is so by a bit of its key, each time by another one: of a crowd that waits
    each half has its share then, and twice as many become members at a time. If all went on with those who stay, the others would win nobody, and these have to divide
    again for each few, which they may not do for long (`may_divide`)."""
    commit = as_decided(commit)
    if commit.half is None or peer in commit.view:
        return False
    number = len(commit.ledger.shares) - 1  # of this division, below MAX_DIVISIONS
    return peer in commit.half.view or bool(int.from_bytes(peer[:2], "big") >> number & 1)


def as_decided(commit: Commit) -> Commit:
    """A commit as its group has voted for it: as those see it who stay, if it divides the group."""
    half = commit.half
    if half is None or not half.turned:
        return commit
    goes = Half(commit.view, commit.ledger)
    return msgspec.structs.replace(commit, view=half.view, ledger=half.ledger, group=half.group, half=goes)


def vote_bytes(swarm: bytes, height: int, ballot: int, digest: bytes) -> bytes:
    """What a voter signs."""
    return VOTE_DOMAIN + swarm + height.to_bytes(8, "big") + ballot.to_bytes(8, "big") + digest


def genesis(founder: PeerId, rules: Rules, *, lives: tuple[Life, ...] = (), ledger: Ledger | None = None) -> Commit:
    """Height 0: the founder alone, with its first window of samples. A later life of stage 0 begins with the lives that it inherits, and with the ledger
    that its founder still has of the last one, if it has it."""
    since = rules.since
    lap = rules.laps.shortest(rules.total_steps - since.steps)
    window = rules.ahead * lap
    before = Ledger(cursor=since.samples) if ledger is None else ledger
    ledger = ledgers.advance(before, trained={}, view=[founder], left=[], window=window, version=since.version, lease=0)
    return Commit(
        height=0,
        parent=b"",
        version=since.version,
        tokens=since.tokens,
        steps=since.steps,
        lap=lap,
        width=1,
        view=(founder,),
        left=(),
        ledger=ledger,
        lives=lives,
    )


def is_genesis(commit: Commit, founder: PeerId, rules: Rules) -> bool:
    """Whether a chain may begin so. What a life inherits only its founder knows."""
    expected = genesis(founder, rules)
    if rules.inherits:
        expected = msgspec.structs.replace(expected, lives=commit.lives, ledger=commit.ledger)
    return commit == expected


def founded(
    swarm: bytes, signer: Signer, rules: Rules, *, lives: tuple[Life, ...] = (), ledger: Ledger | None = None
) -> Certified:
    """The genesis of a chain, with the vote of whoever begins it; see `genesis`."""
    commit = genesis(signer.peer_id, rules, lives=lives, ledger=ledger)
    vote = signer.sign(vote_bytes(swarm, 0, 0, commit_hash(swarm, commit)))
    return Certified(commit, 0, (Vote(signer.peer_id, vote),))


def successor(
    swarm: bytes,
    parent: Commit,
    rules: Rules,
    *,
    view: tuple[PeerId, ...],
    left: tuple[PeerId, ...],
    result: RoundResult | None,
    lap: Lap | None = None,
    begins: Mapping[int, PeerId] | None = None,
    word: Word | None = None,
    goes: tuple[PeerId, ...] = (),
) -> Commit:
    """The commit after `parent`; ledger, version, tokens and steps follow from the arguments alone. `lap` begins with it, where it
    carries a round; None: as the last. `begins`: stages that it begins anew, and by whom (`lives`); `word`: what the chain of another stage
    than 0 says from now on of all of them (`accord`), None: nothing new; `goes`: members who go and are another group, those of the view stay.

    Raises ValueError when a contribution claims samples that its peer does not hold, or the samples cannot be shared out among more groups.
    """
    lap = parent.next_round if lap is None else lap
    contributions = result.contributors if result else ()
    version = parent.version + (1 if result else 0)
    trained: Mapping[PeerId, int] = {c.peer: c.samples for c in contributions}
    half, before = None, parent.ledger
    if goes:
        before, theirs = ledgers.shared(before, goes)
        half = Half(tuple(sorted(goes)), theirs)
    ledger = ledgers.advance(
        before,
        trained=trained,
        view=view,
        left=left,
        window=rules.ahead * lap.steps,
        version=version,
        lease=rules.lease,
    )
    return Commit(
        height=parent.height + 1,
        parent=commit_hash(swarm, parent),
        version=version,
        tokens=parent.tokens + sum(c.tokens for c in contributions),
        steps=parent.steps + (parent.lap if result else 0),
        lap=lap.steps,
        width=lap.width,
        view=tuple(sorted(view)),
        left=tuple(sorted(left)),
        ledger=ledger,
        round=result,
        lives=renewed(parent.lives, begins or {}, Counters(parent.version, parent.steps, parent.tokens))
        if word is None
        else word.lives,
        call=parent.call if word is None else word.call,
        group=parent.group,
        half=half,
    )


def check_successor(swarm: bytes, parent: Commit, commit: Commit, rules: Rules, *, peer: PeerId) -> None:
    """Refuse a commit that does not follow from `parent` by the rules. Raises Refused naming `peer`."""
    told, commit = commit, as_decided(commit)
    goes = () if commit.half is None else commit.half.view

    def demand(holds: bool, what: str) -> None:
        if not holds:
            raise Refused(f"commit {commit.height} {what}", peer=peer)

    demand(
        commit.height == parent.height + 1 and commit.parent == commit_hash(swarm, parent),
        f"does not follow our commit {parent.height}",
    )
    demand(list(commit.view) == sorted(set(commit.view)), "has an unsorted view")
    demand(0 < len(commit.view) <= rules.max_group, f"has a view of {len(commit.view)} members")
    demand(set(commit.left) <= set(parent.view), "lets outsiders leave")
    demand(not set(commit.left) & set(commit.view), "keeps a member that left")
    if commit.half is not None:
        full = len(parent.view) == rules.max_group > 1
        demand(rules.divides and full and commit.round is None and not commit.left, "divides a group that it must not")
        demand(list(goes) == sorted(set(goes)) and not set(goes) & set(commit.view), "has members in both halves")
        demand({*goes, *commit.view} == set(parent.view), "loses members, or wins some, where the group divides")
        demand(
            0 <= len(commit.view) - len(goes) <= 1, f"divides a group into {len(commit.view)} and {len(goes)} members"
        )
    demand(
        is_quorum(parent.view, {*commit.view, *commit.left, *goes}),
        "would leave a view without a quorum of the last",
    )
    if commit.round is None:
        demand(commit.next_round == parent.next_round, "changes the lap without a round")
    else:
        _check_round(parent, commit.round, rules, demand)
        left = rules.total_steps - parent.steps - parent.lap
        allowed = rules.laps.allows(commit.next_round, left)
        wide = "" if commit.width == 1 else f" and {commit.width} fragments"
        demand(allowed, f"begins a lap of {commit.lap} steps{wide}, with {left} steps left")
    begins, word = {}, None
    if rules.accord:
        before, word = Word(0, parent.lives, parent.call), Word(0, commit.lives, commit.call)
        wrong = accord.follows(rules.accord, before, word)
        demand(not wrong, wrong)
    else:
        begins = {life.stage: life.founder for life in commit.lives if life not in parent.lives}
        demand(all(0 < stage < rules.stages for stage in begins), "begins a stage anew that it may not")
        demand(not begins or parent.call is None, "begins a stage anew after its own life was called to an end")
        if commit.call != parent.call:
            before, word = Word(0, parent.lives, parent.call), Word(0, parent.lives, commit.call)
            wrong = accord.follows(rules.stages, before, word)
            demand(not wrong and rules.stages >= accord.FEWEST, wrong or "calls for a life of stage 0, alone")
    try:
        expected = successor(
            swarm,
            parent,
            rules,
            view=commit.view,
            left=commit.left,
            result=commit.round,
            lap=commit.next_round,
            begins=begins,
            word=word,
            goes=goes,
        )
    except ValueError as error:
        raise Refused(f"commit {commit.height}: {error}", peer=peer) from error
    demand(expected.lives == commit.lives, "has lives of stages that do not follow from the last")
    demand(expected == commit, "has a ledger that does not follow from the last")
    # No vote covers how it is told to those who go: what they are called follows from what was voted for.
    demand(told == commit or told == turned(swarm, commit), "calls a group by a name that is not its own")


def _check_round(parent: Commit, result: RoundResult, rules: Rules, demand: Callable[[bool, str], None]) -> None:
    contributors = [c.peer for c in result.contributors]
    demand(bool(contributors) and contributors == sorted(set(contributors)), "has unsorted contributors")
    demand(set(contributors) <= set(parent.view), "counts contributors from outside the view")
    for c in result.contributors:
        demand(0 < c.tokens == c.samples * rules.tokens_per_sample, "counts tokens that are not its samples")
    position, end = rules.span(parent)
    for part in result.parts:
        demand(part.start == position < part.stop, "has parts that leave gaps or overlap")
        demand(len(part.digest) in (0, 32), "has a digest that is none")
        position = part.stop
    demand(position == end, f"ends at element {position}, not at {end}")
    demand(any(part.digest for part in result.parts), "moves nothing")


def check_certificate(swarm: bytes, certified: Certified, voters: tuple[PeerId, ...], *, peer: PeerId) -> None:
    """Check that a quorum of `voters` (the parent's view) signed. Raises Refused or BadSignature naming `peer`."""
    who = [vote.voter for vote in certified.votes]
    if len(set(who)) != len(who) or not set(who) <= set(voters) or not is_quorum(voters, who):
        raise Refused(f"commit {certified.commit.height} has no quorum of votes", peer=peer)
    signed = vote_bytes(swarm, certified.commit.height, certified.ballot, commit_hash(swarm, certified.commit))
    for vote in certified.votes:
        try:
            verify(vote.voter, vote.signature, signed)
        except BadSignature as error:
            raise BadSignature(f"commit {certified.commit.height} carries a forged vote", peer=peer) from error
