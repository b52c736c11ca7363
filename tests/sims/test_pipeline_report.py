"""The report of a pipeline: from logs written by hand, and from a swarm under virtual time."""

import asyncio
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from tests.sims.pipeline_logs import HOME, LEFT, RIGHT, SPARE, START, by_hand, scene_of, step
from tests.sims.pipeline_story import stage_of, steps_done, until, until_done

from farflung.sims import plots
from farflung.sims.audit import Check, check_digests
from farflung.sims.facts import Incident, PeerFacts, RunFacts
from farflung.sims.logs import Logs
from farflung.sims.pipeline_log import logged_steps, pipeline_figures
from farflung.sims.pipeline_recoveries import Recovered, recoveries
from farflung.sims.pipeline_small import Counting, recipe, signers
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.plots_pipeline import stage_counts, window_steps
from farflung.sims.plots_routes import plot_routes
from farflung.sims.report import render
from farflung.sims.report_pipeline import takeovers_told, trouble_letters
from farflung.sims.scene import Scene
from farflung.sims.series import training_curves
from farflung.sims.sim_result import slowest_recovery
from farflung.sims.spans import compute_spans, kills
from farflung.sims.summary import copies_bytes
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.trace import COMPUTING, SENDING, trace_events
from farflung.training.pipeline_plan import Kind

DOCS = Path(__file__).parents[2] / "docs" / "events.md"
HEADING = {"time", "event", "swarm", "peer", "height", "version", "step", "stage", "life"}


def test_steps_are_put_together_from_all_logs() -> None:
    first, second = logged_steps(by_hand())
    assert (first.number, first.start, first.seconds, first.landed) == (0, START, 2.0, 2)
    ran = {
        (str(one.op), first.timeline.peers[one.peer]): (one.stage, one.begin_s, one.end_s) for one in first.timeline.ran
    }
    assert ran["F0.0", HOME] == pytest.approx((0, 0.0, 0.1))
    assert ran["B0.1", LEFT] == pytest.approx((1, 0.1 + 0.6, 0.1 + 1.2))  # its own beginning was a little later
    assert [str(one.op) for one in first.timeline.sent] == ["F0.1", "F1.1", "B0.1"]
    assert first.timeline.peers[first.timeline.sent[1].receiver] == RIGHT
    names = first.timeline.peers
    assert {m: [names[place] for place in route] for m, route in first.routes.items()} == {
        0: [HOME, LEFT],
        1: [HOME, RIGHT],
    }
    assert not first.trouble
    assert second.trouble == [
        "a peer was lost: no stream to it: connection refused",
        "a microbatch was cut short: nobody is left for hop 1, stage 1",
    ]
    assert trouble_letters([first, second]) == dict(zip(second.trouble, "ab", strict=True))
    told = takeovers_told(second, {HOME: "home/0", LEFT: "far/0", RIGHT: "far/1"})
    assert told == (
        "far/1 was lost: no stream to it: connection refused; far/0 took over microbatch 0; "
        "microbatch 1 cut short: nobody is left for hop 1, stage 1"
    )
    figures = pipeline_figures(logged_steps(by_hand()))
    assert figures is not None
    assert {key: figures[key] for key in ("steps", "microbatches", "cut", "lost", "rerouted")} == {
        "steps": 2,
        "microbatches": 3,
        "cut": 1,
        "lost": 1,
        "rerouted": 1,
    }
    assert figures["computed"][0] == pytest.approx((0.55 / 2.0 + 0.1 / 3.0) / 2, abs=1e-4)
    assert pipeline_figures(logged_steps({HOME: []})) is None


def test_what_peers_of_a_pipeline_compute_is_what_they_train() -> None:
    spans = compute_spans([*by_hand()[LEFT], {"event": "step", "stage": 1, "time": START + 2.0, "seconds": 2.0}])
    assert [(round(span.start - START, 3), round(span.seconds, 3), span.what) for span in spans[:2]] == [
        (0.25, 0.25, "train"),
        (0.7, 0.6, "train"),
    ]
    assert len(spans) == 4


def test_digests_are_compared_within_a_stage() -> None:
    commit = {"event": "round.commit", "time": START, "round": 1, "version": 1}

    def check(*digests: tuple[str, int, str]) -> Check:
        """Of peers of stages that name digests."""
        events = {peer: [commit | {"peer": peer, "stage": stage, "digest": said}] for peer, stage, said in digests}
        return check_digests(Logs(events=events, run=RunFacts(name="s", started=START, ended=START, peers=[])))

    assert check((HOME, 0, "aa"), (LEFT, 1, "bb")).broken == []
    apart = check((HOME, 0, "aa"), (LEFT, 1, "bb"), (RIGHT, 1, "cc"))
    assert len(apart.broken) == 1 and "at version 1 of stage 1" in apart.broken[0]


