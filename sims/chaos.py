"""Small swarms with toy learners under seeded misfortune: what `make soak` runs by the hundred, and tests meddle with.

In every seventh seed groups of more than three become two. One seed draws 3 to 24 peers and a schedule of joins, leaves, kills, pauses, partitions, lost, doubled and late messages, and a calm stretch after it. `brisk` ones are
small and short, and go by the ten thousand: 3 to 6 peers with quick steps, hit every few seconds for a minute and a half. In `dark` ones these lose power all at once. Run by hand:

    python -m farflung.sims.chaos --kind brisk --seeds 10000 --repeat-every 10   # `make soak`
    python -m farflung.sims.chaos --kind dark --seeds 1000 --repeat-every 10   # as well
    python -m farflung.sims.chaos --seeds 500 --repeat-every 10   # as well
    python -m farflung.sims.chaos --seed 17 --events              # one schedule, with its log
    python -m farflung.sims.chaos --seed 17 --twice               # and once more: the log has to be the same
"""

import hashlib
import math
import random
from dataclasses import dataclass, field, replace

from farflung.compression.codec import Codec
from farflung.compression.int8 import Int8
from farflung.compression.policy import uniform
from farflung.node.terms import Terms
from farflung.node.trainer import Pace
from farflung.protocol.chain import Rules
from farflung.protocol.keys import Ed25519Signer
from farflung.protocol.lap import Laps
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.sims.aftermath import add_what_logs_show
from farflung.sims.blackout import blackout
from farflung.sims.fault_drawing import MAX_PEERS, ChurnModel, draw_schedule
from farflung.sims.faults import Schedule
from farflung.sims.outer_audit import known_means
from farflung.sims.simulation import Meddler, Plan, Report, simulate
from farflung.sims.soak import soak
from farflung.sims.swarm import Outfit
from farflung.sims.toy import ToyLearner
from farflung.sims.witness import Witness
from farflung.training.rules import Nesterov, OuterRule

NUMEL = 1500
BLOCK = 32
INNER_STEPS = 4
LIVE = Laps(least=INNER_STEPS, most=4 * INNER_STEPS)
FRAGMENTS = 3
SAMPLES_PER_STEP = 2
TOKENS_PER_SAMPLE = 8
OUTER = Nesterov(lr=0.7, momentum=0.5)
CHURN_S = 300.0
CALM_S = 240.0
BRISK_CHURN_S = 90.0
BRISK_CALM_S = 45.0
BRISK_PEERS = 6
DARK_AT_S = (30.0, 80.0)
"""Within which all lose power."""
DARK_S = 12.0
DARK_THEN_S = 110.0
DARK_FEEDBACK = (
    FeedbackSpec(),
    FeedbackSpec(),
    FeedbackSpec(uplink="residual", downlink="residual"),
    FeedbackSpec(uplink="kept"),
)
NEWCOMER_S = 15.0
"""Until a newcomer gives up a group that is gone: with the verdict that it is gone, and a round elsewhere, well within the shortest calm stretch."""
HAND_S = 0.002
"""What everything but training takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How a swarm encodes, in both directions, and how it trains."""

    codec: Codec = field(default_factory=lambda: Int8(block=BLOCK))
    feedback: FeedbackSpec = field(default_factory=FeedbackSpec)
    numel: int = NUMEL
    checkpoint_s: float = 60.0
    min_contributors: int = 1
    pace: Pace | None = None
    """None: four steps a round, and every other seed trains on while rounds are under way; every fifth chooses its laps, and how many fragments a round
    moves where there are several."""
    fragments: int | None = None
    """Synchronised in turn. None: one, and in every third seed three."""
    last: Codec | None = None
    """Of the last round, where it has one of its own."""
    outer: OuterRule = OUTER
    mix: float | None = None
    """alpha; None rebases."""
    step_s: tuple[float, ...] = ()
    """Seconds of each peer's steps; empty: drawn by the seed."""


INT8 = Wire()


def toy_outfit(seed: int, schedule: Schedule, wire: Wire = INT8) -> Outfit:
    """Nodes with toy learners; the seed draws their keys and speeds."""
    signers = [
        Ed25519Signer(hashlib.sha256(f"{seed}/{index}".encode()).digest()) for index in range(schedule.num_peers)
    ]
    drawn = [random.Random(f"{seed}/speed/{index}").uniform(2.5, 7.5) for index in range(schedule.num_peers)]
    step_s = wire.step_s or drawn
    fragments = wire.fragments or (FRAGMENTS if seed % 3 == 0 else 1)
    live = replace(LIVE, widths=(1, fragments)) if fragments > 1 else LIVE
    pace = wire.pace or Pace(
        laps=live if seed % 5 == 4 else Laps.fixed(INNER_STEPS, seed % 2 * (INNER_STEPS - 1)),
        samples_per_step=SAMPLES_PER_STEP,
        tokens_per_sample=TOKENS_PER_SAMPLE,
        total_steps=1 << 40,
    )
    flat = uniform(wire.codec, wire.numel)
    settings = Settings(
        swarm=hashlib.sha256(f"swarm {seed}".encode()).digest(),
        founder=signers[schedule.founder].peer_id,
        rules=Rules(
            ahead=3 * pace.samples_per_step,
            lease=3,
            max_group=3 if seed % 7 == 6 else 64,
            divides=True,
            cuts=_cuts(wire, fragments),
            laps=pace.laps,
            total_steps=pace.total_steps,
            tokens_per_sample=pace.tokens_per_sample,
        ),
        step_tokens=pace.step_tokens,
        align=wire.codec.block,
        uplink=wire.codec.spec,
        downlink=wire.codec.spec,
        last_codec="" if wire.last is None else wire.last.spec,
        bytes_per_element=1.1,
        last_bytes_per_element=1.1,
        min_contributors=wire.min_contributors,
        min_round_s=3.0,
        max_round_s=30.0,
        waves_from_s=0.0 if seed % 4 in (1, 2) else math.inf,
        removal_s=10.0,
        vain_s=NEWCOMER_S,
        heartbeat_s=2.0,
        admits=lambda peer, token: True,
    )
    return Outfit(
        signers=signers,
        terms=Terms(
            settings=settings,
            pace=pace,
            uplink=flat,
            downlink=flat,
            feedback=wire.feedback,
            outer=wire.outer,
            last=None if wire.last is None else uniform(wire.last, wire.numel),
            meet_every=4,
        ),
        learner=lambda index: ToyLearner(wire.numel, wire.outer, mix=wire.mix),
        seconds=lambda index, name, share: step_s[index] if name == "train" else HAND_S,
        checkpoint_s=wire.checkpoint_s,
    )


