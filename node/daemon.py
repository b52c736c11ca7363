"""The node daemon: finds the swarm, starts engine and peer, and runs them until the run is done or somebody stops it.

What happens in order: key and swarm (by name on this machine, by invitation, or by a look-up in the DHT) ─ lock ─ engine ─
manifest (disk or DHT, verified) ─ control socket ─ data and learner ─ peer. Around the peer run: the announcements and
look-ups in the DHT, the book of known peers, and what is shown. On the way out the peer says goodbye and saves first, then
the control socket answers who waits, then the network closes.

Signals: the first SIGINT (Ctrl-C), SIGTERM (the system) or SIGHUP (its terminal was closed) leaves cleanly, a second SIGINT ends at once; what is on disk is
always enough to go on.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import msgspec
from rich.console import Console

from farflung.compression import kernels
from farflung.node import clocks, exporting, founding
from farflung.node.control import ControlServer, Handler, only_node
from farflung.node.discovery import Announcer, Finder, RecordChecks
from farflung.node.door import Doors
from farflung.node.engine import Engine, EngineConfig, told_to_the_log
from farflung.node.enginelog import engine_log
from farflung.node.events import Event, EventLog, Follower
from farflung.node.heap import keep_freed_memory
from farflung.node.identity import Identity
from farflung.node.inside import NodeInside, getting_ready
from farflung.node.listening import free_ports, tls_port, until_free
from farflung.node.live import show, show_json
from farflung.node.lookup import look_up_manifest, look_up_name
from farflung.node.machine import choose_runtime
from farflung.node.network import PeerId
from farflung.node.options import CreatedSwarm, CreateOptions, ExportOptions, JoinOptions
from farflung.node.outlet import finish, outlet_of
from farflung.node.p2pd import P2pdConfig
from farflung.node.paths import Paths, SwarmPaths, resolve_paths
from farflung.node.peer import Peer
from farflung.node.peer_making import PeerMaking
from farflung.node.peerbook import PeerBook
from farflung.node.recipe import Recipe, admission_check, read_recipe
from farflung.node.rehearsal import Rehearsal
from farflung.node.runner import freeze_imports, more_files, on_purpose, run_loop
from farflung.node.serving import Left
from farflung.node.signals import ENDING, heard
from farflung.node.signer import IdentitySigner
from farflung.node.status import NodeStatus
from farflung.node.storage import FileStorage, check_ours, newest_history
from farflung.node.swarmfiles import (
    claim_file,
    is_local,
    load_manifest,
    load_port,
    load_secret,
    save_manifest,
    save_port,
)
from farflung.node.wanted import Wanted, local_swarm
from farflung.protocol.admission import admission_token
from farflung.protocol.errors import ConfigError, RemoteError
from farflung.protocol.keys import short
from farflung.protocol.manifest import SignedManifest, open_manifest

MEGABIT = 1e6 / 8
"""Bytes."""

SHOWN_S = 2.0
"""How long a node that has ended waits for its terminal."""


def create(options: CreateOptions) -> CreatedSwarm:
    """`farflung create`: see `founding`. Blocks."""
    return founding.found_swarm(options)


def export(options: ExportOptions) -> dict[str, Any]:
    """`farflung export`: see `exporting`. Blocks."""
    return exporting.export_swarm(options)


def run_join(options: JoinOptions, rehearsal: Rehearsal | None = None) -> None:
    """`farflung join`: run this machine's node until the end. Blocks. Raises FarflungError for what a person can change."""
    keep_freed_memory()
    more_files()
    paths = resolve_paths(options.home)
    identity = Identity.load_or_create(paths.identity)
    wanted = local_swarm(paths, options.swarm, options.peers)
    out, err = outlet_of(sys.stdout), outlet_of(sys.stderr)
    told = err if options.as_json else out
    console = Console(file=told, force_terminal=None if options.live else False, highlight=False)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    console.print("starting the network (libp2p, some seconds) ...")
    with ExitStack() as stack:
        stack.callback(finish, out, err, within_s=SHOWN_S)
        if wanted.swarm is not None:
            stack.enter_context(only_node(wanted.swarm))
        folder = wanted.swarm.folder if wanted.swarm is not None else paths.state
        stack.enter_context(engine_log(folder / "engine.log"))
        node = NodeDaemon(options, paths, identity, wanted, console, out, stack, rehearsal)
        status = run_loop(_until_signalled(node))
    if status:
        raise SystemExit(status)


