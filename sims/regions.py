"""Latency and bandwidth between twelve regions of the internet, as SkipPipe measured them between Google's data centres.

Source: the table of 2505.18880's repository, digest `pipeline.md` §1.5, symmetric: milliseconds one way, GiB/s of one connection. Its entry for
the Netherlands and London is a hundredth of what CheckFree's copy of the same table says and of what their neighbours have; ours is CheckFree's.
Within a region there is a millisecond and no limit but the access links.
"""

import math

NAMES = (
    "Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "Netherlands", "Oregon", "Singapore", "Taiwan", "London", "Australia",
)  # fmt: skip

_TABLE = """
41/.0199  4/.2425  49/.0283  112/.0117  70/.0194  3/.2425  66/.0209  83/.0161  105/.0125  3.5/.2425  129/.0098
44/.0319  14/.0757  74/.0181  35/.0305  42/.0250  30.5/.0471  107/.0119  89/.0147  38.5/.0364  98/.0132
53.5/.0266  112/.0111  73/.0182  3.5/.2425  68/.0149  80/.0125  102/.0126  6.6/.1888  125.5/.0105
72.5/.0140  23.4/.0615  51/.0274  19.3/.0903  101.5/.0126  88/.0128  48.1/.0219  84/.0112
50/.0278  108.5/.0114  46.2/.0305  35.6/.0390  19.2/.0767  107/.0089  58/.0138
71.5/.0143  12.4/.1185  79.5/.0168  64/.0162  68/.0149  69/.0146
67/.0204  81.5/.0164  105.5/.0120  4.8/.02368  128/.0095
78.5/.0168  59.5/.0233  64/.0212  68/.0146
23.2/.0619  85/.0157  48/.0298
109.5/.0090  67/.0210
132/.0094
"""
"""Row r, from `NAMES[r]` to each later name."""

HOME = (0.001, math.inf)
"""Within a region."""


def _read() -> dict[tuple[str, str], tuple[float, float]]:
    links: dict[tuple[str, str], tuple[float, float]] = {}
    for row, line in enumerate(_TABLE.strip().splitlines()):
        for name, entry in zip(NAMES[row + 1 :], line.split(), strict=True):
            milliseconds, gib_per_s = map(float, entry.split("/"))
            link = milliseconds / 1000.0, gib_per_s * 2**30
            links[NAMES[row], name] = links[name, NAMES[row]] = link
    return links


LINKS = _read()


def between(a: str, b: str) -> tuple[float, float]:
    """Latency one way in seconds, and bytes per second of one connection, between two regions. Raises KeyError for an unknown one."""
    return HOME if a == b else LINKS[a, b]
