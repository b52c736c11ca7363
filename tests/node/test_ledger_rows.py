"""What a node tells of samples: from the commits that it keeps to an answer, and from the answer to words."""

import pytest
from tests.protocol.bus import RULES, certify, follow, history_of, signers

from farflung.node.ledger_rows import ledger_status
from farflung.node.query import ledger_lines, sample_lines
from farflung.node.status import LedgerStatus, SamplesOf, SampleStatus, SampleStop
from farflung.protocol.chain import Contribution, PartResult, RoundResult
from farflung.protocol.history import History
from farflung.protocol.keys import PeerId

WHO = signers(2)
A, B = (signer.peer_id for signer in WHO)


def round_of(**samples: int) -> RoundResult:
    by = {"a": A, "b": B}
    counted = tuple(Contribution(by[who], 100 * num, num, 1000) for who, num in samples.items())
    return RoundResult(b"p" * 32, counted, (PartResult(A, 0, 1000, b"d" * 32),), 1234)


@pytest.fixture
def history() -> History:
    """A founds, B joins, both train, B vanishes, A trains on."""
    links = history_of(WHO)
    third = certify(follow(links[-1].commit, [A, B], result=round_of(a=8, b=4)), WHO)
    fourth = certify(follow(third.commit, [A]), WHO)
    fifth = certify(follow(fourth.commit, [A], result=round_of(a=24)), WHO[:1])
    history = History()
    history.replace(None, [*links, third, fourth, fifth])
    return history


def told(history: History, sample: int | None = None) -> LedgerStatus:
    return ledger_status(history, swarm="s", num_samples=50, lease=RULES.lease, sample=sample)


def test_the_ledger_of_the_last_commit(history: History) -> None:
    # A had 0 to 23 and B 24 to 47; the round takes 8 and 4 and hands out 48 to 59, and A's next one 60 to 83.
    assert told(history) == LedgerStatus(
        swarm="s",
        height=4,
        version=2,
        num_samples=50,
        epoch=1,
        cursor=84,
        trained=36,
        epoch_handed_out=34,
        epoch_trained=6,
        earlier_left=20,
        held=[SamplesOf(peer=A.hex(), samples=24, intervals=[(60, 84)])],
        free=[],
        suspended=[SamplesOf(peer=B.hex(), samples=24, intervals=[(28, 48), (56, 60)], until_version=1 + RULES.lease)],
        since_height=0,
        trained_by={A.hex(): 32, B.hex(): 4},
    )


def stops(history: History, sample: int) -> list[tuple[int, str, PeerId | None]]:
    asked = told(history, sample).sample
    assert asked is not None and asked.number == sample and asked.epoch == sample // 50
    return [(s.height, s.state, None if s.peer is None else bytes.fromhex(s.peer)) for s in asked.stops]


def test_the_ways_of_a_sample(history: History) -> None:
    assert stops(history, 25) == [(0, "ahead", None), (1, "held", B), (2, "trained", B)]
    assert stops(history, 30) == [(0, "ahead", None), (1, "held", B), (3, "suspended", B)]
    assert stops(history, 7) == [(0, "held", A), (2, "trained", A)]
    assert stops(history, 8) == [(0, "held", A), (4, "trained", A)]
    assert stops(history, 84) == [(0, "ahead", None)]


def test_what_is_older_than_the_kept_commits_is_said_to_be(history: History) -> None:
    links = list(history)
    history.replace(links[2].commit, links[3:])
    assert stops(history, 7) == [(2, "trained", None)] and stops(history, 30) == [(2, "held", B), (3, "suspended", B)]
    assert told(history).since_height == 2 and told(history).trained_by == {A.hex(): 32, B.hex(): 4}
    assert sample_lines(told(history, 7)) == [
        "sample 7, of epoch 0",
        "  by commit 2: trained by somebody: who, is not known here any more",
    ]


def test_in_words(history: History) -> None:
    a, b = A.hex()[:12], B.hex()[:12]
    assert ledger_lines(told(history)) == [
        "swarm s, commit 4: epoch 1, 34 of 50 samples handed out, 6 trained",
        "of earlier epochs 20 are not trained yet",
        f"{a} holds 24: 60 to 83",
        f"{b} is gone, its 24 are kept for it until version 4: 28 to 47, 56 to 59",
        f"trained since commit 0, the oldest kept here: 32 by {a}, 4 by {b}",
    ]
    assert sample_lines(told(history)) == []
    assert sample_lines(told(history, 30)) == [
        "sample 30, of epoch 0",
        "  by commit 0: not handed out",
        f"  since commit 1: held by {b}",
        f"  since commit 3: kept for {b}, which is gone",
    ]


def test_free_samples_and_a_swarm_that_has_trained_nothing() -> None:
    fresh = LedgerStatus(
        swarm="s",
        height=0,
        version=0,
        num_samples=1000,
        epoch=0,
        cursor=20,
        trained=0,
        epoch_handed_out=20,
        epoch_trained=0,
        earlier_left=0,
        held=[SamplesOf(peer="ab" * 32, samples=0, intervals=[])],
        free=[(0, 5), (10, 20)],
        suspended=[],
        since_height=0,
        trained_by={},
        sample=SampleStatus(number=3, epoch=0, stops=[SampleStop(height=0, state="free")]),
    )
    assert ledger_lines(fresh)[1:] == [
        "free, to be handed out next: 0 to 4, 10 to 19",
        "trained since commit 0, the oldest kept here: none",
    ]
    assert sample_lines(fresh)[1:] == ["  by commit 0: free, to be handed out again"]
