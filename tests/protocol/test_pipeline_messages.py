"""Messages between the stages of a swarm: their bytes, as committed in `golden_pipeline.json`, the way back, and what damage does.

Changed bytes mean a new protocol version. To write the file anew, on purpose: run this file as a program.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.protocol import messages
from farflung.protocol.appointment import Appointment
from farflung.protocol.errors import LimitExceeded, Malformed, RemoteError
from farflung.protocol.limits import (
    LONGEST_TRIP_MS,
    MAX_CONTROL_BYTES,
    MAX_GROUP_PEERS,
    MAX_HOPS,
    MAX_LABEL,
    MAX_PIPELINE_PEERS,
    MAX_WAYS,
)
from farflung.protocol.lives import Counters, Life
from farflung.protocol.messages import encode, tag
from farflung.protocol.pipeline_messages import (
    Copy,
    Domains,
    Load,
    MoveOrder,
    PlannedLane,
    Present,
    StepAnswer,
    StepGo,
    StepPlan,
    SwarmMessage,
    Way,
    decode,
)
from farflung.protocol.route import Leg

GOLDEN = Path(__file__).parent / "golden_pipeline.json"
FROM = b"\7" * 32
A, B, WINDOW, DIGEST, SIGNATURE = b"a" * 32, b"b" * 32, b"w" * 32, b"d" * 32, b"s" * 64

PRESENT = Present(
    stage=1, life=2, wants=-1, trains=True, free=False, step=160, window=WINDOW, finished=False, version=5, digest=DIGEST,
    forward_s=0.25, up_bytes_per_s=1e6, admission=SIGNATURE, addresses=("/ip4/203.0.113.7/tcp/31337",),
    appointments=(Appointment(1, B, SIGNATURE),), peers=(2, 1),
    lives=(Life(1, 2, B, Counters(5, 40, 1280)),), lost=(3,), step_s=12.5, losses_per_hour=0.25, grad_norm=1.5,
    shadows=(Copy(3, 120, 4096),),
    since=90, load=Load(4.0, 1.5, 0.5), fits=(0, 2), reply=True, domains=Domains("eu-west", "ann"),
    beat=12, ways=(Way(A[:6], 7, 1500, 83),), call=Life(0, 3, A, Counters(6, 48, 1536, 2048)), apart=True,
    counted=Counters(7, 56, 1792, 2304), decided=(Life(2, 1, A, Counters(4, 32, 1024)),), ended=(A, B), loss=3.25, tries=(0, 2),
)  # fmt: skip
PLAN = StepPlan(WINDOW, 160, (A, B), ((0,), (1,)), (PlannedLane((Leg(0, 0), Leg(1, 1)), 4),), 12.5)
SAMPLES: dict[str, SwarmMessage] = {
    "present": PRESENT,
    "step plan": PLAN,
    "step answer": StepAnswer(WINDOW, False, "busy"),
    "step go": StepGo(WINDOW, True, "all are ready"),
    "move": MoveOrder(1, 0, True, "stage 0 has one peer only"),
}


def bytes_of() -> dict[str, str]:
    return {name: encode(message).hex() for name, message in SAMPLES.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_are_as_committed_and_lead_back(name: str) -> None:
    body = encode(SAMPLES[name])
    assert body.hex() == json.loads(GOLDEN.read_text())[name]
    assert decode(body, peer=FROM) == SAMPLES[name]


def test_tags_follow_on_those_of_messages() -> None:
    assert {tag(message) for message in SAMPLES.values()} == {21, 22, 23, 24, 25}
    landed = messages.Landed(WINDOW, (1, 2))
    assert decode(encode(landed), peer=FROM) == landed  # one channel for all of a pipeline
    with pytest.raises(Malformed):
        messages.decode(encode(PRESENT), peer=FROM)  # and none of them in a chain's


def test_a_step_that_takes_next_to_nothing_is_refused() -> None:
    """What is lost in a step is divided by."""
    spoilt = msgspec.structs.replace(PRESENT, step_s=1.0)
    msgspec.structs.force_setattr(spoilt, "step_s", 5e-324)  # past its own check
    with pytest.raises(Malformed, match="a step of less than 1e-06 s"):
        decode(encode(spoilt), peer=FROM)


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.structs.replace(PRESENT, stage=MAX_HOPS),
        msgspec.structs.replace(PRESENT, wants=-2),
        msgspec.structs.replace(PRESENT, admission=bytes(65)),
        msgspec.structs.replace(PRESENT, appointments=(Appointment(1, b"short", SIGNATURE),)),
        msgspec.structs.replace(PRESENT, lives=(Life(1, 2, b"short"),)),
        msgspec.structs.replace(PRESENT, decided=(Life(1, 2, b"short"),)),
        msgspec.structs.replace(PRESENT, ended=(b"short",)),
        msgspec.structs.replace(PRESENT, ended=(A,) * (MAX_GROUP_PEERS + 1)),
        msgspec.structs.replace(PRESENT, lost=(1,) * (MAX_HOPS + 1)),
        msgspec.structs.replace(PRESENT, shadows=(Copy(MAX_HOPS, 120, 4096),)),
        msgspec.structs.replace(PRESENT, load=Load(-1.0, 0.0, 0.0)),
        msgspec.structs.replace(PRESENT, load=Load(0.0, float("inf"), 0.0)),
        msgspec.structs.replace(PRESENT, fits=(MAX_HOPS,)),
        msgspec.structs.replace(PRESENT, domains=Domains(region="x" * (MAX_LABEL + 1))),
        msgspec.structs.replace(PRESENT, domains=Domains(region="EU west")),
        msgspec.structs.replace(PRESENT, domains=Domains(owner="ann\n")),
        msgspec.structs.replace(PRESENT, fits=(0,) * (MAX_HOPS + 1)),
        msgspec.structs.replace(PRESENT, beat=-1),
        msgspec.structs.replace(PRESENT, ways=(Way(A, 7, 1500, 83),)),
        msgspec.structs.replace(PRESENT, ways=(Way(A[:6], -1, 1500, 83),)),
        msgspec.structs.replace(PRESENT, ways=(Way(A[:6], 7, -1, 83),)),
        msgspec.structs.replace(PRESENT, ways=(Way(A[:6], 7, 1500, LONGEST_TRIP_MS + 1),)),
        msgspec.structs.replace(PRESENT, ways=(Way(A[:6], 7, 1500, 0.5),)),  # type: ignore[arg-type]
        msgspec.structs.replace(PRESENT, ways=(Way(A[:6], 7, 1500, 83),) * (MAX_WAYS + 1)),
        msgspec.structs.replace(PRESENT, up_bytes_per_s=float("nan")),
        msgspec.structs.replace(PRESENT, appointments=(Appointment(MAX_HOPS, A, bytes(64)),)),
        msgspec.structs.replace(PRESENT, appointments=(Appointment(1 << 32, A, bytes(64)),)),
        msgspec.structs.replace(PLAN, peers=(A,) * (MAX_PIPELINE_PEERS + 1)),
        msgspec.structs.replace(PLAN, stages=((MAX_PIPELINE_PEERS,),)),
        msgspec.structs.replace(PLAN, lanes=(PlannedLane((), 1),)),
        msgspec.structs.replace(PLAN, leg_s=-1.0),
        StepAnswer(WINDOW, True, "x" * 513),
        StepGo(b"w", True, ""),
        MoveOrder(0, MAX_HOPS, True, ""),
    ],
)
def test_what_is_beyond_limits_is_refused(wrong: SwarmMessage) -> None:
    with pytest.raises(Malformed) as caught:
        decode(encode(wrong), peer=FROM)
    assert caught.value.peer == FROM


def test_size() -> None:
    with pytest.raises(LimitExceeded):
        decode(bytes(MAX_CONTROL_BYTES + 1), peer=FROM)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_damage_is_a_remote_error(name: str, data: Any) -> None:
    body = bytearray(encode(SAMPLES[name]))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(body), peer=FROM)
    except RemoteError as error:
        assert error.peer == FROM


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(bytes_of(), indent=1) + "\n")
