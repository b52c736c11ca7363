"""Greetings that are reckoned and not sent: the swarm does what it does when each of them is a message."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.protocol import bus

from farflung.node.events import Event
from farflung.node.peer import Peer
from farflung.protocol.errors import ConfigError
from farflung.protocol.keys import PeerId
from farflung.protocol.member import Member
from farflung.protocol.messages import Heartbeat
from farflung.sims import clock
from farflung.sims.churn import make_schedule
from farflung.sims.echoes import Echo, Echoes, changes_nothing
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
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
inner_steps = 60
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


def swarm(greetings: str, *, peers: int = 6, minutes: float = 14.0, session: str = "", more: str = "") -> "Seen":
    text = SCENARIO.format(seconds=60.0 * minutes, peers=peers, greetings=greetings, session=session, more=more)
    scenario = parse_scenario(text, name="echoes")
    seen = Seen()
    plan = prepare(scenario, 0, make_schedule(scenario, 0, Path())).plan
    rarely = replace(plan.outfit, net_every_s=60.0)  # as in a day: whoever writes that down looks at all else, too
    seen.report = simulate(replace(plan, outfit=rarely), sink=lambda line, event: seen.events.append(event))
    assert not seen.report.violations
    return seen


class Seen:
    """Of one simulation."""

    report: Report

    def __init__(self) -> None:
        self.events: list[Event] = []

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


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom a node takes for absent does not run, and whoever hears it without messages does."""
    greet = Echo.greet

    def looking(self: Echo, beat: Heartbeat, to: list[PeerId], now: float) -> list[PeerId]:
        runs = self.echoes.hub.runs
        assert not any(map(runs, self._absent)) and all(map(runs, self._hearers))
        return greet(self, beat, to, now)

    monkeypatch.setattr(Echo, "greet", looking)


def happens(at: float, what: str, peers: str, *, for_s: float | None = None) -> str:
    """A happening of a scenario."""
    lasts = "" if for_s is None else f"for_s = {for_s}\n"
    return f'[[happenings]]\nat = {at}\nwhat = "{what}"\npeers = [{peers}]\n{lasts}'


KILLED = (
    happens(250.3, "kill", '"home/2"', for_s=120.0)
    + happens(500.0, "leave", '"home/4"', for_s=100.0)
    + happens(700.0, "power", '"home/1"')
)

CUT = (
    happens(250.3, "partition", '"home/1", "home/2"', for_s=60.0)
    + happens(470.0, "pause", '"home/3"', for_s=9.0)
    + happens(700.0, "pause", '"home/4"', for_s=40.0)
)

MANY = "session = { mean_s = 600.0 }\nabsence = { mean_s = 120.0 }"


@pytest.mark.parametrize("more", [KILLED, CUT], ids=["killed", "cut"])
def test_what_goes_wrong_is_seen_when_it_would_be_if_each_were_sent(more: str, heartbeats: Counter[str]) -> None:
    sent = swarm("sent", more=more)
    by_messages = heartbeats.pop("greetings")
    reckoned = swarm("reckoned", more=more)
    assert heartbeats["greetings"] < by_messages / 5
    for what, beat_or_step_s in (("peer.suspect", 2.5), ("peer.dead", 2.5), ("peer.left", 2.5), ("view.commit", 10.5)):
        assert reckoned.times(what) == pytest.approx(sent.times(what), abs=beat_or_step_s), what
    assert sent.times("peer.dead") and sent.times("view.commit")
    assert len(reckoned.times("round.commit")) == pytest.approx(len(sent.times("round.commit")), abs=6)
    assert reckoned.report.members == sent.report.members
    assert reckoned.sent_bytes() == pytest.approx(sent.sent_bytes(), rel=0.03)


def test_who_was_stopped_is_heard_as_soon_as_it_goes_on() -> None:
    for greetings in ("sent", "reckoned"):
        again = [at for at in swarm(greetings, more=CUT).times("peer.alive") if at > 600.0]
        assert again and again == pytest.approx([740.0] * len(again), abs=0.2)


def test_who_was_stopped_for_nearly_too_long_is_not_called_dead() -> None:
    """It greets at once when it goes on, for it was to greet long before."""
    stopped = happens(471.7, "pause", '"home/3"', for_s=11.2)
    for greetings in ("sent", "reckoned"):
        assert not swarm(greetings, more=stopped, minutes=9.0).times("peer.dead")


