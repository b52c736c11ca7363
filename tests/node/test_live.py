"""The fold of events into a status, and how it looks on and off a terminal."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from rich.console import Console

from farflung.node import live
from farflung.node.live import duration, headline, line, panel, show, size, sparkline
from farflung.node.status import NodeStatus

PEER = "12" * 32


def event(at: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": at, "event": kind, "swarm": "alpha", "peer": PEER, "height": 3, "version": 3} | fields


RUN = [
    event(100.0, "node.start", step=20, pid=7, device="cpu", agent="farflung", resumed=True),
    event(101.0, "state.sync", step=20, chunks_done=2, chunks=8, donors=2, bytes=9),
    event(102.0, "node.state", step=20, state="training", reason=""),
    event(103.0, "step", step=21, loss=3.5, tokens=100, tokens_per_s=50.0, grad_norm=1.0, lr=0.1),
    event(105.0, "step", step=22, loss=None, tokens=100, tokens_per_s=50.0, grad_norm=1.0, lr=0.1),
    event(105.5, "net", step=22, sent_bytes=1_500_000, received_bytes=20, peers=3),
    event(106.0, "round.plan", step=22, round=4),
    event(107.0, "round.missed", step=22, round=4, reason="[late] by 2 s"),
    event(108.0, "outer.eval", step=22, loss=3.25, few_loss=None, samples=64, tokens=5000, version=2),
    event(109.0, "of.tomorrow", step=23),
]


def folded(events: list[dict[str, Any]]) -> NodeStatus:
    status = NodeStatus(swarm="alpha", peer=PEER, lap=10, total_steps=100)
    for one in events:
        status.apply(one)
    return status


async def replay() -> AsyncIterator[dict[str, Any]]:
    for one in RUN:
        yield one


def shown(*, terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=110, color_system=None, _environ={"TERM": "xterm"}
    )
    asyncio.run(show(replay(), folded([]), console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_fold() -> None:
    status = folded(RUN)
    assert (status.state, status.step, status.height, status.time) == ("training", 23, 3, 109.0)
    assert status.loss is None and status.recent_losses == [3.5]
    assert status.outer_loss == 3.25 and status.tokens == 200
    status.apply(event(110.0, "outer.eval", step=23, loss=None, few_loss=3.75, samples=8, tokens=6000))
    assert (status.outer_loss, status.outer_few_loss, status.swarm_tokens) == (3.25, 3.75, 6000), (
        "two kinds, kept apart"
    )
    assert status.last_missed is not None and status.last_missed.round == 4
    assert status.rounds_missed == 1 and status.phase == ""
    assert status.next_sync_s == 8 * 100 / 50  # 8 of 10 steps left, at two seconds each
    assert msgspec.convert(msgspec.to_builtins(status), NodeStatus) == status


def test_a_round_moves_the_forecast_and_the_counts() -> None:
    commit = event(
        110.0,
        "round.commit",
        step=30,
        height=4,
        version=4,
        round=4,
        seconds=2.5,
        contributed=True,
        lap=20,
        contributors={},
        owed=0.59,
    )
    status = folded([*RUN, event(109.5, "round.cut", step=30, round=4, contributors=[]), commit])
    assert (status.rounds_done, status.rounds_contributed, status.last_round_s) == (1, 1, 2.5)
    assert status.owed == 0.59
    status.apply(commit | {"owed": None, "contributed": False})
    assert status.owed == 0.59, "a round without us says nothing about our feedback"
    status.apply(event(112.0, "step", step=31, loss=3.0, tokens=100, tokens_per_s=50.0, grad_norm=1.0, lr=0.1))
    assert status.next_sync_s == 19 * 2.0, "the lap that the round began is twice as long"
    status.apply(event(113.0, "node.state", step=31, state="waiting", reason="1 of 2 peers"))
    assert status.next_sync_s is None
    assert "waiting · step 31/100 · round 4 · 1 of 2 peers" in headline(status).plain


def test_terminal_view_names_all_that_matters() -> None:
    text = shown(terminal=True)
    for said in (
        "alpha",
        "outer, held-out 3.250 after round 2",
        "50 tokens/s",
        "3 peers",
        "up 1.5 MB",
        "2 of 8 chunks",
    ):
        assert said in text
    assert "[late] by 2 s" in text  # brackets are text, not markup


def test_plain_lines() -> None:
    lines = shown(terminal=False).splitlines()
    said = [line.split(" ", 1)[1] for line in lines]
    assert said[0] == f"node {PEER[:12]} on cpu, resumed"
    assert "step 21  loss 3.5000  grad_norm 1.000  50 tokens/s" in said
    assert not any(line.startswith("step 22") for line in said)  # too soon after step 21
    assert "round 4 missed: [late] by 2 s" in said


def test_a_terminal_that_cannot_redraw_has_plain_lines() -> None:
    """As in the shells of some editors; a panel is not shown at all there."""
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}, color_system=None)
    asyncio.run(show(replay(), folded([]), console))
    assert isinstance(console.file, io.StringIO)
    assert "round 4 missed: [late] by 2 s" in console.file.getvalue()
    assert "│" not in console.file.getvalue()


def test_off_a_terminal_steps_and_refusals_are_told_now_and_then_also_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step was told for an hour after the clock was set back by one, and no refusal ever, so nobody saw that a clock was wrong."""
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    stale = {"error": "Stale", "of": "34" * 32, "reason": "valid for 261 s", "more": 0}

    async def played() -> AsyncIterator[dict[str, Any]]:
        for second in range(130):
            now[0] = float(second)
            at = 5000.0 + second - (3600.0 if second > 60 else 0.0)
            yield event(at, "step", step=second, loss=3.5, tokens=100, tokens_per_s=50.0, grad_norm=1.0, lr=0.1)
            yield event(at, "refused", step=second, **stale)
            if second == 5:
                yield event(at, "refused", step=second, **{**stale, "error": "Malformed", "of": "", "reason": "[b]"})

    console = Console(file=io.StringIO(), force_terminal=False, width=110)
    asyncio.run(show(played(), folded([]), console))
    assert isinstance(console.file, io.StringIO)
    said = [line.split(" ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert [int(line.split()[1]) for line in said if line.startswith("step")] == list(range(0, 130, 10))
    refused = [line for line in said if line.startswith("refused")]
    assert refused[1] == "refused: [b] (nobody knows whose)"
    assert [refused[0], *refused[2:]] == ["refused: valid for 261 s (343434343434)"] * 3


def test_missing_kernels_are_told_and_nothing_else_of_them() -> None:
    without = event(99.0, "kernels", step=0, native=False, reason="no C compiler")
    assert (line(without) or "").endswith(
        "no C kernels, so codecs are slower (trellis some hundred times): no C compiler"
    )
    assert line(without | {"native": True}) is None


def test_feedback_is_shown_where_there_is_any() -> None:
    facts = {"seconds": 2.5, "contributors": {}, "sent_bytes": 9, "received_bytes": 9, "up_bits": 1.0, "down_bits": 8.0}
    commit = event(110.0, "round.commit", step=30, round=4, contributed=True, lap=10, owed=0.59, **facts)
    assert (line(commit) or "").endswith("1.00 up and 8.00 down, 0.59 of our update's norm kept for later")
    assert (line(commit | {"owed": None}) or "").endswith("8.00 down")
    for events, there in (([*RUN, commit], True), (RUN, False)):
        console = Console(file=io.StringIO(), width=120)
        console.print(panel(folded(events)))
        assert isinstance(console.file, io.StringIO)
        assert ("0.59 of the last update's norm" in console.file.getvalue()) == there


def test_what_was_refused_is_counted_and_the_last_of_it_shown() -> None:
    first = event(110.0, "refused", error="LimitExceeded", of="cd" * 32, reason="a control message of 9 bytes", more=0)
    many = event(111.0, "refused", error="Stale", of="", reason="expired [late]", more=40)
    status = folded([*RUN, first])
    assert (status.refused, status.last_refused) == (1, "a control message of 9 bytes (cdcdcdcdcdcd)")
    status.apply(many)
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(status))
    assert isinstance(console.file, io.StringIO)
    assert "42 · last: expired [late] (nobody knows whose)" in console.file.getvalue()


def test_panel_of_a_node_that_has_done_nothing_yet() -> None:
    status = NodeStatus(swarm="alpha", peer=PEER)
    text = drawn(status)
    assert "starting · step 0" in text and f"node {PEER[:12]} · not up yet" in text
    opening = event(99.0, "data.opening", step=0, spec="hf:some/set")
    status.apply(opening)
    assert "starting · step 0 · round 0 · opening the data (hf:some/set)" in drawn(status)
    status.apply(RUN[0])
    assert "opening" not in drawn(status) and f"node {PEER[:12]} · cpu · up for 0 s" in drawn(status)
    status.apply(event(101.0, "node.state", step=20, state="training", reason="moves to stage 0"))
    status.apply(opening | {"time": 102.0})
    assert status.reason == "moves to stage 0"


def test_a_step_beside_the_last_round_is_not_shown_as_one_beyond_all() -> None:
    done = [*RUN, event(110.0, "node.state", step=101, state="finished", reason="")]
    assert headline(folded(done)).plain.startswith("finished · step 100/100 ·")
    assert headline(NodeStatus(swarm="alpha", peer=PEER, step=101)).plain.startswith("starting · step 101 ·")


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1500, 2e6, 3e9, 4e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.0 MB",
        "3.0 GB",
        "4.0 TB",
    ]
    assert [duration(s) for s in (3.4, 200, 18600)] == ["3 s", "3 min 20 s", "5 h 10 min"]
    assert sparkline([1.0]) == "" and sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert len(sparkline([1.0] * 100, 40)) == 40


