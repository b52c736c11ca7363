"""One node process of `farflung sim local`: the daemon as `farflung join` runs it, in a `Rehearsal`.

The machine is emulated as in `bench unequal`: a step really computes, and then sleeps until it has taken as long as it would there. Seconds of a step
whose computing alone took longer become a line of `late.txt`, for then this machine was too slow, or too busy, for what it emulates. Orders come in
`orders.json` in the node's folder. The process ends with whoever started it: its standard input is a pipe that nobody writes to.

A node that is to be measured (`meter`) notes what goes through its doors, as JSON lines in `calls.jsonl`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from farflung.node import daemon
from farflung.node.distance import Distances
from farflung.node.door import Door, Doors
from farflung.node.learner import FEW_SAMPLES, HELDOUT_SAMPLES, SwarmLearner
from farflung.node.options import JoinOptions
from farflung.node.rehearsal import Rehearsal
from farflung.protocol.errors import FarflungError
from farflung.sims.local_stage import PacedStageLearner
from farflung.sims.orphans import leave_with_parent
from farflung.training.inner import StepReport

ORDERS, CALLS, LATE = "orders.json", "calls.jsonl", "late.txt"

P = ParamSpec("P")
T = TypeVar("T")


class Orders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process is told."""

    invitation: str
    port: int
    up_mbit: float
    down_mbit: float
    train_s: float
    """What a step takes at least."""
    token_s: float
    """Of a pipeline: seconds for each token that the machine would train with the whole model; see `local_stage`."""
    stage: int | None = None
    """Of a pipeline: the one to take; None: one that needs it."""
    region: str
    """Where it is said to stand."""
    evaluate_s: float
    one_way_s: dict[str, float]
    """By public key in hex: how far away a peer is."""
    jitter_s: float
    meter: bool = False


class PacedLearner(SwarmLearner):
    """The learner of a slower machine."""

    def __init__(self, learner: SwarmLearner, orders: Orders, late: Path) -> None:
        self.__dict__.update(learner.__dict__)
        self._orders = orders
        self._late = late

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        began = time.monotonic()
        report = super().train(numbers, global_step)
        if self._rest(began + self._orders.train_s) < 0.0:
            with self._late.open("a") as lines:
                lines.write(f"{time.monotonic() - began}\n")
        return report

    def evaluate(self) -> float:
        began = time.monotonic()
        loss = super().evaluate()
        self._rest(began + self._orders.evaluate_s)
        return loss

    def evaluate_few(self) -> float:
        began = time.monotonic()
        loss = super().evaluate_few()
        self._rest(began + self._orders.evaluate_s * FEW_SAMPLES / HELDOUT_SAMPLES)
        return loss

    def _rest(self, until: float) -> float:
        left_s = until - time.monotonic()
        time.sleep(max(0.0, left_s))
        return left_s


class MeteredDoor:
    """Writes down how long each call took, once it had its turn."""

    def __init__(self, door: Door, note: Callable[[str, float], None]) -> None:
        self._door = door
        self._note = note

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            began = time.perf_counter()
            done = function(*args, **kwargs)
            self._note(getattr(function, "__name__", ""), time.perf_counter() - began)
            return done

        return await self._door.run(timed)

    def close(self) -> None:
        self._door.close()


def meter(doors: Doors, file: Path) -> Doors:
    """The same doors, each of whose calls becomes a line `[name, seconds]`, written whole."""

    def note(name: str, seconds: float) -> None:
        with file.open("ab") as lines:
            lines.write(msgspec.json.encode([name, seconds]) + b"\n")

    return Doors(
        learner=MeteredDoor(doors.learner, note),
        side=MeteredDoor(doors.side, note),
        journal=MeteredDoor(doors.journal, note),
        digest=MeteredDoor(doors.digest, note),
    )


def run(home: Path) -> None:
    """Join as ordered, until the end. Raises FarflungError."""
    orders = msgspec.json.decode((home / ORDERS).read_bytes(), type=Orders)
    options = JoinOptions(
        swarm=orders.invitation,
        device="cpu",
        threads=1,
        stage=orders.stage,
        region=orders.region,
        up_mbps=orders.up_mbit,
        down_mbps=orders.down_mbit,
        port=orders.port,
        local=True,
        live=False,
        home=home,
    )
    rehearsal = Rehearsal(
        distances=Distances(
            one_way_s={bytes.fromhex(peer): seconds for peer, seconds in orders.one_way_s.items()},
            jitter_s=orders.jitter_s,
            up_bytes_per_s=orders.up_mbit * daemon.MEGABIT,
        ),
        learner=lambda learner: PacedLearner(learner, orders, home / LATE),
        stage_learner=lambda learner: PacedStageLearner(learner, orders.token_s, home / LATE),
        doors=lambda doors: meter(doors, home / CALLS) if orders.meter else doors,
    )
    daemon.run_join(options, rehearsal)


def main(home: Path) -> int:
    """The process; returns its exit status."""
    leave_with_parent()
    try:
        run(home)
    except FarflungError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[sys.argv.index("--home") + 1])))
