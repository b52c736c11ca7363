"""Who has which sample in hand at the end, as the disks of nodes have it."""

from pathlib import Path

from msgspec.structs import replace

from farflung.node.events import Event
from farflung.node.paths import SwarmPaths
from farflung.node.storage import FileStorage
from farflung.protocol.chain import Certified, Commit
from farflung.protocol.ledger import Holding, Ledger, shared
from farflung.protocol.lives import Counters, Life
from farflung.sims.last_ledger import last_ledger

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def keep(swarm: SwarmPaths, life: int, *commits: Commit) -> None:
    storage = FileStorage(swarm.stage(0, life))
    for commit in commits:
        storage.append_commit(None, Certified(commit, 0, ()))


def commit(height: int, ledger: Ledger, lives: tuple[Life, ...] = ()) -> Commit:
    return Commit(height, b"p" * 32, height, 0, 0, 1, 1, (A,), (), ledger, None, lives)


def at(height: int, life: int = 0, stage: int = 0) -> Event:
    return {"event": "view.commit", "time": 1.0 * height, "height": height, "stage": stage, "life": life}


def swarm_in(folder: Path) -> SwarmPaths:
    return SwarmPaths(name="x", hash_hex="00", folder=folder, socket=folder / "s")


def test_the_newest_commit_that_somebody_has_applied_counts(tmp_path: Path) -> None:
    first, second = swarm_in(tmp_path / "a"), swarm_in(tmp_path / "b")
    ledgers = [Ledger(cursor=10 * n, held=(Holding(A, ((0, 10 * n),)),)) for n in range(4)]
    keep(first, 0, *(commit(n, ledgers[n]) for n in (1, 2)))
    keep(second, 0, *(commit(n, ledgers[n]) for n in (1, 2, 3)))
    found = last_ledger([first, second], {"a": [at(1), at(2)], "c": [at(9, stage=1)]})
    assert (found.cursor, found.held, found.let_go) == (20, {A.hex(): [(0, 20)]}, [])


def test_what_a_lost_stage_0_had_in_hand_is_let_go(tmp_path: Path) -> None:
    """And what it may have handed out that nobody heard of."""
    old, new = swarm_in(tmp_path / "a"), swarm_in(tmp_path / "b")
    keep(old, 0, commit(7, Ledger(cursor=40, held=(Holding(A, ((20, 30),)), Holding(B, ((30, 40),))), free=((5, 8),))))
    life = Life(0, 1, C, Counters(3, 9, 90, samples=60))
    keep(new, 1, commit(2, Ledger(cursor=80, held=(Holding(C, ((60, 80),)),)), (life,)))
    found = last_ledger([old, new], {"a": [at(7)], "b": [at(2, life=1)]})
    assert (found.cursor, found.held) == (80, {C.hex(): [(60, 80)]})
    assert found.let_go == [(5, 8), (20, 30), (30, 40), (40, 60)]


def test_of_groups_all_ledgers_count_and_what_one_has_still_to_hand_out_is_free(tmp_path: Path) -> None:
    """A and B were one group, handed out 100 numbers, and then every other block of 4,096 each: B's went to 8,200, A's to 150 only."""
    together = Ledger(cursor=100, held=(Holding(A, ((0, 60),)), Holding(B, ((60, 90),))), free=((90, 100),))
    stays, goes = shared(together, {B})
    assert (stays.share.place, goes.share.place) == (0, 1)
    farther = replace(goes, cursor=8200, held=(Holding(B, ((4096, 8192),)),))
    first, second = swarm_in(tmp_path / "a"), swarm_in(tmp_path / "b")
    keep(first, 0, commit(4, together), commit(5, replace(stays, cursor=150)))
    keep(second, 0, commit(4, together), replace(commit(6, farther), group=b"g" * 32))
    events = {"a": [at(4), at(5)], "b": [at(4), at(6) | {"group": (b"g" * 32).hex()}]}
    found = last_ledger([first, second], events)
    assert (found.cursor, found.let_go) == (8200, [])
    assert found.held == {A.hex(): [(0, 60)], B.hex(): [(4096, 8192)]}
    assert found.free == [(90, 100), (150, 4096), (8192, 8200)]
