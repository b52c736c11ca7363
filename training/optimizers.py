"""Inner optimisers by name, as a manifest spells them, and which of a model's parameters each of them moves.

    adamw                                     torch.optim.AdamW, fused
    muon(momentum=0.95, adamw_lr=0.003)       Muon for hidden matrices, AdamW for embedding, head and norms
    torch.optim.NAdam(momentum_decay=0.01)    any class of torch.optim that steps on plain gradients

The swarm's `betas` go to a class of `torch.optim` that has an argument of this name; what stands in the parentheses wins.

Weight decay is for matrices only, and decoupled, W <- (1 - lr * weight_decay) * W, whatever the optimiser: most classes of torch would
add it to the gradient, and one that divides by the gradient's size then makes it so strong that hidden matrices vanish. Only a `weight_decay` in the
parentheses is the class's own, of the strength and the kind that torch's documentation says.
"""

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from farflung.training.errors import UnknownOptimizer
from farflung.training.muon import Muon

TABLES = ("model.embed_tokens", "lm_head")
"""Beginnings of the names of matrices that are no hidden ones: their rows are looked up, not multiplied through."""

_OWN = {"adamw": frozenset[str](), "muon": frozenset({"momentum", "iterations", "adamw_lr"})}
_PREFIX = "torch.optim."

Parameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that one optimiser moves, all alike."""

    parameters: Parameters
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """The optimiser over some of them; may be called for several parts of the group."""
    lr_ratio: float = 1.0
    """Its learning rate over the schedule's."""
    weight_decay: float = 0.0
    """Share of them that a step takes off before the optimiser's own, times the learning rate; 0 where the optimiser sees to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """A parsed name; `parse_optimizer` makes them."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def usual_lr(self, num_parameters: int) -> float | None:
        """A peak learning rate to begin with, of two digits; None for a class of torch, whose scale is its own.

        AdamW's falls with the model's size as in GPT-3's table (2005.14165, 2.1: 6e-4 for 125 M parameters, 2e-4 for 1.3 B), on a line through 6e-3 for 170 thousand,
        which is best there for one peer and for Streaming DiLoCo (docs/quality_ci.md; for data-parallel it is twice that); Muon's is twice as high, the least that was best there.
        """
        if self.name not in _OWN:
            return None
        lr = 6e-4 * (125e6 / num_parameters) ** 0.35 * (2.0 if self.name == "muon" else 1.0)
        return float(f"{lr:.2g}")

    def groups(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],  # names as in a `Decoder`
        *,
        lr: float,  # the schedule's peak
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> list[Group]:
        """Every parameter in one group. An empty group is left out."""

        def adamw(decay: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
            return lambda some: torch.optim.AdamW(some, lr, betas, eps, decay, fused=True)

        named = list(parameters)
        matrices = [(name, p) for name, p in named if p.dim() >= 2]
        vectors = [(name, p) for name, p in named if p.dim() < 2]
        match self.name:
            case "adamw":
                groups = [
                    Group(parameters=matrices, make=adamw(weight_decay)),
                    Group(parameters=vectors, make=adamw(0.0)),
                ]
            case "muon":
                options = dict(self.arguments)
                ratio = options.pop("adamw_lr", lr) / lr
                hidden = [(name, p) for name, p in matrices if not name.startswith(TABLES)]
                tables = [(name, p) for name, p in matrices if name.startswith(TABLES)]
                groups = [
                    Group(parameters=hidden, make=lambda some: Muon(some, lr, weight_decay=weight_decay, **options)),
                    Group(parameters=tables, make=adamw(weight_decay), lr_ratio=ratio),
                    Group(parameters=vectors, make=adamw(0.0), lr_ratio=ratio),
                ]
            case _:
                swarms = 0.0 if "weight_decay" in self.arguments else weight_decay
                groups = [
                    Group(
                        parameters=matrices,
                        make=lambda some: self._torch(some, lr, betas, decays=True),
                        weight_decay=swarms,
                    ),
                    Group(parameters=vectors, make=lambda some: self._torch(some, lr, betas, decays=False)),
                ]
        return [group for group in groups if group.parameters]

    def state_tensors(self) -> tuple[int, int]:
        """State tensors of a parameter's own shape: (of each hidden matrix, of each other parameter)."""
        match self.name:
            case "adamw":
                return 2, 2
            case "muon":
                return 1, 2
            case _:
                each = _dry_step(self)
                return each, each

    def _torch(
        self, some: list[nn.Parameter], lr: float, betas: tuple[float, float], *, decays: bool
    ) -> torch.optim.Optimizer:
        cls = _torch_classes()[self.name]
        takes = inspect.signature(cls).parameters
        # the swarm's decay is the group's; AdamW would have one of its own
        of_swarm = {"betas": betas, "weight_decay": 0.0}
        options = {key: value for key, value in of_swarm.items() if key in takes} | dict(self.arguments)
        if "weight_decay" in options and not decays:
            options["weight_decay"] = 0.0  # norms do not decay
        made: torch.optim.Optimizer = cls(some, lr=lr, **options)
        return made


def parse_optimizer(text: str) -> OptimizerSpec:
    """`name` or `name(key=value, ...)` with literal values. Raises UnknownOptimizer, which names what exists, and
    ValueError for arguments that the optimiser does not take.
    """
    name, arguments = _read(text)
    if name in _OWN:
        if unknown := set(arguments) - _OWN[name]:
            known = ", ".join(sorted(_OWN[name])) or "no arguments"
            raise ValueError(f"optimizer {name} does not know {', '.join(sorted(unknown))}; it takes {known}")
        rate = arguments.get("adamw_lr", 1.0)  # the only one that no step tries out
        if type(rate) not in (int, float) or not 0 < rate < math.inf:
            raise ValueError(f"optimizer {name}: adamw_lr = {rate!r} must be a finite number above 0")
    elif name not in _torch_classes():
        raise UnknownOptimizer(
            f"no inner optimizer is called {name!r}; there are {', '.join([*_OWN, *_torch_classes()])}"
        )
    elif "lr" in arguments:
        raise ValueError(f"optimizer {name}: its learning rate is not given here but by inner.lr, `create --lr`")
    spec = OptimizerSpec(name=name, arguments=arguments)
    if arguments or name not in _OWN:  # ours without arguments can only be right, and need not load torch's optimisers
        _dry_step(spec)
    return spec


def _read(text: str) -> tuple[str, dict[str, Any]]:
    wrong = f"optimizer {text!r}: write a name, or name(key=value) with numbers, strings or true values"
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # too deep, the last two
        raise ValueError(wrong) from error
    if not isinstance(expression, ast.Call):
        return ast.unparse(expression), {}
    if expression.args or any(keyword.arg is None for keyword in expression.keywords):
        raise ValueError(wrong)
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in expression.keywords}
    except ValueError as error:
        raise ValueError(wrong) from error
    return ast.unparse(expression.func), arguments


