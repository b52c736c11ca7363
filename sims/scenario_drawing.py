"""Whole scenarios, drawn: peers of all kinds, their links, routers, regions, lives and attacks, what a swarm has agreed on, what is scripted, and a calm in the end.

What `farflung sim fuzz` looks for failures in. A scenario is made of `choices`, in each of which 0 is the simplest, so that one that fails can be made small (`shrinking`); the
simplest of all is one class of peers which train, and to which nothing happens. Early seeds draw small ones, later ones more and more (`size_of`).

In the calm everybody is back (`Scenario.calm_s`). It is so long that what is slow here is over by then: the slowest peers need four seconds for a step, and the
longest lap has twelve of them. Nor are rounds quicker than links: a newcomer whose link cannot carry the means of all rounds never catches up, as is known.
"""

from typing import Literal

import msgspec

from farflung.node.manifest_filling import NO_METHOD
from farflung.sims import regions
from farflung.sims.attacks import Attack
from farflung.sims.choices import Choices
from farflung.sims.costs import Costs
from farflung.sims.happenings import REJOIN_S, Happening, What
from farflung.sims.manifest_drawing import Kind, Sections, draw_manifest
from farflung.sims.nat import Nat
from farflung.sims.scenario import SAYS_GOODBYE, Lasting, Network, PeerClass, Scenario

KINDS: tuple[Kind, ...] = ("cost",) * 5 + ("real",) * 2 + ("pipeline",) * 3
"""As often as they are drawn: what trains takes ten times as long to play, and what is broken in the protocol shows without."""

MAX_SIZE = 8

GROWS_EVERY = 40
"""Seeds to one more of everything."""

BEGIN_S = 60
"""Before anything is scripted: a swarm is founded, and has its first rounds."""

REPLICAS_CALM_S, PIPELINES_CALM_S = 140.0, 1200.0
"""Of the calm, without what rounds may last; of a pipeline it is over when all is well (docs/scenarios.md), and members that were started again without
a quorum wait for ten minutes (`lives.STARTING_S`)."""

WHATS: tuple[What, ...] = (
    "kill",
    "power",
    "leave",
    "pause",
    "partition",
    "slow",
    "delay",
    "drop",
    "duplicate",
    "skew",
    "join",
    "apart",
)

ATTACKS: tuple[Attack, ...] = (
    "noise",
    "forge",
    "replay",
    "oversize",
    "stale",
    "garble",
    "swarm",
    "version",
    "equivocate",
)

GREETINGS: tuple[Literal["sent", "reckoned"], ...] = ("sent", "reckoned")

JOIN_S = ((0.0, 0.0), (0.0, 10.0), (0.0, 60.0), (40.0, 100.0))

NATS: tuple[Nat, ...] = ("none", "cone", "symmetric")


