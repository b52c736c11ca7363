"""The demo's own logic: its plan, its bookkeeping, what it refuses. The whole of it runs in tests/test_wheel.py."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farflung.protocol.errors import ConfigError
from farflung.sims import demo, solo
from farflung.sims.demo import Story
from farflung.sims.demonodes import DemoNode, NodeFailed
from farflung.sims.facts import SoloPoint
from farflung.sims.solo import SoloFailed, best_run


def points(*losses: float) -> list[SoloPoint]:
    return [SoloPoint(30 * (i + 1), 0, 0.0, loss) for i, loss in enumerate(losses)]


def test_a_worker_alone_is_compared_after_at_least_as_many_steps() -> None:
    slow, fast = points(3.0, 2.5, 2.0), points(3.0, 2.4, 2.3)
    assert [p.loss for p in best_run([slow, fast], 60)] == [3.0, 2.4]
    assert [p.loss for p in best_run([slow, fast], 61)] == [3.0, 2.5, 2.0]
    assert [p.loss for p in best_run([slow, fast], 90)] == [3.0, 2.5, 2.0]


def test_the_plan_fits_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()
    long, short = demo._plan(began, 5.0), demo._plan(began, 0.1)
    assert demo.MIN_ROUNDS == short.rounds <= long.rounds <= demo.MAX_ROUNDS
    assert long.training_until <= began + 300 - demo.END_S
    assert short.training_until > time.time() + demo.LEAST_TRAINING_S


def test_only_a_demos_own_files_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo._clear(out)
    (out / "run.json").write_text("{}")
    (out / "nodes" / "old").touch()
    demo._clear(out)
    assert sorted(p.name for p in out.rglob("*")) == [demo.MARK, "nodes"]
    (out / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex, which is no demo's"):
        demo._clear(out)
    assert (out / "thesis.tex").exists()
    with pytest.raises(ConfigError, match="give another one with --out"):
        demo._clear(out / "thesis.tex")


@pytest.mark.parametrize("name", ["model/weights.pt", "nodes/list.txt", "report.html"])
def test_what_is_called_as_a_demos_files_is_only_removed_from_a_demos_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("of years")
    with pytest.raises(ConfigError, match="was not made by a demo"):
        demo._clear(tmp_path)
    assert file.read_text() == "of years" and [p.name for p in tmp_path.iterdir()] == [Path(name).parts[0]]


def test_a_link_in_a_demos_folder_goes_without_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    demo._clear(tmp_path / "out")
    (tmp_path / "out" / "model").symlink_to(tmp_path / "kept")
    demo._clear(tmp_path / "out")
    assert (tmp_path / "kept" / "file").exists() and not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_ends_its_nodes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    ended = False

    async def play(*_: object) -> None:
        nonlocal ended
        os.kill(os.getpid(), kind)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended = True

    monkeypatch.setattr(demo, "_play", play)
    before = signal.signal(kind, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as end:
            demo.run_demo(tmp_path / "out", minutes=1.0, quiet=True)
        assert signal.getsignal(kind) is signal.SIG_DFL
    finally:
        signal.signal(kind, before)
    assert ended and end.value.code == 128 + kind


def node(tmp_path: Path, number: int, events: list[dict[str, object]]) -> DemoNode:
    one = DemoNode(
        name=f"node {number}",
        role="",
        home=tmp_path / str(number),
        swarm_hash="ab" * 32,
        swarm_name="demo",
    )
    one.swarm.folder.mkdir(parents=True)
    heading = {"time": 1.0, "swarm": "demo", "peer": "ab" * 32, "height": 0, "version": 0, "step": 0}
    one.swarm.events.write_text("".join(json.dumps(heading | event) + "\n" for event in events))
    return one


def test_a_kill_counts_only_in_the_middle_of_a_round(tmp_path: Path) -> None:
    scatter = {"event": "round.scatter", "round": 7}
    story = Story()
    with pytest.raises(NodeFailed, match="more --minutes"):
        demo._check_kill(story)
    story.victim, story.killed_in = node(tmp_path, 1, [{"event": "round.commit", "round": 6}, scatter]), 7
    demo._check_kill(story)
    story.victim = node(tmp_path, 2, [scatter, {"event": "round.commit", "round": 7}])
    with pytest.raises(NodeFailed, match="not in the middle of round 7"):
        demo._check_kill(story)


def test_a_node_that_came_late_is_not_waited_for_to_be_killed(tmp_path: Path) -> None:
    story = Story()
    story.nodes += [node(tmp_path, number, []) for number in range(1, demo.FIRST_NODES + 2)]
    founder, *_, late, after = story.nodes
    founder.status.version = after.status.version = 9
    assert demo._may_die(story) is None, "neither the founder nor who joins later"
    late.status.version = 2
    assert demo._may_die(story) is late


def test_no_wait_is_without_end(tmp_path: Path) -> None:
    """What comes counts; what does not come ends the wait."""
    story = Story()
    story.nodes.append(node(tmp_path, 1, []))

    async def main() -> None:
        at = demo.now()
        assert await demo._until(story, lambda: True, by=at - 1.0), "what is so needs no time"
        assert not await demo._until(story, lambda: False, by=at - 1.0)
        assert not await demo._until(story, lambda: False, by=at + 0.01)

    asyncio.run(main())
    assert demo._states(story) == "node 1 starting, step 0"


def test_a_worker_alone_that_falls_silent_is_an_error_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solo, "SILENT_S", 0.05)
    hangs = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started: list[asyncio.subprocess.Process] = []
    really = asyncio.create_subprocess_exec

    async def start(*command: str, **more: Any) -> asyncio.subprocess.Process:
        started.append(await really(*hangs, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    known = points(3.0)
    with pytest.raises(SoloFailed, match=r"said nothing for 0\.05 s, since step 30"):
        asyncio.run(solo._worker(tmp_path, 0, 100, 10, lambda: 0, known))
    assert started[0].returncode == -signal.SIGKILL
