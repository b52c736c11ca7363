"""What a node reads from and writes to the DHT: names, manifests, and who is in a swarm.

Everything found is verified before it is used; everything we are responsible for is put again well before it expires. The
DHT is slow and may be empty (a swarm's first node, a partition), so nothing here is ever waited for by a round.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from farflung.node.dht import key_digest
from farflung.node.durable import write_atomically
from farflung.node.jumps import Jumps
from farflung.node.network import Network, PeerId
from farflung.node.peerbook import PeerBook
from farflung.protocol.errors import ConfigError, DiskFull, NetworkError, Refused, RemoteError, WrongVersion
from farflung.protocol.keys import Signer, short
from farflung.protocol.limits import MAX_CLAIM_LIFE_S, MAX_RECORD_LIFE_S
from farflung.protocol.manifest import Manifest, SignedManifest
from farflung.protocol.naming import NameClaim, check_free
from farflung.protocol.neighbours import Found
from farflung.protocol.peer_record import PeerRecord
from farflung.protocol.records import (
    MANIFEST_SUBKEY,
    Placed,
    called,
    manifest_key,
    name_key,
    open_claim,
    open_manifest_record,
    open_peer,
    peers_key,
    place_claim,
    place_manifest,
    place_of,
    place_peer,
    refreshed,
    validate_record,
)
from farflung.protocol.replay import first_seq, seq_unix_s
from farflung.protocol.versions import negotiate

PEER_LIFE_S = 600.0
"""Life of our own record: who is gone without a word is listed for ten minutes more."""

ANNOUNCE_S = 120.0
"""Between two announcements of ourselves, at most: four may fail before the record expires. It is drawn, from four fifths of it, so that those who have started
together ask the DHT apart."""

KEEP_ALIVE_S = MAX_RECORD_LIFE_S / 4
"""Between two refreshes of manifest and claim."""

FIRST_LOOKS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Pauses between the first looks for others, before they are drawn: a young swarm's records appear one by one."""

LOOK_S = 60.0
"""Between later looks; members learn of each other from commits much sooner. All pauses are drawn, from half to one and a half of them."""

MAX_SET_BACK = 8
"""So many times that the clock was set back are remembered, with the numbers that were given before."""

