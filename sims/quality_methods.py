"""The training methods that `farflung bench quality` compares: data, one entry each, in the order of the table.

What is published is set as published (digest sections 1.1, 1.5, 2.1, 2.4 to 2.6, 2.8 and 3; all with H = 30 where a method has
rounds), only the inner learning rate is tuned, for every method over the same kind of grid. `default` and `thrifty` are
ours; how their settings were found, and what they fall short of, is in docs/experiments.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from farflung.compression.policy import parse_policy
from farflung.compression.unreduced import MOST
from farflung.training.fragments import Pattern
from farflung.training.gossip import Gossip
from farflung.training.methods import METHOD_NAMES, training_method
from farflung.training.rules import FEWEST_GROWN, HeavyBall, Nesterov, OuterRule, Sgd, Sign, grown
from farflung.training.streaming import Timetable

Inner = Literal["adamw", "muon", "gradient"]
"""The inner optimiser; with `gradient` a step moves by the clipped gradient itself, for methods that optimise outside."""

Topology = Literal["gather", "radial", "butterfly"]
"""Everybody sends to everybody, and takes the mean, or the length and the direction of the mean apart (RDA, `training.merge`); or part owners average and
send the means back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How pseudo-gradients become a mean."""

    topology: Topology = "butterfly"
    up: str = "fp32"
    """Codec policy of what peers send."""
    down: str = "fp32"
    """Codec policy of the means, in a butterfly."""
    feedback: float | None = None
    """Decay of the senders' error feedback; None without."""
    down_feedback: float | None = None
    """The same of part owners."""
    cap: float = 10.0
    """Of error feedback: `compression.feedback.ErrorFeedback.cap`."""
    last: str | None = None
    """Codec policy in the place of all others in the final flush; None for the same."""

    def __post_init__(self) -> None:
        for spec in (self.up, self.down, self.last or self.up):
            parse_policy(spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """Local training with rounds."""

    timetable: Timetable
    rule: OuterRule
    wire: Wire = Wire()
    pattern: Pattern = "strided"
    mixing: float | None = 0.0
    """alpha, the share of local parameters that stays at a round; None rebases them (`training.late`)."""
    kept: float = 0.0
    """When rebasing: the share of what a lossy codec left out that stays in the local parameters. Error feedback should
    then decay by as much."""
    eager: bool = False
    """Own share fresh, the others' one round late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Local training in which peers meet two by two, in fp32, and have outer parameters of their own (`training.gossip`)."""

    timetable: Timetable
    """In one fragment, without delay."""
    rule: Gossip

    def __post_init__(self) -> None:
        if self.timetable.fragments > 1 or self.timetable.delay:
            raise ValueError("pairs meet for the whole model, and without delay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row of the table."""

    name: str
    inner: Inner
    outer: Outer | Pairs | None = None
    """None: one worker without rounds."""
    whole_batch: bool = False
    """The worker trains on the batch of all peers, which is what data-parallel training computes."""
    lr_scale: float = 1.0
    """Of AdamW's grid of learning rates, for a method that has no inner optimiser: its rates are another thing than those of the synchronous start."""


def _rounds(interval: int = 30, fragments: int = 1, delay: int = 0) -> Timetable:
    return Timetable(interval=interval, fragments=fragments, delay=delay)


E3M0 = Wire(topology="gather", up="e3m0(block=128)")
"""As simulated in Streaming DiLoCo: what peers send is coded, the mean is not coded again."""


DELAY_STEPS = 5
"""That means of ours are late. In the shipped scenarios half of them are within 2 steps (`straggler`, H = 30), 4 (`home-8gb`, H = 60) and 6 (`spot`, H = 50), and nine in ten within 3, 5 and
7 (`delay_steps` of `round.commit`); only where links hardly carry the rounds, as in `thin-uplink`, a round takes until the next one."""


def _ours(name: str, steps: int = 0, peers: int = FEWEST_GROWN) -> Method:
    """A method as swarms are founded with it: of more than two peers the owners of parts code the means once more."""
    ours = training_method(name, steps)
    rule = Nesterov(lr=ours.outer_lr, momentum=ours.outer_momentum)
    outer = Outer(
        timetable=_rounds(ours.inner_steps, fragments=ours.fragments, delay=DELAY_STEPS),
        rule=grown(rule, ours.outer_growth, [1] * peers),
        wire=Wire(
            up=ours.codec,
            down=ours.mean_codec,
            down_feedback=1.0 if ours.mean_residual and peers > MOST else None,  # of fewer all hear all
            last=ours.last_codec,
        ),
        mixing=None,
        kept=1.0,
    )
    return Method(name=name, inner=ours.optimizer, outer=outer)


def _streaming(name: str, *, interval: int) -> Method:
    outer = Outer(
        timetable=_rounds(interval, fragments=3, delay=1),
        rule=Nesterov(lr=0.4, momentum=0.9),
        wire=E3M0,
        mixing=0.5,
    )
    return Method(name=name, inner="adamw", outer=outer)


def _co2(name: str, *, penalty: float = 0.0) -> Method:
    rule = HeavyBall(lr=1.0, momentum=0.5, penalty=penalty)
    return Method(name=name, inner="adamw", outer=Outer(timetable=_rounds(delay=30), rule=rule))


JUDGED = ("streaming", "streaming-100", "default", "thrifty")
"""The rows that the goals compare."""

METHODS: tuple[Method, ...] = (
    Method(name="data-parallel adamw", inner="adamw", whole_batch=True),
    Method(name="data-parallel muon", inner="muon", whole_batch=True),
    Method(name="solo adamw", inner="adamw"),
    Method(name="solo muon", inner="muon"),
    Method(name="averaging", inner="adamw", outer=Outer(timetable=_rounds(), rule=Sgd(lr=1.0))),
    Method(name="diloco", inner="adamw", outer=Outer(timetable=_rounds(), rule=Nesterov(lr=0.7, momentum=0.9))),
    # beside `default`: what of its gap is the inner optimiser's with rounds, and what the codec's
    Method(name="diloco muon", inner="muon", outer=Outer(timetable=_rounds(), rule=Nesterov(lr=0.7, momentum=0.5))),
    # beside `diloco`: what the merge of Decoupled DiLoCo does
    Method(
        name="rda",
        inner="adamw",
        outer=Outer(timetable=_rounds(), rule=Nesterov(lr=0.7, momentum=0.9), wire=Wire(topology="radial")),
    ),
    Method(name="noloco", inner="adamw", outer=Pairs(timetable=_rounds(), rule=Gossip())),
    _streaming("streaming", interval=30),
    _streaming("streaming-100", interval=100),  # the paper's 400 times fewer bits
    _co2("co2"),
    _co2(
        "co2 gap", penalty=1.0
    ),  # with the paper's penalty, in the form that the digest suggests: steady steps are halved by it
    Method(
        name="eager",
        inner="adamw",
        outer=Outer(timetable=_rounds(), rule=Nesterov(lr=0.4, momentum=0.9), wire=E3M0, eager=True),
    ),
    Method(
        name="sparseloco",
        inner="adamw",
        outer=Outer(
            timetable=_rounds(),
            rule=Sgd(lr=1.0),
            wire=Wire(topology="gather", up="topk(chunk=4096,k=64,bits=2)", feedback=0.95, cap=math.inf),
        ),
    ),
    Method(
        name="demo",
        inner="gradient",
        outer=Outer(
            timetable=_rounds(interval=1),
            rule=Sign(lr=1.0),
            wire=Wire(topology="gather", up="dct(cols=64,k=32,bits=8)", feedback=0.999, cap=math.inf),
        ),
        lr_scale=0.4,
    ),
    _ours("default"),
    _ours("thrifty"),
)


LEAST_ROUNDS = 18
"""With fewer a method says nothing (digest 7.3, which wants 50 and more)."""


LEAST_TO_PAIR = 4
"""Peers: two that meet two by two are the whole swarm, and pairs of no account."""


def by_names(
    names: str | None,
    steps: int | None = None,  # after the synchronous start
    interval: int | None = None,  # H, in the place of the methods' own
    peers: int | None = None,  # M
) -> list[Method]:
    """The methods of a comma-separated list, ours as they are for runs of so many steps and peers; for None all of them that say something of so many peers, and have
    `LEAST_ROUNDS` rounds in so many steps. Raises ValueError."""
    rows = [_ours(m.name, steps or 0, peers or FEWEST_GROWN) if m.name in METHOD_NAMES else m for m in METHODS]
    if interval is not None:
        rows = [with_interval(method, interval) for method in rows]
    known = {method.name: method for method in rows}
    if names is None:
        chosen = [m for m in rows if _says_something(m, steps, peers) or (interval is None and m.name in METHOD_NAMES)]
    else:
        asked = [name.strip() for name in names.split(",")]
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise ValueError(f"no method is called {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [known[name] for name in asked]
    if interval is not None and {"streaming", "streaming-100"} <= {method.name for method in chosen}:
        chosen.remove(known["streaming-100"])
    if not chosen:
        raise ValueError(f"no method has {LEAST_ROUNDS} rounds of {interval} steps in {steps}")
    return chosen


def _says_something(method: Method, steps: int | None, peers: int | None) -> bool:
    if isinstance(method.outer, Pairs) and peers is not None and peers < LEAST_TO_PAIR:
        return False
    return method.outer is None or steps is None or steps >= LEAST_ROUNDS * method.outer.timetable.interval


def with_interval(method: Method, interval: int) -> Method:
    """The same with another H; one whole round late stays one whole round late, what is late by less comes before the next round, or after a step, and there are no more
    fragments than steps. Without rounds, or with one in each step, it stays as it is."""
    if method.outer is None or method.outer.timetable.interval == 1:
        return method
    table, fragments = method.outer.timetable, min(method.outer.timetable.fragments, interval)
    late = table.delay == table.interval
    delay = interval if late else min(table.delay, max(1, interval // fragments - 1))
    timetable = replace(table, interval=interval, delay=delay, fragments=fragments)
    return replace(method, outer=replace(method.outer, timetable=timetable))
