"""Every message and bulk header: its bytes, as committed in `golden_messages.json`, the way back, and what damage does.

Changed bytes mean a new protocol version. Rewritten on purpose only: WRITE_FIXTURE=true.
"""

import json
import math
import os
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farflung.protocol import chain, headers, messages
from farflung.protocol.chain import Certified, Contribution, PartResult, RoundResult, Vote
from farflung.protocol.errors import LimitExceeded, Malformed, RemoteError
from farflung.protocol.headers import BulkHeader, decode_header
from farflung.protocol.lap import Laps
from farflung.protocol.ledger import Holding, Ledger, Suspended
from farflung.protocol.limits import (
    MAX_ADDRESSES,
    MAX_COMMITS_PER_REPLY,
    MAX_CONTROL_BYTES,
    MAX_GROUP_PEERS,
    MAX_HOPS,
    MAX_INTERVALS,
    MAX_MICROBATCHES,
    MAX_PARAMETERS,
    MAX_PARTS,
    MAX_TEXT,
)
from farflung.protocol.lives import Counters, Life
from farflung.protocol.messages import Message, PipelineMessage, Said, decode, encode
from farflung.protocol.pipeline_messages import decode as decode_pipeline
from farflung.protocol.route import DROPPED, OPEN, Leg
from farflung.protocol.types import LEAST_RATE, as_text

GOLDEN = Path(__file__).parent / "golden_messages.json"
FROM = b"\7" * 32
A, B, PLAN, DIGEST, SIGNATURE = b"a" * 32, b"b" * 32, b"p" * 32, b"d" * 32, b"s" * 64

READY = messages.Ready(tokens=800, samples=8, up_bytes_per_s=1e6, down_bytes_per_s=5e6, ready_ms=61000, lacks=(DIGEST,))
ROUND = RoundResult(
    plan=PLAN,
    contributors=(Contribution(A, 800, 8, 61000), Contribution(B, 400, 4, 62000)),
    parts=(PartResult(A, 0, 512, DIGEST), PartResult(B, 512, 1000, b"")),
    seconds_ms=2500,
)
LEDGER = Ledger(48, (Holding(A, ((8, 24), (40, 48))),), ((24, 26),), (Suspended(B, 3, ((26, 40),)),))
COMMIT = chain.Commit(
    height=7,
    parent=DIGEST,
    version=5,
    tokens=123456,
    steps=40,
    lap=8,
    width=1,
    view=(A, B),
    left=(B,),
    ledger=LEDGER,
    round=ROUND,
    lives=(Life(2, 1, B, Counters(4, 32, 100000)),),
    call=Life(0, 1, A, Counters(4, 32, 100000, 1200)),
)
GENESIS = chain.genesis(
    A,
    chain.Rules(
        ahead=3, lease=3, max_group=8, cuts=(0, 1000), laps=Laps.fixed(8), total_steps=800, tokens_per_sample=100
    ),
)
CERTIFIED = Certified(COMMIT, 2, (Vote(A, SIGNATURE),))

