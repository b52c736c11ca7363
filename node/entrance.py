"""Before a peer can be part of a pipeline it has to know its stage, and who began that stage's chain.

It asks whoever it knows (`Present` without a stage), hears how many peers serve each stage, and takes the one that has the fewest, among those
that fit its memory; ties fall by its key, so that several newcomers do not all choose alike. Then it says what it wants, and looks once more: those
who were told count newcomers too, so of several who come at once the later ones see that the place is taken, and choose again when that makes the
stages more even. For a stage that nobody has begun yet, the founder's node appoints the first who wants it (`protocol/appointment.py`).
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from farflung.node.network import Network, PeerId
from farflung.node.sealed_mail import PipelineMail
from farflung.protocol.errors import RemoteError
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.protocol.pipeline_messages import Load, Present
from farflung.protocol.roll import Roll

ASK_S = 1.0
"""Between two questions: messages may be lost, and peers may just be starting."""


def neediest(counts: Sequence[int], fits: Collection[int], key: PeerId) -> int:
    """The stage with the fewest peers among those that fit; ties by key."""
    fewest = min(counts[stage] for stage in fits)
    tied = sorted(stage for stage in fits if counts[stage] == fewest)
    return tied[int.from_bytes(key[:8], "big") % len(tied)]


class Entrance:
    """See the module. `run` once, before there is a peer."""

    def __init__(
        self,
        *,
        network: Network,
        mail: PipelineMail,
        roll: Roll,
        admission: bytes,
        fits: Collection[int],  # stages that may be taken; one, when it was chosen by a person
        refused: Callable[[RemoteError], None],
    ) -> None:
        self.reason = "asks who serves which stage"
        """What it waits for: a sentence for people."""
        self._network = network
        self._mail = mail
        self._roll = roll
        self._admission = admission
        self._fits = fits
        self._refused = refused
        self._wants = -1
        self._counts: list[int] = []
        """Peers of each stage, those included who want it, by what we were told since we last said what we want."""
        self._news = asyncio.Event()

    async def run(self) -> tuple[int, PeerId]:
        """The stage to take, and who began its chain."""
        self._network.on_message(self._receive)
        while True:
            self._ask()
            try:
                async with asyncio.timeout(ASK_S):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()
            if self._choose():
                continue
            founder = self._roll.founder_of(self._wants)
            if founder is not None:
                return self._wants, founder
            self.reason = f"waits for the founder's node to open stage {self._wants}"
            await asyncio.sleep(ASK_S)

    def discovered(self, peer: PeerId) -> None:
        """A record or a cache mentions a peer."""
        if self._roll.discover(peer, asyncio.get_running_loop().time()):
            self._mail.send(peer, self._present())

    def _choose(self) -> bool:
        """Want something else than so far, if that is better."""
        counts = list(self._counts)
        if self._wants >= 0:
            counts[self._wants] -= 1  # that is us
        best = neediest(counts, self._fits, self._roll.me)
        if best == self._wants or (self._wants >= 0 and counts[best] >= counts[self._wants]):
            return False
        self._wants, self._counts = best, []
        return True

    def _ask(self) -> None:
        present = self._present()
        for peer in self._roll.known:
            self._mail.send(peer, present)

    def _receive(self, sender: PeerId, data: bytes) -> None:
        try:
            message = self._mail.open(sender, data)
            if not isinstance(message, Present):
                return  # of steps that are none of ours yet
            self._roll.heard(sender, message, asyncio.get_running_loop().time())
        except RemoteError as error:
            self._refused(error)
            return
        self._network.add_addresses(sender, list(message.addresses))
        if message.stage >= 0 and len(message.peers) == self._roll.stages and message.reply:
            known = self._counts or [0] * self._roll.stages
            self._counts = [max(pair) for pair in zip(known, message.peers, strict=True)]
            self._news.set()

    def _present(self) -> Present:
        return Present(
            stage=-1,
            wants=self._wants,
            trains=False,
            free=False,
            step=0,
            window=b"",
            finished=False,
            version=0,
            digest=b"",
            forward_s=0.0,
            up_bytes_per_s=0.0,
            admission=self._admission,
            addresses=tuple(self._network.addresses()[:MAX_ADDRESSES]),
            appointments=(),
            peers=(),
            since=0,
            load=Load(0.0, 0.0, 0.0),
            fits=(),
        )
