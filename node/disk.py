"""What a node keeps on its disk, and whether there is room for it."""

import contextlib
import os
import shutil
from pathlib import Path

KEPT_ROUNDS = 8
"""Committed ones, whose means are kept for those who catch up: with int8 a byte a parameter each, and two where they are two contributions."""


def needed_bytes(checkpoint: int, mean: int) -> int:
    """About what a node keeps: two checkpoints, so that a crash during one leaves the other, and encoded means; from the bytes of one of each."""
    return 2 * checkpoint + KEPT_ROUNDS * mean


def stored_bytes(folder: Path) -> int:
    """What lies in a folder by now. What goes meanwhile, as a node's older checkpoint does, does not count."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(at, name)).st_size
    return total


def kept_bytes(folder: Path) -> int:
    """Of a swarm's folder what its next checkpoints and means take the place of: all but logs."""
    return sum(stored_bytes(child) for child in folder.iterdir() if child.is_dir()) if folder.exists() else 0


def free_bytes(folder: Path) -> int:
    """What is free where a folder is, or will be."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def lacks(needed: int, kept: int, free: int) -> str | None:
    """What to say where the disk will be full; None where it will not."""
    if needed <= kept + free:
        return None
    return (
        f"NOT ENOUGH DISK: a node that trains this model keeps about {needed / 1e9:.2f} GB, and has {(kept + free) / 1e9:.2f}; make room "
        "(`farflung forget` gives up another swarm), or give another folder with --home"
    )
