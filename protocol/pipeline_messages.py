"""What the peers of all stages of a pipelined swarm tell each other, beside what goes on within a stage and within a step (`messages`).

Control messages like those, signed and bound to the swarm, not to the group of a stage. Their numbers follow on those of `messages`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.protocol import wire
from farflung.protocol.appointment import Appointment
from farflung.protocol.keys import PeerId
from farflung.protocol.limits import (
    LONGEST_TRIP_MS,
    MAX_CONTROL_BYTES,
    MAX_GROUP_PEERS,
    MAX_HOPS,
    MAX_MICROBATCHES,
    MAX_PIPELINE_PEERS,
    MAX_WAYS,
    WAY_NAME_BYTES,
)
from farflung.protocol.lives import BEGINNING, Counters, Life
from farflung.protocol.messages import Again, GiveUp, Landed, Passage, PipelineMessage
from farflung.protocol.route import Legs
from farflung.protocol.types import Count, Digest, Key, Label, OptionalDigest, Rate, Seconds, Text, check_rates

Place = Annotated[int, Meta(ge=0, lt=MAX_PIPELINE_PEERS)]
"""Of a peer in a plan's list of them."""


class Load(Struct, frozen=True, array_like=True):
    """What a peer has had to do in its stage, a step of late (exponential means)."""

    visits: Annotated[float, Meta(ge=0.0, le=float(MAX_MICROBATCHES * MAX_HOPS))]
    """Microbatches that went through it and back."""
    computing_s: Seconds
    """Seconds of its processor for them."""
    sending_s: Seconds
    """Seconds of its uplink."""


class Copy(Struct, frozen=True, array_like=True):
    """A compressed copy of another stage's parameters that a peer holds."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    step: Count
    """Of the pipeline, at the round that made what it is a copy of."""
    nbytes: Count


class Domains(Struct, frozen=True, array_like=True):
    """With what a peer would be lost: as its person tells, for nobody else knows."""

    region: Label = ""
    """Where it stands; empty: unknown."""
    owner: Label = ""
    """Whose it is, the same for all machines of one person; empty: unknown."""


UNKNOWN = Domains()


class Way(Struct, frozen=True, array_like=True):
    """What a peer knows of the way to another (`ways`)."""

    peer: Annotated[bytes, Meta(min_length=WAY_NAME_BYTES, max_length=WAY_NAME_BYTES)]
    """How its key begins."""
    beat: Count
    """Number of its word that came last; 0: none."""
    held_ms: Annotated[int, Meta(ge=0, le=LONGEST_TRIP_MS)]
    """Milliseconds since that came."""
    trip_ms: Annotated[int, Meta(ge=0, le=LONGEST_TRIP_MS)]
    """Milliseconds to that peer and back; 0 while that is not known."""


LEAST_STEP_S = 1e-6
"""Of what a step is said to take: no pipeline is faster, and what is lost in a step must not be nothing."""


class Present(Struct, frozen=True, array_like=True, tag=21):
    """To everybody known, every few seconds and when something of it changes: I serve this stage."""

    stage: Annotated[int, Meta(ge=-1, lt=MAX_HOPS)]
    """-1: none yet; who says so is told who serves what, and appointed if that is needed."""
    life: Count
    """Number of the life of that stage (`lives`); without a stage, of the life that it is making of the one it wants, 0 while it makes none."""
    wants: Annotated[int, Meta(ge=-1, lt=MAX_HOPS)]
    """The stage that it is about to take, having none yet or leaving its own for it; -1 while there is no such one."""
    trains: bool
    """Is a member of its stage's chain, with its outer state, and not about to leave."""
    free: bool
    """Could take part in a step now."""
    step: Count
    """Next step of the pipeline, as far as this peer knows."""
    window: OptionalDigest
    """The step that it takes part in, or has been asked to; empty between steps."""
    finished: bool
    """The run is complete for its stage."""
    version: Count
    """Of the outer state of its stage that it holds; without a stage, of the one it wants, as its disk has it from an earlier life."""
    digest: OptionalDigest
    """Of that state; empty while there is none."""
    forward_s: Seconds
    """What a forward of its stage takes for one microbatch; 0 while that is not known."""
    up_bytes_per_s: Rate
    """0 while that is not known."""
    admission: Annotated[bytes, Meta(max_length=64)]
    addresses: Annotated[tuple[Text, ...], Meta(max_length=16)]
    appointments: Annotated[tuple[Appointment, ...], Meta(max_length=MAX_HOPS)]
    """All that this peer knows."""
    peers: Annotated[tuple[Count, ...], Meta(max_length=MAX_HOPS)]
    """How many serve each stage, as far as this peer knows."""
    lives: Annotated[tuple[Life, ...], Meta(max_length=MAX_HOPS)]
    """Of the stages that were begun anew, the newest, as the newest commit of its chain has them: of data nodes what they name, of others what they
    acknowledge (`accord`)."""
    lost: Annotated[tuple[Place, ...], Meta(max_length=MAX_HOPS)]
    """Stages that cannot go on, as far as this peer knows (`lives`): nobody with their state was heard for long; or, of its own, whose state it holds,
    no quorum."""
    step_s: Seconds
    """What a step of the pipeline takes, of late; 0 while that is not known."""
    losses_per_hour: Rate
    """Peers that fell silent, over the hours that all were heard, as far as this peer knows."""
    grad_norm: Rate
    """Of the gradient of this peer's layers, of late; 0 while there was none."""
    shadows: Annotated[tuple[Copy, ...], Meta(max_length=MAX_HOPS)]
    since: Count
    """The pipeline's step at which it took its stage, or was started anew."""
    load: Load
    fits: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_HOPS)], ...], Meta(max_length=MAX_HOPS)]
    """Other stages than its own that it could serve: its machine holds them, and nobody has tied it to one."""
    reply: bool = False
    """Whether this only answers another one (and wants no answer)."""
    domains: Domains = UNKNOWN
    beat: Count = 0
    """Its number, if others shall say when it came; else 0."""
    ways: Annotated[tuple[Way, ...], Meta(max_length=MAX_WAYS)] = ()
    """Of some of the others, by turns, each once."""
    call: Life | None = None
    """The life of stage 0 that its chain has called for (`accord`)."""
    apart: bool = False
    """It does not hear enough of its chain's members for a quorum just now."""
    counted: Counters = BEGINNING
    """What stage 0's chain has counted, the newest that this peer has heard."""
    decided: Annotated[tuple[Life, ...], Meta(max_length=MAX_HOPS)] = ()
    """Of the stages that were begun anew, the newest life that counts, as far as this peer knows: what counts once counts for good, also when those who had a
    vote in it say nothing any more, for it may have ended their own."""
    ended: Annotated[tuple[Key, ...], Meta(max_length=MAX_GROUP_PEERS)] = ()
    """Data nodes whose processes this peer, of another stage, has found ended, and has not heard since (`lives`)."""
    loss: Rate = 0.0
    """Of the pipeline's steps of late, nats per token: of data nodes their own once there is one, else what is remembered of theirs. 0: none."""
    tries: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_HOPS)], ...], Meta(max_length=MAX_HOPS)] = ()
    """Of data nodes, the stages that are on trial by that loss."""

    def __post_init__(self) -> None:
        check_rates(self.up_bytes_per_s)
        if 0.0 < self.step_s < LEAST_STEP_S:
            raise ValueError(f"a step of less than {LEAST_STEP_S:g} s")


