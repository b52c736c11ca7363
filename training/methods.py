"""The two ways to train that are ours, by name: what `farflung create --method` writes into a manifest, and what the rows of
the same names in `farflung bench quality` are made of. Their figures, and how the settings were found: `docs/experiments.md`.

- `default`: Muon inside, a dead zone (in long runs a trellis), Nesterov outside with little momentum (0.9 is too much for Muon's steps) and a rate that grows with the number of contributors.
- `thrifty`: the same at a third of the bytes and less.

What they may leave out depends on how long a run is. Peers have to be told so much in all that their models end in one place, however many steps they make; a
run of some hundred steps cannot say that in a thousandth of the bytes, one of some thousand can.

What the codec leaves out of a contribution stays in the sender's parameters (`kept`, `training.coupled`), and so in its next pseudo-gradient. What it leaves out
of a mean, which the owners of parts code once more where there are more than two peers, is nobody's. In short runs means have more bits, for what is added to the next mean of these elements comes
when training has made that progress again; in long runs they have few, and their owners add it (four peers: 1.4 % of the loss). Both synchronise three fragments in turn, and train on for as long as a round takes.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMethod:
    """Settings that belong together."""

    optimizer: Literal["adamw", "muon"]
    """Of inner steps."""
    inner_steps: int
    """H."""
    fragments: int = 3
    """P."""
    outer_lr: float
    """In a round of two contributors; it grows with `outer_growth`, as `training.rules.grown` has it."""
    outer_growth: float = 0.25
    outer_momentum: float
    codec: str
    """Of contributions, as `compression` reads it."""
    mean_codec: str
    """Of means."""
    mean_residual: bool
    """Whether owners of parts add what that codec leaves out of a mean to their next one."""
    last_codec: str
    """In the last exchange, so that little is kept when the run is over; it comes too late for momentum, and the outer optimiser is the mean then."""

    def fragments_of(self, inner_steps: int | Literal["auto"], delay_steps: int = 0) -> int | Literal["auto"]:
        """P for another H: the most, up to the method's, that divide it and leave H / P more than `delay_steps`; 1 where none does."""
        if inner_steps == "auto":
            return "auto"
        fits = [p for p in range(2, self.fragments + 1) if inner_steps % p == 0 and inner_steps // p > delay_steps]
        return max(fits, default=1)

    def sections(
        self, inner_steps: int | Literal["auto"], fragments: int | Literal["auto"], *, in_stages: bool = False
    ) -> dict[str, dict[str, object]]:
        """The same as sections of a manifest's TOML file, with this H and P, for a model that peers train whole or in stages. Training goes on for as long as
        rounds take."""
        return {
            "inner": {"optimizer": self.optimizer},
            "outer": {"lr": self.outer_lr, "lr_growth": self.outer_growth, "momentum": self.outer_momentum},
            "feedback": {
                "uplink": "kept",
                "downlink": "residual" if self.mean_residual else "none",
                "last_codec": self.last_codec,
            },
            "swarm": {
                "inner_steps": inner_steps,
                "fragments": fragments,
                **({"max_fragments": self.fragments} if fragments == "auto" else {}),
                "fragment_pattern": "sequential" if in_stages else "strided",
                "delay_steps": "auto",
                "uplink_codec": self.codec,
                "downlink_codec": self.mean_codec,
            },
        }


LONG_RUN = 2400
"""Steps of a run from which on rounds may be rarer and coarser."""


def _method(
    inner_steps: int,
    codec: str,
    bits: float,  # of contributions
    mean_bits: float,
    *,
    mean_residual: bool = False,
) -> TrainingMethod:
    return TrainingMethod(
        optimizer="muon",
        inner_steps=inner_steps,
        outer_lr=0.7,
        outer_momentum=0.5,
        codec=f"{codec}(bits={bits})",
        mean_codec=f"{codec}(bits={mean_bits})",
        mean_residual=mean_residual,
        last_codec=f"{codec}(bits=2.5)",
    )


DEFAULT, THRIFTY = _method(30, "deadzone", 1.5, 2.5), _method(30, "deadzone", 0.6, 1.2)
"""Of short runs: rounds are frequent and often quick, and coding takes a twentieth of the time."""
LONG_DEFAULT, LONG_THRIFTY = _method(60, "trellis", 0.89, 0.9, mean_residual=True), _method(240, "trellis", 0.77, 0.77)

METHOD_NAMES = ("default", "thrifty")


def training_method(name: str, total_steps: int) -> TrainingMethod:
    """One of `METHOD_NAMES`, for a run of so many steps. Raises KeyError."""
    short, long = {"default": (DEFAULT, LONG_DEFAULT), "thrifty": (THRIFTY, LONG_THRIFTY)}[name]
    return short if total_steps < LONG_RUN else long
