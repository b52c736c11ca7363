"""Whatever a member says, the others refuse it or go on: nothing that comes over the wire ends a node, or takes its time."""

from collections.abc import Sequence

import msgspec
import pytest
from tests.protocol.bus import LATENCY_S, SWARM, Bus, Letter
from tests.protocol.hostile import Liar
from tests.thorough import further

from farflung.protocol import chain
from farflung.protocol.lap import Laps
from farflung.protocol.messages import Commits, Forward, Message

LIAR = 1


class Lied(Bus):
    """Of members whose votes are their own: what one that lies makes them decide is not judged, and strangers hear nothing."""

    def post(self, sender: int, to: bytes, message: Message, *, carrier: int | None = None) -> None:
        if to in self.ids:
            super().post(sender, to, message, carrier=carrier)

    def decided(self, index: int, certified: chain.Certified) -> None:
        self.disks[index].history.append(certified)


def linked(message: Message) -> Message:
    """A history whose commits follow from one another, as far as who tells it can make them."""
    if not isinstance(message, Commits) or message.anchor is None:
        return message
    parent, links = message.anchor, []
    for one in message.chain:
        commit = msgspec.structs.replace(
            one.commit, parent=chain.commit_hash(SWARM, parent), height=parent.height + 1, group=parent.group
        )
        links.append(msgspec.structs.replace(one, commit=commit))
        parent = commit
    return Commits(message.anchor, tuple(links))


@pytest.mark.parametrize("seed", [*range(6), *further(*range(6, 300))])
@pytest.mark.timeout(60)
def test_a_member_that_says_anything_harms_nobody(seed: int) -> None:
    """One of three members, and a newcomer comes."""
    bus = Lied(3, outsiders=1, laps=Laps(least=2, most=16, delay=None, widths=(1, 2)), cuts=(0, 300, 1000))
    liar = Liar(seed, words=[*bus.ids, SWARM], numbers=(*range(8), 100, 4096))
    told = 0

    def policy(letter: Letter) -> Sequence[float]:
        nonlocal told
        if letter.sender == LIAR:
            for receiver in {0, 2, 3}:
                said = liar.spoil(letter.message, Message) if told % 4 else liar.say(Message)
                told += 1
                if said is not None and not isinstance(said, Forward):  # what it passes on has a seal of its own
                    spoilt = Letter(-1, letter.at, LIAR, receiver, linked(said), LIAR)
                    data = msgspec.msgpack.encode(spoilt.message)
                    bus.later(LATENCY_S, bus.nodes[0], lambda s=spoilt, d=data: bus._arrive(s, d))  # type: ignore[misc]
        return (LATENCY_S,)

    bus.policy = policy
    bus.run(20.0)
    assert told > 100
