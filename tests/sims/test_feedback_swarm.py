"""Error feedback in a swarm of real nodes under virtual time: nothing is lost to failed rounds, and to a kill one residual at most."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.compression.aggregate import Contribution
from farflung.compression.codec import Codec
from farflung.compression.registry import parse_codec
from farflung.compression.unreduced import MeanCodec
from farflung.node.exchange import Exchange
from farflung.node.residuals import Residuals
from farflung.protocol.chain import RoundResult
from farflung.protocol.headers import MeanHeader
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.sims.chaos import OUTER, Wire, run_schedule
from farflung.sims.faults import Fault, Kill, Schedule, Start
from farflung.sims.simulation import Meddler
from farflung.sims.swarm import START_UNIX_S, Swarm
from farflung.sims.toy import ToyLearner

NUMEL = 640
PEERS = 3
DURATION_S = 100.0
FAILING = 0.3
"""Share of plans whose contributions reach nobody."""
Key = tuple[bytes, str, bytes]
"""(peer, direction, plan)."""


def doomed(plan_id: bytes) -> bool:
    return hashlib.sha256(b"doomed" + plan_id).digest()[0] < FAILING * 256


class Book:
    """What every node handed to its codec, what came out, and what a kill made it forget."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.given: dict[Key, dict[int, Tensor]] = {}
        """Start of a part → x, fp64."""
        self.sent: dict[Key, dict[int, Tensor]] = {}
        """Start of a part → what its payload decodes to, fp64."""
        self.lost: dict[Key, Tensor] = {}
        self.plans: set[bytes] = set()
        self.loaded: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        """(saved, restored)."""

    def encoded(self, key: Key, start: int, x: Tensor, payload: memoryview) -> None:
        self.plans.add(key[2])
        self.given.setdefault(key, {})[start] = x
        self.sent.setdefault(key, {})[start] = self.codec.decode(payload, len(x)).double()

    def left_unreduced(self, key: Key, start: int, mean: Tensor) -> None:
        self.given.setdefault(key, {})[start] = self.sent.setdefault(key, {})[start] = mean.double()

    def left_out(self, key: Key, parts: list[tuple[int, int]]) -> Tensor:
        """What was given less what was sent, of these parts; fp64 [NUMEL]."""
        total = torch.zeros(NUMEL, dtype=torch.float64)
        for start, stop in parts:
            total[start:stop] = self.given[key][start] - self.sent[key][start]
        return total


def kept_parts(result: RoundResult, way: str, peer: bytes) -> list[tuple[int, int]]:
    """The parts that a round counted of what a peer encoded."""
    kept = [part for part in result.parts if part.digest]
    if way == "down":
        return [(part.start, part.stop) for part in kept if part.owner == peer]
    counted = any(contribution.peer == peer for contribution in result.contributors)
    return [(part.start, part.stop) for part in kept] if counted else []


