"""Our recovery: what live nodes decide with, beside the pipeline of the bench, in virtual time.

Nothing is decided here. Each stage has a node's own parts over an in-memory network (`network`, `clock`): a `Roll`, which counts who falls silent, a
`Shelf` and `Shadows`, which fetch what falls to them in the manifest's share of the bytes and in the codecs of `node/shadows.py`; and whoever begins a lost stage anew is
a `Renewal`: the ladder with what the nodes have measured, the trial on what neighbours remember (`Imprints`), the fit. Here they are only told what their daemon would tell them.

    after a step     time goes on by an iteration, everybody is heard, and looks once at what is due
    every H steps    a round: the outer parameters of every stage are what it has trained
    a loss           its node is gone with all that it held; another one, which holds nothing, begins the stage's next life

The bench's stages are the swarm's, and its stage 0 has the ends. Where these are safe, the bench's stage s is the swarm's stage s + 1, for a swarm has a data node before it,
that is never lost with all of its peers. A manifest wants a layer there, too; nobody computes with it.

What is not as in a swarm: a round of one peer with an outer learning rate of 1 and no momentum changes nothing, so that training is that of all other methods; all layers
have their round at once; and nothing is trained while a stage is found lost: `recovery_clock` charges for that time, though not for a wait for a neighbour. That a stage is lost, and who begins it anew,
its chains agree on at once, if enough stages are left to (`protocol/accord.py`). Links are fast, and said to be those of the clock, scaled from the published model's stage to
the bench's: so the ladder prices what it would there.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from torch import Tensor

from farflung.node.imprints import STEPS, Imprint
from farflung.protocol import accord
from farflung.protocol.headers import ImprintKey
from farflung.protocol.limits import MAX_IMPRINTS
from farflung.sims.clock import VirtualLoop
from farflung.sims.hub import MemoryHub
from farflung.sims.links import LinkModel
from farflung.sims.recovery_keepers import Sent
from farflung.sims.recovery_node import ROUND_STEPS, Node, Scene, recipe_of
from farflung.sims.recovery_pipeline import Pipeline
from farflung.sims.swarm import START_UNIX_S
from farflung.training.errors import Unrecoverable

Rounds = Sequence[tuple[int, list[Tensor]]]
"""Steps after which there was a round, and what the stages' peers had then (`Pipeline.held_by`)."""


