"""How a pipeline got a lost stage back: when its last peer went, when the others had agreed on that, what it was made of, when it computed again, and how that was tried
before it counted.

Worked out from the nodes' events and from who was killed when. A recovery is measured in steps of the pipeline as they were before, without the time
that it took to fetch what the stage was made of: that depends on its size and the link, and is told beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from farflung.sims.logs import Events
from farflung.sims.pipeline_log import LoggedStep

STEPS_BEFORE = 10
"""Steps before the loss, whose median is what a step takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """A stage that was begun anew. Times are unix seconds."""

    stage: int
    life: int
    """Number of the new life."""
    lost: float | None
    """When the last of its peers was killed; None where none was, as when a chain has lost its quorum to goodbyes."""
    anew: float
    """When the first peer heard that the chain of stage 0 begins it anew."""
    founder: str
    """Who was to begin it: public key in hex."""
    made: float | None
    """When its founder had its state; None where it never had, as when it was lost, too."""
    rung: str
    """What it was made of; empty where it was not."""
    ends: str
    """Of stage 0, what has become of embedding, last norm and head."""
    misfit: float | None
    """Its error on what neighbours remember of the lost one, relative to no stage; None where none does."""
    failed: tuple[str, ...]
    """What was tried in vain, and why."""
    nbytes: int
    transfer_s: float
    """Until what it was made of was here."""
    serving: float | None
    """When the founder first computed for the pipeline; None where it never did."""
    step_s: float | None
    """Of the pipeline before the loss; None where it had not made a step."""
    expected_s: float | None
    """What its founder expected of it: seconds of tries, and of the iterations that the stage then lags behind. None where its log does not tell."""
    why: str
    """What it had in mind, and why; empty where its log does not tell."""
    trials: int
    """Steps in which data nodes tried what it gives, each by itself."""
    trial: str
    """What the last of them came to; empty where there was none."""

    @property
    def seconds(self) -> float | None:
        """From the loss until the stage computed again."""
        return None if self.lost is None or self.serving is None else self.serving - self.lost

    @property
    def iterations(self) -> float | None:
        """The same in steps, without the transfer."""
        if self.seconds is None or not self.step_s:
            return None
        return (self.seconds - self.transfer_s) / self.step_s


def recoveries(
    events_by_peer: Events, steps: Sequence[LoggedStep], kills: Mapping[str, Sequence[float]]
) -> list[Recovered]:
    """All of them, in the order in which they were decided, but for lives that came to nothing and were followed by others; `kills`: by key, unix seconds."""
    founders = dict[tuple[int, int], str]()
    for peer, events in events_by_peer.items():
        for event in events:
            if event["event"] == "stage.anew":
                founders.setdefault((event["stage"], event["life"]), event["founder"])
            elif event["event"] == "stage.made":
                founders[event["stage"], event["life"]] = peer
    found = [
        _recovered(founder, stage, life, events_by_peer, steps, kills) for (stage, life), founder in founders.items()
    ]
    newest = {stage: max(life for one, life in founders if one == stage) for stage, _ in founders}
    told = [one for one in found if one.made is not None or one.life == newest[one.stage]]
    return sorted(told, key=lambda one: (one.anew, one.stage))


def told(recovered: Recovered, started: float) -> dict[str, Any]:
    """As `report.json` has it; times are seconds from the run's start."""

    def since_start(time: float | None) -> float | None:
        return None if time is None else round(time - started, 2)

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 2)

    return {
        "stage": recovered.stage,
        "life": recovered.life,
        "founder": recovered.founder,
        "rung": recovered.rung,
        "ends": recovered.ends,
        "misfit": rounded(recovered.misfit),
        "failed": list(recovered.failed),
        "bytes": recovered.nbytes,
        "lost_s": since_start(recovered.lost),
        "anew_s": since_start(recovered.anew),
        "made_s": since_start(recovered.made),
        "serving_s": since_start(recovered.serving),
        "seconds": rounded(recovered.seconds),
        "transfer_s": rounded(recovered.transfer_s),
        "step_s": rounded(recovered.step_s),
        "iterations": rounded(recovered.iterations),
        "expected_s": rounded(recovered.expected_s),
        "why": recovered.why,
        "trials": recovered.trials,
        "trial": recovered.trial,
    }


def _recovered(
    founder: str,
    stage: int,
    life: int,
    events_by_peer: Events,
    steps: Sequence[LoggedStep],
    kills: Mapping[str, Sequence[float]],
) -> Recovered:
    def of_life(events: Iterable[Mapping[str, Any]], name: str, key: str = "stage") -> list[Mapping[str, Any]]:
        found = [one for one in events if one["event"] == name and (one[key], one["life"]) == (stage, life)]
        return sorted(found, key=lambda event: event["time"])

    everybody = [event for events in events_by_peer.values() for event in events]
    own = events_by_peer.get(founder, ())
    decided, failed = of_life(own, "stage.recovery"), of_life(own, "stage.unmade")
    made = next(iter(of_life(own, "stage.made")), None)
    tried = of_life(everybody, "stage.trial", "of")
    known = [*of_life(everybody, "stage.anew"), *([made] if made is not None else [])]
    anew = min(event["time"] for event in known)
    deaths = [
        at
        for peer, times in kills.items()
        for at in times
        if at <= anew and _stage_at(events_by_peer.get(peer, ()), at) == stage
    ]
    lost = max(deaths, default=None)
    before = [step.seconds for step in steps if lost is not None and step.end <= lost][-STEPS_BEFORE:]
    return Recovered(
        stage=stage,
        life=life,
        lost=lost,
        anew=anew,
        founder=founder,
        made=None if made is None else made["time"],
        rung="" if made is None else made["rung"],
        ends="" if made is None else made["ends"],
        misfit=None if made is None else made["misfit"],
        failed=tuple(f"{event['rung']}: {event['reason']}" for event in failed),
        nbytes=0 if made is None else made["bytes"],
        transfer_s=0.0 if made is None else made["fetch_s"],
        serving=None if made is None else _first_operation(own, stage, made["time"]),
        step_s=median(before) if before else None,
        expected_s=decided[-1]["expected_s"] if decided else None,
        why=decided[-1]["reason"] if decided else "",
        trials=len(tried),
        trial=tried[-1]["reason"] if tried else "",
    )


def _stage_at(events: Sequence[Mapping[str, Any]], time: float) -> int | None:
    """The stage that a peer computed last before then."""
    stages = [event["stage"] for event in events if event["event"] == "pipeline.step" and event["time"] <= time]
    return stages[-1] if stages else None


def _first_operation(events: Sequence[Mapping[str, Any]], stage: int, since: float) -> float | None:
    begun = [
        event["time"] - event["seconds"] + began / 1000.0
        for event in events
        if event["event"] == "pipeline.step" and event["stage"] == stage
        for _, _, _, began, _ in event["ops"]
    ]
    return min((at for at in begun if at >= since), default=None)
