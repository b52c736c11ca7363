"""Runs that are cut go on: the state of a run under way, in a file beside that of the finished runs.

Written every `EVERY_S` seconds, whole, under another name first, so that a cut while it is written leaves the one before. What goes on from it comes to the
same bits as a run that was never cut; the file is named by the run's fingerprint.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

EVERY_S = 600.0

State = dict[str, Any]
"""Tensors, numbers, None, and lists, tuples and dicts of them by strings; tuples come back as lists."""

_FORM = "form"


@dataclass(slots=True)
class Keeper:
    """Of one run."""

    file: Path
    every_s: float = EVERY_S
    clock: Callable[[], float] = time.monotonic
    _kept_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._kept_at = self.clock()

    def load(self) -> State | None:
        """What was kept last, on the CPU; None when there is nothing. Raises ValueError when the file is damaged, OSError."""
        if not self.file.exists():
            return None
        try:
            with safe_open(self.file, framework="pt") as kept:
                tensors = {name: kept.get_tensor(name) for name in kept.keys()}
                state: State = _unpacked(json.loads(kept.metadata()[_FORM]), tensors)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.file} is no run under way: remove it, and the run begins anew") from error
        return state

    def offer(self, state: Callable[[], State]) -> None:
        """Keep it if it is time. Raises OSError."""
        now = self.clock()
        if now - self._kept_at < self.every_s:
            return
        self._kept_at = now
        tensors: dict[str, Tensor] = {}
        form = json.dumps(_packed(state(), tensors))
        draft = self.file.with_name(self.file.name + ".new")
        with draft.open("wb") as out:
            out.write(save(tensors, metadata={_FORM: form}))
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self.file)

    def drop(self) -> None:
        """The run is over. Raises OSError."""
        self.file.unlink(missing_ok=True)


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """As JSON has it, with names in the place of tensors, which are copied into `tensors`."""
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous().clone()  # what lies in the same memory is two afterwards
            return {"tensor": name}
        case dict():
            return {"dict": {key: _packed(one, tensors) for key, one in value.items()}}
        case list() | tuple():
            return [_packed(one, tensors) for one in value]
    return value


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The reverse of `_packed`."""
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": entries}:
            return {key: _unpacked(one, tensors) for key, one in entries.items()}
        case list():
            return [_unpacked(one, tensors) for one in value]
    return value
