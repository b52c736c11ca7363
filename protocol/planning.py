"""The proposer's decisions, each a pure function that returns what to do and why."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from farflung.protocol.keys import PeerId, names_of
from farflung.protocol.messages import Ready
from farflung.protocol.quorum import is_quorum


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a proposer knows when it decides what comes next."""

    view: tuple[PeerId, ...]
    live: frozenset[PeerId]
    """Members of the view that are alive, those about to leave included: they vote until they are let go."""
    holders: frozenset[PeerId]
    """Live members that hold the outer state, and so may vote."""
    left: frozenset[PeerId]
    """Members of the view that said goodbye."""
    sure: frozenset[PeerId]
    """Live members that were heard of since the last of those said goodbye; not asked where nobody has."""
    dead: frozenset[PeerId]
    """Members of the view that were called dead."""
    gone: frozenset[PeerId]
    """Those of them that are dead for long enough to be removed."""
    readies: Mapping[PeerId, Ready]
    """Live members with progress to contribute."""
    awaited: frozenset[PeerId]
    """Live members that are training and not ready yet."""
    joiners: tuple[PeerId, ...]
    """Outsiders that may join: admitted, alive, holding the current state."""
    hold_s: float
    """Seconds for which the next round is held back so that a newcomer can catch up; 0 or less when there is none."""
    min_contributors: int
    max_group: int
    divides: bool
    """Whether a full group becomes two, so that others find room; not where it has come from so many that its samples can be shared out no further."""
    patience_left_s: float
    """Seconds until the matchmaking deadline; not asked while nobody is ready."""
    finished: bool
    """Whether all rounds of the run are done."""


@dataclass(frozen=True, slots=True)
class StartRound:
    members: tuple[PeerId, ...]
    contributors: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeView:
    view: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Divide:
    """The group becomes two."""

    stays: tuple[PeerId, ...]
    goes: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


def decide(s: Situation) -> StartRound | ChangeView | Divide | Wait:
    """What the proposer of a fresh ballot does next, and a sentence that says why."""
    if not is_quorum(s.view, s.holders):
        return Wait(no_quorum(s.view, s.live, s.holders))

    change = _change_of_view(s)
    if change is not None and s.left:  # whoever leaves is waiting to be let go
        return change
    if s.hold_s > 0.0 and change is None and len(s.view) < s.max_group:
        return Wait("lets a newcomer catch up")
    joiners = s.joiners[: max(0, s.max_group - len(s.view))]
    if not s.finished and len(s.readies) >= s.min_contributors and (not s.awaited or s.patience_left_s <= 0.0):
        late = f", without waiting longer for {names_of(sorted(s.awaited))}" if s.awaited else ""
        members = tuple(sorted([*s.live, *joiners]))
        return StartRound(
            members, tuple(sorted(s.readies)), f"{len(s.readies)} of {len(s.live)} members are ready{late}"
        )
    if change is not None:
        return change
    halves = _halves(s)
    if halves is not None:
        return halves

    if s.finished:
        return Wait("the run is complete")
    if not s.readies and len(s.awaited) >= s.min_contributors:
        return Wait("all train for the next round")
    if len(s.readies) < s.min_contributors:
        return Wait(f"{len(s.readies)} of at least {s.min_contributors} contributors are ready")
    return Wait(f"waiting up to {s.patience_left_s:.0f} s more for {names_of(sorted(s.awaited))}")


def no_quorum(view: Collection[PeerId], live: Collection[PeerId], holders: Collection[PeerId]) -> str:
    """Why nothing can be decided now, and what helps, for people."""
    missing = frozenset(view) - frozenset(live)
    if is_quorum(view, live):
        if not holders:
            who = f"; who has it must come back ({names_of(sorted(missing))})" if missing else ""
            return f"no quorum: nobody reachable holds the outer state{who}"
        return f"no quorum: {len(holders)} of {len(view)} members hold the outer state, the others download it"
    needed = len(view) // 2 + 1 - len(live)
    back = "must come back" if needed == len(missing) else f"must come back, {needed} of them"
    return f"no quorum: {len(live)} of {len(view)} members reachable; {names_of(sorted(missing))} {back}"


def lets_go(staying: Collection[PeerId], sure: Collection[PeerId]) -> bool:
    """Whether others may be let go: of those who stay enough are surely there to decide what comes next, if anybody stays."""
    return not staying or is_quorum(staying, sure)