def drawn(status: NodeStatus) -> str:
    """The panel, its lines without borders and joined where they are folded."""
    console = Console(file=io.StringIO(), width=240)
    console.print(panel(status))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


A, B = "ab" * 32, "cd" * 32
STEP = {"number": 21, "landed": 3, "visits": 8, "ops": [], "sent": [], "notes": []}


def test_a_stage_of_a_pipeline_says_where_it_is_and_who_planned_its_last_step() -> None:
    start = RUN[0] | {"stage": 1}
    assert "pipeline stage 1 network" in drawn(folded([start])), "nobody is counted before the first step"
    step = event(110.0, "pipeline.step", stage=1, seconds=4.25, peers=[2, 1], coordinator=A, cut=0, lost=[], **STEP)
    status = folded([start, step])
    assert (status.stage, status.stage_peers, status.last_step_s, status.coordinator) == (1, [2, 1], 4.25, A)
    text = drawn(status)
    assert "pipeline stage 1 of 2 · 2 + 1 peers · last step took 4.2 s, planned by abababababab network" in text
    assert "loss seen by stage 0, this is stage 1" in text
    status.apply(step | {"cut": 1, "lost": [B, B], "coordinator": PEER})
    assert "last step took 4.2 s, planned by this node · 3 visits lost" in drawn(status)
    for peers, said in (
        ([0, 1], "stage 1 of 2 · no other peer than this one: nobody serves stage 0 ·"),
        ([2, 0, 1], "stage 1 of 3 · 3 peers: nobody serves stage 1 ·"),
        ([3, 0, 0, 0], "stage 1 of 4 · 3 peers: nobody serves stages 1, 2 and 3 ·"),
    ):
        assert said in drawn(folded([start, step | {"peers": peers}]))
    for count, said in ((0, "no other peer"), (1, "1 peer"), (2, "2 peers")):
        net = event(105.5, "net", step=22, sent_bytes=0, received_bytes=0, peers=count)
        assert f"network {said} · up" in drawn(folded([net]))
    assert "pipeline" not in drawn(folded(RUN)), "where every node holds the whole model there is none"