def _cuts(wire: Wire, fragments: int) -> tuple[int, ...]:
    """About equal fragments that begin at whole blocks."""
    blocks = wire.numel // wire.codec.block
    inner = [index * blocks // fragments * wire.codec.block for index in range(1, fragments)]
    return (0, *inner, wire.numel)


def drawn_schedule(seed: int, *, churn_s: float = CHURN_S, max_peers: int = MAX_PEERS) -> Schedule:
    """The misfortune of one seed."""
    rng = random.Random(seed)
    num_peers = rng.randint(3, max_peers)
    churn = ChurnModel(calm_s=CALM_S, min_rejoin_s=8.0)
    return draw_schedule(rng, num_peers, churn_s + CALM_S, churn)


def toy_plan(seed: int, schedule: Schedule, wire: Wire = INT8, *, calm_s: float = CALM_S) -> Plan:
    """A schedule over toy learners, with the judge looking at everything that the codec lets it compare."""
    outfit = toy_outfit(seed, schedule, wire)
    return Plan(seed=seed, schedule=schedule, outfit=outfit, calm_s=calm_s, known_means=known_means(outfit.terms))


def brisk_plan(
    seed: int, *, churn_s: float = BRISK_CHURN_S, calm_s: float = BRISK_CALM_S, fragments: int | None = None
) -> Plan:
    """A small swarm in which something goes wrong every few seconds, and rounds are quick: much happens in little time."""
    rng = random.Random(seed)
    churn = ChurnModel(calm_s=calm_s, mean_gap_s=8.0, mean_outage_s=12.0, min_rejoin_s=8.0)
    schedule = draw_schedule(rng, rng.randint(3, BRISK_PEERS), churn_s + calm_s, churn)
    step_s = tuple(random.Random(f"{seed}/speed/{peer}").uniform(0.6, 1.8) for peer in range(schedule.num_peers))
    return toy_plan(seed, schedule, Wire(step_s=step_s, fragments=fragments), calm_s=calm_s)


def dark_plan(seed: int) -> Plan:
    """A small swarm of the brisk kind, in the middle of which all machines lose power at once, as those of one home do; later all of them come back."""
    rng = random.Random(f"dark/{seed}")
    peers, at = rng.randint(3, BRISK_PEERS), rng.uniform(*DARK_AT_S)
    churn = ChurnModel(calm_s=0.0, mean_gap_s=rng.choice((4.0, 8.0, 15.0)), mean_outage_s=10.0, min_rejoin_s=6.0)
    schedule = blackout(draw_schedule(rng, peers, at + 1.0, churn), at, away_s=DARK_S, then_s=DARK_THEN_S)
    wire = Wire(
        step_s=tuple(rng.uniform(0.6, 1.8) for _ in range(peers)),
        fragments=rng.choice((1, 1, FRAGMENTS)),
        checkpoint_s=rng.choice((10.0, 60.0, 300.0)),
        feedback=rng.choice(DARK_FEEDBACK),
    )
    return toy_plan(seed, schedule, wire, calm_s=BRISK_CALM_S)


def run_schedule(
    seed: int, schedule: Schedule, meddler: Meddler | None = None, wire: Wire = INT8, *, keep: bool = True
) -> Report:
    """Simulate a schedule; the seed draws keys, speeds and what the network does. `keep`: the log is kept."""
    return simulate(toy_plan(seed, schedule, wire), keep=keep, meddler=meddler)


def run_seed(seed: int, *, keep: bool = True) -> Report:
    """Simulate one seed from beginning to end."""
    return run_plan(toy_plan(seed, drawn_schedule(seed)), keep=keep)


def run_brisk(seed: int, *, keep: bool = True) -> Report:
    """Simulate one seed of the brisk kind from beginning to end."""
    return run_plan(brisk_plan(seed), keep=keep)


def run_dark(seed: int, *, keep: bool = True) -> Report:
    """Simulate one seed in which everybody loses power at once."""
    return run_plan(dark_plan(seed), keep=keep)


def run_plan(plan: Plan, *, keep: bool = True) -> Report:
    """Simulate a plan, and look at its logs when it is over. `keep`: the log is kept."""
    keys = [signer.peer_id.hex() for signer in plan.outfit.signers]
    witness = Witness(keys)
    report = simulate(plan, sink=witness, keep=keep)
    add_what_logs_show(report, witness, keys)
    return report


def main() -> None:
    soak("chaos", __doc__, {"chaos": run_seed, "brisk": run_brisk, "dark": run_dark}, _told)


def _told(report: Report) -> str:
    return (
        f"{report.num_peers:2d} peers, {len(report.schedule):3d} faults, {report.commits:3d} commits, {report.rounds:3d} rounds,"
        f" {report.missed:3d} missed"
    )


if __name__ == "__main__":
    main()
