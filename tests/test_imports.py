"""Imports point one way, and never in a circle."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tests.syntax import parsed

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "compression": set[str](),
    "protocol": set[str](),
    "training": {"compression"},
    "node": {"compression", "protocol", "training"},
    "sims": {"compression", "protocol", "training", "node"},
}
PURE_PROTOCOL_MUST_NOT_IMPORT = {"asyncio", "logging", "random", "secrets", "socket", "time", "torch"}


FILES = {f"farflung.{f}.{p.stem}": p for f in MAY_IMPORT for p in sorted((ROOT / f).glob("*.py"))}


@cache
def imports(module: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parsed(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module: str) -> None:
    folder = module.split(".")[1]
    used = {name.split(".")[1] for name in imports(module) if name.startswith("farflung.")}
    assert used <= MAY_IMPORT[folder] | {folder}


def test_no_cycles() -> None:
    graph = {name: {used for used in imports(name) if used in FILES} for name in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("module", [name for name in FILES if name.startswith("farflung.protocol.")])
def test_protocol_decides_and_does_nothing_else(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module)} & PURE_PROTOCOL_MUST_NOT_IMPORT


WITH_TORCH = {f"farflung.training.pipeline_{name}" for name in ("boundary", "execute", "slice", "stages", "worker")}


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("farflung.training.pipeline_")])
def test_pipelines_are_planned_without_torch(module: str) -> None:
    reached, new = set[str](), {module}
    while new:
        reached |= new
        new = {name for one in new if one in FILES for name in imports(one)} - reached
    assert ("torch" in reached) == (module in WITH_TORCH)


def test_stdlib_compression_is_not_hidden() -> None:
    import bz2
    import gzip
    import lzma

    assert all(m.__name__ in sys.modules for m in (bz2, gzip, lzma))