def test_of_many_that_come_and_go_as_many_are_members(heartbeats: Counter[str]) -> None:
    sent = swarm("sent", session=MANY)
    by_messages = heartbeats.pop("greetings")
    reckoned = swarm("reckoned", session=MANY)
    assert heartbeats["greetings"] < by_messages / 3
    assert abs(reckoned.report.rounds - sent.report.rounds) <= 1
    assert abs(reckoned.report.members - sent.report.members) <= 1, "one may be on its way when the time is over"
    for what in ("peer.dead", "peer.left", "view.commit"):
        assert len(reckoned.times(what)) == pytest.approx(len(sent.times(what)), rel=0.1, abs=1), what
    assert reckoned.sent_bytes() == pytest.approx(sent.sent_bytes(), rel=0.05)


def heard(other: PeerId, member: Member, beat: Heartbeat) -> None:
    member.membership.heard(other, 1.0, beat)


def suspected(other: PeerId, member: Member, beat: Heartbeat) -> None:
    heard(other, member, beat)
    member.membership.unreachable(other, 2.0, "the connection broke")


def leaving(other: PeerId, member: Member, beat: Heartbeat) -> None:
    heard(other, member, beat)
    member.membership.goodbye(other, 2.0)


def only_passed_on(other: PeerId, member: Member, beat: Heartbeat) -> None:
    heard(other, member, beat)
    member.membership.told(other, 30.0)


@pytest.mark.parametrize(
    ("changes", "how", "nothing"),
    [
        ({}, heard, True),
        ({"height": 0}, heard, True),
        ({"version": 1, "digest": b"y" * 32}, heard, True),
        ({"height": 2}, heard, False),
        ({"ballot": 1}, heard, False),
        ({"digest": b"y" * 32}, heard, False),
        ({"group": b"g" * 32}, heard, False),
        ({"state": "joining"}, heard, False),
        ({}, suspected, False),
        ({}, leaving, False),
        ({}, only_passed_on, False),
    ],
)
def test_what_would_change_something_is_sent(changes: dict[str, Any], how: Any, nothing: bool) -> None:
    us, other, *_ = who = bus.signers(3)
    member = bus.new_member(us, bus.rules(us.peer_id))
    assert not changes_nothing(member, other.peer_id, bus.beat()), "without a history each is a reason to ask for it"
    member.begin(None, bus.history_of(who), 0.0)
    head = member.head.commit
    assert (head.height, head.version) == (1, 0)
    member.standing.applied(head.height, head.version, b"x" * 32)
    beat = bus.beat(**{"height": head.height, "version": head.version, "digest": b"x" * 32} | changes)
    how(other.peer_id, member, beat)
    assert changes_nothing(member, other.peer_id, beat) is nothing


def test_who_begins_anew_in_its_process_is_greeted_by_messages() -> None:
    """As one that goes to another group does: what it had heard before, it has not."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(1), LinkModel())
        echoes, who = Echoes(hub), bus.signers(2)
        networks = [MemoryNetwork(hub, signer.peer_id) for signer in who]

        def begins(index: int) -> Member:
            member = bus.new_member(who[index], bus.rules(who[0].peer_id))
            member.begin(None, bus.history_of(who), loop.time())
            rest = SimpleNamespace(reconsider=lambda: None)
            echoes.join(cast(Peer, SimpleNamespace(member=member, rest=rest)), networks[index])
            return member

        us, other = begins(0), begins(1)
        carrier, beat = us.greeting.carrier, bus.beat(height=1)
        assert carrier is not None and carrier.greet(beat, [other.me], loop.time()) == [other.me]
        other.membership.heard(us.me, loop.time(), beat)
        await asyncio.sleep(beat.every_s)
        assert carrier.greet(beat, [other.me], loop.time()) == [] and carrier.repeats
        assert other.membership.peers[us.me].sign is not None
        anew = begins(1)
        assert not carrier.repeats and other.membership.peers[us.me].sign is None
        assert carrier.greet(beat, [anew.me], loop.time()) == [anew.me]

    clock.run(body())


@pytest.mark.parametrize(
    ("more", "said"),
    [("[manifest.pipeline]\nstages = 2", "a pipeline"), ("[costs]\nprocessors = 2", "costs.processors")],
)
def test_where_each_counts_it_is_sent(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said} each greeting is sent; leave it out"):
        swarm("reckoned", more=more)
