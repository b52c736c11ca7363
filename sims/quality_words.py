"""What `farflung bench quality` says about methods, for its page: settings, goals and whether they are met."""

import math
from collections.abc import Sequence
from dataclasses import replace

from farflung.sims.check import Check
from farflung.sims.quality_methods import Method, Outer, Pairs, Wire
from farflung.sims.quality_rows import Row
from farflung.sims.quality_tiers import TIERS, Tier
from farflung.sims.quality_train import ring_bits
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd, Sign

DEFAULT_FEWER = 1000.0
"""Times fewer bytes than data-parallel training that `default` is to send."""
THRIFTY_FEWER = 4000.0
SHARE_OF_STREAMING = 0.5
"""Of Streaming DiLoCo's gap that `default` may have."""
STREAMING = {"streaming": "Streaming DiLoCo's", "streaming-100": "Streaming DiLoCo's with H = 100"}
"""Rows whose gap is a bound, in words; the second has the paper's 400 times fewer bytes, and too few rounds in short runs."""


def settings(method: Method) -> str:
    """All of a method but its inner optimiser, in words."""
    if method.outer is None:
        return "the batch of all peers in one worker" if method.whole_batch else "one peer's share of the batch, alone"
    if isinstance(method.outer, Pairs):
        rule, interval = method.outer.rule, method.outer.timetable.interval
        return f"H {interval}; gossip {rule.pull:g}/{rule.momentum:g}; pseudo-gradient and outer parameters in fp32 to one other peer"
    return f"{_timing(method.outer)}; {_rule(method.outer.rule)}; {_wire(method.outer.wire)}{_locals(method.outer)}"


def checks(rows: Sequence[Row]) -> list[Check]:
    """The goals of `default` and `thrifty` that these rows can tell."""
    by_name = {row.method: row for row in rows}
    default, thrifty = by_name.get("default"), by_name.get("thrifty")
    bounds = {whose: by_name[name].gaps_same_inner for name, whose in STREAMING.items() if name in by_name}
    bounds = bounds or {STREAMING["streaming"]: ()}
    found: list[Check] = []
    if default is not None:
        for whose, gaps in bounds.items():
            halves = [None if gap is None else _half(gap) for gap in gaps]
            target = f"default: gap, at most half of {whose}, and better than a peer alone"
            found.append(_helped(_at_most(target, default.gaps_same_inner, halves), default))
        zeros = [0.0] * len(default.gaps_adamw)
        found.append(_at_most("default: no worse than data-parallel AdamW", default.gaps_adamw, zeros))
        found.append(_fewer("default", DEFAULT_FEWER, default))
    if thrifty is not None:
        for whose, gaps in bounds.items():
            target = f"thrifty: gap, at most {whose}, and better than a peer alone"
            found.append(_helped(_at_most(target, thrifty.gaps_same_inner, gaps), thrifty))
        found.append(_fewer("thrifty", THRIFTY_FEWER, thrifty))
    return found


def goals(rows: Sequence[Row], field: str) -> dict[str, tuple[float, float]]:
    """Where `default` and `thrifty` are to be in a picture of bytes and this gap: (times fewer bytes, gap in %) by name. Bounds of the gap
    with the same inner optimiser need a row of Streaming DiLoCo, the first there is."""
    bound = next((row.gap_percent_same_inner for row in rows if row.method in STREAMING), None)
    if field == "gap_percent_adamw":
        return {"default": (DEFAULT_FEWER, 0.0)}
    if bound is None:
        return {}
    return {"default": (DEFAULT_FEWER, _half(bound)), "thrifty": (THRIFTY_FEWER, bound)}


def budget(rows: Sequence[Row], tier: Tier) -> list[str]:
    """What the goals for bytes leave for a whole run, and what is spent: sentences, none without `default` and `thrifty`."""
    by_name = {row.method: row for row in rows}
    if "default" not in by_name or "thrifty" not in by_name:
        return []

    def left(of: Tier, fewer: float) -> float:
        """Bits per parameter that one peer may send, to each other peer, in all rounds of the run together."""
        return ring_bits(of.peers) / fewer * (of.steps - of.warm_steps) / (2 * (of.peers - 1))

    def spent(name: str) -> float:
        return by_name[name].bits_per_param_per_step * (tier.steps - tier.warm_steps) / (2 * (tier.peers - 1))

    others = [f"{left(of, DEFAULT_FEWER):.3g} and {left(of, THRIFTY_FEWER):.3g} in {of.name}" for of in TIERS.values()]
    return [
        f"A run of {tier.steps - tier.warm_steps} steps leaves little to send: {DEFAULT_FEWER:,.0f} times fewer bytes are "
        f"{left(tier, DEFAULT_FEWER):.3g} bits per parameter for all its rounds together, {THRIFTY_FEWER:,.0f} times fewer "
        f"{left(tier, THRIFTY_FEWER):.3g}. `default` spends {spent('default'):.3g} and `thrifty` {spent('thrifty'):.3g} (one way; the table counts both).",
        f"The longer the run, the more the same ratios leave: {'; '.join(others)}.",
    ]


