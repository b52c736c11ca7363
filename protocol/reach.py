"""Members that do not reach each other, and owners of parts chosen so that they need not.

Not every two machines on the internet reach each other, though each reaches most. A round wants everybody's contribution at every owner, so one
such pair would keep all waiting until the deadline, in every round, and deadlines learn from rounds. Whom others hear
and it does not, and whose contributions it lacked as an owner, a member says with what it offers next (`Ready.lacks`). Where two lack each other, it is neither
one's uplink nor its speed but the way between them; then neither owns a part, nothing has to go that way, and what both have trained counts (`roles`). Those
that hear each other again may own parts again after some rounds, to see whether there is a way now.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from farflung.protocol.keys import PeerId, names_of

FIRST_ROUNDS = 8
"""For which a pair is remembered; twice as many with each time that it is found again."""

MOST_ROUNDS = 128
"""Then it costs one round in so many."""


@dataclass(slots=True)
class Lacking:
    """Of one owner: whose contributions to its parts did not come. Versions are those of the outer state."""

    _until: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    """The first version at which it is not said any more, and for how many it was."""

    def note(self, came: Collection[PeerId], lacked: Collection[PeerId], version: int) -> None:
        """A round that made `version` is over, in which we owned parts; of whose contributions, but for our own, these came, and these did not.

        Where most did not, it was our own link, or a deadline too short for all.
        """
        for peer in came:
            self._until.pop(peer, None)
        for peer in lacked if len(lacked) <= len(came) else ():
            _, before = self._until.get(peer, (0, 0))
            rounds = min(2 * before, MOST_ROUNDS) if before else FIRST_ROUNDS
            self._until[peer] = (version + rounds, rounds)

    def at(self, version: int, view: Collection[PeerId]) -> tuple[PeerId, ...]:
        """What to say of it at a version, of members: sorted. Others are forgotten."""
        self._until = {peer: one for peer, one in self._until.items() if peer in view}
        return tuple(sorted(peer for peer, (until, _) in self._until.items() if version < until))


def roles(
    lacks: Mapping[PeerId, Collection[PeerId]],  # of those who are ready: whom each says it lacks
    tokens: Mapping[PeerId, int],  # that each brings
) -> tuple[list[PeerId], list[PeerId]]:
    """(who contributes, who of these owns parts), each in the order given: as many tokens as can be, such that every contributor reaches every owner.

    Where anybody reaches everybody, all contribute. Else somebody is left out, with more to bring to the next round.
    """
    apart = {p: {other for other in whom if other != p and p in lacks.get(other, ())} for p, whom in lacks.items()}

    def around(owner: PeerId) -> list[PeerId]:
        return [p for p in lacks if p not in apart[owner]]

    contributors = around(max(lacks, key=lambda owner: (sum(tokens[p] for p in around(owner)), owner)))
    return contributors, [p for p in contributors if apart[p].isdisjoint(contributors)]


def told(ready: Sequence[PeerId], contributors: Collection[PeerId], owners: Collection[PeerId]) -> str:
    """Who does not reach whom, for people; empty when all do."""
    if len(owners) == len(ready):
        return ""
    apart = names_of(p for p in ready if p not in owners)
    out = names_of(p for p in ready if p not in contributors)
    return f"{apart} do not reach each other, and reduce nothing" + (f"; without {out}" if out else "")
