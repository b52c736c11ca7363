"""A step that is going on at one peer: its plan, its pure desk, its worklist, and the tensors that belong to them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.compression.codec import CodecError, Payload
from farflung.node.diary import Diary
from farflung.node.pipeline_step import Step
from farflung.protocol.desk import Desk
from farflung.protocol.headers import ParcelHeader
from farflung.protocol.messages import Passage
from farflung.protocol.route import OPEN
from farflung.protocol.visit import Work
from farflung.training.out_of_memory import no_room
from farflung.training.pipeline_boundary import Boundary, decode_targets
from farflung.training.pipeline_machine import Worklist
from farflung.training.pipeline_plan import Kind, Op
from farflung.training.pipeline_worker import Accumulated, Batch, together

MOST_WAITING = 64
"""Forwards that wait at a peer (Agora's number)."""

Listener = Callable[[int, Passage], None]
"""Told (place in the plan, what it says); must not block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """How a stage is served."""

    forward: Boundary
    backward: Boundary
    vocab_size: int
    seq_len: int
    device: torch.device
    most_waiting: int = MOST_WAITING
    """Forwards that wait here before others are told that we are busy."""

    def boundary(self, header: ParcelHeader) -> Boundary:
        """By which the tensors of a parcel are coded."""
        return self.backward if header.backward else self.forward


@dataclass(slots=True)
class OpenStep:
    """A step that is going on."""

    step: Step
    me: int
    desk: Desk
    worklist: Worklist
    accumulated: defaultdict[int, Accumulated] = field(default_factory=lambda: defaultdict(Accumulated))
    """By data node, what was summed up for its microbatches: apart, for each of them says for itself whether it counts."""
    inputs: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """By (microbatch, hop): the input, and targets where they travel with it."""
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Of outputs."""
    kept: dict[tuple[int, int], tuple[Payload, int, int]] = field(default_factory=dict)
    """Encoded gradients of inputs, with batch and length."""
    batches: dict[int, Batch] = field(default_factory=dict)
    """Of our own microbatches."""
    diary: Diary = field(default_factory=Diary)
    listener: Listener | None = None
    verdicts: dict[int, bool] = field(default_factory=dict)
    """By data node that is done with the step, or lost: whether what we summed up for it counts."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a verdict about each. Nothing is computed after that, and no verdict changes."""

    @classmethod
    def begin(cls, step: Step, me: int, service: Service, listener: Listener | None) -> "OpenStep":
        """Nothing has come yet."""
        plan = step.plan
        program = None if plan.program is None else plan.program.get(me, ())
        desk = Desk(
            window=step.window,
            me=me,
            stages=plan.stages,
            loss_at_home=plan.loss_at_home,
            # what a program lists has to be taken whenever it comes
            most_waiting=service.most_waiting if program is None else len(step.routes) * len(plan.stages),
            lease_s=step.lease_s,
            visit_s=step.visit_s,
        )
        slots = plan.slots[me]
        if program is None and not step.ascends:
            # By the plan they suffice, but not for whoever takes over from several; and two routes that meet two full peers in two orders would wait for
            # each other for ever. What a lane has beyond its slot is an input and a gradient.
            slots = max(slots, len(plan.lanes))

        def guest(microbatch: int, hop: int) -> bool:
            return step.routes[microbatch][hop].peer not in (me, OPEN)

        return cls(step, me, desk, Worklist(plan.policy, slots, program, guest), listener=listener)

    def op(self, work: Work) -> Op:
        """In the plan's words, where the loss is at hop 0 or at the last hop."""
        last = len(self.step.routes[work.microbatch]) - 1
        if work.backward:
            return Op(Kind.B, work.microbatch, work.hop)
        if work.hop <= last:
            return Op(Kind.F, work.microbatch, work.hop)
        return Op(Kind.LOSS, work.microbatch, 0 if self.step.plan.loss_at_home else last)

    def work(self, op: Op) -> Work:
        """`op`, back from the plan's words."""
        hop = len(self.step.routes[op.microbatch]) if op.kind is Kind.LOSS else op.hop
        return Work(op.microbatch, hop, op.kind is Kind.B)

    def counted(self, work: Work, x: Tensor, output: Payload, *, keep: bool) -> None:
        """A visit's tensors go; the gradient of its input stays until the microbatch has landed, if it has not yet."""
        key = (work.microbatch, work.hop)
        self.inputs.pop(key, None)
        self.gradients.pop(key, None)
        if keep:
            self.kept[key] = (output, x.shape[0], x.shape[1])

    def forget(self, microbatch: int, hop: int | None) -> None:
        """Nothing of a microbatch, or of one of its hops, is needed any more."""
        self.worklist.forget(microbatch, hop)
        for tensors in (self.inputs, self.gradients, self.kept):
            gone = [key for key in tensors if key[0] == microbatch and hop in (None, key[1])]
            for key in gone:
                del tensors[key]

    def carries_targets(self, header: ParcelHeader) -> bool:
        """Whether a parcel has them behind its activations."""
        return not header.backward and not self.step.plan.loss_at_home

    def travelling(self, batch: Batch) -> Tensor | None:
        """The targets of one of our own microbatches, where they travel with it."""
        return None if self.step.plan.loss_at_home else batch[1]

    @property
    def counting(self) -> list[int]:
        """The data nodes whose microbatches count here, of a step that is settled."""
        return sorted(home for home, counts in self.verdicts.items() if counts)

    def settle(self, home: int, *, counts: bool) -> int:
        """A data node's own word at the end, or that there will be none (`counts` is false); how many visits of its count here.

        Its word that they count stands, for it says so when it gives nothing to other peers any more: whatever becomes of it after that, and
        whatever we believed of it before."""
        if not self.settled.is_set():
            self.verdicts[home] = counts or self.verdicts.get(home, False)
            if self.verdicts.keys() >= self.step.homes:
                self.settled.set()
        return len(self.desk.counted.get(home, ())) if self.verdicts[home] else 0


def sum_up(accumulated: Sequence[Accumulated], device: torch.device) -> Accumulated:
    """What was summed up for several data nodes, together. Raises NoRoom."""
    with no_room(f"the gradients of {len(accumulated)} data nodes together", device):
        return together(accumulated)


def opened(
    service: Service, header: ParcelHeader, payload: Payload, targets: bytes
) -> tuple[Tensor, Tensor | None]:  # on the stage's device; targets [B, T], where they travel with it
    """The tensors of a parcel. Raises CodecError and NoRoom."""
    batch, length = header.batch, header.length
    with no_room(f"the activations of {batch} sequences", service.device):
        x = service.boundary(header).decode(payload, batch, length, device=service.device)
    return x, decode_targets(targets, batch, length, service.vocab_size) if targets else None


def check_shape(other: Tensor, x: Tensor) -> None:
    """Raise CodecError where a gradient, or targets, are of other sequences than the input: they come from different peers, and one of them has sent something else."""
    if other.shape[:2] != x.shape[:2]:
        raise CodecError(f"sequences of {tuple(other.shape[:2])} where there are {tuple(x.shape[:2])}")
