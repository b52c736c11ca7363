"""A learner small enough for thousands of rounds: real coupling to a real outer state, toy gradients.

Every sample moves the parameters in a direction of its own, so what was trained shows in the numbers. The learner keeps two books beside them, for
the judge: which samples its local progress holds (invariant 6), and where that progress should have brought it, as a sum in float64 that the outer
steps of others never touch (invariant 2). What is compared is thus not the code that is judged.
"""

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from farflung.compression.codec import Payload
from farflung.compression.digest import digest_of
from farflung.node.learner import Learner
from farflung.node.mean_files import PLAN_BYTES
from farflung.node.storage import Link, Place, TakeChunk
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.saved_vote import SavedVote
from farflung.sims.books import SampleBook, gradient_of
from farflung.training.coupled import Coupled, Slice, Update
from farflung.training.inner import StepReport
from farflung.training.rules import OuterRule

P = ParamSpec("P")
T = TypeVar("T")


@lru_cache(maxsize=512)
def _move(numel: int, direction: int) -> tuple[Tensor, Tensor]:
    """What one sample does to the parameters, fp32 [numel]; the same in fp64."""
    move = torch.sin(torch.arange(1, numel + 1, dtype=torch.float32) * direction).mul_(0.01)
    return move, move.double()


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, numel))


class ToyLearner(Coupled, SampleBook):
    """See the module."""

    def __init__(self, numel: int, outer: OuterRule, *, mix: float | None = None, chunk_bytes: int = 1 << 10) -> None:
        Coupled.__init__(self, Vector(numel), outer, device=torch.device("cpu"), mix=mix, chunk_bytes=chunk_bytes)
        SampleBook.__init__(self)
        self._made = torch.zeros(numel, dtype=torch.float64)
        """Local progress that no round has counted: what outer minus local parameters should be."""
        self._offered_made = self._sent_made = self._made

    @property
    def coupled(self) -> Coupled:
        return self

    def train(self, numbers: Sequence[int], global_step: int) -> StepReport:
        local = self.parameters[0]
        for number in self.directions(numbers):
            move, made = _move(self.num_parameters, number % 89 + 1)
            local.sub_(move)
            self._made = self._made + made  # another one: what was offered is kept as it was
        self.book_step(numbers)
        return StepReport(loss=float(local.square().mean()), tokens=len(numbers), grad_norm=1.0, lr=0.01)

    def start_over(self) -> None:
        self.discard_progress()

    def pass_over(self, numbers: Sequence[int]) -> None:
        self.book_step(numbers)

    def directions(self, numbers: Sequence[int]) -> Sequence[int]:
        """The samples that move something."""
        return numbers

    def offer(self, start: int = 0, stop: int | None = None) -> None:
        super().offer(start, stop)
        self.book_offer()
        self._offered_made = self._made

    def offered_gradient(self, start: int, stop: int) -> Tensor:
        gradient = super().offered_gradient(start, stop)
        assert self.sent is not None
        self._sent_made = self._offered_made
        self.book_gradient(gradient_of(self.outer.params, self.sent))
        return gradient

    def apply(
        self,
        updates: Sequence[Update],
        *,
        contributed: bool,
        told: Mapping[int, Tensor] | None = None,
    ) -> None:
        old = self.outer.params.double()
        super().apply(updates, contributed=contributed, told=told)
        if not contributed:
            return
        self.book_counted()
        if self.mix is not None:
            mix = self.mix
            moved = self.outer.params.double() - old
            self._made, self._offered_made = (
                _mixed(made, moved, updates, mix) for made in (self._made, self._offered_made)
            )
            return
        counted = torch.zeros_like(self._made)
        for start, stop, _ in updates:
            counted[start:stop] = self._sent_made[start:stop] if told is None else told[start].double()
        self._made = self._made - counted
        self._offered_made = self._offered_made - counted

    def adopt_outer(
        self, previous: Tensor | None, *, counted: Sequence[Slice] = (), told: Mapping[int, Tensor] | None = None
    ) -> None:
        super().adopt_outer(previous, counted=counted, told=told)
        if counted:
            self.book_counted()
            made = self._made.clone()
            for start, stop in counted:
                made[start:stop] -= (
                    self._sent_made[start:stop] if told is None or start not in told else told[start].double()
                )
            self._made = made
        elif previous is None:
            self._forget()

    def discard_progress(self) -> None:
        super().discard_progress()
        self._forget()

    def _forget(self) -> None:
        self.book_dropped()
        self._made = torch.zeros_like(self._made)

    def strayed(self) -> float:
        """Largest distance of a local parameter from where its progress should have brought it."""
        return float((self.outer.params.double() - self.parameters[0].double() - self._made).abs().max())

    def evaluate(self) -> float:
        return float(self.outer.params.square().mean())

    def evaluate_few(self) -> float:
        return self.evaluate()

    def save(self, folder: Path) -> None:
        raise NotADirectoryError("a toy learner is saved by MemoryStorage only")

    def load(self, folder: Path) -> None:
        raise NotADirectoryError("a toy learner is loaded by MemoryStorage only")

    def freeze(self) -> dict[str, object]:
        """Everything, as copies."""
        return {
            "params": self.outer.params.clone(),
            "momentum": self.outer.momentum.clone(),
            "local": self.parameters[0].clone(),
            "sent": None if self.sent is None else self.sent.clone(),
            "trained": list(self.trained),
            "sent_samples": list(self.sent_samples),
            "made": self._made,
            "sent_made": self._sent_made,
        }

    def thaw(self, state: dict[str, object]) -> None:
        """Back to what `freeze` copied."""
        state = copy.deepcopy(state)
        for target, name in (
            (self.outer.params, "params"),
            (self.outer.momentum, "momentum"),
            (self.parameters[0], "local"),
        ):
            value = state[name]
            assert isinstance(value, Tensor)
            target.copy_(value)
        self.sent, self.offered = state["sent"], None  # type: ignore[assignment]
        self.trained = state["trained"]  # type: ignore[assignment]
        self.sent_samples = state["sent_samples"]  # type: ignore[assignment]
        self._made, self._sent_made = state["made"], state["sent_made"]  # type: ignore[assignment]