def test_how_a_lost_stage_came_back_is_shown_by_everybody_who_knows() -> None:
    anew = event(110.0, "stage.anew", stage=3, life=2, founder=A)
    given = event(111.0, "shadow.given", stage=3, life=2, to=A, of_step=1200)
    assert (line(anew) or "").endswith("stage 3 was lost and is begun anew by abababababab (life 2)")
    said = "abababababab, who begins stage 3 anew, has fetched this node's copy of step 1,200"
    assert (line(given) or "").endswith(said)
    told = "begun anew stage 3 lost, begun anew by abababababab (life 2)"
    assert f"{told} next sync" in drawn(folded([*RUN, anew]))
    for events in ([anew, given], [given, anew]):
        assert f"{told}, who has fetched this node's copy of step 1,200 next sync" in drawn(folded([*RUN, *events]))
    assert "begun anew" not in drawn(folded(RUN))

    decided = event(110.0, "stage.recovery", stage=3, life=2, expected_s=7.25, reason="stage 3: shadow from a [b]")
    facts = {"holders": ["a"], "bytes": 5000, "fetch_s": 0.5, "seconds": 1.5, "misfit": 0.25, "ends": ""}
    made = event(112.0, "stage.made", stage=3, life=2, rung="shadow", **facts)
    assert (line(decided) or "").endswith("this node begins stage 3 anew (life 2): stage 3: shadow from a [b]")
    assert (line(made) or "").endswith(
        "stage 3 is made: shadow, 5,000 bytes in 1.5 s; its error is 0.25 of that without it"
    )
    assert (line(made | {"misfit": None}) or "").endswith("5,000 bytes in 1.5 s")
    ends = line(made | {"stage": 0, "misfit": None, "ends": "copied"}) or ""
    assert ends.endswith("5,000 bytes in 1.5 s; embedding and head: copied")
    unmade = event(111.0, "stage.unmade", stage=3, life=2, rung="shadow", reason="the link broke")
    assert (line(unmade) or "").endswith("no shadow after all: the link broke")
    unfitted = event(111.0, "stage.unfitted", stage=3, life=2, reason="cuda has no room for a fit of stage 3")
    assert (line(unfitted) or "").endswith("what its neighbours remember: cuda has no room for a fit of stage 3")
    skipped = event(111.0, "outer.skipped", reason="cuda has no room for an evaluation")
    assert (line(skipped) or "").endswith("no evaluation this time: cuda has no room for an evaluation")
    tried = [decided, unmade, unmade | {"rung": "fitted mean"}]
    failed = "(life 2), not made of shadow (the link broke), nor fitted mean (the link broke)"
    assert failed in drawn(folded([*RUN, *tried])) and failed not in drawn(folded([*RUN, decided]))
    assert f"{failed}, made of: shadow" in drawn(folded([*RUN, *tried, made]))
    waits = event(111.0, "stage.waits", stage=3, life=2, reason="stage 2, lost too, will be back from a copy")
    assert (line(waits) or "").endswith("stage 3 waits: stage 2, lost too, will be back from a copy")
    assert "begun anew by this node (life 2) · stage 2, lost too" in drawn(folded([*RUN, waits]))
    missing = event(111.0, "shadow.missing", reasons=["stage 3 has no place for a shadow"])
    assert (line(missing) or "").endswith(" stage 3 has no place for a shadow")
    assert "copies stage 3 has no place for a shadow" in drawn(folded([*RUN, missing]))
    found = missing | {"reasons": []}
    assert (line(found) or "").endswith("every stage that needs a copy has a place for one")
    assert "no place" not in drawn(folded([*RUN, missing, found]))
    assert "no place" not in drawn(folded([*RUN, missing, RUN[0]])), "it has moved, or was started again"
    call = event(111.0, "stage.call", of=0, life=2, founder="abcdef0123456789")
    assert (line(call) or "").endswith("stage 0 is lost: our stage calls abcdef012345 to begin it anew (life 2)")
    founder = folded([*RUN, decided, made, anew | {"founder": PEER}])
    told = "stage 3 lost, begun anew by this node (life 2), made of: shadow (its error is 0.25 of that without it)"
    assert told in drawn(founder) and "stage 3: shadow from a [b]" in drawn(founder)
    home = folded([*RUN, made | {"stage": 0, "ends": "new initial weights"}])
    assert "embedding and head: new initial weights" in drawn(home)
    assert msgspec.convert(msgspec.to_builtins(founder), NodeStatus) == founder


