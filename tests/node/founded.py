"""A swarm founded on a temporary machine, over a text of a few lines."""

from pathlib import Path
from typing import Any

import pytest

from farflung.node import daemon, dht
from farflung.node.options import CreatedSwarm, CreateOptions
from farflung.protocol.manifest import Manifest, open_manifest

TEXT = "".join(f"line {i}: the swarm trains on text number {i * i}.\n" for i in range(2000))

TOML = """
[model]
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_dim = 64
seq_len = 32

[inner]
lr = 3e-3
warmup_steps = 10

[outer]
momentum = 0.5

[swarm]
total_steps = {steps}
inner_steps = 60
delay_steps = 5
batch_tokens = 128
min_contributors = 2
min_round_s = 1.0
"""


def wait_for_the_dht(patch: pytest.MonkeyPatch) -> None:
    """Of engines that are made from now on: that no answer comes is no objection to a name, and a busy machine may take more than the usual time."""
    patch.setattr(dht, "RPC_S", 20.0)


def found(tmp_path: Path, corpus: Path, *, steps: int = 6000, **flags: Any) -> tuple[CreatedSwarm, Manifest]:
    config = tmp_path / "swarm.toml"
    config.write_text(TOML.format(steps=steps))
    options = CreateOptions(
        **{"name": "alpha", "method": "none", "config": config, "data": str(corpus), "home": tmp_path / "a", **flags}
    )
    made = daemon.create(options)
    return made, open_manifest(made.manifest.read_bytes(), swarm=bytes.fromhex(made.hash_hex), peer=None)
