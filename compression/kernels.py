"""Native kernels: the C files of this package, built once per machine, in place of PyTorch or Python where they pay.

PyTorch is the reference and runs everywhere; a C kernel gives the same bits in one pass over memory. Measured on one
core of an AMD Zen 3 (AVX2, gcc 12.2, torch 2.13, loaded), 64 MiB of fp32, process CPU time, as a ratio to `copy_` of
the same tensor in the same loop:

                      int8 encode   decode-add   int4 encode   decode-add   first use
    PyTorch, chunked      0.36         0.5           0.25         0.35       none
    torch.compile         0.59         0.26          0.48         0.16       26 s, then 2 to 3 s per kernel
    C                     1.25         1.45          1.25         1.35       0.5 s

The compression digest (section 4) has C at 1.7, 1.65 and, for int4 decode-add, 2.9 times torch.compile on AVX-512. C is
only worth having when it is 1.5 times faster than torch.compile, and it is 2 to 8 times. So torch.compile has no place
here, the less so as it leaves out the rounding of scales to bf16 unless told otherwise
(`emulate_precision_casts`), which changed 5 % of all int8 codes. On a GPU the PyTorch code runs as it is: its eight passes
over GPU memory should take less time than the codes take over PCIe.

They are plain C behind ctypes rather than a torch extension: `cc -shared` takes 0.5 s where `cpp_extension.load` took
50 s for an empty function (torch's headers), needs neither ninja nor Python's headers, and the result does not depend
on torch's version. ctypes releases the GIL for the length of a call. Kernels run on the calling thread only: at
10 GB/s a core is an order of magnitude ahead of any network that the bytes then go to.

Nothing is built on first use: a node calls `prepare` when it starts, off its event loop, and codecs look for a kernel
at each call. Without a compiler, or before `prepare`, there is none, and PyTorch does the work.

A module adds kernels with a file `its_name.c` beside it; see kernels.h for what they must keep. Outside of this folder there is
one, training/pipeline_makespan.c, in place of Python.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COMPILERS = ("cc", "gcc", "clang")
# x86's baseline has too few vector instructions; elsewhere the baseline does, and not every compiler knows "native".
_CPU = ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ()
FLAGS = ("-std=c11", "-O3", *_CPU, "-ffp-contract=off", "-fPIC")
BUILD_SECONDS = 300.0
"""Wall-clock seconds after which a build is given up. It needs half a second of a core, which a busy machine may withhold."""
MAX_REASON = 400
"""Characters of what a compiler says: the first error is what matters."""

_library: ctypes.CDLL | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `prepare` achieved."""

    native: bool
    """Whether codecs use C from now on. If not they use PyTorch, which gives the same bits."""
    reason: str
    """One sentence for the log."""


def prepare(folder: Path) -> Prepared:
    """Load the kernels from `folder`, a cache that may be shared, after building them there if need be.

    Takes half a second of a core the first time and 10 ms after that, so call it before, or outside, an event loop.
    Any number of processes may do so at once: each builds its own file and moves it into place. A file is named for
    everything that decides its content: the sources, the flags, and all that the compiler predefines, in which are
    its version and, with -march=native, the features of this CPU.
    """
    global _library
    compiler = find_compiler()
    if compiler is None:
        return Prepared(native=False, reason=f"no C compiler found ({', '.join(COMPILERS)})")
    sources = sorted(Path(__file__).parent.parent.glob("*/*.c"))
    try:
        library = folder / f"kernels-{_key(compiler, sources)}.so"
        if not library.exists():
            _build(compiler, sources, library)
        _library = ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.decode(errors="replace").split())
        return Prepared(native=False, reason=f"{compiler} failed: {said[:MAX_REASON]}")
    except (subprocess.TimeoutExpired, OSError) as error:
        return Prepared(native=False, reason=f"the kernels cannot be built or loaded: {error}")
    return Prepared(native=True, reason=f"kernels of {library}")


def find_compiler() -> str | None:
    """Path of the C compiler that `prepare` will use; None where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@contextmanager
def without() -> Iterator[None]:
    """Codecs use PyTorch inside, whatever `prepare` has loaded. For one thread at a time."""
    global _library
    loaded, _library = _library, None
    try:
        yield
    finally:
        _library = loaded


def find(name: str, *arguments: type[Any]) -> Callable[..., None] | None:
    """The C function `void name(arguments)`, of ctypes types; None unless `prepare` has loaded the kernels."""
    if _library is None:
        return None
    function = getattr(_library, name)
    function.argtypes = arguments
    function.restype = None
    return function  # type: ignore[no-any-return]  # ctypes has no type for functions


def address(view: memoryview) -> int:
    """Where a contiguous buffer, read-only or not, is in memory; good as long as `view` lives."""
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def _key(compiler: str, sources: list[Path]) -> str:
    """Hex digits for everything that the library depends on. Raises SubprocessError, OSError."""
    predefined = _run(compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull)
    headers = sorted(Path(__file__).parent.glob("*.h"))
    parts = [" ".join(FLAGS).encode(), predefined, *(file.read_bytes() for file in (*headers, *sources))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(compiler: str, sources: list[Path], library: Path) -> None:
    """Compile into `library`, which is complete if it exists. Raises SubprocessError, OSError."""
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        _run(compiler, *FLAGS, "-shared", "-o", str(built), *map(str, sources))
        with built.open("rb+") as file:
            os.fsync(file.fileno())  # a power failure must not leave an empty file under the final name
        built.replace(library)


def _run(*command: str) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECONDS, check=True)
    return done.stdout