SAMPLES: dict[str, Message] = {
    "heartbeat": messages.Heartbeat(
        height=7, ballot=1, version=5, digest=DIGEST, state="training", step=160, tokens_per_s=1500.0,
        up_bytes_per_s=1e6, down_bytes_per_s=5e6, loss=3.25, device="CPU", admission=SIGNATURE,
        addresses=("/ip4/203.0.113.7/tcp/31337",), every_s=2.0, reply=True, ready_in_s=12.5, deaf_to=(B,),
    ),
    "goodbye": messages.Goodbye("asked to leave"),
    "probe": messages.Probe(A),
    "opinion": messages.Opinion(A, 1.5),
    "promise": messages.Promise(7, 2, DIGEST, messages.Accepted(1, COMMIT), READY),
    "promise, nothing to say": messages.Promise(7, 0, DIGEST, None, None),
    "plan": messages.Plan(
        height=7, ballot=0, attempt=1, parent=DIGEST, members=(A, B), contributors=(messages.Contributor(A, READY),),
        parts=(messages.Part(A, 0, 1000),), uplink="int8(block=128)", downlink="int8(block=128)", scatter_s=12.5,
        gather_s=12.5, reason="1 of 2 members are ready",
    ),
    "collected": messages.Collected(PLAN, (A, B)),
    "cut": messages.Cut(PLAN, (A,)),
    "held": messages.Held(PLAN, (DIGEST, b"")),
    "fetch": messages.Fetch(PLAN, 1, DIGEST, (A, B)),
    "forward": messages.Forward(B, bytes(range(80))),
    "abort": messages.Abort(PLAN, "no part is held by a quorum"),
    "propose": messages.Propose(2, COMMIT),
    "voted": messages.Voted(7, 2, DIGEST, SIGNATURE),
    "committed": messages.Committed(CERTIFIED),
    "get commits": messages.GetCommits(-1),
    "commits": messages.Commits(COMMIT, (CERTIFIED,)),
    "commits from genesis": messages.Commits(None, (Certified(GENESIS, 0, ()),)),
}  # fmt: skip
ROUTE = (Leg(0, 4), Leg(1, OPEN), Leg(3, DROPPED))
HEADERS: dict[str, BulkHeader] = {
    "contribution header": headers.ContributionHeader(PLAN, 1, 1 << 20),
    "mean header": headers.MeanHeader(PLAN, 1, 1 << 20),
    "mean request": headers.MeanRequest(PLAN, 1, DIGEST),
    "chunk list request": headers.ChunkListRequest(),
    "chunk list": headers.ChunkList(5, (DIGEST, PLAN)),
    "chunk request": headers.ChunkRequest(77),
    "pieces request": headers.PiecesRequest(),
    "parcel header": headers.ParcelHeader(
        window=PLAN, microbatch=7, hop=1, backward=False, until=4, version=2, route=ROUTE, batch=2, length=128, loss=2.5,
        asks=True, nbytes=1 << 20,
    ),
    "settle request": headers.SettleRequest(PLAN, True),
    "settled": headers.Settled(12),
    "shadow request": headers.ShadowRequest(3, b"h" * 32, False),
    "imprint list request": headers.ImprintListRequest(3),
    "imprint list": headers.ImprintList((headers.ImprintKey(7, PLAN, 0), headers.ImprintKey(7, PLAN, 2)), ()),
    "imprint request": headers.ImprintRequest(3, True, headers.ImprintKey(7, PLAN, 2)),
    "imprinted": headers.Imprinted(128, 1 << 20),
    "exact request": headers.ExactRequest(True, 12, 3),
    "exact header": headers.ExactHeader(DIGEST, 13, 3, True),
    "outer request": headers.OuterRequest(1024, 2048, b"t" * 64),
}  # fmt: skip
PIPELINE: dict[str, PipelineMessage] = {
    "passage": messages.Passage(
        window=PLAN, microbatch=7, hop=3, backward=False, said=Said.STUCK, version=2, route=ROUTE, loss=2.5
    ),
    "again": messages.Again(
        window=PLAN, microbatch=7, hop=1, backward=False, until=2, version=3, route=ROUTE
    ),
    "give up": messages.GiveUp(PLAN, 7, 1, True, 3, ROUTE),
    "landed": messages.Landed(PLAN, (7, 9)),
}  # fmt: skip
ALL: dict[str, Any] = {**SAMPLES, **HEADERS, **PIPELINE}


def read(name: str, body: bytes) -> Any:
    return (decode if name in SAMPLES else decode_pipeline if name in PIPELINE else decode_header)(body, peer=FROM)


def test_there_is_a_sample_of_everything() -> None:
    assert {type(m) for m in SAMPLES.values()} == set(typing.get_args(Message))
    assert {type(h) for h in HEADERS.values()} == set(typing.get_args(BulkHeader))
    assert {type(m) for m in PIPELINE.values()} == set(typing.get_args(PipelineMessage))


def test_the_bytes_are_the_committed_ones() -> None:
    made = {name: encode(sample).hex() for name, sample in ALL.items()}
    if os.environ.get("WRITE_FIXTURE") == "true":
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    assert made == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", ALL)
def test_the_committed_bytes_are_read_back(name: str) -> None:
    assert read(name, bytes.fromhex(json.loads(GOLDEN.read_text())[name])) == ALL[name]


def test_tags_are_unique() -> None:
    """And never change: they are the kinds of envelopes."""
    tags = {messages.tag(s) for s in ALL.values()}
    assert tags == {*range(1, 21), 32, *range(64, 82)}


def test_messages_and_headers_are_not_mixed_up() -> None:
    for name, sample in ALL.items():
        with pytest.raises(Malformed):
            read("probe" if name in HEADERS else "mean header", encode(sample))