class PlannedLane(Struct, frozen=True, array_like=True):
    """A route, and how many microbatches take it one after another."""

    route: Legs
    microbatches: Annotated[int, Meta(ge=0, le=MAX_MICROBATCHES)]


class StepPlan(Struct, frozen=True, array_like=True, tag=22):
    """Coordinator to all peers of a step: its routes."""

    window: Digest
    """Names the step; never used twice."""
    step: Count
    peers: Annotated[tuple[Key, ...], Meta(max_length=MAX_PIPELINE_PEERS)]
    stages: Annotated[
        tuple[Annotated[tuple[Place, ...], Meta(max_length=MAX_PIPELINE_PEERS)], ...], Meta(max_length=MAX_HOPS)
    ]
    """Places of those that serve each stage."""
    lanes: Annotated[tuple[PlannedLane, ...], Meta(max_length=1024)]
    leg_s: Seconds
    """Without a word about a microbatch for so long, something is wrong; see `flight.Patience`."""


class StepAnswer(Struct, frozen=True, array_like=True, tag=23):
    """To the coordinator: I am ready for this step, or refuse it."""

    window: Digest
    accepts: bool
    reason: Text


class StepGo(Struct, frozen=True, array_like=True, tag=24):
    """Coordinator to all peers of a step: it begins, or nothing comes of it."""

    window: Digest
    go: bool
    reason: Text


class MoveOrder(Struct, frozen=True, array_like=True, tag=25):
    """Coordinator to a peer: leave your stage for another that needs you more. Whether it does shows in its `Present`."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    """That it has now."""
    to: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    urgent: bool
    """The other stage has one peer only."""
    reason: Text


SwarmMessage = Present | StepPlan | StepAnswer | StepGo | MoveOrder

_decoder: msgspec.msgpack.Decoder[PipelineMessage | SwarmMessage] = msgspec.msgpack.Decoder(
    Passage | Again | GiveUp | Landed | Present | StepPlan | StepAnswer | StepGo | MoveOrder
)


def decode(body: bytes, *, peer: PeerId | None) -> PipelineMessage | SwarmMessage:
    """Raises Malformed or LimitExceeded naming `peer`."""
    return wire.decode(_decoder, body, what="pipeline message", limit=MAX_CONTROL_BYTES, peer=peer)
