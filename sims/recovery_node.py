"""What a peer of one stage recovers with and helps others to recover: a node's own parts, without its trainer, chain and daemon. See `recovery_live`."""

import asyncio
import hashlib
from dataclasses import dataclass, field

from torch import Tensor

from farflung.compression.digest import digest_of
from farflung.node.donor import Donor
from farflung.node.door import Doors
from farflung.node.events import Event, EventLog
from farflung.node.imprints import Imprints, serve_imprints
from farflung.node.outside import Outside
from farflung.node.recipe import HEARTBEAT_S, Recipe, read_recipe
from farflung.node.renewal import Renewal
from farflung.node.sealed_mail import PipelineMail
from farflung.node.shadows import FETCH_S, Shadows, Shelf, serve_shelf
from farflung.node.stage_recipe import stage_recipe
from farflung.protocol import pipeline_messages
from farflung.protocol.errors import RemoteError
from farflung.protocol.keys import Ed25519Signer, PeerId, short
from farflung.protocol.lives import Counters, Life
from farflung.protocol.manifest import Manifest
from farflung.protocol.manifest_sections import AdmissionSpec, DataSpec, InnerSpec, ModelSpec, PipelineSpec
from farflung.protocol.pipeline_messages import Domains, Load, Present
from farflung.protocol.roll import Roll
from farflung.sims.hub import MemoryHub
from farflung.sims.learners import SimStageLearner
from farflung.sims.network import MemoryNetwork
from farflung.sims.recovery_keepers import BOUNDARY, pipeline_nbytes
from farflung.sims.recovery_tiers import Tier
from farflung.sims.swarm import START_UNIX_S
from farflung.sims.toy import MemoryStorage, VirtualDoor
from farflung.training.flat import unflatten
from farflung.training.methods import DEFAULT
from farflung.training.runtime import Runtime

ROUND_STEPS = DEFAULT.inner_steps
"""H of the method `default` where every peer holds all of the model; in stages `farflung create` takes half (`node.manifest_filling`)."""


@dataclass(kw_only=True, slots=True)
class Scene:
    """What all nodes have in common."""

    tier: Tier
    recipe: Recipe
    hub: MemoryHub
    step: int = 0
    """Of the pipeline, the next one."""
    round_step: int = 0
    """Up to which the last round counts."""
    version: int = 0
    """That it made, in every stage."""
    lives: dict[int, Life] = field(default_factory=dict)
    """By stage that was lost, the newest, as all chains have them; of stage 0 the one that the others have called."""

    def region(self, stage: int) -> str:
        """Of a stage's peer; a data node that is never lost stands apart."""
        number = stage - self.tier.safe_ends
        return "data" if number < 0 else self.tier.regions[number]


