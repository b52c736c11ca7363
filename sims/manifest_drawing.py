"""The manifest of a drawn scenario: what a swarm may agree on, but for what only makes a run longer or a model larger.

Whatever is drawn is valid: options that rule each other out are not offered together (`protocol/manifest.py` says which do). Models are as small as can be: what is
looked for is in the protocol, and thousands of its rounds have to fit in seconds.
"""

from typing import Any, Literal

import msgspec

from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import (
    CHECKFREE,
    CHECKFREE_PLUS,
    LADDER,
    MIN_TWIN_STAGES,
    FeedbackSpec,
    InnerSpec,
    OuterSpec,
    PipelineSpec,
)
from farflung.sims.choices import Choices

Kind = Literal["cost", "real", "pipeline"]

Sections = dict[str, dict[str, Any]]

SEQ_LEN = 16

WIDTH = 16
"""Of the model."""

SMALL = {"seq_len": SEQ_LEN, "dim": WIDTH, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24}
"""A model of some 8,000 parameters, which trains in milliseconds."""

MAX_STAGES = MIN_TWIN_STAGES
"""The fewest with which all of a manifest can be drawn."""

CODECS = (
    "int8(block=128)",
    "fp32",
    "deadzone(bits=2.0)",
    "trellis(bits=0.9)",
    "int4(block=64)",
    "bf16",
    "sign",
    "topk(chunk=512,k=64,bits=2)",
    "stat2",
    "int8(block=64)+zstd",
    "1d:fp32,int4(block=128)",
)

BOUNDARIES = ("fp32", f"tokenint8(width={WIDTH})", f"rotint4(width={WIDTH},block={WIDTH})")
"""Codecs of activations and their gradients."""


def draw_manifest(choices: Choices, kind: Kind) -> Sections:
    """Sections and keys as in a scenario's file; those that have their default are left out."""
    stages = choices.pick("pipeline/stages", range(2, MAX_STAGES + 1)) if kind == "pipeline" else 1
    samples = choices.maybe("swarm/samples", (4, 8) if kind == "pipeline" else (4, 2, 8, 1))
    model = _model(choices, kind, stages)
    sections: Sections = {
        "model": model,
        "swarm": _swarm(choices, kind) | {"batch_tokens": samples * SEQ_LEN},
        "inner": {"warmup_steps": 5},
        "outer": _outer(choices),
    }
    if kind != "cost":
        sections["feedback"] = _feedback(choices, sections["swarm"])
        sections["swarm"] |= {key: choices.maybe(f"swarm/{key}", CODECS) for key in ("uplink_codec", "downlink_codec")}
        sections["inner"] |= {"optimizer": choices.maybe("inner/optimizer", ("adamw", "muon")), "lr": 0.002}
    if kind == "pipeline":
        sections["pipeline"] = _pipeline(choices, stages, model["num_layers"], samples) | {"stages": stages}
    return {section: kept for section, keys in sections.items() if (kept := _without_defaults(section, keys))}


def _model(choices: Choices, kind: Kind, stages: int) -> dict[str, Any]:
    if kind == "cost":
        return {"preset": "tiny", "seq_len": SEQ_LEN}
    layers = max(stages, 2) + choices.maybe("model/layers", (0, 1))
    return {"preset": "tiny", "num_layers": layers, **SMALL}


def _swarm(choices: Choices, kind: Kind) -> dict[str, Any]:
    auto = () if kind == "pipeline" else ("auto",)  # stages have their rounds at the same steps
    steps: int | str = choices.maybe("swarm/inner_steps", (4, 2, 6, 12, *auto))
    keys: dict[str, Any] = {"inner_steps": steps}
    if steps == "auto":
        keys |= {"min_inner_steps": 4, "max_inner_steps": choices.pick("swarm/max_inner_steps", (4, 8, 12))}
    least = steps if isinstance(steps, int) else keys["min_inner_steps"]
    several = ("auto",) if steps == "auto" else ()
    fragments: int | str = choices.maybe(
        "swarm/fragments", [*(count for count in (1, 2, 3, 4) if least % count == 0), *several]
    )
    if kind != "pipeline":
        keys["fragment_pattern"] = choices.maybe("swarm/fragment_pattern", ("sequential", "strided"))
    if fragments == "auto":
        keys["max_fragments"] = choices.pick("swarm/max_fragments", (2, 4))
    lap = least // (fragments if isinstance(fragments, int) else keys["max_fragments"])
    total = choices.maybe("swarm/total_steps", (None, 40, 120, 300))
    if total is not None:
        keys["total_steps"] = total
    return keys | {
        "fragments": fragments,
        "delay_steps": choices.maybe("swarm/delay_steps", (0, *range(1, min(lap, 4)), "auto")),
        "mix": choices.maybe("swarm/mix", ("rebase", 0.5, 0.0, 1.0)),
        "min_contributors": 1 if kind == "pipeline" else choices.maybe("swarm/min_contributors", (1, 2)),
        "window_rounds": choices.maybe("swarm/window_rounds", (3, 1, 2, 8)),
        "lease_rounds": choices.maybe("swarm/lease_rounds", (3, 0, 1, 10)),
        "max_group": choices.maybe("swarm/max_group", (64, 2, 3, 5)),
        "meet_every": choices.maybe("swarm/meet_every", (1, 4, 0)),
        "min_round_s": choices.maybe("swarm/min_round_s", (2.0, 0.5, 6.0)),
        "max_round_s": choices.maybe("swarm/max_round_s", (30.0, 20.0, 60.0)),
    }


