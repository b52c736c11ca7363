"""From a name to a running node: names and invitations resolved, and real nodes end to end."""

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import pytest
import safetensors
import safetensors.torch
import torch
from rich.console import Console
from tests.node.founded import found, wait_for_the_dht

from farflung.node import clocks, daemon, listening, wanted
from farflung.node.control import ControlError, only_node, request, stream
from farflung.node.door import Doors
from farflung.node.engine import Engine
from farflung.node.events import read_events
from farflung.node.identity import Identity
from farflung.node.options import CreateOptions, ExportOptions, JoinOptions
from farflung.node.paths import resolve_paths
from farflung.node.peerbook import PeerBook
from farflung.node.status import LedgerStatus
from farflung.node.storage import HISTORY_FILE
from farflung.node.swarmfiles import save_port
from farflung.protocol.errors import ConfigError, FarflungError, LocalError, NameContested, NetworkError
from farflung.protocol.invitation import decode_invitation
from farflung.protocol.member import Member
from farflung.protocol.naming import full_name


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- names and known peers -----------------------------------------------------------------------------------------


def test_what_join_means_here(tmp_path: Path, corpus: Path) -> None:
    made, manifest = found(tmp_path, corpus, port=4242, local=True)
    here, there = resolve_paths(tmp_path / "a", {}), resolve_paths(tmp_path / "b", {})
    for text in ("alpha", " ALPHA ", made.hash_hex[:10], full_name("alpha", manifest.founder)):
        swarm = wanted.local_swarm(here, text, ()).swarm
        assert swarm is not None and swarm.hash_hex == made.hash_hex
    invited = wanted.local_swarm(there, made.invitation, ())
    assert invited.swarm is not None and (invited.swarm.folder / "invite").exists()
    assert invited.seeds(b"") == list(decode_invitation(made.invitation).addresses)
    assert wanted.local_swarm(there, "alpha", ()).seeds(b"") == invited.seeds(b"")  # cached on disk
    # Another founder's swarm of this name is not ours, and can only be looked up.
    assert wanted.local_swarm(here, "alpha@aaaaaaaaaaaa", ("/ip4/1.2.3.4/tcp/1/p2p/x",)).swarm is None
    with pytest.raises(ConfigError, match="join with an invitation"):
        wanted.local_swarm(here, "beta", ())
    with pytest.raises(ConfigError, match="mistyped or damaged"):
        wanted.local_swarm(there, made.invitation[:-6] + "aaaaaa", ())
    cut = made.invitation[:40]
    with pytest.raises(ConfigError, match=r"cut short: 31 of \d+ characters"):
        wanted.local_swarm(there, cut, ())
    called_so = there.add_swarm("ab" * 32, cut)
    assert wanted.local_swarm(there, cut, ()).swarm == called_so


def test_an_invitation_without_addresses_is_refused_at_once(tmp_path: Path, corpus: Path) -> None:
    made, _ = found(tmp_path, corpus, port=0)
    here, there = resolve_paths(tmp_path / "a", {}), resolve_paths(tmp_path / "b", {})
    assert not made.addresses
    with pytest.raises(ConfigError, match="farflung invite"):
        wanted.local_swarm(there, made.invitation, ())
    assert there.swarms() == []
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.load_or_create(here.identity).libp2p_id}"
    for paths, peers in ((here, ()), (there, (address,)), (there, ())):  # founded here; told where; remembered
        assert wanted.local_swarm(paths, made.invitation, peers).swarm is not None


