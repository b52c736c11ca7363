"""What a peer takes from others: nothing before they have shown that they may be here, and nothing bad afterwards."""

import asyncio
import copy
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.node.applying import PACE
from tests.node.lab import CODEC, NUMEL, OUTER, doors
from tests.protocol.bus import LAP, beat, rules, snapshot

from farflung.compression.policy import uniform
from farflung.node.allowance import BURST_BYTES, BYTES_PER_S, LEAST_BYTES
from farflung.node.detours import Detours
from farflung.node.events import EventLog
from farflung.node.facilities import Facilities, Facts
from farflung.node.peer import TICK_S
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.sealed_mail import SealedMail
from farflung.node.terms import Terms
from farflung.node.utterance import SAY_AGAIN_S
from farflung.protocol import messages
from farflung.protocol.chain import Commit, Contribution, RoundResult, founded
from farflung.protocol.effects import Effect
from farflung.protocol.envelope import Envelope
from farflung.protocol.errors import BadSignature, Refused
from farflung.protocol.keys import SIGNATURE_BYTES, Ed25519Signer
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.member import Member
from farflung.protocol.membership import VERDICT_AFTER, Liveness, Membership
from farflung.protocol.saved_vote import SavedVote
from farflung.sims import clock
from farflung.sims.attacks import Attack, AttackingNetwork
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.toy import MemoryStorage, ToyLearner
from farflung.training.rules import OuterRule, Sgd, halfway

ADDRESSES = ("tls://192.0.2.1:443",)
US, OTHER = Ed25519Signer(b"u" * 32), Ed25519Signer(b"s" * 32)
SETTINGS = rules(US.peer_id)

Body = Callable[[MemoryHub, MemoryNetwork, ReplicaPeer], Awaitable[None]]


def refusals(body: Body, **agreed: Any) -> list[dict[str, Any]]:
    """Of a peer that has founded a swarm, when something happens to it; `agreed`: what its terms have that is not usual."""
    events: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(latency_s=0.005, jitter_s=0.0, up_bytes_per_s=1e9))
        network = MemoryNetwork(hub, US.peer_id)
        flat = uniform(CODEC, NUMEL)
        usual: dict[str, Any] = {"settings": SETTINGS, "feedback": FeedbackSpec(), "outer": OUTER}
        terms = Terms(pace=PACE, uplink=flat, downlink=flat, **(usual | agreed))
        log = EventLog(None, swarm="test", peer="us", clock=lambda: 0.0)
        log.subscribe(events.append)
        facilities = Facilities(
            network=network,
            signer=US,
            doors=doors(),
            storage=MemoryStorage(),
            log=log,
            facts=Facts(device="toy", pid=0),
        )
        peer = ReplicaPeer(terms, facilities, ToyLearner(NUMEL, OUTER))
        peer.member.begin(None, [founded(SETTINGS.swarm, US, SETTINGS.rules)], loop.time())
        network.on_message(peer._on_message)
        await body(hub, network, peer)

    clock.run(main(), start=START_UNIX_S)
    return [event for event in events if event["event"] == "refused"]


def test_the_addresses_of_whoever_is_not_invited_are_not_remembered() -> None:
    """There is room for so many, and those of members would have to give way."""

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        mail = SealedMail(MemoryNetwork(hub, OTHER.peer_id), OTHER, SETTINGS.swarm, messages.decode)
        for admission, known in ((b"uninvited", {}), (b"invited", {OTHER.peer_id: list(ADDRESSES)})):
            mail.send(US.peer_id, beat(admission=admission, addresses=ADDRESSES))
            await asyncio.sleep(1.0)
            assert network._addresses == known

    assert [event["reason"] for event in refusals(body)] == ["no invitation to this swarm"]


def test_whoever_is_not_invited_takes_no_place_among_those_whose_numbers_are_remembered() -> None:
    """Keys cost nothing: some thousand of them would keep all newcomers out for minutes."""

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        peer._mail._opener.replay._max_senders = 2
        for stranger in [Ed25519Signer(bytes([number]) * 32) for number in range(100, 104)]:
            mail = SealedMail(MemoryNetwork(hub, stranger.peer_id), stranger, SETTINGS.swarm, messages.decode)
            for message in (beat(admission=b"uninvited"), messages.Goodbye("")):
                mail.send(US.peer_id, message)
        await asyncio.sleep(1.0)
        invited = SealedMail(MemoryNetwork(hub, OTHER.peer_id), OTHER, SETTINGS.swarm, messages.decode)
        invited.send(US.peer_id, beat(admission=b"invited"))
        await asyncio.sleep(1.0)
        assert peer.admitted(OTHER.peer_id)

    said = [event["reason"] for event in refusals(body)]
    assert set(said) == {"no invitation to this swarm", "Goodbye before being admitted to the swarm"}


