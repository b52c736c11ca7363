"""Importing torch, and all that comes with it, in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """What is made within lives as long as the process: some 200,000 objects of modules. The garbage collector, which goes through all of them again and again while
    they come, is off until they are here, and leaves them alone from then on."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
