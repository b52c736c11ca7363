"""Names, manifests and peers through records: found, refused, kept alive; over the modelled network and its clock."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import pytest

from farflung.node import discovery, peerbook
from farflung.node.dht import key_digest
from farflung.node.discovery import (
    ANNOUNCE_S,
    FIRST_LOOKS_S,
    Announcer,
    Finder,
    RecordChecks,
    check_record,
    find_claims,
    find_manifest,
    publish_founding,
)
from farflung.node.network import Network, PeerId
from farflung.node.peerbook import PeerBook
from farflung.protocol.errors import (
    BadSignature,
    ConfigError,
    DiskFull,
    Malformed,
    NameContested,
    NetworkError,
    Refused,
    RemoteError,
    Stale,
    WrongVersion,
)
from farflung.protocol.keys import Ed25519Signer, domain, short
from farflung.protocol.manifest import Manifest, SignedManifest, sign_manifest
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, ModelSpec
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import manifest_key, name_key, peers_key, place_manifest, place_peer
from farflung.protocol.replay import first_seq
from farflung.protocol.versions import PROTOCOL_VERSION
from farflung.sims.clock import VirtualLoop, run
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.network import MemoryNetwork

START = 1_700_000_000.0
ADDRESS = "/ip4/10.0.0.1/tcp/4242/p2p/12D3KooWGvEK4Bfmd48PE13bcA6NNt2euWS9mys2x2FyMA563x26"
MODEL = ModelSpec(vocab_size=264, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8, seq_len=8)
SIGNERS = [Ed25519Signer(bytes([n]) * 32) for n in range(3)]

LATER = PROTOCOL_VERSION + 1


def founded(signer: Ed25519Signer) -> tuple[Manifest, SignedManifest]:
    manifest = Manifest(
        name="alpha",
        founder=signer.peer_id,
        created=int(START),
        model=MODEL,
        data=DataSpec(spec="python", content_hash=bytes(32), num_samples=100),
        batch_tokens=8,
        total_steps=200,
        admission=AdmissionSpec(rule="open"),
    )
    return manifest, sign_manifest(signer, manifest)


def of_a_later_version(signer: Ed25519Signer) -> SignedManifest:
    fields = msgspec.msgpack.decode(founded(signer)[1].manifest) | {"protocol_versions": [LATER]}
    data = msgspec.msgpack.encode(fields)
    return SignedManifest(data, signer.sign(domain("manifest") + data))


def in_network(body: Callable[[list[Network]], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        hub = MemoryHub(loop, random.Random(0), LinkModel(jitter_s=0.0, record_delay_s=0.0))
        await body([cast(Network, MemoryNetwork(hub, signer.peer_id)) for signer in SIGNERS])

    run(main(), start=START)


def announcer(network: Network, signer: Ed25519Signer, file: Path, of: Ed25519Signer) -> Announcer:
    manifest, signed = founded(of)
    record = PeerRecord(addresses=(ADDRESS,), stages=(0, 1))
    return Announcer(network, signer, manifest, signed, claim_file=file, describe=lambda: record)


def test_what_is_published_is_found_and_a_taken_name_is_refused(tmp_path: Path) -> None:
    manifest, signed = founded(SIGNERS[0])

    async def body(networks: list[Network]) -> None:
        assert await find_claims(networks[1], "alpha") == []
        assert await find_manifest(networks[1], signed.swarm) is None
        await publish_founding(networks[0], SIGNERS[0], "alpha", signed)
        (found,) = await find_claims(networks[1], "alpha")
        assert (found.claim.founder, found.claim.swarm) == (manifest.founder, signed.swarm)
        assert await find_manifest(networks[1], signed.swarm) == (manifest, signed.encode())
        # The founder's own claim is no obstacle, somebody else's is.
        await announcer(networks[0], SIGNERS[0], tmp_path / "0", SIGNERS[0]).claim_name()
        late = announcer(networks[1], SIGNERS[1], tmp_path / "1", SIGNERS[1])
        with pytest.raises(NameContested, match="claimed already by alpha@"):
            await late.claim_name()
        (tmp_path / "1").touch()  # but not one who had claimed it before
        await late.claim_name()

    in_network(body)


def test_members_keep_manifest_and_claim_alive_without_the_founder(tmp_path: Path) -> None:
    _, signed = founded(SIGNERS[0])

    async def body(networks: list[Network]) -> None:
        await publish_founding(networks[0], SIGNERS[0], "alpha", signed)
        await networks[0].close()
        async with asyncio.TaskGroup() as tasks:
            member = announcer(networks[1], SIGNERS[1], tmp_path / "claim", SIGNERS[0])
            task = tasks.create_task(member.run())
            await asyncio.sleep(5 * 3600.0)  # a record lives for an hour
            assert [f.claim.founder for f in await find_claims(networks[2], "alpha")] == [SIGNERS[0].peer_id]
            assert await find_manifest(networks[2], signed.swarm) is not None
            task.cancel()

    in_network(body)


def test_peers_are_found_verified_and_written_down(tmp_path: Path) -> None:
    _, signed = founded(SIGNERS[0])
    met: list[PeerId] = []
    refused: list[RemoteError] = []
    book = PeerBook(tmp_path / "peers.json")

    async def body(networks: list[Network]) -> None:
        for n in (0, 1):
            now = networks[n].unix_time()
            record = PeerRecord(addresses=(ADDRESS,), stages=(0, 1))
            placed = place_peer(SIGNERS[n], signed.swarm, record, seq=first_seq(now), now=now, life_s=600.0)
            await networks[n].put_record(placed.key, placed.subkey, placed.value, placed.expires_at)
        bad = SIGNERS[0].peer_id.hex()[:-2] + "00"
        await networks[0].put_record(placed.key, bad, b"nonsense", START + 600.0)
        finder = Finder(
            networks[2],
            signed.swarm,
            book,
            admits=lambda peer, token: peer != SIGNERS[1].peer_id,
            met=met.extend,
            refused=refused.append,
            heard=lambda: [
                (SIGNERS[1].peer_id, [ADDRESS], START + 5.0),
                (SIGNERS[2].peer_id, [ADDRESS], START),
            ],
        )
        await finder.look()
        finder.save()

    in_network(body)
    assert met == [SIGNERS[0].peer_id] and len(refused) == 1
    known = PeerBook(tmp_path / "peers.json").peers()
    assert list(known) == [SIGNERS[1].peer_id, SIGNERS[0].peer_id]  # heard first; ourselves never


@pytest.mark.parametrize("slow_s", [0.0, 1.0])
@pytest.mark.parametrize("later_s", [1.0, 30.0, 59.0, 100.0, 119.5, 1090.0, 1100.0])
def test_of_two_nodes_with_one_key_the_first_ends(tmp_path: Path, later_s: float, slow_s: float) -> None:
    """Whenever the second one has come, and however long a look and a record take: each has one place for a record, and puts its own there."""

    async def body(networks: list[Network]) -> None:
        first, second = networks[1:3]
        put, get = first.put_record, first.get_records

        async def slowly_put(*record: Any) -> bool:
            await asyncio.sleep(slow_s)
            return await put(*record)

        async def slowly_got(key: str) -> Any:
            await asyncio.sleep(0.3 * slow_s)
            return await get(key)

        first.put_record, first.get_records = slowly_put, slowly_got  # type: ignore[method-assign]
        key = SIGNERS[2]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_ended(announcer(first, key, tmp_path / "1", SIGNERS[0])))
            await asyncio.sleep(later_s)
            assert not running.done()
            other = group.create_task(announcer(second, key, tmp_path / "2", SIGNERS[0]).run())
            said = await asyncio.wait_for(running, 4 * ANNOUNCE_S)
            await asyncio.sleep(4 * ANNOUNCE_S)
            assert not other.done(), "one of them goes on"
            other.cancel()
        assert f"another node runs with this machine's key ({short(key.peer_id)})" in said and "--home" in said

    in_network(body)


async def _ended(one: Announcer) -> str:
    """What an announcer ends with."""
    with pytest.raises(ConfigError) as caught:
        await one.run()
    return str(caught.value)


def test_a_record_of_an_earlier_run_whose_clock_was_ahead_is_no_second_node(tmp_path: Path) -> None:
    async def body(networks: list[Network]) -> None:
        swarm, now = founded(SIGNERS[0])[1].swarm, networks[2].unix_time()
        record = PeerRecord(addresses=(ADDRESS,), stages=(0, 1))
        placed = place_peer(SIGNERS[2], swarm, record, seq=first_seq(now + 50.0), now=now, life_s=900.0)
        assert await networks[2].put_record(placed.key, placed.subkey, placed.value, placed.expires_at)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(announcer(networks[2], SIGNERS[2], tmp_path / "1", SIGNERS[0]).run(), 3000.0)

    in_network(body)


def test_those_who_have_started_together_ask_the_dht_apart(tmp_path: Path) -> None:
    swarm = founded(SIGNERS[0])[1].swarm

    async def body(networks: list[Network]) -> None:
        async def asked(number: int, work: Callable[[Network], Awaitable[None]]) -> list[float]:
            network, times = networks[number], []
            get, began = network.get_records, network.unix_time()

            async def noted(key: str) -> Any:
                times.append(network.unix_time() - began)
                return await get(key)

            network.get_records = noted  # type: ignore[method-assign]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work(network), 1000.0)
            network.get_records = get  # type: ignore[method-assign]
            return times

        async def look(network: Network) -> None:
            tell = {"met": lambda found: None, "refused": lambda error: None, "heard": lambda: ()}
            await Finder(network, swarm, PeerBook(tmp_path / "book"), admits=lambda peer, token: True, **tell).run()

        first, second, again = [await asked(number, look) for number in (1, 2, 1)]
        planned = list(accumulate(FIRST_LOOKS_S))
        assert first == pytest.approx(again)  # simulations are what their seed says
        assert all(abs(ours - theirs) > 0.01 for ours, theirs in zip(first[1:7], second[1:7], strict=True))
        assert all(0.5 * at <= looked <= 1.5 * at for at, looked in zip(planned, first[1:], strict=False))
        assert 1000.0 / 80.0 < len(first) - len(planned) < 1000.0 / 45.0

        async def announce(network: Network) -> None:
            await announcer(network, SIGNERS[networks.index(network)], tmp_path / "claim", SIGNERS[0]).run()

        first, second = [
            [at for at, then in pairwise(await asked(number, announce)) if then - at > 1.0] for number in (1, 2)
        ]
        assert all(0.8 * ANNOUNCE_S <= then - at <= ANNOUNCE_S for at, then in pairwise(first))
        assert all(abs(ours - theirs) > 0.01 for ours, theirs in zip(first[1:], second[1:], strict=False))

    in_network(body)


def test_a_record_that_the_dht_does_not_take_in_time_is_put_again(tmp_path: Path) -> None:
    _, signed = founded(SIGNERS[0])

    async def body(networks: list[Network]) -> None:
        usual = networks[0].put_record

        async def too_late(*_: Any) -> bool:
            raise NetworkError("no node took the record within 45 s")

        networks[0].put_record = too_late  # type: ignore[method-assign]
        with pytest.raises(NetworkError):
            await publish_founding(networks[0], SIGNERS[0], "alpha", signed)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(announcer(networks[0], SIGNERS[0], tmp_path / "claim", SIGNERS[0]).run())
            await asyncio.sleep(10.0)
            networks[0].put_record = usual  # type: ignore[method-assign]
            await asyncio.sleep(2 * ANNOUNCE_S)
            assert await networks[1].get_records(peers_key(signed.swarm)) and await find_claims(networks[1], "alpha")
            running.cancel()

    in_network(body)


def test_a_full_disk_ends_neither_finder_nor_announcer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> NoReturn:
        raise DiskFull("no room", remedy="free space in /s")

    _, signed = founded(SIGNERS[0])
    tell: dict[str, Any] = {
        "met": lambda peers: None,
        "refused": pytest.fail,
        "heard": lambda: [(SIGNERS[1].peer_id, [ADDRESS], 1.0)],
    }

    async def body(networks: list[Network]) -> None:
        book = PeerBook(tmp_path / "peers.json")
        Finder(networks[0], signed.swarm, book, admits=lambda peer, token: True, **tell).save()
        assert list(book.peers()) == [SIGNERS[1].peer_id]
        assert await announcer(networks[0], SIGNERS[0], tmp_path / "claim", SIGNERS[0])._keep_alive()
        assert await find_claims(networks[1], "alpha") and not (tmp_path / "claim").exists()

    monkeypatch.setattr(peerbook, "write_atomically", full)
    monkeypatch.setattr(discovery, "write_atomically", full)
    in_network(body)


def test_who_speaks_no_version_of_ours_is_not_dialled_and_told_of_once(tmp_path: Path) -> None:
    swarm = founded(SIGNERS[0])[1].swarm
    later = (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)
    met: list[PeerId] = []
    refused: list[RemoteError] = []
    book = PeerBook(tmp_path / "peers.json")

    async def body(networks: list[Network]) -> None:
        async def announce(number: int, versions: tuple[int, ...]) -> None:
            now = networks[number].unix_time()
            record = PeerRecord(addresses=(ADDRESS,), stages=(0, 1), protocol_versions=versions)
            placed = place_peer(SIGNERS[number], swarm, record, seq=first_seq(now), now=now, life_s=600.0)
            assert await networks[number].put_record(placed.key, placed.subkey, placed.value, placed.expires_at)

        await announce(0, later)
        await announce(1, (PROTOCOL_VERSION, later[1]))
        tell = {"met": met.extend, "refused": refused.append, "heard": lambda: ()}
        finder = Finder(networks[2], swarm, book, admits=lambda peer, token: True, **tell)
        await finder.look()
        await finder.look()
        assert set(met) == set(book.peers()) == {SIGNERS[1].peer_id}
        (error,) = refused
        assert (
            type(error) is WrongVersion
            and error.peer == SIGNERS[0].peer_id
            and f"versions {list(later)}" in error.reason
        )
        await asyncio.sleep(60.0)
        await announce(0, (PROTOCOL_VERSION,))
        await finder.look()
        assert SIGNERS[0].peer_id in met and len(refused) == 1
        await asyncio.sleep(60.0)
        await announce(0, (LATER,))
        await finder.look()
        assert len(refused) == 2  # it has changed again

    in_network(body)


def test_our_dht_node_stores_only_what_belongs_where_it_is_put() -> None:
    _, signed = founded(SIGNERS[0])
    now = time.time()
    good = place_manifest(signed, now=now)
    at = key_digest(good.key)
    damaged = good.value[:-1] + bytes([good.value[-1] ^ 1])
    check_record(at, good.subkey, good.value, good.expires_at)
    for key, subkey, value, expires_at, error in (
        (key_digest(good.key + "x"), good.subkey, good.value, good.expires_at, Refused),
        (at, "other", good.value, good.expires_at, Refused),
        (at, good.subkey, damaged, good.expires_at, BadSignature),
        (at, good.subkey, b"", good.expires_at, Malformed),
        (at, good.subkey, good.value, now + 1e6, Stale),
    ):
        with pytest.raises(error):
            check_record(key, subkey, value, expires_at)


def test_of_peers_of_our_own_swarm_only_those_are_kept_that_may_be_there() -> None:
    """Keys are cheap: 1,024 of them, made up for it, filled a swarm's part of the DHT."""
    checks, now, ours, theirs = RecordChecks(), time.time(), b"o" * 32, b"t" * 32

    def check(swarm: bytes, signer: Ed25519Signer, token: bytes) -> None:
        record = PeerRecord(addresses=(ADDRESS,), stages=(0, 1), admission_token=token)
        placed = place_peer(signer, swarm, record, seq=first_seq(now), now=now, life_s=60.0)
        checks.check(key_digest(placed.key), placed.subkey, placed.value, placed.expires_at)

    check(ours, SIGNERS[0], b"")  # whose token cannot be judged before the swarm is known
    keys = checks.know("alpha", ours, lambda peer, token: token == 2 * peer)
    assert keys == {key_digest(each) for each in (peers_key(ours), manifest_key(ours), name_key("alpha"))}
    check(ours, SIGNERS[0], 2 * SIGNERS[0].peer_id)
    check(theirs, SIGNERS[0], b"")
    for token in (b"", 2 * SIGNERS[1].peer_id):
        with pytest.raises(Refused, match="no admission") as caught:
            check(ours, SIGNERS[0], token)
        assert caught.value.peer == SIGNERS[0].peer_id
    _, signed = founded(SIGNERS[0])
    manifest = place_manifest(signed, now=now)
    checks.check(key_digest(manifest.key), manifest.subkey, manifest.value, manifest.expires_at)


