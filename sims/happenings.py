"""What can be scripted to happen to a simulated swarm: `[[happenings]]` of a scenario (docs/scenarios.md), each checked by itself when it is made."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from farflung.protocol.checks import check_range
from farflung.protocol.errors import ConfigError

MAX_SECONDS = 30 * 86_400.0

REJOIN_S = 8.0
"""Nobody comes back sooner: a process takes a while to end and to start."""

What = Literal[
    "kill", "power", "leave", "join", "pause", "partition", "apart", "slow", "delay", "drop", "duplicate", "skew"
]

TAKES: dict[What, tuple[str, ...]] = {
    "kill": ("peers", "share", "for_s"),
    "power": ("peers", "share", "for_s"),
    "leave": ("peers", "share", "for_s"),
    "join": ("peers", "share"),
    "pause": ("peers", "share", "for_s"),
    "partition": ("peers", "share", "for_s"),
    "apart": ("peers", "share", "for_s"),
    "slow": ("peers", "share", "for_s", "factor"),
    "delay": ("peers", "share", "for_s", "seconds"),
    "drop": ("for_s", "probability"),
    "duplicate": ("for_s", "probability"),
    "skew": ("peers", "share", "seconds"),
}
"""Keys of each happening beside `at` and `what`."""

_NOTHING: dict[What, tuple[str, float]] = {
    "slow": ("factor", 1.0),
    "delay": ("seconds", 0.0),
    "drop": ("probability", 0.0),
    "duplicate": ("probability", 0.0),
}
"""With what value of which key nothing comes of them."""


class Happening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something scripted. What cannot happen, such as killing who is away, does not."""

    at: float
    what: What
    peers: tuple[str, ...] = ()
    """Whom: `class`, `class/3` (counted from 0) or `region:Iowa`. For a partition, those on one side of it; for `apart`, those that do not reach each other."""
    share: float = 1.0
    """Of them, drawn by the seed."""
    for_s: float | None = None
    """How long; whoever was killed, left or paused comes back then. None: for good. A `join` and a `skew` do not end."""
    factor: float = 4.0
    """`slow`: how many times as long everything takes."""
    probability: float = 0.3
    """`drop`, `duplicate`: of control messages, everybody's."""
    seconds: float = 1.0
    """`delay`: what is added to each way; `skew`: how far clocks are ahead."""

    def __post_init__(self) -> None:
        self.check_given(given(self))
        check_range("at", self.at, 0.0, MAX_SECONDS)
        check_range("share", self.share, 0.0, 1.0)
        check_range("for_s", 1.0 if self.for_s is None else self.for_s, 0.1, MAX_SECONDS)
        if self.what in ("kill", "power", "leave") and self.for_s is not None and self.for_s < REJOIN_S:
            raise ConfigError(
                f"{self.what} with for_s = {self.for_s:g}: a process takes {REJOIN_S:g} s to end and to start again; give {REJOIN_S:g} or more, or "
                'what = "pause", which may be as short as it likes'
            )
        check_range("factor", self.factor, 0.01, 1000.0)
        check_range("probability", self.probability, 0.0, 1.0)
        check_range("seconds", self.seconds, -3600.0 if self.what == "skew" else 0.0, 3600.0)
        if self.what in _NOTHING and getattr(self, _NOTHING[self.what][0]) == _NOTHING[self.what][1]:
            key, value = _NOTHING[self.what]
            raise ConfigError(
                f"{self.what} with {key} = {value:g} does nothing; give another, or leave the happening out"
            )
        if not self.peers and "peers" in TAKES[self.what] and self.what != "delay":
            raise ConfigError(f"{self.what} without peers: say whom, as in peers = ['home/0']")

    def check_given(self, keys: Iterable[str]) -> None:
        """Refuse what somebody wrote to no effect. Raises ConfigError."""
        takes = TAKES[self.what]
        for key in keys:
            if key not in ("at", "what", *takes):
                raise ConfigError(f"{self.what} with {key}: it takes {', '.join(takes)}; leave {key} out")
            if key == "share" and not self.peers:
                raise ConfigError("share without peers: say of whom, as in peers = ['home'], or leave it out")


def given(part: msgspec.Struct) -> list[str]:
    """Keys of a part of a scenario that are not as they are by default."""
    return [field.name for field in msgspec.structs.fields(type(part)) if getattr(part, field.name) != field.default]
