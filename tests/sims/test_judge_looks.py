"""Of many peers the judge looks at some each time, and so at all of them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from farflung.sims.judge import MOST_LOOKED_AT, Judge
from farflung.sims.swarm import Swarm


def judge_of(peers: Any) -> Judge:
    judge = Judge(broken=lambda which, detail: None)
    judge.swarm = cast(Swarm, SimpleNamespace(peers=dict.fromkeys(peers)))
    return judge


@pytest.mark.parametrize("peers", [range(1), range(MOST_LOOKED_AT)])
def test_few_are_all_looked_at(peers: range) -> None:
    judge = judge_of(peers)
    assert judge._some_peers() == list(peers) and judge._some_peers() == list(peers)


def test_many_are_looked_at_by_turns() -> None:
    judge = judge_of(range(5, 5 + 2 * MOST_LOOKED_AT + 1))
    seen = [peer for _ in range(3) for peer in judge._some_peers()]
    assert set(seen) == set(judge.swarm.peers)
    assert max(map(seen.count, seen)) == 2, "the last look begins anew"


def test_who_comes_and_goes_keeps_nobody_from_being_looked_at() -> None:
    judge = judge_of(range(3 * MOST_LOOKED_AT))
    first = judge._some_peers()
    del judge.swarm.peers[first[-1]]
    assert judge._some_peers()[0] == first[-1] + 1
