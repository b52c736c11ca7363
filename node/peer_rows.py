"""What a node knows of the others, as rows of `farflung peers`: members of its own chain, and peers of all stages of a pipeline.

A chain judges its members with second opinions (`protocol/membership.py`); across stages a peer counts while it is heard (`protocol/roll.py`). So a peer
of our own stage has the state that our chain gives it, and one of another stage is alive, or suspect once it is silent or a stream to it broke.
"""

from collections.abc import Collection

from farflung.node.status import PeerStatus
from farflung.protocol.keys import PeerId
from farflung.protocol.membership import Liveness, Membership
from farflung.protocol.roll import Roll

Rows = dict[PeerId, PeerStatus]


def chain_rows(membership: Membership, view: Collection[PeerId], now: float) -> Rows:
    """Everybody whom our chain has heard of; `now` is seconds of its clock."""
    rows: Rows = {}
    for who, entry in membership.peers.items():
        row = rows[who] = PeerStatus(peer=who.hex(), state=str(entry.liveness), member=who in view)
        if entry.liveness is not Liveness.UNKNOWN:
            row.last_seen_s = max(0.0, now - entry.heard_at)
        if (beat := entry.heartbeat) is not None:
            row.device, row.tokens_per_s = beat.device, beat.tokens_per_s
            row.version, row.step, row.addresses = beat.version, beat.step, list(beat.addresses)
            row.uplink_bytes_per_s, row.downlink_bytes_per_s = beat.up_bytes_per_s, beat.down_bytes_per_s
    return rows


def add_roll(rows: Rows, roll: Roll, now: float) -> None:
    """Add the peers of all stages to those of our own chain, and to these what they say of their stage."""
    for who, entry in roll.entries.items():
        said = entry.present
        if who not in rows:
            state = Liveness.ALIVE if roll.alive(who, now) else Liveness.UNKNOWN if said is None else Liveness.SUSPECT
            rows[who] = PeerStatus(peer=who.hex(), state=str(state))
            if said is not None:
                rows[who].member, rows[who].last_seen_s = said.trains, max(0.0, now - entry.since)
                rows[who].version, rows[who].step, rows[who].addresses = said.version, said.step, list(said.addresses)
        if said is not None:
            rows[who].stage = said.stage if said.stage >= 0 else None
            rows[who].region, rows[who].owner = said.domains.region, said.domains.owner
            rows[who].forward_s = said.forward_s
            rows[who].uplink_bytes_per_s = said.up_bytes_per_s or rows[who].uplink_bytes_per_s
