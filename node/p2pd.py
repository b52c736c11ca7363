"""go-libp2p's daemon (p2pd, bundled with hivemind) as a child that cannot outlive us.

We start it ourselves, under `lifeline.py`, and have hivemind attach to it (`P2P.replicate`), instead of
`P2P.create`, because that: leaves the daemon behind after a SIGKILL; assumes RSA identities; fails outright when no
bootstrap peer answers; gives up after 15 s by default, the best-known complaint of hivemind's users on slow machines.
The flags are those of `P2P.create` in hivemind 1.1.12.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import structlog

from farflung.node import lifeline
from farflung.node.identity import Identity
from farflung.node.paths import socket_folder
from farflung.protocol.errors import NetworkError

STOP_S = lifeline.GRACE_S + 5.0
MAX_LINE_BYTES = 64 << 10
IDLE_S = 60
"""The daemon ends by itself when we do not attach within this time."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class P2pdConfig:
    """How libp2p listens and gets through NATs."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    """Multiaddrs to listen on."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to announce instead of those found; empty: those found."""
    trusted_relays: tuple[str, ...] = ()
    """Multiaddrs (with /p2p/) of peers that relay to us when nobody can dial us."""
    nat_port_map: bool = True
    """Ask the router to forward our port (UPnP, NAT-PMP)."""
    auto_nat: bool = True
    """Learn from peers whether we can be dialled."""
    use_relay: bool = True
    """Reach, and let others reach, peers through relays."""
    auto_relay: bool = True
    """Look for a relay when we cannot be dialled."""
    startup_timeout_s: float = 120.0
    """How long the daemon may take to start; slow disks and IPv6 set-ups need a minute."""


class P2pd:
    """A running daemon. `control` is the multiaddr of its control socket."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, control: str) -> None:
        self._process = process
        self._folder = folder
        self._last_lines: deque[str] = deque(maxlen=5)
        self.control = control

    @classmethod
    async def start(cls, identity: Identity, config: P2pdConfig) -> "P2pd":
        """Start the daemon and wait until it listens. Raises NetworkError with its last words."""
        beside = socket_folder("farflung-12345678/control")
        folder = Path(tempfile.mkdtemp(prefix="farflung-", dir=beside))  # mode 0700: nobody else may steer our daemon
        daemon: P2pd | None = None
        try:
            key = folder / "key"
            key.touch(mode=0o600)
            key.write_bytes(identity.libp2p_private_key())
            control = f"/unix{folder}/control"
            with as_file(files("hivemind.hivemind_cli") / "p2pd") as program:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-IS",
                    lifeline.__file__,
                    str(folder),
                    str(program),
                    *_flags(config, key, control),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    limit=MAX_LINE_BYTES,
                    start_new_session=True,  # Ctrl+C is for us; the daemon ends after our goodbyes
                )
                daemon = cls(process, folder, control)
                await daemon._until_ready(config.startup_timeout_s)
            key.unlink()  # read once at start
        except OSError as error:
            raise NetworkError(f"cannot start the libp2p daemon: {error}") from error
        finally:
            if daemon is None:
                shutil.rmtree(folder)
        return daemon

    async def _until_ready(self, timeout_s: float) -> None:
        ready = False
        try:
            async with asyncio.timeout(timeout_s):
                while line := await self._line():
                    if line.startswith("Peer ID:"):
                        ready = True
                        return
        except TimeoutError:
            raise NetworkError(
                f"the libp2p daemon did not start within {timeout_s:.0f} s; raise startup_timeout_s. "
                f"Its last words: {' / '.join(self._last_lines)}"
            ) from None
        finally:
            if not ready:
                await self.stop()
        raise NetworkError(await self.wait())

    async def _line(self) -> str:
        """The next line of the daemon's output; empty when it has ended."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # longer than the limit: asyncio has dropped it
            text = line.decode(errors="replace").strip()
            if text or not line:
                break
        if text:
            self._last_lines.append(text[:300])
            _log.debug("p2pd", line=text)
        return text

    async def wait(self) -> str:
        """Until the daemon ends; its output goes to the log meanwhile. Returns how it ended, for people."""
        while await self._line():
            pass
        how = _end_of(await self._process.wait())
        return f"the libp2p daemon {how}; its last words: {' / '.join(self._last_lines)}"

    async def stop(self) -> None:
        """End the daemon and remove its folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the lifeline
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_of(status: int) -> str:
    """What the lifeline's exit status says: 128 and the signal, for a command that was killed."""
    if status <= 128 or status - 128 not in {kind.value for kind in signal.Signals}:
        return f"ended with status {status}"
    kind = signal.Signals(status - 128)
    why = ", perhaps for want of memory" if kind is signal.SIGKILL else ""
    return f"was killed by signal {kind.value} ({kind.name}){why}"


def _flags(config: P2pdConfig, key: Path, control: str) -> list[str]:
    flags = [
        "-dhtServer",
        f"-id={key}",
        f"-listen={control}",
        f"-hostAddrs={','.join(config.listen)}",
        f"-natPortMap={int(config.nat_port_map)}",
        f"-autonat={int(config.auto_nat)}",
        f"-relay={int(config.use_relay)}",
        f"-autoRelay={int(config.auto_relay and config.use_relay and bool(config.trusted_relays))}",
        "-connManager=1",
        "-tls=1",
        f"-idleTimeout={IDLE_S}s",
    ]
    if config.announce:
        flags.append(f"-announceAddrs={','.join(config.announce)}")
    if config.trusted_relays:
        flags.append(f"-trustedRelays={','.join(config.trusted_relays)}")
    return flags
