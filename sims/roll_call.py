"""Who has to be there, and to work (invariant 0): whoever was started and neither left nor was killed, whatever the node itself makes of that.

No process may end by itself while the run goes on. And in the calm stretch each honest member that was one when it began, with the newest state, must take steps, and rounds
must count it. Rounds count nobody whose link is too slow for what it has to send, or too lossy; so where links are not all alike it may say why it missed them instead.
"""

from collections import Counter
from dataclasses import dataclass, field

from farflung.node.peer import Peer
from farflung.sims.judge import Judge
from farflung.sims.swarm import Swarm

STEPS = 10
"""That a peer has time for in the stretch, or it may be too slow for one, or for a round."""

ROUNDS = 3
"""That it makes, or a peer may be in none of them: one was under way when it began, and to another it may come late."""


@dataclass(slots=True)
class RollCall:
    """See the module."""

    swarm: Swarm
    judge: Judge
    alike: bool
    """Whether no link is slow or lossy."""
    _members: dict[int, Peer] = field(default_factory=dict)
    """Who was there when the stretch began, by number."""
    _steps: Counter[int] = field(default_factory=Counter)
    """By peer, until then."""
    _excused: set[int] = field(default_factory=set)
    """Who has said since why a round missed what it had."""
    _began: float | None = None
    """When the stretch did, seconds of the simulation's clock."""
    _heights: dict[bytes, int] = field(default_factory=dict)
    """And at which height of each group."""

    @property
    def has_begun(self) -> bool:
        """Whether the calm stretch has."""
        return self._began is not None

    def look(self) -> None:
        """Now and then: whether everybody is there who has to be."""
        for index in sorted(self.swarm.expected):
            if self.swarm.tasks[index].done() and not self._is_finished(index):
                self.judge.violate(0, f"peer {index} has ended by itself")

    def begin(self) -> None:
        """The calm stretch begins."""
        self._began = self.swarm.hub.now()
        newest = {name: one.newest for name, one in self.judge.groups.items()}
        self._heights = {name: 0 if commit is None else commit.height for name, commit in newest.items()}
        for index, peer in self.swarm.peers.items():
            head = newest.get(peer.member.group)
            if self._is_member(index) and head is not None and peer.applier.version >= head.version - 1:
                self._members[index] = peer
        self._steps.update({index: labour.steps for index, labour in enumerate(self.swarm.labour)})

    def missed(self, index: int) -> None:
        """A peer says why it missed a round."""
        self._excused.add(index)

    def end(self) -> None:
        """And ends."""
        if self._began is None:
            return
        lasted_s = self.swarm.hub.now() - self._began
        for index, peer in sorted(self._members.items()):
            if self.swarm.peers.get(index) is not peer or not self._is_member(index):
                continue  # others say what is wrong with it
            if self._is_finished(index):
                continue
            if self.swarm.outfit.seconds(index, "train", 1.0) * STEPS > lasted_s:
                continue
            group = self.judge.groups[peer.member.group]
            since = self._heights.get(peer.member.group, 0)
            rounds = [c.round for height, c in group.history.items() if height > since and c.round is not None]
            counted = {one.peer for round_ in rounds for one in round_.contributors}
            if self.swarm.labour[index].steps == self._steps[index]:
                self.judge.violate(0, f"peer {index} took no step in the calm stretch")
            elif len(rounds) >= ROUNDS and self.swarm.ids[index] not in counted:
                if self.alike or index not in self._excused:
                    self.judge.violate(0, f"none of {len(rounds)} rounds of the calm stretch counts peer {index}")

    def _is_member(self, index: int) -> bool:
        peer = self.swarm.peers[index]
        return self.swarm.ids[index] not in self.swarm.attackers and peer.member.started and peer.member.in_view

    def _is_finished(self, index: int) -> bool:
        """Whether the group of a peer has completed the run: groups are not equally far."""
        newest = self.judge.newest_of(index)
        return newest is not None and self.swarm.outfit.terms.settings.rules.finished(newest)
