"""What a route may be without."""

import pytest

from farflung.protocol.droppable import Droppable
from farflung.protocol.route import DROPPED, Leg, Route


def route(*stages: int, dropped: tuple[int, ...] = ()) -> Route:
    return tuple(Leg(stage, DROPPED if hop in dropped else stage) for hop, stage in enumerate(stages))


@pytest.mark.parametrize(
    ("way", "allowed"),
    [
        (route(0, 1, 9), True),  # whole: whatever it was planned by
        (route(0, 1, 2, 3, dropped=(1,)), True),
        (route(0, 1, 2, 3, dropped=(3,)), True),
        (route(0, 1, 2, 3, dropped=(1, 2)), False),  # too few
        (route(0, 1, 2, 3, dropped=(0,)), False),  # the data node
        (route(0, 2, 4, 6, dropped=(1,)), False),  # from 0 to 4
        (route(0, 2, 1, 4, dropped=(1,)), True),
        (route(0, 2, 1, 5, dropped=(1,)), False),  # the hop that went back goes on too far
        (route(0, 2, 1, 4, dropped=(2,)), True),
        (route(0, 3, 2, 6, 7, dropped=(4,)), True),  # from 3 to 6, by way of 2
    ],
)
def test_what_may_be_left_out(way: Route, allowed: bool) -> None:
    assert Droppable(fewest=3, max_jump=3).allows(way, loss_at_home=True) == allowed


def test_the_last_hop_may_have_the_loss() -> None:
    one = Droppable(fewest=2)
    assert one.allows(route(0, 1, 2, dropped=(1,)), loss_at_home=False)
    assert not one.allows(route(0, 1, 2, dropped=(2,)), loss_at_home=False)


def test_by_default_nothing() -> None:
    assert Droppable().allows(route(0, 1, 2), loss_at_home=True)
    assert not Droppable().allows(route(0, 1, 2, dropped=(1,)), loss_at_home=True)
