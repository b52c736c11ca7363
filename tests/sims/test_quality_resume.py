"""Runs of `farflung bench quality` that are cut go on to the same bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sims.quality_toy import TOY, toy_corpus

from farflung.sims import quality_train
from farflung.sims.quality_methods import METHODS, Method, with_interval
from farflung.sims.quality_resume import Keeper
from farflung.sims.quality_train import train


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from toy_corpus(monkeypatch)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_run_that_is_cut_comes_to_the_same_bits(method: Method, tmp_path: Path) -> None:
    """Cut after nine of fifteen steps, kept after each third, with exchanges in flight where there is a delay."""
    if method.outer is not None and method.outer.timetable.interval > 1:
        method = with_interval(method, 4)
    lr = TOY.lrs(method)[0]
    whole = train(method, TOY, lr=lr, seed=0)
    ticks = iter(range(1000))
    keeper = Keeper(tmp_path / "run.pt", every_s=3.0, clock=lambda: float(next(ticks)))

    def cut_at_nine(step: int, loss: float) -> None:
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(method, TOY, lr=lr, seed=0, progress=cut_at_nine, keeper=keeper)
    assert keeper.file.exists()
    quality_train._warm_start.cache_clear()
    seen: list[int] = []
    again = Keeper(keeper.file)
    assert train(method, TOY, lr=lr, seed=0, progress=lambda step, _: seen.append(step), keeper=again) == whole
    assert seen[0] == 7 and seen[-1] == TOY.steps, "from the last state that was kept"
    again.drop()
    assert not keeper.file.exists()


def test_a_damaged_run_under_way_is_refused(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "run.pt", every_s=0.0)
    assert keeper.load() is None
    keeper.offer(lambda: {"step": 7})
    assert keeper.load() == {"step": 7}
    keeper.file.write_bytes(keeper.file.read_bytes()[:50])
    with pytest.raises(ValueError, match="remove it"):
        keeper.load()
