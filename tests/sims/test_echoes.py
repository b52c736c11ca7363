"""Greetings that are reckoned and not sent: the swarm does what it does when each of them is a message."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farflung.node.events import Event
from farflung.protocol.errors import ConfigError
from farflung.protocol.member import Member
from farflung.protocol.messages import Heartbeat
from farflung.sims.churn import make_schedule
from farflung.sims.scenario import parse_scenario
from farflung.sims.scenario_plan import prepare
from farflung.sims.simulation import Report, simulate

SCENARIO = """
about = "Machines that come and go."
mode = "cost"
duration_s = {seconds}
[manifest.model]
preset = "3m"
[manifest.swarm]
batch_tokens = 16384
inner_steps = 30
[[peers]]
name = "home"
count = {peers}
tokens_per_s = 1638.4
join_s = [0.0, 20.0]
{session}
[network]
greetings = "{greetings}"
{more}
"""

UNTIMED = frozenset({"step", "net", "span", "node.state"})
"""Events that are looked at in other tests, or that come by the clock."""


def swarm(greetings: str, *, peers: int = 6, minutes: float = 12.0, session: str = "", more: str = "") -> "Seen":
    text = SCENARIO.format(seconds=60.0 * minutes, peers=peers, greetings=greetings, session=session, more=more)
    scenario = parse_scenario(text, name="echoes")
    seen = Seen()
    plan = prepare(scenario, 0, make_schedule(scenario, 0, Path())).plan
    seen.report = simulate(plan, sink=lambda line, event: seen.events.append(event))
    assert not seen.report.violations
    return seen


class Seen:
    """Of one simulation."""

    report: Report

    def __init__(self) -> None:
        self.events: list[Event] = []

    def counts(self) -> Counter[str]:
        return Counter(str(event["event"]) for event in self.events if event["event"] not in UNTIMED)

    def times(self, what: str) -> list[float]:
        return sorted(float(event["time"]) for event in self.events if event["event"] == what)

    def sent_bytes(self) -> int:
        last: dict[Any, int] = {}
        for event in self.events:
            if event["event"] == "net":
                last[event["peer"]] = int(event["sent_bytes"])
        return sum(last.values())


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many came, by message."""
    counts: Counter[str] = Counter()
    receive = Member.receive

    def counting(self: Member, sender: Any, message: Any, now: float, *, via: Any = None) -> Any:
        counts["greetings"] += isinstance(message, Heartbeat)
        return receive(self, sender, message, now, via=via)

    monkeypatch.setattr(Member, "receive", counting)
    return counts


KILLED = """
[[happenings]]
at = 200.3
what = "kill"
peers = ["home/2"]
for_s = 120.0
[[happenings]]
at = 450.0
what = "leave"
peers = ["home/4"]
for_s = 100.0
"""

CUT = """
[[happenings]]
at = 200.3
what = "partition"
peers = ["home/1", "home/2"]
for_s = 60.0
[[happenings]]
at = 400.0
what = "pause"
peers = ["home/3"]
for_s = 40.0
[[happenings]]
at = 550.0
what = "power"
peers = ["home/4"]
"""

MANY = "session = { mean_s = 600.0 }\nabsence = { mean_s = 120.0 }"


@pytest.mark.parametrize(("session", "more"), [("", KILLED), ("", CUT), (MANY, "")], ids=["killed", "cut", "many"])
def test_a_swarm_lives_as_if_each_were_sent(session: str, more: str, heartbeats: Counter[str]) -> None:
    sent = swarm("sent", session=session, more=more)
    by_messages = heartbeats.pop("greetings")
    reckoned = swarm("reckoned", session=session, more=more)
    assert heartbeats["greetings"] < by_messages / 5
    assert abs(reckoned.report.rounds - sent.report.rounds) <= 1
    assert reckoned.report.members == sent.report.members
    for what in ("peer.dead", "peer.left", "view.commit", "round.commit"):
        ours, theirs = reckoned.times(what), sent.times(what)
        assert abs(len(ours) - len(theirs)) <= max(1, len(theirs) // 10), what
    for what in ("peer.dead", "peer.left"):
        assert reckoned.times(what)[:1] == pytest.approx(sent.times(what)[:1], abs=2.0)
    assert reckoned.sent_bytes() == pytest.approx(sent.sent_bytes(), rel=0.03)


@pytest.mark.parametrize(
    ("more", "said"),
    [("[manifest.pipeline]\nstages = 2", "a pipeline"), ("[costs]\nprocessors = 2", "costs.processors")],
)
def test_where_each_counts_it_is_sent(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said} each greeting is sent; leave it out"):
        swarm("reckoned", more=more)
