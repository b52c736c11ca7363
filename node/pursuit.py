"""Whether a node that lacks the swarm's newest outer state comes nearer to it, and what it says where it does not: its link is too slow, and nobody else can see that.

What a newcomer's link brings is shared by control messages, the means of rounds that go on meanwhile, and the state itself. Where the first two take all of it a
download never ends; where a mean takes longer than a lap, the state that is there grows old again. Both look like patience from outside.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from farflung.node.events import EventLog
from farflung.node.statesync import CHUNK_S, Download
from farflung.protocol.member import Member

LOOK_S = 10.0
"""Between two looks: who is at the head has nothing to look at, and is of many."""

STRETCH_S = 2 * CHUNK_S
"""Over which it is measured whether anything comes of it: a chunk may take so long."""

LONG_S = 3600.0
"""Of which a download is worth a word, if it takes longer yet."""

REMEDY = (
    "what helps is a faster link, less else on this one, or a swarm of a larger `inner_steps`, fewer bits or a smaller"
    " model"
)

DOWNLOADS = "downloading the outer state"
"""Where there is nothing else to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How far a node is."""

    at: float
    """Seconds."""
    head: int
    """The newest version that it knows of."""
    held: int
    """The version that it has; -1 while it downloads one."""
    chunks: int
    """That are here of what it downloads."""
    downloads: int
    """That it has begun."""
    received_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slow:
    """What was measured where a node comes no nearer, or hardly."""

    bytes_per_s: float
    """That came in, of whatever kind."""
    lap_s: float
    """From one round to the next; the whole stretch where there was none."""
    rounds_bytes_per_s: float
    """That the means of rounds need."""
    left_s: float | None
    """In which a download is over if it goes on so; None: never."""

    @property
    def reason(self) -> str:
        """For people, with the remedy."""
        what = (
            f"what is missing of the state takes {self.left_s / 3600.0:.1f} h more"
            if self.left_s
            else "it falls behind"
        )
        return (
            f"{what}: this node's link brings {self.bytes_per_s / 1e3:.3g} kB/s, of which the means of rounds, one every"
            f" {self.lap_s:.3g} s, need {self.rounds_bytes_per_s / 1e3:.3g}, beside control messages; {REMEDY}"
        )


def slowness(first: Mark, before: Mark, now: Mark, *, chunks: int, round_bytes: float) -> Slow | None:
    """What there is to say about the time since `before`, in which a node was never at the head, nor since `first`; None: it comes nearer. `chunks`: of a whole
    state; `round_bytes`: the means of a round."""
    seconds, rounds = now.at - before.at, now.head - before.head
    gained = now.chunks - before.chunks
    slow = Slow(
        bytes_per_s=(now.received_bytes - before.received_bytes) / seconds,
        lap_s=seconds / max(1, rounds),
        rounds_bytes_per_s=rounds * round_bytes / seconds,
        left_s=(chunks - now.chunks) / gained * seconds if now.held < 0 and gained > 0 else None,
    )
    if now.downloads > first.downloads + 1:  # the state that it had was too old again
        return replace(slow, left_s=None)
    if now.held >= 0:
        return slow if before.held >= 0 and now.head - now.held >= before.head - before.held else None
    if now.chunks == chunks:
        return None
    if slow.bytes_per_s <= slow.rounds_bytes_per_s:  # the chunks that are here grow old sooner than others come
        return replace(slow, left_s=None)
    return slow if slow.left_s is None or slow.left_s > LONG_S else None


class Pursuit:
    """Looks at one node, and tells its log. Times are the loop's."""

    def __init__(
        self,
        member: Member,
        log: EventLog,
        *,
        under_way: Callable[[], Download | None],  # our own download, while there is one
        received_bytes: Callable[[], int],
        chunks: int,  # of a whole state
    ) -> None:
        self._member = member
        self._log = log
        self._under_way = under_way
        self._received_bytes = received_bytes
        self._chunks = chunks
        self._download: Download | None = None
        self._downloads = 0
        self._first: Mark | None = None
        """When we were last found behind, and not before; None while we are not."""
        self._before: Mark | None = None
        self.said = DOWNLOADS
        """What it is at while it is behind, for people: that it is too slow, where that is known."""

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Now and then."""
        if self._download is not (download := self._under_way()):
            self._download = download
            self._downloads += download is not None
        if not self._is_behind():
            self._first = self._before = None
            self.said = DOWNLOADS
        elif self._first is None or self._before is None:
            self._first = self._before = self._mark(now)
        elif now >= self._before.at + STRETCH_S:
            mark, head, settings = self._mark(now), self._member.head.commit, self._member.settings
            first, last = settings.rules.span(head)
            round_bytes = settings.expected_bytes(head) * (last - first)
            self._tell(slowness(self._first, self._before, mark, chunks=self._chunks, round_bytes=round_bytes))
            self._before = mark

    def _is_behind(self) -> bool:
        """Whether there is a state to be had, and it is not here, nor about to be: a member that has one may only be in a long step."""
        member = self._member
        if not member.started or not member.consensus.has_quorum:
            return False
        held = member.standing.applied_version
        return held < 0 or (not member.in_view and held < member.head.commit.version)

    def _mark(self, now: float) -> Mark:
        return Mark(
            at=now,
            head=self._member.head.commit.version,
            held=self._member.standing.applied_version,
            chunks=0 if self._download is None else len(self._download.have),
            downloads=self._downloads,
            received_bytes=self._received_bytes(),
        )

    def _tell(self, slow: Slow | None) -> None:
        self.said = DOWNLOADS if slow is None else slow.reason
        if slow is not None:
            self._log.emit(
                "link.slow",
                bytes_per_s=round(slow.bytes_per_s),
                rounds_bytes_per_s=round(slow.rounds_bytes_per_s),
                lap_s=round(slow.lap_s, 1),
                left_s=None if slow.left_s is None else round(slow.left_s),
                reason=slow.reason,
            )
