"""What we ask of codecs, checked against the rows of a run of `farflung bench codec`."""

from collections.abc import Iterable, Sequence

from farflung.sims.check import Check
from farflung.sims.codec_methods import MEANS, OURS, Mean
from farflung.sims.codec_rows import Row
from farflung.sims.codec_sources import DELTA_ADAMW, GAUSS

QUALITY: tuple[tuple[str, float, float], ...] = (
    ("8-bit class", 4e-5, 8.2),
    ("4-bit class", 1.1e-2, 3.6),
    ("2-bit class", 0.10, 1.95),
    ("1-bit class", 0.385, 0.92),
    ("sparse", 0.89, 0.14),
)
"""(class, largest NMSE, most bits per parameter) on AdamW's pseudo-gradients."""

SPEED: tuple[tuple[str, float, float | None], ...] = (("int8", 0.8, 0.8), ("int4", 0.7, None), ("deadzone", 0.4, 0.5))
"""(codec, least encode / memcpy, least decode-add / memcpy), on the Gaussian source; the dead zone at about 1 bit."""

EAGER_SPEED = 0.3
"""Least encode / memcpy and decode-add / memcpy of what is shown without kernels."""

TIMES_HIVEMIND = 10.0
"""How much faster int8 is to be than hivemind's fastest 8-bit codec, in either direction."""

RATES = (0.14, 0.36, 0.9, 2.0, 4.0)
"""Bits per parameter at which the distance to the Gaussian bound is told."""
NEAR = 1.1
"""A row counts for a rate when its own is within this factor."""


def checks(rows: Sequence[Row]) -> list[Check]:
    """All targets, in the issue's order."""
    found = [_quality(rows, *target) for target in QUALITY]
    for kind, encode, decode_add in SPEED:
        row = speed_row(rows, kind)
        found.append(_ratio(f"{kind}: encode", encode, row, None if row is None else row.encode_ratio))
        if decode_add is not None:
            found.append(_ratio(f"{kind}: decode-add", decode_add, row, None if row is None else row.decode_add_ratio))
    for row in (row for row in rows if row.eager and row.kind == "int8"):
        found.append(_ratio(f"{row.label}: encode", EAGER_SPEED, row, row.encode_ratio))
        found.append(_ratio(f"{row.label}: decode-add", EAGER_SPEED, row, row.decode_add_ratio))
    found += _hivemind(rows)
    return found + [_mean(rows, mean) for mean in MEANS]


def speed_row(rows: Iterable[Row], kind: str) -> Row | None:
    """The Gaussian row that a speed target is about: the codec's first, or its nearest to 1 bit for the dead zone."""
    mine = [row for row in rows if row.by == OURS and row.source == GAUSS and not row.eager]
    of_kind = [row for row in mine if row.kind.partition("+")[0] == kind]
    if kind == "deadzone":
        return min(of_kind, key=lambda row: abs(row.bits_per_param - 1), default=None)
    return of_kind[0] if of_kind else None


def nearest_to_bound(rows: Iterable[Row], rate: float) -> Row | None:
    """Of our Gaussian rows at about `rate` bits per parameter, the one nearest to the rate-distortion function."""
    near = [row for row in rows if row.by == OURS and rate / NEAR <= row.bits_per_param <= rate * NEAR]
    known = [(row.bits_above_bound, row) for row in near if row.bits_above_bound is not None]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def _quality(rows: Iterable[Row], name: str, most_nmse: float, most_bits: float) -> Check:
    target = f"{name}: NMSE at most {most_nmse:g} at {most_bits:g} bits"
    fit = [
        (row.nmse, row)
        for row in rows
        if row.by == OURS and row.source == DELTA_ADAMW and row.bits_per_param <= most_bits and row.nmse is not None
    ]
    if not fit:
        return Check(target=target, measured="no codec sends so little", met=False)
    nmse, row = min(fit, key=lambda pair: pair[0])
    measured = f"{nmse:.4g} at {row.bits_per_param:.4g} bits: {row.codec}"
    return Check(target=target, measured=measured, met=nmse <= most_nmse)


def _ratio(what: str, least: float, row: Row | None, ratio: float | None) -> Check:
    target = f"{what} at least {least:g} of memcpy"
    if row is None or ratio is None:
        return Check(target=target, measured="no such codec", met=False)
    measured = f"{ratio:.2f}: {row.codec}, {row.bits_per_param:.3g} bits"
    return Check(target=target, measured=measured, met=ratio >= least)


def _hivemind(rows: Sequence[Row]) -> list[Check]:
    """Our int8 beside the fastest of hivemind's 8-bit codecs, each way."""
    int8 = speed_row(rows, "int8")
    theirs = [row for row in rows if row.by == "hivemind" and row.source == GAUSS and "8" in row.codec]
    found: list[Check] = []
    for way in ("encode", "decode-add"):
        target = f"int8 at least {TIMES_HIVEMIND:g} times as fast as hivemind's 8-bit codecs: {way}"
        field = way.replace("-", "_") + "_gbs"
        rates = [rate for rate in (getattr(row, field) for row in theirs) if rate is not None]
        if int8 is None or not rates:
            found.append(Check(target=target, measured="theirs do not do it here", met=None))
            continue
        times = getattr(int8, field) / max(rates)
        found.append(Check(target=target, measured=f"{times:.1f} times", met=times >= TIMES_HIVEMIND))
    return found


def _mean(rows: Iterable[Row], mean: Mean) -> Check:
    row = next(row for row in rows if (row.source, row.codec) == (mean.source, mean.codec))
    assert row.nmse is not None
    target = f"{mean.source}, {mean.codec}: NMSE at most {mean.most_nmse:g}"
    return Check(target=target, measured=f"{row.nmse:.3g}", met=row.nmse <= mean.most_nmse)