@pytest.mark.parametrize(
    ("feedback", "steps", "rule"), [("kept", LAP, Sgd(lr=1.0)), ("kept", 2 * LAP, OUTER), ("none", LAP, OUTER)]
)
def test_a_meeting_weighs_as_much_as_the_rule_of_the_next_round_asks(
    feedback: str, steps: int, rule: OuterRule
) -> None:
    """Of the last round, in which what peers have kept counts, it may be another."""

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        assert peer.exchange._meetings._weight() == halfway(rule)

    assert not refusals(body, settings=rules(US.peer_id, total_steps=steps), feedback=FeedbackSpec(uplink=feedback))


def test_the_rate_of_a_round_follows_from_who_contributed_and_that_of_the_next_from_the_view() -> None:
    flat = uniform(CODEC, NUMEL)
    terms = Terms(
        settings=SETTINGS, pace=PACE, uplink=flat, downlink=flat, feedback=FeedbackSpec(), outer=OUTER, growth=0.5
    )
    peers = tuple(bytes([i]) * 32 for i in range(8))

    def commit(view: tuple[bytes, ...], tokens: tuple[int, ...]) -> Commit:
        shares = tuple(Contribution(peer, count, 1, 0) for peer, count in zip(peers, tokens, strict=False))
        found = founded(SETTINGS.swarm, US, SETTINGS.rules).commit
        return msgspec.structs.replace(found, view=view, round=RoundResult(b"p" * 32, shares, (), 1000))

    assert terms.rule(commit(peers, (7, 7, 7, 7, 7, 7, 7, 7))) == at_rate(2 * OUTER.lr)
    assert terms.rule(commit(peers, (7, 7))) == OUTER, "the others brought nothing"
    assert terms.next_rule(commit(peers, (7, 7))) == at_rate(2 * OUTER.lr)
    assert terms.next_rule(commit(peers[:1], (7, 7))) == OUTER


def at_rate(lr: float) -> OuterRule:
    return dataclasses.replace(OUTER, lr=lr)


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        ("forge", "BadSignature"),
        ("replay", "Replayed"),
        ("oversize", "LimitExceeded"),
        ("stale", "Stale"),
        ("garble", "Malformed"),
        ("swarm", "WrongSwarm"),
        ("version", "WrongVersion"),
    ],
)
def test_a_bad_message_of_somebody_admitted_changes_nothing(attack: Attack, error: str) -> None:
    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        attacker = AttackingNetwork(hub, OTHER, SETTINGS.swarm, (attack,), "seed")
        mail = SealedMail(attacker, OTHER, SETTINGS.swarm, messages.decode)

        def state() -> object:
            held = peer.trainer.progress, peer.applier.height, peer.applier.version, network._addresses
            return snapshot(peer.member), copy.deepcopy((peer.member.membership, *held))

        mail.send(US.peer_id, beat(addresses=ADDRESSES))
        await asyncio.sleep(1.0)
        assert peer.member.membership.heartbeat(OTHER.peer_id) is not None
        before = state()
        [sealed] = attacker._own
        [bad] = attacker._make(attack, msgspec.msgpack.decode(sealed[:-SIGNATURE_BYTES], type=Envelope), sealed)
        network.deliver(OTHER.peer_id, bad)
        assert state() == before
        mail.send(US.peer_id, beat(step=1, addresses=ADDRESSES))
        await asyncio.sleep(1.0)
        assert state() != before  # it is heard again at once

    [event] = refusals(body)
    assert (event["error"], event["of"]) == (error, OTHER.peer_id.hex())


def test_a_greeting_that_another_passes_on_first_does_not_keep_its_author_from_being_heard() -> None:
    third, stranger = Ed25519Signer(b"3" * 32), Ed25519Signer(b"4" * 32)

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        mails = {s: SealedMail(network, s, SETTINGS.swarm, messages.decode) for s in (OTHER, third, stranger, US)}

        def greeting(signer: Ed25519Signer, **said: Any) -> bytes:
            return mails[signer]._sealed(US.peer_id, beat(**said))

        membership = peer.member.membership
        for one in (OTHER, third):
            network.deliver(one.peer_id, greeting(one))
        await asyncio.sleep(10.0)
        peer.member.tick(hub.now())
        network.deliver(OTHER.peer_id, greeting(OTHER))
        said = greeting(third, step=1)
        network.deliver(OTHER.peer_id, said)
        assert membership.unheard(third.peer_id) and membership.way_to(third.peer_id) == OTHER.peer_id
        network.deliver(third.peer_id, said)
        assert membership.direct(third.peer_id)

        network.deliver(stranger.peer_id, greeting(third, step=2))
        network.deliver(OTHER.peer_id, greeting(stranger))
        assert membership.heartbeat(stranger.peer_id) is None and stranger.peer_id not in membership.peers
        heartbeat = membership.heartbeat(third.peer_id)
        assert heartbeat is not None and heartbeat.step == 1, "strangers pass on nothing"
        network.deliver(OTHER.peer_id, greeting(US))

    [refused] = refusals(body)
    assert refused["of"] == OTHER.peer_id.hex() and "our own name" in refused["reason"]


