"""The processes of one simulated swarm: nodes as they are (`farflung.node.peer.Peer`) on a modelled network, with disks that outlive them.

What the nodes are made of is an `Outfit`: the protocol's settings, the codecs, a learner, and how long each of its calls takes. Everything that
simulates (`chaos`, `scenario`, tests) makes an outfit and hands it to `simulation`; there is no other way to run nodes under virtual time.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from farflung.node.door import Doors
from farflung.node.events import Event, EventLog
from farflung.node.facilities import NET_EVERY_S, Facilities, Facts
from farflung.node.learner import WholeLearner
from farflung.node.peer import Peer
from farflung.node.replica_peer import ReplicaPeer
from farflung.node.storage import newest_history
from farflung.node.terms import Terms
from farflung.protocol.chain import founded
from farflung.protocol.keys import PeerId, Signer, short
from farflung.protocol.messages import Part
from farflung.protocol.saved_vote import SavedVote
from farflung.sims import clock
from farflung.sims.attacks import Attack, AttackingNetwork, Backwards
from farflung.sims.books import Witness
from farflung.sims.echoes import Echoes
from farflung.sims.hub import MemoryHub
from farflung.sims.lives import Lives
from farflung.sims.lookups import Lookups
from farflung.sims.moved import LearnersDoor
from farflung.sims.network import MemoryNetwork
from farflung.sims.processors import Processors
from farflung.sims.shared_mail import SharedDecode
from farflung.sims.toy import Freezable, MemoryStorage
from farflung.training.coupled import Coupled

START_UNIX_S = 1.7e9
"""When every simulation begins, unix seconds."""


class SimLearner(WholeLearner, Freezable, Protocol):
    """A learner that a judge can look into: `farflung.sims.toy.ToyLearner` and its like."""

    @property
    def trained(self) -> list[int]:
        """Sample numbers in the local progress, in order."""

    @property
    def coupled(self) -> Coupled:
        """Its local and outer parameters."""

    witness: Witness
    """Is shown every pseudo-gradient."""

    def strayed(self) -> float:
        """Largest distance of a local parameter from where its progress should have brought it; 0 where that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outfit:
    """What the nodes of a simulated swarm are made of. Peers are numbers from 0."""

    signers: Sequence[Signer]
    terms: Terms
    learner: Callable[[int], SimLearner]
    """A fresh one for a peer."""
    seconds: Callable[[int, str, float], float]
    """How long a call takes at a peer, by the name of the function and the share of all parameters that it goes through."""
    checkpoint_s: float = 60.0
    start_s: float = 0.0
    """From the start of a process to its node being up."""
    processors: int = 0
    """That all peers share; 0: each has its own."""
    message_s: float = 0.0
    """What a control message takes of them."""
    write_s: float = 0.0
    """And a piece of a stream."""
    asleep: Mapping[str, float] = field(default_factory=dict)
    """Calls that sleep until their time is over, and what they take of them before, seconds; longer where the processors are late."""
    exit_when_done: bool = False
    attacks: Callable[[int], tuple[Attack, ...]] = lambda index: ()
    """What a peer does beside what honest ones do."""
    echoes: bool = False
    """Whether greetings that say nothing new are reckoned, and not sent (`echoes`)."""
    net_every_s: float = NET_EVERY_S
    """Between two `net` lines of a node."""


@dataclass(slots=True)
class Labour:
    """How a peer has spent its time, in virtual seconds."""

    running_s: float = 0.0
    training_s: float = 0.0
    """In steps that have begun, whole."""
    until: float = 0.0
    """When the last of them is over, seconds of the simulation's clock."""
    steps: int = 0

    def trained_by(self, now: float) -> float:
        """Seconds in steps until now."""
        return self.training_s - max(0.0, self.until - now)

    def break_off(self, now: float) -> None:
        """What is left of a step that is under way is never made."""
        self.training_s, self.until = self.trained_by(now), min(self.until, now)