def test_of_each_lost_stage_the_newest_life_is_shown() -> None:
    later = event(110.0, "stage.anew", stage=3, life=2, founder=A)
    other = event(111.0, "stage.anew", stage=1, life=1, founder=B)
    newest = event(112.0, "stage.anew", stage=3, life=3, founder=B)
    given = event(109.0, "shadow.given", stage=3, life=2, to=A, of_step=7)
    status = folded([*RUN, given, later, other, newest, later])
    assert [(one.stage, one.life, one.founder, one.copy_step) for one in status.recovered] == [
        (1, 1, B, None),
        (3, 3, B, None),
    ]
    assert "stage 1 lost, begun anew by cdcdcdcdcdcd (life 1) stage 3 lost, begun anew by cdcd" in drawn(status)


def test_whose_state_a_node_joined_with_is_shown() -> None:
    why = "stage 1: live replica from abab, 4 MB in 2 s"
    facts = {"stage": 1, "life": 0, "rung": "live replica", "holders": ["abab"], "bytes": 4_000_000, "fetch_s": 2.0}
    joined = event(101.0, "stage.join", **facts, expected_s=2.0, reason=why)
    assert (line(joined) or "").endswith(f"joins {why}")
    assert f"joined {why}" in drawn(folded([*RUN, joined])) and "joined" not in drawn(folded(RUN))