def test_a_message_takes_a_detour() -> None:
    a, b, c = (Ed25519Signer(bytes([n]) * 32) for n in (1, 2, 3))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(jitter_s=0.0))
        networks = [MemoryNetwork(hub, one.peer_id) for one in (a, b, c)]
        mails = [SealedMail(n, s, SETTINGS.swarm, messages.decode) for n, s in zip(networks, (a, b, c), strict=True)]
        detours = [Detours(n, m, SETTINGS.swarm, lambda peer: True) for n, m in zip(networks, mails, strict=True)]
        came: list[tuple[bytes, object]] = []

        def pass_on(carrier: bytes, data: bytes) -> None:
            forward = mails[1].open(carrier, data)
            assert isinstance(forward, messages.Forward)
            detours[1].pass_on(carrier, forward, 0.0)

        def take(carrier: bytes, data: bytes) -> None:
            opened = detours[2].open(carrier, data)
            assert opened is not None and carrier == b.peer_id
            came.append(opened)

        networks[1].on_message(pass_on)
        networks[2].on_message(take)
        said = messages.Goodbye("asked to")
        mails[0].send(c.peer_id, said, via=b.peer_id)
        await asyncio.sleep(1.0)
        assert came == [(a.peer_id, said)]

    clock.run(main(), start=START_UNIX_S)


def test_only_what_a_member_says_itself_is_passed_on_and_not_too_much_of_it() -> None:
    a, b = (Ed25519Signer(bytes([n]) * 32) for n in (1, 2))
    sent: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(jitter_s=0.0))
        mails = [SealedMail(MemoryNetwork(hub, s.peer_id), s, SETTINGS.swarm, messages.decode) for s in (a, b)]
        network = MemoryNetwork(hub, OTHER.peer_id)
        network.send = lambda to, data: sent.append(data)  # type: ignore[method-assign]
        detours = Detours(network, mails[1], SETTINGS.swarm, lambda peer: True)
        sealed = mails[0]._sealed(OTHER.peer_id, messages.Goodbye("x" * 400))
        said = messages.Forward(US.peer_id, sealed)
        with pytest.raises(Refused, match="in the name of"):
            detours.pass_on(b.peer_id, said, 0.0)
        with pytest.raises(BadSignature):
            detours.pass_on(a.peer_id, messages.Forward(US.peer_id, sealed[:-1] + bytes([sealed[-1] ^ 1])), 0.0)
        assert sent == []
        for now, most in ((0.0, BURST_BYTES), (1.0, BYTES_PER_S)):
            for _ in range(1000):
                detours.pass_on(a.peer_id, said, now)
            assert most // LEAST_BYTES - 2 <= len(sent) <= most // LEAST_BYTES
            sent.clear()
        for _ in range(10):
            detours.pass_on(a.peer_id, messages.Forward(a.peer_id, sealed), 1.0)
        assert len(sent) <= 1, "its author has had its share, whomever it is for"

    clock.run(main(), start=START_UNIX_S)


def test_of_authors_who_are_gone_no_number_is_kept() -> None:
    authors = [Ed25519Signer(bytes([n]) * 32) for n in range(1, 9)]
    here: set[bytes] = set()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, clock.VirtualLoop)
        network = MemoryNetwork(MemoryHub(loop, random.Random(0), LinkModel(jitter_s=0.0)), US.peer_id)
        mail = SealedMail(network, US, SETTINGS.swarm, messages.decode)
        detours = Detours(network, mail, SETTINGS.swarm, lambda peer: peer == OTHER.peer_id or peer in here)
        for author in authors:
            here.add(author.peer_id)
            sealed = SealedMail(network, author, SETTINGS.swarm, messages.decode)._sealed(US.peer_id, beat())
            assert detours.open(OTHER.peer_id, sealed) == (author.peer_id, beat())
            assert detours._newest.keys() == here
            if len(here) == 3:
                here.clear()

    clock.run(main(), start=START_UNIX_S)


