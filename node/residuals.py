"""What this node's codecs have left unsent, in both directions, and the encoding that makes up for it.

The *uplink* is our contribution to the owners of parts, the *downlink* the mean of a part that we own. The manifest says in which of
them there is error feedback (`farflung.compression.feedback`, EF14), with which decay, and after how many rounds it starts. Where there is none,
the codec encodes by itself, and nothing is kept.

With `kept` an uplink's remainder is nobody's memory: our own contribution, encoded, is remembered until a commit counts it, and `told` says
what it told the others. The rest then stays in the local parameters (`training.coupled`). If it is not remembered, because the node was killed
in between, one remainder is lost, as below.

The fate of what a plan leaves behind is that of the plan:

    a commit counts our contribution       the residuals of the parts that it kept are committed
    a commit keeps a mean that we encoded  that mean's residual is committed
    a commit keeps one that is not reduced what we owe of it waits: nothing was added, and nothing left out (`compression.unreduced`)
    anything else                          nothing has happened: the plan's residuals are given up, for the progress itself comes back

The plan of a commit may be another than the last one that was encoded: the node was killed in between, or the plan had been given up and was voted
for after all. Then what we owed for these elements has been sent, and what that round left out is lost: one residual at most, each time.

A mean that is void (`protocol.participation`) is encoded again, and what is pending of it with it. Only a node that is killed right after a checkpoint
that fell between the two goes on with what the void one left out, in one part of one round.

The uplink's residual fades (decay) with every round of the swarm that goes by without our contribution, where that round moved something: as fast as with
contributions, of which each meets one fragment. What the rounds of a long absence have moved nobody may know any more: then it is a P-th of the
vector each. The downlink's does not fade: it waits for its owner's next turn, and that is no absence.

Everything here blocks and belongs to the side door, one call at a time, for what is encoded there becomes what is settled here.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from farflung.compression import unreduced
from farflung.compression.aggregate import Contribution
from farflung.compression.codec import Payload
from farflung.compression.feedback import ErrorFeedback, Slice
from farflung.compression.policy import FlatCodec
from farflung.protocol.chain import RoundResult
from farflung.protocol.keys import PeerId
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.training.errors import DamagedCheckpoint


class Residuals:
    """See the module."""

    def __init__(
        self,
        me: PeerId,
        *,
        uplink: FlatCodec,
        downlink: FlatCodec,
        spec: FeedbackSpec,
        version: Callable[[], int],  # of the outer state that the node has: rounds until now
        fragments: int,  # P, that take turns
    ) -> None:
        self._me = me
        self._fragments = fragments
        self._spec = spec
        self._version = version
        self._codecs = {"up": uplink, "down": downlink}
        wanted = {"up": spec.uplink, "down": spec.downlink}
        self._feedbacks = {
            way: ErrorFeedback(codec, decay=spec.decay)
            for way, codec in self._codecs.items()
            if wanted[way] == "residual"
        }

        self._expected: dict[bytes, dict[str, FlatCodec]] = {}
        """Codecs of plans that are not over."""
        self._sent: tuple[bytes, FlatCodec, dict[int, Payload]] = b"", uplink, {}
        """Plan, its codec, and by start of the part our contribution to it, when the rest of it is to stay with us."""

        self._unreduced: tuple[bytes, set[Slice]] = b"", set()
        """Plan, and its parts whose means were sent as what they are made of."""

    @property
    def keeps_contributions(self) -> bool:
        """Whether there is feedback for contributions."""
        return "up" in self._feedbacks

    def expect(self, plan_id: bytes, uplink: FlatCodec, downlink: FlatCodec) -> None:
        """What is encoded for a plan has these codecs, until `forget`: the last round of a run may have its own. Others have the usual ones. This and `forget`
        may be called from anywhere."""
        self._expected[plan_id] = {"up": uplink, "down": downlink}

    def forget(self, plan_id: bytes) -> None:
        """A plan is over."""
        self._expected.pop(plan_id, None)

    def begin(self, plan_id: bytes) -> None:
        """We are about to contribute to a plan: what is pending of an earlier one is given up, before this one takes memory."""
        self._feedbacks["up"].begin(plan_id)

    def encode_contribution(self, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        """The payload of a part of our pseudo-gradient, fp32 [n] from element `start` on. `x` is taken over. Raises CodecError."""
        payload = self._encode("up", plan_id, x, start)
        if self._spec.uplink == "kept":
            if self._sent[0] != plan_id:
                self._sent = plan_id, self._codec("up", plan_id), {}
            self._sent[2][start] = payload
        return payload

    def encode_mean(self, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        """The payload of the mean of a part that we own, as `encode_contribution`."""
        self._unreduced_of(plan_id).discard((start, start + x.numel()))
        return self._encode("down", plan_id, x, start)

    def pack_mean(self, plan_id: bytes, start: int, numel: int, contributions: Sequence[Contribution]) -> memoryview:
        """The payload of the mean of a part that we own as what it is made of. Raises ValueError as `unreduced.pack`."""
        self._unreduced_of(plan_id).add((start, start + numel))
        return unreduced.pack(numel, contributions)

    def _unreduced_of(self, plan_id: bytes) -> set[Slice]:
        if self._unreduced[0] != plan_id:
            self._unreduced = plan_id, set()
        return self._unreduced[1]

    def _encode(self, way: str, plan_id: bytes, x: Tensor, start: int) -> memoryview:
        feedback = self._feedbacks.get(way)
        if feedback is None or not self._started:
            return self._codec(way, plan_id).part(start, start + x.numel()).encode(x)
        feedback.codec = self._codec(way, plan_id)
        if feedback.round != plan_id:
            feedback.begin(plan_id)
        return feedback.encode_(x, start)

    def _codec(self, way: str, plan_id: bytes) -> FlatCodec:
        return self._expected.get(plan_id, self._codecs)[way]

    @property
    def _started(self) -> bool:
        return self._version() >= self._spec.after_rounds

    @property
    def owed(self) -> float | None:
        """What the contribution that is in flight has left out, its norm in norms of the pseudo-gradient; None without feedback."""
        return self._feedbacks["up"].left_out if "up" in self._feedbacks and self._started else None

    # ---- what became of it -------------------------------------------------------------------------------------

    def told(self, result: RoundResult) -> dict[int, Tensor] | None:
        """What our contribution to a committed round told the others, by start of the part, fp32; None when nothing is to stay with us."""
        plan, codec, payloads = self._sent
        if plan != result.plan:
            return None
        return {
            start: codec.part(start, stop).decode(payloads[start], stop - start)
            for start, stop in _slices(result)
            if start in payloads
        }

    def settle(self, result: RoundResult) -> None:
        """This round was committed, after all those that were settled before."""
        if not self._started:
            return
        if "up" in self._feedbacks:
            if self._counted(result):
                self._feedbacks["up"].commit(result.plan, _slices(result))
            else:
                self._absent(1, _slices(result))
        if "down" in self._feedbacks:
            plan, left = self._unreduced
            waits = left if plan == result.plan else set()
            owned = [part for part in _slices(result, owner=self._me) if part not in waits]
            self._feedbacks["down"].commit(result.plan, owned)

    def catch_up(self, results: Sequence[RoundResult], rounds: int) -> None:
        """So many rounds were committed while we were away; these results of them, in order, are known."""
        for result in results:
            if self._counted(result) or _slices(result, owner=self._me):
                self.settle(result)
            else:
                self._absent(1, _slices(result))
        if "down" in self._feedbacks:
            self._feedbacks["down"].rollback()
        self._absent((rounds - len(results)) / self._fragments)

    def _absent(self, rounds: float, parts: Sequence[Slice] | None = None) -> None:
        if "up" in self._feedbacks:
            self._feedbacks["up"].rollback()
            self._feedbacks["up"].age(rounds, parts)

    def _counted(self, result: RoundResult) -> bool:
        return any(contribution.peer == self._me for contribution in result.contributors)

    # ---- on disk -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors for a file that is written before the next `settle` or `catch_up`; empty without feedback."""
        return {
            f"{way}.{name}": tensor
            for way, feedback in self._feedbacks.items()
            for name, tensor in feedback.state().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, with the same bits; from nothing, as a stage does that was made of others. Raises DamagedCheckpoint when it is not
        of this swarm."""
        if not state:
            return
        known = {name.partition(".")[0] for name in state}
        if known != set(self._feedbacks):
            raise DamagedCheckpoint(
                f"residuals of {sorted(known)} were saved, the manifest has {sorted(self._feedbacks)}"
            )
        for way, feedback in self._feedbacks.items():
            own = {name.partition(".")[2]: tensor for name, tensor in state.items() if name.startswith(f"{way}.")}
            try:
                feedback.load(own)
            except ValueError as error:
                raise DamagedCheckpoint(f"saved residuals: {error}") from error


def _slices(result: RoundResult, *, owner: PeerId | None = None) -> list[Slice]:
    """The parts that a round kept, of this owner or of all."""
    return [(part.start, part.stop) for part in result.parts if part.digest and owner in (None, part.owner)]
