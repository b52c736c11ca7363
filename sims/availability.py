"""Sessions of volunteers, drawn from published statistics: what `scenarios/trace.csv` was made with.

    python -m farflung.sims.availability --hosts 10 --hours 1.5 > sims/scenarios/trace.csv

Nobody has published when the volunteers of a training run came and went. What was measured, crawling whole swarms by the minute, is the sessions of people who share a file from home:
Stutzbach and Rejaie, "Understanding Churn in Peer-to-Peer Networks", IMC 2006. Their lengths fit Weibull distributions with shapes below 1 (most are short, a few last for
days): shape 0.59 and scale 41.9 minutes for the torrent of a game's demo, FlatOut (mean 64 minutes, median 23), 0.38 and 42.4 for Debian's (as slides on the paper quote them; that the scales are minutes is our reading, since it makes sense of the medians). We take the first. For absences they give no
distribution, and here the same one is drawn; that a host's sessions are alike, and that there are fewer at night, which they saw as well, is left out.
"""

import argparse
import random
import sys
from collections.abc import Iterator

SHAPE = 0.59
SCALE_S = 41.9 * 60.0

SHORTEST_S = 60.0
"""Shorter visits, one in ten, would end before anything has been downloaded."""


def draw_sessions(hosts: int, duration_s: float, seed: str = "trace") -> Iterator[tuple[float, float, str]]:
    """Start, end (seconds) and name of host, one host after another; nobody begins after `duration_s`."""
    for host in range(hosts):
        rng = random.Random(f"{seed}/{host}")
        now = 0.0 if host == 0 else rng.uniform(0.0, SCALE_S)
        while now < duration_s:
            length = max(SHORTEST_S, rng.weibullvariate(SCALE_S, SHAPE))
            yield round(now, 1), round(now + length, 1), f"h{host}"
            now += length + max(SHORTEST_S, rng.weibullvariate(SCALE_S, SHAPE))


def as_csv(hosts: int, duration_s: float) -> str:
    """The lines that a scenario's `trace` wants."""
    lines = [f"{start},{end},{host}" for start, end, host in draw_sessions(hosts, duration_s)]
    return "\n".join(["start_s,end_s,host", *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--hours", type=float, default=1.5)
    args = parser.parse_args()
    sys.stdout.write(as_csv(args.hosts, 3600.0 * args.hours))


if __name__ == "__main__":
    main()