def test_a_field_of_a_later_version_is_not_ours_to_refuse() -> None:
    """New fields go last: an older peer reads what it knows."""
    body = msgspec.msgpack.decode(encode(SAMPLES["probe"]))
    assert decode(msgspec.msgpack.encode([*body, "more"]), peer=FROM) == SAMPLES["probe"]


def test_defaults_may_be_missing() -> None:
    body = msgspec.msgpack.decode(encode(SAMPLES["heartbeat"]))
    beat = decode(msgspec.msgpack.encode(body[:-4]), peer=FROM)
    assert (beat.reply, beat.ready_in_s, beat.deaf_to, beat.group) == (False, 0.0, (), b"")  # type: ignore[union-attr]


# ---- damage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_truncation_is_refused(name: str) -> None:
    body = encode(ALL[name])
    for length in range(len(body)):
        with pytest.raises(RemoteError) as caught:
            read(name, body[:length])
        assert caught.value.peer == FROM


@pytest.mark.parametrize("name", ALL)
def test_every_flipped_bit_is_another_message_or_refused(name: str) -> None:
    body = encode(ALL[name])
    for place in range(min(len(body), 160)):
        for bit in range(8):
            damaged = bytearray(body)
            damaged[place] ^= 1 << bit
            try:
                read(name, bytes(damaged))
            except RemoteError as error:
                assert error.peer == FROM


@settings(max_examples=300)
@given(st.sampled_from(sorted(ALL)), st.data())
def test_spliced_bytes_raise_remote_errors_only(name: str, data: st.DataObject) -> None:
    body = encode(ALL[name])
    start = data.draw(st.integers(0, len(body)))
    stop = data.draw(st.integers(start, len(body)))
    damaged = body[:start] + data.draw(st.binary(max_size=12)) + body[stop:]
    try:
        read(name, damaged)
    except RemoteError as error:
        assert error.peer == FROM