@dataclass(slots=True)
class Swarm:
    """See the module. `on_event` sees the events of all nodes, in the order in which they happen."""

    outfit: Outfit
    hub: MemoryHub
    group: asyncio.TaskGroup
    on_event: Callable[[int, Event], None]
    on_gradient: Callable[[int, tuple[int, ...], Tensor], None]
    on_meeting: Callable[[int, bytes, Part, Tensor], None]
    on_crash: Callable[[int, Exception], None]
    peers: dict[int, Peer] = field(default_factory=dict)
    """Nodes that run."""
    expected: set[int] = field(default_factory=set)
    """Who was started and since then neither told to leave nor killed, nor has crashed."""
    learners: dict[int, SimLearner] = field(default_factory=dict)
    """By peer, of its last process."""
    ids: list[PeerId] = field(init=False)
    """Public keys, by number."""
    numbers: dict[PeerId, int] = field(init=False)
    """The other way round."""
    attackers: frozenset[PeerId] = field(init=False)
    disks: list[MemoryStorage] = field(init=False)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    labour: list[Labour] = field(init=False)
    slowness: dict[int, float] = field(default_factory=dict)
    """By peer, how many times as long as usual everything takes."""
    _lookups: Lookups = field(init=False)
    _decode: SharedDecode = field(init=False, default_factory=SharedDecode)
    _echoes: Echoes | None = field(init=False, default=None)
    _lives: Lives = field(init=False)
    _processors: Processors | None = field(init=False, default=None)
    _starting: Processors | None = field(init=False, default=None)
    """The same ones for processes that start, which take turns with the calls of others."""

    def __post_init__(self) -> None:
        self.ids = [signer.peer_id for signer in self.outfit.signers]
        self.numbers = {peer_id: number for number, peer_id in enumerate(self.ids)}
        self.attackers = frozenset(peer for index, peer in enumerate(self.ids) if self.outfit.attacks(index))
        self._lookups = Lookups(self.hub)
        self._lives = Lives(self._live_or_crash, self.ids, self.group, self.tasks)
        self.disks = [MemoryStorage() for _ in self.outfit.signers]
        self.labour = [Labour() for _ in self.outfit.signers]
        if self.outfit.echoes:
            self._echoes = Echoes(self.hub)
        if self.outfit.processors:
            shared = self._processors = Processors(self.outfit.processors)
            self._starting = Processors(self.outfit.processors)
            self.hub.handled_at = lambda now: shared.reserve(self.outfit.message_s, now)
            self.hub.read_at = lambda now: shared.reserve(self.outfit.write_s, now)

    def saved_votes(self, peer: int) -> Mapping[bytes, SavedVote]:
        """What a peer's disk says that it has promised and voted for, by group."""
        return self.disks[peer].votes

    # ---- fault_playing.Processes -------------------------------------------------------------------------------

    def start(self, peer: int) -> None:
        self.expected.add(peer)
        self._lives.start(peer)

    def leave(self, peer: int) -> None:
        self.expected.discard(peer)
        if self._lives.take_back(peer):
            return  # it is not up yet
        if peer in self.peers:
            self.peers[peer].stop("asked to leave")
        elif self.outfit.start_s and peer in self.tasks:
            self.tasks[peer].cancel()  # it is not up yet

    def kill(self, peer: int, *, reset: bool = True) -> None:
        self.expected.discard(peer)
        self.peers.pop(peer, None)
        self._lives.kill(peer)
        if not reset:
            self.disks[peer].lose_power()

    def slow(self, peer: int, factor: float) -> None:
        self.slowness[peer] = factor

    # ---- one life ----------------------------------------------------------------------------------------------

    async def _live_or_crash(self, index: int) -> None:
        try:
            await self._live(index)
        except Exception as error:  # noqa: BLE001  a process that crashes is a finding, and the others go on, as in life
            self.expected.discard(index)
            self.on_crash(index, innermost(error))

    async def _live(self, index: int) -> None:
        outfit = self.outfit
        if outfit.start_s:
            now = self.hub.now()
            up_at = now + outfit.start_s if self._starting is None else self._starting.reserve(outfit.start_s, now)
            await asyncio.sleep(up_at - now)
        signer = outfit.signers[index]
        me = signer.peer_id
        attacks = outfit.attacks(index)
        network = (
            AttackingNetwork(self.hub, signer, outfit.terms.settings.swarm, attacks, f"{index}/attacks")
            if attacks
            else MemoryNetwork(self.hub, me)
        )
        avoids: frozenset[bytes] = frozenset()
        try:
            while avoids := await self._live_on(index, network, avoids):
                network.stop_serving()
        finally:
            await network.close()

    async def _live_on(self, index: int, network: MemoryNetwork, avoids: frozenset[bytes]) -> frozenset[bytes]:
        """The life of a node on its network. Returns the groups for which it has waited in vain, if it begins anew with another."""
        outfit, signer = self.outfit, self.outfit.signers[index]
        me, attacks = signer.peer_id, outfit.attacks(index)
        log = EventLog(None, swarm="sim", peer=short(me), clock=self.hub.loop.time)
        log.subscribe(lambda event: self.on_event(index, event))
        learner = outfit.learner(index)
        learner.witness = lambda samples, gradient: self.on_gradient(index, samples, gradient)

        def door() -> LearnersDoor:
            return LearnersDoor(lambda name, share: self._seconds(index, name, share), learner.num_parameters)

        facilities = Facilities(
            network=network,
            signer=signer,
            doors=Doors(
                learner=door(),
                side=door(),
                journal=door(),
                digest=door(),
            ),
            storage=self.disks[index],
            log=log,
            facts=Facts(device="simulated", pid=0),
            checkpoint_s=outfit.checkpoint_s,
            net_every_s=outfit.net_every_s,
            exit_when_done=outfit.exit_when_done,
            decode=self._decode,
        )
        trained_by = learner if "noise" not in attacks else Backwards(learner, learner.coupled)
        peer = ReplicaPeer(outfit.terms, facilities, trained_by)
        peer.witness_meeting = lambda plan, part, term: self.on_meeting(index, plan, part, term)
        peer.member.waiting.avoids = avoids
        if self._echoes is not None and not attacks:
            self._echoes.join(peer, network)
        anchor, history = newest_history(self.disks[index].load_history())
        settings = outfit.terms.settings
        if me == settings.founder and not (history or self.disks[index].votes):
            history = [founded(settings.swarm, signer, settings.rules)]
            self.disks[index].append_commit(None, history[0])
        known = self._found_by(me)
        self.peers[index] = peer
        self.learners[index] = learner
        began = self.hub.now()
        try:
            left = await peer.run(anchor=anchor, history=history, known=known)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # killed while it ended: a task group that is ending forgets it (until Python 3.13)
        finally:
            self.labour[index].running_s += self.hub.now() - began
            self.labour[index].break_off(self.hub.now())
            if self.peers.get(index) is peer:
                del self.peers[index]
        return left.avoids

    def _found_by(self, me: PeerId) -> dict[PeerId, bytes | None]:
        """What the records of those whom a look finds tell of them."""
        found: dict[PeerId, bytes | None] = {}
        for other in self._lookups.find(me):
            peer = self.peers.get(self.numbers[other])
            found[other] = peer.member.group if peer is not None and peer.member.standing.digest else None
        return found

    async def look_around(self) -> None:
        """Now and then every node finds others; until cancelled."""
        await self._lookups.go_on(
            self.ids, self.peers, lambda index: self.peers[index].found(self._found_by(self.ids[index]))
        )

    def _seconds(self, index: int, name: str, share: float) -> float:
        slowness, asleep = self.slowness.get(index, 1.0), self.outfit.asleep
        seconds = self.outfit.seconds(index, name, share) * slowness
        if self._processors is not None:
            computed_s = asleep[name] * slowness if name in asleep else seconds
            done_s = self._processors.reserve(computed_s, self.hub.now()) - self.hub.now()
            seconds = max(seconds, done_s)
        if name == "train":
            self.labour[index].training_s += seconds
            self.labour[index].until = self.hub.now() + seconds
            self.labour[index].steps += 1
        return seconds


def innermost(error: Exception) -> Exception:
    """The first error that a group of them is about."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def verdict(error: clock.ClockError) -> tuple[int, str]:
    """The invariant that nodes broke when the clock cannot go on, and how: 8 where a handler of theirs raised, else 0."""
    if isinstance(error, clock.CallbackFailed):
        cause = error.__cause__
        return 8, f"a node crashed {error}" + (f": {type(cause).__name__}: {cause}" if cause is not None else "")
    return 0, f"{type(error).__name__}: {error}"