def test_a_stage_that_was_begun_anew_has_two_histories() -> None:
    """Heights and versions of its two lives are the same numbers."""
    commit = {"event": "round.commit", "time": START, "round": 1, "version": 1, "stage": 1}
    events = {
        LEFT: [commit | {"peer": LEFT, "digest": "bb", "life": 0}],
        RIGHT: [commit | {"peer": RIGHT, "digest": "cc", "life": 1}],
    }
    run = RunFacts(name="s", started=START, ended=START, peers=[])
    check = check_digests(Logs(events=events, run=run))
    assert (check.count, check.broken) == (0, [])
    events[HOME] = [commit | {"peer": HOME, "digest": "bb", "life": 1}]
    assert "at version 1 of stage 1, life 1" in check_digests(Logs(events=events, run=run)).broken[0]


def test_all_stages_train_the_same_tokens_and_data_nodes_see_the_loss() -> None:
    took: dict[str, Any] = {"event": "step", "tokens": 8, "seconds": 1.0}
    events: dict[str, list[dict[str, Any]]] = {
        LEFT: [took | {"peer": LEFT, "stage": 1, "time": START + 3.0, "loss": None}],
        HOME: [took | {"peer": HOME, "stage": 0, "time": START + 4.0, "loss": 2.0}],
    }
    curves = training_curves(scene_of(events))
    assert curves == {HOME: {"seconds": [4.0], "tokens": [8], "loss": [2.0]}}


def after_a_loss() -> dict[str, list[dict[str, Any]]]:
    """Of the two peers of stage 1 one is gone at 6.5 s, and the other, killed as well, at 7; a third begins the stage anew."""
    common = {"swarm": "s", "height": 0, "version": 0, "step": 0, "stage": 1, "life": 1}
    events = by_hand()
    events[HOME].append(common | {"time": START + 9.0, "event": "stage.anew", "peer": HOME, "founder": SPARE})
    loss = {"loss": 3.0, "few_loss": None, "samples": 64, "tokens": 10, "seconds": 0.1}
    events[HOME].append(common | {"time": START + 5.0, "event": "outer.eval", "peer": HOME, **loss})
    for number, at in ((1, 17.0), (2, 18.0), (3, 19.0)):
        tried = {
            "of": 1,
            "life": 1,
            "number": number,
            "loss": 3.1,
            "usual": 3.0,
            "passes": True,
            "reason": f"trial {number}",
        }
        events[HOME].append(common | {"time": START + at, "event": "stage.trial", "peer": HOME, "stage": 0} | tried)
    made = {
        "rung": "shadow",
        "holders": ["a"],
        "bytes": 500,
        "fetch_s": 0.75,
        "seconds": 1.5,
        "misfit": 0.25,
        "ends": "",
    }
    events[SPARE] = [
        common | {"time": START + 9.25, "event": "stage.anew", "peer": SPARE, "founder": SPARE},
        common
        | {
            "time": START + 9.5,
            "event": "stage.recovery",
            "peer": SPARE,
            "expected_s": 7.25,
            "reason": "stage 1: shadow from a",
        },
        common | {"time": START + 10.0, "event": "stage.made", "peer": SPARE, **made},
        step(SPARE, 1, 16.0, number=2, seconds=5.0, ops=[["F", 1, 1, 900, 1000], ["F", 0, 1, 500, 900]]),
    ]
    return events


def killed(at: Mapping[str, float]) -> RunFacts:
    timeline = [Incident(time=START + seconds, what="kill", peer=peer) for peer, seconds in at.items()]
    return RunFacts(name="s", started=START, ended=START + 20.0, peers=[], timeline=timeline)


def recoveries_of(scene: Scene) -> list[Recovered]:
    return recoveries(scene.events, scene.steps, kills(scene.run.timeline))


