"""Small swarms with a pipeline under seeded misfortune: whole stages are lost, and whoever mends that is hit, too (`stage_losses`). What `make soak` runs by the hundred.

Nodes are as they are, the model is of a few layers that learn to count, time is virtual. In the end links are well again, the machines of stage 0 are there, and others,
newcomers or some that were gone, until there is one more than stages: then every stage has to be served again and all have to train on, within `PATIENCE_S`. Run by hand:

    python -m farflung.sims.chaos_pipeline --seeds 1000 --repeat-every 10   # `make soak`
    python -m farflung.sims.chaos_pipeline --kind dark --seeds 500 --repeat-every 10   # as well: among the blows, all machines lose power at once
    python -m farflung.sims.chaos_pipeline --seed 17 --events               # one of them, with its log
    python -m farflung.sims.chaos_pipeline --seed 17 --twice                # and once more: the log has to be the same
"""

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from farflung.compression import kernels
from farflung.node.events import Event
from farflung.node.paths import resolve_paths
from farflung.node.race import until_first
from farflung.node.recipe import Recipe
from farflung.protocol.keys import Ed25519Signer
from farflung.sims.aftermath import add_what_logs_show
from farflung.sims.clock import ClockError
from farflung.sims.faults import Fault
from farflung.sims.links import LinkModel
from farflung.sims.pipeline_health import lacks
from farflung.sims.pipeline_small import Counting, recipe
from farflung.sims.pipeline_swarm import PipelineSwarm, simulate
from farflung.sims.simulation import Report
from farflung.sims.soak import soak
from farflung.sims.stage_losing import Misfortune
from farflung.sims.stage_losses import Scene, draw_scene
from farflung.sims.swarm import innermost, verdict
from farflung.sims.trail import Trail
from farflung.sims.witness import Witness

BEGIN_S = 300.0
"""Until a new swarm has made its first round in every stage."""

PATIENCE_S = 1200.0
"""Until all is well again: twice as long as members wait that were started again without a quorum (`lives.STARTING_S`)."""

ROUNDS_AFTER = 2
"""Of every stage, till all is well."""

STORY_S = 3600.0
"""Far longer than all blows of a scene take: a soak is not to hang."""

AWAY_S = 5.0
"""For which all machines have no power."""

LOOK_S = 1.0
"""Between two looks whether that is so."""


@dataclass(slots=True, kw_only=True)
class StageReport(Report):
    """And what became of stages."""

    stages: int
    begun_anew: int = 0
    """Lives beside the first ones."""
    recovery_s: float = 0.0
    """Of them after the last blow."""


def run_seed(seed: int, *, keep: bool = True) -> StageReport:
    """From beginning to end."""
    return run_scene(seed, draw_scene(seed), keep=keep)


def run_dark(seed: int, *, keep: bool = True) -> StageReport:
    """The same, but at some moment among its blows, or soon after them, all machines lose power at once, and later all of them come back."""
    scene = draw_scene(seed)
    return run_scene(
        seed, scene, keep=keep, dark_s=random.Random(f"{seed}/dark").uniform(0.0, scene.blows[-1].at + 120.0)
    )


def run_scene(
    seed: int,
    scene: Scene,
    *,
    keep: bool = True,
    stop_when_broken: bool = False,
    dark_s: float | None = None,  # when all lose power, seconds after the first rounds
) -> StageReport:
    """Simulate a scene; the seed draws keys and what the network does. `keep`: the log is kept."""
    kernels.prepare(resolve_paths().cache / "kernels")
    report = StageReport(seed, scene.num_peers, scene.describe(), stages=scene.stages)
    _Run(seed, scene, report, keep, stop_when_broken, dark_s).run()
    return report


