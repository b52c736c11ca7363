"""Names in a real DHT, and strangers at a real node: one node, whom everybody reaches over loopback, knows what there is to know."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.founded import TEXT, found, wait_for_the_dht
from tests.node.processes import Node, nodes
from tests.node.test_discovery import LATER, of_a_later_version

from farflung.node import daemon, frames
from farflung.node.control import request
from farflung.node.discovery import check_record
from farflung.node.engine import Engine, EngineConfig
from farflung.node.identity import Identity
from farflung.node.options import JoinOptions
from farflung.node.paths import resolve_paths
from farflung.node.signer import IdentitySigner
from farflung.protocol import messages
from farflung.protocol.envelope import seal
from farflung.protocol.errors import ConfigError, NameContested
from farflung.protocol.invitation import Invitation, encode_invitation
from farflung.protocol.keys import Ed25519Signer, PeerId
from farflung.protocol.limits import MAX_CONTROL_BYTES
from farflung.protocol.messages import Probe
from farflung.protocol.records import place_manifest
from farflung.protocol.replay import first_seq
from farflung.sims.attacks import of_another_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # more than `PATIENCE_S`
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Seed:
    """A node that is alone in its swarm, and so stands soon: it has made a lap, and no round comes about."""

    node: Node
    address: str
    swarm: bytes
    steps: int
    """At which it stands."""

    @property
    def peer(self) -> PeerId:
        return bytes.fromhex(self.node.events("node.start")[0]["peer"])

    def status(self) -> dict[str, Any]:
        return asyncio.run(request(self.node.swarm, "status"))


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seed]:
    folder = tmp_path_factory.mktemp("seed")
    corpus = folder / "corpus.txt"
    corpus.write_text(TEXT)
    made, manifest = found(folder, corpus, port=0)
    with nodes() as start:
        node = start(folder / "a", "alpha")
        node.until(lambda: node.events("step"))
        lap, delay = manifest.inner_steps, manifest.delay_steps
        assert isinstance(lap, int) and isinstance(delay, int)
        yield Seed(node, node.word("/ip4/"), bytes.fromhex(made.hash_hex), lap + delay)


def join(home: Path, name: str, address: str) -> None:
    daemon.run_join(JoinOptions(swarm=name, peers=(address,), home=home, local=True, live=False, device="cpu"))


def test_what_a_stranger_sends_is_refused_shown_and_changes_nothing(seed: Seed) -> None:
    # The first test: nodes of other swarms greet the seed in the others, and of all who are refused only so many are told in a minute.
    stranger = Identity.generate()
    signer = IdentitySigner(stranger)

    async def cut(engine: Engine, protocol: str, data: bytes) -> None:
        """Write, if anything, and wait until the other side closes the stream."""
        reader, writer = await engine._libp2p.open(seed.peer, protocol)
        if data:
            writer.write(data)
        assert await reader.read() == b""
        writer.close()

    async def main() -> None:
        engine = await Engine.create(stranger, EngineConfig.loopback(initial_peers=(seed.address,)))
        try:
            async with asyncio.timeout(60):
                await cut(engine, frames.CONTROL_PROTOCOL, frames.LENGTH.pack(MAX_CONTROL_BYTES + 1))
                await cut(engine, frames.BULK_PROTOCOL, b"")  # whatever it is about: there is no room for strangers
                now = engine.unix_time()
                probe = Probe(seed.peer)
                what = (messages.tag(probe), first_seq(now), now + 60.0, messages.encode(probe))
                engine.send(seed.peer, seal(signer, bytes(32), *what))
                engine.send(seed.peer, of_another_version(signer, seal(signer, seed.swarm, *what)))
                engine.send(seed.peer, seal(signer, seed.swarm, *what))  # which only a stranger may not
        finally:
            await engine.close()

    def refusals() -> list[dict[str, Any]]:
        return [event for event in seed.node.events("refused") if event["of"] == stranger.public_key.hex()]

    seed.node.until(lambda: seed.node.events("node.state")[-1]["reason"].startswith("1 of at least 2 contributors"))
    seed.node.until(lambda: seed.status()["step"] == seed.steps)  # it trained on for the round's delay
    before = seed.status()
    asyncio.run(main())
    wanted = ["LimitExceeded", "WrongSwarm", "WrongVersion", "Refused"]
    seed.node.until(lambda: len(refusals()) >= len(wanted))
    refused = refusals()
    assert [event["error"] for event in refused] == wanted
    assert refused[0]["reason"] == f"a control message of {MAX_CONTROL_BYTES + 1} bytes"
    after = seed.status()
    moving = {"time", "refused", "last_refused", "sent_bytes", "received_bytes"}
    assert {key: after[key] for key in after.keys() - moving} == {key: before[key] for key in before.keys() - moving}
    assert after["refused"] == before["refused"] + len(wanted)
    assert after["last_refused"] == f"{refused[-1]['reason']} ({stranger.public_key.hex()[:12]})"


def test_a_swarm_is_founded_and_joined_by_its_name_alone(
    seed: Seed, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_the_dht(monkeypatch)
    made, _ = found(tmp_path, corpus, name="beta", home=tmp_path / "founder", open=True, port=0, peers=(seed.address,))
    full = made.full_name
    with nodes() as start:
        founder = start(tmp_path / "founder", "beta")
        other = start(tmp_path / "other", full, "--peer", seed.address)

        # Meanwhile the name is taken, for those who ask before they found as for those who only ask when they start.
        with pytest.raises(NameContested, match=f"'beta' is claimed already by {full}; choose another name"):
            found(tmp_path, corpus, name="beta", home=tmp_path / "late", open=True, port=0, peers=(seed.address,))
        assert resolve_paths(tmp_path / "late", {}).swarms() == []
        found(tmp_path, corpus, name="beta", home=tmp_path / "apart", open=True, port=0, seed=1)
        with pytest.raises(NameContested, match=f"'beta' is claimed already by {full}; choose another name"):
            join(tmp_path / "apart", "beta", seed.address)
        with pytest.raises(NameContested, match=f"Type the full name .* `farflung join {full}`"):
            join(tmp_path / "anybody", "beta", seed.address)

        for node in (founder, other):
            node.until(lambda node=node: any(event["contributed"] for event in node.events("round.commit")))
        assert f"looking up the name '{full}', which this machine does not know ..." in other.log.read_text()
        assert (other.swarm.hash_hex, other.swarm.name) == (made.hash_hex, "beta")


def test_a_manifest_of_another_version_ends_a_join_at_once(seed: Seed, tmp_path: Path) -> None:
    """Through a real DHT, whose nodes check what they are asked to keep and what they are answered."""
    founder = Ed25519Signer(b"f" * 32)
    signed = of_a_later_version(founder)

    async def publish() -> None:
        engine = await Engine.create(
            Identity.generate(), EngineConfig.loopback(initial_peers=(seed.address,)), check_record=check_record
        )
        try:
            placed = place_manifest(signed, now=engine.unix_time())
            assert await engine.put_record(placed.key, placed.subkey, placed.value, placed.expires_at)
        finally:
            await engine.close()

    asyncio.run(publish())
    invitation = Invitation(
        name="alpha", swarm=signed.swarm, founder=founder.peer_id, invite_seed=b"", addresses=(seed.address,)
    )
    with pytest.raises(
        ConfigError, match=f"of founder {founder.peer_id.hex()[:12]}: speaks protocol versions .{LATER}."
    ):
        join(tmp_path, encode_invitation(invitation), seed.address)