def test_our_dht_node_keeps_a_manifest_of_another_version_for_those_who_look_for_it() -> None:
    signed, now = of_a_later_version(SIGNERS[0]), time.time()
    good = place_manifest(signed, now=now)
    check_record(key_digest(good.key), good.subkey, good.value, good.expires_at)
    forged = place_manifest(SignedManifest(signed.manifest, bytes(64)), now=now)
    assert forged.key == good.key
    with pytest.raises(BadSignature):
        check_record(key_digest(forged.key), forged.subkey, forged.value, forged.expires_at)


def test_a_refused_record_is_named_with_whose_it_is_said_to_be() -> None:
    _, signed = founded(SIGNERS[0])
    now, record = time.time(), PeerRecord(addresses=(ADDRESS,), stages=(0, 1))
    good = place_peer(SIGNERS[1], signed.swarm, record, seq=first_seq(now), now=now, life_s=60.0)
    author = SIGNERS[1].peer_id.hex()
    forged = good.value[:-1] + bytes([good.value[-1] ^ 1])
    with pytest.raises(BadSignature) as caught:
        check_record(key_digest(good.key), good.subkey, forged, good.expires_at)
    named = f"peer record {good.key} / {author}, said to be of {author[:12]}: "
    assert caught.value.reason.startswith(named)
    assert caught.value.peer is None and "unknown peer" in str(caught.value)  # who sent it cannot be told
    with pytest.raises(Refused) as caught_elsewhere:
        check_record(bytes(20), "\n" * 500, good.value, good.expires_at)
    assert caught_elsewhere.value.reason.startswith(f"{named}put at id {'00' * 20} / ")
    assert "\n" not in caught_elsewhere.value.reason and len(caught_elsewhere.value.reason) < 500
    with pytest.raises(Malformed, match="record at id 0000"):
        check_record(bytes(20), author, b"nonsense", good.expires_at)