def _mixed(made: Tensor, moved: Tensor, updates: Sequence[Update], alpha: float) -> Tensor:
    """How far local parameters are behind the outer ones once they have been mixed with where these have moved to."""
    mixed = made.clone()
    for start, stop, _ in updates:
        mixed[start:stop] = alpha * (made[start:stop] + moved[start:stop])
    return mixed


class VirtualDoor:
    """The door under a virtual clock: calls take modelled seconds, one after another, and run in the loop itself."""

    def __init__(self, seconds: Callable[[str], float]) -> None:
        self._seconds = seconds
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._lock:
            await asyncio.sleep(self._takes(getattr(function, "__name__", ""), args))
            return function(*args, **kwargs)

    def _takes(self, name: str, args: Sequence[object]) -> float:
        return self._seconds(name)

    def close(self) -> None:
        pass


@runtime_checkable
class Freezable(Protocol):
    """A learner whose whole state can be kept in memory."""

    def freeze(self) -> dict[str, object]:
        """Everything, as copies."""

    def thaw(self, state: dict[str, object]) -> None:
        """Back to what `freeze` copied."""


class MemoryStorage:
    """A disk that outlives its process. What is written without a sync, as means are, is still in the memory of its machine, which loses it with its power."""

    def __init__(self) -> None:
        self.votes: dict[bytes, SavedVote] = {}
        """By group."""
        self.means: dict[tuple[bytes, int], bytes] = {}
        self._synced: dict[tuple[bytes, int], bytes] = {}
        """Of these, what is on the disk itself."""
        self.clear()

    def clear(self) -> None:
        self.history: list[Link] = []
        plans = {vote.plan for vote in self.votes.values()}
        self._drop({key for key in self.means if key[0] not in plans})
        self.chunks: dict[tuple[int, int], bytes] = {}
        self.learner: tuple[dict[str, object], Place] | None = None
        self.residuals: dict[str, Tensor] = {}

    def save_vote(self, vote: SavedVote) -> None:
        self.votes[vote.group] = vote

    def load_votes(self) -> list[SavedVote]:
        return list(self.votes.values())

    def append_commit(self, anchor: Commit | None, certified: Certified) -> None:
        self.history.append(Link(anchor, certified))

    def load_history(self) -> list[Link]:
        return list(self.history)

    def save_mean(self, plan: bytes, part: int, payload: Payload) -> None:
        self.means[plan, part] = bytes(payload)

    def load_mean(self, plan: bytes, part: int, digest: bytes) -> bytes | None:
        mean = self.means.get((plan, part))
        return mean if mean is not None and digest_of(mean) == digest else None

    def sync_means(self, plan: bytes) -> None:
        self._synced |= {key: mean for key, mean in self.means.items() if key[0] == plan}

    def lose_power(self) -> None:
        """Its machine has none any more."""
        self.means = {key: self._synced[key] for key in self.means if key in self._synced}

    def drop_means(self, plan: bytes) -> None:
        self._drop({key for key in self.means if key[0] == plan})

    def _drop(self, keys: Collection[tuple[bytes, int]]) -> None:
        for key in keys:
            del self.means[key]
            self._synced.pop(key, None)

    def save_chunk(self, index: int, version: int, data: bytes) -> None:
        self.chunks[index, version] = data

    def load_chunks(self, take: TakeChunk) -> None:
        for (index, version), data in sorted(self.chunks.items()):
            take(index, version, data)

    def plans_with_means(self) -> set[bytes]:
        return {plan[:PLAN_BYTES] for plan, _ in self.means}

    def save_learner(
        self, learner: Learner, residuals: Mapping[str, Tensor], place: Place, drop: Collection[bytes]
    ) -> None:
        assert isinstance(learner, Freezable)
        self.residuals = {name: tensor.clone() for name, tensor in residuals.items()}
        self.learner = (learner.freeze(), place)
        self._drop({(plan, part) for plan, part in self.means if plan[:PLAN_BYTES] in drop})
        self.chunks.clear()

    def load_learner(self, learner: Learner) -> Place | None:
        assert isinstance(learner, Freezable)
        if self.learner is None:
            return None
        learner.thaw(self.learner[0])
        return self.learner[1]

    def load_place(self) -> Place | None:
        return None if self.learner is None else self.learner[1]

    def load_residuals(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.residuals.items()}
