"""A running node as others see it: its answers on the control socket, its record in the DHT, its invitation."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from farflung.node.control import Answer, Handler
from farflung.node.engine import Engine
from farflung.node.events import EventLog
from farflung.node.ledger_rows import ledger_status
from farflung.node.listening import INVITATION_ADDRESSES
from farflung.node.network import PeerId
from farflung.node.peer import AGENT, Peer
from farflung.node.recipe import Recipe
from farflung.node.status import FreshInvitation, NodeStatus, PeerStatus
from farflung.protocol.errors import ConfigError
from farflung.protocol.invitation import Invitation, carried, encode_invitation
from farflung.protocol.naming import full_name
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.types import Count


def getting_ready(status: NodeStatus, log: EventLog) -> Mapping[str, Handler]:
    """What the control socket serves while there is no peer: it may take minutes to open the data, or to begin a stage anew."""

    async def answer_status(args: Answer) -> Answer:
        answer: dict[str, Any] = msgspec.to_builtins(status)
        return answer

    async def refuse(args: Answer) -> Answer:
        raise ConfigError("this node is getting ready: look at it with `farflung status`, and ask again when it trains")

    return {
        "status": answer_status,
        "events": partial(_events, log),
        "peers": refuse,
        "ledger": refuse,
        "leave": refuse,
        "invitation": refuse,
    }


async def _events(log: EventLog, args: Answer) -> AsyncIterator[Answer]:
    with log.follow() as follower:
        async for event in follower:
            yield event


class _AboutSamples(msgspec.Struct, forbid_unknown_fields=True):
    sample: Count | None = None


class NodeInside:
    """Reads a peer and its engine; changes nothing but by `leave`."""

    def __init__(
        self, engine: Engine, peer: Peer, recipe: Recipe, *, name: str, status: NodeStatus, seed: bytes
    ) -> None:
        """`status` is what the node's events are folded into; `seed` is the invitation's secret, or empty."""
        self.status = status
        self._engine = engine
        self._peer = peer
        self._recipe = recipe
        self._name = name
        self._seed = seed
        self._left: asyncio.Event = asyncio.Event()
        self._reason = ""

    @property
    def is_founder(self) -> bool:
        return self._engine.peer_id == self._recipe.manifest.founder

    def verbs(self) -> Mapping[str, Handler]:
        """What the control socket serves."""
        return {
            "status": self._answer_status,
            "peers": self._answer_peers,
            "ledger": self._answer_ledger,
            "leave": self._answer_leave,
            "events": partial(_events, self._peer.log),
            "invitation": self._answer_invitation,
        }

    def left(self, reason: str) -> None:
        """The node has left and saved: whoever waits for that is told."""
        self._reason = reason
        self._left.set()

    def invitation(self) -> str:
        """An invitation with our addresses and those of members we hear."""
        mine = carried(self._engine.addresses())[:INVITATION_ADDRESSES]
        others = [one for who, said, _ in self.heard() if who in self._view() for one in carried(said)[:1]]
        return encode_invitation(
            Invitation(
                name=self._recipe.manifest.name,
                swarm=self._recipe.swarm,
                founder=self._recipe.manifest.founder,
                invite_seed=self._seed,
                addresses=(*mine, *others[:INVITATION_ADDRESSES]),
            )
        )

    def record(self) -> PeerRecord:
        """What we say of ourselves in the DHT."""
        member, trainer, serving = self._peer.member, self._peer.trainer, self._peer.serving
        return PeerRecord(
            addresses=tuple(self._engine.addresses()),
            device=self._peer.facts.device,
            tokens_per_s=trainer.tokens_per_s,
            up_bytes_per_s=self._peer.exchange.sending.bytes_per_s,
            down_bytes_per_s=self._peer.exchange.receiving.bytes_per_s,
            stages=(0, self._recipe.model.num_layers) if serving is None else serving.layers,
            height=max(0, member.standing.applied_height),
            version=max(0, member.standing.applied_version),
            state_digest=member.standing.digest,
            agent=AGENT,
            state=member.membership.state,
            admission_token=self._peer.facts.admission,
            group=member.group,
        )

    def heard(self) -> Iterator[tuple[PeerId, tuple[str, ...], float]]:
        """Peers that tell where they are: key, addresses, when last heard (unix seconds)."""
        now, unix_now = asyncio.get_running_loop().time(), self._engine.unix_time()
        for who, addresses, heard_at in self._peer.heard():
            yield who, addresses, unix_now - (now - heard_at)

    def peers(self) -> list[PeerStatus]:
        """One row for each peer we know of, and ourselves."""
        links, view, now = self._engine.links(), self._view(), asyncio.get_running_loop().time()
        trainer, serving = self._peer.trainer, self._peer.serving
        rows = [
            PeerStatus(
                peer=self._engine.peer_id.hex(),
                state="self",
                member=self._engine.peer_id in view,
                device=self._peer.facts.device,
                tokens_per_s=trainer.tokens_per_s,
                version=max(0, trainer.version),
                step=trainer.global_step,
                addresses=self._engine.addresses(),
                stage=None if serving is None else serving.stage,
                region=self._peer.facts.domains.region,
                owner=self._peer.facts.domains.owner,
                forward_s=0.0 if serving is None else serving.forward_s,
                uplink_bytes_per_s=self._peer.exchange.sending.bytes_per_s,
                downlink_bytes_per_s=self._peer.exchange.receiving.bytes_per_s,
            )
        ]
        for who, row in sorted(self._peer.others(view, now).items()):
            if (link := links.get(who)) is not None:
                row.carrier = link.carrier
                row.up_bytes_per_s, row.down_bytes_per_s = link.up_bytes_per_s, link.down_bytes_per_s
                row.sent_bytes, row.received_bytes = link.sent_bytes, link.received_bytes
            rows.append(row)
        return rows

    def _view(self) -> tuple[PeerId, ...]:
        return self._peer.member.head.commit.view if self._peer.member.started else ()

    async def _answer_status(self, args: Answer) -> Answer:
        self.status.reason = self._peer.state_reason or self.status.reason
        self.status.group, self.status.group_members = self._peer.member.group.hex(), len(self._view())
        if (serving := self._peer.serving) is not None:
            self.status.stage, self.status.stage_peers = serving.stage, list(serving.stage_peers)
        answer: dict[str, Any] = msgspec.to_builtins(self.status)
        return answer

    async def _answer_peers(self, args: Answer) -> Answer:
        return {"peers": msgspec.to_builtins(self.peers())}

    async def _answer_ledger(self, args: Answer) -> Answer:
        try:
            asked = msgspec.convert(args, _AboutSamples)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a question about samples: {error}") from error
        member, serving = self._peer.member, self._peer.serving
        if serving is not None and serving.stage != 0:
            raise ConfigError(
                f"this node serves stage {serving.stage}, and only the peers of stage 0 know about samples: ask on the machine of one"
            )
        if not member.started:
            raise ConfigError("this node is on its way in and has not heard of any commit yet; ask again in a while")
        told = ledger_status(
            member.history,
            swarm=self._name,
            num_samples=self._recipe.manifest.data.num_samples,
            lease=self._peer.settings.rules.lease,
            sample=asked.sample,
        )
        answer: dict[str, Any] = msgspec.to_builtins(told)
        return answer

    async def _answer_leave(self, args: Answer) -> Answer:
        self._peer.stop("asked to leave")
        await self._left.wait()
        return {"reason": self._reason}

    async def _answer_invitation(self, args: Answer) -> Answer:
        if self._recipe.manifest.admission.invite_key and not self._seed:
            raise ConfigError(
                "this machine has no invitation of its own to hand on: it joined by the name. Ask the founder, or whoever "
                "joined with an invitation, to run `farflung invite`"
            )
        manifest = self._recipe.manifest
        fresh = FreshInvitation(invitation=self.invitation(), full_name=full_name(manifest.name, manifest.founder))
        answer: dict[str, Any] = msgspec.to_builtins(fresh)
        return answer
