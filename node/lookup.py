"""What a node that joins has to learn from the DHT first: whose swarm a name means, and the manifest.

Members may just be starting, and a record needs a while to get around. So what is not there is looked for again, also when there is
something else in its place: somebody else's claim to the name says nothing about the one that is meant.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from farflung.node.discovery import find_claims, find_manifest
from farflung.node.network import Network
from farflung.protocol.errors import ConfigError, NetworkError, Unclaimed, WrongVersion
from farflung.protocol.keys import short
from farflung.protocol.naming import NameClaim, resolve, split_name

LOOK_UP_S = 90.0
"""How long the DHT is asked for a name or a manifest before giving up."""

RETRY_S = 2.0

SAY_S = 10.0
"""Between two words to whoever waits."""

Say = Callable[[str], None]


def nobody_listens(text: str) -> None:
    """The default of `say`."""


T = TypeVar("T")


async def look_up_name(network: Network, text: str, say: Say = nobody_listens) -> NameClaim:
    """The claim that `text` means; see `naming.resolve`.

    Raises NameContested at once, for more claims would not settle what the person has left open; ConfigError when there was none in time.
    """
    name, _ = split_name(text)
    missing = ConfigError(
        f"nobody answers for the name {text!r} (asked for {LOOK_UP_S:.0f} s). Check the spelling, give `--peer ADDRESS` of a "
        "running member, or ask for an invitation: it works without a look-up"
    )

    async def look() -> NameClaim | None:
        nonlocal missing
        claims = [found.claim for found in await find_claims(network, name)]
        try:
            return resolve(text, claims)
        except Unclaimed as error:
            missing = error
            return None

    claim = await _until_found(look, say)
    if claim is None:
        raise type(missing)(_clock_first(network, str(missing)))
    return claim


async def look_up_manifest(network: Network, swarm: bytes, name: str, say: Say = nobody_listens) -> bytes:
    """The signed manifest with this hash. Raises ConfigError at once when it is of another version, NetworkError when nobody had it in time."""

    async def look() -> bytes | None:
        try:
            found = await find_manifest(network, swarm)
        except WrongVersion as error:
            raise ConfigError(
                f"this farflung cannot join swarm {name} ({short(swarm)}): {error.reason}. Update farflung, or ask the founder "
                "which one the swarm runs"
            ) from error
        return None if found is None else found[1]

    value = await _until_found(look, say)
    if value is None:
        nobody = (
            f"no peer of swarm {name} could be reached within {LOOK_UP_S:.0f} s: is one running? If its address "
            "has changed, give the new one with `--peer ADDRESS`, or ask for a new invitation"
        )
        raise NetworkError(_clock_first(network, nobody))
    return value


def _clock_first(network: Network, otherwise: str) -> str:
    """Why nothing was found. By a clock that is wrong records count as over, or as ahead of time, and are left out of answers, however many there are."""
    trouble = network.clock_trouble()
    if not trouble:
        return otherwise
    return f"{trouble}, and join again; by a wrong clock, what peers keep counts as over, or as ahead of time. If it is right, {otherwise}"


async def _until_found(look: Callable[[], Awaitable[T | None]], say: Say) -> T | None:
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + LOOK_UP_S
    say_at = loop.time() + SAY_S
    while True:
        with contextlib.suppress(NetworkError):  # nobody answers yet; the next attempt may find somebody
            found = await look()
            if found is not None:
                return found
        if (now := loop.time()) >= give_up_at:
            return None
        if now >= say_at:
            say(f"no answer yet, asking for up to {give_up_at - now:.0f} s more ...")
            say_at = now + SAY_S
        await asyncio.sleep(RETRY_S)
