"""What a swarm's name means: claims by founders, and whom to believe.

Anybody can claim any name in the DHT, so a bare name proves nothing there: it means the swarm of this name that
the machine has created or joined before. Otherwise people type the full name, `name@fingerprint`, which names the
founder by the hash of its key; or they use an invitation, which carries everything.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farflung.protocol.errors import ConfigError, NameContested, Unclaimed
from farflung.protocol.keys import FINGERPRINT_CHARS, PeerId, fingerprint
from farflung.protocol.limits import MAX_NAME

MIN_FINGERPRINT_CHARS = 10
"""Fewest base32 characters of a fingerprint that a person may type: 50 bits."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FINGERPRINT = re.compile(r"[a-z2-7]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameClaim:
    """A founder's verified statement "this name is that manifest"."""

    name: str
    founder: PeerId
    """The key that signed the claim."""
    swarm: bytes
    """The manifest's hash."""
    seq: int
    """Of one founder's claims the highest counts."""
    expires_at: float
    """Unix seconds."""


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can name a swarm."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ConfigError(
            f"swarm name {name[: 2 * MAX_NAME]!r}: 1 to {MAX_NAME} of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def full_name(name: str, founder: PeerId) -> str:
    """`name@fingerprint`, which means one founder's swarm everywhere."""
    return f"{name}@{fingerprint(founder)[:FINGERPRINT_CHARS]}"


def split_name(text: str) -> tuple[str, str]:
    """`name` or `name@fingerprint` into name and fingerprint prefix ("" when bare). Raises ConfigError."""
    name, at, prefix = text.strip().lower().partition("@")
    check_name(name)
    if at and not (MIN_FINGERPRINT_CHARS <= len(prefix) <= 52 and _FINGERPRINT.fullmatch(prefix)):
        raise ConfigError(
            f"{text!r}: after '@' belong at least {MIN_FINGERPRINT_CHARS} characters (a-z, 2-7) "
            f"of the founder's fingerprint, as `{name}@` and the rest of the full name"
        )
    return name, prefix


def resolve(text: str, claims: Iterable[NameClaim]) -> NameClaim:
    """The claim that the full name `text` means, among verified, unexpired `claims`. Of one founder's the latest counts.

    Raises ConfigError (no such name), Unclaimed (nobody who is meant claims it), NameContested (a bare name that somebody
    claims, or a fingerprint that fits several founders); all say what to type.
    """
    name, prefix = split_name(text)
    latest = _latest(name, claims)
    if latest and not prefix:
        raise NameContested(_contested(name, latest))
    chosen = [founder for founder in latest if fingerprint(founder).startswith(prefix)]
    if len(chosen) > 1:
        raise NameContested(_contested(name, {founder: latest[founder] for founder in chosen}))
    if not chosen:
        others = f"; others claim {_list(name, latest)}" if latest else ""
        raise Unclaimed(
            f"no claim to {text.strip()!r} found{others}. Check the spelling, give `--peer ADDRESS` of a member, "
            "or ask for an invitation: it works without a look-up"
        )
    return latest[chosen[0]]


def check_free(name: str, claims: Iterable[NameClaim], own_key: PeerId, swarm: bytes | None = None) -> None:
    """Whether we may found `name`. `swarm` is our manifest's hash when it is known already (a repeated
    announcement).

    Raises ConfigError (bad name, or our own claim to it is for another manifest), NameContested (another
    founder claims it).
    """
    check_name(name)
    latest = _latest(name, claims)
    own = latest.pop(own_key, None)
    if latest:
        raise NameContested(
            f"the name {name!r} is claimed already by {_list(name, latest)}; choose another name, "
            "or join that swarm by its full name"
        )
    if own is not None and own.swarm != swarm:
        raise ConfigError(
            f"the name {name!r} is yours already, for the swarm {own.swarm.hex()[:12]}; choose another name, "
            f"or continue that one with `farflung join {full_name(name, own_key)}`"
        )


def _latest(name: str, claims: Iterable[NameClaim]) -> dict[PeerId, NameClaim]:
    latest: dict[PeerId, NameClaim] = {}
    for claim in claims:
        if claim.name != name:
            continue
        known = latest.get(claim.founder)
        # Equal numbers for two swarms are a founder's fault; all peers must still choose alike.
        if known is None or (claim.seq, claim.swarm) > (known.seq, known.swarm):
            latest[claim.founder] = claim
    return latest


def _list(name: str, latest: Iterable[PeerId]) -> str:
    names = sorted(full_name(name, founder) for founder in latest)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _contested(name: str, latest: Mapping[PeerId, NameClaim]) -> str:
    return (
        f"{name!r} alone does not say whose swarm is meant; claimed by {_list(name, latest)}. "
        "Type the full name that the founder gave you, for example "
        f"`farflung join {sorted(full_name(name, founder) for founder in latest)[0]}`"
    )