def _change_of_view(s: Situation) -> ChangeView | None:
    """Let in who may join and let go who left or is gone; None when there is nobody, or not enough would remain to decide it."""
    staying = [p for p in s.view if p not in s.gone | s.left]
    if s.left and not lets_go(staying, s.sure):
        if not s.dead | s.sure >= set(staying):
            return None  # some may have just died: that is known after their next heartbeat, or the verdict
        staying = [p for p in staying if p not in s.dead]
    joiners = s.joiners[: max(0, s.max_group - len(staying))]
    view = tuple(sorted([*staying, *joiners]))
    if not view or view == s.view or not is_quorum(s.view, {*view, *s.left}):
        return None
    if not joiners and not s.holders & set(staying):  # the state must not go with those who leave
        return None
    reasons = [f"admits {names_of(sorted(joiners))}"] if joiners else []
    silent = set(s.view) - s.left - set(staying)
    reasons += [f"removes {names_of(sorted(silent))} (silent)"] if silent else []
    reasons += [f"lets {names_of(sorted(s.left))} go"] if s.left else []
    return ChangeView(view, tuple(sorted(s.left)), "; ".join(reasons))


def _halves(s: Situation) -> Divide | None:
    """A full group for which others wait becomes two; None when there is no need, or a half would be too small for rounds, or could decide nothing."""
    full = s.divides and s.joiners and len(s.view) == s.max_group > 1 and not s.finished
    if not full or len(s.view) // 2 < s.min_contributors:
        return None
    # Members that hold the state, and others that live, are dealt out in turn, so that each half has its share of them, and of the dead.
    order = sorted(s.view, key=lambda p: (p not in s.holders, p not in s.live, p))
    stays, goes = tuple(sorted(order[::2])), tuple(sorted(order[1::2]))
    if not is_quorum(stays, s.holders & set(stays)) or not is_quorum(goes, s.holders & set(goes)):
        return None
    return Divide(
        stays, goes, f"all {s.max_group} places are taken, and {names_of(s.joiners)} would join: the group becomes two"
    )


def choose_cut(
    reports: Mapping[PeerId, frozenset[PeerId]], sizes: Mapping[PeerId, int], tokens: Mapping[PeerId, int]
) -> tuple[tuple[PeerId, ...], frozenset[PeerId]]:
    """The contributors that count, and the owners whose parts are reduced over exactly them.

    `reports`: whose contributions each owner holds; `sizes`: elements of each owner's part; `tokens`: of each contributor. A contribution counts
    only if every kept owner holds it. An owner that received little would cost many contributions, so owners are given up one by one as long as
    that raises (elements reduced) x (tokens counted); a part given up is left out for everybody alike.
    """

    def worth(owners: frozenset[PeerId]) -> tuple[int, frozenset[PeerId]]:
        common = frozenset.intersection(*(reports[o] for o in owners)) & set(tokens)
        return sum(sizes[o] for o in owners) * sum(tokens[p] for p in common), common

    owners = frozenset(o for o in reports if reports[o])
    if not owners:
        return (), frozenset()
    best, common = worth(owners)
    while len(owners) > 1:
        trials = [(worth(owners - {o}), o) for o in sorted(owners)]
        (score, fewer), victim = max(trials, key=lambda t: (t[0][0], t[1]))
        if score <= best:
            break
        best, common, owners = score, fewer, owners - {victim}
    return tuple(sorted(common)), owners


@dataclass(frozen=True, slots=True)
class Result:
    """Which parts a round keeps and who goes on with it."""

    digests: tuple[bytes, ...]
    """Per part; empty where the part is left out for everybody alike."""
    view: tuple[PeerId, ...]
    reason: str


def conclude(view: Sequence[PeerId], held: Mapping[PeerId, Sequence[bytes]], num_parts: int) -> Result | None:
    """Choose the parts that a round commits, and the members that hold all of them; None when nothing can be committed.

    `held`: per live member, the digest it holds for each part (empty: none). Parts are given up, the rarest first, until those
    who hold all the rest are a quorum of the view: a part must never be committed that only a few could lose.
    """
    digests = [agreed(held, part) for part in range(num_parts)]
    while any(digests):
        holders = sorted(peer for peer, mine in held.items() if all(d in (b"", mine[k]) for k, d in enumerate(digests)))
        if is_quorum(view, holders):
            left_out = digests.count(b"")
            return Result(
                tuple(digests),
                tuple(holders),
                f"{left_out} of {num_parts} parts left out" if left_out else "complete",
            )
        counts = {k: sum(mine[k] == d for mine in held.values()) for k, d in enumerate(digests) if d}
        digests[min(counts, key=lambda k: (counts[k], k))] = b""
    return None


def agreed(held: Mapping[PeerId, Sequence[bytes]], part: int) -> bytes:
    """The digest most members hold for a part (ties: the smallest), or empty. An owner that told different things loses its minority."""
    votes = Counter(mine[part] for mine in held.values() if mine[part])
    return min(votes, key=lambda d: (-votes[d], d)) if votes else b""
