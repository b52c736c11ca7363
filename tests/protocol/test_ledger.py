"""Whatever the swarm goes through, the ledger loses no sample and hands none out twice."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farflung.protocol import ledger as ledgers
from farflung.protocol.ledger import (
    BLOCK,
    PIECES,
    Ledger,
    Page,
    Place,
    Share,
    advance,
    ahead,
    count,
    fresh,
    inherited,
    is_prefix,
    join,
    num_handed_out,
    num_trained,
    place_of,
    shared,
    split,
    trace,
    trained_by,
)
from farflung.protocol.limits import MAX_INTERVALS

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
PEERS = [bytes([i]) * 32 for i in range(6)]
WINDOW, LEASE = 7, 3

intervals = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6).map(
    lambda pairs: tuple((start, start + size) for start, size in pairs)
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that windows cross from one to the next."""
    monkeypatch.setattr(ledgers, "BLOCK", 5)


def numbers(parts: Iterable[tuple[int, int]]) -> list[int]:
    return [n for start, stop in parts for n in range(start, stop)]


@given(intervals, st.integers(0, 60))
def test_split_and_join_keep_the_order(parts: tuple[tuple[int, int], ...], num: int) -> None:
    first, rest = split(parts, num)
    assert numbers(first) == numbers(parts)[:num]
    assert numbers(rest) == numbers(parts)[num:]
    assert numbers(join(first, rest)) == numbers(parts)
    assert is_prefix(first, parts)
    assert all(start < stop for start, stop in join(parts))


def test_a_life_inherits_what_the_last_one_had_not_trained() -> None:
    view = [A, B, C]
    ledger = advance(Ledger(), trained={}, view=view, left=[], window=10, version=0, lease=LEASE)
    ledger = advance(ledger, trained={A: 4, B: 10, C: 2}, view=[A, B], left=[], window=10, version=1, lease=LEASE)
    counted = {0, 1, 2, 3, *range(10, 20), 20, 21}
    mine = split(ledger.window(A), 3)[0]
    found = inherited(ledger, mine)
    assert found.cursor == ledger.cursor and not found.held and not found.suspended
    assert set(numbers(found.free)) == set(range(ledger.cursor)) - counted - set(numbers(mine))
    assert len(numbers(found.free)) == len(set(numbers(found.free)))
    again = advance(found, trained={}, view=[A], left=[], window=10, version=1, lease=LEASE)
    assert again.window(A) == split(found.free, 10)[0]


@given(intervals, intervals)
def test_is_prefix_means_prefix(short: tuple[tuple[int, int], ...], long: tuple[tuple[int, int], ...]) -> None:
    assert is_prefix(short, long) == (numbers(long)[: count(short)] == numbers(short))


