"""Before a peer can be part of a pipeline it has to know its stage, and who began that stage's chain.

It asks whoever it knows (`Present` without a stage), hears how many peers serve each stage and what steps cost them, and takes the stage that needs it
most, among those that fit its memory (`balance.neediest`). Then it says what it wants, and looks once more: those who were told count newcomers too,
so of several who come at once the later ones see that the place is taken, and choose again when another stage needs them more then.

It goes in when somebody has the state of that stage, or when it is itself to begin it: a stage that nobody has begun yet the founder's node lets the first begin who
wants it (`protocol/appointment.py`), one that was lost the data nodes (`protocol/lives.py`), and till then it waits here. So does who has begun a life and
lost its state (`remains.spent`), until somebody else has that, or the next life is begun.
"""

import asyncio
from collections.abc import Callable, Collection

from farflung.node.outside import Outside
from farflung.protocol.balance import Scene, neediest
from farflung.protocol.lives import Life
from farflung.protocol.pipeline_messages import Present
from farflung.protocol.progress import newest_step

ASK_S = 1.0
"""Between two questions: messages may be lost, and peers may just be starting."""

GATHER_S = 0.5
"""After the first answer, before the first choice: what steps cost is each peer's own to tell."""

UNANSWERED = 5
"""So many questions in a row that nobody answers are not lost by chance."""


class Entrance:
    """See the module. `run` once, before there is a peer."""

    def __init__(
        self, outside: Outside, fits: Collection[int], *, spent: Callable[[Life], bool], say: Callable[[str], None]
    ) -> None:
        """`fits`: stages that may be taken; one, when it was chosen by a person. `spent`: whether we began a life once, and its state is lost. `say` is
        called with what keeps answers away, once as long as it lasts."""
        self.reason = "asks who serves which stage"
        """What it waits for: a sentence for people."""
        outside.wants, outside.fits, outside.makes = -1, frozenset(fits), 0
        self._outside = outside
        self._roll = outside.roll
        self._fits = fits
        self._spent = spent
        self._say = say
        self._unanswered = 0
        """Questions since anybody answered."""
        self._told = False
        """What is wrong with our clock, since it is."""
        self._counts: list[int] = []
        """Peers of each stage, those included who want it, by what we were told since we last said what we want."""
        self._news = asyncio.Event()

    async def run(self) -> Life:
        """The life of the stage to take."""
        self._outside.listen(self._heard)
        while True:
            self._outside.say()
            try:
                async with asyncio.timeout(ASK_S):
                    await self._news.wait()
            except TimeoutError:
                self._tell_of_clock()
                continue
            if self._outside.wants < 0:
                await asyncio.sleep(GATHER_S)
            self._news.clear()
            if (called := self._called()) is not None:
                return called
            if self._choose():
                continue
            wanted = self._outside.wants
            life = self._roll.life(wanted)
            now = self._outside.now()
            if life is not None and (self._is_ours(life) or self._roll.holders(wanted, now) is not None):
                return life
            self.reason = f"waits until somebody has stage {wanted}, or we are to begin it"
            await asyncio.sleep(ASK_S)

    def _tell_of_clock(self) -> None:
        self._unanswered += 1
        trouble = self._outside.network.clock_trouble()  # it counts peers and rounds, so its words change
        if trouble and not self._told and self._unanswered >= UNANSWERED:
            self._told = True
            self._say(f"nobody answers: {trouble}")
        elif not trouble:
            self._told = False

    def _called(self) -> Life | None:
        """A life that we are to begin, whatever we wanted."""
        roll, now = self._roll, self._outside.now()
        mine = [life for life in roll.renewed.values() if life.stage in self._fits and self._is_ours(life)]
        return next((life for life in mine if roll.holders(life.stage, now) is None), None)

    def _is_ours(self, life: Life) -> bool:
        """Whether we are to begin it, or have it."""
        return life.founder == self._roll.me and not self._spent(life)

    def _choose(self) -> bool:
        """Want something else than so far, if that is better."""
        counts, wanted = list(self._counts), self._outside.wants
        if wanted >= 0:
            counts[wanted] -= 1  # that is us
        best = neediest(self._scene(), counts, self._fits, self._roll.me, wanted)
        if best == wanted:
            return False
        self._outside.wants, self._counts = best, []
        return True

    def _scene(self) -> Scene:
        """What peers of the stages say of themselves. What a stage computes matters to those only who move from one to another."""
        roll, now = self._roll, self._outside.now()
        serving = [peer for stage in range(roll.stages) for peer in roll.serving(stage, now)]
        return Scene(
            said={peer: said for peer in serving if (said := roll.present(peer)) is not None},
            weights=(1.0,) * roll.stages,
            state_bytes=(0,) * roll.stages,
            founder=roll.founder,
            step=newest_step(roll, now),
            steps_left=0,
        )

    def _heard(self, message: Present) -> None:
        self._unanswered = 0
        if message.stage >= 0 and len(message.peers) == self._roll.stages and message.reply:
            known = self._counts or [0] * self._roll.stages
            self._counts = [max(pair) for pair in zip(known, message.peers, strict=True)]
            self._news.set()
