"""One row of `farflung bench codec`: what a codec makes of a source, and how long it takes.

    bits_per_param = 8 * bytes on the wire / elements, headers included
    nmse           = sum (x - decoded)**2 / sum x**2, over all vectors of the source, in fp64
    GB/s           = 1e9 bytes of fp32 input per second of the process's CPU time, also for decoding

Copying, encoding and decode-adding take turns, so that all three meet the same machine, and each figure is a median.
CPU time of the process stands for one core, also where a baseline starts threads of its own.
"""

import math
import re
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.compression.registry import parse_codec
from farflung.sims.codec_methods import OURS, DecodeFailed, Mean, Method
from farflung.sims.codec_sources import GAUSS, SCALE, Source

REPEATS = 9
"""Most turns for one vector."""
BUDGET_S = 0.4
"""CPU seconds after which no further turn begins; shared by the vectors of a source."""
WEIGHT = 0.125
"""Of the decoded vector in a decode-add, as one of eight peers has it."""
COSINE = 0.475
"""Between two workers' pseudo-gradients, in the butterfly: as measured at H = 30 (compression digest, section 3.3)."""
PIECE = 1 << 20
"""Elements whose error is summed at a time: temporaries stay in megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One codec on one source. None: not measured, and `note` says why when one would expect it."""

    by: str
    codec: str
    source: str
    mb: float
    """fp32 megabytes (1e6 bytes)."""
    bits_per_param: float
    nmse: float | None
    bits_above_bound: float | None
    """Gaussian source only: bits_per_param - log2(1 / nmse) / 2, the distance to the rate-distortion function."""
    encode_gbs: float | None
    decode_add_gbs: float | None
    memcpy_gbs: float | None
    encode_ratio: float | None
    """To memcpy."""
    decode_add_ratio: float | None
    note: str = ""
    eager: bool = False
    """Without the C kernels."""

    @property
    def kind(self) -> str:
        """The codec without its parameters: `int4+zstd` of `int4(block=128)+zstd`."""
        return re.sub(r"\([^)]*\)", "", self.codec)

    @property
    def label(self) -> str:
        """The codec for people, with its owner's name if it is not ours."""
        if self.by != OURS:
            return f"{self.by} {self.codec}"
        return f"{self.codec}, eager" if self.eager else self.codec


def number(value: float | None, form: str) -> str:
    """The number in this format, or a dash when there is none."""
    return "-" if value is None else format(value, form)


def measure(method: Method, source: Source, *, budget_s: float = BUDGET_S) -> Row:
    """Encode and decode all vectors of a source, first for the quality, then for the time."""
    nbytes, error, power, note = 0, 0.0, 0.0, ""
    copy_s = encode_s = decode_add_s = 0.0
    for x in source.vectors:
        payload = method.encode(x)
        nbytes += method.nbytes(payload)
        try:
            error += sum_of_squares(x, minus=method.decode(payload))
        except DecodeFailed as failure:
            note = str(failure)
        power += sum_of_squares(x)
        copied, encoded, added = _seconds(method, x, decodes=not note, budget_s=budget_s / len(source.vectors))
        copy_s, encode_s, decode_add_s = copy_s + copied, encode_s + encoded, decode_add_s + added
    bits = 8 * nbytes / source.numel
    nmse = None if note else error / power
    return Row(
        by=method.by,
        codec=method.name,
        source=source.name,
        mb=source.numel * 4 / 1e6,
        bits_per_param=bits,
        nmse=nmse,
        bits_above_bound=bits + 0.5 * math.log2(nmse) if nmse and source.name == GAUSS else None,
        encode_gbs=source.numel * 4e-9 / encode_s,
        decode_add_gbs=None if note else source.numel * 4e-9 / decode_add_s,
        memcpy_gbs=source.numel * 4e-9 / copy_s,
        encode_ratio=copy_s / encode_s,
        decode_add_ratio=None if note else copy_s / decode_add_s,
        note=note,
        eager=method.eager,
    )


def _seconds(method: Method, x: Tensor, *, decodes: bool, budget_s: float) -> tuple[float, float, float]:
    """Median CPU seconds of a copy, an encode and a decode-add (0 if it cannot)."""
    clock = time.process_time
    acc = torch.zeros_like(x)
    turns: list[tuple[float, float, float]] = []
    began = clock()
    while len(turns) < REPEATS and (not turns or clock() - began < budget_s):
        start = clock()
        acc.copy_(x)
        copied = clock()
        payload = method.encode(x)
        encoded = clock()
        if decodes:
            method.decode_add_(payload, acc, WEIGHT)
        turns.append((copied - start, encoded - copied, clock() - encoded))
    copy_s, encode_s, decode_add_s = (statistics.median(column) for column in zip(*turns, strict=True))
    return copy_s, encode_s, decode_add_s


def sum_of_squares(x: Tensor, *, minus: Tensor | None = None) -> float:
    """Sum of x**2, or of (x - minus)**2, in fp64."""
    total = 0.0
    for start in range(0, x.numel(), PIECE):
        piece = x[start : start + PIECE].double()
        total += float((piece if minus is None else piece - minus[start : start + PIECE]).square().sum())
    return total


def butterfly(mean: Mean, *, numel: int) -> Row:
    """The error of a mean that goes through two codecs: each worker encodes, the owner adds and encodes once.

    Workers are Gaussian vectors [numel] with pairwise cosine COSINE; `bits_per_param` counts both ways.
    """
    up, down = parse_codec(mean.up), parse_codec(mean.down)
    generator = torch.Generator().manual_seed(4)
    common = torch.empty(numel).normal_(0, SCALE * COSINE**0.5, generator=generator)
    exact = torch.zeros(numel, dtype=torch.float64)
    total = torch.zeros(numel)
    bits = 0.0
    for _ in range(mean.peers):
        own = torch.empty(numel).normal_(0, SCALE * (1 - COSINE) ** 0.5, generator=generator).add_(common)
        exact.add_(own.double().div_(mean.peers))
        payload = up.encode(own)
        up.decode_add_(payload, total, 1 / mean.peers)
        bits += 8 * len(payload) / numel / mean.peers
    sent = down.encode(total)
    return Row(
        by=OURS,
        codec=mean.codec,
        source=mean.source,
        mb=numel * 4 / 1e6,
        bits_per_param=bits + 8 * len(sent) / numel,
        nmse=sum_of_squares(exact, minus=down.decode(sent, numel)) / sum_of_squares(exact),
        bits_above_bound=None,
        encode_gbs=None,
        decode_add_gbs=None,
        memcpy_gbs=None,
        encode_ratio=None,
        decode_add_ratio=None,
    )