def test_the_book_asks_those_heard_last_first(tmp_path: Path) -> None:
    peers = [Identity.generate() for _ in range(300)]
    here = peers[0].libp2p_id  # what others say of it is no address of theirs
    book = PeerBook(tmp_path / "peers.json")
    for age, one in enumerate(peers):
        address = f"/ip4/10.0.0.1/tcp/{age + 1}/p2p/{one.libp2p_id}"
        book.note(one.public_key, [address, f"/ip4/1.2.3.4/tcp/1/p2p/{here}", "tls://10.0.0.1:5"], 1e9 - age)
    book.note(Identity.generate().public_key, [], 2e9)  # cannot be dialled, so not worth remembering
    book.save()
    again = PeerBook(tmp_path / "peers.json")
    assert len(again.peers()) == 256 and next(iter(again.peers())) == peers[0].public_key
    seeds = [f"/ip4/10.0.0.1/tcp/{age + 1}/p2p/{peers[age].libp2p_id}" for age in range(1, 256)]
    assert again.seeds(peers[0].public_key) == seeds
    entry = b'{"peers":{"%s":{"addresses":[],"seen":0}}}'
    for damaged in (b"{", entry % b"abab", entry % (b"z" * 64), entry % (b"\xff" * 64)):
        (tmp_path / "peers.json").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            PeerBook(tmp_path / "peers.json")


def test_a_stranger_without_invitation_is_told(tmp_path: Path, corpus: Path) -> None:
    made, _ = found(tmp_path, corpus)
    (made.manifest.parent / "invite").unlink()
    with pytest.raises(FarflungError, match="by invitation only"):
        daemon.run_join(JoinOptions(swarm="alpha", home=tmp_path / "a", local=True, live=False))


@pytest.mark.parametrize(("told", "remedy"), [(None, "invitation of alpha names it"), ("same", "give another one")])
def test_a_port_that_is_taken_is_named_with_the_remedy(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, remedy: str
) -> None:
    monkeypatch.setattr(listening, "PORT_S", 0.0)
    made, _ = found(tmp_path, corpus, local=True)
    port = None if told is None else made.port
    with socket.create_server(("127.0.0.1", made.port)), pytest.raises(ConfigError) as caught:
        daemon.run_join(JoinOptions(swarm="alpha", home=tmp_path / "a", local=True, live=False, port=port))
    assert f"port {made.port} or the one above it" in str(caught.value) and remedy in str(caught.value)


