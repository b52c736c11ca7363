"""Who founded the chain of a stage. Each stage of a pipeline has a history of its own, and somebody has to begin it.

Two peers that come at the same time must not begin two histories of one stage, so it takes somebody who is asked by both: the founder of the
swarm signs *one* peer per stage, and writes it down before it says so. That peer founds the stage's chain as the swarm's founder founds that of
a replica swarm, and of stage 0. An appointment is for the first life of a stage only; how later ones begin says `lives`.
"""

from typing import Annotated

from msgspec import Meta, Struct

from farflung.protocol.errors import BadSignature
from farflung.protocol.keys import PeerId, Signer, domain, verify
from farflung.protocol.limits import MAX_HOPS
from farflung.protocol.types import Key, Signature

_DOMAIN = domain("appointment")


class Appointment(Struct, frozen=True, array_like=True):
    """The swarm's founder lets a peer begin the chain of a stage."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_HOPS)]
    founder: Key
    signature: Signature
    """Of the swarm's founder."""


def appoint(signer: Signer, swarm: bytes, stage: int, peer: PeerId) -> Appointment:
    """By the founder of `swarm`, who must never appoint two for one stage."""
    return Appointment(stage, peer, signer.sign(_statement(swarm, stage, peer)))


def check_appointment(appointment: Appointment, swarm: bytes, founder: PeerId, *, peer: PeerId | None) -> None:
    """Raises BadSignature naming `peer`, who showed it, unless the swarm's founder signed it."""
    try:
        verify(founder, appointment.signature, _statement(swarm, appointment.stage, appointment.founder))
    except BadSignature as error:
        raise BadSignature(f"an appointment for stage {appointment.stage}: {error.reason}", peer=peer) from None


def _statement(swarm: bytes, stage: int, peer: PeerId) -> bytes:
    return _DOMAIN + swarm + stage.to_bytes(4, "big") + peer
