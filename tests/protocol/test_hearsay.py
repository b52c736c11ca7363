"""What a peer remembers of the run from what others say."""

import pytest
from tests.protocol.pipeline_says import LATE, SWARM, A, hear, says

from farflung.protocol.hearsay import Hearsay
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.roll import Roll

ME = b"m" * 32


def of(*losses: float, stage: int = 0) -> list[Present]:
    return [says(stage, loss=loss) for loss in losses]


@pytest.mark.parametrize(
    ("homes", "found"),
    [((3.0,), 3.0), ((3.0, 4.0), 3.0), ((3.0, 3.2, 1e15), 3.2), ((0.01, 3.0, 3.2), 3.0), ((0.0, 3.0), 3.0)],
)
def test_one_lie_among_three_decides_no_loss(homes: tuple[float, ...], found: float) -> None:
    hearsay = Hearsay()
    hearsay.listen(of(*homes), of(9.0, 9.0, stage=1))
    assert hearsay.loss == found


def test_what_data_nodes_said_outlives_them_and_is_theirs_alone_to_change() -> None:
    hearsay = Hearsay()
    hearsay.listen([], of(9.0, stage=1))
    assert hearsay.loss == 9.0
    hearsay.listen(of(3.0), of(9.0, stage=1))
    hearsay.listen([], of(9.0, stage=1))
    assert hearsay.loss == 3.0
    hearsay.listen(of(2.5), [])
    assert hearsay.loss == 2.5


def test_only_who_serves_a_stage_is_asked() -> None:
    roll = Roll(SWARM, A, ME, stages=3, heartbeat_s=2.0)
    hear(roll, 0.0, A=says(-1, loss=7.0), B=says(-1, loss=7.0), C=says(1, loss=3.0), D=says(0, trains=False, loss=8.0))
    roll.tick(0.0)
    assert roll.hearsay.loss == 3.0


def test_what_data_nodes_try_is_known_while_they_are_heard() -> None:
    roll = Roll(SWARM, A, ME, stages=3, heartbeat_s=2.0)
    hear(roll, 0.0, A=says(0, tries=(0, 7)), B=says(0, tries=(2,)), C=says(1, tries=(1,)))
    assert roll.on_trial(0.0) == {0, 2}
    assert roll.on_trial(LATE) == set()