class NodeDaemon:
    """One run of `farflung join`; several may live in one loop."""

    def __init__(
        self,
        options: JoinOptions,
        paths: Paths,
        identity: Identity,
        wanted: Wanted,
        console: Console,
        out: TextIO,  # for events as JSON
        locks: ExitStack,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._options = options
        self._rehearsal = rehearsal
        self._paths = paths
        self._identity = identity
        self._signer = IdentitySigner(identity)
        self._wanted = wanted
        self._console = console
        self._out = out
        self._locks = locks
        self._peer: Peer | None = None
        self._ends = False
        """Its last life is over."""
        self._records = RecordChecks()
        self._verbs: dict[str, Handler] = {}
        """What the control socket serves now."""
        self._stop_reason = ""
        self._failure: Exception | None = None
        """What has ended the network, once its end has been told of."""

    @property
    def _is_local(self) -> bool:
        """Whether it listens to this machine only."""
        return self._options.local or (self._wanted.swarm is not None and is_local(self._wanted.swarm))

    def stop(self, reason: str) -> bool:
        """Leave cleanly. Whether the node is up, or ends already; when it is not, it will leave as soon as it is."""
        self._stop_reason = reason
        if self._peer is not None:
            self._peer.stop(reason)
        return self._peer is not None or self._ends

    async def run(self) -> None:
        """The whole life of the node. To end it before its time use `stop`; cancelling is for the time before it is up."""
        port = await self._free_port()
        async with AsyncExitStack() as stack:
            engine = await Engine.create(
                self._identity,
                self._engine_config(port),
                check_record=self._records.check,
                admit=self._admit,
                refused=self._refused,
            )
            stack.push_async_callback(self._close, engine)
            where = next((a for a in engine.addresses() if a.startswith("/")), "no address yet")
            self.say(f"this node is {short(engine.peer_id)}, listening on {where}")
            for warning in [] if self._is_local else clocks.warnings():
                self.say(warning)
            swarm = await self._find_swarm(engine)
            signed = await self._find_manifest(engine, swarm)
            recipe = read_recipe(open_manifest(signed.encode(), swarm=signed.swarm, peer=None))
            self.say(f"swarm {swarm.name} ({swarm.hash_hex[:12]}): {recipe.about}")
            if port and self._options.port is None:
                save_port(swarm, port)
            admits = admission_check(recipe.manifest)
            engine.keep_records(self._records.know(recipe.manifest.name, recipe.swarm, admits))
            await self._live(engine, swarm, signed, recipe)

    # ---- which swarm -------------------------------------------------------------------------------------------

    async def _find_swarm(self, engine: Engine) -> SwarmPaths:
        """The swarm's folder; a name that this machine does not know is looked up in the DHT."""
        if self._wanted.swarm is not None:
            return self._wanted.swarm
        name = self._options.swarm
        self.say(f"looking up the name {name!r}, which this machine does not know{self._wanted.near or ' ...'}")
        claim = await look_up_name(engine, name, self.say)
        swarm = self._paths.add_swarm(claim.swarm.hex(), claim.name)
        self._locks.enter_context(only_node(swarm))
        return swarm

    async def _find_manifest(self, engine: Engine, swarm: SwarmPaths) -> SignedManifest:
        if load_manifest(swarm) is None:
            self.say(f"fetching the manifest of {swarm.name} ...")
            value = await look_up_manifest(engine, bytes.fromhex(swarm.hash_hex), swarm.name, self.say)
            save_manifest(swarm, value)
        return msgspec.msgpack.decode(swarm.manifest.read_bytes(), type=SignedManifest)

    # ---- life --------------------------------------------------------------------------------------------------

    async def _live(self, engine: Engine, swarm: SwarmPaths, signed: SignedManifest, recipe: Recipe) -> None:
        manifest = recipe.manifest
        seed = load_secret(swarm)
        if manifest.admission.rule == "invite" and not seed:
            raise ConfigError(
                f"swarm {swarm.name} is by invitation only, and this machine has none; join with the invitation that a "
                "member gives you: `farflung join farflung1...`"
            )
        token = admission_token(seed, recipe.swarm, self._identity.public_key) if seed else b""
        runtime = choose_runtime(
            self._options.device,
            self._options.dtype,
            compiled=self._options.compile,
            memory_gb=self._options.memory_gb,
        )
        doors = Doors.threads()
        if self._rehearsal is not None:
            doors = self._rehearsal.doors(doors)
        async with AsyncExitStack() as closing:
            closing.push_async_callback(doors.join)
            log = closing.enter_context(contextlib.closing(self._log(engine, swarm)))
            closing.enter_context(_last_words(log))
            serving = closing.enter_context(ExitStack())
            serving.callback(engine.stop_serving)  # before the doors are closed, through which it works
            prepared = await doors.side.run(kernels.prepare, self._paths.cache / "kernels")
            log.emit("kernels", native=prepared.native, reason=prepared.reason)
            book = self._wanted.book(swarm)
            for known, addresses in book.peers().items():
                engine.add_addresses(known, addresses)
            making = PeerMaking(
                engine=engine,
                signer=self._signer,
                swarm=swarm,
                recipe=recipe,
                options=self._options,
                runtime=runtime,
                doors=doors,
                log=log,
                book=book,
                admission=token,
                rehearsal=self._rehearsal,
                say=self.say,
            )
            control = ControlServer(swarm.socket, self._verbs)
            life = partial(self._life, engine, swarm, signed, recipe, book, seed)
            made, avoids = making.make, frozenset[bytes]()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(control.run())
                while True:
                    status = self._fresh_status(engine, swarm, recipe)
                    self._verbs |= getting_ready(status, log)
                    await control.started.wait()
                    with ExitStack() as watching:  # from before there is a peer: it may begin a stage anew first
                        watching.callback(log.subscribe(status.apply))
                        events = watching.enter_context(log.follow())
                        left = await life(status, events, *await made(), avoids)  # no name: the model goes with it
                    if left.avoids:
                        made, avoids = making.anew, left.avoids
                    elif left.moves_to is not None:
                        made = partial(making.move, left.moves_to)
                    else:
                        break
                control.stop()

    async def _life(
        self,
        engine: Engine,
        swarm: SwarmPaths,
        signed: SignedManifest,
        recipe: Recipe,
        book: PeerBook,
        seed: bytes,
        status: NodeStatus,
        events: Follower,
        peer: Peer,
        storage: FileStorage,
        avoids: frozenset[bytes],
    ) -> Left:
        """From a peer until it has left; it stays out of the groups in `avoids`."""
        peer.member.waiting.avoids = avoids
        settings = recipe.settings()
        freeze_imports()
        inside = NodeInside(
            engine,
            peer,
            recipe,
            name=swarm.name,
            status=status,
            seed=seed,
        )
        announcer = Announcer(
            engine,
            self._signer,
            recipe.manifest,
            signed,
            claim_file=claim_file(swarm),
            describe=inside.record,
        )
        finder = Finder(
            engine,
            recipe.swarm,
            book,
            admits=settings.admits,
            met=peer.found,
            refused=peer.refused,
            heard=inside.heard,
        )
        await announcer.claim_name()
        self._invite(inside)
        known = list(book.peers())
        self._verbs |= inside.verbs()
        return await self._together(engine, swarm, recipe, peer, storage, inside, announcer, finder, events, known)

    async def _together(
        self,
        engine: Engine,
        swarm: SwarmPaths,
        recipe: Recipe,
        peer: Peer,
        storage: FileStorage,
        inside: NodeInside,
        announcer: Announcer,
        finder: Finder,
        events: Follower,
        known: list[PeerId],
    ) -> Left:
        anchor, history = newest_history(storage.load_history())
        check_ours(history, peer.member.settings.swarm, swarm.checkpoint)  # of a stage its group
        async with asyncio.TaskGroup() as tasks:
            viewing = tasks.create_task(self._view(events, self._fresh_status(engine, swarm, recipe)))
            others = [tasks.create_task(work) for work in (announcer.run(), finder.run())]
            others.append(tasks.create_task(self._watch(engine, peer, tuple(others))))
            self._peer = peer
            if self._stop_reason:
                peer.stop(self._stop_reason)
            left = await peer.run(
                anchor=anchor, history=history, known=dict.fromkeys(p for p in known if p != engine.peer_id)
            )
            self._peer, self._ends = None, not left.avoids and left.moves_to is None
            if self._failure is not None and not self._ends:
                raise self._failure
            for task in others:
                task.cancel()
            finder.save()
            inside.left(left.reason)
            _, late = await asyncio.wait([viewing], timeout=SHOWN_S)
            for task in late:  # nobody reads what it shows
                task.cancel()
        return left

    async def _watch(self, engine: Engine, peer: Peer, others: tuple[asyncio.Task[None], ...]) -> None:
        """When the network ends, so does the peer; but it saves first."""
        try:
            await engine.wait_failed()
        except ExceptionGroup as error:
            self._failure = error
            for task in others:
                task.cancel()
            self.say(f"saving, and ending without goodbye: {on_purpose(error) or 'the network has failed'}")
            peer.cut_off(error)

    async def _close(self, engine: Engine) -> None:
        """Who was asked to end, or has told of it, does not fail of an engine that has ended too; unless that was a bug."""
        try:
            await engine.close()
        except ExceptionGroup as error:
            if on_purpose(error) is None or not (self._stop_reason or self._failure):
                raise

    # ---- small things ------------------------------------------------------------------------------------------

    async def _free_port(self) -> int:
        """Where to listen: as told, else where we listened before, else on a port that is free. Others know our address, and after a power cut nobody may be
        there to tell them another. Raises ConfigError when it is taken, and somebody counts on it."""
        swarm, told, local = self._wanted.swarm, self._options.port, self._is_local
        port = told if told is not None else load_port(swarm) if swarm is not None else 0
        if told == 0 or (port and await until_free(port, local=local)):
            return port
        if port:
            taken = f"port {port} or the one above it, for TLS, is taken by another program"
            if told is not None:
                raise ConfigError(f"{taken}: give another one with --port, or 0 for any")
            if swarm is not None and self._has_founded(swarm):
                raise ConfigError(
                    f"{taken}, and the invitation of {self._options.swarm} names it: end that program, or give another port with "
                    "`--port` (0: any) and hand out the invitation that is printed then"
                )
            self.say(f"{taken}; listening on another one")
        return next(iter(free_ports(1, local=local)), 0)

    def _has_founded(self, swarm: SwarmPaths) -> bool:
        manifest = load_manifest(swarm)
        return manifest is not None and manifest.founder == self._identity.public_key

    def _engine_config(self, port: int) -> EngineConfig:
        options = self._options
        seeds = tuple(dict.fromkeys([*options.peers, *self._wanted.seeds(self._identity.public_key)]))
        up = options.up_mbps * MEGABIT if options.up_mbps else None
        down = options.down_mbps * MEGABIT if options.down_mbps else None
        if self._is_local:
            config = EngineConfig.loopback(initial_peers=seeds)
            only_here = (f"/ip4/127.0.0.1/tcp/{port}",)
            config = replace(config, libp2p=replace(config.libp2p, listen=only_here))
        else:
            anywhere = (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")
            config = EngineConfig(libp2p=P2pdConfig(listen=anywhere), initial_peers=seeds)
        distances = None if self._rehearsal is None else self._rehearsal.distances
        return replace(config, tls_port=tls_port(port), up_bytes_per_s=up, down_bytes_per_s=down, distances=distances)

    def _admit(self, who: PeerId) -> bool:
        """Who may open bulk streams to us, and is no stranger where control streams have room."""
        return self._peer is not None and self._peer.admitted(who)

    def _refused(self, error: RemoteError) -> None:
        """Bytes that are not even frames, and bad records."""
        tell = told_to_the_log if self._peer is None else self._peer.refused
        tell(error)

    async def _view(self, events: Follower, status: NodeStatus) -> None:
        """Show what the node does, until its `node.stop`."""
        watched = _until_stopped(events)
        await (show_json(watched, self._out) if self._options.as_json else show(watched, status, self._console))

    def _log(self, engine: Engine, swarm: SwarmPaths) -> EventLog:
        return EventLog(swarm.events, swarm=swarm.name, peer=engine.peer_id.hex())

    def _fresh_status(self, engine: Engine, swarm: SwarmPaths, recipe: Recipe) -> NodeStatus:
        return NodeStatus(
            swarm=swarm.name,
            peer=engine.peer_id.hex(),
            lap=recipe.manifest.laps.least,
            total_steps=recipe.manifest.total_steps,
        )

    def _invite(self, inside: NodeInside) -> None:
        """Who holds the secret can invite: the founder is told how."""
        if inside.is_founder:
            self.say(f"invite others with:  farflung join {inside.invitation()}")

    def say(self, text: str) -> None:
        """Print a line for the person at the terminal."""
        self._console.print(text, markup=False, soft_wrap=True)


async def _until_signalled(node: NodeDaemon) -> int:
    """Run a node; the first signal makes it leave, a second SIGINT ends the process at once. Returns the exit status: not 0 where somebody
    has interrupted it before it was up."""
    main = asyncio.current_task()
    assert main is not None
    asked: list[signal.Signals] = []

    def on_signal(kind: signal.Signals) -> None:
        if asked and kind is signal.SIGINT:
            os._exit(128 + signal.SIGINT)  # the place on disk is whole at any moment; p2pd ends with our pipe
        asked.append(kind)
        if node.stop("asked to stop"):
            node.say("leaving: finishing the step, saying goodbye, saving (Ctrl-C again ends at once)")
        elif len(asked) == 1:
            main.cancel()

    try:
        with heard((signal.SIGINT, *ENDING), on_signal):
            await node.run()
    except asyncio.CancelledError:
        if not asked:
            raise
        node.say("stopped before the node was up")
        return 128 + signal.SIGINT if signal.SIGINT in asked else 0  # who sends another wants it to end, and it has
    return 0


@contextlib.contextmanager
def _last_words(log: EventLog) -> Iterator[None]:
    """What a node fails of is in its log."""
    try:
        yield
    except BaseException as error:
        if (said := on_purpose(error)) is not None:
            log.emit("node.failed", reason=str(said))
        raise


async def _until_stopped(events: Follower) -> AsyncIterator[Event]:
    """Events of the node, its `node.stop` being the last."""
    async for event in events:
        yield event
        if event["event"] == "node.stop":
            return
