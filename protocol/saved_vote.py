"""What a member has promised and voted for about the next commit of a group, as its disk keeps it.

Whoever goes to another group may come back: so there is one for each group that it has ever had a say in, and none is forgotten.
"""

from msgspec import Struct

from farflung.protocol.messages import Accepted


class SavedVote(Struct, frozen=True, array_like=True):
    """Of a group, the newest."""

    height: int
    """Of the commit that was open."""
    ballot: int
    """That was promised: at a lower one it votes for nothing any more."""
    accepted: Accepted | None = None
    """What it voted for last at this height."""
    group: bytes = b""
    """As commits name it."""

    @property
    def plan(self) -> bytes:
        """Whose means it rests on; empty: on none."""
        return b"" if self.accepted is None or self.accepted.commit.round is None else self.accepted.commit.round.plan