def test_who_joins_keeps_its_first_port_and_takes_another_where_that_is_taken(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would find anybody after a power cut in which the founder has gone."""
    monkeypatch.setattr(listening, "PORT_S", 0.0)
    made, _ = found(tmp_path, corpus, local=True)
    other = tmp_path / "b"
    paths = resolve_paths(other, {})
    identity, console = Identity.load_or_create(paths.identity), Console(file=io.StringIO())
    meant = wanted.local_swarm(paths, made.invitation, ())
    assert meant.swarm is not None

    def free_port(**told: int) -> int:
        options = JoinOptions(swarm=made.invitation, home=other, local=True, **told)
        node = daemon.NodeDaemon(options, paths, identity, meant, console, io.StringIO(), ExitStack())
        return asyncio.run(node._free_port())

    assert free_port() in listening.PORTS and free_port(port=0) == 0
    save_port(meant.swarm, made.port)  # as when it was up
    assert free_port() == made.port
    with socket.create_server(("127.0.0.1", made.port)):
        assert free_port() in set(listening.PORTS) - {made.port}


def test_caps_reach_the_engine(tmp_path: Path, corpus: Path) -> None:
    found(tmp_path, corpus, local=True)
    paths = resolve_paths(tmp_path / "a", {})
    identity, console = Identity.load_or_create(paths.identity), Console(file=io.StringIO())
    for caps, expected in (({}, (None, None)), ({"up_mbps": 8.0, "down_mbps": 20.0}, (1e6, 2.5e6))):
        options = JoinOptions(swarm="alpha", home=tmp_path / "a", local=True, **caps)
        meant = wanted.local_swarm(paths, "alpha", ())
        config = daemon.NodeDaemon(options, paths, identity, meant, console, io.StringIO(), ExitStack())._engine_config(
            0
        )
        assert (config.up_bytes_per_s, config.down_bytes_per_s) == expected


def test_a_clock_that_nothing_keeps_right_is_warned_of_where_others_have_clocks(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stub:
        """A network that has started, and then is looked for no further."""

        peer_id = bytes(32)

        @classmethod
        async def create(cls, *args: Any, **options: Any) -> "Stub":
            return cls()

        def addresses(self) -> list[str]:
            return []

        async def close(self) -> None: ...

    async def enough(node: daemon.NodeDaemon, engine: Any) -> NoReturn:
        raise ConfigError("enough")

    found(tmp_path, corpus, local=False)
    paths = resolve_paths(tmp_path / "a", {})
    monkeypatch.setattr(daemon, "Engine", Stub)
    monkeypatch.setattr(daemon.NodeDaemon, "_find_swarm", enough)
    monkeypatch.setattr(clocks, "clock_state", lambda: "not synchronised: run ntpd")
    for local in (False, True):
        output = io.StringIO()
        options = JoinOptions(swarm="alpha", home=tmp_path / "a", local=local, port=0)
        meant, console = wanted.local_swarm(paths, "alpha", ()), Console(file=output, width=200)
        identity = Identity.load_or_create(paths.identity)
        node = daemon.NodeDaemon(options, paths, identity, meant, console, io.StringIO(), ExitStack())
        with pytest.raises(ConfigError, match="enough"):
            asyncio.run(node.run())
        assert ("warning: this machine's clock is not synchronised" in output.getvalue()) == (not local)


class EndedEngine:
    """Whose daemon was ended by whoever ends the node as well."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def close(self) -> None:
        raise ExceptionGroup("its tasks", [self._error])


@pytest.mark.parametrize(
    ("asked", "error", "raised"),
    [(True, NetworkError("gone"), False), (False, NetworkError("gone"), True), (True, KeyError("a bug"), True)],
)
def test_who_was_asked_to_end_does_not_fail_of_an_engine_that_has_ended_too(
    tmp_path: Path, corpus: Path, asked: bool, error: Exception, raised: bool
) -> None:
    """Also before the node was up."""
    found(tmp_path, corpus)
    node = Node(tmp_path / "a", "alpha").daemon
    if asked:
        node.stop("asked to stop")
    with pytest.raises(ExceptionGroup) if raised else ExitStack():
        asyncio.run(node._close(cast(Engine, EndedEngine(error))))


# ---- real nodes ----------------------------------------------------------------------------------------------------


class Node:
    """A daemon in this loop, and what its control socket says."""

    def __init__(self, home: Path, swarm: str) -> None:
        self.home = home
        self.events: list[dict[str, Any]] = []
        self.changed = asyncio.Condition()
        paths = resolve_paths(home, {})
        self.output = io.StringIO()
        options = JoinOptions(swarm=swarm, home=home, local=True, live=False, device="cpu")
        self.locks = ExitStack()
        meant = wanted.local_swarm(paths, swarm, ())
        assert meant.swarm is not None
        self.swarm = meant.swarm
        self.locks.enter_context(only_node(self.swarm))
        console = Console(file=self.output, force_terminal=False, width=200)
        identity = Identity.load_or_create(paths.identity)
        self.peer = identity.public_key.hex()
        self.daemon = daemon.NodeDaemon(options, paths, identity, meant, console, io.StringIO(), self.locks)

    async def run(self) -> None:
        with self.locks:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                await self.daemon.run()
                watching.cancel()

    async def _watch(self) -> None:
        while not self.swarm.socket.exists():
            await asyncio.sleep(0.02)
        async for event in stream(self.swarm, "events"):
            async with self.changed:
                self.events.append(event)
                self.changed.notify_all()

    async def until(self, fits: Callable[[dict[str, Any]], bool], *, seen: int = 0) -> dict[str, Any]:
        """The first event that fits, the first `seen` left out."""
        async with self.changed:
            while True:
                for event in self.events[seen:]:
                    if fits(event):
                        return event
                seen = len(self.events)
                await self.changed.wait()

    async def contributed(self) -> dict[str, Any]:
        """The next round that holds this node's work."""

        def holds(event: dict[str, Any]) -> bool:
            return event["event"] == "round.commit" and bool(event["contributed"])

        return await self.until(holds, seen=len(self.events))


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(node.run())
        yield node
        if not task.done():
            node.daemon.stop("the test is over")


def no_space(*_: object, **__: object) -> NoReturn:
    raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_real_nodes_join_late_leave_restart_and_outlive_the_first(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, manifest = found(tmp_path, corpus, local=True, optimizer="muon")
    ends: list[str] = []
    stop_serving, close = Engine.stop_serving, Doors.close
    monkeypatch.setattr(Engine, "stop_serving", lambda engine: (ends.append("serving"), stop_serving(engine))[1])
    monkeypatch.setattr(Doors, "close", lambda doors: (ends.append("doors"), close(doors))[1])

    async def main() -> None:
        async with asyncio.timeout(250), AsyncExitStack() as stack:
            a = await stack.enter_async_context(running(Node(tmp_path / "a", "alpha")))
            await a.until(lambda e: e["event"] == "node.state" and e["state"] == "ready")
            fresh = await request(a.swarm, "invitation")
            invitation = fresh["invitation"]
            assert fresh["full_name"] == made.full_name
            assert f"farflung join {invitation}" in a.output.getvalue()

            # With the invitation that was printed before any node ran.
            b = await stack.enter_async_context(running(Node(tmp_path / "b", made.invitation)))
            first = await b.contributed()
            assert set(first["contributors"]) <= {a.peer, b.peer}
            status = await request(b.swarm, "status")
            assert status["swarm"] == "alpha" and status["total_steps"] == 6000

            # Which sample is with whom: what a round has counted, and what nobody has yet.
            assert (await request(b.swarm, "ledger"))["sample"] is None
            (start, _), *_ = first["samples"][b.peer]
            told = msgspec.convert(await request(b.swarm, "ledger", sample=start), LedgerStatus)
            assert told.sample is not None and told.sample.stops[-1].state == "trained"
            assert {told.sample.stops[-1].peer, told.sample.stops[-2].peer} == {b.peer}
            assert told.trained == sum(told.trained_by.values()) > 0 and {one.peer for one in told.held} <= {
                a.peer,
                b.peer,
            }
            ahead = (await request(b.swarm, "ledger", sample=1 << 62))["sample"]
            assert [stop["state"] for stop in ahead["stops"]] == ["ahead"]
            for wrong in (-1, 1 << 63, "all"):
                with pytest.raises(ControlError, match="not a question about samples"):
                    await request(b.swarm, "ledger", sample=wrong)

            # Somebody founds another swarm through them, and the same name is refused to the next.
            flags = dict(data=str(corpus), steps=30, peers=decode_invitation(invitation).addresses)
            with pytest.MonkeyPatch.context() as patch:
                wait_for_the_dht(patch)
                other = await asyncio.to_thread(daemon.create, CreateOptions(name="beta", home=tmp_path / "d", **flags))
                assert other.published and set(flags["peers"]) < set(other.addresses)
                with pytest.raises(NameContested, match="claimed already by beta@"):
                    await asyncio.to_thread(daemon.create, CreateOptions(name="beta", home=tmp_path / "e", **flags))

            # A third joins while the others go on, and leaves when asked to.
            async with running(Node(tmp_path / "c", invitation)) as c:
                await c.contributed()
                rows = (await request(c.swarm, "peers"))["peers"]
                assert {row["peer"] for row in rows if row["member"]} == {a.peer, b.peer, c.peer}
                reply = await request(c.swarm, "leave", timeout_s=120.0)
                assert reply == {"reason": "asked to leave"}

            # The founder, whose address is in the invitation, goes too; c finds the swarm through b, by name.
            a.daemon.stop("the founder goes")
            for gone in (c.peer, a.peer):  # told when they have been silent for a while: of both at a time
                await b.until(lambda e, gone=gone: e["event"] == "peer.left" and e["of"] == gone)
            known = PeerBook(c.swarm.peers).peers()
            assert bytes.fromhex(b.peer) in known
            assert a.daemon.stop("again"), "who has left is not interrupted in what it still does"
            again = await stack.enter_async_context(running(Node(tmp_path / "c", "alpha")))
            late = await again.contributed()
            assert set(late["contributors"]) == {b.peer, c.peer}
            start = next(e for e in read_events(again.swarm.events) if e["event"] == "node.start" and e["resumed"])
            assert start["peer"] == c.peer

    asyncio.run(main())
    assert ends == 4 * ["serving", "doors"], "a mean that came when its doors were closed ended a node with an error"
    # One history: digests of equal versions are equal, wherever a node was.
    digests: dict[int, set[str]] = {}
    for home in "abc":
        for event in read_events(resolve_paths(tmp_path / home, {}).find_swarm("alpha").events):
            if event["event"] == "round.commit":
                digests.setdefault(event["version"], set()).add(event["digest"])
    assert len(digests) >= 3 and all(len(one) == 1 for one in digests.values())

    facts = daemon.export(ExportOptions(swarm="alpha", folder=tmp_path / "model", home=tmp_path / "c"))
    assert facts["rounds"] >= 1 and facts["peers that contributed"] >= 2
    assert (tmp_path / "model" / "model.safetensors").exists()
    with pytest.raises(LocalError, match="name another folder"):
        daemon.export(ExportOptions(swarm="alpha", folder=corpus / "model", home=tmp_path / "c"))
    with monkeypatch.context() as full:
        full.setattr(safetensors.torch, "save_file", no_space)
        for folder in (tmp_path / "new", corpus.parent / "empty"):
            with pytest.raises(LocalError, match=r"No space left.*make room"):
                daemon.export(ExportOptions(swarm="alpha", folder=folder, home=tmp_path / "c"))
            assert not folder.exists(), "half a model would be in the way of the next try"
    swarm = resolve_paths(tmp_path / "c", {}).find_swarm("alpha")
    (swarm.checkpoint / HISTORY_FILE).unlink()  # what is advised where it is damaged and nobody else has it
    without = daemon.export(ExportOptions(swarm="alpha", folder=tmp_path / "again", home=tmp_path / "c"))
    assert without == {key: fact for key, fact in facts.items() if key not in ("steps", "tokens")}
    assert facts["manifest hash"] == made.hash_hex and manifest.name in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_real_node_that_has_waited_in_vain_begins_anew(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there is no other group, so it begins with the same one, as a newcomer."""
    made, _ = found(tmp_path, corpus, local=True, optimizer="muon")
    waited: set[str] = set()

    def waits_in_vain(self: Member, now: float) -> bool:
        if not self.started or self.in_view or waited:
            return False
        waited.add(self.me.hex())
        return True

    monkeypatch.setattr(Member, "waits_in_vain", waits_in_vain)

    async def main() -> None:
        async with asyncio.timeout(150), AsyncExitStack() as stack:
            a = await stack.enter_async_context(running(Node(tmp_path / "a", "alpha")))
            b = await stack.enter_async_context(running(Node(tmp_path / "b", made.invitation)))
            seen = len(a.events)
            await b.contributed()
            await a.until(lambda e: e["event"] == "round.commit" and b.peer in e["contributors"], seen=seen)

    asyncio.run(main())
    events = list(read_events(resolve_paths(tmp_path / "b", {}).find_swarm("alpha").events))
    lives = [e for e in events if e["event"] in ("node.start", "node.stop")]
    assert [e["event"] for e in lives] == ["node.start", "node.stop"] * 2
    assert (
        lives[1]["reason"] == "the group in which it waits for a place can take nobody in, and it goes to another one"
    )
    assert not lives[2]["resumed"] and lives[2]["version"] == 0, "it knows nothing of what was"
    kinds = [e["event"] for e in events[events.index(lives[2]) :]]
    assert "history.jump" in kinds and "state.sync" in kinds