@pytest.fixture
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Book]:
    """Looks over the shoulder of every node, and lets 30 % of the rounds fail."""
    book = Book(request.param)
    send, encode, settle, load = Exchange._send, Residuals._encode, Residuals.settle, Residuals.load
    pack = Residuals.pack_mean

    async def send_or_not(self: Exchange, round_: Any, peer: bytes, header: Any, payload: Any) -> None:
        if isinstance(header, MeanHeader) or not doomed(header.plan):
            await send(self, round_, peer, header, payload)

    def encode_(self: Residuals, way: str, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        before = x.double()
        payload = encode(self, way, plan_id, x, start)
        book.encoded((self._me, way, plan_id), start, before, payload)
        return payload

    def left(
        self: Residuals, plan_id: bytes, start: int, numel: int, contributions: Sequence[Contribution]
    ) -> memoryview:
        payload = pack(self, plan_id, start, numel, contributions)
        mean = MeanCodec(book.codec, book.codec).decode(payload, numel)
        book.left_unreduced((self._me, "down", plan_id), start, mean)
        return payload

    def settled(self: Residuals, result: RoundResult) -> None:
        before = self.state()
        was = {way: before[f"{way}.memory"].double() for way in ("up", "down")}
        settle(self, result)
        for way in ("up", "down"):
            key = (self._me, way, result.plan)
            parts = kept_parts(result, way, self._me)
            pending = set(map(tuple, before[f"{way}.parts"].tolist()))
            book.lost.pop(key, None)
            if bytes(before[f"{way}.round"].tolist()) != result.plan or not pending >= set(parts):
                after = self.state()[f"{way}.memory"].double()
                book.lost[key] = was[way] - after + book.left_out(key, parts)

    def loaded(self: Residuals, state: dict[str, Tensor]) -> None:
        load(self, state)
        book.loaded.append((state, {name: tensor.clone() for name, tensor in self.state().items()}))

    monkeypatch.setattr(Exchange, "_send", send_or_not)
    monkeypatch.setattr(Residuals, "pack_mean", left)
    monkeypatch.setattr(Residuals, "_encode", encode_)
    monkeypatch.setattr(Residuals, "settle", settled)
    monkeypatch.setattr(Residuals, "load", loaded)
    yield book


class AtEnd:
    """A moment in the calm at the end at which nobody is in the middle of anything."""

    def __init__(self, swarm: Swarm) -> None:
        history = {c.commit.height: c.commit for peer in swarm.peers.values() for c in peer.member.history}
        self.ids = swarm.ids
        self.rounds = [c.round for _, c in sorted(history.items()) if c.round is not None]
        self.owed = {
            swarm.ids[i]: {name: tensor.clone() for name, tensor in peer.residuals.state().items()}
            for i, peer in sorted(swarm.peers.items())
        }
        self.digests = {swarm.learners[i].outer.digest() for i in swarm.peers}


def simulate(seed: int, codec: Codec, *faults: Fault, meddler: Meddler | None = None) -> AtEnd:
    seen: list[AtEnd] = []

    async def look(swarm: Swarm) -> None:
        if meddler is not None:
            await meddler(swarm)
        await asyncio.sleep(START_UNIX_S + DURATION_S + 40.0 - swarm.hub.loop.time())
        while len(swarm.peers) < PEERS or any(
            not peer.applier.idle or peer.applier.version != newest(swarm) for peer in swarm.peers.values()
        ):
            await asyncio.sleep(0.01)
        seen.append(AtEnd(swarm))

    wire = Wire(
        codec=codec,
        feedback=FeedbackSpec(uplink="residual", downlink="residual"),
        numel=NUMEL,
        checkpoint_s=0.0,
        min_contributors=2,
        step_s=(0.8, 1.1, 1.6),
    )
    starts = [Start(at=0.5 * peer, peer=peer) for peer in range(PEERS)]
    schedule = Schedule(num_peers=PEERS, duration_s=DURATION_S, faults=(*starts, *faults))
    report = run_schedule(seed, schedule, look, wire)
    assert report.violations == [], "equal bits, one history, every sample once"
    return seen[0]


def newest(swarm: Swarm) -> int:
    return max(peer.member.head.commit.version for peer in swarm.peers.values())


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def check_balance(book: Book, end: AtEnd) -> None:
    """What each node was given of what rounds counted is what it sent, what it owes, and what kills made it forget."""
    assert len(end.owed) == PEERS
    for me, state in end.owed.items():
        for way in ("up", "down"):
            given = torch.zeros(NUMEL, dtype=torch.float64)
            left_out = torch.zeros(NUMEL, dtype=torch.float64)
            for result in end.rounds:
                parts = kept_parts(result, way, me)
                for start, stop in parts:
                    given[start:stop] += book.given[me, way, result.plan][start]
                if parts:
                    left_out += book.left_out((me, way, result.plan), parts)
            lost = sum(t for (p, w, _), t in book.lost.items() if (p, w) == (me, way))
            assert close(left_out, state[f"{way}.memory"].double() + lost), (end.ids.index(me), way)
            assert state[f"{way}.memory"].any()


@pytest.mark.parametrize("book", [parse_codec("sign(block=32)"), parse_codec("topk(chunk=64,k=2)")], indirect=True)
def test_what_was_applied_and_what_is_owed_is_all_progress(book: Book) -> None:
    """30 % of the rounds fail, and nodes are killed and come back, whatever they are doing."""
    kills = [(41.0, 1), (62.3, 2), (84.9, 1)]
    faults = sorted(
        [Kill(at=t, peer=p) for t, p in kills] + [Start(at=t + 12.0, peer=p) for t, p in kills], key=lambda f: f.at
    )
    end = simulate(7, book.codec, *faults)
    rounds = end.rounds
    failed = len(book.plans - {r.plan for r in rounds}) / len(book.plans)
    assert len(rounds) > 10 and failed > 0.2, (len(rounds), failed)
    lossy = {(peer, plan) for (peer, _, plan), lost in book.lost.items() if lost.any()}
    assert len(lossy) <= len(kills) and {peer for peer, _ in lossy} <= {end.ids[p] for _, p in kills}

    check_balance(book, end)

    outer = ToyLearner(NUMEL, OUTER).outer
    for result in rounds:
        tokens = {c.peer: c.tokens for c in result.contributors}
        for part in result.parts:
            if part.digest:
                mean = book.given[part.owner, "down", result.plan][part.start]
                sent = [book.sent[p, "up", result.plan][part.start] * t for p, t in tokens.items()]
                assert close(mean, torch.stack(sent).sum(dim=0) / sum(tokens.values())), (
                    "the owner's mean is of what was sent"
                )
                applied = book.sent[part.owner, "down", result.plan][part.start].float()
                outer.step_(part.start, part.stop, applied, OUTER.lr, OUTER.momentum)
    assert end.digests == {outer.digest()}, "nothing else was applied, by anybody"

    assert len(book.loaded) == len(kills)
    owing = [saved for saved, _ in book.loaded if saved["up.memory"].any() and saved["down.memory"].any()]
    assert len(owing) >= 2  # who came back from a kill between a contribution and its commit owes nothing for a while
    for saved, restored in book.loaded:
        assert saved.keys() == restored.keys()
        assert all(torch.equal(tensor, restored[name]) for name, tensor in saved.items()), "bit for bit"


@pytest.mark.parametrize("book", [parse_codec("sign(block=32)")], indirect=True)
def test_a_kill_between_contribution_and_commit_costs_one_residual(book: Book) -> None:
    killed: list[int] = []

    async def kill_in_a_round(swarm: Swarm) -> None:
        await asyncio.sleep(60.0)
        while not killed:
            await asyncio.sleep(0.001)
            members = {index: peer.member for index, peer in swarm.peers.items()}
            # who holds all means has contributed; the round goes on without it unless it is the one who leads it
            killed.extend(
                [
                    i
                    for i, m in members.items()
                    if (part := m.attendance.part) and part.complete and not m.consensus.proposer
                ][:1]
            )
        swarm.hub.kill(swarm.ids[killed[0]])
        swarm.kill(killed[0])
        await asyncio.sleep(15.0)
        swarm.start(killed[0])

    end = simulate(6, book.codec, meddler=kill_in_a_round)
    lossy = {(peer, plan) for (peer, _, plan), lost in book.lost.items() if lost.any()}
    assert [peer for peer, _ in lossy] == [end.ids[killed[0]]], "the round counted it; what was pending is gone"
    check_balance(book, end)
