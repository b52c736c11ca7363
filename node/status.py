"""What a node is doing, as `farflung status` and the live view show it: a fold over the node's own events.

The daemon folds its events as it emits them and answers `status` with the result; a terminal that follows the
events of a running node folds them the same way. So there is one account of a node, and it is the one that
the event file tells.
"""

from typing import Any

import msgspec

RECENT_LOSSES = 60
"""Losses kept for the small curve in the terminal."""

PHASES = {"round.plan": "planned", "round.scatter": "sending", "round.cut": "reducing"}


class MissedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round that this peer's contribution did not get into, and why."""

    round: int
    reason: str


class HeldCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A shadow of another stage that this node holds."""

    stage: int
    step: int
    """That it is of."""


class BegunAnew(msgspec.Struct, frozen=True, kw_only=True):
    """A stage that was lost, and its newest life as far as this node knows."""

    stage: int
    life: int
    """Its number."""
    founder: str
    """Who begins it: public key in hex."""
    reason: str = ""
    """What its founder tries first, what that is expected to cost, and why so; empty where that is another node."""
    failed: list[str] = []
    """What its founder has tried in vain, and why; empty where that is another node."""
    rung: str = ""
    """What the founder has made the stage of; empty where that is another node."""
    ends: str = ""
    """Of stage 0, what has become of embedding, last norm and head in that; empty as before."""
    misfit: float | None = None
    """Its error on what neighbours remember of the lost one, relative to no stage; None where none does, and where the founder is another node."""
    copy_step: int | None = None
    """Step of this node's copy of the stage that the founder has fetched to begin with; None where it has fetched none here."""


