"""Baselines for `farflung bench round`: the same average among the same number of peers, by other programs.

Every peer is a real process on loopback with one torch thread and one flat fp32 vector. Two baselines:

- `hivemind`: `hivemind.averaging.DecentralizedAverager`, whose matchmaking and all-reduce are timed apart:
  its step is held at the trigger until all peers are in one group, then released at once.
- `gloo`: `torch.distributed` all_reduce over loopback TCP in fp32, without encryption, discovery or fault
  tolerance: an upper reference, not a competitor.

A peer is this module run as a program (`python -m farflung.sims.baselines`). It talks to the parent in JSON
lines, and each runs in a session of its own, so that everything it starts (p2pd, hivemind's processes) ends
with it, by id. Every round starts from fresh values and the result is compared with the true mean.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

Method = Literal["hivemind", "gloo"]

PATTERN_NUMEL = 1 << 16
"""Each peer's vector repeats this many Gaussian values, so that every peer can compute everybody's mean."""
GROUP_WAIT_S = 60.0
"""How long hivemind may look for a complete group in one round."""
MEAN_WAIT_S = 120.0
"""Then hivemind's all-reduce hangs: none of its own deadlines is set by default, and now and then one peer of eight has its mean and the others wait for ever."""
GOODBYE_S = 10.0
"""How long a peer may take to end when asked to; then its session is killed."""
POLL_S = 0.002
"""How often a peer looks whether hivemind has formed its group; the averager offers no event for it."""
_STDERR_TAIL = 2000


class BaselineError(RuntimeError):
    """A baseline did not finish; the message ends with what the peer wrote last."""


class PeerEnded(BaselineError):
    """One of its peers ended before it was asked to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineResult:
    """What one baseline took for one vector size."""

    method: Method
    codec: str
    """How the vector was encoded on the wire."""
    peers: int
    num_bytes: int
    """Bytes of fp32 in each peer's vector."""
    seconds: float
    """Median wall time of the averaging alone, from the start signal until the last peer has its mean."""
    setup_seconds: float
    """Median wall time before that in each round: matchmaking for hivemind, a barrier for gloo."""
    mb_per_s: float
    """`num_bytes` / `seconds` / 1e6: fp32 megabytes averaged per second by each peer."""
    nmse: float
    """Largest squared error of a peer's result relative to the true mean's square, over all rounds."""
    rounds: tuple[float, ...]
    """Seconds of each measured round; one warm-up came before."""
    note: str
    """What a reader of the figures must know."""


def hivemind_average(num_bytes: int, *, peers: int = 8, rounds: int = 3, timeout_s: float = 600.0) -> BaselineResult:
    """Average `num_bytes` of fp32 with hivemind's averager; all once more when one of its peers ends or hangs.

    `timeout_s` is for each try. Call it outside event loops.

    Raises BaselineError.
    """
    try:
        return asyncio.run(_measure("hivemind", num_bytes, peers, rounds, timeout_s))
    except PeerEnded as error:
        again = asyncio.run(_measure("hivemind", num_bytes, peers, rounds, timeout_s))
        return replace(again, note=f"{again.note}; second try, after: {str(error).rstrip().splitlines()[-1]}")


def gloo_average(num_bytes: int, *, peers: int = 8, rounds: int = 3, timeout_s: float = 600.0) -> BaselineResult:
    """Average `num_bytes` of fp32 with gloo's all_reduce. Call it outside event loops.

    Raises BaselineError.
    """
    return asyncio.run(_measure("gloo", num_bytes, peers, rounds, timeout_s))


class _Peer:
    """One child process and its JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.process = process
        self.last_words = ""
        """The end of what it wrote to stderr, known once it has ended."""
        self._log = log

    def tell(self, **message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """The peer's next line. Raises PeerEnded when it died."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise PeerEnded(f"a peer ended early: {self.remember()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def remember(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _STDERR_TAIL))
        self.last_words = self._log.read().decode(errors="replace")
        return self.last_words


@contextlib.asynccontextmanager
async def _peer(arguments: list[str]) -> AsyncIterator[_Peer]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "farflung.sims.baselines",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        peer = _Peer(process, log)
        try:
            yield peer
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole session ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            peer.remember()


