"""What `farflung bench recovery` is held to, whether its rows show it, and how it writes figures."""

from collections.abc import Mapping, Sequence

from farflung.sims.check import Check
from farflung.sims.recovery_rows import Row, Single, by_method
from farflung.sims.recovery_tiers import Tier

MOST_GAP_PERCENT = 1.0
"""Of our final loss, at every rate."""
MOST_KEPT_PERCENT = 2.0
"""Of the pipeline's bytes, for shadows."""
PUBLISHED_RATE = 0.10
PUBLISHED_ORDER = ("checkfree+", "checkfree", "redundant", "checkpoint")
"""By hours to the target at 10 % failures (digest, 2.6): 367.8, 405.9, 419.6, 621.7."""


def checks(rows: Sequence[Row], once: Sequence[Single], tier: Tier) -> list[Check]:
    """The goals that these rows can tell."""
    found = [_order(once), _often(rows, max(tier.rates)), _ends(once), _ranking(rows)]
    for rate in tier.rates:
        found += _ours(rows, rate)
    return found


def _order(once: Sequence[Single]) -> Check:
    left = {one.rung: one.left for one in once if one.event == "interior"}
    names = ("neighbour mean", "copy", "random")
    return _ascending(
        "one interior stage: weighted mean better than copy better than random",
        {name: left[name] for name in names if name in left},
        "{:+.4f} nats",
    )


def _often(rows: Sequence[Row], rate: float) -> Check:
    at = by_method(rows, rate)
    names = ("checkfree", "copy", "random")
    gaps: dict[str, float | None] = {name: at[name].gap_percent for name in names if name in at}
    return _ascending(f"whole runs at {100 * rate:g} %: the same order", gaps, "{:+.2f} %")


def _ascending(target: str, values: Mapping[str, float | None], form: str) -> Check:
    known = [value for value in values.values() if value is not None]
    told = [f"{name} {'diverged' if value is None else form.format(value)}" for name, value in values.items()]
    met = known == sorted(known) if len(known) == len(values) == 3 else None
    return Check(target=target, measured=", ".join(told), met=met)


def _ends(once: Sequence[Single]) -> Check:
    left = {one.rung: one.left for one in once if one.event == "end"}
    twin, anew = left.get("swap twin"), left.get("random")
    known = twin is not None and anew is not None
    return Check(
        target="CheckFree+ recovers first and last stages: better than a random stage",
        measured=f"{twin:+.4f} against {anew:+.4f} nats" if known else "no figures",
        met=twin < anew if twin is not None and anew is not None else None,
    )


def _ranking(rows: Sequence[Row]) -> Check:
    at = by_method(rows, PUBLISHED_RATE)
    hours = {name: at[name].hours_to_target for name in PUBLISHED_ORDER if name in at}
    told = [f"{name} {'never' if value is None else f'{value:.2f} h'}" for name, value in hours.items()]
    order = [float("inf") if value is None else value for value in hours.values()]
    return Check(
        target=f"at 10 %: {' before '.join(PUBLISHED_ORDER)} at the target",
        measured=", ".join(told),
        met=order == sorted(order) if len(order) == len(PUBLISHED_ORDER) else None,
    )


def _ours(rows: Sequence[Row], rate: float) -> list[Check]:
    at = by_method(rows, rate)
    ours, name = at["ours"], f"ours at {100 * rate:g} %"
    others = {row.method: row.hours_to_target for row in at.values() if row.rate == rate and row.method != "ours"}
    reached = {method: hours for method, hours in others.items() if hours is not None}
    best = min(reached, key=lambda method: reached[method], default=None)
    mine = ours.hours_to_target
    faster = f"{'never' if mine is None else f'{mine:.2f} h'}, best of the others "
    faster += "never" if best is None else f"{reached[best]:.2f} h ({best})"
    gap = ours.gap_percent
    return [
        Check(
            target=f"{name}: final loss within {MOST_GAP_PERCENT:g} % of no failures",
            measured="diverged" if gap is None else f"{gap:+.2f} %",
            met=gap is not None and gap <= MOST_GAP_PERCENT,
        ),
        Check(
            target=f"{name}: shadows at most {MOST_KEPT_PERCENT:g} % of the bytes",
            measured=f"{ours.kept_percent:.2f} %",
            met=ours.kept_percent <= MOST_KEPT_PERCENT,
        ),
        Check(
            target=f"{name}: first at the target",
            measured=faster,
            met=mine is not None and (best is None or mine < reached[best]),
        ),
    ]


def number_or_dash(value: float | None, spec: str) -> str:
    """A figure that there may be none of."""
    return "-" if value is None else f"{value:{spec}}"