def test_copies_of_other_stages_are_counted_beside_what_is_allowed() -> None:
    facts = {"stage": 2, "of_step": 9, "bytes": 1000, "received_bytes": 2_500_000, "allowed_bytes": 4_000_000}
    fetched = "2.5 MB of other stages fetched · 4.0 MB allowed"
    copy = event(110.0, "shadow", **facts, reason="nobody has a copy")
    status = folded([*RUN, copy])
    assert f"shadows stage 2 as of step 9 · {fetched}" in drawn(status)
    assert "shadows" not in drawn(folded(RUN))
    fresher = [copy | {"of_step": 1200}, copy | {"stage": 0}]
    assert f"stage 0 as of step 9, stage 2 as of step 1,200 · {fetched}" in drawn(folded([*RUN, copy, *fresher]))
    assert f"none here now · {fetched}" in drawn(folded([*RUN, copy, event(111.0, "shadow.dropped", stage=2)]))
    moved = event(111.0, "shadow.held", stage=5, of_step=70)
    assert "shadows stage 5 as of step 70 · 0.0 MB of other stages fetched" in drawn(folded([*RUN, moved]))
    assert folded([*RUN, copy, RUN[0]]).copies == [], "they are in memory, and a node that starts again holds none"


def test_a_stage_without_a_quorum_is_said_in_plain_words() -> None:
    why = "no quorum: 1 of 2 members reachable; abcdef must come back"
    lost, found = event(110.0, "stage.lost", stage=1, reason=why), event(120.0, "stage.lost", stage=1, reason="")
    assert (line(lost) or "").endswith(f"stage 1 is lost: {why}, or the data nodes begin it anew with what is left")
    assert (line(found) or "").endswith("stage 1 has a quorum again")
    assert folded([*RUN, lost]).lost == why and not folded([*RUN, lost, found]).lost
    console = Console(file=io.StringIO(), width=160)
    console.print(panel(folded([*RUN, lost])))
    assert isinstance(console.file, io.StringIO) and f"{why}, or the data nodes begin" in console.file.getvalue()
    assert not folded([*RUN, lost, RUN[0]]).lost  # in its next life


def test_what_waits_for_room_on_the_disk_is_an_alarm_until_there_is_some() -> None:
    full = event(110.0, "disk.full", what="its checkpoints", reason="a cannot be written (full): free space in /s")
    over = full | {"reason": ""}
    said = "a cannot be written (full): free space in /s; its checkpoints wait for that"
    assert (line(full) or "").endswith(f"ALARM: {said}") and f"alarm {said}" in drawn(folded([*RUN, full]))
    assert (line(over) or "").endswith("the disk takes its checkpoints again")
    other = full | {"what": "its votes and commits"}
    assert list(folded([*RUN, full, other, over]).disk_full) == ["its votes and commits"]
    folder = "/srv/" + "0123456789abcdef" * 20
    far = drawn(folded([*RUN, full | {"reason": f"free space in {folder}"}]))
    assert folder in far.replace(" ", ""), "whole, on several lines"
    assert not folded([*RUN, full, RUN[0]]).disk_full, "in its next life"


def test_a_link_that_is_too_slow_is_an_alarm() -> None:
    slow = event(
        110.0, "link.slow", bytes_per_s=2400, rounds_bytes_per_s=3300, lap_s=4.0, left_s=None, reason="it falls behind"
    )
    assert (line(slow) or "").endswith("ALARM: it falls behind")


def test_a_full_disk_is_an_alarm_until_the_log_says_what_it_lacks() -> None:
    full = event(110.0, "log.full", count=0, reason="/s/events.jsonl cannot be written (full): free space in /s")
    trained = event(111.0, "step", loss=3.0, tokens=1, tokens_per_s=1.0)
    assert (line(full) or "").endswith(
        "ALARM: /s/events.jsonl cannot be written (full): free space in /s; the node goes on"
    )
    assert "free space in /s (1 line lost so far)" in drawn(folded([*RUN, full, trained]))
    later = full | {"time": 170.0, "count": 60}
    assert (line(later) or "").endswith("the node goes on (60 lines lost so far)")
    assert folded([later]).lines_unwritten == 60, "as who comes later hears"
    again = event(112.0, "log.unwritten", count=2, since=110.0)
    assert " the log can be written again, and lacks 2 lines since " in (line(again) or "")
    over = drawn(folded([*RUN, full, trained, trained, again, trained]))
    assert "alarm" not in over and "log lacks 2 lines: the disk was full" in over


def test_the_loss_of_who_has_not_trained_yet_is_not_called_infinite() -> None:
    console = Console(file=io.StringIO(), width=110)
    for status, said in ((folded(RUN[:3]), "none yet"), (folded(RUN), "not finite")):
        console.print(panel(status))
        assert isinstance(console.file, io.StringIO) and said in console.file.getvalue()
        assert ("not finite" in console.file.getvalue()) == (said == "not finite")
