"""What nodes of one process share of what they receive, and that no node behaves otherwise for it."""

import pytest
from msgspec import structs
from tests.protocol.test_groups import CERTIFIED

from farflung.protocol import messages
from farflung.protocol.errors import Malformed
from farflung.protocol.keys import PeerId
from farflung.protocol.messages import Message
from farflung.sims import chaos, shared_mail
from farflung.sims.shared_mail import SharedDecode
from farflung.sims.simulation import simulate

ONE, OTHER = b"1" * 32, b"2" * 32


def body_of(height: int) -> bytes:
    """A certificate that nobody checks here."""
    certified = structs.replace(CERTIFIED, commit=structs.replace(CERTIFIED.commit, height=height))
    return messages.encode(messages.Committed(certified))


def test_what_many_receive_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_mail, "MOST_KEPT", 2)
    decode, bodies = SharedDecode(), [body_of(height) for height in (5, 6, 7)]
    first = decode(bodies[0], peer=ONE)
    assert first == messages.decode(bodies[0], peer=ONE)
    assert decode(bytes(bytearray(bodies[0])), peer=OTHER) is first
    second = decode(bodies[1], peer=ONE)
    assert decode(bodies[0], peer=ONE) is first
    decode(bodies[2], peer=ONE)
    assert decode(bodies[0], peer=ONE) is first, "the one that was asked for last stays longest"
    again = decode(bodies[1], peer=ONE)
    assert again == second and again is not second


def test_short_messages_are_shared_and_push_out_no_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_mail, "MOST_KEPT", 2)
    decode, long = SharedDecode(), body_of(5)
    first = decode(long, peer=ONE)
    for why in ("done", "restart", "power"):
        short = messages.encode(messages.Goodbye(why))
        assert decode(short, peer=ONE) is decode(short, peer=OTHER)
    assert decode(long, peer=OTHER) is first


def test_whoever_sends_what_cannot_be_read_is_named_each_time() -> None:
    decode, damaged = SharedDecode(), body_of(5)[:-1]
    for peer in (ONE, OTHER):
        with pytest.raises(Malformed) as refused:
            decode(damaged, peer=peer)
        assert refused.value.peer == peer


@pytest.mark.parametrize("seed", [6, 13])
def test_a_swarm_of_groups_does_the_same_though_nodes_share_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def counting(body: bytes, *, peer: PeerId | None) -> Message:
        made.append(len(body))
        return messages.decode(body, peer=peer)

    monkeypatch.setattr(shared_mail, "decode", counting)
    together = simulate(chaos.brisk_plan(seed), keep=False).log_sha256
    shared = len(made)
    monkeypatch.setattr(shared_mail, "MOST_KEPT", 0)
    assert simulate(chaos.brisk_plan(seed), keep=False).log_sha256 == together
    assert shared < len(made) - shared