class NodeStatus(msgspec.Struct, kw_only=True):
    """One running node, for people and scripts. Rates are per second; `*_s` are seconds, `*_bytes` bytes."""

    swarm: str
    peer: str
    """Public key in hex."""
    lap: int = 0
    """Inner steps between two rounds, as of the last commit; 0 when unknown."""
    total_steps: int = 0
    """Global inner steps after which the swarm is done; 0 when unknown."""
    pid: int = 0
    device: str = ""
    agent: str = ""
    started: float = 0.0
    """Unix seconds of `node.start`."""
    time: float = 0.0
    """Unix seconds of the last event."""
    state: str = "starting"
    reason: str = ""
    height: int = 0
    version: int = 0
    step: int = 0
    loss: float | None = None
    outer_loss: float | None = None
    """Last held-out loss of the outer parameters."""
    outer_version: int | None = None
    """The round after which that was measured."""
    outer_few_loss: float | None = None
    """That of a few held-out samples, as of the last evaluation; None in pipelines."""
    tokens_per_s: float = 0.0
    tokens: int = 0
    """Trained by this node since it started."""
    swarm_tokens: int = 0
    """Of the swarm, as of the last evaluation."""
    peers: int = 0
    """Other peers connected."""
    sent_bytes: int = 0
    received_bytes: int = 0
    round: int = 0
    """The round under way, or the last one."""
    phase: str = ""
    """`planned`, `sending`, `reducing`; empty between rounds."""
    rounds_done: int = 0
    rounds_contributed: int = 0
    rounds_missed: int = 0
    last_missed: MissedRound | None = None
    last_round_s: float = 0.0
    owed: float | None = None
    """What our last contribution left out, its norm in norms of the pseudo-gradient; None while there is no error feedback."""
    next_sync_s: float | None = None
    """Forecast until this node has done its steps of a round."""
    synced_chunks: int = 0
    chunks: int = 0
    """Progress of a late join; 0 of 0 when there is none."""
    recent_losses: list[float] = []
    round_step: int = 0
    """Step at the last commit."""
    stage: int | None = None
    """Of a pipeline, that this node serves; None where every node holds the whole model."""
    stage_peers: list[int] = []
    """How many serve each stage."""
    alarm: dict[str, int] = {}
    """By stage, the replicas of those that have fewer than two: with the last of them a stage is lost."""
    lost: str = ""
    """Why the chain of this node's stage can decide nothing, for long; empty while it can."""
    disk_full: dict[str, str] = {}
    """What of this node waits for room on the disk, and what helps."""
    log_full: str = ""
    """Why the node's events cannot be written to its log, and what helps; empty while they can."""
    lines_unwritten: int = 0
    """Events that the log lacks for that, since the last time that it could be written."""
    last_step_s: float = 0.0
    """Of the pipeline's last step that went through this node."""
    coordinator: str = ""
    """Who planned that step: public key in hex; empty before the first one."""
    shadow_bytes: int = 0
    """Of copies of other stages that this node has fetched since it started."""
    shadow_budget_bytes: int = 0
    """What the manifest allowed for them until the last one."""
    copies: list[HeldCopy] = []
    """Of other stages, by stage, that this node holds."""
    no_place: list[str] = []
    """Which stages that need a copy have no place for one, and why; of data nodes."""
    joined: str = ""
    """From whom this node has, or gets, the state of its stage, and why so; empty where it began the stage, or had that on its disk."""
    trial: str = ""
    """Of a data node: what its last trial of a stage that was begun anew came to; empty before the first."""
    recovered: list[BegunAnew] = []
    """By stage, those that were lost."""
    group: str = ""
    """Of the swarm, that this node is in: hex; empty: its first."""
    group_members: int = 0
    """Who may vote there, as of the last commit; 0 when unknown."""
    met: int = 0
    """Parts of rounds into which this node has mixed how another group stands."""
    refused: int = 0
    """Bad messages, streams and records of others."""
    last_refused: str = ""
    """Why, and the first digits of whose key."""
    visits_lost: int = 0
    """Microbatches of this node that did not come home, and peers whose work on them did not count."""

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event of this node into account. Unknown events only move the clock."""
        self.time = event.get("time", self.time)
        self.height = event.get("height", self.height)
        self.version = event.get("version", self.version)
        self.step = event.get("step", self.step)
        self._apply_log(event)
        match event["event"]:
            case "data.opening":
                if not self.started:  # who moves to stage 0 opens them, too, and has other reasons meanwhile
                    self.reason = f"opening the data ({event['spec']})"
            case "node.start":
                self.started, self.state, self.reason, self.lost = self.time, "joining", "", ""
                self.pid, self.device, self.agent = event["pid"], event["device"], event["agent"]
                self.stage, self.copies, self.no_place, self.alarm = event.get("stage"), [], [], {}
                self.disk_full = {}
                self.round_step = self.step
            case "node.stop":
                self.state, self.reason, self.next_sync_s = "stopped", event["reason"], None
            case "node.state":
                self.state, self.reason = event["state"], event["reason"]
                if self.state != "training":
                    self.next_sync_s = None
            case "step":
                self._apply_step(event)
            case "round.plan" | "round.scatter" | "round.cut":
                self.round, self.phase = event["round"], PHASES[event["event"]]
            case "round.commit":
                self.round, self.phase, self.round_step = event["round"], "", self.step
                self.lap = event["lap"]
                self.rounds_done += 1
                self.rounds_contributed += bool(event["contributed"])
                self.last_round_s = event["seconds"]
                if event["owed"] is not None:
                    self.owed = event["owed"]
            case "group.divided":
                self.group, self.group_members = event["group"], len(event["view"])
            case "group.met":
                self.met += 1
            case "view.commit":
                self.group_members = len(event["view"])
            case "round.missed":
                self.phase = ""
                self.rounds_missed += 1
                self.last_missed = MissedRound(round=event["round"], reason=event["reason"])
            case "pipeline.step":
                self.stage_peers, self.last_step_s = event["peers"], event["seconds"]
                self.coordinator = event["coordinator"]
                self.visits_lost += event["cut"] + len(event["lost"])
            case "stage.alarm":
                self.alarm = event["replicas"]
            case "disk.full":
                self.disk_full = {what: why for what, why in self.disk_full.items() if what != event["what"]}
                if event["reason"]:
                    self.disk_full[event["what"]] = event["reason"]
            case "stage.lost":
                self.lost = event["reason"]
            case "shadow":
                self.shadow_bytes, self.shadow_budget_bytes = event["received_bytes"], event["allowed_bytes"]
                self._holds(event["stage"], HeldCopy(stage=event["stage"], step=event["of_step"]))
            case "shadow.held":
                self._holds(event["stage"], HeldCopy(stage=event["stage"], step=event["of_step"]))
            case "shadow.missing":
                self.no_place = event["reasons"]
            case "shadow.dropped":
                self._holds(event["stage"], None)
            case "stage.trial":
                self.trial = event["reason"]
            case "stage.join":
                self.joined = event["reason"]
            case "stage.anew":
                self._begun_anew(event, founder=event["founder"])
            case "stage.waits":
                self._begun_anew(event, founder=self.peer, reason=event["reason"])
            case "stage.unmade":
                same = [one for one in self.recovered if (one.stage, one.life) == (event["stage"], event["life"])]
                before = [why for one in same for why in one.failed]
                failed = [*before, f"{event['rung']} ({event['reason']})"]
                self._begun_anew(event, founder=self.peer, failed=failed)
            case "stage.recovery":
                self._begun_anew(event, founder=self.peer, reason=event["reason"])
            case "stage.made":
                made = {name: event[name] for name in ("rung", "ends", "misfit")}
                self._begun_anew(event, founder=self.peer, **made)
            case "shadow.given":
                self._begun_anew(event, founder=event["to"], copy_step=event["of_step"])
            case "outer.eval":
                self.swarm_tokens = event["tokens"]
                if event["loss"] is None:
                    self.outer_few_loss = event["few_loss"]
                else:
                    self.outer_loss, self.outer_version = event["loss"], event["version"]
            case "net":
                self.sent_bytes, self.received_bytes = event["sent_bytes"], event["received_bytes"]
                self.peers = event["peers"]
            case "refused":
                self.refused += 1 + event["more"]
                self.last_refused = f"{event['reason']} ({event['of'][:12] or 'nobody knows whose'})"
            case "state.sync":
                self.synced_chunks, self.chunks = event["chunks_done"], event["chunks"]

    def _apply_log(self, event: dict[str, Any]) -> None:
        """Whether the log has this event."""
        match event["event"]:
            case "log.full":
                self.log_full, self.lines_unwritten = event["reason"], event["count"]
            case "log.unwritten":
                self.log_full, self.lines_unwritten = "", event["count"]
            case _ if self.log_full:
                self.lines_unwritten += 1

    def _holds(self, stage: int, copy: HeldCopy | None) -> None:
        """This copy of a stage, or none any more."""
        others = [one for one in self.copies if one.stage != stage]
        self.copies = sorted([*others, *([copy] if copy else [])], key=lambda one: one.stage)

    def _begun_anew(self, event: dict[str, Any], **known: Any) -> None:
        """Something is `known` of the life that an event is about, which ends the earlier ones of its stage."""
        stage, life = event["stage"], event["life"]
        others = [one for one in self.recovered if one.stage != stage]
        before = next((one for one in self.recovered if one.stage == stage), None)
        if before is None or before.life < life:
            others.append(BegunAnew(stage=stage, life=life, **known))
        elif before.life == life:
            others.append(msgspec.structs.replace(before, **known))
        else:
            return
        self.recovered = sorted(others, key=lambda one: one.stage)

    def _apply_step(self, event: dict[str, Any]) -> None:
        self.loss, self.tokens_per_s = event["loss"], event["tokens_per_s"]
        self.tokens += event["tokens"]
        if self.loss is not None:  # a loss that is not finite is null in JSON
            self.recent_losses = [*self.recent_losses[1 - RECENT_LOSSES :], self.loss]
        if self.lap and self.tokens_per_s > 0:
            left = max(0, self.lap - (self.step - self.round_step))
            self.next_sync_s = left * event["tokens"] / self.tokens_per_s


class PeerStatus(msgspec.Struct, kw_only=True):
    """Another peer, as this node sees it; one row of `farflung peers`."""

    peer: str
    """Public key in hex."""
    state: str
    """`alive`, `suspect`, `dead` or `left`, and `self` for the node that answers."""
    member: bool = False
    """It may vote, in the chain of its stage where there are several."""
    stage: int | None = None
    """Of a pipeline, that it serves; None where every node holds the whole model, or while it has none."""
    region: str = ""
    """Of a pipeline: where it says that it stands, and whose it is; empty where it does not."""
    owner: str = ""
    device: str = ""
    """Empty while unknown, and for peers of other stages."""
    tokens_per_s: float = 0.0
    """0 for peers of other stages, which tell `forward_s`."""
    forward_s: float = 0.0
    """Of a pipeline: seconds that one microbatch takes forward through its stage; 0 while unknown."""
    uplink_bytes_per_s: float = 0.0
    """That it has measured of its own uplink; 0 while unknown."""
    downlink_bytes_per_s: float = 0.0
    """The most that it has lately received at: its downlink gives at least that. 0 while unknown, and for peers of other stages."""
    version: int = 0
    """Of the outer state that it holds: of its stage."""
    step: int = 0
    last_seen_s: float | None = None
    """Seconds since the last message; None when none came yet."""
    carrier: str = ""
    """`tls` or `libp2p`: what bulk to this peer uses."""
    up_bytes_per_s: float = 0.0
    """Of the link from this node to it, as seen; down: from it."""
    down_bytes_per_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    addresses: list[str] = []


class SamplesOf(msgspec.Struct, kw_only=True):
    """The samples of one peer, by the ledger."""

    peer: str
    """Public key in hex."""
    samples: int
    intervals: list[tuple[int, int]]
    """Numbers, [start, stop), in the order in which it trains them."""
    until_version: int | None = None
    """It is gone, and they are kept for it until the outer state has this version; None for a member."""


class SampleStop(msgspec.Struct, kw_only=True):
    """Where a sample was for a while."""

    height: int
    """Of the commit since which it was there; of the first stop that is told of: by which."""
    state: str
    """`ahead` (not handed out yet), `held`, `suspended` (its holder is gone), `free` (to be handed out again), or `trained`."""
    peer: str | None = None
    """Who holds it, for whom it is kept, or who trained it; None for nobody, or where nobody here knows any more."""


class SampleStatus(msgspec.Struct, kw_only=True):
    """One sample, as far as the commits tell that this node keeps."""

    number: int
    epoch: int
    stops: list[SampleStop]
    """Oldest first; the last one is where it is."""


class LedgerStatus(msgspec.Struct, kw_only=True):
    """Which sample belongs to whom: the answer of `farflung ledger`. Samples are numbered on from epoch to epoch."""

    swarm: str
    height: int
    version: int
    num_samples: int
    """Of one epoch."""
    epoch: int
    """To which the next sample belongs that is handed out for the first time."""
    cursor: int
    """Samples handed out so far, of all epochs: all numbers below it."""
    trained: int
    """Of these, those that rounds have counted."""
    epoch_handed_out: int
    epoch_trained: int
    """The same of this epoch alone."""
    earlier_left: int
    """Of earlier epochs, those that no round has counted yet."""
    held: list[SamplesOf]
    free: list[tuple[int, int]]
    """To be handed out again: their holders have left, or stayed away for too long."""
    suspended: list[SamplesOf]
    since_height: int
    """Of the oldest commit that this node keeps."""
    trained_by: dict[str, int]
    """Samples of each peer that rounds have counted since then."""
    sample: SampleStatus | None = None
    """The one that was asked about."""


class FreshInvitation(msgspec.Struct, kw_only=True):
    """The answer of `farflung invite`."""

    invitation: str
    full_name: str
    """The swarm's name with its founder's fingerprint: what it is called everywhere."""