@settings(max_examples=300)
@given(st.binary(max_size=80))
@example(b"")
@example(b"\x91" * 5000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x92\x02\xd9\x02\xff\xfe")  # a Goodbye whose text is not UTF-8
@example(b"\x92\x02\xdb\xff\xff\xff\xff")  # a Goodbye of 4 GiB, by its own word
def test_any_bytes_raise_remote_errors_only(data: bytes) -> None:
    for reader in (decode, decode_header, decode_pipeline):
        try:
            reader(data, peer=FROM)
        except RemoteError as error:
            assert error.peer == FROM


# ---- limits ---------------------------------------------------------------------------------------------------

KEYS = tuple(i.to_bytes(32, "big") for i in range(MAX_PARTS + 1))
TOO_MANY = KEYS[: MAX_GROUP_PEERS + 1]


def replaced(sample: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(sample, **changes)


COMMITS = typing.cast(messages.Commits, SAMPLES["commits"])
OVER_LIMIT: dict[str, Any] = {
    "a long reason": messages.Goodbye("x" * (MAX_TEXT + 1)),
    "a long state": replaced(SAMPLES["heartbeat"], state="x" * (MAX_TEXT + 1)),
    "many addresses": replaced(SAMPLES["heartbeat"], addresses=("a",) * (MAX_ADDRESSES + 1)),
    "a long admission": replaced(SAMPLES["heartbeat"], admission=b"x" * 65),
    "a negative height": replaced(SAMPLES["heartbeat"], height=-1),
    "a huge ballot": replaced(SAMPLES["heartbeat"], ballot=(1 << 62) + 1),
    "a negative rate": replaced(SAMPLES["heartbeat"], up_bytes_per_s=-1.0),
    "a rate that is no number": replaced(SAMPLES["heartbeat"], up_bytes_per_s=float("nan")),
    "an infinite rate": replaced(SAMPLES["heartbeat"], down_bytes_per_s=float("inf")),
    "an opinion of the past": messages.Opinion(A, -1.0),
    "an endless age": messages.Opinion(A, float("inf")),
    "a short key": messages.Probe(A[:-1]),
    "a long key": messages.Probe(A + b"a"),
    "many members": replaced(SAMPLES["plan"], members=TOO_MANY),
    "many contributors": replaced(SAMPLES["plan"], contributors=tuple(messages.Contributor(k, READY) for k in TOO_MANY)),
    "many parts": replaced(SAMPLES["plan"], parts=tuple(messages.Part(k, 0, 1) for k in KEYS)),
    "a part beyond all models": replaced(SAMPLES["plan"], parts=(messages.Part(A, 0, MAX_PARAMETERS + 1),)),
    "a deadline of years": replaced(SAMPLES["plan"], scatter_s=1e8),
    "many collected": messages.Collected(PLAN, TOO_MANY),
    "many in the cut": messages.Cut(PLAN, TOO_MANY),
    "many held": messages.Held(PLAN, (b"",) * (MAX_PARTS + 1)),
    "a long digest": messages.Held(PLAN, (b"x" * 33,)),
    "many holders": messages.Fetch(PLAN, 0, DIGEST, TOO_MANY),
    "a short signature": messages.Voted(7, 2, DIGEST, SIGNATURE[:-1]),
    "many voters": messages.Committed(replaced(CERTIFIED, votes=tuple(Vote(k, SIGNATURE) for k in TOO_MANY))),
    "a large view": messages.Propose(0, replaced(COMMIT, view=TOO_MANY)),
    "many intervals": messages.Propose(0, replaced(COMMIT, ledger=Ledger(free=((0, 1),) * (MAX_INTERVALS + 1)))),
    "many commits": replaced(COMMITS, chain=COMMITS.chain * (MAX_COMMITS_PER_REPLY + 1)),
    "before the beginning": messages.GetCommits(-2),
}  # fmt: skip


PIPELINE_OVER_LIMIT: dict[str, Any] = {
    "a long route": replaced(PIPELINE["passage"], route=(Leg(0, 0),) * (MAX_HOPS + 1)),
    "no route": replaced(PIPELINE["passage"], route=()),
    "a stage beyond all plans": replaced(PIPELINE["again"], route=(Leg(1 << 16, 0),)),
    "a peer that cannot be": replaced(PIPELINE["again"], route=(Leg(0, -3),)),
    "a hop beyond all routes": replaced(PIPELINE["again"], hop=MAX_HOPS + 1),
    "a microbatch beyond all steps": replaced(PIPELINE["give up"], microbatch=MAX_MICROBATCHES),
    "something else to say": replaced(PIPELINE["passage"], said=9),
}


@pytest.mark.parametrize("name", [*OVER_LIMIT, *PIPELINE_OVER_LIMIT])
def test_above_a_limit(name: str) -> None:
    with pytest.raises(Malformed) as caught:
        if name in PIPELINE_OVER_LIMIT:
            decode_pipeline(encode(PIPELINE_OVER_LIMIT[name]), peer=FROM)
        else:
            decode(encode(OVER_LIMIT[name]), peer=FROM)
    assert caught.value.peer == FROM


def test_at_the_limit() -> None:
    for message in (
        messages.Goodbye("x" * MAX_TEXT),
        replaced(SAMPLES["plan"], members=KEYS[:MAX_GROUP_PEERS]),
        messages.Held(PLAN, (b"",) * MAX_PARTS),
    ):
        assert decode(encode(message), peer=FROM) == message


@pytest.mark.parametrize("reader", [decode, decode_header])
def test_size_is_checked_before_anything_else(reader: Any) -> None:
    with pytest.raises(LimitExceeded) as caught:
        reader(bytes(MAX_CONTROL_BYTES + 1), peer=FROM)
    assert caught.value.peer == FROM


@given(st.text(max_size=2 * MAX_TEXT))
def test_whatever_is_said_can_be_sent(words: str) -> None:
    said = messages.Goodbye(as_text(words))
    assert decode(encode(said), peer=None) == said


@pytest.mark.parametrize("words", ["two\nlines", "\x1b[2J", "\x9b2J", "x" * (MAX_TEXT + 1)])
def test_texts_are_for_terminals(words: str) -> None:
    with pytest.raises(Malformed):
        decode(encode(messages.Goodbye(words)), peer=None)


def test_a_rate_is_unknown_or_one_to_divide_by() -> None:
    decoder = msgspec.msgpack.Decoder(messages.Ready)
    for good in (0.0, LEAST_RATE, 1e15):
        assert decoder.decode(msgspec.msgpack.encode([1, 1, good, 1.0, 1])).up_bytes_per_s == good
    for bad in (5e-324, 1e-310, LEAST_RATE / 2, -1.0, math.nan, math.inf):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode([1, 1, bad, 1.0, 1]))