def test_what_comes_by_others_late_does_not_undo_what_has_come() -> None:
    third = Ed25519Signer(b"3" * 32)

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        mails = {s: SealedMail(network, s, SETTINGS.swarm, messages.decode) for s in (OTHER, third)}
        for one in (OTHER, third):
            network.deliver(one.peer_id, mails[one]._sealed(US.peer_id, beat()))
        await asyncio.sleep(10.0)
        peer.member.tick(hub.now())
        network.deliver(OTHER.peer_id, mails[OTHER]._sealed(US.peer_id, beat()))
        older, newer, goodbye, offer = (
            mails[third]._sealed(US.peer_id, said)
            for said in (beat(step=1), beat(step=2), messages.Goodbye("asked to"), messages.Probe(US.peer_id))
        )
        for said in (offer, newer, goodbye, older, newer):
            network.deliver(OTHER.peer_id, said)
        heartbeat = peer.member.membership.heartbeat(third.peer_id)
        assert heartbeat is not None and heartbeat.step == 2
        assert peer.member.membership.leaves(third.peer_id)

    assert refusals(body) == []


def test_what_follows_from_a_message_is_done_though_what_it_asks_to_pass_on_is_not_its_authors() -> None:
    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        mail = SealedMail(network, OTHER, SETTINGS.swarm, messages.decode)
        network.deliver(OTHER.peer_id, mail._sealed(US.peer_id, beat()))
        done: list[object] = []
        peer._executor.push = done.append  # type: ignore[method-assign]
        for _ in range(20):  # until it is called dead
            await asyncio.sleep(1.0)
            peer.member.tick(hub.now())
        garbage = messages.Forward(OTHER.peer_id, bytes(SIGNATURE_BYTES + 1))
        network.deliver(OTHER.peer_id, mail._sealed(US.peer_id, garbage))
        assert peer.member.membership.direct(OTHER.peer_id) and done

    assert [event["error"] for event in refusals(body)] == ["Malformed"]


def test_at_rest_it_looks_again_when_what_comes_makes_anything_due_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: a peer that greets often is called dead in time, though this one itself greets every 16 s, and is not looked at all the while."""
    looks = list[float]()
    tick = Member.tick

    def looked(member: Member, now: float) -> list[Effect]:
        looks.append(now)
        return tick(member, now)

    monkeypatch.setattr(Member, "tick", looked)

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        loop = asyncio.get_running_loop()
        member = peer.member
        monkeypatch.setattr(Membership, "beat_s", 16.0)  # as one of many
        monkeypatch.setattr(peer, "_state", lambda: ("training", "as usual"))
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(peer._tick())
            await asyncio.sleep(5.0)
            looks.clear()
            mail = SealedMail(MemoryNetwork(hub, OTHER.peer_id), OTHER, SETTINGS.swarm, messages.decode)
            mail.send(US.peer_id, beat(admission=b"invited", every_s=1.0))
            await asyncio.sleep(1.0)
            peer._do(member.unreachable(OTHER.peer_id, "the connection broke", loop.time()))
            dead_at = loop.time() + VERDICT_AFTER * member.membership.every_s(OTHER.peer_id)
            await asyncio.sleep(dead_at + 1.0 - loop.time())
            other = member.membership.peers[OTHER.peer_id]
            assert other.liveness is Liveness.DEAD and other.since <= dead_at + 2 * TICK_S
            assert len(looks) <= 8
            looks.clear()
            await asyncio.sleep(3 * peer._net_every_s)
            assert 3 <= len(looks) <= 5, "what it has sent and received is written down all the while"
            ticking.cancel()

    assert not refusals(body)


def test_what_its_disk_says_that_it_has_voted_for_binds_it_though_its_history_is_lost() -> None:
    """As where a damaged one was removed, by the advice of the error."""
    saved = SavedVote(9, 1, group=b"g" * 32)

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        peer._storage.save_vote(saved)
        async with asyncio.TaskGroup() as group:
            group.create_task(peer.run(anchor=None, history=[], known={}))
            await asyncio.sleep(1.0)
            assert peer.member.consensus.has_voted_after(saved.group, saved.height - 1)
            peer.stop("the test is over")

    assert not refusals(body)


def test_a_clock_that_peers_say_is_wrong_is_told_as_the_first_reason_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a node looked for somebody who knows the swarm's history for ever, and had refused nothing."""

    async def body(hub: MemoryHub, network: MemoryNetwork, peer: ReplicaPeer) -> None:
        said: list[dict[str, Any]] = []
        peer.log.subscribe(said.append)
        for trouble in ("", "this machine's clock is 3 min ahead of those of 4 peers: set it", ""):
            monkeypatch.setattr(network, "clock_trouble", lambda trouble=trouble: trouble)
            await asyncio.sleep(SAY_AGAIN_S)
            peer._update_state()
            assert peer.state_reason.startswith(trouble)
        reasons = [event["reason"] for event in said if event["event"] == "node.state"]
        assert len(reasons) == 3 and reasons[1].startswith("this machine's clock") and reasons[0] == reasons[2] != ""
        assert reasons[1].endswith(f"; {reasons[0]}")

    assert refusals(body) == []
