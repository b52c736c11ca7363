"""What `farflung bench quality` says about methods, for its page: settings, goals and whether they are met."""

from collections.abc import Sequence

from farflung.sims.check import Check
from farflung.sims.quality_methods import Method, Outer, Wire
from farflung.sims.quality_rows import Row
from farflung.training.rules import HeavyBall, Nesterov, OuterRule, Sgd, Sign

DEFAULT_FEWER = 1000.0
"""Times fewer bytes than data-parallel training that `default` is to send."""
THRIFTY_FEWER = 4000.0
SHARE_OF_STREAMING = 0.5
"""Of Streaming DiLoCo's gap that `default` may have."""


def settings(method: Method) -> str:
    """All of a method but its inner optimiser, in words."""
    if method.outer is None:
        return "the batch of all peers in one worker" if method.whole_batch else "one peer's share of the batch, alone"
    return f"{_timing(method.outer)}; {_rule(method.outer.rule)}; {_wire(method.outer.wire)}{_locals(method.outer)}"


def checks(rows: Sequence[Row]) -> list[Check]:
    """The goals of `default` and `thrifty` that these rows can tell."""
    by_name = {row.method: row for row in rows}
    streaming, default, thrifty = (by_name.get(name) for name in ("streaming", "default", "thrifty"))
    bound = None if streaming is None else streaming.gap_percent_same_inner
    found: list[Check] = []
    if default is not None:
        half = None if bound is None else SHARE_OF_STREAMING * bound
        found.append(_at_most("default: gap, at most half of Streaming DiLoCo's", default.gap_percent_same_inner, half))
        found.append(_at_most("default: no worse than data-parallel AdamW", default.gap_percent_adamw, 0.0))
        found.append(_fewer("default", DEFAULT_FEWER, default))
    if thrifty is not None:
        found.append(_at_most("thrifty: gap, at most Streaming DiLoCo's", thrifty.gap_percent_same_inner, bound))
        found.append(_fewer("thrifty", THRIFTY_FEWER, thrifty))
    return found


def _at_most(target: str, gap: float | None, bound: float | None) -> Check:
    if gap is None or bound is None:
        return Check(target=target, measured="a run diverged, or Streaming DiLoCo was not run", met=None)
    return Check(target=target, measured=f"{gap:+.2f} %, bound {bound:+.2f} %", met=gap <= bound)


def _fewer(name: str, least: float, row: Row) -> Check:
    target = f"{name}: at least {least:,.0f} times fewer bytes"
    ratio = row.bytes_ratio_vs_ddp_bf16 or 0.0
    return Check(target=target, measured=f"{ratio:,.0f} times", met=ratio >= least)


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
            return f"heavy ball {rule.lr:g}/{rule.momentum:g}, gap penalty {rule.penalty:g}"
        case Sign():
            return "sign of the mean times the inner rate"
    raise AssertionError(rule)


def _wire(wire: Wire) -> str:
    text = f"{wire.up} to everybody" if wire.topology == "gather" else f"{wire.up} to owners, {wire.down} back"
    if wire.feedback is not None:
        text += f", error feedback {wire.feedback:g}"
    return text + (f", the last exchange {wire.last}" if wire.last is not None else "")


def _locals(outer: Outer) -> str:
    if outer.mixing is None:
        return "; what the codec leaves out stays with the peer" if outer.kept else "; local parameters rebased"
    return f"; {outer.mixing:g} of the local parameters stays" if outer.mixing else ""
