"""What things cost a node under virtual time, beside training and the links: `[costs]` of a scenario, or `--costs FILE`.

The defaults are one core's, within a factor of two (docs/compression.md), and an instant start. `farflung bench calibrate` measures all of it from real
nodes on the machine at hand and prints a file to be used here. A measured call takes

    seconds = per call + per million parameters * N / 10^6

as it does in a group of a few; parts of a round are smaller in larger groups.
"""

import tomllib
from pathlib import Path

import msgspec

from farflung.protocol.checks import check_range, nearest
from farflung.protocol.errors import ConfigError

PASSES = frozenset(
    {"offer", "offered_gradient", "_encode", "reduce_part", "decode", "apply", "adopt_outer", "chunk_digests", "save_learner", "load_learner", "clone"}
)  # fmt: skip
"""Calls that go through all parameters once; some through those only that a round moves (`moved`)."""

TIMED = frozenset({"train", "evaluate", "evaluate_few"})
"""Calls that take what a peer's `tokens_per_s` says."""

PRICED = PASSES | {
    *("_decode", "_difference", "_encoded", "_first_sequence", "_keep_model", "_save", "_taken", "_together", "_unfit"),
    *("append_commit", "applied", "batch", "begin", "begin_with", "catch_up", "check", "digest_of", "discard_progress"),
    *("drop_means", "encode", "enter", "handed_over", "leave", "let_go", "load", "load_chunk", "load_chunks", "load_mean"),
    *("load_place", "load_residuals", "load_votes", "local_params", "misfit", "pack_mean", "pass_through", "plan_step"),
    *("plans_with_means", "refresh", "roll", "save_chunk", "save_vote", "settle", "state", "step", "sync_means", "told"),
    *("with_ends", "without"),
}  # fmt: skip
"""Calls of a node's replica or stage that may take a time of their own, by the name of the function."""

STARTS = frozenset({"prepare", "learner", "_open_data"})
"""Calls of a node's start, which `start_s` has."""

MAX_S = 3600.0


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    start_s: float = 0.0
    """From the start of a process to its node being up."""
    message_s: float = 0.0
    """What a control message takes beside its way: signing, queues between processes, checking."""
    write_s: float = 0.0
    """What a write to a stream takes beside its way, each piece of a large one: encryption and the loops of both ends."""
    door_s: float = 0.0
    """What any call takes beside itself: from the loop to a thread and back."""
    hand_s: float = 0.001
    """What any call takes that is neither a pass nor measured."""
    pass_parameters_per_s: float = 4e8
    """Parameters that are encoded, decoded, added up or stepped in a second."""
    trained_per_s: float = 0.0
    """Parameters times tokens that a step of training really computes in a second, where peers share processors: for the rest of the time that their speed gives it, it sleeps. 0: it only sleeps."""
    processors: int = 0
    """That all peers share for calls, messages and what steps compute: so it is where all of them are processes of one machine (`sim local`). 0: each has its own."""
    calls: dict[str, tuple[float, float]] = {}
    """Measured calls, by the name of the function: seconds per call, and per million parameters."""

    def __post_init__(self) -> None:
        for key in ("start_s", "message_s", "write_s", "door_s", "hand_s"):
            check_range(key, getattr(self, key), 0.0, MAX_S)
        check_range("pass_parameters_per_s", self.pass_parameters_per_s, 1e3, 1e15)
        check_range("trained_per_s", self.trained_per_s, 0.0, 1e18)
        check_range("processors", self.processors, 0, 4096)
        for name, (call_s, million_s) in self.calls.items():
            if name in TIMED:
                raise ConfigError(f"calls.{name}: what that takes follows from peers.tokens_per_s; leave it out")
            if name not in PRICED:
                raise ConfigError(
                    f"calls.{name}: no node makes such a call{nearest(name, PRICED)}; known are {', '.join(sorted(PRICED))}"
                )
            check_range(f"calls.{name}[0]", call_s, 0.0, MAX_S)
            check_range(f"calls.{name}[1]", million_s, 0.0, MAX_S)

    def step_s(self, num_parameters: int, tokens: int) -> float:
        """Seconds of one processor that a step computes."""
        return num_parameters * tokens / self.trained_per_s if self.trained_per_s else 0.0

    def seconds(self, name: str, num_parameters: float) -> float:
        """What a call of this name takes a node, if it goes through so many parameters: those of its model, or a share."""
        if name in self.calls:
            call_s, million_s = self.calls[name]
            return self.door_s + call_s + million_s * num_parameters / 1e6
        return self.door_s + self.hand_s + (num_parameters / self.pass_parameters_per_s if name in PASSES else 0.0)


def load_costs(file: Path) -> Costs:
    """What `farflung bench calibrate --out FILE` has written. Raises ConfigError."""
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8"))["costs"], Costs)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the costs {file}: {error}") from error
    except (tomllib.TOMLDecodeError, KeyError, msgspec.ValidationError, ConfigError) as error:
        said = f"{file} holds no costs: {error!s}"
        raise ConfigError(f"{said}; `farflung bench calibrate --out FILE` writes some") from error


def write_costs(costs: Costs) -> str:
    """The same as TOML."""
    lines = ["[costs]"]
    for key in (
        "start_s",
        "message_s",
        "write_s",
        "door_s",
        "hand_s",
        "pass_parameters_per_s",
        "trained_per_s",
        "processors",
    ):
        lines.append(f"{key} = {getattr(costs, key)!r}")
    lines += ["", "[costs.calls]  # seconds per call, and per million parameters"]
    for name, (call_s, million_s) in sorted(costs.calls.items()):
        lines.append(f'"{name}" = [{call_s!r}, {million_s!r}]')
    return "\n".join(lines) + "\n"