class _Run:
    """The moving parts of one."""

    def __init__(
        self,
        seed: int,
        scene: Scene,
        report: StageReport,
        keep: bool,
        stop_when_broken: bool,
        dark_s: float | None,
    ) -> None:
        self._seed = seed
        self._scene = scene
        self._report = report
        self._signers = [
            Ed25519Signer(hashlib.sha256(f"{seed}/{number}".encode()).digest()) for number in range(scene.num_peers)
        ]
        self._keys = [signer.peer_id.hex() for signer in self._signers]
        self._witness = Witness(self._keys)
        self._trail = Trail(keep, self._witness, report.events)
        self._stops = stop_when_broken
        self._dark_s = dark_s
        self._is_broken = asyncio.Event()
        self._swarm: PipelineSwarm

    def run(self) -> None:
        scene, report, signers = self._scene, self._report, self._signers
        try:
            simulate(
                _recipe(scene, signers[0]),
                Counting(),
                signers,
                self._story,
                seed=self._seed,
                link=LinkModel(drop=scene.drop),
                wanted=dict(enumerate(scene.placed)),
                tied=scene.tied,
                checkpoint_s=scene.checkpoint_s,
                on_event=self._on_event,
                on_broken=self._on_broken,
            )
        except ClockError as error:
            report.violations.append("invariant {}: {}".format(*verdict(error)))
        except ExceptionGroup as group:
            crash = innermost(group)
            report.violations.append(f"invariant 8: a peer crashed: {type(crash).__name__}: {crash}")
        report.log_sha256 = self._trail.sha256
        add_what_logs_show(report, self._witness, self._keys, lossy=scene.drop > 0.0)

    async def _story(self, swarm: PipelineSwarm) -> None:
        self._swarm = swarm
        broken = [self._is_broken.wait()] if self._stops else []
        await until_first(self._tell(swarm), *broken)
        for peer in swarm.hub.running():
            swarm.hub.resume(peer)  # whoever is stopped cannot end

    async def _tell(self, swarm: PipelineSwarm) -> None:
        report = self._report
        for peer in range(len(self._scene.placed)):
            swarm.start(peer)
        stages = range(self._scene.stages)
        if await self._until(lambda: all(swarm.rounds().get(stage, 0) >= 1 for stage in stages), BEGIN_S):
            misfortune = Misfortune(self._scene, swarm, self._on_fault)
            try:
                async with asyncio.timeout(STORY_S):
                    if self._dark_s is None:
                        await misfortune.run()
                        await misfortune.end()
                    else:
                        await misfortune.darken(self._dark_s, AWAY_S)
            except TimeoutError:
                self._on_broken(f"invariant 0: the blows were not over after {STORY_S:.0f} s")
                return
            report.recovery_s = await self._recover()
        else:
            self._on_broken(f"invariant 0: no round of every stage in {BEGIN_S:.0f} s: {swarm.rounds()}")
        report.rounds = max(swarm.rounds().values(), default=0)
        report.begun_anew = len({(e["stage"], e["life"]) for e in swarm.happened("stage.anew")})
        report.seconds = self._trail.now

    async def _recover(self) -> float:
        """Until all is well; how long that took."""
        swarm, began = self._swarm, self._trail.now
        before = swarm.rounds()

        def well() -> bool:
            rounds = swarm.rounds()
            on = all(rounds.get(stage, 0) >= before.get(stage, 0) + ROUNDS_AFTER for stage in range(self._scene.stages))
            return on and not lacks(swarm)

        if not await self._until(well, PATIENCE_S):
            said = "; ".join(lacks(swarm)) or f"rounds were {before} and are {swarm.rounds()}"
            self._on_broken(f"invariant 0: not well {PATIENCE_S:.0f} s after the last blow: {said}")
        return self._trail.now - began

    async def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Look now and then; False when it is not so in that time."""
        give_up_at = self._trail.now + seconds
        while not holds():
            if self._trail.now > give_up_at:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _on_fault(self, line: str, fault: Fault | None) -> None:
        self._trail.log(None, "fault", {"what": line})
        if fault is not None:
            self._report.faults.append(replace(fault, at=self._trail.now))

    def _on_event(self, peer: int, event: Event) -> None:
        self._trail.event(peer, event)
        self._report.note(self._trail.now, event)

    def _on_broken(self, what: str) -> None:
        self._report.violations.append(what)
        if self._report.broken_at is None:
            self._report.broken_at = self._trail.now
        self._trail.log(None, "invariant.broken", {"detail": what})
        self._is_broken.set()


def _recipe(scene: Scene, founder: Ed25519Signer) -> Recipe:
    """What the scene's swarm trains."""
    return recipe(
        stages=scene.stages,
        layers=scene.layers,
        founder=founder.peer_id,
        total_steps=1 << 20,
        delay_steps=scene.delay_steps,
        pipeline={
            "skip": 1.0 / scene.stages if scene.skips else 0.0,
            "shadows": scene.shadows,
            "routing": "dynamic" if scene.dynamic else "planned",
            "swaps": scene.swaps,
            "recovery": scene.recovery,
        },
    )


def main() -> None:
    soak("chaos_pipeline", __doc__, {"pipelines": run_seed, "dark": run_dark}, _told)


def _told(report: StageReport) -> str:
    return (
        f"{report.stages} stages, {report.num_peers:2d} peers, {len(report.schedule) - 2:2d} blows, {report.begun_anew} begun anew,"
        f" {report.rounds:3d} rounds, {report.missed:3d} missed, {report.seconds:5.0f} s, {report.recovery_s:4.0f} s to recover"
    )


if __name__ == "__main__":
    main()
