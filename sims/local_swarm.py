"""A swarm of node processes on this machine, and its schedule played in real time: started, killed, stopped, continued and asked to leave.

A peer keeps its key, its ports and its folder over all its lives, as a machine does. Whoever starts is told the addresses of those that run, as an invitation made at that moment
would. All processes end with `play`, however it ends.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from farflung.node.events import Event
from farflung.node.founding import keep_founded
from farflung.node.identity import Identity, libp2p_text
from farflung.node.listening import free_ports
from farflung.node.paths import resolve_paths
from farflung.node.recipe import Recipe
from farflung.node.signer import IdentitySigner
from farflung.protocol.invitation import Invitation, encode_invitation
from farflung.protocol.limits import MAX_ADDRESSES
from farflung.sims.demonodes import DemoNode, NodeFailed, now
from farflung.sims.faults import Fault, Kill, Leave, Pause, Resume, Schedule, Start
from farflung.sims.local_node import ORDERS
from farflung.sims.local_plan import orders_for
from farflung.sims.scenario import Scenario


@dataclass(slots=True)
class LocalSwarm:
    """See the module."""

    scenario: Scenario
    recipe: Recipe
    identities: list[Identity]
    """By number."""
    founder: int
    folder: Path
    """For everything that the nodes keep."""
    meter: bool = False
    on_event: Callable[[Event], None] = lambda event: None
    began: float = 0.0
    ended: float = 0.0
    """Unix seconds: of the schedule's beginning and end."""
    done: list[tuple[float, Fault]] = field(default_factory=list)
    """What happened when, in unix seconds."""
    crashed: list[str] = field(default_factory=list)
    """Nodes that ended by themselves, a sentence each."""
    lives: list[DemoNode] = field(default_factory=list)
    """All processes, in the order in which they were started."""
    _nodes: dict[int, DemoNode] = field(default_factory=dict)
    """The last life of each peer."""
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """What runs it."""
    _ports: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ports = free_ports(len(self.identities), local=True)
        for peer, identity in enumerate(self.identities):
            paths = resolve_paths(self.home(peer))
            identity.save(paths.identity)
            paths.cache.symlink_to(resolve_paths().cache)  # kernels are compiled once
            if peer == self.founder:
                keep_founded(paths, self.recipe, IdentitySigner(identity))

    @property
    def keys(self) -> list[str]:
        """Public keys in hex, by number."""
        return [identity.public_key.hex() for identity in self.identities]

    @property
    def alive(self) -> list[int]:
        """Peers with a process, the founder first."""
        found = [n for n, node in self._nodes.items() if node.process is not None and not (node.ended or node.killed)]
        return sorted(found, key=lambda peer: (peer != self.founder, peer))

    @property
    def pids(self) -> list[int]:
        """Of the processes of those, as the system numbers them."""
        processes = (self._nodes[peer].process for peer in self.alive)
        return [process.pid for process in processes if process is not None]

    def home(self, peer: int) -> Path:
        """The folder of a peer."""
        return self.folder / self.scenario.label(peer).replace("/", "-")

    async def play(self, schedule: Schedule) -> None:
        """Play a schedule that `local_plan` finds playable. Raises NodeFailed when the founder does not come up."""
        self.began = now()
        async with asyncio.TaskGroup() as group:
            try:
                for fault in schedule.faults:
                    await asyncio.sleep(self.began + fault.at - now())
                    if self._carry_out(fault, group):
                        self.done.append((now(), fault))
                await asyncio.sleep(self.began + schedule.duration_s - now())
                self.ended = now()
            finally:
                await self._end()

    def _carry_out(self, fault: Fault, group: asyncio.TaskGroup) -> bool:
        """False when nothing comes of it: there is no process. Whoever is between two lives and is to end does not begin the next one."""
        match fault:
            case Start(peer=peer):
                former, last = self._nodes.get(peer), self._running.get(peer)
                node = self._nodes[peer] = self._node(peer)
                self.lives.append(node)
                self._running[peer] = group.create_task(self._live(peer, node, former, last))
            case Leave(peer=peer) | Kill(peer=peer) if self._nodes[peer].process is None:
                self._running[peer].cancel()  # it still waits for its last life to end
            case Leave(peer=peer):
                return self._nodes[peer].ask_to_leave()
            case Kill(peer=peer, reset=True):
                return self._nodes[peer].kill()
            case Kill(peer=peer):
                return self._nodes[peer].lose_power()
            case Pause(peer=peer):
                return self._nodes[peer].pause()
            case Resume(peer=peer):
                return self._nodes[peer].resume()
            case _:
                raise AssertionError(f"no process can do this: {fault}")
        return True

    def _node(self, peer: int) -> DemoNode:
        return DemoNode(
            name=self.scenario.label(peer),
            role="",
            home=self.home(peer),
            swarm_hash=self.recipe.swarm.hex(),
            swarm_name=self.scenario.name,
            on_event=lambda node, event: self.on_event(event),
            program="farflung.sims.local_node",
        )

    async def _live(
        self, peer: int, node: DemoNode, former: DemoNode | None, last: "asyncio.Task[None] | None"
    ) -> None:
        """One life of a peer, when its last one is over."""
        if former is not None and last is not None:
            await former.end()
            await asyncio.wait([last])
        addresses = [self._address(other) for other in self.alive if other != peer]
        invitation = Invitation(
            name=self.scenario.name,
            swarm=self.recipe.swarm,
            founder=self.identities[self.founder].public_key,
            addresses=tuple((addresses or [self._address(self.founder)])[:MAX_ADDRESSES]),
        )
        orders = orders_for(
            self.scenario,
            self.recipe.manifest,
            self.keys,
            peer,
            invitation=encode_invitation(invitation),
            port=self._ports[peer],
            meter=self.meter,
        )
        (node.home / ORDERS).write_bytes(msgspec.json.format(msgspec.json.encode(orders)))
        try:
            await node.run([])
        except NodeFailed as error:
            if peer == self.founder and node.status.state == "starting":
                raise
            self.crashed.append(str(error))

    def _address(self, peer: int) -> str:
        return f"/ip4/127.0.0.1/tcp/{self._ports[peer]}/p2p/{libp2p_text(self.identities[peer].public_key)}"

    async def _end(self) -> None:
        """End all processes, all at once."""
        for peer, life in self._running.items():
            if self._nodes[peer].process is None:
                life.cancel()
        async with asyncio.TaskGroup() as goodbyes:
            for node in self.lives:
                goodbyes.create_task(node.end())