MAX_NAMED = 64
"""Characters of somebody's subkey in an error: a key in hex."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundClaim:
    """A verified claim to a name, and the record to keep it alive with."""

    claim: NameClaim
    placed: Placed


def check_record(key: bytes, subkey: str, value: bytes, expires_at: float) -> None:
    """For `Engine.create`: what our DHT node stores and believes. `key` is `dht.key_digest` of the record's key.

    Raises the RemoteError that fits. It says what the record is, by its own account, and whose; it names no offender, for who
    sent the record is not known here, and who is said to have made one that is refused need not have.
    """
    at = f"id {key.hex()} / {subkey[:MAX_NAMED]!r}"
    try:
        place, belongs_to = place_of(value)
    except RemoteError as error:
        raise type(error)(f"record at {at}: {error.reason}") from error
    what = f"{called(place)} {place} / {belongs_to}"
    if belongs_to != MANIFEST_SUBKEY:
        what = f"{what}, said to be of {belongs_to[:12]}"
    if key_digest(place) != key or belongs_to != subkey:
        raise Refused(f"{what}: put at {at}")
    try:
        validate_record(place, subkey, value, expires_at, time.time())
    except RemoteError as error:
        raise type(error)(f"{what}: {error.reason}") from error


class RecordChecks:
    """What our DHT node stores and believes (`check_record`); of peers of our own swarm, once that is known, only those that may be there. Whoever
    has no place in the swarm could fill its part of the DHT otherwise, with keys made for it."""

    def __init__(self) -> None:
        self._swarm = b""
        self._key = b""
        self._admits: Callable[[PeerId, bytes], bool] = lambda peer, token: True

    def know(self, name: str, swarm: bytes, admits: Callable[[PeerId, bytes], bool]) -> frozenset[bytes]:
        """Our own swarm, from now on. Returns what `Engine.keep_records` takes."""
        self._swarm, self._key, self._admits = swarm, key_digest(peers_key(swarm)), admits
        return frozenset({self._key, key_digest(manifest_key(swarm)), key_digest(name_key(name))})

    def check(self, key: bytes, subkey: str, value: bytes, expires_at: float) -> None:
        """For `Engine.create`. Raises the RemoteError that fits."""
        check_record(key, subkey, value, expires_at)
        if key == self._key:
            found = open_peer(self._swarm, subkey, value, time.time())
            if not self._admits(found.peer, found.record.admission_token):
                raise Refused("a peer record of one that has no admission to the swarm", peer=found.peer)


async def find_claims(network: Network, name: str) -> list[FoundClaim]:
    """All verified claims to a name. Raises NetworkError when the DHT does not answer."""
    found: list[FoundClaim] = []
    now = network.unix_time()
    for subkey, value in (await network.get_records(name_key(name))).items():
        try:
            claim = open_claim(name, subkey, value, now)
        except RemoteError as error:
            _log.info("a claim was refused", name=name, error=str(error))
            continue
        until = min(claim.expires_at, now + MAX_RECORD_LIFE_S)
        placed = Placed(key=name_key(name), subkey=subkey, value=value, expires_at=until)
        found.append(FoundClaim(claim=claim, placed=placed))
    return found


async def find_manifest(network: Network, swarm: bytes) -> tuple[Manifest, bytes] | None:
    """The manifest with hash `swarm` and its signed bytes; None when nobody has it.

    Raises NetworkError, and WrongVersion when it is of another version: nobody can put something else under its hash.
    """
    value = (await network.get_records(manifest_key(swarm))).get(MANIFEST_SUBKEY)
    if value is None:
        return None
    try:
        return open_manifest_record(swarm, value), value
    except WrongVersion:
        raise
    except RemoteError as error:
        _log.info("a manifest was refused", swarm=swarm.hex()[:12], error=str(error))
        return None


async def publish_founding(network: Network, signer: Signer, name: str, signed: SignedManifest) -> None:
    """Put manifest and claim into the DHT for the first time. Raises NetworkError when no node took them."""
    now = network.unix_time()
    claim = place_claim(signer, name, signed.swarm, seq=first_seq(now), now=now, life_s=MAX_CLAIM_LIFE_S)
    for placed in (place_manifest(signed, now=now), claim):
        if not await _put(network, placed):
            raise NetworkError(f"no peer took the record {placed.key!r}; try again, or publish at the first join")


class Announcer:
    """Keeps this node's record, the manifest and the founder's claim in the DHT."""

    def __init__(
        self,
        network: Network,
        signer: Signer,
        manifest: Manifest,
        signed: SignedManifest,
        *,
        claim_file: Path,
        describe: Callable[[], PeerRecord],
    ) -> None:
        """`claim_file` remembers the claim between runs; `describe` says what our record shall hold."""
        self._network = network
        self._signer = signer
        self._manifest = manifest
        self._signed = signed
        self._claim_file = claim_file
        self._describe = describe
        self._seq = first_seq(network.unix_time())
        self._chance = random.Random(signer.peer_id)
        self._first_seq = self._seq
        self._ahead: list[range] = []
        """Numbers that we gave while our clock was ahead."""
        self._others_seq = 0
        """Of the newest record in our name that was not ours."""

    async def run(self) -> None:
        """Announce until cancelled. Raises ConfigError when another node has our key."""
        loop, jumps = asyncio.get_running_loop(), Jumps(self._network.unix_time)
        keep_alive_at = loop.time()
        while True:
            await self._look_for_a_second()
            await self._announce()
            if loop.time() >= keep_alive_at:
                done = await self._keep_alive()
                keep_alive_at = loop.time() + (KEEP_ALIVE_S if done else ANNOUNCE_S)
            if await jumps.pause(ANNOUNCE_S * self._chance.uniform(0.8, 1.0)):
                keep_alive_at = loop.time()

    async def claim_name(self) -> None:
        """For the founder, before the first announcement: make sure that the name is free.

        Raises NameContested or ConfigError when it is not; a claim made in an earlier run stands. No answer from the DHT is
        no objection: a swarm's first node has nobody to ask.
        """
        if self._signer.peer_id != self._manifest.founder or self._claim_file.exists():
            return
        try:
            claims = await find_claims(self._network, self._manifest.name)
        except NetworkError:
            return
        check_free(self._manifest.name, [found.claim for found in claims], self._signer.peer_id, self._signed.swarm)

    def _next_seq(self, now: float) -> int:
        """Of a record that is made now. Whoever has the right time refuses one that is numbered ahead of it: once our clock was set right we begin again, from now."""
        if seq_unix_s(self._first_seq) > now:
            self._ahead = [*self._ahead[1 - MAX_SET_BACK :], range(self._first_seq, self._seq + 1)]
            self._first_seq = self._seq = first_seq(now)
            self._others_seq = 0  # it may be ahead of time as well, and nobody's new records would be newer
        self._seq += 1
        return self._seq

    async def _announce(self) -> None:
        now = self._network.unix_time()
        seq, record = self._next_seq(now), self._describe()
        await self._try(place_peer(self._signer, self._signed.swarm, record, seq=seq, now=now, life_s=PEER_LIFE_S))

    async def _look_for_a_second(self) -> None:
        """Whether another node announces itself by our key: the one that has started first finds the other's record, which is newer than its own, as the last
        one that was put. One such record may be of an earlier run, if the clock went back since; another one after that is not. Raises ConfigError."""
        try:
            value = (await self._network.get_records(peers_key(self._signed.swarm))).get(self._signer.peer_id.hex())
            if value is None:
                return
            found = open_peer(self._signed.swarm, self._signer.peer_id.hex(), value, self._network.unix_time())
        except (NetworkError, RemoteError) as error:
            _log.info("no look-up of our own record", error=str(error))
            return
        if found.seq <= max(self._seq, self._others_seq) or any(found.seq in ours for ours in self._ahead):
            return
        if self._others_seq:
            raise ConfigError(
                f"another node runs with this machine's key ({short(self._signer.peer_id)}), and two with one key would vote twice: end one of "
                "them, and start it with another --home, or without the copy of `identity.pem`"
            )
        self._others_seq = found.seq

    async def _keep_alive(self) -> bool:
        """Put manifest and claim again; whether both were taken."""
        done = await self._try(place_manifest(self._signed, now=self._network.unix_time()))
        claim = await self._claim()
        return done and claim is not None and await self._try(claim)

    async def _claim(self) -> Placed | None:
        """The founder's claim to put: freshly signed by the founder, as last seen by anybody else."""
        now = self._network.unix_time()
        name, swarm = self._manifest.name, self._signed.swarm
        if self._signer.peer_id == self._manifest.founder:
            placed = place_claim(self._signer, name, swarm, seq=self._next_seq(now), now=now, life_s=MAX_CLAIM_LIFE_S)
            self._keep_claim(placed.value)
            return placed
        subkey = self._manifest.founder.hex()
        try:
            for found in await find_claims(self._network, name):
                if found.claim.founder == self._manifest.founder and found.claim.swarm == swarm:
                    self._keep_claim(found.placed.value)
        except NetworkError as error:
            _log.info("no look-up of the claim", error=str(error))
        if not self._claim_file.exists():
            return None
        value = self._claim_file.read_bytes()
        try:
            open_claim(name, subkey, value, now)
        except RemoteError as error:
            _log.info("the claim on disk is of no use any more", error=str(error))
            return None
        return refreshed(Placed(key=name_key(name), subkey=subkey, value=value, expires_at=now), now)

    def _keep_claim(self, value: bytes) -> None:
        """For the next start, which can do without."""
        try:
            write_atomically(self._claim_file, value)
        except DiskFull as error:
            _log.warning("no room for the claim", error=str(error))

    async def _try(self, placed: Placed) -> bool:
        """Whether a peer took it; if not, it is put again when it is due."""
        try:
            taken = await _put(self._network, placed)
        except NetworkError as error:
            _log.info("a record was not put", error=str(error))
            return False
        if not taken:
            _log.info("no peer took a record", key=placed.key)
        return taken