class Node:
    """What a peer of one stage recovers with, and helps others to."""

    def __init__(self, scene: Scene, stage: int, number: int) -> None:
        """`number`: of the stage's life, which this one begins."""
        self._scene = scene
        self.stage = stage
        self.signer = Ed25519Signer(hashlib.sha256(f"bench recovery {stage} {number}".encode()).digest())
        self.id: PeerId = self.signer.peer_id
        swarm, stages = scene.recipe, scene.recipe.manifest.pipeline.stages
        self.life = Life(stage, number, self.id, Counters(version=scene.version, steps=scene.round_step))
        self.recipe = stage_recipe(swarm, stage)
        self.learner = SimStageLearner(self.recipe.learner(None, Runtime()))
        self.service = self.recipe.service(self.learner)
        self.network = MemoryNetwork(scene.hub, self.id)
        self.roll = Roll(swarm.swarm, swarm.manifest.founder, self.id, stages, HEARTBEAT_S)
        self.shelf, self.imprints = Shelf(), Imprints()
        self.norm = 0.0
        self.rung, self.recovered_bytes = "", 0
        self._door = VirtualDoor(lambda name: 0.0)
        self._doors = Doors(learner=self._door, side=self._door, journal=self._door, digest=self._door)
        self._log = EventLog(None, swarm="bench", peer=short(self.id), clock=scene.hub.loop.time)
        self._log.subscribe(self._on_event)
        self._digest = b""
        self._domains = Domains(region=scene.region(stage), owner=f"owner-{stage}")  # as told at `join --region`

    @property
    def was_made_of_others(self) -> bool:
        """And learns faster for a while."""
        return self.learner.made_of_others_at is not None

    def serve(self) -> None:
        """Begin what a peer of the stage does."""
        scene = self._scene
        self.shadows = Shadows(
            network=self.network,
            roll=self.roll,
            recipe=self.recipe,
            learner=self.learner,
            doors=self._doors,
            shelf=self.shelf,
            log=self._log,
            refused=_refused,
            present=self.present,
            step=lambda: scene.step,
            trained=lambda: scene.step,
            step_bytes=pipeline_nbytes(scene.tier),
        )
        steady = asyncio.Event()
        steady.set()
        self._donor = Donor(self.network, self.learner, lambda: scene.version, steady)
        self._donor.serve(_refused, _admitted, FETCH_S)
        serve_imprints(self.network, self.imprints, self.service.forward, self._door, _admitted, _refused)
        serve_shelf(
            self.network,
            self.shelf,
            _admitted,
            _refused,
            roll=self.roll,
            side=self._door,
            log=self._log,
            stage=self.stage,
            own=self.shadows.own,
        )
        self.is_changed()

    def train(self, flat: Tensor, *, is_round: bool) -> None:
        """The stage's parameters, fp32 [n], are these now; and the outer ones."""
        replica = self.learner.replica
        unflatten(replica.layout, flat, replica.parameters)
        if is_round:
            self.learner.outer.params.copy_(flat)
            self.is_changed()

    def is_changed(self) -> None:
        """There are other outer parameters."""
        digests = self.learner.outer.chunk_digests()
        self._donor.remember(self._scene.version, digests)
        self._digest = digest_of(*digests)

    async def begin(self) -> None:
        """The stage anew."""
        recipe = self._scene.recipe
        outside = Outside(
            network=self.network,
            mail=PipelineMail(self.network, self.signer, recipe.swarm, pipeline_messages.decode),
            roll=self.roll,
            shelf=self.shelf,
            admission=b"",
            domains=self._domains,
            admits=lambda peer, token: True,
            refused=_refused,
        )
        renewal = Renewal(outside, self.recipe, self.life, self.learner, None, False, self._doors, self._log)
        await renewal.run(self.signer, MemoryStorage())  # nobody else begins this life

    def present(self) -> Present:
        """What it says of itself."""
        scene = self._scene
        clock, own = scene.tier.clock, self.recipe.own.num_parameters
        visits = self.recipe.pipeline.visits * self.recipe.pipeline.microbatches
        return Present(
            stage=self.stage,
            life=self.life.number,
            wants=-1,
            trains=True,
            free=True,
            step=scene.step,
            window=b"",
            finished=False,
            version=scene.version,
            digest=self._digest,
            forward_s=clock.iteration_s / (3 * visits),  # a backward takes as long as two
            up_bytes_per_s=clock.link_bytes_s * own / clock.stage_parameters,
            admission=b"",
            addresses=(
                f"/ip4/{20 + self.stage}.{self.life.number % 250}.0.1/tcp/4001",
            ),  # each in a network of its own
            appointments=(),
            peers=(),
            lives=tuple(scene.lives.values()),
            lost=(),
            step_s=clock.iteration_s,
            losses_per_hour=self.roll.losses.per_hour,
            grad_norm=self.norm,
            shadows=self.shelf.copies,
            since=0,
            load=Load(0.0, 0.0, 0.0),
            fits=(),
            domains=self._domains,
            call=scene.lives.get(0),
        )

    def _on_event(self, event: Event) -> None:
        if event["event"] == "stage.made":
            self.rung, self.recovered_bytes = event["rung"], event["bytes"]


def recipe_of(tier: Tier, seed: int) -> Recipe:
    """Of a swarm that trains the tier's model; a layer more at a data node that is never lost, see `recovery_live`."""
    model, boundary = tier.model, BOUNDARY.format(width=tier.model.dim)
    layers = (*[1] * tier.safe_ends, *[tier.layers] * tier.stages)
    founder = Ed25519Signer(hashlib.sha256(b"bench recovery 0 0").digest()).peer_id
    return read_recipe(
        Manifest(
            name="bench-recovery",
            founder=founder,
            created=int(START_UNIX_S),
            model=ModelSpec(
                vocab_size=model.vocab_size,
                dim=model.dim,
                num_layers=sum(layers),
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                ffn_dim=model.ffn_dim,
                seq_len=model.seq_len,
                init_seed=seed,
            ),
            data=DataSpec(spec=tier.data, content_hash=bytes(32), num_samples=1 << 20),
            batch_tokens=tier.microbatches * tier.sequences * model.seq_len,
            total_steps=tier.warm_steps + tier.steps + ROUND_STEPS,
            inner_steps=ROUND_STEPS,
            inner=InnerSpec(lr=tier.lr, warmup_steps=tier.rise_steps),
            pipeline=PipelineSpec(
                stages=len(layers),
                layers=layers,
                microbatches=tier.microbatches,
                forward_codec=boundary,
                backward_codec=boundary,
            ),
            admission=AdmissionSpec(rule="open"),
        )
    )


def _admitted(peer: PeerId) -> bool:
    return True


def _refused(error: RemoteError) -> None:
    raise error  # honest nodes refuse each other nothing