class Swarm(RuleBasedStateMachine):
    """Rounds, joins, crashes, goodbyes and returns in any order, against plain sets."""

    @initialize(founder=st.sampled_from(PEERS))
    def found(self, founder: bytes) -> None:
        self.version = 0
        self.view = {founder}
        self.done: list[int] = []
        self.elsewhere: list[int] = []
        """Numbers that went with others where the group was divided."""
        self.shares: list[tuple[int, Share]] = []
        self.kept: dict[bytes, tuple[int, list[int]]] = {}
        self.ledger = Ledger()
        self.pages: list[Page] = []
        self.trainers: dict[int, bytes] = {}
        self.step({}, self.view, set())

    def step(self, trained: dict[bytes, int], view: set[bytes], left: set[bytes]) -> None:
        before = self.ledger
        for peer, num in trained.items():
            counted = numbers(split(before.window(peer), num)[0])
            self.done += counted
            self.trainers |= dict.fromkeys(counted, peer)
        self.ledger = advance(
            before,
            trained=trained,
            view=sorted(view),
            left=sorted(left),
            window=WINDOW,
            version=self.version,
            lease=LEASE,
        )
        self.pages.append(Page(len(self.pages), self.ledger, trained))
        for peer in self.view - view - left:
            rest = numbers(split(before.window(peer), trained.get(peer, 0))[1])
            self.kept[peer] = (self.version, rest)
        for peer in left:
            self.kept.pop(peer, None)
            assert not any(s.peer == peer for s in self.ledger.suspended), "a goodbye frees at once"
        for peer in view & set(self.kept):
            version, rest = self.kept.pop(peer)
            still = next((s for s in before.suspended if s.peer == peer), None)
            if still is not None:  # within its lease
                assert numbers(self.ledger.window(peer))[: len(rest)] == rest
        for peer, (version, _) in list(self.kept.items()):
            suspended = any(s.peer == peer for s in self.ledger.suspended)
            if suspended:
                assert version + LEASE > self.version or version == self.version
            elif version + LEASE <= self.version:
                del self.kept[peer]
        self.view = view

    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        self.version += 1
        trained = {}
        for peer in sorted(self.view):
            num = data.draw(st.integers(0, count(self.ledger.window(peer))), label="samples")
            if num:
                trained[peer] = num
        stay = data.draw(st.sets(st.sampled_from(sorted(self.view)), min_size=1), label="view")
        self.step(trained, stay, set())

    @rule(peers=st.sets(st.sampled_from(PEERS), min_size=1))
    def join_some(self, peers: set[bytes]) -> None:
        self.step({}, self.view | peers, set())

    @rule(data=st.data())
    def leave_some(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(sorted(self.view)), max_size=len(self.view) - 1))
        self.step({}, self.view - gone, gone)

    @rule(data=st.data())
    def crash_some(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(sorted(self.view)), max_size=len(self.view) - 1))
        self.step({}, self.view - gone, set())

    @precondition(lambda self: len(self.view) > 1 and len(self.ledger.shares) < 3)
    @rule(data=st.data())
    def divide(self, data: st.DataObject) -> None:
        """Some go with what they hold; we go on as those who stay, or as those who go."""
        goes = data.draw(st.sets(st.sampled_from(sorted(self.view)), min_size=1, max_size=len(self.view) - 1))
        before = self.ledger
        stays, others = shared(before, goes)
        ours = data.draw(st.booleans())
        self.ledger, theirs = (stays, others) if ours else (others, stays)
        self.elsewhere += [n for h in theirs.held for n in numbers(h.intervals)]
        if not ours:
            self.elsewhere += [*numbers(before.free), *(n for s in before.suspended for n in numbers(s.intervals))]
            self.kept = {}
        self.view = {h.peer for h in self.ledger.held}
        self.shares.append((before.cursor, self.ledger.share))
        taken, free = (fresh(ledger.share, before.cursor, 3 * WINDOW)[0] for ledger in (stays, others))
        assert not {*numbers(taken)} & {*numbers(free)}, "no number is in the share of both"
        stop = data.draw(st.integers(0, 4 * BLOCK + before.cursor))
        for one, its in ((stays, taken), (others, free)):
            assert [n for n in numbers(its) if n < stop] == numbers(ahead(one, stop))[: 3 * WINDOW]
        self.step({}, self.view, set())

    def ours(self, number: int) -> bool:
        """Whether a number was ever to be handed out here."""
        share = next((share for since, share in reversed(self.shares) if since <= number), None)
        return share is None or number // ledgers.BLOCK % share.stride == share.place

    @invariant()
    def each_number_is_in_one_place(self) -> None:
        ledger = self.ledger
        parts = [h.intervals for h in ledger.held] + [ledger.free] + [s.intervals for s in ledger.suspended]
        everywhere = sorted(self.done + self.elsewhere + [n for part in parts for n in numbers(part)])
        assert everywhere == [n for n in range(ledger.cursor) if self.ours(n)]
        assert num_handed_out(ledger, 0, ledger.cursor) == len(everywhere)
        half = ledger.cursor // 3
        assert num_handed_out(ledger, half, ledger.cursor + 9) == len([n for n in everywhere if n >= half])

    @invariant()
    def each_sample_is_found_where_it_is(self) -> None:
        ledger = self.ledger
        where = {n: Place("trained") for n in self.done}
        where |= {n: Place("free") for n in numbers(ledger.free)}
        where |= {n: Place("held", h.peer) for h in ledger.held for n in numbers(h.intervals)}
        where |= {n: Place("suspended", s.peer) for s in ledger.suspended for n in numbers(s.intervals)}
        here = [n for n in range(ledger.cursor) if n in where]
        assert {n: place_of(ledger, n) for n in here} == where
        assert place_of(ledger, ledger.cursor) == Place("ahead")
        half = ledger.cursor // 2
        for start, stop in ((0, half), (half, ledger.cursor + 5)):
            gone = [*self.done, *self.elsewhere]
            assert num_trained(ledger, start, stop) == len([n for n in gone if start <= n < stop])

    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        """The ways of any sample end where it is, pass through no place twice in a row, and tell who trained it."""
        sample = data.draw(st.integers(0, self.ledger.cursor))
        if self.ledger.shares:
            return  # a page tells of one group
        since = data.draw(st.integers(0, len(self.pages) - 1))
        ways = trace(self.pages[since:], sample)
        assert ways[0] == (since, place_of(self.pages[since].ledger, sample))
        assert [height for height, _ in ways] == sorted({height for height, _ in ways})
        for (_, one), (_, other) in pairwise(ways):
            assert one != other and one.state != "trained"
        last = ways[-1][1]
        assert last.state == place_of(self.ledger, sample).state
        if last.state != "trained":
            assert last == place_of(self.ledger, sample)
        else:
            assert last.peer == (self.trainers[sample] if len(ways) > 1 else None)
        assert trained_by(self.pages) == Counter(self.trainers.values())

    @invariant()
    def it_is_in_order(self) -> None:
        ledger = self.ledger
        assert [h.peer for h in ledger.held] == sorted(self.view)
        assert [s.peer for s in ledger.suspended] == sorted({s.peer for s in ledger.suspended})
        assert not {h.peer for h in ledger.held} & {s.peer for s in ledger.suspended}
        assert all(count(h.intervals) >= WINDOW for h in ledger.held)


