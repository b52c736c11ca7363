"""What a node keeps on its disk, and whether there is room for it."""

import shutil
from pathlib import Path

MEANS_KEPT = 8
"""Rounds whose encoded means lie there."""


def needed_bytes(checkpoint: int, mean: int) -> int:
    """About what a node keeps: two checkpoints, so that a crash during one leaves the other, and encoded means; from the bytes of one of each."""
    return 2 * checkpoint + MEANS_KEPT * mean


def stored_bytes(folder: Path) -> int:
    """What lies in a folder by now."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def free_bytes(folder: Path) -> int:
    """What is free where a folder is, or will be."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def lacks(needed: int, kept: int, free: int) -> str | None:
    """What to say where the disk will be full; None where it will not."""
    if needed <= kept + free:
        return None
    return (
        f"NOT ENOUGH DISK: a node of this swarm keeps about {needed / 1e9:.2f} GB, and has {(kept + free) / 1e9:.2f}; make room "
        "(`farflung forget` gives up another swarm), or give another folder with --home"
    )
