"""A peer that serves no stage: it says so, hears who serves what, and whoever it asks answers.

What `entrance` and `renewal` have in common: before there is a `pipeline`, somebody has to speak.
"""

import asyncio
from collections.abc import Callable, Mapping

from farflung.node.network import Network, PeerId
from farflung.node.sealed_mail import PipelineMail
from farflung.node.shadows import Shelf
from farflung.protocol.envelope import swarm_of
from farflung.protocol.errors import Refused, RemoteError
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.protocol.lives import Life
from farflung.protocol.messages import PipelineMessage
from farflung.protocol.pipeline_messages import Domains, Load, Present, SwarmMessage
from farflung.protocol.roll import Roll


class Outside:
    """See the module."""

    def __init__(
        self,
        *,
        network: Network,
        mail: PipelineMail,
        roll: Roll,
        shelf: Shelf,
        admission: bytes,
        domains: Domains,
        admits: Callable[[PeerId, bytes], bool],
        refused: Callable[[RemoteError], None],
    ) -> None:
        """`admission`: our own token; `admits`: whether a peer that shows this one may be here."""
        self.network = network
        self.roll = roll
        self.shelf = shelf
        self.refused = refused
        self.wants = -1
        """The stage that we are about to take; -1 while we have not chosen."""
        self.makes = 0
        """Number of the life of that stage that we are making; 0 while we make none."""
        self.fits: frozenset[int] = frozenset()
        """The stages that we could take."""
        self.kept: Mapping[int, int] = {}
        """By stage, the version of what our disk has of it."""
        self._mail = mail
        self._admission = admission
        self._domains = domains
        self._admits = admits

    def listen(self, heard: Callable[[Present], None]) -> None:
        """`heard` is told what was said, once the roll knows it."""

        def receive(sender: PeerId, data: bytes) -> None:
            try:
                if swarm_of(data, sender) != self.roll.swarm:
                    return  # of a chain that we have left, or are not in yet
                message = self._mail.open(sender, data, self._check_admitted)
                if not isinstance(message, Present):
                    return  # of steps that are none of ours yet
                self.roll.heard(sender, message, self.now())
            except RemoteError as error:
                self.refused(error)
                return
            self.network.add_addresses(sender, list(message.addresses))
            heard(message)

        self.roll.by_chain = False
        self.network.on_message(receive)

    def _check_admitted(self, sender: PeerId, message: PipelineMessage | SwarmMessage) -> None:
        if isinstance(message, Present) and not self._admits(sender, message.admission):
            raise Refused("no invitation to this swarm", peer=sender)

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer."""
        if self.roll.discover(peer, self.now()):
            self._mail.send(peer, self._present())

    def say(self) -> None:
        """Tell everybody what we want; they answer."""
        present = self._present()
        for peer in self.roll.known:
            self._mail.send(peer, present)

    async def make(self, life: Life) -> None:
        """Say that we are about to begin this life of a stage, until cancelled; of stage 0 not while we do not know with what, for that may never come."""
        self.wants, self.fits = life.stage, frozenset()
        self.listen(lambda present: None)
        while True:
            ready = life.stage > 0 or self.roll.inherits(life, self.now()) is not None
            self.makes = life.number if ready else 0
            self.say()
            await asyncio.sleep(self.roll.heartbeat_s)

    def now(self) -> float:
        """Of the roll's clock."""
        return asyncio.get_running_loop().time()

    def _present(self) -> Present:
        return Present(
            stage=-1,
            life=self.makes,
            wants=self.wants,
            trains=False,
            free=False,
            step=0,
            window=b"",
            finished=False,
            version=self.kept.get(self.wants, 0),
            digest=b"",
            forward_s=0.0,
            up_bytes_per_s=0.0,
            admission=self._admission,
            addresses=tuple(self.network.addresses()[:MAX_ADDRESSES]),
            appointments=(),
            peers=(),
            lives=(),
            lost=(),
            step_s=0.0,
            losses_per_hour=self.roll.losses.per_hour,
            grad_norm=0.0,
            shadows=self.shelf.copies,
            since=0,
            load=Load(0.0, 0.0, 0.0),
            fits=tuple(sorted(self.fits)),
            domains=self._domains,
            decided=self.roll.decided,
        )
