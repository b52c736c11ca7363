"""What a manifest says where the person who founds the swarm has said nothing: for `farflung create`, and for scenarios of `farflung sim`."""

import msgspec

from farflung.compression.policy import parse_policy
from farflung.node.recipe import read_recipe
from farflung.protocol.checks import nearest
from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_toml import Sections
from farflung.training.methods import METHOD_NAMES, training_method
from farflung.training.optimizers import parse_optimizer

NO_METHOD = "none"
"""Leaves all that is not said to the manifest's own defaults: DiLoCo with AdamW, as published."""

PIPELINE_INNER_STEPS = 15
"""The most between two rounds with stages: their peers drift apart in each other's activations too. The held-out loss is 5 % above that of peers that average
every step, and 15 % with rounds each 90 steps (`farflung bench drift`); a stage's round is small beside its activations."""


def fill_method(sections: Sections, name: str) -> None:
    """Write what a named method says into `sections`, which have `swarm.total_steps`, where they say nothing. Raises ConfigError, with nothing changed."""
    if name == NO_METHOD:
        return
    if name not in METHOD_NAMES:
        known = (*METHOD_NAMES, NO_METHOD)
        raise ConfigError(f"no method is called {name!r}; there are {', '.join(known)}{nearest(name, known)}")
    swarm = sections["swarm"]
    steps, fragments = swarm["total_steps"], swarm.get("fragments")
    if not isinstance(steps, int):
        raise ConfigError(f"swarm.total_steps = {steps!r}: must be a whole number")
    if fragments not in (None, "auto") and not (isinstance(fragments, int) and fragments >= 1):
        raise ConfigError(f'swarm.fragments = {fragments!r}: must be a whole number, or "auto"')
    method = training_method(name, steps)
    wanted = swarm.get("inner_steps", usual_inner_steps(sections, method.inner_steps))
    if not isinstance(wanted, int) and wanted != "auto":
        raise ConfigError(f'swarm.inner_steps = {wanted!r}: must be a whole number, or "auto"')
    late = swarm.get("delay_steps")
    usual = method.fragments_of(wanted, late if isinstance(late, int) else 0)
    said = method.sections(wanted, fragments or usual, in_stages=in_stages(sections))
    codecs = {"uplink_codec": method.codec, "downlink_codec": method.mean_codec}
    chosen = [coded_bits(f"swarm.{key}", swarm.get(key, ours)) for key, ours in codecs.items()]
    feedback, outer = sections.setdefault("feedback", {}), sections.setdefault("outer", {})
    if swarm.get("mix", "rebase") != "rebase":
        feedback.setdefault("uplink", "residual")  # nothing that is kept in parameters may be mixed away
    if feedback.get("uplink", "kept") != "kept" or min(chosen) > coded_bits("last_codec", method.last_codec):
        feedback.setdefault("last_codec", "")  # that of the method would be the coarser one
    if swarm.get("downlink_codec", method.mean_codec) != method.mean_codec:
        feedback.setdefault("downlink", "residual" if chosen[1] < FEEDBACK_BITS else "none")
    if feedback.get("uplink", "kept") == "kept":
        feedback.setdefault("after_rounds", 0)  # no sender adds what it keeps to what is owed, so nothing comes twice
    if "optimizer" in outer:
        del said["outer"]  # its figures are for its own optimiser
    elif "lr" in outer:
        outer.setdefault("lr_growth", 0.0)  # the method's is for its own rate
    if wanted == "auto":  # with fewer steps to a lap a method would not send as little as it says
        least, most = usual_inner_steps(sections, method.inner_steps), swarm.get("max_inner_steps")
        swarm.setdefault("min_inner_steps", min(least, most) if isinstance(most, int) else least)
    for section, values in said.items():
        for key, value in values.items():
            sections.setdefault(section, {}).setdefault(key, value)


FEEDBACK_BITS = 3.0
"""Codecs below so many bits per parameter get error feedback: the rest leave out so little that it is not worth its memory."""

_MANY = 1 << 20
"""Elements of a vector in which a codec's headers do not count."""


def coded_bits(key: str, spec: object) -> float:
    """Bits per parameter that the codec for what no policy names apart, as `compression` reads it, is said to take. Raises ConfigError, which names `key`."""
    try:
        codec = parse_policy(str(spec)).default
    except ValueError as error:
        raise ConfigError(f"{key} = {str(spec)[:160]!r}: {error}") from error
    return 8 * codec.expected_nbytes(_MANY) / _MANY


def usual_inner_steps(sections: Sections, inner_steps: int) -> int:
    """H where nobody has said it and so many would be usual: fewer with stages, a multiple of the fragments that somebody wants, and no more than the run has."""
    swarm = sections["swarm"]
    fragments = swarm.get("fragments", 1)
    if in_stages(sections):
        inner_steps = min(inner_steps, PIPELINE_INNER_STEPS)
    if isinstance(fragments, int) and fragments > 1:
        inner_steps = -(-inner_steps // fragments) * fragments
    return min(inner_steps, int(swarm["total_steps"]))


def in_stages(sections: Sections) -> bool:
    """Whether the model is cut into stages that different peers hold."""
    return bool(sections.get("pipeline", {}).get("stages", 1) != 1)


def with_usual_lr(manifest: Manifest) -> Manifest:
    """With a learning rate that fits the model's size and its inner optimiser, where that has a usual one. Raises ConfigError."""
    recipe = read_recipe(manifest)
    lr = parse_optimizer(manifest.inner.optimizer).usual_lr(recipe.num_parameters)
    if lr is None:
        return manifest
    return msgspec.structs.replace(manifest, inner=msgspec.structs.replace(manifest.inner, lr=lr))
