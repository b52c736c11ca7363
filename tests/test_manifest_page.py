"""`docs/manifest.md` is what its module makes of the structs, has every key, and says of defaults what `create` does."""

import re
import tomllib
from pathlib import Path

import msgspec
from tests.manifest_page import EXAMPLE, FILLED, PAGE, STRUCTS, keys_of_structs, page

from farflung.node import daemon
from farflung.node.options import CreateOptions
from farflung.protocol.manifest import open_manifest
from farflung.protocol.manifest_toml import manifest_from_sections, manifest_to_toml

TEXT = "".join(f"line {number}: the manifest says what a swarm agrees on.\n" for number in range(2000))


def found(folder: Path, **flags: object) -> dict[str, dict[str, object]]:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    options = CreateOptions(**{"name": "a", "data": str(folder / "text.txt"), "home": folder, "open": True, **flags})
    made = open_manifest(daemon.create(options).manifest.read_bytes(), swarm=None, peer=None)
    return tomllib.loads(manifest_to_toml(made))


def test_the_page_is_as_it_is_made() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.manifest_page"


def test_every_key_stands_in_it_and_no_other() -> None:
    told, section = set[str](), ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (.*)", line):
            section = heading[1].strip("[]") if "[" in heading[1] else ""
        elif section and (row := re.match(r"\| `(\w+)` \|", line)):
            told.add(f"{section}.{row[1]}")
            assert len(re.split(r"(?<!\\)\|", line)) == 6 and not line.endswith("|  |"), line
    assert told == keys_of_structs()


def test_defaults_are_what_a_manifest_gets_where_nobody_says_anything(tmp_path: Path) -> None:
    made = found(tmp_path, method="none")
    least = {"name": "a", "batch_tokens": 128, "total_steps": 1, "inner_steps": 1, "admission": "open"}
    shape = {name: 2 for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")}
    bare = manifest_from_sections(
        {
            "model": shape | {"vocab_size": 256, "dim": 4, "seq_len": 128},
            "data": {"spec": "python", "content_hash": "00" * 32, "num_samples": 1},
            "inner": {"warmup_steps": 0},
            "swarm": least,
        },
        founder=bytes(32),
        created=0,
    )
    own = tomllib.loads(manifest_to_toml(bare))
    other = {f"{section}.{key}" for section in own for key in own[section] if own[section][key] != made[section][key]}
    assert other <= set(FILLED)
    required = {
        f"{part}.{field.name}"
        for part, struct in STRUCTS.items()
        for field in msgspec.structs.fields(struct)
        if field.required and field.name not in STRUCTS and field.name not in ("founder", "created")
    }
    assert required <= set(FILLED) <= keys_of_structs()


def test_its_example_founds_a_swarm(tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text(EXAMPLE, encoding="utf-8")
    made = found(tmp_path, config=tmp_path / "swarm.toml", preset="tiny")
    for section, values in tomllib.loads(EXAMPLE).items():
        assert {key: made[section][key] for key in values} == values | (
            {"preset": "tiny"} if "preset" in values else {}
        )
    assert made["swarm"]["inner_steps"] == 60, "of a long run of the default method"