Swarm.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyHistory = Swarm.TestCase


def ledger(view: list[bytes], before: Ledger | None = None, version: int = 0, **changes: object) -> Ledger:
    values: dict[str, object] = dict(trained={}, left=[], window=10, version=version, lease=2)
    return advance(before or Ledger(), view=view, **{**values, **changes})  # type: ignore[arg-type]


def test_windows_are_filled_from_the_cursor() -> None:
    first = ledger([A, B])
    assert (first.window(A), first.window(B), first.cursor) == (((0, 10),), ((10, 20),), 20)
    second = ledger([A, B], first, 1, trained={A: 4})
    assert (second.window(A), second.window(B)) == (((4, 10), (20, 24)), ((10, 20),))


def test_the_vanished_keep_theirs_for_a_lease_and_then_others_get_them_first() -> None:
    both = ledger([A, B])
    gone = ledger([A], both, 1)
    assert gone.suspended[0].intervals == ((10, 20),) and gone.free == ()
    waiting = ledger([A], gone, 2, trained={A: 10})
    assert waiting.suspended and waiting.window(A) == ((20, 30),)
    expired = ledger([A], waiting, 3, trained={A: 10})
    assert not expired.suspended
    assert expired.window(A) == ((10, 20),) and expired.cursor == 30


def test_back_within_the_lease_the_prefix_is_the_same() -> None:
    gone = ledger([A], ledger([A, B], ledger([A, B]), 1, trained={B: 3}), 2)
    back = ledger([A, B], gone, 3)
    assert is_prefix(((13, 20),), back.window(B)) and count(back.window(B)) == 10