def _half(gap: float) -> float:
    """Of a gap; one below zero is asked for whole, for half of it would be more."""
    return min(gap, SHARE_OF_STREAMING * gap)


def _at_most(
    target: str,
    gaps: Sequence[float | None],  # by seed, from 0 on
    bounds: Sequence[float | None],  # the same
) -> Check:
    """Met or missed where all seeds say the same. Where they differ, the mean says nothing."""
    pairs = [(gap, bound) for gap, bound in zip(gaps, bounds, strict=False) if gap is not None and bound is not None]
    if not pairs or len(pairs) < len(gaps):
        return Check(target=target, measured="a run diverged, or Streaming DiLoCo was not run", met=None)
    met = [gap <= bound for gap, bound in pairs]
    gap, bound = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    above = f", {gap - bound:.2f} points above" if gap > bound else ""
    apart = ", ".join(f"{gap - bound:+.2f}" for gap, bound in pairs)
    told = all(met) or not any(met)
    return Check(
        target=target,
        measured=f"{gap:+.2f} %, bound {bound:+.2f} %{above}; gap less bound by seed: {apart}",
        met=met[0] if told else None,
        untold="seeds differ",
    )


def _helped(check: Check, row: Row) -> Check:
    """The same, and the peers' help has to have arrived: where Streaming DiLoCo's gap is that of a peer alone or more, silence would meet it."""
    if check.met is None:
        return check
    if row.recovered is None:
        return replace(check, measured=f"{check.measured}; a peer alone was not run, or diverged", met=None)
    said = f"{check.measured}; recovered {row.recovered:.2f}" + (
        "" if row.recovered > 0 else ", no better than a peer alone"
    )
    return replace(check, measured=said, met=check.met and row.recovered > 0)


def _fewer(name: str, least: float, row: Row) -> Check:
    target = f"{name}: at least {least:,.0f} times fewer bytes"
    ratio = row.bytes_ratio_vs_ddp_bf16 or 0.0
    short = f", {least / ratio:.1f} times too many bytes" if 0.0 < ratio < least else ""
    return Check(target=target, measured=f"{ratio:,.0f} times{short}", met=ratio >= least)


def _timing(outer: Outer) -> str:
    table = outer.timetable
    text = f"H {table.interval}"
    if table.fragments > 1:
        text += f", {table.fragments} fragments, {outer.pattern}"
    if table.delay:
        text += f", applied {table.delay} steps late" if table.delay > 1 else ", applied a step late"
    return text + (", eager" if outer.eager else "")


def _rule(rule: OuterRule) -> str:
    match rule:
        case Sgd():
            return f"averaging, lr {rule.lr:g}"
        case Nesterov():
            return f"Nesterov {rule.lr:g}/{rule.momentum:g}"
        case HeavyBall():
            gap = f", gap penalty {rule.penalty:g}" if rule.penalty else ""
            return f"heavy ball {rule.lr:g}/{rule.momentum:g}{gap}"
        case Sign():
            return "sign of the mean times the inner rate"
    raise AssertionError(rule)


def _wire(wire: Wire) -> str:
    text = f"{wire.up} to owners, {wire.down} back" if wire.topology == "butterfly" else f"{wire.up} to everybody"
    if wire.topology == "radial":
        text += ", length and direction merged apart"
    if wire.feedback is not None:
        text += f", error feedback {wire.feedback:g}" + (
            f" of {wire.cap:g} norms at most" if math.isfinite(wire.cap) else ""
        )
    if wire.down_feedback is not None:
        text += f", of means error feedback {wire.down_feedback:g}"
    return text + (f", the last exchange {wire.last}" if wire.last is not None else "")


def _locals(outer: Outer) -> str:
    if outer.mixing is None:
        return "; what the codec leaves out stays with the peer" if outer.kept else "; local parameters rebased"
    return f"; {outer.mixing:g} of the local parameters stays" if outer.mixing else ""