class Live:
    """A keeper, see `recovery_keepers`. Bytes count from the end of what it was told of the steps before."""

    def __init__(self, pipeline: Pipeline, *, seed: int, before: Rounds) -> None:
        """`before`: the rounds of the undisturbed steps, since when shadows are kept; without any there is one now."""
        tier = pipeline.tier
        self._first = int(tier.safe_ends)
        """The swarm's number of the bench's stage 0."""
        self.sent, self.rungs, recipe = Sent(), Counter[str](), recipe_of(tier, seed)
        self._loop = VirtualLoop(start=START_UNIX_S)
        hub = MemoryHub(self._loop, random.Random(f"recovery live {seed}"), LinkModel())
        self._scene = Scene(tier=tier, recipe=recipe, hub=hub)
        self._begun = Counter[int]()
        self._nodes = [self._newcomer(stage) for stage in range(recipe.manifest.pipeline.stages)]
        for node in self._nodes:
            node.serve()
        self._received = 0
        """Bytes of shadows at nodes that are gone."""
        rounds, norms = dict(before), [part.norm for part in pipeline.stages]
        state = _state(pipeline)
        for step in range(min(rounds, default=tier.warm_steps), tier.warm_steps):
            self._after_step(step, rounds.get(step), norms, is_round=step in rounds)
        self._after_step(tier.warm_steps, state, norms, is_round=tier.warm_steps in rounds or not rounds)
        self._received -= self._shadow_bytes()

    def after_step(self, pipeline: Pipeline, step: int) -> None:
        """Let an iteration go by; the nodes look once what is due."""
        norms = [part.norm for part in pipeline.stages]
        self._after_step(step, _state(pipeline), norms, is_round=step % ROUND_STEPS == 0)
        self.sent.kept = self._shadow_bytes()

    def recover(self, pipeline: Pipeline, lost: frozenset[int], step: int) -> None:
        """By a new node for each, all at the same time. Raises Unrecoverable when so few are left that a swarm waits for the lost ones."""
        gone = {stage + self._first for stage in lost}
        self._check_enough(gone)
        for stage in gone:
            self._received += self._nodes[stage].shelf.received_bytes
            self._scene.hub.kill(self._nodes[stage].id)
        living = [node for node in self._nodes if node.stage not in gone]
        for stage in lost:
            self._remember(stage, pipeline, gone)
        for stage in gone:
            self._nodes[stage] = self._newcomer(stage)
        new = [self._nodes[stage] for stage in sorted(gone)]
        lives = self._scene.lives | {node.stage: node.life for node in new}
        self._scene.lives = dict(sorted(lives.items()))
        self._nodes[0].roll.renew(
            self._scene.lives.values(), self._loop.time()
        )  # from its chain; all others believe them, or have called it
        self._hear(living)
        self._run(_all(self._renew(node) for node in new))
        for node in new:
            pipeline.replace_all(
                node.stage - self._first,
                node.learner.outer.params.clone(),
                bump=node.was_made_of_others,
                rises=node.learner.rises,
            )
            self.rungs[node.rung] += 1
            self.sent.recovered += node.recovered_bytes
        self.sent.kept = self._shadow_bytes()

    def _check_enough(self, gone: set[int]) -> None:
        """Whether the others may begin these stages anew."""
        stages = len(self._nodes)
        if not accord.enough(stages, set(range(stages)) - gone):
            raise Unrecoverable(
                f"of {stages} stages {len(gone)} are lost together, stage 0 among them or more than half: the others wait for one of them"
            )

    async def _renew(self, node: Node) -> None:
        """Begin its stage anew, and let the others hear it: one of them may be waiting for that."""
        await node.begin()
        node.serve()
        self._hear([node])

    def close(self) -> None:
        """End the nodes."""
        self._run(_all(node.network.close() for node in self._nodes))
        self._loop.close()

    def _after_step(
        self, step: int, state: list[Tensor] | None, norms: Sequence[float | None], *, is_round: bool
    ) -> None:
        """`state`: the stages' parameters, where they are known."""
        scene = self._scene
        scene.step = step
        if is_round:
            scene.round_step, scene.version = step, scene.version + 1
        if state is not None:
            for node, flat in zip(self._nodes[self._first :], state, strict=True):
                node.train(flat, is_round=is_round)
        for node, norm in zip(self._nodes[self._first :], norms, strict=True):
            node.norm = norm or 0.0
        self._run(asyncio.sleep(scene.tier.clock.iteration_s))
        self._hear(self._nodes)
        for node in self._nodes:
            node.roll.tick(self._loop.time())
        self._run(_all(node.shadows.look() for node in self._nodes))

    def _hear(self, saying: Sequence[Node]) -> None:
        """All hear these."""
        now, said = self._loop.time(), [(one.id, one.present()) for one in saying]
        for node in self._nodes:
            for peer, present in said:
                if peer != node.id:
                    node.roll.heard(peer, present, now)

    def _remember(self, stage: int, pipeline: Pipeline, gone: set[int]) -> None:
        """What the lost stage was given and made of it in the last step, by the nodes around it."""
        number = stage + self._first
        if number == 0:
            return  # what it was given are tokens
        before, after = number - 1, (number + 1) % len(self._nodes)
        for microbatch, pair in enumerate(pipeline.boundaries.get(stage, [])[: MAX_IMPRINTS // STEPS]):
            step = self._scene.step
            key = ImprintKey(step, step.to_bytes(32, "big"), microbatch)  # neighbours only compare the window
            for holder, x, output in ((before, pair[0], False), (after, pair[1], True)):
                if holder not in gone:
                    node = self._nodes[holder]
                    one = Imprint(x.shape[0], x.shape[1], bytes(node.service.forward.encode(x)))
                    node.imprints.keep(number, key, one, output=output)

    def _newcomer(self, stage: int) -> Node:
        self._begun[stage] += 1
        return Node(self._scene, stage, self._begun[stage] - 1)

    def _shadow_bytes(self) -> int:
        return self._received + sum(node.shelf.received_bytes for node in self._nodes)

    def _run(self, what: Coroutine[Any, Any, object]) -> None:
        self._loop.run_until_complete(what)
        self._loop.raise_failure()


def _state(pipeline: Pipeline) -> list[Tensor]:
    """What the stages' peers have, fp32 [n]."""
    return [pipeline.held_by(stage) for stage in range(pipeline.tier.stages)]


async def _all(doing: Iterable[Coroutine[Any, Any, object]]) -> None:
    await asyncio.gather(*doing)