def test_back_after_the_lease_it_gets_others() -> None:
    expired = ledger([A], ledger([A], ledger([A, B])), 2, trained={A: 10})
    assert expired.window(A) == ((10, 20),)
    back = ledger([A, B], expired, 3)
    assert back.window(B) == ((20, 30),)


def test_goodbye_frees_at_once() -> None:
    after = ledger([A, C], ledger([A, B]), 0, left=[B])
    assert not after.suspended and after.window(C) == ((10, 20),) and after.cursor == 20


def test_goodbye_of_a_suspended_peer_ends_its_lease() -> None:
    gone = ledger([A], ledger([A, B]), 1)
    assert ledger([A], gone, 1, left=[B]).free == ((10, 20),)


@pytest.mark.parametrize("trained", [{A: 11}, {C: 1}, {A: 3, B: 99}])
def test_claims_above_the_window_are_refused(trained: dict[bytes, int]) -> None:
    with pytest.raises(ValueError, match="claims"):
        ledger([A, B], ledger([A, B]), 1, trained=trained)


def test_more_blocks_than_a_ledger_holds_are_not_handed_out() -> None:
    """Nor looked for: of one in two of them that would be a piece for each."""
    with pytest.raises(ValueError, match="more than a ledger can hold of one block in 2"):
        ledgers.fresh(Share(0, 2, 0), 0, 1 << 62)
    assert ledgers.fresh(Share(0, 1, 0), 0, 1 << 62) == (((0, 1 << 62),), 1 << 62)


def test_the_ways_of_a_sample() -> None:
    pages = [Page(4, ledger([A, B]), {})]
    for height, (view, trained) in enumerate([([A], {B: 3}), ([A], {A: 10}), ([A], {A: 10}), ([A], {A: 4})], start=5):
        pages.append(Page(height, ledger(view, pages[-1].ledger, height, trained=trained), trained))
    assert trace(pages, 12) == ((4, Place("held", B)), (5, Place("trained", B))), "before it went"
    assert trace(pages, 13) == (
        (4, Place("held", B)),
        (5, Place("suspended", B)),
        (7, Place("held", A)),
        (8, Place("trained", A)),
    )
    assert trace(pages, 25) == ((4, Place("ahead")), (6, Place("held", A)), (7, Place("trained", A)))
    assert trace(pages, 99) == ((4, Place("ahead")),)
    assert trace(pages[2:], 12) == ((6, Place("trained")),), "by whom was told earlier"
    assert trained_by(pages) == {A: 24, B: 3} and trained_by(pages[-1:]) == {A: 4}
    assert num_trained(pages[-1].ledger, 0, 1000) == 27 and num_trained(pages[-1].ledger, 10, 20) == 7
    assert num_trained(pages[-1].ledger, 1000, 2000) == 0


def test_slow_members_do_not_shred_a_ledger() -> None:
    """Each trains a sample or two a round, for as many rounds as it takes until a window is all of such pieces, and then most of them leave at once."""
    window, fast, slow = 1500, PEERS[:2], [bytes([i]) * 32 for i in range(100, 160)]
    view = [*fast, *slow]
    now = ledger(view, window=window)
    for version in range(1, 801):
        trained = {**dict.fromkeys(fast, window // 3), **{peer: 1 + version % 2 for peer in slow}}
        now = ledger(view, now, version, window=window, trained=trained)
        assert all(len(held.intervals) <= PIECES + 2 for held in now.held)
        assert all(count(held.intervals) > window - window // PIECES for held in now.held)
    now = ledger(fast, now, 801, window=window, left=slow)
    assert len(now.free) <= len(slow) * (PIECES + 2) < MAX_INTERVALS
    for version in range(802, 900):  # and others train what they left
        now = ledger(fast, now, version, window=window, trained=dict.fromkeys(fast, window // 3))
    assert not now.free
