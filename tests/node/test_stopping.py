"""How real nodes end: asked to by a signal, twice by an impatient person, or killed; and how they go on from there."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.node.founded import found
from tests.node.processes import Node, nodes

from farflung.node.storage import FileStorage, Place, newest_history
from farflung.protocol.chain import Commit
from farflung.protocol.ledger import count, is_prefix
from farflung.sims.audit import check_digests
from farflung.sims.audit_samples import committed_samples
from farflung.sims.facts import RunFacts, event_files, load_events
from farflung.sims.intervals import length, merge
from farflung.sims.logs import Logs

INNER_STEPS = 200
"""Some seconds: time to be stopped between two rounds."""
STEPS = 100 * INNER_STEPS
"""More than there is time for: who is stopped longest may have to join anew while the others go on."""


def place(node: Node) -> Place:
    """On its disk."""
    saved = FileStorage(node.swarm.checkpoint).load_place()
    assert saved is not None
    return saved


def history(node: Node) -> list[Commit]:
    """On its disk, oldest first."""
    return [c.commit for c in newest_history(FileStorage(node.swarm.checkpoint).load_history())[1]]


def key(node: Node) -> bytes:
    """That it says it has, in all its lives."""
    (peer,) = {event["peer"] for event in node.events("node.start")}
    return bytes.fromhex(peer)


def children(node: Node) -> list[psutil.Process]:
    return psutil.Process(node.process.pid).children(recursive=True)


def contributes(node: Node, *, life: int = 1) -> bool:
    """Whether a round has counted what it did since it was started for the `life`th time, and not only what it had sent before."""
    begun = [event["time"] for event in node.events("node.start")]
    encoded = {e["round"] for e in node.events("span") if e["what"] == "encode" and e["time"] >= begun[-1]}
    commits = node.events("round.commit")
    return len(begun) == life and any(e["contributed"] and e["round"] in encoded for e in commits)


def steps_of(node: Node, saved: Place) -> int:
    """Of the run, at that place."""
    return saved.steps + next(commit.steps for commit in history(node) if commit.height == saved.height)


def in_the_middle(node: Node) -> bool:
    """Whether a commit has just been applied and saved, with steps beyond it: the next round is seconds away."""
    commits = node.events("round.commit")
    saved = place(node)
    return saved.height == commits[-1]["height"] and saved.steps > 0


def stopped_in_the_middle(victim: Node, *others: Node) -> None:
    """Halt all of them where `victim` is in the middle and no round is under way anywhere, which takes more than one try where steps are quick."""
    while True:
        victim.until(lambda: in_the_middle(victim))
        for node in (victim, *others):
            node.process.send_signal(signal.SIGSTOP)
        newest = max(event["round"] for node in (victim, *others) for event in node.events("round.plan"))
        if in_the_middle(victim) and newest <= place(victim).height:
            return
        for node in (victim, *others):
            node.process.send_signal(signal.SIGCONT)


def end_all_of(node: Node) -> None:
    """As systemd does to all processes of a unit: its libp2p, too."""
    for process in (node.process, *children(node)):
        with suppress(psutil.NoSuchProcess):  # children of one that was told first may be gone
            process.terminate()


def leaves(node: Node, ask: Callable[[], None], *, told: Node | None = None) -> None:
    """It ends by itself and has saved what it has. Whoever stays has heard the goodbye, so that nobody need find it dead."""
    before = len(node.events("node.stop"))
    height = 0 if told is None else history(told)[-1].height
    ask()
    assert node.ended() == 0, node.log.read_text()[-4000:]
    (stop,) = node.events("node.stop")[before:]
    assert stop["reason"] == "asked to stop"
    assert "leaving: finishing the step, saying goodbye, saving" in node.log.read_text()
    saved = place(node)
    assert (saved.height, saved.version, steps_of(node, saved)) == (stop["height"], stop["version"], stop["step"])
    if told is not None:
        told.until(lambda: any(c.left == (key(node),) for c in history(told) if c.height > height))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_leave_when_asked_to_and_go_on_where_they_were_when_killed(tmp_path: Path, corpus: Path) -> None:
    found(tmp_path, corpus, steps=STEPS, port=0, inner_steps=INNER_STEPS, min_contributors=1)
    with nodes() as start:
        a = start(tmp_path / "a", "alpha")
        invitation = a.word("farflung1")
        b, c = (start(tmp_path / name, invitation) for name in "bc")
        early = start(tmp_path / "early", "nobodys@aaaaaaaaaaaa", "--peer", a.word("/ip4/"))
        early.says("looking up the name")
        early.interrupt()
        assert early.ended() == 128 + signal.SIGINT and "stopped before the node was up" in early.log.read_text()
        for node in (b, c):
            node.until(lambda node=node: contributes(node))

        # c is killed in training. b is stopped by somebody who does not wait until the others, who cannot answer, let it go.
        stopped_in_the_middle(c, a, b)
        saved, who, ours = place(c), key(c), children(b) + children(c)
        c.process.kill()
        assert c.ended() == -signal.SIGKILL
        b.process.send_signal(signal.SIGCONT)
        b.interrupt()
        b.says("leaving: finishing the step")
        b.interrupt()
        assert b.ended() == 128 + signal.SIGINT
        assert not b.events("node.stop") and not c.events("node.stop")
        assert psutil.wait_procs(ours, timeout=30.0)[1] == []

        # Both go on with what they had. Without them the third could decide nothing; with b alone back for three rounds, c's samples would be handed out.
        before = len(c.events("step"))
        a.process.send_signal(signal.SIGCONT)
        c = start(tmp_path / "c", "alpha")
        c.until(lambda: len(c.events("node.start")) == 2)
        b = start(tmp_path / "b", "alpha")
        for node in (b, c):
            node.until(lambda node=node: contributes(node, life=2))
        assert [event["resumed"] for event in c.events("node.start")] == [False, True]
        assert key(c) == who
        first = c.events("step")[before]
        assert first["step"] == steps_of(c, saved) + 1
        assert not c.events("progress.dropped")
        later = [e["samples"] for e in c.events("round.commit") if e["height"] > saved.height]
        sent = next(samples[who.hex()] for samples in later if who.hex() in samples)
        assert is_prefix(saved.trained, sent) and count(sent) > count(saved.trained)

        leaves(b, b.process.terminate, told=a)
        leaves(c, c.interrupt, told=a)
        a.until(lambda: a.events("step")[-1]["step"] > steps_of(a, place(a)))
        leaves(a, lambda: end_all_of(a))
    events = load_events(event_files(tmp_path))
    logs = Logs(events=events, run=RunFacts(name="alpha", started=0.0, ended=0.0, peers=[]))
    counted = [by_peer.values() for by_peer in committed_samples(logs)]
    trained = [interval for samples in counted for intervals in samples for interval in intervals]
    assert length(trained) == length(merge(trained)) > 0
    digests = check_digests(logs)
    assert digests.count > 0 and not digests.broken
    ledger = history(a)[-1].ledger
    handed_out = [
        *ledger.free,
        *(interval for holding in (*ledger.held, *ledger.suspended) for interval in holding.intervals),
    ]
    assert merge([*trained, *handed_out]) == [(0, ledger.cursor)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_whose_libp2p_is_killed_saves_first(tmp_path: Path, corpus: Path) -> None:
    found(tmp_path, corpus, steps=STEPS, port=0, inner_steps=INNER_STEPS, min_contributors=1)
    with nodes() as start:
        a = start(tmp_path / "a", "alpha")
        a.until(lambda: len(a.events("step")) > 3)
        (daemon,) = (child for child in children(a) if child.name() == "p2pd")
        daemon.kill()
        assert a.ended() == 2
    assert "error: the libp2p daemon was killed by signal 9 (SIGKILL), perhaps for want of memory" in a.log.read_text()
    assert len(a.events("node.failed")) == 1 and not a.events("node.stop")
    assert steps_of(a, place(a)) == a.events("step")[-1]["step"] > 3