def _torch_classes() -> dict[str, Any]:
    """Classes of torch.optim that step on plain gradients: LBFGS wants to evaluate again, SparseAdam sparse ones, and Muon
    only matrices, for which ours is (`muon`)."""
    left_out = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
    found = {_PREFIX + name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if name.removeprefix(_PREFIX) not in left_out}


def _dry_step(spec: OptimizerSpec) -> int:
    """Step a small model with it, so that a wrong argument shows now. Returns the state tensors of a matrix's shape."""
    names = {"hidden.weight": (3, 2), TABLES[0]: (3, 2), "norm.weight": (2,)}
    parameters = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in names.items()]
    try:
        groups = spec.groups(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        optimizers = [group.make([p for _, p in group.parameters]) for group in groups]
        for _, parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    except (TypeError, ValueError, LookupError, RuntimeError, AssertionError, ArithmeticError) as error:
        raise ValueError(f"optimizer {spec.name} cannot be used with {dict(spec.arguments)}: {error}") from error
    state = optimizers[0].state[parameters[0][1]]
    if odd := [key for key, value in state.items() if not isinstance(value, torch.Tensor | None)]:
        raise ValueError(f"optimizer {spec.name} keeps {', '.join(odd)}, which a checkpoint cannot hold")
    return sum(value.shape == (3, 2) for value in state.values() if value is not None)