def size_of(seed: int) -> int:
    """How much a seed may draw: 2 to MAX_SIZE."""
    return min(MAX_SIZE, 2 + seed // GROWS_EVERY)


def draw_scenario(seed: int, choices: Choices) -> Scenario:
    """The scenario of a seed, or with fixed choices a smaller one."""
    size = size_of(seed)
    kind = KINDS[choices.below("kind", len(KINDS))]
    manifest = draw_manifest(choices, kind)
    peers = _peers(choices, kind, manifest, size)
    happenings, over_s = _happenings(choices, peers, size)
    busy_s = max(over_s, max(one.join_s[1] for one in peers))  # with a calm nobody may join later
    calm_s = 0.0
    if choices.chance("calm", 0.8):
        longest_s = manifest["swarm"]["max_round_s"]
        calm_s = PIPELINES_CALM_S if kind == "pipeline" else REPLICAS_CALM_S + 4 * longest_s
    drawn = Scenario(
        about=f"Drawn by `farflung sim fuzz` from seed {seed}.",
        name=f"fuzz-{seed}",
        mode="cost" if kind == "cost" else "real",
        seed=seed,
        duration_s=busy_s + 20.0 * (1 + choices.below("tail", size)) + calm_s,
        calm_s=calm_s,
        method=NO_METHOD,
        manifest=manifest,
        peers=peers,
        network=_network(choices, kind),
        costs=Costs(
            start_s=choices.maybe("costs/start_s", (0.0, 3.0)), message_s=choices.maybe("costs/message_s", (0.0, 0.02))
        ),
    )
    return msgspec.structs.replace(drawn, happenings=tuple(one for one in happenings if not drawn.is_idle(one)))


# ---- who ---------------------------------------------------------------------------------------------------------------


def _peers(choices: Choices, kind: Kind, manifest: Sections, size: int) -> tuple[PeerClass, ...]:
    stages = manifest.get("pipeline", {}).get("stages", 1)
    batch_tokens = manifest["swarm"]["batch_tokens"]
    classes = []
    for number in range(1 + size // 3):
        if number and not choices.chance(f"peers/{number}", 0.5):
            continue
        least = max(stages, manifest["swarm"].get("min_contributors", 1)) if number == 0 else 1
        classes.append(_peer_class(choices, number, kind, stages, least, batch_tokens, size))
    return tuple(classes)


def _peer_class(
    choices: Choices, number: int, kind: Kind, stages: int, least: int, batch_tokens: int, size: int
) -> PeerClass:
    """`least`: of its peers. The first one founds the swarm, can be dialled, and is honest; so many are needed for rounds."""
    own = f"peers/{number}"
    first = number == 0
    step_s = choices.maybe(f"{own}/step_s", (1.0, 1.5, 2.0, 4.0))
    session = _lasting(choices, f"{own}/session", (60.0, 20.0, 150.0))
    attacks: tuple[Attack, ...] = ()
    if not first and kind != "pipeline" and choices.chance(f"{own}/attacks"):
        attacks = tuple(attack for attack in ATTACKS if choices.chance(f"{own}/attacks/{attack}"))
    return PeerClass(
        name="abcd"[number],
        count=least + choices.below(f"{own}/count", 2 + size // 2),
        tokens_per_s=batch_tokens / step_s,
        up_mbit=choices.maybe(f"{own}/up_mbit", (20.0, 5.0, 100.0, 1000.0)),
        down_mbit=choices.maybe(f"{own}/down_mbit", (100.0, 20.0, 1000.0)),
        latency_ms=choices.maybe(f"{own}/latency_ms", (5.0, 0.0, 25.0, 75.0, 150.0)),
        nat="none" if first else choices.maybe(f"{own}/nat", NATS),
        attacks=attacks,
        stage=None if first or kind != "pipeline" else choices.maybe(f"{own}/stage", (None, *range(stages))),
        regions=tuple(dict.fromkeys(choices.maybe(f"{own}/regions/{n}", regions.NAMES) for n in range(3))),
        join_s=choices.maybe(f"{own}/join_s", JOIN_S[:2] if first else JOIN_S),
        session=session,
        absence=None if session is None else _lasting(choices, f"{own}/absence", (20.0, 60.0)),
        says_goodbye=choices.maybe(f"{own}/says_goodbye", (SAYS_GOODBYE, 0.0, 1.0)) if session else SAYS_GOODBYE,
    )


def _lasting(choices: Choices, name: str, means_s: tuple[float, ...]) -> Lasting | None:
    if not choices.chance(name):
        return None
    mean_s = choices.pick(f"{name}/mean_s", means_s)
    shape = choices.maybe(f"{name}/shape", (1.0, 0.6))
    return Lasting(kind="exponential" if shape == 1.0 else "weibull", mean_s=mean_s, shape=shape)


def _network(choices: Choices, kind: Kind) -> Network:
    return Network(
        loss=choices.maybe("network/loss", (0.0, 0.01, 0.05, 0.1)),
        duplicate=choices.maybe("network/duplicate", (0.0, 0.05, 0.3)),
        reorder=choices.maybe("network/reorder", (0.0, 0.1, 0.5)),
        jitter_ms=choices.maybe("network/jitter_ms", (5.0, 0.0, 50.0, 200.0)),
        clock_skew_s=choices.maybe("network/clock_skew_s", (0.0, 1.0, 10.0)),
        # in a pipeline each is sent; where models train, greetings are not what takes long
        greetings=choices.maybe("network/greetings", GREETINGS) if kind == "cost" else "sent",
    )


# ---- what happens ------------------------------------------------------------------------------------------------------


def _happenings(choices: Choices, peers: tuple[PeerClass, ...], size: int) -> tuple[tuple[Happening, ...], float]:
    """And when the last of them is over. Each begins some time after the one before began."""
    at, over_at = float(BEGIN_S), float(BEGIN_S)
    happenings = []
    for number in range(size + 4):
        own = f"happening/{number}"
        if not choices.chance(own, 0.6):
            continue
        at += choices.below(f"{own}/gap_s", 20)
        happening = _happening(choices, own, at, peers)
        happenings.append(happening)
        over_at = max(over_at, at + (happening.for_s or 0.0))
    return tuple(happenings), over_at


def _happening(choices: Choices, own: str, at: float, peers: tuple[PeerClass, ...]) -> Happening:
    what = choices.pick(f"{own}/what", WHATS)
    everybody = what in ("drop", "duplicate") or (what == "delay" and choices.chance(f"{own}/everybody"))
    labels = [
        f"{one.name}/{index}" for index in range(max(one.count for one in peers)) for one in peers if index < one.count
    ]
    whole = [one.name for one in peers if one.count > 1]
    places = [f"region:{place}" for place in dict.fromkeys(r for one in peers for r in one.regions[: one.count])]
    named = [] if everybody else [choices.pick(f"{own}/whom", [*labels, *whole, *places])]
    if what == "apart":
        named.append(choices.pick(f"{own}/and", labels))
    whom = tuple(dict.fromkeys(named))
    for_s: float | None = None
    for_good = what in ("kill", "power", "leave", "partition", "apart", "pause") and choices.chance(
        f"{own}/for good", 0.2
    )
    if what not in ("skew", "join") and not for_good:
        least_s = REJOIN_S if what in ("kill", "power", "leave") else 0.0
        for_s = max(least_s, 5.0 + choices.below(f"{own}/for_s", 60))
    much: dict[str, float] = {}
    if what == "slow":
        much["factor"] = choices.maybe(f"{own}/factor", (4.0, 10.0))
    elif what in ("drop", "duplicate"):
        much["probability"] = choices.maybe(f"{own}/probability", (0.3, 0.6))
    elif what in ("delay", "skew"):
        much["seconds"] = choices.maybe(f"{own}/seconds", (1.0, 0.2, 3.0))
    share = choices.maybe(f"{own}/share", (1.0, 0.5)) if whom else 1.0
    return Happening(at=at, what=what, peers=whom, share=share, for_s=for_s, **much)