class Finder:
    """Looks for peers of a swarm in its DHT records, and keeps the book of known peers on disk."""

    def __init__(
        self,
        network: Network,
        swarm: bytes,
        book: PeerBook,
        *,
        admits: Callable[[PeerId, bytes], bool],
        met: Callable[[Found], None],
        refused: Callable[[RemoteError], None],
        heard: Callable[[], Iterable[tuple[PeerId, Iterable[str], float]]],
    ) -> None:
        """`heard` lists who is known from heartbeats: key, addresses, when last heard (unix seconds)."""
        self._network = network
        self._swarm = swarm
        self._book = book
        self._admits = admits
        self._met = met
        self._refused = refused
        self._heard = heard
        self._chance = random.Random(network.peer_id)
        self._apart: set[PeerId] = set()
        """Those of the last look with whom we have no protocol version in common."""

    async def run(self) -> None:
        """Look and save until cancelled."""
        looks, jumps = iter(FIRST_LOOKS_S), Jumps(self._network.unix_time)
        while True:
            await self.look()
            self.save()
            await jumps.pause(next(looks, LOOK_S) * self._chance.uniform(0.5, 1.5))

    async def look(self) -> None:
        """One look-up; a DHT that does not answer is no error. Who speaks no version of ours is told of once, and left alone."""
        try:
            records = await self._network.get_records(peers_key(self._swarm))
        except NetworkError as error:
            _log.info("no look-up of peers", error=str(error))
            return
        now = self._network.unix_time()
        before, self._apart = self._apart, set()
        peers: dict[PeerId, bytes | None] = {}
        for subkey, value in records.items():
            try:
                found = open_peer(self._swarm, subkey, value, now)
            except RemoteError as error:
                self._refused(error)
                continue
            if found.peer == self._network.peer_id or not self._admits(found.peer, found.record.admission_token):
                continue
            try:
                negotiate(found.record.protocol_versions, peer=found.peer)
            except WrongVersion as error:
                self._apart.add(found.peer)
                if found.peer not in before:
                    self._refused(error)
                continue
            self._network.add_addresses(found.peer, list(found.record.addresses))
            self._book.note(found.peer, found.record.addresses, 0.0)
            peers[found.peer] = found.record.group if found.record.state_digest else None
        self._met(peers)

    def save(self) -> None:
        """Write down whom we hear, so that the next start finds somebody."""
        for peer, addresses, seen in self._heard():
            if peer != self._network.peer_id:
                self._book.note(peer, addresses, seen)
        try:
            self._book.save()
        except DiskFull as error:  # the book of before is there
            _log.warning("no room for the book of peers", error=str(error))


async def _put(network: Network, placed: Placed) -> bool:
    return await network.put_record(placed.key, placed.subkey, placed.value, placed.expires_at)
