"""What a swarm agrees on, as a node of it needs it: from the manifest by `recipe`, of one stage's chain by `stage_recipe`."""

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.compression.policy import FlatCodec
from farflung.node.trainer import Pace
from farflung.protocol.chain import Commit
from farflung.protocol.manifest_sections import FeedbackSpec
from farflung.protocol.settings import Settings
from farflung.training.rules import OuterRule, Sgd, grown


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """See the module."""

    settings: Settings
    """The protocol's rules."""
    pace: Pace
    """The rhythm of training."""
    uplink: FlatCodec
    """Of contributions."""
    downlink: FlatCodec
    """Of means."""
    feedback: FeedbackSpec
    outer: OuterRule
    """What moves outer parameters in a round of two contributors."""
    growth: float = 0.0
    """With whose number its rate grows, as an exponent."""
    last: FlatCodec | None = None
    """Of both directions in the last round of the run; None: as always."""
    fellows: int = 8
    """Newcomers that a newcomer asks, at the same time, for chunks of the outer state that they have; 0: members only."""
    meet_every: int = 0
    """Of so many rounds of a fragment one is a meeting with another group; 0: none is."""

    def rule(self, commit: Commit) -> OuterRule:
        """What moves outer parameters in the round that `commit` carries."""
        result = commit.round
        tokens = [] if result is None else [one.tokens for one in result.contributors]
        return self._rule(tokens, last=self.settings.rules.ended_by(commit))

    def next_rule(self, head: Commit) -> OuterRule:
        """The same of the round after `head`, if all of its view contribute alike."""
        return self._rule([1] * len(head.view), last=self.settings.rules.is_last(head))

    def _rule(self, tokens: Sequence[int], *, last: bool) -> OuterRule:
        """What peers have kept until the last round is too late for momentum: then it is the plain mean, and the run ends where the peers are together."""
        return Sgd(lr=1.0) if last and self.feedback.uplink == "kept" else grown(self.outer, self.growth, tokens)