def _outer(choices: Choices) -> dict[str, Any]:
    rule = choices.maybe("outer/optimizer", ("nesterov", "sgd", "heavyball"))
    keys: dict[str, Any] = {
        "optimizer": rule,
        "lr": choices.maybe("outer/lr", (0.7, 1.0)),
        "lr_growth": choices.maybe("outer/lr_growth", (0.0, 0.25, 1.0)),
    }
    if rule == "sgd":
        return keys | {"momentum": 0.0}
    clip = choices.maybe("outer/clip", (0.0, 1e-3)) if rule == "heavyball" else 0.0
    return keys | {"momentum": choices.maybe("outer/momentum", (0.5, 0.9, 0.0)), "clip": clip}


def _feedback(choices: Choices, swarm: dict[str, Any]) -> dict[str, Any]:
    kept = ("kept",) if swarm["mix"] == "rebase" else ()
    uplink = choices.maybe("feedback/uplink", ("none", "residual", *kept))
    downlink = choices.maybe("feedback/downlink", ("none", "residual"))
    keys: dict[str, Any] = {"uplink": uplink, "downlink": downlink}
    if "residual" in (uplink, downlink):
        keys["decay"] = choices.maybe("feedback/decay", (1.0, 0.9))
        keys["after_rounds"] = choices.maybe("feedback/after_rounds", (0, 2, 10))
    if uplink == "kept":
        keys["last_codec"] = choices.maybe("feedback/last_codec", ("", "fp32", "int8"))
    return keys


def _pipeline(choices: Choices, stages: int, layers: int, samples: int) -> dict[str, Any]:
    skip = choices.maybe("pipeline/skip", (0.0, 1.0 / stages)) if stages > 2 else 0.0
    routing = choices.maybe("pipeline/routing", ("planned", "dynamic"))
    visits = stages - round(skip * stages)
    swaps = choices.maybe("pipeline/swaps", (0, 1, 2)) if routing == "planned" and visits >= 3 else 0
    rules = [LADDER]
    if layers % stages == 0:
        rules.append(CHECKFREE)
        if stages >= MIN_TWIN_STAGES and routing == "planned" and not (skip or swaps):
            rules.append(CHECKFREE_PLUS)
    recovery = choices.maybe("pipeline/recovery", rules)
    # with one lane, which one peer with one slot has, all go the same way: past one stage for ever, or never through swapped ones
    least = 2 if skip or recovery == CHECKFREE_PLUS else 1
    return {
        "skip": skip,
        "routing": routing,
        "swaps": swaps,
        "microbatches": choices.maybe(
            "pipeline/microbatches", [m for m in (4, 2, 8, 1) if samples % m == 0 and m >= least]
        ),
        "slots": choices.maybe("pipeline/slots", [slots for slots in (3, 1, 2) if slots >= least]),
        "policy": choices.maybe("pipeline/policy", ("backward", "arrival")),
        "shadows": 0.0 if recovery != LADDER else choices.maybe("pipeline/shadows", (0.018, 0.0, 0.3, 1.0)),
        "recovery": recovery,
        "forward_codec": choices.maybe("pipeline/forward_codec", BOUNDARIES),
        "backward_codec": choices.maybe("pipeline/backward_codec", BOUNDARIES),
    }


SPECS: dict[str, type[msgspec.Struct]] = {
    "swarm": Manifest,
    "inner": InnerSpec,
    "outer": OuterSpec,
    "feedback": FeedbackSpec,
    "pipeline": PipelineSpec,
}


def _without_defaults(section: str, keys: dict[str, Any]) -> dict[str, Any]:
    fields = msgspec.structs.fields(SPECS[section]) if section in SPECS else ()
    defaults = {field.name: field.default for field in fields}
    return {key: value for key, value in keys.items() if key not in defaults or defaults[key] != value}
