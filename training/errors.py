"""What can go wrong in training, as types.

TrainingError
├── NonFinite            a loss or a gradient norm is not a number; nothing was stepped
├── Overflow             a microbatch's activation, or the norm of its gradient, is not finite; it was not counted
├── NothingOffered       no progress waits for a round; nothing was changed
├── BadChunk             a chunk of outer state has the wrong size or values; nothing was changed
├── DamagedCheckpoint    a saved state is incomplete, altered, or belongs to another model; nothing was
changed
├── UnknownOptimizer     no inner optimiser has this name; the message lists those that exist
├── DataError            a data source or tokenizer cannot be used; the message names the remedy
├── UnusableModel        a folder holds no model that can be trained on; the message says why not
├── NotEnoughMemory      not even a microbatch of one sequence fits, or a stage has no room for one, or a step was made in part (out_of_memory.py)
├── NotNow               a step cannot be made now, and may be later; nothing was changed
│   ├── NoRoom           also a NotEnoughMemory: the device is full
│   └── DataUnavailable  also a DataError: what holds the data cannot be reached
├── BadPlan              a pipeline plan breaks a rule (pipeline_plan.py)
├── Unrecoverable        what a rule would make a lost stage of is lost too, or does not fit
└── WrongBase            a shadow's refresh continues another copy than the holder has (recovery_shadow.py)

Any other wrong value in a config is a plain `ValueError`, raised where the config is made.
"""

from typing import ClassVar


class TrainingError(Exception):
    """Base of every error this folder raises on purpose."""


class NonFinite(TrainingError):
    """A loss or gradient norm is NaN or infinite. Parameters and optimiser are as before the step."""

    def __init__(self, *, global_step: int, loss: float, grad_norm: float | None = None) -> None:
        norm = "" if grad_norm is None else f", gradient norm {grad_norm}"
        super().__init__(f"step {global_step}: loss {loss}{norm}")
        self.global_step = global_step
        self.loss = loss
        self.grad_norm = grad_norm


class Overflow(TrainingError):
    """A microbatch has an activation, or a gradient whose norm in fp32, that is not finite. Nothing of it was added."""


class NothingOffered(TrainingError):
    """A pseudo-gradient was asked for, and no progress was offered, or what was is gone."""


class BadChunk(TrainingError):
    """A chunk of outer state cannot be what it says it is."""


class DamagedCheckpoint(TrainingError):
    """A saved state cannot be used."""


class UnknownOptimizer(TrainingError, ValueError):
    """No inner optimiser has this name."""


class DataError(TrainingError):
    """A data source or a tokenizer cannot be used; the message names the remedy."""


class NotNow(TrainingError):
    """What was asked for cannot be done now, and may be later: nothing was changed, and the message says what is lacking."""

    what: ClassVar[str]
    """The same in a few words."""


class DataUnavailable(DataError, NotNow):
    """What holds the data cannot be reached, or does not answer."""

    what = "the data cannot be read"


class UnusableModel(TrainingError):
    """A folder holds no model that can be trained on; the message says why not."""


class NotEnoughMemory(TrainingError):
    """Not even one sequence at a time fits, and the message says how much is missing; a stage of a pipeline, whose microbatches others choose, has no room
    for one; or there was none for a model, an evaluation or a fit, or to move parameters, and some have moved."""


class NoRoom(NotEnoughMemory, NotNow):
    """There was no room for what changes nothing that is kept: somebody else may have the memory at the moment."""

    what = "the device is full"


class Unrecoverable(TrainingError):
    """A rule cannot make the lost stage: what it needs is lost as well, or does not fit. The message names another rule."""
