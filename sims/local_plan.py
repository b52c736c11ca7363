"""What of a scenario real processes of one machine can play, and what each of them is told.

Refused is what cannot be done without another clock, another network or another machine than the one at hand, each with what to do instead. Speeds,
links, distances, sessions, traces, kills, losses of power (all of a node's processes are stopped, and killed before it comes back), pauses and
goodbyes are as in the file.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from farflung.protocol.errors import ConfigError
from farflung.protocol.manifest import Manifest
from farflung.protocol.naming import check_name
from farflung.sims import regions
from farflung.sims.costs import Costs
from farflung.sims.local_node import Orders
from farflung.sims.scenario import Scenario
from farflung.sims.scenario_plan import BYTES_PER_MBIT, training_seconds

MAX_PROCESSES = 32

NODE_BYTES = 500e6
"""Memory of a node with a small model, not counting what it shares: a Python with torch 420 MB, libp2p 66 MB, its guard 5 MB."""

VIRTUAL = "or run it under virtual time with `farflung sim run`"

IMPOSSIBLE = {
    "partition": "local nodes share one loopback; leave it out",
    "apart": "local nodes share one loopback; leave it out",
    "slow": "give these peers a class of their own with a lower tokens_per_s",
    "delay": "give these peers a class of their own with a higher latency_ms",
    "drop": "TCP loses nothing on a loopback; leave it out",
    "duplicate": "TCP doubles nothing; leave it out",
    "skew": "all processes have this machine's clock; leave it out",
}


def check_playable(scenario: Scenario, *, free_bytes: float) -> None:
    """Whether processes can play it on a machine with so much free memory. Raises ConfigError that names the remedy."""
    reason = next(_hindrances(scenario, free_bytes), None)
    if reason is not None:
        raise ConfigError(f"{scenario.name} cannot be run with local processes: {reason}")
    check_name(scenario.name)


def _hindrances(scenario: Scenario, free_bytes: float) -> Iterator[str]:
    if scenario.mode != "real":
        yield f'mode = "cost" trains nothing, processes do; set mode = "real" and a small manifest.model.preset, {VIRTUAL}'
    if scenario.num_peers > MAX_PROCESSES:
        yield f"{scenario.num_peers} peers, and at most {MAX_PROCESSES} processes; lower peers.count, {VIRTUAL}"
    if scenario.num_peers * NODE_BYTES > free_bytes:
        yield (
            f"{scenario.num_peers} processes take some {scenario.num_peers * NODE_BYTES / 1e9:.1f} GB of memory, and "
            f"{free_bytes / 1e9:.1f} GB are free; lower peers.count, {VIRTUAL}"
        )
    for key in ("loss", "duplicate", "reorder", "clock_skew_s"):
        if getattr(scenario.network, key):
            yield f"network.{key}: processes have this machine's network and clock; leave it out, {VIRTUAL}"
    if scenario.network.greetings != "sent":
        yield f'network.greetings = "{scenario.network.greetings}": processes send each greeting; leave it out, {VIRTUAL}'
    if scenario.costs != Costs():
        yield f"[costs]: processes take what they take on this machine; leave it out, {VIRTUAL}"
    for peer_class in scenario.peers:
        if peer_class.nat != "none" or peer_class.attacks:
            key = "attacks" if peer_class.attacks else "nat"
            yield f"{key} of peers {peer_class.name!r}: local processes are honest and reach each other; leave it out, {VIRTUAL}"
    for number, happening in enumerate(scenario.happenings):
        if happening.what in IMPOSSIBLE:
            yield f"happenings[{number}].what = {happening.what!r}: {IMPOSSIBLE[happening.what]}, {VIRTUAL}"
    fastest = max(c.up_mbit for c in scenario.peers) * BYTES_PER_MBIT
    for here, there in combinations(sorted({region for c in scenario.peers for region in c.regions}), 2):
        if regions.between(here, there)[1] < fastest:
            yield (
                f"up_mbit is above the {regions.between(here, there)[1] / BYTES_PER_MBIT:.0f} Mbit/s between {here} and "
                f"{there}, which local links do not have; lower it, choose nearer regions, {VIRTUAL}"
            )


def check_speed(scenario: Scenario, manifest: Manifest, *, step_s: float, cores: int) -> None:
    """Whether this machine, which needs `step_s` for a step on one core, can train for all peers at once. Raises ConfigError."""
    wanted = sum(c.count * step_s / training_seconds(manifest, c.tokens_per_s)["train"] for c in scenario.peers)
    if wanted > cores:
        raise ConfigError(
            f"{scenario.name} cannot be run with local processes: its peers train at speeds that take {wanted:.1f} processors here, "
            f"and there are {cores}; lower tokens_per_s by {wanted / cores:.1f} times or more, {VIRTUAL}"
        )


def orders_for(
    scenario: Scenario,
    manifest: Manifest,
    keys: Sequence[str],  # public keys in hex, by number
    peer: int,
    *,
    invitation: str,
    port: int,
    meter: bool,
) -> Orders:
    """What peer number `peer` is told."""
    roster = scenario.roster()
    own, _, here = roster[peer]
    training = training_seconds(manifest, own.tokens_per_s)
    away = {
        key: ((own.latency_ms + other.latency_ms) / 1000.0) + regions.between(here, there)[0]
        for key, (other, _, there) in zip(keys, roster, strict=True)
    }
    return Orders(
        invitation=invitation,
        port=port,
        up_mbit=own.up_mbit,
        down_mbit=own.down_mbit,
        train_s=training["train"],
        token_s=1.0 / own.tokens_per_s,
        stage=own.stage,
        region=here.lower(),
        evaluate_s=training["evaluate"],
        one_way_s={key: seconds for key, seconds in away.items() if key != keys[peer]},
        jitter_s=scenario.network.jitter_ms / 1000.0,
        meter=meter,
    )