def test_how_a_lost_stage_came_back() -> None:
    scene = Scene(events=after_a_loss(), run=killed({RIGHT: 6.5, LEFT: 7.0, HOME: 8.0}))
    [one] = recoveries_of(scene)
    assert (one.stage, one.life, one.rung, one.lost, one.anew) == (1, 1, "shadow", START + 7.0, START + 9.0)
    assert one.serving == START + 11.5 and one.step_s == 2.5, "the median of 2 s and 3 s"
    assert one.seconds == 4.5 and one.iterations == pytest.approx((4.5 - 0.75) / 2.5)
    assert slowest_recovery([one]) == 1.5
    page = render([scene])
    assert "shadow (error 0.25 of that without it)" in page
    assert "stage 1: shadow from a" in page and "7.2 s" in page
    assert "Stages that were lost" in page and "red: a stage had nobody, from the loss of its last peer" in page
    assert scene.figures["recoveries"][0] == {
        "stage": 1, "life": 1, "founder": SPARE, "rung": "shadow", "ends": "", "misfit": 0.25, "failed": [], "bytes": 500, "lost_s": 7.0, "anew_s": 9.0, "made_s": 10.0, "serving_s": 11.5,
        "seconds": 4.5, "transfer_s": 0.75, "step_s": 2.5, "iterations": 1.5,
        "expected_s": 7.25, "why": "stage 1: shadow from a", "trials": 3, "trial": "trial 3",
    }  # fmt: skip
    assert "trial 3" in page and "of copies of other stages" not in page and scene.figures["shadows"] is None
    usual = {"swarm": "s", "height": 0, "version": 0, "step": 0, "stage": 0, "life": 0}
    net = usual | {
        "event": "net",
        "peer": HOME,
        "time": START + 19.0,
        "sent_bytes": 4000,
        "received_bytes": 0,
        "peers": 1,
    }
    copy = usual | {
        "event": "shadow",
        "peer": HOME,
        "of_step": 3,
        "received_bytes": 50,
        "allowed_bytes": 60,
        "reason": "need",
    }
    events = after_a_loss()
    for at, nbytes in ((5.0, 30), (6.0, 20)):
        events[HOME].append(copy | {"time": START + at, "stage": 1, "bytes": nbytes})
    events[HOME].append(net)
    copied = Scene(events=events, run=killed({RIGHT: 6.5, LEFT: 7.0}))
    assert copied.figures["shadows"] == {"refreshes": 2, "bytes": 50, "percent_of_sent": 1.25}
    assert "of copies of other stages; 2 times, 1.25 % of all that was sent" in render([copied])


