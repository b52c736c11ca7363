"""What logs show that lack lines: nothing of what is not there."""

import pytest
from tests.sims.sound_logs import PEERS, A, B, Logs, figures, of, remove, sound, step

from farflung.node.events import Event
from farflung.sims.audit_samples import Claim, compare
from farflung.sims.logs import begins_late
from farflung.sims.summary import violations


def slowly() -> Logs:
    """The same run with minutes between rounds: by how much clocks may be apart is little beside that."""
    return {peer: [event | {"time": 40 * event["time"]} for event in events] for peer, events in sound().items()}


def unwritten(events: list[Event], first: int, after: int) -> list[Event]:
    """A full disk has not taken the lines from the one to before the other."""
    heading = {key: events[after][key] for key in ("time", "swarm", "peer", "height", "version", "step")}
    told = heading | {"event": "log.unwritten", "count": after - first, "since": events[first]["time"]}
    return [*events[:first], told, *events[after:]]


def alone_or_not(peer: str, events: list[Event]) -> list[Logs]:
    """As one of three, and as the only log that there is."""
    return [slowly() | {peer: events}, {peer: events}]


@pytest.mark.parametrize("peer", PEERS)
def test_a_log_without_its_beginning_breaks_nothing(peer: str) -> None:
    whole = slowly()[peer]
    for first in range(1, whole.index(of(whole, "step")[-1])):
        for logs in alone_or_not(peer, whole[first:]):
            result = figures(logs, exits={})
            assert violations(result) == [], f"from line {first} on"
            assert result["begin_late"] == {PEERS[peer]: round(whole[first]["time"], 1)}
            has_all = any(event["round"] == 1 for events in logs.values() for event in of(events, "round.commit"))
            assert result["samples_lost"] == (0 if has_all else None)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 21])
@pytest.mark.parametrize("peer", PEERS)
def test_a_log_that_lacks_lines_breaks_nothing(peer: str, count: int) -> None:
    whole = slowly()[peer]
    for first in range(1, len(whole) - count):
        for logs in alone_or_not(peer, unwritten(whole, first, first + count)):
            result = figures(logs, exits={})
            assert violations(result) == [], f"without lines {first} to {first + count - 1}"
            since, until = whole[first]["time"], whole[first + count]["time"]
            assert result["unwritten"] == {PEERS[peer]: [count, since, until]}


def test_what_is_wrong_elsewhere_in_a_log_that_lacks_lines_is_found() -> None:
    logs = slowly()
    logs[B] = unwritten(logs[B], 13, 15)  # of the third round
    remove(B, "round.scatter", 0)(logs)
    of(logs[B], "step")[1]["samples"] = [[500, 504]]
    said = [one["detail"] for one in figures(logs, exits={})["invariants_broken"]]
    assert said == [
        "node 2 in round 1 was counted, and had sent no contribution",
        "node 2 has 4 samples that rounds count and it did not train: 12 to 15",
        "node 2 trained 4 samples for a round that counts others: 500 to 503",
    ]
    logs = slowly()
    logs[A] = logs[A][4:]  # of the first round
    of(logs[A], "step")[-1]["samples"] = [[500, 504]]
    remove(A, "round.scatter", 2)(logs)
    (sent, trained) = (one["detail"] for one in figures(logs, exits={})["invariants_broken"])
    assert sent == "node 1 in round 3 was counted, and had sent no contribution"
    assert trained == "node 1 has 4 samples that rounds count and it did not train: 52 to 55"


def test_what_was_sent_before_the_last_round_was_written_of_comes_after_it() -> None:
    """As where training goes on while rounds are under way: of the first round that a log has, it lacks what was sent."""
    late = [step(1, (8, 16)), step(2, (16, 24))]
    assert compare(late, [Claim(5, [(0, 8)]), Claim(4, [(8, 16)])]).missing == []
    assert compare(late, [Claim(4, [(8, 16)]), Claim(5, [(0, 8)])]).missing == [(0, 8)], "that was counted before"


@pytest.mark.parametrize(("fields", "late"), [({}, True), ({"stage": 1}, False)])
def test_a_first_start_that_takes_up_what_was_there_is_not_the_first(fields: dict[str, int], late: bool) -> None:
    """A stage is made anew, and held, before the node of it starts."""
    start = sound()[A][0] | fields
    assert not begins_late([start]) and begins_late([start | {"resumed": True}]) is late