async def _measure(method: Method, num_bytes: int, peers: int, rounds: int, timeout_s: float) -> BaselineResult:
    if num_bytes < 4 or num_bytes % 4 or peers < 2 or rounds < 1:
        raise ValueError("needs a multiple of 4 bytes, at least 2 peers and 1 round")
    last: _Peer | None = None
    try:
        async with asyncio.timeout(timeout_s), contextlib.AsyncExitStack() as stack:
            members: list[_Peer] = []
            store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
            contact = [str(store)] if method == "gloo" else []
            common = [method, "--peers", str(peers), "--numel", str(num_bytes // 4), "--contact", *contact]
            # gloo's peers only get ready together; hivemind's need the address of the first
            first = await stack.enter_async_context(_peer([*common, "--rank", "0"]))
            members.append(first)
            hello: dict[str, Any] = {}
            if method == "hivemind":
                last = first
                hello = await first.hear()
                common += hello["contact"]
            for rank in range(1, peers):
                members.append(await stack.enter_async_context(_peer([*common, "--rank", str(rank)])))
            for last in members if method == "gloo" else members[1:]:
                hello = await last.hear()
            setups, seconds, errors = [], [], []
            for _ in range(1 + rounds):
                started = time.perf_counter()
                await _everyone(members, "prepare")
                released = time.perf_counter()
                answers = await _everyone(members, "go")
                finished = time.perf_counter()
                checked = await _everyone(members, "check")
                if any(answer["group"] != peers for answer in answers):
                    raise BaselineError(f"{method} averaged in a smaller group than {peers}: {answers}")
                setups.append(released - started)
                seconds.append(finished - released)
                errors.append(max(answer["nmse"] for answer in checked))
    except TimeoutError as error:
        words = last.last_words if last is not None else "it had not started"
        raise BaselineError(f"{method} did not finish in {timeout_s:.0f} s: {words}") from error
    typical = statistics.median(seconds[1:])
    return BaselineResult(
        method=method,
        codec=hello["codec"],
        peers=peers,
        num_bytes=num_bytes,
        seconds=typical,
        setup_seconds=statistics.median(setups[1:]),
        mb_per_s=num_bytes / typical / 1e6,
        nmse=max(errors),
        rounds=tuple(seconds[1:]),
        note=hello["note"],
    )


async def _everyone(peers: list[_Peer], order: str) -> list[dict[str, Any]]:
    for peer in peers:
        peer.tell(order=order)
    return [await peer.hear() for peer in peers]


# What follows runs in the peer processes.

_Averager = tuple[Callable[[], object], Callable[[], int]]
"""(get ready for a round, average in place and return the size of the group)"""


def _worker(arguments: argparse.Namespace, say: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    patterns = [torch.randn(PATTERN_NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(arguments.peers)]
    mean = torch.stack(patterns).mean(dim=0)
    vector = _fill(torch.empty(arguments.numel), patterns[arguments.rank])
    start = _hivemind if arguments.method == "hivemind" else _gloo
    with start(arguments, vector, say) as (prepare, average):
        for line in sys.stdin:
            match json.loads(line)["order"]:
                case "prepare":
                    _fill(vector, patterns[arguments.rank])
                    prepare()
                    say()
                case "go":
                    say(group=average())
                case "check":
                    say(nmse=_nmse(vector, mean))


@contextlib.contextmanager
def _gloo(arguments: argparse.Namespace, vector: Tensor, say: Callable[..., None]) -> Iterator[_Averager]:
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.contact[0]}",
        rank=arguments.rank,
        world_size=arguments.peers,
    )
    say(codec="fp32", note="plain TCP without encryption, discovery or fault tolerance")

    def average() -> int:
        distributed.all_reduce(vector)
        vector.div_(arguments.peers)
        return distributed.get_world_size()

    yield distributed.barrier, average
    distributed.destroy_process_group()


@contextlib.contextmanager
def _hivemind(arguments: argparse.Namespace, vector: Tensor, say: Callable[..., None]) -> Iterator[_Averager]:
    # Imported here: the parent needs none of it, and the import takes seconds.
    import hivemind
    from hivemind import compression
    from hivemind.averaging.control import AveragingStage

    codec, note = compression.Uniform8BitQuantization(), ""
    try:
        compression.deserialize_torch_tensor(compression.serialize_torch_tensor(torch.randn(8), codec.compression_type))
        name = "uniform 8 bit"
    except TypeError as error:
        codec, name = compression.Float16Compression(), "fp16"
        note = f"; its 8-bit codecs cannot decode with this numpy ({error}), hence fp16"
    dht = hivemind.DHT(
        initial_peers=arguments.contact,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        startup_timeout=GROUP_WAIT_S,
        start=True,
    )
    averager = hivemind.DecentralizedAverager(
        [vector],
        dht,
        prefix="baseline",
        target_group_size=arguments.peers,
        min_group_size=arguments.peers,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        allow_state_sharing=False,
        compression=codec,
        start=True,
    )
    say(
        contact=[str(address) for address in dht.get_visible_maddrs()],
        codec=name,
        note=f"seconds are the all-reduce alone, matchmaking is setup_seconds{note}",
    )
    step: Any = None

    def prepare() -> None:
        nonlocal step
        step = averager.step(wait=False, require_trigger=True, timeout=GROUP_WAIT_S)
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            if step.done():
                step.result()  # raises what went wrong
            time.sleep(POLL_S)

    def average() -> int:
        step.allow_allreduce()
        try:
            return len(step.result(timeout=MEAN_WAIT_S))
        except TimeoutError as error:
            raise BaselineError(f"no mean within {MEAN_WAIT_S:.0f} s") from error

    yield prepare, average
    averager.shutdown()
    dht.shutdown()


def _fill(vector: Tensor, pattern: Tensor) -> Tensor:
    for start in range(0, len(vector), PATTERN_NUMEL):
        vector[start : start + PATTERN_NUMEL] = pattern[: len(vector) - start]
    return vector


def _nmse(vector: Tensor, mean: Tensor) -> float:
    error = power = 0.0
    for start in range(0, len(vector), PATTERN_NUMEL):
        got = vector[start : start + PATTERN_NUMEL]
        error += float((got - mean[: len(got)]).square().sum())
        power += float(mean[: len(got)].square().sum())
    return error / power


def main() -> None:
    """Run one peer: orders come in on stdin, answers go out on stdout, everything else to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["hivemind", "gloo"])
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--contact", nargs="*", default=[])
    arguments = parser.parse_args()
    # libraries and child processes may write to stdout: only our lines go to the parent
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(**message: object) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        _worker(arguments, say)


if __name__ == "__main__":
    main()