def marks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Where the plots of losses have vertical lines: against seconds, tokens, bytes."""
    drawn: list[list[float]] = []

    def seen(figure: Figure, name: str, told: str) -> str:
        [axis] = figure.axes
        ends = [list(line.get_xdata()) for line in axis.lines]
        drawn.append([float(x[0]) for x in ends if len(x) == 2 and x[0] == x[1]])
        return ""

    monkeypatch.setattr(plots, "to_svg", seen)
    plots.plot_losses([scene])
    return drawn


def test_losses_are_marked_where_a_stage_was_lost_and_where_it_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events = after_a_loss()
    common = {"swarm": "s", "peer": HOME, "stage": 0, "height": 0, "version": 0, "step": 0}
    known = {"loss": 3.0, "tokens_per_s": 1.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 1.0, "samples": []}
    for at, tokens in ((3.0, 100), (6.0, 100), (15.0, 100)):
        events[HOME].append(common | known | {"event": "step", "time": START + at, "tokens": tokens})
    for at, sent in ((5.0, 1000), (9.0, 1500), (19.0, 4000)):
        events[HOME].append(
            common | {"event": "net", "time": START + at, "sent_bytes": sent, "received_bytes": 0, "peers": 1}
        )
    timed = Scene(events=events, run=killed({RIGHT: 6.5, LEFT: 7.0, HOME: 8.0}))
    assert marks(timed, monkeypatch) == [[7.0, 11.5], [200.0, 200.0], [1000.0, 1500.0]]
    events[SPARE].pop()  # it never computed
    assert marks(Scene(events=events, run=killed({LEFT: 7.0})), monkeypatch)[0] == [7.0]
    assert marks(scene_of(by_hand()), monkeypatch) == [[], [], []]


def test_copies_of_other_stages_are_told_by_peer_beside_what_was_allowed() -> None:
    def fetched(at: float, nbytes: int, received: int, allowed: int) -> dict[str, Any]:
        of = {"time": START + at, "event": "shadow", "swarm": "s", "peer": LEFT, "stage": 1, "height": 0, "version": 0}
        return of | {"step": 0, "of_step": 4, "bytes": nbytes, "received_bytes": received, "allowed_bytes": allowed, "reason": ""}  # fmt: skip

    events = by_hand()
    assert "copies" not in render([scene_of(events)])
    # two copies, and after a restart, from which on both are counted anew, another
    events[LEFT] += [fetched(1.0, 4000, 4000, 1000), fetched(2.0, 1000, 5000, 6000), fetched(3.0, 500, 500, 900)]
    assert copies_bytes(events[LEFT]) == (5500, 6900) and copies_bytes(events[HOME]) == (0, 0)
    page = render([scene_of(events)])
    assert "copies of stages, of what was allowed" in page and "5.5 kB of 6.9 kB" in page


def test_a_stage_that_was_lost_without_a_kill_or_never_served_has_no_figure() -> None:
    events = after_a_loss()
    [one] = recoveries_of(Scene(events=events, run=killed({HOME: 6.0, LEFT: 9.5})))
    assert one.lost is None and one.iterations is None and slowest_recovery([one]) is None, "the kill came later"
    events[SPARE].pop()
    scene = Scene(events=events, run=killed({LEFT: 7.0}))
    [one] = recoveries_of(scene)
    assert one.serving is None and one.seconds is None and slowest_recovery([one]) is None
    assert "Stages that were lost" in render([scene])
    events = after_a_loss()
    events[SPARE] = [
        event for event in events[SPARE] if event["event"] == "stage.anew"
    ]  # it was lost before it had begun
    scene = Scene(events=events, run=killed({LEFT: 7.0}))
    [one] = recoveries_of(scene)
    assert (one.rung, one.made, one.founder) == ("", None, SPARE) and slowest_recovery([one]) is None
    assert "nothing: it is not back" in render([scene])
    assert slowest_recovery([]) is None and "Stages that were lost" not in render([scene_of(by_hand())])


def test_the_trace_is_that_of_a_simulated_step() -> None:
    events = list(trace_events(scene_of(by_hand())))
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == COMPUTING]
    b01 = next(event for event in spans if event["name"] == "B0.1")
    assert b01 == {
        "ph": "X",
        "cat": "B",
        "name": "B0.1",
        "pid": pids["far/0"],
        "tid": COMPUTING,
        "args": {"stage": 1, "microbatch": 0, "hop": 1},
        "ts": pytest.approx(700_000.0, abs=1),
        "dur": pytest.approx(600_000.0, abs=1),
    }
    assert "train" not in {event["name"] for event in spans}  # they are told once
    sent = [event for event in events if event.get("cat") == "message" and event["ph"] == "X"]
    assert {event["tid"] for event in sent} == {SENDING} and len(sent) == 4
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 4 and ends.keys() < starts.keys()  # who was killed wrote nothing of what came to it
    assert all(ends[number]["ts"] >= starts[number]["ts"] for number in ends)


def test_messages_that_go_out_at_the_same_time_have_tracks_of_their_own() -> None:
    """Three, of which the second begins before the first is over, and one of the next step begins before the last of this one is: nothing overlaps on any track,
    also after rounding."""
    events = by_hand()
    first, second = events[HOME]
    third = 1.0 / 3.0
    first["sent"] = [
        ["F", 0, 1, LEFT[:8], 100 + third, 200 + third],
        ["F", 1, 1, RIGHT[:8], 150 + third, 310 + third],
        ["B", 0, 1, LEFT[:8], 200 + third, 3200 + third],
    ]
    second["sent"] = [["F", 0, 1, RIGHT[:8], 100, 250], ["F", 1, 1, LEFT[:8], 250, 300]]
    told = list(trace_events(scene_of(events)))
    tracks = track_spans(told)
    assert all(before[1] <= after[0] for spans in tracks.values() for before, after in pairwise(spans))
    home = next(one["pid"] for one in told if one["name"] == "process_name" and one["args"]["name"] == "home/0")
    named = {one["tid"]: one["args"]["name"] for one in told if one["name"] == "thread_name" and one["pid"] == home}
    sending = {name: len(tracks[home, tid]) for tid, name in named.items() if tid >= SENDING}
    assert sending == {"sending": 3, "sending 2": 2}
    spans = {(one["pid"], one["tid"], one["ts"]) for one in told if one["ph"] == "X"}
    assert all((one["pid"], one["tid"], one["ts"]) in spans for one in told if one["ph"] == "s"), "arrows begin at them"


def track_spans(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Begin and end of the spans of each track, in their order."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in events:
        if one["ph"] == "X":
            tracks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    return {track: sorted(spans) for track, spans in tracks.items()}


def test_an_operation_that_waited_for_an_outer_step_is_told_from_its_turn_on() -> None:
    events = by_hand()
    applied = {
        "event": "span",
        "what": "apply",
        "round": 1,
        "seconds": 0.2,
        "stage": 1,
        "time": START + 0.95,
        "peer": LEFT,
    }
    events[LEFT] = [applied, *events[LEFT]]
    its = [one for one in trace_events(scene_of(events)) if one["ph"] == "X" and one["tid"] == COMPUTING]
    b01 = next(one for one in its if one["name"] == "B0.1")
    assert (b01["ts"], b01["dur"]) == (950_000, 350_000), "not from 0.7 s on"
    applies = next(one for one in its if one["name"] == "apply")
    assert applies["pid"] == b01["pid"] and applies["ts"] + applies["dur"] == b01["ts"]


def test_the_page_tells_of_a_pipeline_and_draws_a_map_where_regions_are_known() -> None:
    page = render([scene_of(by_hand())])
    for said in ("Steps of the pipeline", "Routes", "Peers of each stage", "Seconds of each step", "stage 1"):
        assert said in page
    assert "far/0 took over microbatch 0" in page and "1 rerouted, 1 cut short" in page
    assert "http" not in page.replace("http-equiv", "")
    nowhere, somewhere = (
        scene_of(by_hand()),
        scene_of(by_hand(), **{"home/0": "Iowa", "far/0": "London", "far/1": "Japan"}),
    )
    assert "Iowa" not in plot_routes(nowhere) and "far/0" in plot_routes(nowhere)
    assert all(f">{region}<" in plot_routes(somewhere) for region in ("Iowa", "London", "Japan"))
    calm = {peer: one[:1] for peer, one in by_hand().items()}
    assert "Nothing went wrong in any step." in render([scene_of(calm)])


def test_a_swarm_under_virtual_time_can_be_drawn() -> None:
    """Every visit that its data nodes counted is in the logs, no peer does two things at once, and the lost one's work is taken over."""
    kills: list[tuple[float, int]] = []

    async def story(swarm: PipelineSwarm) -> None:
        for peer in range(4):
            swarm.start(peer)
        await until(swarm, lambda: steps_done(swarm) >= 3)
        victim = max((p for p in swarm.peers if stage_of(swarm, p) == 1), key=swarm.ids.__getitem__)
        job = swarm.peers[victim].pipeline
        await until(swarm, lambda: job.work.job is not None and job.work.job.goes)
        await asyncio.sleep(1.0)
        kills.append((swarm.hub.now(), victim))
        swarm.kill(victim)
        await until_done(swarm, *(p for p in range(4) if p != victim))

    swarm = simulate(recipe(total_steps=8), Counting(), signers(4), story)
    assert not swarm.broken
    keys = [key.hex() for key in swarm.ids]
    events: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    for _, who, event in swarm.events:
        events[keys[who]].append(event)
    (killed_at, victim), ended = kills[0], max(event["time"] for _, _, event in swarm.events)
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith("| `pipeline.step` "))
    assert set(swarm.happened("pipeline.step")[0]) - HEADING <= set(re.findall(r"`(\w+)`", row))
    scene = Scene(
        events=events,
        run=RunFacts(
            name="virtual",
            started=START_UNIX_S,
            ended=ended,
            peers=[PeerFacts(peer=key, name=f"peer/{number}") for number, key in enumerate(keys)],
            timeline=[Incident(time=killed_at, what="kill", peer=keys[victim])],
        ),
    )
    steps = scene.steps
    assert [step.number for step in steps] == list(range(8))
    assert sum(one.landed + one.cut for one in steps) == 8 * 4
    calm = [one for one in steps if not one.trouble]
    for one in calm:
        kinds = [ran.op.kind for ran in one.timeline.ran]
        assert kinds.count(Kind.LOSS) == one.landed == 4
        assert kinds.count(Kind.F) == kinds.count(Kind.B) == 2 * 4
        assert all(len(route) == 2 for route in one.routes.values())
        sent = {(str(message.op), message.receiver) for message in one.timeline.sent}
        assert {(str(ran.op), ran.peer) for ran in one.timeline.ran if ran.op.hop == 1} <= sent
    for one in steps:
        for place in range(len(one.timeline.peers)):
            its = sorted((ran.begin_s, ran.end_s) for ran in one.timeline.ran if ran.peer == place)
            assert all(before[1] <= after[0] + 2e-3 for before, after in pairwise(its))
    (hit,) = [one for one in steps if keys[victim] in one.lost]
    assert hit.trouble and hit in window_steps(scene)
    assert any(one.what == "rebound" for one in hit.takeovers)
    counts = stage_counts(scene)
    last = killed_at - START_UNIX_S
    assert counts.keys() == {0, 1} and max(n for _, n in counts[1]) == 2
    assert (1 in {n for at, n in counts[1] if at >= last - 1e-6}) and 2 not in {
        n for at, n in counts[1] if at > last + 1
    }
    tracks = track_spans(list(trace_events(scene)))
    assert all(before[1] <= after[0] for spans in tracks.values() for before, after in pairwise(spans))
    page = render([scene])
    assert "was lost" in page and "took over microbatch" in page
