"""The baselines average what they should, and end what they started."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from farflung.sims import baselines
from farflung.sims.baselines import BaselineError, BaselineResult, PeerEnded, gloo_average, hivemind_average


def check(result: BaselineResult, *, nmse: float) -> None:
    assert (result.peers, result.num_bytes, len(result.rounds)) == (2, 1_000_000, 1)
    assert result.seconds > 0 and result.nmse < nmse
    assert result.mb_per_s == pytest.approx(1.0 / result.seconds)


@pytest.fixture(autouse=True)
def ends_what_it_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No session that a baseline opened outlives it. Other tests may run beside it: its processes have its mark."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv("FARFLUNG_TEST", mark)
    yield
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is another user's
            command = " ".join(process.cmdline())
            ours = "farflung.sims.baselines" in command or "p2pd" in command
            if ours and process.environ().get("FARFLUNG_TEST") == mark:
                left.append(command)
    assert left == []


@pytest.mark.slow
def test_gloo() -> None:
    result = gloo_average(1_000_000, peers=2, rounds=1, timeout_s=60)
    check(result, nmse=1e-12)
    assert result.codec == "fp32"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hivemind() -> None:
    result = hivemind_average(1_000_000, peers=2, rounds=1, timeout_s=250)
    check(result, nmse=1e-2)
    assert result.codec == "uniform 8 bit" or "hence fp16" in result.note


@pytest.mark.parametrize("ends", [1, 2])
def test_hivemind_is_measured_once_more_when_one_of_its_peers_ends(monkeypatch: pytest.MonkeyPatch, ends: int) -> None:
    done = BaselineResult(
        method="hivemind",
        codec="uniform 8 bit",
        peers=2,
        num_bytes=8,
        seconds=1.0,
        setup_seconds=1.0,
        mb_per_s=1.0,
        nmse=0.0,
        rounds=(1.0,),
        note="all-reduce alone",
    )
    tries = []

    async def measure(*arguments: object) -> BaselineResult:
        tries.append(arguments)
        if len(tries) <= ends:
            raise PeerEnded("a peer ended early: Traceback\nBaselineError: no mean within 120 s\n")
        return done

    monkeypatch.setattr(baselines, "_measure", measure)
    if ends == 1:
        result = hivemind_average(8, peers=2, rounds=1)
        assert result.note == "all-reduce alone; second try, after: BaselineError: no mean within 120 s"
        assert result == replace(done, note=result.note)
    else:
        with pytest.raises(PeerEnded):
            hivemind_average(8, peers=2, rounds=1)
    assert tries == [("hivemind", 8, 2, 1, 600.0)] * 2


@pytest.mark.parametrize("average", [gloo_average, hivemind_average])
def test_a_deadline_ends_every_process(average: Callable[..., BaselineResult]) -> None:
    with pytest.raises(BaselineError, match="did not finish"):
        average(1_000_000, peers=2, rounds=1, timeout_s=0.3)


def test_arguments_are_checked() -> None:
    for num_bytes, peers, rounds in ((0, 2, 1), (6, 2, 1), (8, 1, 1), (8, 2, 0)):
        with pytest.raises(ValueError, match="at least"):
            gloo_average(num_bytes, peers=peers, rounds=rounds)
